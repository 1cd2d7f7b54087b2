"""Plans under a memory limit that binds, with prices first and by branch and bound alone: the gap, and CPU seconds, from the same run.

    python benchmarks/limited.py [DIR] [--only NAME ...] [--large] [--time-limit 15] [--json]
    python benchmarks/limited.py --only gpt2 --time-limit 5

DIR holds the models' files (default: models/). A case is a model, a mesh, blocks that are recomputed, and its limit: bytes per device, or a
part of what its fastest plan holds. One process per case, on one core with one thread, solves the same problem twice from the same start:
`with` as `plan` does (the solver auto), `without` by the second half of auto alone (autoshard/solvers/settle.py). Seconds are CPU seconds
of the solver, and so is --time-limit; capture and formulation are left out. --large is Llama-3 70B on 8x8 with 20 of its 80 blocks
recomputed, in 80 GB, 60 s each. `to 1 %`: when the answer was proven to be within that of the best. A row fails where the bound of one is
above the other's cost, where the gap of `with` is above what the case allows, or above that of `without` by more than 0.1 %.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")]

from benchmarks.own_process import in_own_process

CASES: dict[str, dict] = {  # share: of what the fastest plan holds; most: the largest gap of `with`, relative
    "gpt2-12 2x4": {"model": "gpt2.py:small", "settings": {"batch": 512, "vocab": 50304}, "mesh": (2, 4), "share": 0.97, "most": 1e-3},
    "bert-4 8": {"model": "bert.py:base", "settings": {"layers": 4, "vocab": 30528}, "mesh": (8,), "share": 0.85, "most": 0.01},
    "llama-12 8x8": {
        "model": "llama.py:llama3_8b", "settings": {"layers": 12}, "mesh": (8, 8), "recompute": 3, "share": 0.8, "most": 2e-3,
    },
}  # fmt: skip
LARGE: dict[str, dict] = {
    "llama3-70b 8x8": {"model": "llama.py:llama3_70b", "mesh": (8, 8), "recompute": 20, "limit_bytes": 80e9, "most": 0.005},
}
LARGE_SECONDS = 60.0
NEAR = 0.01  # relative
EVEN = 1e-3  # relative: gaps that differ by less say nothing
SECONDS = 15.0
ROUNDING = 1e-9  # relative


# -- in the process that is measured ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """auto without the search over prices that comes first under a limit."""

    time_limit: float | None = None
    gap: float | None = None

    def run(self, problem, incumbent) -> None:
        from autoshard.solvers.settle import reduce_and_settle

        reduce_and_settle(problem, incumbent)


def compare(case: dict, folder: str, time_limit: float) -> dict:
    """One problem, solved twice."""
    import torch

    torch.set_num_threads(1)
    solve, problem, fastest = formulated(case, folder)
    given = [u.bytes.size for u in problem.usages]
    row = {"nodes": len(problem.node_costs), "bytes_cells": sum(given), "limit_bytes": problem.usage_limit, "fastest_bytes": fastest}
    for name, solver in (("with", "auto"), ("without", Alone())):
        row[name] = timed(solve, problem, solver, time_limit)
    return row


def formulated(case: dict, folder: str):
    """What solves it, as `plan` does; the problem with its limit; and the bytes that its fastest plan holds, or None."""
    from dataclasses import replace
    from functools import partial

    from autoshard.capture import capture_deep
    from autoshard.cli.model import load_model
    from autoshard.graph import checkpointed
    from autoshard.mesh import Mesh
    from autoshard.planning.instance import extended_from, formulate_for, layers_of_nodes
    from autoshard.planning.options import Options
    from autoshard.problem import without_limit
    from autoshard.solvers import solve
    from autoshard.strategies import candidates

    module, example_inputs = load_model(f"{folder}/{case['model']}", case.get("settings", {}))
    mesh = Mesh.from_bandwidths(tuple(case["mesh"]), devices_per_node=min(8, case["mesh"][-1]))
    graph, depth = capture_deep(module, example_inputs, training=True)
    blocks = case.get("recompute", 0)
    graph = checkpointed(graph, blocks)
    options = Options(training=True, memory_limit=case.get("limit_bytes"))
    made = formulate_for(graph, candidates(graph, mesh), mesh, options)
    few = None if depth.few_layers is None or blocks else extended_from(depth.few_layers, made, options)
    run = partial(solve if few is None else few.solve, preference=made.preference, homes=layers_of_nodes(made))
    if "share" not in case:
        return run, made.problem, None
    free = run(without_limit(made.problem), gap=ROUNDING)
    return run, replace(made.problem, usage_limit=case["share"] * free.peak), free.peak


def timed(solve, problem, solver, time_limit: float) -> dict:
    """What is known when time is up, and when that was found. The clock is that of the processor."""
    heard: list[tuple[float, float]] = []  # CPU seconds, gap

    def hear(cost: float, bound: float) -> None:
        if math.isfinite(cost) and math.isfinite(bound):
            heard.append((time.process_time() - began, (cost - bound) / abs(cost)))

    began = time.process_time()
    answer = solve(problem, solver=solver, time_limit=time_limit, progress=hear, clock=time.process_time)
    seconds = time.process_time() - began
    known = {"cost_seconds": answer.cost, "bound_seconds": answer.bound, "gap": answer.gap}
    return {
        "status": answer.status.value,
        **{key: value if math.isfinite(value) else None for key, value in known.items()},
        "peak_bytes": answer.peak,
        "cpu_seconds": seconds,
        "near_at_seconds": next((seconds for seconds, gap in heard if gap <= NEAR), None),
    }


# -- the table -------------------------------------------------------------------------------------------------------------------------


def judged(name: str, case: dict, row: dict) -> dict:
    ours, alone = row["with"], row["without"]
    contradiction = any(
        a["bound_seconds"] is not None and b["cost_seconds"] is not None and a["bound_seconds"] > b["cost_seconds"] * (1 + ROUNDING)
        for a, b in ((ours, alone), (alone, ours))
    )
    gap, other = (math.inf if one["gap"] is None else one["gap"] for one in (ours, alone))
    fits = ours["peak_bytes"] is not None and ours["peak_bytes"] <= row["limit_bytes"]
    ok = fits and not contradiction and gap <= case["most"] and gap <= other + EVEN
    return {"case": name, **row, "most": case["most"], "contradiction": contradiction, "ok": ok}


def lines(row: dict) -> list[str]:
    shown = []
    for name in ("with", "without"):
        one = row[name]
        gap = "none" if one["gap"] is None else f"{one['gap']:.2%}" if one["gap"] > 1e-6 else "0"
        cost = "none" if one["cost_seconds"] is None else f"{one['cost_seconds']:.6f}"
        near = "never" if one["near_at_seconds"] is None else f"{one['near_at_seconds']:.1f}"
        verdict = ("ok" if row["ok"] else "MISSED") if name == "with" else ""
        head = f"{row['case']:16} {row['nodes']:>6} {row['limit_bytes'] / 1e9:>8.3f}" if name == "with" else f"{'':32}"
        shown.append(f"{head} {name:>8} {one['status']:>10} {cost:>11} {gap:>8} {one['cpu_seconds']:>7.1f} {near:>7} {verdict}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "models", help="of the models' files")
    parser.add_argument("--only", nargs="*", help="cases whose names hold one of these")
    parser.add_argument("--large", action="store_true", help="Llama-3 70B instead of the small cases: some minutes")
    said = f"CPU seconds for each solve (default: {SECONDS:g}, with --large {LARGE_SECONDS:g})"
    parser.add_argument("--time-limit", type=float, help=said)
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.order:
        print(json.dumps(compare(**json.loads(given.order))))
        return 0
    time_limit = given.time_limit or (LARGE_SECONDS if given.large else SECONDS)
    if not given.json:
        print(f"{'':16} {'nodes':>6} {'limit GB':>8} {'prices':>8} {'status':>10} {'seconds':>11} {'gap':>8} {'CPU s':>7} {'to 1 %':>7}")
    rows = []
    for name, case in (LARGE if given.large else CASES).items():
        if given.only is None or any(part in name for part in given.only):
            order = {"case": case, "folder": str(given.folder), "time_limit": time_limit}
            rows.append(judged(name, case, in_own_process(__file__, order)))
            if not given.json:
                print("\n".join(lines(rows[-1])), flush=True)
    ok = all(row["ok"] for row in rows)
    if given.json:
        print(json.dumps({"rows": rows, "ok": ok}))
    return not ok


if __name__ == "__main__":
    sys.exit(main())
