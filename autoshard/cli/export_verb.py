"""`autoshard export SOLUTION --format ...`: writes a plan in the format of another tool."""

from __future__ import annotations

from autoshard.cli.app import OK, app, say_no
from autoshard.cli.loading import load_api, load_plan, load_report
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked


@app.command()
def export(asked: Asked, output: Output) -> int:
    """Write a plan in the format of another tool: printed as JSON, or written with --out. What it can't carry is said on stderr.

    Exit code 1 where a step takes longer as exported than --within allows, or needs more memory than the plan's limit; the sentence names
    the formats that hold the plan. Of formats whose seconds the reader decides (sharding_map, json, distribute_module) nothing is known.

    \b
    autoshard export gpt2.json --format tp_plan --out tp_plan.json
    autoshard export gpt2.json --format fully_shard --out recipe.py
    """
    output.progress("reading the plan", 0.0)
    api, loaded = load_api(), load_plan(asked.solution, asked.mesh)
    try:
        value = api.export(loaded, asked.kind, asked.out, axis=asked.axis, within=asked.within)
    except api.NotHeld as error:
        return say_no(output, error, {"format": asked.kind})
    if asked.out is not None:
        output.note(f"wrote {asked.out}")
    for line in value.said:
        output.note(line)
    plain = api.as_plain(value, asked.kind)
    record = {"format": asked.kind, "export": plain, "left": [one._asdict() for one in value.left]}
    record |= {"cost_seconds": value.cost_seconds, "plan_cost_seconds": loaded.cost, "extra_seconds": value.extra_seconds}
    if asked.out is None or output.as_json:
        output.answer(record, lambda: load_report().exported_text(plain))
    return OK
