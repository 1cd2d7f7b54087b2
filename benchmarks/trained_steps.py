"""Models of coverage.py trained for some steps on the ranks of one gloo group, in float64, against one process.

    python benchmarks/coverage.py --train [--only NAME ...] [--json]

All models run in one group of 2x2 ranks, which is started again only where it died. Each is planned on the first rank, over links so
fast that even tiny models are sharded; AdamW and SGD with momentum take turns. Compared are the loss of every step, and all parameters
and buffers after the last one, relative to their largest element or 1: what is off by no more than 1e-9 is rounding.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autoshard
from autoshard import api
from autoshard.mesh import Mesh
from benchmarks import strangers

SHAPE, STEPS, ALLOWED = (2, 2), 5, 1e-9
# links so fast that tiny models are sharded
FAST = {"intra_node_bandwidth": 1e14, "inter_node_bandwidth": 1e14, "intra_node_latency": 1e-9, "inter_node_latency": 1e-9}
OPTIMIZERS = {
    # eps: a gradient that is zero but for rounding, as of a bias before a norm, would be divided by about its own size
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def trained(names: list[str], limit: float = 300) -> list[dict[str, Any]]:
    """A row per model: model, kind, optimizer, sharded (tensors of the plan with a shard), loss_error, state_error, verdict."""
    rows: dict[str, dict] = {}
    while left := [name for name in names if name not in rows]:
        with tempfile.TemporaryDirectory() as folder:
            processes = [mp.get_context("spawn").Process(target=_rank, args=(rank, folder, left, limit)) for rank in range(4)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            made = {path.stem: pickle.loads(path.read_bytes()) for path in Path(folder).glob("*.row")}
        lost = {"verdict": "failed", "stopped": "the ranks ended without a result"}
        rows |= made or {left[0]: {"model": left[0], "kind": strangers.STRANGERS[left[0]].kind, **lost}}
    return [rows[name] for name in names]


def _rank(rank: int, folder: str, names: list[str], limit: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", rank=rank, world_size=4, store=store, timeout=timedelta(seconds=limit))
    mesh = init_device_mesh("cpu", SHAPE)
    for k, name in enumerate(names):
        kind, began = list(OPTIMIZERS)[k % len(OPTIMIZERS)], time.process_time()
        row = {"model": name, "kind": strangers.STRANGERS[name].kind, "optimizer": kind, "mode": "training"}
        lost = False
        try:
            row |= _compared(name, OPTIMIZERS[kind], mesh)
        except Exception as error:  # whatever it is, it is the row's
            said = " ".join(f"{type(error).__name__}: {error}".split())
            row |= {"verdict": "not capturable" if isinstance(error, ValueError) else "failed", "stopped": said}
            lost = not isinstance(error, ValueError)
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, row)
        stopped = [of for of in everyone if "stopped" in of]
        if rank == 0:
            path = Path(folder, f"{name}.row")
            path.with_suffix(".tmp").write_bytes(pickle.dumps((stopped or everyone)[0] | {"cpu_seconds": time.process_time() - began}))
            path.with_suffix(".tmp").rename(path)
        if lost or len({("stopped" in of) for of in everyone}) > 1:
            break  # collectives may be in flight: a new group goes on
    dist.barrier()
    os._exit(0)


def _compared(name: str, optimizer: Any, mesh: Any) -> dict[str, Any]:
    module, inputs = doubled(*strangers.build(name, True))
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            planned_for = Mesh.from_bandwidths(SHAPE, device="cpu", **FAST)
            message = [api.plan(module, inputs, planned_for, training=True, gap=0.01, baselines=False)]
        except Exception as error:  # all ranks raise it
            message = [error if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(message)
    if isinstance(solution := message[0], Exception):
        raise solution
    expected = steps(copy.deepcopy(module), copy.deepcopy(inputs), optimizer)
    found = steps(autoshard.parallelize(module, solution, mesh), copy.deepcopy(inputs), optimizer)
    sharded = sum("S" in layout for placed in solution.layouts.values() for layout in placed.outputs if layout is not None)
    errors = {key: difference(found[key], value) for key, value in expected.items()}
    of_loss = max(error for key, error in errors.items() if key.startswith("loss"))
    of_state = max((error for key, error in errors.items() if not key.startswith("loss")), default=0.0)
    verdict = "ok" if max(of_loss, of_state) <= ALLOWED else "wrong"
    return {"sharded": sharded, "loss_error": of_loss, "state_error": of_state, "verdict": verdict}


def doubled(module: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """The same in float64, complex numbers in complex128."""

    def wide(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.double() if x.is_floating_point() else x.to(torch.complex128) if x.is_complex() else x

    return module.double(), pytree.tree_map(wide, inputs)


def steps(module: nn.Module, inputs: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The loss of every step, and what parameters and buffers hold after the last."""
    chosen, found = optimizer([p for p in module.parameters() if p.requires_grad]), {}
    torch.manual_seed(0)  # what a model draws is to be what one process draws
    for k in range(STEPS):
        loss = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        found[f"loss {k}"] = loss
    found |= {f"state {name}": x for name, x in [*module.named_parameters(), *module.named_buffers()]}
    return {key: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for key, x in found.items()}


def difference(found: torch.Tensor, expected: torch.Tensor, least: float = 1.0) -> float:
    """The largest difference, relative to the largest element or `least`; inf for another shape and for what is not a number in one."""
    if found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0 or torch.equal(found, expected):
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.to(wide), expected.to(wide)
    apart = float((a - b).abs().max() / b.abs().max().clamp(min=least))
    return apart if apart == apart else float("inf")
