"""Solve the contest instances (ASPLOS/EuroSys 2025, github.com/google/iopddl) and compare with the best contest team.

    python benchmarks/contest.py DIR [--instances ABG] [--json]

Every instance runs in a process of its own under the contest's time limit, reading and imports included; seconds are wall seconds of
that process. The contest's machine had 8 cores. The score of an instance is best team / ours.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

BEST_TEAM = {  # cost, and the contest's time limit in seconds
    "A": (6548641531, 60),
    "B": (532843, 60),
    "G": (217039, 120),
    "M": (49928460991, 180),
    "S": (1534613444, 240),
    "V": (1632051, 300),
}
OVERHEAD = 0.03  # of the time limit, kept for imports, for what can't be interrupted, and for ending the process


def solve_one(path: Path, seconds: float) -> dict:
    """In this process: read, solve, judge."""
    began = time.monotonic()
    from autoshard.problem import evaluate, read_contest  # delayed because the parent process needs neither
    from autoshard.solvers import solve

    problem = read_contest(path)
    read = time.monotonic() - began
    answer = solve(problem, time_limit=max(seconds * (1 - OVERHEAD) - read, 1.0))
    fits = answer.choice is not None and evaluate(problem, answer.choice).fits
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "status": answer.status.value,
        "cost": answer.cost if fits else None,
        "bound": answer.bound,
        "gap": answer.gap if fits else None,
        "reduced": answer.reduced,
        "read_seconds": round(read, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_gib": round(memory, 2),
        "choice": answer.choice,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--instances", default="ABGMSV")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--choices", type=Path, help="a folder to leave every answer in, as INSTANCE.json")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)  # seconds: solve directory, a file, in this process
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(solve_one(arguments.directory, arguments.one)))
        return
    results = []
    if not arguments.json:
        print(f"{'':2} {'status':>9} {'cost':>13} {'bound':>15} {'gap':>9} {'seconds':>8} {'GiB':>5} {'best team':>13} {'ratio':>7}")
    for name in arguments.instances:
        team, seconds = BEST_TEAM[name]
        path = arguments.directory / f"asplos-2025-iopddl-{name}.json.gz"
        began = time.monotonic()
        run = subprocess.run([sys.executable, __file__, str(path), "--one", str(seconds)], capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{path}: {run.stderr.strip().splitlines()[-1] if run.stderr.strip() else 'failed'}")
        result = json.loads(run.stdout) | {"instance": name, "seconds": round(time.monotonic() - began, 2), "best_team": team}
        choice = result.pop("choice")
        result["ratio"] = team / result["cost"] if result["cost"] else 0.0
        results.append(result)
        if arguments.choices is not None:
            arguments.choices.mkdir(exist_ok=True)
            (arguments.choices / f"{name}.json").write_text(json.dumps(choice))
        if not arguments.json:
            cost = "none" if result["cost"] is None else f"{result['cost']:.0f}"
            gap = "" if result["gap"] is None else f"{result['gap']:.2e}"
            line = f"{name:2} {result['status']:>9} {cost:>13} {result['bound']:>15.0f} {gap:>9} {result['seconds']:>8.1f}"
            print(f"{line} {result['peak_gib']:>5.2f} {team:>13} {result['ratio']:>7.4f}", flush=True)
    score = sum(r["ratio"] for r in results)
    print(json.dumps({"instances": results, "score": score}) if arguments.json else f"score {score:.4f} of {len(results)}")


if __name__ == "__main__":
    main()
