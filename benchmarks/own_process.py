"""A measurement in a process of its own: a fresh interpreter on one core with one thread, so that nothing before it counts.

A script that uses this takes `--order ORDER`, does what it says, and prints JSON as its last line. It imports this module as
`benchmarks.own_process`, with the repository's root on sys.path and not this folder, whose coverage.py would hide a package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def in_own_process(script: str, order: Any, words: tuple[str, ...] = (), *, checkout: Path = ROOT) -> Any:
    """What `script WORDS --order ORDER` prints last, with the package of a checkout; its stderr is passed on. CalledProcessError where
    it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    core = min(os.sched_getaffinity(0))
    found = subprocess.run(
        [sys.executable, script, *words, "--order", json.dumps(order)], env=environment, stdout=subprocess.PIPE, text=True, check=True,
        cwd=None if checkout == ROOT else checkout, preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    return json.loads(found.stdout.splitlines()[-1])
