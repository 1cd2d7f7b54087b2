"""`autoshard frontier`: the fastest plans for less and less memory, each with its proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoshard.cli.app import OK, app, say_no
from autoshard.cli.arguments import bandwidths, model_settings
from autoshard.cli.loading import DEVICE, INTER, INTRA, load_api, load_report
from autoshard.cli.model import load_model
from autoshard.cli.output import Output
from autoshard.cli.plan_inputs import check_mesh_words, mesh_of
from autoshard.cli.table import option_of
from autoshard.mesh import parse_shape


@app.command()
def frontier(
    model: str,
    mesh: str | None = None,
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    cluster: str | None = None,
    points: int = 12,
    gap: float = 1e-3,
    out: str | None = None,
    csv: str | None = None,
    plot: str | None = None,
    save_dir: str | None = None,
    as_json: bool = False,
    time_limit: float = 10000.0,
    intra_node_bandwidth: str = INTRA,
    inter_node_bandwidth: str = INTER,
    device: str = DEVICE,
    tf32: bool = False,
    prices: str | None = None,
    devices_per_node: int | None = None,
    recompute: str = "0",
    quiet: bool = False,
    **planning: Any,
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
    options = {**planning, "points": points, "gap": gap, "time_limit": time_limit, "assumptions": {"model": model, "set": keywords}}
    options["recompute"] = option_of("frontier", "recompute").kind.read("--recompute", recompute)
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(model, keywords, training=planning.get("training", False))
        api = load_api()
        try:
            swept = api.frontier(module, example_inputs, devices, progress=output.progress, **options)
        except api.Infeasible as error:
            return say_no(output, error)
        _write(swept, output, out, csv, plot, save_dir)
        record, report = swept.to_dict(), load_report().frontier
        output.answer(record, lambda: report.frontier_report(record))
    return OK


def _write(swept: Any, output: Output, out: str | None, csv: str | None, plot: str | None, save_dir: str | None) -> None:
    if out is not None:
        swept.save(out)
    if csv is not None:
        load_report().frontier.write_csv(swept.to_dict(), csv)
    if plot is not None:
        load_report().frontier.draw(swept.to_dict(), plot)
    if save_dir is not None:
        Path(save_dir).mkdir(exist_ok=True)
        for i in range(len(swept.points)):
            output.progress(f"writing plan {i + 1} of {len(swept.points)}", 0.97)
            swept.solution(i).save(Path(save_dir) / f"point-{i:02d}.json")
    for path in (out, csv, plot, save_dir):
        if path is not None:
            output.note(f"wrote {path}")
