"""`autoshard demo | doctor`: does it work here?

demo     GPT-2 small planned for 2 nodes of 4 devices, beside the usual plans, and verified on eight simulated ranks
doctor   what is installed, what is missing, whether the solvers answer, and which ops of a model a device can't run
"""

import importlib.metadata
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_api
from autoshard.cli.model import load_model
from autoshard.cli.output import Output, complain
from autoshard.cli.verbs import Asked

NEEDED = ("torch", "numpy", "highspy", "networkx", "dill", "typer", "rich", "jsonschema-rs", "pyyaml")
OPTIONAL = {  # what each is for
    "numba": "compiled loops: without them large plans take longer", "scipy": "calibrate",
    "matplotlib": "--plot and report", "jinja2": "report", "transformers": "models given as hf:DIR",
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
    solvers: dict[str, str] = {}
    if not {"numpy", "highspy"} & set(missing):
        from autoshard.solvers import selftest  # here: an installation that lacks something is to be told so

        solvers = selftest.selftest()
    nothing = {"cuda": None, "gpus": 0, "untested": None, "moved": ["torch is not installed"]}
    here = _torch_here() if versions["torch"] else nothing
    ok = not missing and not here["moved"] and all(state == "ok" for state in solvers.values())
    record = {
        "ok": ok,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "missing": missing,
        "solvers": solvers,
        "torch": here,
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


def _torch_here() -> dict[str, Any]:
    """What this torch has: the version of CUDA that it was built for, GPUs, a sentence about a version that the tests did not run with,
    and one for each name that it has no more."""
    try:
        import torch  # here, as what follows: an installation that lacks something is to be told so

        from autoshard.torch_private import VERSION, check_all, untested
    except ImportError as error:
        return {"cuda": None, "gpus": 0, "untested": None, "moved": [f"torch can't be imported: {error}"]}
    new = untested(VERSION) or None
    return {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "untested": new, "moved": list(check_all()) if new else []}


def _features(versions: dict[str, str | None], missing: list[str], here: dict[str, Any]) -> dict[str, str]:
    """By feature: "yes", or what it waits for."""
    stopped = "; ".join([*(f"{name} is missing" for name in missing), *here["moved"]])
    features = {"plan, show, check, explain, simulate, export, verify, and ranks on CPUs": stopped or "yes"}
    none = "no GPU is visible" if here["cuda"] else "this torch is built without CUDA"
    gpus = f"yes: {here['gpus']} visible" if here["gpus"] else none
    features["verify --device cuda, and ranks on GPUs"] = stopped or gpus
    for name, use in OPTIONAL.items():
        features[use.partition(": ")[0]] = "yes" if versions[name] else f"{name} is missing"
    return features


def _device_table(record: dict) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in record["cannot_run"]:
        table.add_row(row["line"] or row["module"] or row["op"], row["target"], row["why"])
    answer = f"all {record['ops']} ops can" if record["ok"] else f"{len(record['cannot_run'])} of {record['ops']} ops can't"
    table.add_row(f"{answer} run on {record['device']}")
    return table


def _table(record: dict) -> Table:
    rows = [("python", f"{record['python']} ({sys.executable}), {record['platform']}")]
    for name, version in record["versions"].items():
        why = f" (only for {OPTIONAL[name]})" if name in OPTIONAL else "; run `pip install -e .` in autoshard's folder"
        rows.append((name, version or f"missing{why}"))
    rows += [*record["neighbours"].items(), *((f"solver {name}", state) for name, state in record["solvers"].items())]
    rows += [("torch", record["torch"]["untested"])] if record["torch"]["untested"] else []
    rows += [*record["features"].items(), ("", "all is well" if record["ok"] else "something is missing or wrong: see above")]
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
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
        code = _verb("plan", *MODEL, "--set", "batch=512", "--mesh", "2x4", "--train", "--out", plan)
        return code or _verb("verify", plan, *MODEL, "--set", "batch=8", "--set", "seq=16")


def _verb(*arguments: str) -> int:
    complain(f"autoshard {' '.join(arguments)}")
    return app(args=list(arguments), prog_name="autoshard", standalone_mode=False) or OK
