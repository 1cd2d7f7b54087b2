"""The loop of reinforcement learning on four ranks has the losses of one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "examples" / "grpo_loop.py")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", "0", "--rdzv-backend", "c10d"]


def lines(*words):
    done = subprocess.run([sys.executable, *words, SCRIPT], capture_output=True, text=True, timeout=600, cwd=ROOT)
    said = [(float(r), float(x)) for r, x in re.findall(r"reward ([\d.]+), loss (-?[\d.]+)", done.stdout)]
    assert done.returncode == 0 and len(said) == 4, done.stderr[-2000:]
    return said


@pytest.mark.slow
def test_the_losses_are_those_of_one_process():
    alone, ranks = lines(), lines(*TORCHRUN, "--rdzv-endpoint", "localhost:0")
    assert [reward for reward, _ in alone] == [reward for reward, _ in ranks]
    assert all(abs(a - b) < 1e-5 for (_, a), (_, b) in zip(alone, ranks, strict=True)) and len({loss for _, loss in alone}) == 4
