"""`autoshard degrees`: every launch of a launcher on some devices, predicted and sorted, with the regret of the best."""

from __future__ import annotations

from autoshard.cli.app import NO, OK, app
from autoshard.cli.arguments import bandwidths, parse_settings
from autoshard.cli.launchers import load_launchers, model_builder, site_of, sizes_of
from autoshard.cli.loading import DEVICE, INTER, INTRA, load_api, load_report
from autoshard.cli.output import Output
from autoshard.writing import write_atomically

TABLE_ROWS = 20


@app.command()
def degrees(
    model: str,
    devices: int,
    seq: int = 8192,
    global_batch: int = 512,
    launcher: str = "torchtitan",
    precision: str = "bf16",
    compiled: bool = False,
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    device: str = DEVICE,
    per_node: int = 8,
    memory: str | None = None,
    intra_node_bandwidth: str | None = None,
    inter_node_bandwidth: str = INTER,
    no_bound: bool = False,
    time_limit: float = 30.0,
    top: int | None = None,
    out: str | None = None,
    plot: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
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
            load_report().launchers.draw(answer, plot)
            output.note(f"wrote {plot}")
        output.answer(answer.to_dict(top) if as_json else {}, lambda: load_report().launchers.degrees_table(answer, top or TABLE_ROWS))
    return OK if answer.ranked.prices.fits[0] else NO
