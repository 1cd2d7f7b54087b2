"""CPU seconds of every command on docs/commands.md, run in order in one folder; the figures on that page are these.

    python benchmarks/commands.py [WORD ...]       # with words: only the commands that hold one of them
"""

import os
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 600  # seconds per command


def commands() -> list[str]:
    """The indented lines of the page, without what they say after `#`."""
    lines = (ROOT / "docs" / "commands.md").read_text().splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith("    autoshard ")]


def cpu_seconds(command: str, folder: str) -> tuple[float, int]:
    """CPU seconds of the command and its children, and its exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def main(words: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("models", "tests"):
            (Path(folder) / name).symlink_to(ROOT / name)
        for command in commands():
            if words and not any(word in command for word in words) and " --out gpt2.json" not in command:
                continue
            seconds, code = cpu_seconds(command, folder)
            failed += code != 0
            print(f"{seconds:6.1f} CPU s   exit {code}   {command}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
