"""`autoshard frontier`: the fastest plans for less and less memory, each with its proof."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.app import NO, OK, app
from autoshard.cli.arguments import check_out, parse_bytes, parse_optimizer, parse_pins, parse_settings
from autoshard.cli.model import load_model
from autoshard.cli.options import Json, Model, Quiet, Settings, load_api
from autoshard.cli.output import Output, complain
from autoshard.cli.plan_inputs import check_mesh_words, mesh_of
from autoshard.mesh import parse_shape

PICTURES = (".png", ".svg", ".pdf")


@app.command()
def frontier(
    model: Model,
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh, slowest axis first: 2x4.", show_default=False)] = None,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    cluster: Annotated[
        str | None, typer.Option(help="A file of `calibrate measure`, instead of a mesh and bandwidths.", show_default=False)
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Plan a training step instead of a forward pass.")] = False,
    points: Annotated[int, typer.Option(help="How many proven points to look for.")] = 12,
    gap: Annotated[float, typer.Option(help="Up to which gap a point counts as proven, relative.")] = 1e-3,
    out: Annotated[str | None, typer.Option(help="Write the points and bounds here, as JSON.", show_default=False)] = None,
    csv: Annotated[str | None, typer.Option(help="Write the points here, as CSV.", show_default=False)] = None,
    plot: Annotated[str | None, typer.Option(help="Draw memory against seconds here: .png, .svg or .pdf.", show_default=False)] = None,
    save_dir: Annotated[
        str | None, typer.Option(help="Write the plan of every point into this folder: point-00.json, ...", show_default=False)
    ] = None,
    as_json: Json = False,
    time_limit: Annotated[float, typer.Option(help="Seconds for the sweep.")] = 10000.0,
    intra_node_bandwidth: Annotated[str, typer.Option(help="Bytes per second per device, inside a node.")] = "300GB/s",
    inter_node_bandwidth: Annotated[str, typer.Option(help="Bytes per second of one node's link to the others.")] = "400GB/s",
    device: Annotated[str, typer.Option(help="a100, h100, h200 or cpu.")] = "h100",
    prices: Annotated[
        str | None, typer.Option(help="Take bandwidths and device from `show-prices`: a100, h100, b200, mi300x, ...", show_default=False)
    ] = None,
    devices_per_node: Annotated[int | None, typer.Option(help="Default: all axes but the first.", show_default=False)] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state memory holds: adamw, sgd, momentum, or bytes per parameter.")] = "adamw",
    master_weights: Annotated[bool, typer.Option("--master-weights", help="Hold a float32 copy of 16-bit parameters.")] = False,
    recompute: Annotated[str, typer.Option(help="Blocks to recompute in the backward pass: a number, or all.")] = "0",
    pin: Annotated[list[str], typer.Option(metavar="NAME=LAYOUT", help="Fix a layout; repeatable.", show_default=False)] = [],  # noqa: B006
    quiet: Quiet = False,
) -> int:
    """Memory against time: the fastest plans of MODEL for less and less memory per device, each with its proof.

    \b
    autoshard frontier models/llama.py:llama3_8b --mesh 8x8 --train --plot frontier.png --csv frontier.csv
    autoshard frontier models/mlp.py:mlp --mesh 8 --points 6 --save-dir plans --json
    """
    check_mesh_words(mesh, cluster, None, None, prices)
    _check_files(out, csv, plot, save_dir)
    bandwidths = {
        "intra_node_bandwidth": parse_bytes(intra_node_bandwidth, "--intra-node-bandwidth"),
        "inter_node_bandwidth": parse_bytes(inter_node_bandwidth, "--inter-node-bandwidth"),
        "device": device,
    }
    devices = mesh_of(None if mesh is None else parse_shape(mesh), prices, cluster, devices_per_node, **bandwidths)
    keywords = parse_settings(settings)
    options = {
        "training": train,
        "points": points,
        "gap": gap,
        "time_limit": time_limit,
        "optimizer": parse_optimizer(optimizer),
        "master_weights": master_weights,
        "recompute": int(recompute) if recompute.isdigit() else recompute,
        "pins": parse_pins(pin),
        "assumptions": {"model": model, "set": keywords},
    }
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(model, keywords, training=train)
        api = load_api()
        try:
            found = api.frontier(module, example_inputs, devices, progress=output.progress, **options)
        except api.Infeasible as error:
            complain(f"autoshard: {error}")
            if as_json:
                output.answer({"status": "infeasible", "message": str(error)}, str)
            return NO
        _write(found, output, out, csv, plot, save_dir)
        record, report = found.to_dict(), _report()
        output.answer(record, lambda: report.frontier_report(record))
    return OK


def _check_files(out: str | None, csv: str | None, plot: str | None, save_dir: str | None) -> None:
    """Before the work begins: can its results be written?"""
    for path in (out, csv, plot):
        check_out(path)
    if plot is not None and Path(plot).suffix not in PICTURES:
        raise ValueError(f"--plot {plot} ends in {Path(plot).suffix or 'nothing'}; expected one of {', '.join(PICTURES)}")
    if save_dir is not None and (Path(save_dir).is_file() or not Path(save_dir).parent.is_dir()):
        raise ValueError(f"--save-dir {save_dir} is a file, or lies in no folder; give the name of a folder, new or old")


def _write(found: Any, output: Output, out: str | None, csv: str | None, plot: str | None, save_dir: str | None) -> None:
    if out is not None:
        found.save(out)
    if csv is not None:
        _report().write_csv(found.to_dict(), csv)
    if plot is not None:
        _report().draw(found.to_dict(), plot)
    if save_dir is not None:
        Path(save_dir).mkdir(exist_ok=True)
        for i in range(len(found.points)):
            output.progress(f"writing plan {i + 1} of {len(found.points)}", 0.97)
            found.solution(i).save(Path(save_dir) / f"point-{i:02d}.json")
    for path in (out, csv, plot, save_dir):
        if path is not None:
            output.note(f"wrote {path}")


def _report() -> Any:
    from autoshard.report import frontier as report  # here: as in options

    return report
