"""The same answers before and after a change of the code: plans, pipelines, redistributions, table plans and simulations, to the last bit.

    python benchmarks/replay.py [ANSWERS] [--only NAME ...] [--write] [--against CHECKOUT] [--runs N] [--json]

ANSWERS: the file of answers to compare with (default: benchmarks/replay.json). --write: write this checkout's answers there instead; with
--only those alone, beside the others.
--against: another checkout of the project, run case by case beside this one: its answers are those that are compared, and the CPU
seconds of planning too (the median of --runs runs of each). Exit 1 where an answer differs; a float is written as `float.hex`, layouts as
a hash. Each case runs in a process of its own on one core with one thread.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")]

from benchmarks.own_process import in_own_process

ANSWERS = ROOT / "benchmarks" / "replay.json"


def plan_case(model: str, mesh: tuple[int, ...], settings: dict | None = None, **options) -> dict:
    return {"kind": "plan", "model": model, "mesh": mesh, "settings": settings or {}, "options": options}


def simulation(model: str, mesh: tuple[int, ...], settings: dict | None = None, simulated: dict | None = None, **options) -> dict:
    return {**plan_case(model, mesh, settings, **options), "kind": "simulate", "simulated": simulated or {}}


def variants(model: str, mesh: tuple[int, ...], settings: dict | None = None, **options) -> dict:
    """A plan of which everything is compared: what was tried, the advice beside it, or the words of the refusal."""
    return {**plan_case(model, mesh, settings, training=True, **options), "kind": "variants"}


SHORT = {"layers": 4}
LONG = {"batch": 1, "seq": 32768}  # a sequence that is worth sharding
WIDE = {"batch": 16, "seq": 2048, "vocab": 8192, "layers": 1}  # many logits: 32768 tokens
CASES: dict[str, dict] = {
    # -- plans: models x meshes x memory limits x training x pins x recompute
    "gpt2 2x4": plan_case("gpt2:small", (2, 4), {"batch": 512, "vocab": 50304}, training=True),
    "gpt2 2x4 limit": plan_case("gpt2:small", (2, 4), {"batch": 64, "layers": 4}, training=True, memory_limit=6e9, baselines=False),
    "gpt2 8 pins": plan_case("gpt2:small", (8,), SHORT, training=True, pins={"h.*.attn.c_attn.weight": "S(0)"}, price_pins=True),
    "gpt2 2x4 inference": plan_case("gpt2:small", (2, 4), {"batch": 8, "layers": 4}),
    "gpt2 2x2 uneven": plan_case("gpt2:tiny", (2, 2), {"vocab": 131}, training=True),
    "gpt2 2x2 tied blocks": plan_case("gpt2:tiny", (2, 2), {"layers": 4}, training=True, tie_blocks=True, baselines=False),
    "gpt2 6": plan_case("gpt2:tiny", (6,), {}, training=True),
    "llama3-8b 8x8": plan_case("llama:llama3_8b", (8, 8), {}, training=True, baselines=False),
    "llama3-8b 2x8 limit": plan_case("llama:llama3_8b", (2, 8), SHORT, training=True, memory_limit=30e9, gap=1e-3),
    "llama3-8b 4x8 recompute": plan_case("llama:llama3_8b", (4, 8), SHORT, training=True, recompute="all"),
    "llama3-8b 2x8 recompute auto": plan_case("llama:llama3_8b", (2, 8), SHORT, training=True, recompute="blocks", memory_limit=40e9),
    "llama3-8b 2x2x4": plan_case("llama:llama3_8b", (2, 2, 4), {"layers": 2}, training=True, baselines=False, gap=0.01),
    "llama3-8b 8 inference": plan_case("llama:llama3_8b", (8,), {"batch": 1, **SHORT}),
    "llama 2x2 recompute 1": plan_case("llama:tiny", (2, 2), {}, training=True, recompute=1),
    "llama 2x4 forbid": plan_case("llama:tiny", (2, 4), {}, training=True, forbid={"lm_head.weight": ["R,R"]}, price_pins=True),
    "bert 2x4": plan_case("bert:base", (2, 4), {"layers": 2}, training=True),
    "bert 4 inference": plan_case("bert:tiny", (4,), {}),
    "moe 2x4": plan_case("moe:tiny", (2, 4), {}, training=True),
    "moe 8 inference": plan_case("moe:tiny", (8,), {}),
    "resnet 2x2": plan_case("resnet:tiny", (2, 2), {}, training=True),
    "unet 2x2": plan_case("unet:tiny", (2, 2), {}, training=True),
    "dlrm 2x4": plan_case("dlrm:tiny", (2, 4), {}, training=True),
    "mlp 4x4": plan_case("mlp:mlp", (4, 4), {"layers": 8}, training=True, optimizer=12.0, master_weights=True),
    "mlp 8 limit": plan_case("mlp:mlp", (8,), {"layers": 8}, training=True, memory_limit=30e6),
    "llama 4 compiled": plan_case("llama:tiny", (4,), {"layers": 4}, training=True, compiled=True),
    # -- plans of which several variants are tried: order of the sequence x chunks of the loss x recomputation x what is optimised
    "variants head-tail": variants("llama:tiny", (2, 2), LONG, baselines=False),
    "variants head-tail asked": variants("llama:tiny", (4,), {**LONG, "layers": 1}, sequence_order="head_tail", microbatches=2),
    "variants head-tail dropped": variants("llama:tiny", (2, 2), {"batch": 8, "seq": 16384, "layers": 1}),
    "variants head-tail chunks blocks": variants("llama:tiny", (4,), LONG, memory_limit=60e6, recompute="blocks", baselines=False),
    "variants head-tail auto": variants("llama:tiny", (4,), {**LONG, "layers": 1}, memory_limit=80e6, recompute="auto", baselines=False),
    "variants head-tail refused": variants("llama:tiny", (4,), {**LONG, "layers": 1}, memory_limit=20e6, baselines=False),
    "variants chunks": variants("llama:tiny", (2,), WIDE, memory_limit=600e6),
    "variants chunks asked": variants("gpt2:tiny", (2, 2), {"vocab": 512}, chunked_loss="always", microbatches=2),
    "variants chunks refused": variants("llama:tiny", (2,), WIDE, memory_limit=60e6, baselines=False),
    "variants chunks blocks": variants("llama:tiny", (2,), {**WIDE, "layers": 4}, memory_limit=500e6, recompute="blocks", baselines=False),
    "variants chunks auto overlapped": variants(
        "llama:tiny", (2,), WIDE, memory_limit=600e6, recompute="auto", objective="overlapped", baselines=False
    ),
    "variants auto": variants("gpt2:tiny", (2, 2), SHORT, recompute="auto"),
    "variants auto limit": variants("llama:tiny", (2,), {"layers": 1, "batch": 32}, recompute="auto", memory_limit=3.6e6),
    "variants auto refused": variants("gpt2:tiny", (4,), {}, recompute="auto", memory_limit=5e4, baselines=False),
    "variants auto pins": variants(
        "mlp:tiny", (2, 2), SHORT, recompute="auto", pins={"layers.0.up.weight": "S(0),R"}, price_pins=True
    ),
    "variants blocks limit": variants("llama:tiny", (4,), {**LONG, "layers": 4}, recompute="blocks", memory_limit=80e6, gap=0.05),
    "variants blocks overlapped": variants(
        "gpt2:tiny", (4,), {"batch": 64}, recompute="blocks", objective="overlapped"
    ),
    "variants auto tied blocks": variants("llama:tiny", (2, 2), SHORT, recompute="auto", tie_blocks=True),
    "variants overlapped microbatches": variants("gpt2:tiny", (4,), {}, objective="overlapped", global_batch=32),
    "variants microbatches keep": variants(
        "gpt2:tiny", (2, 2), {}, microbatches=4, keep={"wte.weight": "S(0),R", "h.0.mlp.c_fc.weight": "R,R"}
    ),
    "variants pins refused": variants(
        "mlp:tiny", (4,), {}, pins={"layers.0.up.weight": "R"}, forbid={"layers.1.up.weight": ["R"]}, memory_limit=3e4, price_pins=True
    ),
    "meshes gpt2 4": {
        "kind": "meshes", "model": "gpt2:tiny", "devices": 4, "settings": SHORT,
        "options": {"training": True, "recompute": "blocks"},
    },
    "meshes llama 4 overlapped": {
        "kind": "meshes", "model": "llama:tiny", "devices": 4, "settings": {"layers": 1},
        "options": {"training": True, "objective": "overlapped", "chunked_loss": "always", "pins": {"lm_head.weight": "S(0),*"}},
    },
    "meshes refused": {
        "kind": "meshes", "model": "mlp:tiny", "devices": 4, "settings": {}, "options": {"training": True, "memory_limit": 9e3},
    },
    # -- several programs on one set of weights
    "programs mlp": {
        "kind": "programs", "mesh": (4,), "options": {},
        "programs": {"train": ("mlp:tiny", {}, {"training": True}), "use": ("mlp:tiny", {"loss": False}, {"weight": 50.0})},
    },
    "programs mlp parts": {
        "kind": "programs", "mesh": (2, 2), "options": {"switches": 2.0, "microbatches": 2},
        "programs": {
            "train": ("mlp:tiny", SHORT, {"training": True, "options": {"recompute": 1}}),
            "use": ("mlp:tiny", {**SHORT, "loss": False}, {"weight": 500.0, "devices": [0, 1], "options": {"microbatches": 1}}),
        },
    },
    "programs llama shared": {
        "kind": "programs", "mesh": (2, 2), "options": {"switches": None},
        "programs": {"train": ("llama:tiny", SHORT, {"training": True}), "use": ("llama:tiny", {**SHORT, "loss": False}, {"weight": 9.0})},
    },
    "programs refused": {
        "kind": "programs", "mesh": (4,), "options": {"memory_limit": 4.5e4},
        "programs": {"train": ("mlp:tiny", {}, {"training": True}), "use": ("mlp:tiny", {"loss": False}, {"weight": 500.0})},
    },
    # -- other questions to the same problem
    "frontier gpt2": {
        "kind": "frontier", "model": "gpt2:tiny", "mesh": (2, 2), "settings": SHORT, "options": {"training": True, "points": 5},
    },
    "regret llama": {
        "kind": "regret", "model": "llama:tiny", "mesh": (2, 2), "settings": SHORT, "scheme": "megatron", "options": {"recompute": 1},
    },
    # -- pipelines
    "pipeline gpt2 8": {"kind": "pipeline", "model": "gpt2:tiny", "devices": 8, "settings": {"layers": 4, "batch": 32}, "options": {}},
    "pipeline gpt2 4 inference": {
        "kind": "pipeline", "model": "gpt2:tiny", "devices": 4, "settings": {"layers": 4, "batch": 16}, "options": {"training": False},
    },
    "pipeline llama 16": {
        "kind": "pipeline", "model": "llama:llama3_8b", "devices": 16, "settings": {"layers": 8, "batch": 16},
        "options": {"memory_limit": 40e9, "microbatches": [8]},
    },
    "pipeline unet 4": {"kind": "pipeline", "model": "unet:tiny", "devices": 4, "settings": {"batch": 32}, "options": {"grid": False}},
    "pipeline mlp 8 recompute": {
        "kind": "pipeline", "model": "mlp:mlp", "devices": 8, "settings": {"layers": 16, "batch": 1024}, "options": {"recompute": "always"},
    },
    "pipeline bert 6": {
        "kind": "pipeline", "model": "bert:tiny", "devices": 6, "settings": {"layers": 6, "batch": 24},
        "options": {"schedules": ["1f1b", "zb_h1"]},
    },
    # -- redistributions: planner x prices, all problems of the file
    **{
        f"redistribute {' '.join(options) or 'astar'}".replace("--", ""): {"kind": "redistribute", "options": options}
        for options in ([], ["--planner", "naive"], ["--count", "buffers"])
    },
    # -- tables
    **{
        f"tables {count} on {mesh}": {"kind": "tables", "count": count, "mesh": mesh, "options": options}
        for count, mesh, options in ((30, (8,), {"hbm": 80e9}), (60, (2, 4), {"hbm": 4e9, "host_memory": 512e9}),
                                     (100, (2, 8), {"hbm": 60e9}), (12, (2,), {"hbm": 60e9, "reserve": 0.1}))
    },
    # -- simulations
    "simulate gpt2 2x4": simulation("gpt2:small", (2, 4), SHORT, training=True),
    "simulate gpt2 2x4 no overlap": simulation("gpt2:small", (2, 4), SHORT, {"overlap": False}, training=True),
    "simulate gpt2 2x4 no join": simulation("gpt2:small", (2, 4), SHORT, {"join": False}, training=True),
    "simulate gpt2 8 prefetch 1": simulation("gpt2:small", (8,), SHORT, {"prefetch": 1}, training=True),
    "simulate llama 2x8": simulation("llama:llama3_8b", (2, 8), SHORT, training=True),
    "simulate llama 2x8 recompute": simulation("llama:llama3_8b", (2, 8), SHORT, training=True, recompute=2),
    "simulate llama 8 inference": simulation("llama:llama3_8b", (8,), {"batch": 1, **SHORT}),
    "simulate bert 2x2": simulation("bert:tiny", (2, 2), {}, training=True),
    "simulate moe 4": simulation("moe:tiny", (4,), {}, training=True),
    "simulate grid gpt2": {
        "kind": "grid", "model": "gpt2:tiny", "settings": {"layers": 4, "batch": 32},
        "grid": [[1, 4, 1, 1], [2, 2, 1, 2], [1, 2, 2, 4], [1, 1, 4, 8]], "options": {"schedule": "1f1b"},
    },
}  # fmt: skip


# -- in the process that is measured ---------------------------------------------------------------------------------------------------


def load(case: dict):
    from autoshard.cli.model import load_model

    name, function = case["model"].split(":")
    return load_model(f"models/{name}.py:{function}", case["settings"])


def hashed(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def exact(value: object) -> object:
    """Plain data with every float as its hex text."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): exact(one) for key, one in value.items()}
    return [exact(one) for one in value] if isinstance(value, (list, tuple)) else value


def layouts_hash(layouts: dict, results: dict | None = None) -> str:
    return hashed([{name: [row.inputs, row.outputs, row.hubs] for name, row in layouts.items()}, results])


def of_solution(solution) -> dict:
    baselines = {name: [row["cost_seconds"], row["peak_bytes"]] for name, row in solution.baselines.items()}
    return {
        "status": solution.status, "cost": solution.cost, "bound": solution.bound, "peak": solution.peak_bytes, "baselines": baselines,
        "layouts": layouts_hash(solution.layouts, solution.results), "parameters": hashed(solution.parameters),
    }  # fmt: skip


def planned(case: dict):
    from autoshard import Mesh, plan

    options = {key: tuple(value) if isinstance(value, list) else value for key, value in case["options"].items()}
    return plan(*load(case), Mesh.from_bandwidths(tuple(case["mesh"]), devices_per_node=min(8, case["mesh"][-1])), **options)


def answer_plan(case: dict) -> dict:
    from autoshard import Infeasible

    try:
        return of_solution(planned(case))
    except Infeasible as error:
        return {"status": "infeasible", "smallest_limit": error.smallest_limit}


def in_full(solution) -> dict:
    noted = {key: value for key, value in solution.assumptions.items() if not key.endswith("_version")}
    return {**of_solution(solution), "beside": hashed([solution.modules, solution.overlapped, solution.peak]), "noted": hashed(noted)}


def refusal(error) -> dict:
    """Without the smallest limit that works, which is searched for as long as there is time."""
    message = re.sub(r"the smallest limit that works is [^)]*\)", "", str(error))
    return {"status": error.status, "message": message, "conflict": list(map(str, error.conflict)), "minimal": error.minimal}


def answer_variants(case: dict) -> dict:
    from autoshard import Infeasible

    try:
        return in_full(planned(case))
    except Infeasible as error:
        return refusal(error)


def answer_meshes(case: dict) -> dict:
    from autoshard import Infeasible, Mesh
    from autoshard.api import mesh_shapes, plan_meshes

    meshes = [Mesh.from_bandwidths(shape, devices_per_node=2) for shape in mesh_shapes(case["devices"], 2)]
    try:
        plans = plan_meshes(*load(case), meshes, **case["options"])
    except Infeasible as error:
        return refusal(error)
    return {
        "best": in_full(plans.best),
        "plans": [[plan.name, plan.message, in_full(plan.solution) if plan.solution else None] for plan in plans.plans],
    }


def answer_programs(case: dict) -> dict:
    from autoshard import Infeasible, Mesh, Program
    from autoshard.planning import plan_programs

    programs = {name: Program(*load({"model": m, "settings": settings}), **more) for name, (m, settings, more) in case["programs"].items()}
    try:
        plan = plan_programs(programs, Mesh.from_bandwidths(tuple(case["mesh"])), **case["options"])
    except Infeasible as error:
        return refusal(error)
    alone = {name: in_full(one) for name, one in plan.programs.items()}
    skipped = ("programs", "seconds", "cpu_seconds", "wall_seconds")
    rest = {"format": 1} | {key: value for key, value in plan.to_dict().items() if key not in skipped}  # as the saved answers have it
    return {"cost": plan.cost, "bound": plan.bound, "status": plan.status, "programs": alone, "rest": hashed(exact(rest))}


def answer_frontier(case: dict) -> dict:
    from autoshard import Mesh, frontier

    curve = frontier(*load(case), Mesh.from_bandwidths(tuple(case["mesh"])), **case["options"])
    rest = {key: value for key, value in curve.to_dict().items() if "seconds" not in key}
    return {"rest": hashed(exact(rest)), "plans": [in_full(curve.solution(i)) for i in range(len(curve.points))]}


def answer_regret(case: dict) -> dict:
    from autoshard import Mesh
    from autoshard.planning import regret

    row = regret(*load(case), Mesh.from_bandwidths(tuple(case["mesh"])), case["scheme"], **case["options"])
    return {"cost": row.cost, "bound": row.bound, "peak": row.peak_bytes}


def answer_simulate(case: dict) -> dict:
    from autoshard.api import simulate

    timeline = simulate(*load(case), planned(case), **case["simulated"])
    return {
        "seconds": timeline.seconds, "peak": timeline.peak_bytes, "exposed": timeline.exposed_communication_seconds,
        "critical_path": hashed(exact([getattr(task, "name", str(task)) for task in timeline.critical_path])),
    }  # fmt: skip


def answer_grid(case: dict) -> dict:
    from autoshard import Mesh
    from autoshard.api import Parallel, simulate_grid

    configurations = [Parallel(*row) for row in case["grid"]]
    rows = simulate_grid(*load(case), configurations, lambda sizes: Mesh.from_bandwidths(sizes, devices_per_node=4), **case["options"])
    return {"rows": [[row.seconds, row.peak_bytes, row.bubble, row.exposed_communication_seconds] for row in rows]}


def answer_pipeline(case: dict) -> dict:
    from autoshard import Cluster
    from autoshard.pipeline import pipeline

    options = {key: tuple(value) if isinstance(value, list) else value for key, value in case["options"].items()}
    best = pipeline(*load(case), Cluster.of(case["devices"], devices_per_node=min(8, case["devices"])), **options)
    stages = [[s.first, s.last, s.devices, s.mesh, s.recompute, layouts_hash(s.layouts)] for s in best.stages]
    return {
        "seconds": best.seconds, "bound": best.bound, "peak": best.peak_bytes, "bubble": best.bubble, "schedule": best.schedule,
        "microbatches": best.microbatches, "stages": hashed(stages), "configurations": hashed(exact(list(best.configurations))),
    }  # fmt: skip


def answer_redistribute(case: dict) -> dict:
    command = [sys.executable, "-m", "autoshard", "redistribute", "tests/data/redistribution/problems.json", "--json", *case["options"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise SystemExit(done.stderr)
    routes = json.loads(done.stdout)["routes"]
    rows = [{key: value for key, value in route.items() if key != "cpu_seconds"} for route in routes]
    return {"routes": len(rows), "cost": sum(row["cost_seconds"] or 0.0 for row in rows), "all": hashed(exact(rows))}


def answer_tables(case: dict) -> dict:
    from autoshard import Mesh, Table, plan_tables

    tables = [
        Table(f"t{k}", rows=10_000 * (1 + k * 7919 % 97) ** 2 // 4, columns=16 * (1 + k % 8), pooling=float(1 + k * 31 % 40))
        for k in range(case["count"])
    ]
    mesh = Mesh.from_bandwidths(tuple(case["mesh"]), devices_per_node=min(8, case["mesh"][-1]))
    found = plan_tables(tables, mesh, effort=0.2, **case["options"])
    rows = {name: [row.option.sharding, row.option.seconds, row.devices] for name, row in found.tables.items()}
    return {"status": found.status, "seconds": found.slowest_device_seconds, "bound": found.bound_seconds, "tables": hashed(rows)}


def run_case(case: dict) -> dict:
    """The answer, and the CPU seconds it took after the imports (of a command: with them)."""
    import torch

    torch.set_num_threads(1)
    if case["kind"] not in ("redistribute", "tables"):
        from autoshard import Mesh, plan

        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        plan(module, (torch.zeros(8, 8),), Mesh.from_bandwidths((2,)), baselines=False)  # lazy imports happen now
    before = os.times()
    answer = globals()[f"answer_{case['kind']}"](case)
    after = os.times()
    return {"answer": exact(answer), "cpu_seconds": sum(after[:4]) - sum(before[:4])}


# -- the comparison --------------------------------------------------------------------------------------------------------------------


def differing(ours: dict, theirs: dict | None) -> list[str]:
    """The keys in which two answers differ."""
    if theirs is None:
        return ["no answer to compare with"]
    return sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", nargs="?", type=lambda word: Path(word).resolve(), default=ANSWERS)
    parser.add_argument("--only", nargs="*", help="cases whose name begins so")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--against", type=lambda word: Path(word).resolve(), help="another checkout")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.order:
        sys.path.remove(str(ROOT))  # the package is that of PYTHONPATH: the checkout's
        print(json.dumps(run_case(json.loads(given.order))))
        return 0
    os.chdir(ROOT)
    known = json.loads(given.answers.read_text())["answers"] if given.answers.exists() else {}
    rows, answers = [], {}
    for name, case in CASES.items():
        if given.only and not any(name.startswith(part) for part in given.only):
            continue
        ours, theirs = [], []
        for _ in range(given.runs):
            ours.append(in_own_process(__file__, case))
            theirs += [in_own_process(__file__, case, checkout=given.against)] if given.against else []
        reference = theirs[0]["answer"] if theirs else known.get(name)
        answers[name] = ours[0]["answer"]
        row = {"case": name, "cpu_seconds": statistics.median(run["cpu_seconds"] for run in ours)}
        row["differs"] = [] if given.write else differing(ours[0]["answer"], reference)
        if theirs:
            row["their_cpu_seconds"] = statistics.median(run["cpu_seconds"] for run in theirs)
        rows.append(row)
        if not given.json:
            other = f"{row['their_cpu_seconds']:8.2f}" if theirs else ""
            print(f"{name:32} {row['cpu_seconds']:8.2f} {other} {'DIFFERS in ' + ', '.join(row['differs']) if row['differs'] else 'same'}",
                  flush=True)  # fmt: skip
    if given.write:
        answers = {**known, **answers} if given.only else answers
        partial = given.answers.with_suffix(".partial")
        partial.write_text(json.dumps({"written": time.strftime("%Y-%m-%d"), "answers": answers}, indent=1) + "\n")
        partial.replace(given.answers)
    result = {"cases": len(rows), "differing": sum(bool(row["differs"]) for row in rows), "rows": rows}
    total = sum(row["cpu_seconds"] for row in rows)
    result["cpu_seconds"] = total
    if given.against:
        result["ratio"] = total / sum(row["their_cpu_seconds"] for row in rows)
    if given.json:
        print(json.dumps(result))
    else:
        ratio = f", {result['ratio']:.3f} times theirs" if given.against else ""
        print(f"{len(rows)} cases, {result['differing']} differ, {total:.1f} CPU s{ratio}")
    return int(result["differing"] > 0)


if __name__ == "__main__":
    sys.exit(main())
