"""A measurement in a process of its own: a fresh interpreter on one core with one thread, so that nothing before it counts.

A script that uses this takes `--order JSON`, does what it says, and prints a JSON object as its last line. It imports this module as
`benchmarks.own_process`, with the repository's root on sys.path and not this folder, whose coverage.py would hide a package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def in_own_process(script: str, order: dict) -> dict:
    """What `script --order ORDER` prints last; its stderr is passed on. CalledProcessError where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    core = min(os.sched_getaffinity(0))
    found = subprocess.run(
        [sys.executable, script, "--order", json.dumps(order)], env=environment, stdout=subprocess.PIPE, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    return json.loads(found.stdout.splitlines()[-1])
