"""`autoshard simulate`: the time line of a plan, or of a model on data x tensor x pipeline devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from autoshard.cli.app import OK, app
from autoshard.cli.arguments import bandwidths, model_settings
from autoshard.cli.loading import DEVICE, INTER, INTRA, load_api, load_cluster, load_device, load_plan, load_report, model_of
from autoshard.cli.model import check_sizes, load_model
from autoshard.cli.output import Output
from autoshard.cli.simulate_records import record_of_mlp, record_of_model, record_of_plan
from autoshard.mesh import Axis, Mesh

Grid = list[tuple[int, int, int, int]]  # data, tensor, pipeline, microbatches
MeshMaker = Callable[[tuple[int, int, int]], Mesh]  # of (pipeline, data, tensor)
AXES = ("pipeline", "data", "tensor")


@app.command()
def simulate(
    target: str,
    model: str | None = None,
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    trust: bool = False,
    data: str = "1",
    tensor: str = "1",
    pipeline: str = "1",
    microbatches: str = "1",
    schedule: str = "1f1b",
    chunks: int = 1,
    scheme: str = "auto",
    inference: bool = False,
    no_overlap: bool = False,
    no_join: bool = False,
    prefetch: int = 4,
    cluster: str | None = None,
    intra_node_bandwidth: str = INTRA,
    inter_node_bandwidth: str = INTER,
    device: str = DEVICE,
    tf32: bool = False,
    devices_per_node: int | None = None,
    constants: str = "physical",
    trace: str | None = None,
    picture: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """What a training step will take: seconds with overlap, memory, the bubble of a pipeline, and what sits on the critical path.

    \b
    autoshard simulate gpt2.json --trust --trace trace.json --picture timeline.png
    autoshard simulate models/gpt2.py:small --set batch=64 --data 2 --tensor 2 --pipeline 4 --microbatches 8
    autoshard simulate models/gpt2.py:small --set batch=64 --data 1,2,4 --pipeline 1,2,4 --microbatches 4,8 --json
    autoshard simulate models/gpt2.py:small --set batch=64 --data 1,2 --tensor 1,2 --pipeline 1,2 --cluster cluster.json
    autoshard simulate mlp --constants distir_3386edc --set layers=64 --set width=8192 --set batch=8192 --data 4 --tensor 4
    """
    if tf32 and (cluster is not None or not _is_model(target)):
        raise ValueError("--tf32 is for a model at prices of data sheets; a plan and a --cluster bring their own, so leave it out")
    keywords = model_settings(settings, batch=batch, seq=seq, dtype=dtype)
    grid = _configurations(data, tensor, pipeline, microbatches)
    how: dict[str, Any] = {"overlap": not no_overlap, "prefetch": prefetch}
    with Output(as_json=as_json, quiet=quiet) as output:
        if constants != "physical":
            unused = {"--trace": trace, "--picture": picture, "--cluster": cluster, "--no-join": no_join}
            simulated = Simulated(record_of_mlp(target, constants, keywords, grid, unused))
        elif _is_model(target):
            _check_model_words(target, model, no_join, cluster, devices_per_node)
            if cluster is None:
                links = bandwidths(intra_node_bandwidth, inter_node_bandwidth)
                mesh_of = _nodes(devices_per_node, device=load_device(device), tf32=tf32, **links)
            else:
                grid, mesh_of = _measured(cluster, grid, output)
            how |= {"schedule": schedule, "chunks": chunks, "scheme": scheme, "training": not inference}
            simulated = _of_model(target, keywords, grid, mesh_of, output, how)
        else:
            if grid != [(1, 1, 1, 1)]:
                raise ValueError(f"{target} is a plan, whose mesh is known; leave out --data, --tensor, --pipeline and --microbatches")
            simulated = _of_plan(target, model, keywords, trust, cluster, output, {**how, "join": not no_join})
        _write(simulated, trace, picture, output)
        critical = None if simulated.timeline is None or simulated.run is not None else simulated.timeline.critical_seconds
        output.answer(simulated.record, lambda: load_report().timeline.simulation_report(simulated.record, critical))
    return OK


class Simulated(NamedTuple):
    """The results as a record; the time line of the best one, and its run where there are several stages or microbatches."""

    record: dict
    timeline: Any = None
    run: Any = None


def _check_model_words(target: str, model: str | None, no_join: bool, cluster: str | None, devices_per_node: int | None) -> None:
    """ValueError on options that contradict each other, or have no meaning for a model."""
    if model is not None:
        raise ValueError(f"{target} is a model, and {model} too; give one of them, or a plan and its model")
    if no_join:
        raise ValueError(f"--no-join is for a plan, but {target} is a model, whose reductions are never joined; leave it out")
    if cluster is not None and devices_per_node is not None:
        raise ValueError(f"--devices-per-node {devices_per_node} and --cluster {cluster} both say what a node is; leave one out")


def _of_model(target: str, keywords: dict, grid: Grid, mesh_of: MeshMaker, output: Output, how: Mapping[str, Any]) -> Simulated:
    from autoshard.api import Parallel, simulate_grid  # here: torch takes seconds to import

    output.progress("building the model", 0.0)
    module, inputs = load_model(target, keywords, training=how["training"])
    simulations = simulate_grid(module, inputs, [Parallel(*numbers) for numbers in grid], mesh_of, progress=output.progress, **how)
    simulations.sort(key=lambda one: (not one.fits, one.seconds))
    return Simulated(record_of_model(simulations), simulations[0].timeline, simulations[0].run)


def _of_plan(
    target: str, model: str | None, keywords: dict, trust: bool, cluster: str | None, output: Output, how: Mapping[str, Any]
) -> Simulated:
    solution = load_plan(target, None)
    measured = None if cluster is None else load_cluster(cluster)
    written, keywords = model_of(solution, model, keywords, target, trust)
    output.progress("building the model", 0.0)
    module, inputs = load_model(written, keywords, training=solution.training)
    check_sizes(module, inputs, solution, target)
    timeline = load_api().simulate(module, inputs, solution, mesh=measured, progress=output.progress, **how)
    return Simulated(record_of_plan(solution, timeline, measured=measured is not None), timeline)


def _is_model(target: str) -> bool:
    return target.startswith("hf:") or ".py:" in target


def _configurations(*written: str) -> Grid:
    return list(product(*([int(number) for number in numbers.split(",")] for numbers in written)))  # type: ignore[arg-type]


def _nodes(devices_per_node: int | None, **prices: Any) -> MeshMaker:
    """A function that makes meshes of nodes of so many devices; by default a stage is a node."""

    def mesh_of(shape: tuple[int, int, int]) -> Mesh:
        per_node = devices_per_node or math.prod(shape[1:])
        return Mesh.from_bandwidths(shape, devices_per_node=per_node, axis_names=AXES, **prices)

    return mesh_of


def _measured(cluster: str, grid: Grid, output: Output) -> tuple[Grid, MeshMaker]:
    """The configurations that fill a measured cluster, and a function that makes their meshes.

    Degrees above 1 must be the cluster's axes, in the order pipeline, data, tensor. ValueError where no configuration fills the cluster.
    """
    measured = load_cluster(cluster)
    axes = [axis for axis in measured.axes if axis.size > 1]
    filling = [(d, h, p, k) for d, h, p, k in grid if [n for n in (p, d, h) if n > 1] == [axis.size for axis in axes]]
    shape = "x".join(map(str, measured.shape))
    if not filling:
        raise ValueError(f"{cluster} was measured as {shape}; expected --pipeline, --data and --tensor of these sizes, in this order")
    if len(filling) < len(grid):
        output.note(f"{len(filling)} of {len(grid)} combinations fill {cluster}, measured as {shape}; the others are left out")

    def mesh_of(shape: tuple[int, int, int]) -> Mesh:
        left = iter(axes)
        alone = [Axis(name, 1, 1.0, 0.0, backend=measured.axes[0].backend) for name in AXES]  # one device has no link
        return Mesh(tuple(replace(next(left), name=one.name) if n > 1 else one for n, one in zip(shape, alone)), measured.device)

    return filling, mesh_of


def _write(simulated: Simulated, trace: str | None, picture: str | None, output: Output) -> None:
    output.progress("writing", 0.95)
    if trace is not None:
        report = load_report()
        spans = report.trace_of(simulated.timeline) if simulated.run is None else report.trace_of_run(simulated.run)
        report.timeline.save_trace(spans, trace)
        output.note(f"wrote {trace}; open it in ui.perfetto.dev")
    if picture is not None:
        if simulated.run is None:
            load_report().timeline.draw_timeline(simulated.timeline, picture)
        else:
            load_report().timeline.draw_run(simulated.run, picture)
        output.note(f"wrote {picture}")
