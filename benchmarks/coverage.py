"""Which models are understood: capture, plan on 8 and on 2x4 devices, run on 2 gloo ranks, verify on 2x2 with random layouts.

    python benchmarks/coverage.py [DIR] [--only NAME ...] [--mode training] [--random 3] [--limit 300] [--set experts=batched_mm] [--json]
    python benchmarks/coverage.py --train [--only NAME ...] [--json]

DIR holds one folder per Hugging Face model with its config.json (default: the two-layer ones that the tests use); ResNet, U-Net, DLRM
and a mixture of experts come from models/, all others from strangers.py and, by kind, from kinds/. Nothing is downloaded. One row per
model and mode, each in a process of its own that ends after --limit seconds; what stops a model is its row. unknown: ops that no rule
knows, by target. cpu: seconds for capture and both plans, baselines left out. run: the model through `parallelize` on 2 ranks against
the model itself, outputs, gradients and state; what is off by no more than NOISE times as much as the model in float32 from itself in
float64 is rounding.
not on cuda: ops without a kernel for GPUs, by a dry run.
verify, worst: the largest relative error of any output or gradient over the plan and the random layouts,
all ranks; a misplaced tensor makes the row fail. The last line counts by verdict:

    wrong            planned, and a result differs
    not runnable     planned, and `verify` or `parallelize` refuses it or fails (one that draws random numbers may be refused)
    not capturable   `plan` refuses it with a sentence
    has no plan      the same, and rightly: weights without a shape yet, a tensor that is no dense one
    failed           `plan` ends in a traceback or does not end
    itself           the model does not run, or train, on this machine even without a plan; only its plan is looked at, and verified

--train trains the models of kinds/ (or those of --only) for some steps instead: see trained_steps.py.
"""

# ruff: noqa: E402  (the question of who is asking comes first)
if __name__ == "coverage":
    raise ImportError("this is a script; numba, imported by a script beside it, looks for the package of that name and can do without")

import argparse
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]  # it would hide a package
if str(Path(__file__).resolve().parent.parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autoshard
import benchmarks.kinds  # noqa: F401  (they add themselves to STRANGERS)
from autoshard import api
from autoshard.capture import capture, deep_enough, input_names
from autoshard.cli.kinds import parse_settings
from autoshard.cli.model import load_model
from autoshard.lower.unsharded import materialized, run_unsharded
from autoshard.mesh import Mesh
from benchmarks import strangers
from benchmarks.strangers import STRANGERS
from benchmarks.study import plain, table
from benchmarks.trained_steps import FAST, difference, trained

ROOT = Path(__file__).resolve().parent.parent
HF = ROOT / "tests" / "data" / "hf"
OWN = ("dlrm", "moe", "resnet", "unet")
PLANNED, VERIFIED, RANKS = ("8", "2x4"), (2, 2), 2
SHAPES = {"8": (8,), "2x4": (2, 4)}
TOLERANCE = {"float32": 1e-4, "float64": 1e-4, "complex64": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
ITSELF = "the model without a plan"  # has no backward on this machine, say
NOISE = 4  # RWKV's norm of tiny embeddings: 1 % off, as the model itself; by the plan in float64 3e-9
BEGIN = "row part: "  # of a line that holds one


def names(folder: Path = HF) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/config.json")) + [*OWN]


def modes(name: str) -> tuple[bool, ...]:
    return STRANGERS[name].modes if name in STRANGERS else (False, True)


def build(name: str, training: bool, folder: Path = HF, settings: dict | None = None):
    """(module, example inputs)"""
    if name in STRANGERS:
        return strangers.build(name, training)
    if name in OWN:
        return load_model(f"{ROOT}/models/{name}.py:tiny", {"loss": training})
    return load_model(f"hf:{folder / name}", settings or {}, training=training)


# -- the columns --------------------------------------------------------------------------------------------------------------------


def planned(module, example_inputs, training: bool) -> dict:
    row: dict = {}
    began, unknown = time.process_time(), set()
    for mesh in PLANNED:
        solution = api.plan(module, example_inputs, Mesh.from_bandwidths(SHAPES[mesh]), training=training, baselines=False)
        row[f"status {mesh}"] = solution.status
        unknown |= {op["target"] for op in solution.replicated_ops}
    row |= {"nodes": len(solution.layouts), "signatures": solution.counts["distinct_signatures"], "unknown": sorted(unknown)}
    return row | {"cpu_seconds": time.process_time() - began}


def verified(module, example_inputs, training: bool, random: int) -> dict:
    solution = api.plan(module, example_inputs, Mesh.from_bandwidths(VERIFIED), training=training, baselines=False)
    found = api.verify(module, example_inputs, solution, random=random)
    worst = max(max(p["max_relative_error_outputs"], p["max_relative_error_gradients"]) for p in found["plans"])
    return {"ok": found["ok"], "worst_error": worst, "misplaced": sum(len(p["placement_mismatches"]) for p in found["plans"])}


def ran(module, example_inputs, training: bool, draws: bool = False) -> dict:
    """The largest error of the parallel module on its ranks. It forks: nothing in this process may have run backward."""
    mesh = Mesh.from_bandwidths((RANKS,), device="cpu", **FAST)
    solution = api.plan(module, example_inputs, mesh, training=training, baselines=False)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(folder, module, example_inputs, solution, draws), nprocs=RANKS, start_method="fork")
        files = [Path(folder) / f"{rank}.pkl" for rank in range(RANKS)]
        found = [pickle.loads(file.read_bytes()) if file.exists() else RuntimeError("a rank ended without a result") for file in files]
    for made in found:
        if isinstance(made, Exception):
            raise made
    return {"run_error": max(found), "run_ok": max(found) <= tolerance(module)}


def tolerance(module: torch.nn.Module) -> float:
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    return max((TOLERANCE.get(dtype, 1e-4) for dtype in dtypes), default=1e-4)


def _rank(rank: int, folder: str, module, example_inputs, solution, draws: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=dist.FileStore(f"{folder}/store", RANKS))
    made: Any
    try:
        made = _largest_error(module, example_inputs, solution, draws)
    except Exception as error:  # whatever it is, it is the row's
        made = error if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")
    Path(folder, f"{rank}.tmp").write_bytes(pickle.dumps(made))
    Path(folder, f"{rank}.tmp").rename(Path(folder, f"{rank}.pkl"))
    os._exit(0)


def _largest_error(module, example_inputs, solution, draws: bool) -> float:
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(example_inputs)):
        graph = capture(module, example_inputs, training=solution.training)
        values, _ = run_unsharded(module, example_inputs, graph, training=solution.training, seed=0)
        leaves, spec = pytree.tree_flatten(example_inputs)
        called = zip(input_names(module, example_inputs), leaves, strict=True)
        leaves = [values[name] if isinstance(leaf, torch.Tensor) else leaf for name, leaf in called]
        module, example_inputs = materialized(module, 0), pytree.tree_unflatten(leaves, spec)
    parallel = autoshard.parallelize(module, solution, init_device_mesh("cpu", (RANKS,)))
    found = _one_call(parallel, copy.deepcopy(example_inputs), solution.training)
    try:
        with deep_enough(module):
            expected = _one_call(copy.deepcopy(module), copy.deepcopy(example_inputs), solution.training)
    except NotImplementedError as error:
        raise ValueError(f"{ITSELF}: {error}") from error
    if found.keys() != expected.keys():
        raise RuntimeError(f"only one of the parallel module and the model gives {sorted(found.keys() ^ expected.keys())[:3]}")
    if draws:
        return 0.0 if all(bool(torch.isfinite(x).all()) for x in found.values()) else float("inf")
    largest = max((float(x.abs().max()) for key, x in expected.items() if key.startswith("gradient") and x.numel()), default=0.0)
    # A gradient that cancels to almost nothing (of a bias before a norm) carries the rounding of the largest one
    floors = {key: 1e-2 * largest if key.startswith("gradient") else 1e-3 for key in expected}
    errors = {key: difference(found[key], x, floors[key]) for key, x in expected.items()}
    allowed = tolerance(module)
    if max(errors.values()) > allowed and all(x.dtype == torch.float32 for x in expected.values() if x.is_floating_point()):
        exact = _one_call(module.double(), _double(example_inputs), solution.training)
        for key in (key for key, error in errors.items() if error > allowed):
            noise = NOISE * float((expected[key].double() - exact[key].double()).abs().max())
            errors[key] = difference(found[key], expected[key], max(floors[key], noise / allowed))
    return max(errors.values())


def _double(inputs):
    return pytree.tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)


def _one_call(module, inputs, training: bool) -> dict[str, torch.Tensor]:
    """Outputs, gradients, and what parameters and buffers hold afterwards."""
    with torch.set_grad_enabled(training):
        made = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    if training:
        torch.autograd.backward([x for x in tensors if x.requires_grad], [torch.ones_like(x) for x in tensors if x.requires_grad])
    found = {f"output {k}": x for k, x in enumerate(tensors)}
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    found |= {f"state {name}": x for name, x in [*module.named_parameters(), *module.named_buffers()]}
    return {key: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for key, x in found.items()}


def measure(name: str, training: bool, *, folder: Path = HF, random: int = 3, settings: dict | None = None) -> dict:
    """A row of the table without `run`, in this process; ValueError is what stops it."""
    module, example_inputs = build(name, training, folder, settings)
    row = {"model": name, "mode": "training" if training else "inference"}
    return row | planned(module, example_inputs, training) | verified(module, example_inputs, training, random)


# -- a row in a process of its own ------------------------------------------------------------------------------------------------------


def stages(order: dict) -> None:
    """Prints the parts of a row as they are known."""
    name, training = order["model"], order["training"]
    module, inputs = build(name, training, Path(order["folder"]), order["settings"])
    draws = name in STRANGERS and STRANGERS[name].draws

    def report(stage: str, work: Callable[[], dict]) -> bool:
        print(BEGIN + json.dumps({"stage": stage}), flush=True)
        try:
            part, ended = work(), True
        except ValueError as error:
            part, ended = {f"{stage}_stopped": " ".join(str(error).split()), f"{stage}_kind": "refused"}, False
        except Exception as error:  # of whatever kind, it is the row's
            said = " ".join(f"{type(error).__name__}: {error}".split())
            part, ended = {f"{stage}_stopped": said, f"{stage}_kind": "traceback"}, False
        print(BEGIN + json.dumps(part), flush=True)
        return ended

    def itself() -> dict:
        if all(not isinstance(leaf, torch.Tensor) or not leaf.is_meta for leaf in pytree.tree_leaves(inputs)):
            with torch.no_grad(), deep_enough(module):
                given = copy.deepcopy(inputs)
                copied = copy.deepcopy(module)
                copied(**given) if isinstance(given, dict) else copied(*given)
        return {}

    def on_gpu() -> dict:
        return {"no_cuda": sorted({r["target"] for r in api.dry_run(module, inputs, training=training)["cannot_run"]})}

    runs = report("itself", itself)
    if report("plan", lambda: planned(module, inputs, training)) and runs:
        report("run", lambda: ran(module, inputs, training, draws))
        report("cuda", on_gpu)
        report("verify", lambda: verified(module, inputs, training, order["random"]))


def row_of(name: str, training: bool, *, folder: Path = HF, random: int = 3, settings: dict | None = None, limit: float = 300) -> dict:
    """A row, whatever happens to the process that makes it."""
    order = {"model": name, "training": training, "folder": str(folder), "random": random, "settings": settings or {}}
    row: dict = {"model": name, "mode": "training" if training else "inference"}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, __file__, "--order", json.dumps(order)], stdout=said, stderr=errors, env=environment, start_new_session=True
        )
        try:
            process.wait(limit)
            late = ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.wait()
            late = f"it did not end within {limit:.0f} s"
        said.seek(0)
        errors.seek(0)
        for line in said.read().splitlines():
            if line.startswith(BEGIN):
                row |= json.loads(line.removeprefix(BEGIN))
        if late or process.returncode:
            stage = row.get("stage", "plan").replace("itself", "plan")
            last = (errors.read().strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
            row |= {f"{stage}_stopped": late or last, f"{stage}_kind": "time" if late else "traceback"}
    return row | {"verdict": verdict(row)}


def verdict(row: dict) -> str:
    known = STRANGERS.get(row["model"])
    if "plan_stopped" in row:
        rightly = known is not None and known.has_no_plan and known.refused in row["plan_stopped"]
        return "failed" if row["plan_kind"] != "refused" else "has no plan" if rightly else "not capturable"
    if known is not None and known.has_no_plan:
        return "wrong"
    if "itself_stopped" in row:
        return "itself"
    if not row.get("run_ok", True) or not row.get("ok", True):
        return "wrong"
    stopped = [stage for stage in ("run", "verify") if f"{stage}_stopped" in row]
    if stopped == ["run"] and row["run_stopped"].startswith(ITSELF):
        return "itself"
    expected = known is not None and known.draws and all(known.refused in row[f"{stage}_stopped"] for stage in stopped)
    return "not runnable" if stopped and not expected else "ok"


# -- the table --------------------------------------------------------------------------------------------------------------------


def line(row: dict) -> str:
    head = f"{row['model']:24} {row['mode']:9} {row['verdict']:14} "
    said = next((f"{s}: {row[f'{s}_stopped']}" for s in ("plan", "run", "verify", "itself") if f"{s}_stopped" in row), "")
    if "nodes" not in row:
        return head + said
    run = f"{row['run_error']:9.1e}" if "run_error" in row else f"{'-':>9}"
    worst = f"{row['worst_error']:9.1e}" if "worst_error" in row else f"{'-':>9}"
    statuses = " ".join(f"{row[f'status {mesh}']:>8}" for mesh in PLANNED)
    unknown = ", ".join(row["unknown"]) or "-"
    counts = f"{row['nodes']:6} {row['signatures']:6} {statuses} {row['cpu_seconds']:6.1f}"
    no_cuda = "; not on cuda: " + ", ".join(row["no_cuda"]) if row.get("no_cuda") else ""
    return f"{head}{counts} {run} {worst}  {unknown}{no_cuda}{'  ' + said if said else ''}"


def train(names: list[str], as_json: bool) -> int:
    """--train: prints a row per model."""
    rows = trained(names)
    wrong = [row for row in rows if row["verdict"] != "ok"]
    if as_json:
        print(json.dumps({"rows": rows, "models": len(rows), "wrong": len(wrong)}, indent=1))
        return bool(wrong)
    print(*table([plain(row) for row in rows]), sep="\n")
    print(f"{len(rows)} models trained, {len(wrong)} of them not as in one process")
    return bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HF)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--mode", choices=("inference", "training"))
    parser.add_argument("--random", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one row")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train", action="store_true", help="train the models of kinds/ on 2x2 ranks instead")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.order:
        stages(json.loads(given.order))
        return 0
    every = [*names(given.folder), *STRANGERS]
    if missing := [name for name in given.only or () if name not in every]:
        parser.error(f"there is no model {missing[0]!r}; there are {', '.join(every)}")
    if given.train:
        return train(given.only or [name for name, of in STRANGERS.items() if of.kind and not of.draws and True in of.modes], given.json)
    settings, rows = parse_settings(given.set), []
    if not given.json:
        counts = f"{'nodes':>6} {'signs':>6} {'8':>8} {'2x4':>8} {'cpu':>6}"
        print(f"{'model':24} {'mode':9} {'verdict':14} {counts} {'run':>9} {'verify':>9}  unknown")
    for name in given.only or every:
        for training in modes(name):
            if given.mode and training != (given.mode == "training"):
                continue
            rows.append(row_of(name, training, folder=given.folder, random=given.random, settings=settings, limit=given.limit))
            if not given.json:
                print(line(rows[-1]), flush=True)
    verdicts = {kind: sorted({row["model"] for row in rows if row["verdict"] == kind}) for kind in sorted({row["verdict"] for row in rows})}
    unknown = sorted({op for row in rows for op in row.get("unknown", ())})
    bad = [kind for kind in verdicts if kind not in ("ok", "itself", "has no plan")]
    if given.json:
        print(json.dumps({"rows": rows, "models": len({r["model"] for r in rows}), "verdicts": verdicts, "unknown": unknown}, indent=1))
    else:
        print(f"{len({r['model'] for r in rows})} models, {len(rows)} rows; unknown ops: {', '.join(unknown) or 'none'}")
        for kind, of in verdicts.items():
            print(f"{kind:14} {len(of):4}  {', '.join(of) if kind != 'ok' else ''}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
