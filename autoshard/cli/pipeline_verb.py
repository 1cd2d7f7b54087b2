"""`autoshard pipeline`: plans stages, their devices and layouts, schedule and microbatches for a model on a cluster."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import active_children, get_context
from typing import Any

from autoshard.cli.app import OK, app, say_no
from autoshard.cli.arguments import Bandwidths, bandwidths, model_settings, parse_bytes
from autoshard.cli.loading import DEVICE, INTER, INTRA, load_api, load_report
from autoshard.cli.model import load_model
from autoshard.cli.output import Output
from autoshard.mesh import DEVICES_PER_NODE


@app.command()
def pipeline(
    model: str,
    devices: int | None = None,
    nodes: list[str] = [],  # noqa: B006 (typer makes a new one)
    settings: list[str] = [],  # noqa: B006
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    memory: list[str] = [],  # noqa: B006
    inference: bool = False,
    training: bool = False,
    intra_node_bandwidth: str = INTRA,
    inter_node_bandwidth: str = INTER,
    device: str = DEVICE,
    tf32: bool = False,
    devices_per_node: int = DEVICES_PER_NODE,
    workers: int = 2,
    dask: str | None = None,
    out: str | None = None,
    csv: str | None = None,
    plot: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
    **planning: Any,
) -> int:
    """Split MODEL into pipeline stages for a cluster: data x tensor x pipeline x microbatches and schedules, searched together.

    \b
    autoshard pipeline models/llama.py:llama3_70b --devices 16 --memory 80GB --out 70b.json --csv 70b.csv
    autoshard pipeline models/gpt2.py:small --set batch=64 --devices 6 --devices-per-node 6 --microbatches 4,8 --json
    autoshard pipeline models/unet.py:base --nodes 1x8:h100 --nodes 1x8:a100
    """
    if training and inference:
        raise ValueError("--train and --inference exclude each other; give one")
    links = bandwidths(intra_node_bandwidth, inter_node_bandwidth)
    cluster = _cluster(devices, nodes, device, devices_per_node, tf32, links)
    limits = [parse_bytes(written, "--memory") for written in memory]
    keywords = model_settings(settings, batch=batch, seq=seq, dtype=dtype)
    options = {**planning, "training": not inference, "assumptions": {"model": model, "set": keywords}}
    if limits:
        options |= {"memory_limit": limits[0], "budgets": tuple(limits[1:])}
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(model, keywords, training=not inference)
        api = load_api()
        with _executor(workers, dask) as executor:
            try:
                planned = api.plan(module, example_inputs, cluster, executor=executor, progress=output.progress, **options)
            except api.Infeasible as error:
                return say_no(output, error, {"configurations": []})
        _write(planned, output, out, csv, plot)
        output.answer(planned.to_dict(layouts=False), lambda: load_report().pipeline.pipeline_report(planned))
    return OK


def _write(planned: Any, output: Output, out: str | None, csv: str | None, plot: str | None) -> None:
    if out is not None:
        planned.save(out)
    if csv is not None:
        load_report().pipeline.write_csv(planned.configurations, csv)
    if plot is not None:
        load_report().pipeline.plot_speed_up(planned, plot)
    for path in filter(None, (out, csv, plot)):
        output.note(f"wrote {path}")


def _cluster(devices: int | None, nodes: Sequence[str], device: str, per_node: int, tf32: bool, links: Bandwidths) -> Any:
    """The cluster that the options describe."""
    from autoshard.pipeline import Cluster, Kind  # here: as in loading

    if devices is not None:
        return Cluster.of(devices, per_node, device=device, tf32=tf32, **links)
    kinds = []
    for written in nodes:
        match = re.fullmatch(r"(\d+)x(\d+)(?::(\w+))?", written.strip())
        if match is None:
            raise ValueError(f"--nodes is {written!r}; expected NODESxDEVICES:DEVICE, for example 2x8:h100")
        kinds.append(Kind(int(match[1]), int(match[2]), match[3] or device, tf32=tf32, **links))
    return Cluster(tuple(kinds))


def _executor(workers: int, dask: str | None) -> AbstractContextManager[Executor | None]:
    if dask is not None:
        try:
            from distributed import Client  # not a dependency of ours
        except ImportError:
            raise ValueError("--dask needs the package distributed, which is not installed: pip install distributed") from None
        return Client(dask).get_executor()
    if workers == 1:
        return nullcontext()
    return _workers(workers)


@contextmanager
def _workers(count: int) -> Iterator[Executor]:
    """Processes that ignore Ctrl-C; the main process handles it, ends them and prints the one line."""
    ignore = (signal.SIGINT, signal.SIG_IGN)
    # spawn: torch's threads don't survive a fork
    executor = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=signal.signal, initargs=ignore)
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the processes that start now inherit the blocked signal
    try:
        executor.submit(os.getpid)  # starts all of them
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    try:
        yield executor
        executor.shutdown()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in active_children():
            worker.terminate()
