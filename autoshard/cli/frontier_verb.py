"""`autoshard frontier`: the fastest plans for less and less memory, each with its proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoshard.cli.app import OK, app, say_no
from autoshard.cli.loading import load_api, load_report
from autoshard.cli.model import load_model
from autoshard.cli.output import Output
from autoshard.cli.plan_inputs import check_mesh_words, mesh_of
from autoshard.cli.verbs import Asked


@app.command()
def frontier(asked: Asked, output: Output) -> int:
    """Memory against time: the fastest plans of MODEL for less and less memory per device, each with its proof.

    \b
    autoshard frontier models/llama.py:llama3_8b --mesh 8x8 --train --plot frontier.png --csv frontier.csv
    autoshard frontier models/mlp.py:mlp --mesh 8 --points 6 --save-dir plans --json
    """
    check_mesh_words(asked.mesh, asked.cluster)
    devices = mesh_of(asked, asked.mesh, asked.devices_per_node)
    options = {name: getattr(asked, name) for name in ("points", "gap", "time_limit", "recompute")} | asked.planning
    options["assumptions"] = {"model": asked.model, "set": asked.settings}
    output.progress("building the model", 0.0)
    module, example_inputs = load_model(asked.model, asked.settings, training=asked.planning.get("training", False))
    api = load_api()
    try:
        swept = api.frontier(module, example_inputs, devices, progress=output.progress, **options)
    except api.Infeasible as error:
        return say_no(output, error)
    record, report = swept.to_dict(), load_report().frontier
    output.write(asked.out, swept.save)
    output.write(asked.csv, lambda path: report.write_csv(record, path))
    output.write(asked.plot, lambda path: report.draw(record, path))
    output.write(asked.save_dir, lambda folder: _save_plans(swept, output, Path(folder)))
    output.answer(record, lambda: report.frontier_report(record))
    return OK


def _save_plans(swept: Any, output: Output, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for i in range(len(swept.points)):
        output.progress(f"writing plan {i + 1} of {len(swept.points)}", 0.97)
        swept.solution(i).save(folder / f"point-{i:02d}.json")
