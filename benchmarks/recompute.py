"""Recomputation per tensor against whole blocks, under the same memory limits: seconds of a step, and the bytes that its program takes.

    python benchmarks/recompute.py [DIR] [--only NAME ...] [--share 0.85 ...] [--large] [--json]

DIR holds the models' files (default: models/). A case is a model, a mesh and a limit: a part of what the fastest plan holds.
Each is planned with recompute="blocks" (the number of blocks that is cheapest) and with recompute="auto" (each saved value kept, recomputed
or offloaded), both to 1 %, one process per case. `cost` is what the plans minimise, `simulated` the end of their time line with overlap,
`measured` the peak under torch's MemTracker of the program of rank 0, forward and backward, on fake tensors of a GPU. Seconds are CPU
seconds of planning with "auto". A row fails where the step is slower than with blocks, by cost (beyond the 1 %), where the peak is more
than 10 % from the measured one, or where it exceeds the limit. --large: Llama-3 8B on 2x8 and 70B on 8x8 in 80 GB, "auto" alone, 60 s.
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
    "gpt2-4 2x4": {"model": "gpt2.py:small", "settings": {"layers": 4, "batch": 64, "seq": 1024, "vocab": 50304}, "mesh": (2, 4)},
    "llama-4 2x4": {"model": "llama.py:llama3_8b", "settings": {"layers": 4}, "mesh": (2, 4)},
    "bert-4 8": {"model": "bert.py:base", "settings": {"layers": 4, "vocab": 30528, "batch": 256}, "mesh": (8,)},
    "moe 8": {"model": "moe.py:moe", "settings": {}, "mesh": (8,)},
    "mlp-6 8": {"model": "mlp.py:mlp", "settings": {"layers": 6, "batch": 65536}, "mesh": (8,)},
    "resnet18 8": {"model": "resnet.py:resnet18", "settings": {}, "mesh": (8,)},
}
LARGE: dict[str, dict] = {
    "llama3-8b 2x8": {"model": "llama.py:llama3_8b", "settings": {}, "mesh": (2, 8), "limit_bytes": 80e9},
    "llama3-70b 8x8": {"model": "llama.py:llama3_70b", "settings": {}, "mesh": (8, 8), "limit_bytes": 80e9},
}
SHARES = (0.85, 0.7, 0.55)
GAP, BETTER, TOLERANCE = 0.01, 0.05, 0.10


def measured_peak_on_device(graph, solution, optimizer: str = "adamw") -> int:
    """Bytes that one rank holds at most on its device while it runs the plan's program; what waits in the host's memory does not count.

    graph: as it runs, with what the plan recomputes and offloads.
    """
    from benchmarks.memory import measured_peak

    with on_host():
        return measured_peak(graph, solution, optimizer=optimizer)


def on_host():
    """A mode in which the host's memory is the meta device, so that MemTracker tells it from the device, which is the CPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from autoshard.lower.kernels import offload  # noqa: F401  (defines the operators)

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            target = {torch.ops.autoshard.offload.default: "meta", torch.ops.autoshard.reload.default: "cpu"}.get(func)
            if target is None:
                return func(*args, **(kwargs or {}))
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=target)

    return OnHost()


# -- in the process that is measured ---------------------------------------------------------------------------------------------------


def compare(case: dict, folder: str, shares: list[float]) -> list[dict]:
    """A row per limit."""
    import torch

    from autoshard import Mesh, api
    from autoshard.capture import capture
    from autoshard.cli.model import load_model

    torch.set_num_threads(1)
    mesh = Mesh.from_bandwidths(case["mesh"])
    model = load_model(f"{folder}/{case['model']}", case["settings"])
    options = {"training": True, "baselines": False, "gap": GAP}
    if "limit_bytes" in case:
        return [planned(api, model, mesh, {**options, "memory_limit": case["limit_bytes"], "time_limit": 3000.0}, "auto", None)]
    graph = capture(*model, training=True)
    free = api.plan(*model, mesh, **options)
    rows = []
    for share in shares:
        limited = {**options, "memory_limit": share * free.peak_bytes, "time_limit": 3000.0}
        rows.append({"limit_bytes": limited["memory_limit"], "free_seconds": free.cost, "share": share})
        for ways in ("blocks", "auto"):
            rows[-1][ways] = planned(api, model, mesh, limited, ways, graph)
    return rows


def planned(api, model: tuple, mesh, options: dict, recompute: str, graph) -> dict:
    from autoshard.simulate.timeline import timeline_of_solution
    from autoshard.solution import replay

    began = time.process_time()
    try:
        solution = api.plan(*model, mesh, **options, recompute=recompute)
    except api.Infeasible:
        return {"status": "infeasible", "cpu_seconds": time.process_time() - began}
    chosen = solution.chosen
    row = {
        "status": solution.status, "cost": solution.cost, "bound": solution.bound, "gap": solution.gap, "peak_bytes": solution.peak_bytes,
        "blocks": solution.recompute, "recomputed": len(chosen.recomputed), "offloaded": len(chosen.offloaded),
        "cpu_seconds": time.process_time() - began,
    }  # fmt: skip
    if graph is not None:
        as_run = replay(solution, graph).checked()
        row |= {"simulated": timeline_of_solution(as_run, solution).seconds, "measured_bytes": measured_peak_on_device(as_run, solution)}
    return row


# -- the table ---------------------------------------------------------------------------------------------------------------------------


def judged(row: dict) -> dict:
    """Whether a row is as it should be, and by how much "auto" is faster."""
    auto, blocks = row["auto"], row["blocks"]
    if "cost" not in auto:
        return {**row, "ok": "cost" not in blocks, "faster": 0.0, "faster_simulated": 0.0}
    near = abs(auto["peak_bytes"] / auto["measured_bytes"] - 1) <= TOLERANCE
    if "cost" not in blocks:  # there is no plan at all with whole blocks
        return {**row, "ok": near, "faster": 1.0, "faster_simulated": 1.0}
    faster, simulated = (blocks[key] / auto[key] - 1 for key in ("cost", "simulated"))
    fits = auto["peak_bytes"] <= row["limit_bytes"]
    return {**row, "ok": near and fits and faster >= -GAP, "faster": faster, "faster_simulated": simulated}


def line(name: str, row: dict) -> str:
    def shown(way: dict) -> str:
        if "cost" not in way:
            return f"{'none fits':>31}"
        ratio = way["peak_bytes"] / way["measured_bytes"]
        return f"{way['cost'] * 1e3:>9.2f} {way['simulated'] * 1e3:>9.2f} {ratio:>6.3f} {way['blocks']:>4}"

    auto = row["auto"]
    counts = f"{auto.get('recomputed', 0):>4} {auto.get('offloaded', 0):>4}"
    return (
        f"{name:12} {row['limit_bytes'] / 1e9:>8.3f} {shown(row['blocks'])} {shown(auto)} {counts} {row['faster']:>7.1%} "
        f"{row['faster_simulated']:>7.1%} {'ok' if row['ok'] else 'WRONG':>6} {auto['cpu_seconds']:>6.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "models")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--share", nargs="*", type=float, default=SHARES, help="limits, as parts of what the fastest plan holds")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.order is not None:
        print(json.dumps({"rows": compare(**given.order)}))
        return 0
    cases = {n: c for n, c in (LARGE if given.large else CASES).items() if not given.only or any(n.startswith(o) for o in given.only)}
    if not given.json and not given.large:
        ways = "".join(f"{way + ' ms':>9} {'simul.':>9} {'peak/m':>6} {'k':>4} " for way in ("blocks", "auto"))
        print(f"{'case':12} {'limit GB':>8} {ways}{'rec':>4} {'off':>4} {'faster':>7} {'simul.':>7} {'':6} {'CPU s':>6}")
    rows = []
    for name, case in cases.items():
        for row in in_own_process(__file__, {"case": case, "folder": str(given.folder), "shares": list(given.share)})["rows"]:
            if given.large:
                rows.append({"case": name, **row, "ok": "cost" in row and row["gap"] <= GAP})
                if not given.json:
                    print(name, {key: value for key, value in row.items()}, flush=True)
                continue
            rows.append({"case": name, **judged(row)})
            if not given.json:
                print(line(name, rows[-1]), flush=True)
    wrong = sum(not row["ok"] for row in rows)
    half = sum(row.get("faster_simulated", 0.0) >= BETTER for row in rows)
    if given.json:
        print(json.dumps({"rows": rows, "wrong": wrong, "better": half}))
    elif not given.large:
        print(f"{len(rows)} limits, {wrong} wrong; at least {BETTER:.0%} faster, simulated, in {half}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
