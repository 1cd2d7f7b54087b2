"""`autoshard simulate`: the time line of a plan, or of a model on data x tensor x pipeline devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from autoshard.cli.app import OK, app
from autoshard.cli.arguments import check_out, parse_bytes, parse_settings
from autoshard.cli.model import load_model
from autoshard.cli.options import Json, OptionalModel, Quiet, Settings, load_api, model_of
from autoshard.cli.output import Output
from autoshard.mesh import Mesh

Target = Annotated[
    str,
    typer.Argument(
        metavar="SOLUTION|MODEL",
        help="A plan's file; or file.py:function or hf:DIR, laid out by --data, --tensor and --pipeline; or mlp, with --constants.",
        show_default=False,
    ),
]
PICTURES = (".png", ".svg", ".pdf")
Numbers = "A number, or several as 1,2,4: every combination is simulated, the fastest that fits in memory comes first."


@app.command()
def simulate(
    target: Target,
    model: OptionalModel = None,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    data: Annotated[str, typer.Option(help=f"Data-parallel degree. {Numbers}")] = "1",
    tensor: Annotated[str, typer.Option(help="Tensor-parallel degree (Megatron).")] = "1",
    pipeline: Annotated[str, typer.Option(help="Pipeline stages.")] = "1",
    microbatches: Annotated[str, typer.Option(help="Microbatches per step; they divide the batch.")] = "1",
    schedule: Annotated[str, typer.Option(help="sequential, gpipe, 1f1b, interleaved_1f1b or zb_h1.")] = "1f1b",
    chunks: Annotated[int, typer.Option(help="Parts of the model per stage, for interleaved_1f1b.", min=1)] = 1,
    scheme: Annotated[
        str, typer.Option(help="Layouts within a stage: auto, data_parallel, fsdp, megatron, megatron_sp, or planned by the solver.")
    ] = "auto",
    inference: Annotated[bool, typer.Option("--inference", help="The forward pass of MODEL alone.")] = False,
    no_overlap: Annotated[bool, typer.Option("--no-overlap", help="Collectives and kernels one after the other.")] = False,
    prefetch: Annotated[int, typer.Option(help="Parameters fetched ahead of their use.", min=0)] = 4,
    intra_node_bandwidth: Annotated[str, typer.Option(help="Bytes per second per device, inside a node.")] = "300GB/s",
    inter_node_bandwidth: Annotated[str, typer.Option(help="Bytes per second of one node's link to the others.")] = "400GB/s",
    device: Annotated[str, typer.Option(help="a100, h100, h200 or cpu.")] = "h100",
    devices_per_node: Annotated[int | None, typer.Option(help="Default: those of one stage.", show_default=False)] = None,
    constants: Annotated[
        str, typer.Option(help="physical; or distir_3386edc, distir_83d7fc3: a published simulator's, of its MLP alone.")
    ] = "physical",
    trace: Annotated[str | None, typer.Option(help="Write a trace here, for ui.perfetto.dev.", show_default=False)] = None,
    picture: Annotated[str | None, typer.Option(help="Draw the time line here: .png, .svg or .pdf.", show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """What a training step will take: seconds with overlap, memory, the bubble of a pipeline, and what sits on the critical path.

    \b
    autoshard simulate gpt2.json --trace trace.json --picture timeline.png
    autoshard simulate models/gpt2.py:small --set batch=64 --data 2 --tensor 2 --pipeline 4 --microbatches 8
    autoshard simulate models/gpt2.py:small --set batch=64 --data 1,2,4 --pipeline 1,2,4 --microbatches 4,8 --json
    autoshard simulate mlp --constants distir_3386edc --set layers=64 --set width=8192 --set batch=8192 --data 4 --tensor 4
    """
    for path, what in ((trace, "--trace"), (picture, "--picture")):
        _check_path(path, what)
    if picture is not None and Path(picture).suffix not in PICTURES:
        raise ValueError(f"--picture {picture} has no ending that says what it is; expected one of {', '.join(PICTURES)}")
    keywords = parse_settings(settings)
    configurations = _configurations(data, tensor, pipeline, microbatches)
    with Output(as_json=as_json, quiet=quiet) as output:
        if constants != "physical":
            record = _published(target, constants, keywords, configurations, trace or picture)
            output.answer(record, lambda: _report().simulation_report(record))
            return OK
        how = {"overlap": not no_overlap, "prefetch": prefetch, "progress": output.progress}
        if _is_model(target):
            if model is not None:
                raise ValueError(f"{target} is a model, and {model} too; give one of them, or a plan and its model")
            prices = {
                "intra_node_bandwidth": parse_bytes(intra_node_bandwidth, "--intra-node-bandwidth"),
                "inter_node_bandwidth": parse_bytes(inter_node_bandwidth, "--inter-node-bandwidth"),
                "device": device,
            }
            output.progress("building the model", 0.0)
            module, inputs = load_model(target, keywords, training=not inference)
            grid = [_simulating().Parallel(*numbers) for numbers in configurations]
            how = {**how, "schedule": schedule, "chunks": chunks, "scheme": scheme, "training": not inference}
            found = _simulating().simulate_grid(module, inputs, grid, _mesh_of(prices, devices_per_node), **how)
            found.sort(key=lambda one: (not one.fits, one.seconds))
            record, timeline, run = _record(found), found[0].timeline, found[0].run
        else:
            if configurations != [(1, 1, 1, 1)]:
                raise ValueError(f"{target} is a plan, whose mesh is known; leave out --data, --tensor, --pipeline and --microbatches")
            solution = load_api().load(target)
            written, keywords = model_of(solution, model, keywords, target)
            output.progress("building the model", 0.0)
            timeline = load_api().simulate(*load_model(written, keywords, training=solution.training), solution, **how)
            record, run = _record_of_plan(solution, timeline), None
        output.progress("writing", 0.95)
        _write(timeline, run, trace, picture, output)
        output.answer(record, lambda: _report().simulation_report(record, timeline.critical_seconds if run is None else None))
    return OK


def _report() -> ModuleType:
    from autoshard.report import timeline  # here: matplotlib and torch take seconds to import

    return timeline


def _simulating() -> ModuleType:
    from autoshard.api import simulating  # here: as above

    return simulating


def _is_model(target: str) -> bool:
    return target.startswith("hf:") or ".py:" in target


def _check_path(path: str | None, what: str) -> None:
    try:
        check_out(path)
    except ValueError as error:
        raise ValueError(str(error).replace("--out", what, 1)) from None


def _configurations(*written: str) -> list[tuple[int, ...]]:
    lists = []
    for name, numbers in zip(("data", "tensor", "pipeline", "microbatches"), written):
        parts = [part.strip() for part in numbers.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"--{name} is {numbers!r}; expected whole numbers of 1 or more, for example 4 or 1,2,4")
        lists.append([int(part) for part in parts])
    return list(product(*lists))


def _mesh_of(prices: dict, devices_per_node: int | None) -> Callable[[tuple[int, int, int]], Mesh]:
    def made(shape: tuple[int, int, int]) -> Mesh:
        per_node = devices_per_node or math.prod(shape[1:])
        return Mesh.from_bandwidths(shape, devices_per_node=per_node, axis_names=("pipeline", "data", "tensor"), **prices)

    return made


def _record(simulations: Sequence[Any]) -> dict:
    """Of all, the best first."""
    best, stages = simulations[0], []
    for d in range(best.parallel.pipeline):
        mine = best.parts[d :: best.parallel.pipeline]
        stages.append(
            {
                "mesh": list(best.mesh.shape),
                "forward_seconds": math.fsum(part.forward for part in mine),
                "backward_seconds": math.fsum(part.backward for part in mine),
                "finish_seconds": math.fsum(part.finish for part in mine),
                "peak_bytes": best.peak_bytes if best.run is None else best.run.peak_bytes[d],
                "send_bytes": math.fsum(part.send for part in mine),
            }
        )
    rows = [one.to_dict() for one in simulations]
    top = {key: rows[0][key] for key in ("seconds", "peak_bytes", "schedule", "microbatches", "bubble", "exposed_communication_seconds")}
    return {**top, "stages": stages, "configurations": rows}


def _record_of_plan(solution: Any, timeline: Any) -> dict:
    row = {
        "seconds": timeline.seconds,
        "peak_bytes": timeline.peak_bytes,
        "schedule": "sequential",
        "microbatches": 1,
        "bubble": 0.0,
        "exposed_communication_seconds": timeline.exposed_communication_seconds,
    }
    return {
        **row,
        "cost_seconds": solution.cost,
        "plan_peak_bytes": solution.peak_bytes,
        "compute_seconds": timeline.compute_seconds,
        "communication_seconds": timeline.communication_seconds,
        "critical_seconds": timeline.critical_seconds,
        "stages": [{"mesh": list(solution.mesh.shape), "seconds": timeline.seconds, "peak_bytes": timeline.peak_bytes}],
        "configurations": [row],
    }


def _published(target: str, constants: str, keywords: dict, configurations: Sequence[tuple[int, ...]], out: str | None) -> dict:
    from autoshard.simulate import distir
    from autoshard.simulate.parallel import Parallel

    if constants not in distir.CONSTANTS:
        raise ValueError(f"--constants is {constants!r}; expected physical, {' or '.join(distir.CONSTANTS)}")
    if target != "mlp":
        raise ValueError(f"{target} under {constants}; those rules know their MLP alone: give mlp, with --set layers, width and batch")
    if out is not None:
        raise ValueError(f"{constants} gives seconds alone; leave out --trace and --picture")
    moved = str(keywords.pop("moved", "everything"))
    known = {"layers": 64, "width": 8192, "batch": 8192}
    if unknown := [key for key in keywords if key not in known]:
        raise ValueError(f"mlp takes no {unknown[0]!r}; it takes layers, width, batch and moved, so correct the --set")
    sizes = {key: keywords.get(key, value) for key, value in known.items()}
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in sizes.values()):
        raise ValueError(f"mlp of {sizes}; expected whole numbers of 1 or more")
    rows = []
    for d, h, p, k in configurations:
        taken = distir.step_seconds(distir.MLP(**sizes), Parallel(d, h, p, k), distir.CONSTANTS[constants], moved=moved)
        shape = {"data": d, "tensor": h, "pipeline": p, "microbatches": k, "devices": d * h * p}
        rows.append({**shape, "seconds": taken, "samples_per_second": sizes["batch"] / taken})
    rows.sort(key=lambda row: row["seconds"])
    unknown_here = dict.fromkeys(("peak_bytes", "bubble", "exposed_communication_seconds"))
    rows = [{**row, **unknown_here, "schedule": "1f1b"} for row in rows]
    top = {key: rows[0][key] for key in ("seconds", "peak_bytes", "schedule", "microbatches", "bubble", "exposed_communication_seconds")}
    return {**top, "constants": constants, "stages": [], "configurations": rows}


def _write(timeline: Any, run: Any, trace: str | None, picture: str | None, output: Output) -> None:
    if trace is not None:
        from autoshard.simulate.trace import trace_of, trace_of_run

        _report().save_trace(trace_of(timeline) if run is None else trace_of_run(run), trace)
        output.note(f"wrote {trace}; open it in ui.perfetto.dev")
    if picture is not None:
        if run is None:
            _report().draw_timeline(timeline, picture)
        else:
            _report().draw_run(run, picture)
        output.note(f"wrote {picture}")
