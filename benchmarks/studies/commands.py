"""The studies of commands: CPU seconds of those on a page of the docs, and wall time until autoshard answers."""

from __future__ import annotations

import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.studies import Row, Study

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LIMIT = 600  # seconds per command


def cpu_seconds(command: str, folder: str) -> tuple[float, int]:
    """CPU seconds of the command and its children, and its exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def on_the_page(given) -> dict[str, tuple]:
    """The indented lines of the page, without what they say after `#`, each with the folder in which they run."""
    folder = tempfile.TemporaryDirectory()
    for name in ("models", "tests"):
        (Path(folder.name) / name).symlink_to(ROOT / name)
    lines = [line.split("  #")[0].strip() for line in given.data.read_text().splitlines() if line.startswith("    autoshard ")]
    if given.only != [""]:  # the plan that others read
        cpu_seconds(next(line for line in lines if " --out gpt2.json" in line), folder.name)
    return {line: (line, folder) for line in lines}


def commands(case: tuple, given) -> Row:
    """CPU seconds of every command on docs/commands.md, run in order in one folder; the figures on that page are these."""
    command, folder = case
    seconds, code = cpu_seconds(command, folder.name)
    return {"cpu_seconds": seconds, "exit_code": code, "ok": code == 0}


COMMANDS = Study(cases=on_the_page, measure=commands, data="docs/commands.md", alone=False)


TORCH = "import torch, torch._dynamo, torch.export, torch._functorch.aot_autograd"
STARTED = {  # words after python: the limit in seconds, or None
    "import autoshard": (["-c", "import autoshard"], 0.1),
    "autoshard --help": (["-m", "autoshard", "--help"], 0.6),
    "plan, GPT-2 tiny on 2x2": (["-m", "autoshard", "plan", "models/gpt2.py:tiny", "--mesh", "2x2", "--quiet"], 4.0),
    "plan, GPT-2 tiny on 2x4, training": (["-m", "autoshard", "plan", "models/gpt2.py:tiny", "--mesh", "2x4", "--train", "--quiet"], None),
    "torch, dynamo and AOTAutograd alone": (["-c", TORCH], None),
    "python alone": (["-c", ""], None),
}


def startup(case: tuple, given) -> Row:
    """Seconds of wall time until autoshard answers, median of some runs: the import, the help text and plans of tiny models; their limits.

    An import is what it adds to the interpreter. Beside the commands: `import torch` with what captures models (dynamo and AOTAutograd),
    which no command that captures can do without.
    """
    words, limit = case
    wall_seconds(words)  # the first run compiles what it imports
    seconds = statistics.median(wall_seconds(words) for _ in range(given.runs))
    if words == ["-c", "import autoshard"]:
        seconds -= statistics.median(wall_seconds(["-c", ""]) for _ in range(given.runs))
    return {"wall_seconds": seconds, "limit_seconds": limit, "ok": limit is None or seconds <= limit}


CHECK_LIMIT = 4.0  # CPU seconds
DATA = ROOT / "tests" / "data" / "launchers"
LLAMA = f"hf:{DATA.parent / 'hf' / 'llama'}"
CHECKED = {  # launcher: words after `autoshard check`
    "torchtitan": f"{DATA}/torchtitan/llama3_405b.toml --devices 512",
    "megatron": f"{DATA}/megatron/gpt3_175b.sh --devices 1024",
    "megatron bridge": f"{DATA}/recipes/deepseek_v3_h100_fp8.yaml --launcher megatron --devices 1024",
    "nemo": f"{DATA}/recipes/nemo_llama3_8b.yaml {LLAMA} --launcher megatron --devices 64",
    "accelerate": f"{DATA}/accelerate/nd.yaml {LLAMA} --launcher accelerate --seq 4096 --microbatch 1",
    "deepspeed": f"{DATA}/deepspeed/llama_70b_zero3.json {LLAMA} --launcher deepspeed --devices 32 --seq 4096",
    "nanotron": f"{DATA}/nanotron/llama3b.yaml --launcher nanotron --devices 64",
    "automodel": f"{DATA}/automodel/llama3_70b.yaml {LLAMA} --launcher automodel --devices 64 --seq 4096",
}


def checks(case: str, given) -> Row:
    """CPU seconds of `autoshard check` on a configuration of each launcher, median of some runs."""
    runs = [cpu_seconds(f"autoshard check {case} --quiet", str(ROOT)) for _ in range(given.runs)]
    seconds, failed = statistics.median(seconds for seconds, _ in runs), any(code > 1 for _, code in runs)  # 1: it doesn't fit
    return {"cpu_seconds": seconds, "limit_seconds": CHECK_LIMIT, "ok": seconds <= CHECK_LIMIT and not failed}


CHECKS = Study(cases=lambda given: CHECKED, measure=checks, alone=False, options={"--runs": {"type": int, "default": 3}})


def wall_seconds(words: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


STARTUP = Study(
    cases=lambda given: STARTED, measure=startup, alone=False, options={"--runs": {"type": int, "default": 5}},
)  # fmt: skip
