"""`autoshard doctor`: what is installed, what is missing, and whether the solvers answer."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from rich.table import Table

from autoshard.cli.app import NO, OK, app
from autoshard.cli.options import Json
from autoshard.cli.output import Output

NEEDED = ("torch", "numpy", "scipy", "highspy", "numba", "networkx", "dill", "typer", "rich", "jsonschema-rs")
OPTIONAL = {
    "matplotlib": "--plot and report", "jinja2": "report", "cvxpy": "--solver cvxpy", "transformers": "models given as hf:DIR",
    "torchrec": "its planner with our proposer",
}  # fmt: skip


@app.command()
def doctor(as_json: Json = False) -> int:
    """Print versions of what autoshard depends on, what is missing, and whether each solver answers a problem of known optimum.

    \b
    autoshard doctor --json
    """
    with Output(as_json=as_json) as output:
        output.progress("trying the solvers", 0.0)
        versions = {name: _version(name) for name in ("autoshard", *NEEDED, *OPTIONAL)}
        missing = [name for name in NEEDED if versions[name] is None]
        solvers = {} if {"numpy", "scipy", "highspy", "numba"} & set(missing) else _selftest()
        ok = not missing and all(state == "ok" for state in solvers.values())
        record = {
            "ok": ok,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": versions,
            "missing": missing,
            "solvers": solvers,
        }
        output.answer(record, lambda: _table(record))
    return OK if ok else NO


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _selftest() -> dict[str, str]:
    from autoshard.solvers import selftest  # here: an installation that lacks something is to be told so

    return selftest.selftest()


def _table(record: dict) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("python", f"{record['python']} ({sys.executable}), {record['platform']}")
    for name, version in record["versions"].items():
        why = f" (only for {OPTIONAL[name]})" if name in OPTIONAL else "; run `pip install -e .` in autoshard's folder"
        table.add_row(name, version or f"missing{why}")
    for name, state in record["solvers"].items():
        table.add_row(f"solver {name}", state)
    table.add_row("", "all is well" if record["ok"] else "something is missing or wrong: see above")
    return table
