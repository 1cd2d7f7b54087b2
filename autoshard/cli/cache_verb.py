"""`autoshard cache ls | show | prune | export`: the plans in a cache of `autosharding_pass`."""

import math
import os
from typing import Any

from rich.table import Table

from autoshard import report
from autoshard.cli.app import OK, app
from autoshard.cli.loading import load_api
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked, Verbs
from autoshard.mesh import shape_text

cache = Verbs(name="cache", help="List, show, prune and export the plans of a cache.", rich_markup_mode=None)
app.add_typer(cache)


def _opened(location: str) -> Any:
    """ValueError where there is none: looking creates nothing."""
    if "://" not in location and not os.path.exists(location):
        raise ValueError(f"there is no cache {location}; expected a folder or a URL that `autosharding_pass(cache=...)` was given")
    return load_api().PlanCache(location)


def _plan(asked: Asked) -> Any:
    texts = [entry.text for entry in _opened(asked.location).entries() if entry.key.startswith(asked.key)]
    if len(texts) != 1:
        raise ValueError(f"{len(texts)} entries of {asked.location} have a key that begins with {asked.key}; `cache ls` lists all keys")
    return load_api().from_text(texts[0], f"entry {asked.key}")


@cache.command()
def ls(asked: Asked, output: Output) -> int:
    """List the entries of a cache, in a folder of this machine the one used last first.

    \b
    autoshard cache ls plans
    """
    entries = [{"key": entry.key, **entry.facts} for entry in _opened(asked.location).entries()]
    output.answer({"entries": entries}, lambda: _table(entries))
    return OK


@cache.command()
def show(asked: Asked, output: Output) -> int:
    """Show the plan of one entry, as `autoshard show` does.

    \b
    autoshard cache show plans 3f9a
    """
    plan = _plan(asked)
    output.answer(report.planned.summary(plan), lambda: report.planned.planned_report(plan))
    return OK


@cache.command()
def prune(asked: Asked, output: Output) -> int:
    """Remove entries, in a folder of this machine those used longest ago first, until the rest fits.

    \b
    autoshard cache prune plans --most 100MB
    """
    gone = _opened(asked.location).prune(asked.most)
    output.answer({"removed": gone}, lambda: f"removed {gone}")
    return OK


@cache.command()
def export(asked: Asked, output: Output) -> int:
    """Write the plan of one entry to a file, which `autoshard show`, `export` and `preload_solution` read.

    \b
    autoshard cache export plans 3f9a --out plan.json
    """
    plan = _plan(asked)
    output.write(asked.out, plan.save)
    output.answer({"key": asked.key, "out": asked.out}, lambda: "")
    return OK


def _table(entries: list[dict[str, Any]]) -> Table:
    table = Table("key", "mesh", "ops", "seconds", "status", "autoshard")
    for one in entries:
        ops, status, version = (str(one.get(key, "")) for key in ("ops", "status", "autoshard"))
        table.add_row(one["key"][:12], shape_text(one.get("mesh", ())), ops, f"{one.get('seconds', math.nan):.6g}", status, version)
    return table
