"""`autoshard pipeline`: plans stages, their devices and layouts, schedule and microbatches for a model on a cluster."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import active_children, get_context
from typing import Any

from autoshard import report
from autoshard.cli.app import OK, app, say_no
from autoshard.cli.loading import load_api
from autoshard.cli.model import load_model
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked


@app.command()
def pipeline(asked: Asked, output: Output) -> int:
    """Split MODEL into pipeline stages for a cluster: data x tensor x pipeline x microbatches and schedules, searched together.

    \b
    autoshard pipeline models/llama.py:llama3_70b --devices 16 --memory 80GB --out 70b.json --csv 70b.csv
    autoshard pipeline models/gpt2.py:small --set batch=64 --devices 6 --devices-per-node 6 --microbatches 4,8 --json
    autoshard pipeline models/unet.py:base --nodes 1x8:h100 --nodes 1x8:a100
    """
    if asked.training and asked.inference:
        raise ValueError("--train and --inference exclude each other; give one")
    trained, noted = not asked.inference, {"model": asked.model, "set": asked.settings}
    cluster = _cluster(asked)
    options = {**asked.planning, "training": trained, "assumptions": noted}
    if asked.memory:
        options |= {"memory_limit": asked.memory[0], "budgets": asked.memory[1:]}
    output.progress("building the model", 0.0)
    module, example_inputs = load_model(asked.model, asked.settings, training=trained)
    api = load_api()
    with _executor(asked.workers, asked.dask) as executor:
        try:
            planned = api.plan(module, example_inputs, cluster, executor=executor, progress=output.progress, **options)
        except api.Infeasible as error:
            return say_no(output, error, {"configurations": []})
    output.write(asked.out, planned.save)
    output.write(asked.csv, lambda path: report.pipeline.write_csv(planned.configurations, path))
    output.write(asked.plot, lambda path: report.pipeline.plot_speed_up(planned, path))
    output.answer(planned.to_dict(layouts=False), lambda: report.pipeline.pipeline_report(planned))
    return OK


def _cluster(asked: Asked) -> Any:
    """The cluster that the options describe."""
    from autoshard.pipeline import Cluster, Kind  # here: as in loading

    prices = {"tf32": asked.tf32, **asked.links}
    if asked.devices is not None:
        return Cluster.of(asked.devices, asked.devices_per_node, device=asked.device, **prices)
    return Cluster(tuple(Kind(nodes, devices, device or asked.device, **prices) for nodes, devices, device in asked.nodes))


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
