"""`autoshard demo | doctor`: does it work here?

demo     GPT-2 small planned for 2 nodes of 4 devices, beside the usual plans, and verified on eight simulated ranks
doctor   what is installed, what is missing, whether the solvers answer, and which ops of a model a device can't run
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_api
from autoshard.cli.model import load_model
from autoshard.cli.output import Output, complain
from autoshard.cli.verbs import Asked

NEEDED = ("torch", "numpy", "highspy", "networkx", "dill", "typer", "rich", "jsonschema-rs", "pyyaml")
OPTIONAL = {  # what each is for
    "numba": "compiled loops: without them large plans take longer", "scipy": "calibrate, curves of pchip",
    "matplotlib": "--plot and report", "jinja2": "report", "cvxpy": "--solver cvxpy", "transformers": "models given as hf:DIR",
    "accelerate": "tp_plan in transformers", "torchrec": "its planner with our proposer",
}  # fmt: skip
NEIGHBOURS = ("torchtitan", "vllm", "sglang", "deepspeed", "peft", "megatron-core", "nanotron")  # named where they are installed


@app.command()
def doctor(asked: Asked, output: Output) -> int:
    """Print versions of what autoshard depends on, what is missing, which features that leaves, and whether solvers answer a problem of
    known optimum.

    With a model and a device: which ops of the model can't run there, with the line of the model's code.

    \b
    autoshard doctor --json
    autoshard doctor models/gpt2.py:tiny --device cuda --train
    """
    if (asked.model is None) != (asked.device is None):
        raise ValueError("a model and --device go together: autoshard doctor models/gpt2.py:tiny --device cuda")
    if asked.model is not None:
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(asked.model, asked.settings, training=asked.training)
        output.progress("looking up its ops", 0.3)
        answer = load_api().dry_run(module, example_inputs, training=asked.training, device=asked.device)
        output.answer(answer, lambda: _device_table(answer))
        return OK if answer["ok"] else NO
    output.progress("trying the solvers", 0.0)
    versions = {name: _version(name) for name in ("autoshard", *NEEDED, *OPTIONAL)}
    missing = [name for name in NEEDED if versions[name] is None]
    solvers = {} if {"numpy", "highspy"} & set(missing) else _selftest()
    here = _torch_here() if versions["torch"] else TorchHere(None, 0, "", ("torch is not installed",))
    ok = not missing and not here.moved and all(state == "ok" for state in solvers.values())
    record = {
        "ok": ok,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "missing": missing,
        "solvers": solvers,
        "torch": {"cuda": here.cuda, "gpus": here.gpus, "untested": here.untested or None, "moved": list(here.moved)},
        "neighbours": {name: version for name in NEIGHBOURS if (version := _version(name))},
        "features": _features(versions, missing, here),
    }
    output.answer(record, lambda: _table(record))
    return OK if ok else NO


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class TorchHere:
    """What this torch has."""

    cuda: str | None  # the version that it was built for
    gpus: int
    untested: str  # a sentence about a version that the tests did not run with
    moved: tuple[str, ...]  # a sentence for each name that it has no more


def _torch_here() -> TorchHere:
    try:
        import torch  # here, as what follows: an installation that lacks something is to be told so

        from autoshard.torch_private import VERSION, check_all, untested
    except ImportError as error:
        return TorchHere(None, 0, "", (f"torch can't be imported: {error}",))
    new = untested(VERSION)
    return TorchHere(torch.version.cuda, torch.cuda.device_count(), new, tuple(check_all()) if new else ())


def _features(versions: dict[str, str | None], missing: list[str], here: TorchHere) -> dict[str, str]:
    """By feature: "yes", or what it waits for."""
    stopped = "; ".join([*(f"{name} is missing" for name in missing), *here.moved])
    features = {"plan, show, check, explain, simulate, export, verify, and ranks on CPUs": stopped or "yes"}
    gpus = f"yes: {here.gpus} visible" if here.gpus else "no GPU is visible" if here.cuda else "this torch is built without CUDA"
    features["verify --device cuda, and ranks on GPUs"] = stopped or gpus
    for name, use in OPTIONAL.items():
        features[use.partition(": ")[0]] = "yes" if versions[name] else f"{name} is missing"
    return features


def _selftest() -> dict[str, str]:
    from autoshard.solvers import selftest  # here: an installation that lacks something is to be told so

    return selftest.selftest()


def _device_table(record: dict) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in record["cannot_run"]:
        table.add_row(row["line"] or row["module"] or row["op"], row["target"], row["why"])
    device, stopped = record["device"], len(record["cannot_run"])
    answer = f"all {record['ops']} ops can" if record["ok"] else f"{stopped} of {record['ops']} ops can't"
    table.add_row(f"{answer} run on {device}")
    return table


def _table(record: dict) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("python", f"{record['python']} ({sys.executable}), {record['platform']}")
    for name, version in record["versions"].items():
        why = f" (only for {OPTIONAL[name]})" if name in OPTIONAL else "; run `pip install -e .` in autoshard's folder"
        table.add_row(name, version or f"missing{why}")
    for name, version in record["neighbours"].items():
        table.add_row(name, version)
    for name, state in record["solvers"].items():
        table.add_row(f"solver {name}", state)
    if record["torch"]["untested"]:
        table.add_row("torch", record["torch"]["untested"])
    for name, state in record["features"].items():
        table.add_row(name, state)
    table.add_row("", "all is well" if record["ok"] else "something is missing or wrong: see above")
    return table


MODEL = ["models/gpt2.py:small", "--set", "vocab=50304"]


@app.command()
def demo(asked: Asked, _: None) -> int:
    """Plan GPT-2 small on 2x4 devices, show the plan beside the usual ones, and verify it; no GPU and no download.

    \b
    autoshard demo
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = asked.out or str(Path(folder) / "gpt2-small-2x4.json")
        return _verb("plan", *MODEL, "--set", "batch=512", "--mesh", "2x4", "--train", "--out", plan) or _verb(
            "verify", plan, *MODEL, "--set", "batch=8", "--set", "seq=16"
        )


def _verb(*arguments: str) -> int:
    complain(f"autoshard {' '.join(arguments)}")
    return app(args=list(arguments), prog_name="autoshard", standalone_mode=False) or OK
