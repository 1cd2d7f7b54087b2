"""Work on real processes: gloo ranks started by fork, what each of them returns or raises."""

import datetime
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=120)


def run_ranks(world: int, work: Callable, *args: Any, dies: int | None = None) -> list[Any]:
    """`work(rank, *args)` on so many ranks with a default process group: what each returns, an exception where it raised one.

    dies: a rank that is expected to end without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        processes = [context.Process(target=_rank, args=(rank, world, folder, partial(work, rank, *args))) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        assert not alive, f"ranks {alive} still run"
        found = []
        for rank in range(world):
            path = Path(folder) / f"{rank}.pkl"
            assert path.exists() or rank == dies, f"rank {rank} ended without a result"
            found.append(pickle.loads(path.read_bytes()) if path.exists() else None)
    return found


def results(world: int, work: Callable, *args: Any) -> list[Any]:
    """As `run_ranks`, where nothing may be raised."""
    found = run_ranks(world, work, *args)
    for made in found:
        if isinstance(made, Exception):
            raise made
    return found


def join_as_torchrun(rank: int, world: int, folder: str) -> None:
    """Makes this process a rank that tools which read torchrun's variables know."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    store = dist.FileStore(os.path.join(folder, f"store{world}"), world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=TIMEOUT)


def trained_on(inputs: tuple, module: Callable, optimizer: torch.optim.Optimizer) -> float:
    """The loss of one step, which is taken."""
    loss = module(*inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _rank(rank: int, world: int, folder: str, work: Callable) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=TIMEOUT)
    try:
        made = work()
    except Exception as error:
        made = error
    temporary = Path(folder) / f"{rank}.tmp"
    try:
        temporary.write_bytes(pickle.dumps(made))
    except Exception:  # an exception that holds something odd
        temporary.write_bytes(pickle.dumps(RuntimeError(repr(made))))
    temporary.rename(Path(folder) / f"{rank}.pkl")
    os._exit(0)  # no waiting for threads of a process group whose peer is gone
