"""`autoshard certify`: what a plan costs and the bound on all plans, computed again from numbers alone."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from autoshard.certify import FORMAT
from autoshard.certify import certify as certified
from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_api, load_plan, model_of
from autoshard.cli.model import load_model
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.reading import content_of, parsed
from autoshard.writing import write_atomically


@app.command()
def certify(asked: Asked, output: Output) -> int:
    """Compute a plan's cost and the bound on all plans again, from a file of numbers alone: the problem, the choice, prices and shifts.

    The check is autoshard/certify.py, a hundred lines that need numpy and nothing else. Of a plan and its model, the numbers are worked out
    first and kept by --out; --problem writes the same problem for another solver. Both are of the sum of all seconds. Exit code 1, with
    the reasons, where the numbers refute what they claim.

    \b
    autoshard certify gpt2.json models/gpt2.py:small --out numbers.json
    autoshard certify numbers.json
    autoshard certify gpt2.json --trust --problem gpt2.mps
    """
    record, notes = _numbers(asked, output)
    answer = certified(record)
    gap = (answer["cost"] - answer["bound"]) / answer["cost"] if answer["cost"] else 0.0
    shown = {
        "ok": answer["ok"], "wrong": answer["wrong"], "cost_seconds": answer["cost"], "bound_seconds": answer["bound"], "gap": gap,
        "peak_bytes": answer["peak"], **notes,
    }  # fmt: skip
    output.answer(shown, lambda: _table(shown))
    return OK if answer["ok"] else NO


def _numbers(asked: Asked, output: Output) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers, and what the plan says of itself, where they are of one."""
    content = content_of(asked.numbers, "certificate")
    data = parsed(content, asked.numbers, "certificate") if content.lstrip()[:1] == b"{" else {}
    if data.get("format") == FORMAT:
        if asked.model or asked.problem or asked.out:
            raise ValueError(f"{asked.numbers} has the numbers already; give a plan where MODEL, --out or --problem are asked for")
        return data, {}
    plan = load_plan(asked.numbers, asked.mesh)
    written, keywords = model_of(plan, asked.model, asked.settings, asked.numbers, asked.trust)
    module, inputs = load_model(written, keywords, training=plan.training)
    api = load_api()
    if asked.problem is not None:
        api.write_problem(api.problem_of(module, inputs, plan), asked.problem)
    output.progress("proving the bound", 0.5)
    record = api.certificate_of(module, inputs, plan)
    output.write(asked.out, lambda path: write_atomically(json.dumps(record, allow_nan=False) + "\n", path))
    return record, {"plan_cost_seconds": plan.cost, "plan_bound_seconds": plan.bound}


def _table(shown: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("certificate", "holds" if shown["ok"] else "; ".join(shown["wrong"]))
    for key, name in (("cost_seconds", "cost"), ("bound_seconds", "bound"), ("plan_bound_seconds", "the plan's own bound")):
        if key in shown:
            table.add_row(name, f"{shown[key]:.9g} s")
    table.add_row("gap", f"{shown['gap']:.2g}")
    table.add_row("peak memory", f"{shown['peak_bytes']:.6g} bytes")
    return table
