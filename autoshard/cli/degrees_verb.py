"""`autoshard degrees`: every launch of a launcher on some devices, predicted and sorted, with the regret of the best."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.cli.app import NO, OK, app
from autoshard.cli.arguments import bandwidths, parse_settings
from autoshard.cli.launchers import (
    GlobalBatch,
    LauncherOut,
    Memory,
    PerNode,
    Seq,
    SiteDevice,
    load_launchers,
    model_builder,
    site_of,
    sizes_of,
)
from autoshard.cli.options import DEVICE, INTER, INTRA, InterNodeBandwidth, Json, Model, Quiet, Settings, load_api
from autoshard.cli.output import Output
from autoshard.writing import write_atomically

TABLE_ROWS = 20


@app.command()
def degrees(
    model: Model,
    devices: Annotated[int, typer.Option(help="How many, in equal nodes.", min=1)],
    seq: Seq = 8192,
    global_batch: GlobalBatch = 512,
    launcher: Annotated[str, typer.Option(help="torchtitan, megatron, accelerate or nanotron.")] = "torchtitan",
    precision: Annotated[str, typer.Option(help="Of the blocks' matmuls: bf16, fp16, fp8 or nvfp4.")] = "bf16",
    compiled: Annotated[bool, typer.Option("--compile", help="Blocks are compiled.")] = False,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    device: SiteDevice = DEVICE,
    per_node: PerNode = 8,
    memory: Memory = None,
    intra_node_bandwidth: Annotated[
        str | None, typer.Option(help="Bytes per second per device, inside a node. Default: the device's own.", show_default=False)
    ] = None,
    inter_node_bandwidth: InterNodeBandwidth = INTER,
    no_bound: Annotated[bool, typer.Option("--no-bound", help="Leave out the bound of an unrestricted plan.")] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds for that bound.")] = 30.0,
    top: Annotated[
        int | None, typer.Option(help="Only so many, the best. Default: 20 in the table, all with --json.", show_default=False)
    ] = None,
    out: LauncherOut = None,
    plot: Annotated[str | None, typer.Option(help="Draw memory against seconds here: .png, .svg or .pdf.", show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Which degrees? Every legal launch of MODEL, with predicted tokens/s, MFU and memory; and how far the best is from any plan.

    Exit code 1 where none fits. --out writes the best one as the launcher's configuration.

    \b
    autoshard degrees hf:Llama-3.1-8B --devices 64 --seq 8192 --global-batch 512 --out best.toml
    autoshard degrees models/llama.py:llama3_70b --devices 512 --launcher megatron --no-bound --json
    """
    site = site_of(device, per_node, memory, inter_node_bandwidth, intra_node_bandwidth)
    links = bandwidths(intra_node_bandwidth or INTRA, inter_node_bandwidth)
    keywords = parse_settings(settings)
    assert seq is not None and global_batch is not None
    room = load_launchers()
    launch = room.Launch(devices, seq, global_batch, precision=precision, compiled=compiled)
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("reading the model's sizes", 0.0)
        sizes = sizes_of(model, keywords)
        output.progress("pricing launches", 0.1)
        builder = None if no_bound else model_builder(model, keywords, seq)
        api = load_api()
        answer = api.degrees(sizes, launch, site, launcher, model_of=builder, progress=output.progress, time_limit=time_limit, **links)
        if answer.why_not:
            output.note(f"no regret: {answer.why_not}")
        best = answer.ranked.launch(0)
        if out is not None:
            write_atomically(room.configuration_text(launcher, room.LaunchConfig(best, sizes)), out)
            output.note(f"wrote {out}")
        if plot is not None:
            _report().draw(answer, plot)
            output.note(f"wrote {plot}")
        output.answer(answer.to_dict(top) if as_json else {}, lambda: _report().degrees_table(answer, top or TABLE_ROWS))
    return OK if answer.ranked.prices.fits[0] else NO


def _report():
    from autoshard.report import launchers as report  # here: as in options

    return report
