"""`autoshard simulate`: the time line of a plan, or of a model on data x tensor x pipeline devices."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from autoshard import report
from autoshard.cli.app import OK, app
from autoshard.cli.loading import load_api, load_cluster, load_device, load_plan, model_for
from autoshard.cli.model import load_model
from autoshard.cli.model_source import names_model
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.mesh import Axis, Mesh, shape_text

Grid = list[tuple[int, int, int, int]]  # data, tensor, pipeline, microbatches
MeshMaker = Callable[[tuple[int, int, int]], Mesh]  # of (pipeline, data, tensor)
AXES = ("pipeline", "data", "tensor")


@app.command()
def simulate(asked: Asked, output: Output) -> int:
    """What a training step will take: seconds with overlap, memory, the bubble of a pipeline, and what sits on the critical path.

    \b
    autoshard simulate gpt2.json --trust --trace trace.json --picture timeline.png
    autoshard simulate models/gpt2.py:small --set batch=64 --data 2 --tensor 2 --pipeline 4 --microbatches 8
    autoshard simulate models/gpt2.py:small --set batch=64 --data 1,2,4 --pipeline 1,2,4 --microbatches 4,8 --json
    autoshard simulate models/gpt2.py:small --set batch=64 --data 1,2 --tensor 1,2 --pipeline 1,2 --cluster cluster.json
    """
    grid = list(product(asked.data, asked.tensor, asked.pipeline, asked.microbatches))
    how: dict[str, Any] = {"overlap": not asked.no_overlap, "prefetch": asked.prefetch}
    if names_model(asked.target):
        if asked.model is not None:
            raise ValueError(f"{asked.target} is a model, and {asked.model} too; give one of them, or a plan and its model")
        grid, mesh_of = _measured(asked.cluster, grid, output) if asked.cluster is not None else (grid, _nodes(asked))
        how |= {"schedule": asked.schedule, "chunks": asked.chunks, "scheme": asked.scheme, "training": not asked.inference}
        simulated = _of_model(asked, grid, mesh_of, output, how)
    else:
        if grid != [(1, 1, 1, 1)]:
            raise ValueError(f"{asked.target} is a plan, whose mesh is known; leave out --data, --tensor, --pipeline and --microbatches")
        simulated = _of_plan(asked, output, {**how, "join": not asked.no_join})
    _write(simulated, asked, output)
    critical = None if simulated.timeline is None or simulated.run is not None else simulated.timeline.critical_seconds
    output.answer(simulated.record, lambda: report.timeline.simulation_report(simulated.record, critical))
    return OK


class Simulated(NamedTuple):
    """The results as a record; the time line of the best one, and its run where there are several stages or microbatches."""

    record: dict
    timeline: Any = None
    run: Any = None


def _of_model(asked: Asked, grid: Grid, mesh_of: MeshMaker, output: Output, how: Mapping[str, Any]) -> Simulated:
    from autoshard.api import Parallel, simulate_grid  # here: torch takes seconds to import

    output.progress("building the model", 0.0)
    module, inputs = load_model(asked.target, asked.settings, training=how["training"])
    impossible: dict[Any, ValueError] = {}
    configurations = [Parallel(*numbers) for numbers in grid]
    simulations = simulate_grid(module, inputs, configurations, mesh_of, impossible=impossible, progress=output.progress, **how)
    for why, count in Counter(map(str, impossible.values())).items():
        output.note(f"{count} of {len(grid)} combinations left out: {why}")
    simulations.sort(key=lambda one: (not one.fits, one.seconds))
    return Simulated(record_of_model(simulations), simulations[0].timeline, simulations[0].run)


def _of_plan(asked: Asked, output: Output, how: Mapping[str, Any]) -> Simulated:
    solution = load_plan(asked.target)
    measured = None if asked.cluster is None else load_cluster(asked.cluster)
    module, inputs = model_for(output, solution, asked, asked.target, of_any_shape=True)
    timeline = load_api().simulate(module, inputs, solution, mesh=measured, progress=output.progress, **how)
    anew = measured is not None or solution.dynamic_shapes is not None
    return Simulated(record_of_plan(solution, timeline, anew=anew), timeline)


def _nodes(asked: Asked) -> MeshMaker:
    """Makes meshes at the prices of data sheets; where no size of a node is given, a stage is a node."""
    prices = {"device": load_device(asked.device), "tf32": asked.tf32, **asked.links}

    def mesh_of(shape: tuple[int, int, int]) -> Mesh:
        per_node = asked.devices_per_node or math.prod(shape[1:])
        return Mesh.from_bandwidths(shape, devices_per_node=per_node, axis_names=AXES, **prices)

    return mesh_of


def _measured(cluster: str, grid: Grid, output: Output) -> tuple[Grid, MeshMaker]:
    """The configurations that fill a measured cluster, and a function that makes their meshes.

    Degrees above 1 must be the cluster's axes, in the order pipeline, data, tensor. ValueError where no configuration fills the cluster.
    """
    measured = load_cluster(cluster)
    axes = [axis for axis in measured.axes if axis.size > 1]
    filling = [(d, h, p, k) for d, h, p, k in grid if [n for n in (p, d, h) if n > 1] == [axis.size for axis in axes]]
    shape = shape_text(measured.shape)
    if not filling:
        raise ValueError(f"{cluster} was measured as {shape}; expected --pipeline, --data and --tensor of these sizes, in this order")
    if len(filling) < len(grid):
        output.note(f"{len(filling)} of {len(grid)} combinations fill {cluster}, measured as {shape}; the others are left out")

    def mesh_of(shape: tuple[int, int, int]) -> Mesh:
        left = iter(axes)
        alone = [Axis(name, 1, 1.0, 0.0, backend=measured.axes[0].backend) for name in AXES]  # one device has no link
        return Mesh(tuple(replace(next(left), name=one.name) if n > 1 else one for n, one in zip(shape, alone)), measured.device)

    return filling, mesh_of


def _write(simulated: Simulated, asked: Asked, output: Output) -> None:
    timeline, run = simulated.timeline, simulated.run
    output.progress("writing", 0.95)
    room, of = report.timeline, timeline if run is None else run
    draw, trace = (room.draw_timeline, room.trace_of) if run is None else (room.draw_run, room.trace_of_run)
    output.write(asked.trace, lambda path: room.save_trace(trace(of), path), "; open it in ui.perfetto.dev")
    output.write(asked.picture, lambda path: draw(of, path))


# -- records of --json --------------------------------------------------------------------------------------------------------------


OF_THE_BEST = ("seconds", "peak_bytes", "schedule", "microbatches", "bubble", "exposed_communication_seconds")


def record_of_model(simulations: Sequence[Any]) -> dict:
    """The record of all simulations, the best first."""
    best, stages = simulations[0], []
    for d in range(best.parallel.pipeline):
        mine = best.parts[d :: best.parallel.pipeline]
        times = {f"{what}_seconds": math.fsum(getattr(part, what) for part in mine) for what in ("forward", "backward", "finish")}
        peak = best.peak_bytes if best.run is None else best.run.peak_bytes[d]
        sent = math.fsum(part.send for part in mine)
        stages.append({"mesh": list(best.mesh.shape), **times, "peak_bytes": peak, "send_bytes": sent})
    rows = [one.to_dict() for one in simulations]
    top = {key: rows[0][key] for key in OF_THE_BEST}
    overlap = best.timeline is None or best.timeline.program.overlap
    return {**top, **_sure(best.mesh.device, best.seconds, overlap=overlap), "stages": stages, "configurations": rows}


def record_of_plan(solution: Any, timeline: Any, *, anew: bool) -> dict:
    """A plan's time line as a record. anew: it may be of other prices or inputs than the plan's own, and so are its cost and peak then."""
    known = {key: getattr(timeline, key) for key in ("seconds", "peak_bytes", "exposed_communication_seconds")}
    row = {**known, "schedule": "sequential", "microbatches": solution.microbatches, "bubble": 0.0}
    row = {key: row[key] for key in OF_THE_BEST}
    program = timeline.program
    return {
        **row,
        **_sure(program.formulation.mesh.device, timeline.seconds, overlap=program.overlap),
        "cost_seconds": _cost(program) if anew else solution.cost,
        "plan_peak_bytes": program.formulation.peak(program.choice) if anew else solution.peak_bytes,
        **{key: getattr(timeline, key) for key in ("compute_seconds", "communication_seconds", "critical_seconds")},
        "stages": [{"mesh": list(solution.mesh.shape), "seconds": timeline.seconds, "peak_bytes": timeline.peak_bytes}],
        "configurations": [row],
    }


def _sure(device: Any, seconds: float, *, overlap: bool = True) -> dict:
    """The constants of the device's kernels, and between which seconds 80 % of published steps were; None where that is not known."""
    kernels = device.kernels
    steps = None if kernels is None else kernels.overlapped if overlap else kernels.serial
    interval = None if steps is None else [seconds * steps.low, seconds * steps.high]
    tested = None if steps is None else {"devices": steps.devices, "runs": steps.runs, "error": steps.error}
    return {"interval_seconds": interval, "prices": None if kernels is None else kernels.source, "tested": tested}


def _cost(program: Any) -> float:
    """Seconds of all tasks one after the other, under the prices that the program was made with."""
    from autoshard.problem import evaluate  # here: numpy, which --help shouldn't wait for

    return float(evaluate(program.formulation.problem, program.choice).cost)
