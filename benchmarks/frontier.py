"""Memory against time with proof: one sweep of the price of memory, beside one plan per limit with a short time limit.

    python benchmarks/frontier.py [DIR] [--only NAME ...] [--points 12] [--time-limit 5] [--no-plans] [--json]

DIR holds the models' files (default: models/). Every case runs in a process of its own on one core with one thread; seconds are its CPU
seconds after the imports and with numba's functions compiled, capture and formulation included. plans: the naive way, `plan` with
each point's memory as the limit and --time-limit seconds for the solver; `proven` counts those within the gap that the sweep promises
(0.1 %). A row fails when fewer than --points are proven, when the sweep takes longer than its limit (60 CPU seconds for Llama-3 8B, the
figure that was asked for), or when a plan beats a bound.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")]

from benchmarks.own_process import in_own_process

CASES: dict[str, dict] = {
    "gpt2-small 2x4": {"model": "gpt2.py:small", "settings": {"batch": 512, "vocab": 50304}, "mesh": (2, 4), "limit": None},
    "llama3-8b 8x8": {"model": "llama.py:llama3_8b", "settings": {}, "mesh": (8, 8), "limit": 60.0},
}
PROVEN = 1e-3  # relative
ROUNDING = 1e-9


def sweep_and_plan(case: dict, folder: str, points: int, time_limit: float | None) -> dict:
    """The frontier of one case, and with a time limit the plans at its limits; in the process that is measured."""
    import torch

    from autoshard import api
    from autoshard.cli.model import load_model
    from autoshard.mesh import Mesh

    torch.set_num_threads(1)
    warm_up(api, Mesh)
    module, example_inputs = load_model(f"{folder}/{case['model']}", case["settings"])
    mesh = Mesh.from_bandwidths(tuple(case["mesh"]), devices_per_node=min(8, case["mesh"][-1]))
    began = time.process_time()
    found = api.frontier(module, example_inputs, mesh, training=True, points=points, gap=PROVEN)
    row = {
        "cpu_seconds": time.process_time() - began,
        "phases": found.seconds["cpu"],
        "proven": len(found.proven),
        "points": found.to_dict()["points"],
        "plans": None,
    }
    if time_limit is not None:
        row["plans"] = [one_plan(api, module, example_inputs, mesh, p, time_limit) for p in found.points]
    return row


def one_plan(api, module, example_inputs, mesh, point, time_limit: float) -> dict:
    """`plan` under the memory of a point, as it would be asked without a frontier."""
    began = time.process_time()
    given = {"training": True, "memory_limit": point.limit_bytes, "time_limit": time_limit, "baselines": False}
    try:
        plan = api.plan(module, example_inputs, mesh, **given)
        known = {"seconds": plan.cost, "bound_seconds": plan.bound, "gap": plan.gap}
    except api.Infeasible:
        known = {"seconds": None, "bound_seconds": None, "gap": None}
    return {**known, "cpu_seconds": time.process_time() - began}


def warm_up(api, Mesh) -> None:
    """A frontier of next to nothing: lazy imports (of torch, numba, HiGHS) happen now."""
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    api.frontier(module, (torch.zeros(8, 8),), Mesh.from_bandwidths((2,)), points=2)


# -- the table -------------------------------------------------------------------------------------------------------------------------


def judged(name: str, case: dict, row: dict, points: int) -> dict:
    plans = row["plans"] or []
    row = {"case": name, **row, "limit_seconds": case["limit"]}
    row["plans_cpu_seconds"] = sum(p["cpu_seconds"] for p in plans)
    row["plans_proven"] = sum(p["gap"] is not None and p["gap"] <= PROVEN for p in plans)
    beaten = [
        p
        for p, q in zip(row["points"], plans)
        if q["seconds"] is not None
        and (q["seconds"] < p["bound_seconds"] * (1 - ROUNDING) or q["bound_seconds"] > p["seconds"] * (1 + ROUNDING))
    ]
    row["contradictions"] = len(beaten)
    in_time = case["limit"] is None or row["cpu_seconds"] <= case["limit"]
    row["ok"] = row["proven"] >= points and in_time and not beaten
    return row


def lines(row: dict) -> list[str]:
    plans = row["plans"] or [None] * len(row["points"])
    shown = [f"{row['case']}: {row['proven']} points proven in {row['cpu_seconds']:.1f} CPU s {'ok' if row['ok'] else 'MISSED'}"]
    if row["plans"] is not None:
        shown.append(f"  one plan per limit: {row['plans_proven']} of {len(plans)} proven in {row['plans_cpu_seconds']:.1f} CPU s")
    shown.append(f"  {'GB':>8} {'seconds':>11} {'bound':>11} {'gap':>8} {'status':>9} {'plan':>11} {'its gap':>8} {'CPU s':>6}")
    for p, q in zip(row["points"], plans):
        naive = ""
        if q is not None:
            known = q["seconds"] is not None
            naive = f"{q['seconds']:>11.6f} {q['gap']:>8.1e}" if known else f"{'none found':>11} {'':>8}"
            naive += f" {q['cpu_seconds']:>6.1f}"
        shown.append(
            f"  {p['memory_bytes'] / 1e9:>8.3f} {p['seconds']:>11.6f} {p['bound_seconds']:>11.6f} {p['gap']:>8.1e} {p['status']:>9} {naive}"
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "models")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--points", type=int, default=12)
    parser.add_argument("--time-limit", type=float, default=5.0)
    parser.add_argument("--no-plans", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.order:
        print(json.dumps(sweep_and_plan(**json.loads(given.order))))
        return 0
    rows = []
    for name, case in CASES.items():
        if given.only is None or any(part in name for part in given.only):
            plans = None if given.no_plans else given.time_limit
            found = in_own_process(__file__, {"case": case, "folder": str(given.folder), "points": given.points, "time_limit": plans})
            rows.append(judged(name, case, found, given.points))
            if not given.json:
                print("\n".join(lines(rows[-1])), flush=True)
    ok = all(row["ok"] for row in rows)
    if given.json:
        print(json.dumps({"rows": rows, "ok": ok}))
    return not ok


if __name__ == "__main__":
    sys.exit(main())
