"""`autoshard export SOLUTION --format ...`: writes a plan in the format of another tool."""

from __future__ import annotations

from autoshard.cli.app import OK, app, say_no
from autoshard.cli.arguments import parse_share
from autoshard.cli.loading import load_api, load_plan, load_report
from autoshard.cli.output import Output


@app.command()
def export(
    solution: str,
    kind: str = "sharding_map",
    axis: str | None = None,
    within: str = "5%",
    mesh: str | None = None,
    out: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Write a plan in the format of another tool: printed as JSON, or written with --out. What it can't carry is said on stderr.

    Exit code 1 where a step takes longer as exported than --within allows, or needs more memory than the plan's limit; the sentence names
    the formats that hold the plan. Of formats whose seconds the reader decides (sharding_map, json, distribute_module) nothing is known.

    \b
    autoshard export gpt2.json --format tp_plan --out tp_plan.json
    autoshard export gpt2.json --format fully_shard --out recipe.py
    """
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("reading the plan", 0.0)
        api, loaded = load_api(), load_plan(solution, mesh)
        try:
            value = api.export(loaded, kind, out, axis=axis, within=parse_share(within))
        except api.NotHeld as error:
            return say_no(output, error, {"format": kind})
        if out is not None:
            output.note(f"wrote {out}")
        for line in value.said:
            output.note(line)
        plain = api.as_plain(value, kind)
        record = {
            "format": kind,
            "export": plain,
            "left": [one._asdict() for one in value.left],
            "cost_seconds": value.cost_seconds,
            "plan_cost_seconds": loaded.cost,
            "extra_seconds": value.extra_seconds,
        }
        if out is None or as_json:
            output.answer(record, lambda: load_report().exported_text(plain))
    return OK
