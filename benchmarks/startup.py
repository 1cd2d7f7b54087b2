"""Seconds of wall time until autoshard answers, median of some runs: the import, the help text and plans of tiny models; and the limits.

    python benchmarks/startup.py [RUNS]

Beside each command: `import torch` with what captures models (dynamo and AOTAutograd), which no command that captures can do without.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = 5
TORCH = "import torch, torch._dynamo, torch.export, torch._functorch.aot_autograd"
CASES = {  # words after python: the limit in seconds, or None
    "import autoshard": (["-c", "import autoshard"], 0.1),
    "autoshard --help": (["-m", "autoshard", "--help"], 0.6),
    "plan, GPT-2 tiny on 2x2": (["-m", "autoshard", "plan", "models/gpt2.py:tiny", "--mesh", "2x2", "--quiet"], 4.0),
    "plan, GPT-2 tiny on 2x4, training": (["-m", "autoshard", "plan", "models/gpt2.py:tiny", "--mesh", "2x4", "--train", "--quiet"], None),
    "torch, dynamo and AOTAutograd alone": (["-c", TORCH], None),
    "python alone": (["-c", ""], None),
}


def wall_seconds(words: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main(runs: int) -> int:
    over = 0
    alone = statistics.median(wall_seconds(["-c", ""]) for _ in range(runs))
    for name, (words, limit) in CASES.items():
        wall_seconds(words)  # the first run compiles what it imports
        seconds = statistics.median(wall_seconds(words) for _ in range(runs))
        own = seconds - alone if name.startswith("import") else seconds  # an import is what it adds to the interpreter
        over += limit is not None and own > limit
        print(f"{own:6.2f} s   {'' if limit is None else f'limit {limit:g} s':12}  {name}")
    return over > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
