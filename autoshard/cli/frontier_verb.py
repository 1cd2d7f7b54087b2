"""`autoshard frontier`: the fastest plans for less and less memory, each with its proof."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.app import OK, app, say_no
from autoshard.cli.arguments import bandwidths, model_settings
from autoshard.cli.model import load_model
from autoshard.cli.options import (
    DEVICE,
    INTER,
    INTRA,
    BatchSize,
    ClusterFile,
    DeviceName,
    DType,
    GlobalBatch,
    InterNodeBandwidth,
    IntraNodeBandwidth,
    Json,
    MasterWeights,
    Microbatches,
    Model,
    Pin,
    PrecisionText,
    Prices,
    Quiet,
    SeqLength,
    Settings,
    Tf32,
    Train,
    load_api,
)
from autoshard.cli.output import Output
from autoshard.cli.plan_inputs import check_mesh_words, mesh_of, planning_options
from autoshard.mesh import parse_shape


@app.command()
def frontier(
    model: Model,
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh, slowest axis first: 2x4.", show_default=False)] = None,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    batch: BatchSize = None,
    seq: SeqLength = None,
    dtype: DType = None,
    cluster: ClusterFile = None,
    train: Train = False,
    points: Annotated[int, typer.Option(help="How many proven points to look for.", min=1)] = 12,
    gap: Annotated[float, typer.Option(help="Up to which gap a point counts as proven, relative.")] = 1e-3,
    out: Annotated[str | None, typer.Option(help="Write the points and bounds here, as JSON.", show_default=False)] = None,
    csv: Annotated[str | None, typer.Option(help="Write the points here, as CSV.", show_default=False)] = None,
    plot: Annotated[str | None, typer.Option(help="Draw memory against seconds here: .png, .svg or .pdf.", show_default=False)] = None,
    save_dir: Annotated[
        str | None, typer.Option(help="Write the plan of every point into this folder: point-00.json, ...", show_default=False)
    ] = None,
    as_json: Json = False,
    time_limit: Annotated[float, typer.Option(help="Seconds for the sweep.")] = 10000.0,
    intra_node_bandwidth: IntraNodeBandwidth = INTRA,
    inter_node_bandwidth: InterNodeBandwidth = INTER,
    device: DeviceName = DEVICE,
    tf32: Tf32 = False,
    prices: Prices = None,
    devices_per_node: Annotated[int | None, typer.Option(help="Default: all axes but the first.", min=1, show_default=False)] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state memory holds: adamw, sgd, momentum, or bytes per parameter.")] = "adamw",
    precision: PrecisionText = None,
    master_weights: MasterWeights = False,
    microbatches: Microbatches = None,
    global_batch: GlobalBatch = None,
    recompute: Annotated[str, typer.Option(help="Blocks to recompute in the backward pass: a number, or all.")] = "0",
    pin: Pin = [],  # noqa: B006
    quiet: Quiet = False,
) -> int:
    """Memory against time: the fastest plans of MODEL for less and less memory per device, each with its proof.

    \b
    autoshard frontier models/llama.py:llama3_8b --mesh 8x8 --train --plot frontier.png --csv frontier.csv
    autoshard frontier models/mlp.py:mlp --mesh 8 --points 6 --save-dir plans --json
    """
    check_mesh_words(mesh, cluster, None, None, prices)
    links = bandwidths(intra_node_bandwidth, inter_node_bandwidth)
    shape = None if mesh is None else parse_shape(mesh)
    devices = mesh_of(shape, prices, cluster, devices_per_node, device=device, tf32=tf32, **links)
    keywords = model_settings(settings, batch=batch, seq=seq, dtype=dtype)
    options = planning_options(
        optimizer=optimizer, recompute=recompute, pin=pin, training=train, precision=precision, master_weights=master_weights,
        microbatches=microbatches, global_batch=global_batch,
        points=points, gap=gap, time_limit=time_limit, assumptions={"model": model, "set": keywords},
    )  # fmt: skip
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(model, keywords, training=train)
        api = load_api()
        try:
            swept = api.frontier(module, example_inputs, devices, progress=output.progress, **options)
        except api.Infeasible as error:
            return say_no(output, error)
        _write(swept, output, out, csv, plot, save_dir)
        record, report = swept.to_dict(), _report()
        output.answer(record, lambda: report.frontier_report(record))
    return OK


def _write(swept: Any, output: Output, out: str | None, csv: str | None, plot: str | None, save_dir: str | None) -> None:
    if out is not None:
        swept.save(out)
    if csv is not None:
        _report().write_csv(swept.to_dict(), csv)
    if plot is not None:
        _report().draw(swept.to_dict(), plot)
    if save_dir is not None:
        Path(save_dir).mkdir(exist_ok=True)
        for i in range(len(swept.points)):
            output.progress(f"writing plan {i + 1} of {len(swept.points)}", 0.97)
            swept.solution(i).save(Path(save_dir) / f"point-{i:02d}.json")
    for path in (out, csv, plot, save_dir):
        if path is not None:
            output.note(f"wrote {path}")


def _report() -> Any:
    from autoshard.report import frontier as report  # here: as in options

    return report
