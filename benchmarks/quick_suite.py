"""Which tests the quick suite leaves out: those that execute the least of the package, for their seconds, that others do not.

    python benchmarks/quick_suite.py [--seconds 370]

Every test but those marked slow runs in a copy of the package with a mark before each statement (see executed.py), in two processes, and
what each executed is kept in build/quick_suite/ for as long as neither the package nor the tests change. A test is worth

    of each statement that it executes NEW, or 1/2, or 1/4, where none, one or two tests of other names in the suite do so already
    + OWN / 4^m, for what it asserts, m cases of its test being in the suite already

and those of the most worth per CPU second are chosen, until their seconds are up. What takes less than CHEAP seconds, fails with the marks,
guards the house or compares with what was kept (ALWAYS) stays. The others are written to tests/slow.json: the names of a test's cases, or
none where all of them are.
"""

import argparse
import builtins
import hashlib
import heapq
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.executed import LONGEST, Executed, package_files, run_tests  # noqa: E402

NEW, OWN, CHEAP, TIMES = 3, 20, 0.1, 3  # in statements, seconds, tests that execute a statement
ALWAYS = re.compile("test_rooms::|.*::.*(_stays?_what_(they_are|it_is)|_private_part_of_torch|_what_is_loaded)")
GROUPS = 12  # of files, each a run of pytest
SLOW, KEPT = ROOT / "tests" / "slow.json", "rows.jsonl"  # the second where a run begins: in the copy
ROWS: list[dict] = []


def _seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def pytest_runtest_protocol(item: Any, nextitem: Any) -> None:
    """A plugin of the runs: closes the row of the test before, and begins one."""
    _close()
    ROWS.append({"test": f"{item.path.stem}::{item.name}", "began": _seconds()})


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        ROWS[-1]["failed"] = True


def pytest_unconfigure(config: Any) -> None:
    _close()
    Path(KEPT).write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def _close() -> None:
    if not hasattr(builtins, "_marks"):
        __import__("autoshard.graph")
    marks = builtins._marks  # type: ignore[attr-defined]
    if ROWS:
        ROWS[-1]["seconds"] = _seconds() - ROWS[-1].pop("began")
        ROWS[-1]["marks"] = np.packbits(np.frombuffer(marks, np.uint8)).tobytes().hex()
    marks[:] = bytes(len(marks))


def measured() -> list[dict]:
    files = sorted(ROOT.glob("tests/test_*.py"), key=lambda path: path.stat().st_size)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*package_files(), *files))).hexdigest()[:12]
    store = ROOT / "build" / "quick_suite" / digest
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        free = [Executed(Path(scratch, f"marked{number}")).folder for number in range(2)]
        for folder in free:
            (folder / "tests" / "slow.json").write_text("{}\n")

        def run(group: int) -> None:
            kept = store / f"{group}.jsonl"
            if not kept.exists():
                folder, began = free.pop(), time.monotonic()
                words = ["-p", "benchmarks.quick_suite", *(f"tests/{path.name}" for path in files[group::GROUPS])]
                _, output, _ = run_tests(folder, words, LONGEST)
                os.replace(folder / KEPT, kept)
                free.append(folder)
                last, seconds = output.strip().splitlines()[-1], time.monotonic() - began
                print(f"{group + 1} of {GROUPS}: {last}, {seconds:.0f} s", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(GROUPS)))
    return [json.loads(line) for group in range(GROUPS) for line in (store / f"{group}.jsonl").read_text().splitlines()]


def chosen(rows: list[dict], limit: float) -> set[int]:
    """The rows that the quick suite runs."""
    names = [row["test"].partition("[")[0] for row in rows]
    executed = [np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(row["marks"]), np.uint8))) for row in rows]
    by: dict[int, set[str]] = {}  # of a statement, the names of the tests in the suite that execute it
    cases: dict[str, int] = {}

    def worth(i: int) -> float:
        others = (by.get(s, set()) - {names[i]} for s in executed[i].tolist() if names[i] not in by.get(s, ()))
        return sum(0.5 ** len(those) if those else NEW for those in others if len(those) < TIMES) + OWN / 4 ** cases.get(names[i], 0)

    def take(i: int) -> float:
        suite.add(i)
        cases[names[i]] = cases.get(names[i], 0) + 1
        for s in executed[i].tolist():
            if len(those := by.setdefault(s, set())) < TIMES:
                those.add(names[i])
        return rows[i]["seconds"]

    suite: set[int] = set()
    for i, row in enumerate(rows):
        if row["seconds"] < CHEAP or row.get("failed") or ALWAYS.match(row["test"]):
            limit -= take(i)
    queue = [(-worth(i) / row["seconds"], i) for i, row in enumerate(rows) if i not in suite]
    heapq.heapify(queue)
    while queue:
        _, i = heapq.heappop(queue)
        now = -worth(i) / rows[i]["seconds"]
        if queue and now > queue[0][0]:  # worth less than when it was queued
            heapq.heappush(queue, (now, i))
        elif rows[i]["seconds"] <= limit:
            limit -= take(i)
    return suite


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=370, help="CPU seconds of the tests of the quick suite, as measured here")
    options = parser.parse_args()
    rows = measured()
    suite = chosen(rows, options.seconds)
    names = [row["test"].partition("[") for row in rows]
    total = Counter(test for test, _, _ in names)
    slow: dict[str, list[str]] = {}
    for test, case in sorted((test, case[:-1]) for i, (test, _, case) in enumerate(names) if i not in suite):
        slow.setdefault(test, []).append(case)
    slow = {test: cases if len(cases) < total[test] else [] for test, cases in slow.items()}
    text = ",\n".join(f"  {json.dumps(test)}: {json.dumps(cases)}" for test, cases in slow.items())
    SLOW.with_suffix(".new").write_text("{\n" + text + "\n}\n")
    SLOW.with_suffix(".new").replace(SLOW)

    def statements(those: set[int]) -> int:
        packed = [np.frombuffer(bytes.fromhex(rows[i]["marks"]), np.uint8) for i in those]
        return int(np.unpackbits(np.bitwise_or.reduce(packed)).sum())

    for name, those in (("all", set(range(len(rows)))), ("quick", suite)):
        print(f"{name:5} {len(those):5} tests {sum(rows[i]['seconds'] for i in those):6.0f} CPU s {statements(those):6} statements")


if __name__ == "__main__":
    main()
