"""The quick tests with other versions of torch and of the rest, each in an environment of its own; a table at the end.

    python benchmarks/matrix.py [--all] [CELL ...]        cells: torch{2.12.1,2.13.0,2.14.1,newest}-{oldest,newest}; all without names

oldest is the floor of every range in pyproject.toml. Without --all a third of the files of tests are run, those at places 0, 3, 6 ... of
their sorted list. What pip resolves is installed under build/matrix/, torch and CUDA's packages once for all cells (about 15 GB for all);
a cell whose result is there for this commit is not run again. build/matrix/CELL/bin/python is the interpreter of a cell.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "build" / "matrix"
TORCHES, RESTS = ("2.12.1", "2.13.0", "2.14.1", "newest"), ("oldest", "newest")
CELLS = {f"torch{torch}-{rest}": (torch, rest) for torch in TORCHES for rest in RESTS}
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "jsonschema", "setuptools")
GROUPS = {"torch": ("torch", "triton"), "cuda": ("nvidia-", "cuda-")}  # what is shared by cells, by the beginnings of names
SECONDS = 3 * 3600  # that one cell may take


def requirements(rest: str) -> list[str]:
    """Our own requirements and those of the tests, at their floors or as they are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ranges = [*project["dependencies"], *(row for name in ("fast", "calibrate", "hf", "plots") for row in extras[name])]
    ranges = [row for row in ranges if not row.startswith("torch")]
    tools = [row for row in extras["dev"] if re.split("[<>=]", row)[0] in TOOLS]
    return [*(re.sub(">=", "==", row.split(",")[0]) if rest == "oldest" else row for row in ranges), *tools]


def resolved(torch: str, rest: str) -> list[str]:
    """name==version of everything that the cell needs, as pip resolves it."""
    wanted = ["torch" if torch == "newest" else f"torch=={torch}", *requirements(rest)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *wanted]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return sorted(f"{one['metadata']['name']}=={one['metadata']['version']}" for one in report["install"])


def folders(packages: list[str]) -> list[Path]:
    """Where each group of the packages is installed."""
    groups: dict[str, list[str]] = {"rest": [], **{name: [] for name in GROUPS}}
    for package in packages:
        group = next((name for name, begins in GROUPS.items() if package.startswith(begins)), "rest")
        groups[group].append(package)
    paths = []
    for name, members in groups.items():
        if members:
            path = STORE / f"{name}-{hashlib.sha256(' '.join(members).encode()).hexdigest()[:12]}"
            if not (path / "installed").exists():
                subprocess.run(
                    [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(path), *members], check=True
                )
                (path / "installed").touch()
            paths.append(path)
    return paths


def run(cell: str, every: bool) -> dict:
    """What the cell's tests say: pytest's last line, the tests that failed, and the versions."""
    packages = resolved(*CELLS[cell])
    paths = folders(packages)
    tests = sorted((ROOT / "tests").glob("test_*.py"))[:: 1 if every else 3]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
    options = ["-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command = [str(interpreter(cell, paths)), "-m", "pytest", *options, *map(str, tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", done.stdout, re.MULTILINE)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-300:]
    return {"cell": cell, "said": last.strip("= "), "failed": failed, "versions": packages, "every": every, "code": done.returncode}


def interpreter(cell: str, paths: list[Path]) -> Path:
    """A Python that has what the cell has, also where it starts another and names a path of its own."""
    python = STORE / cell / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(STORE / cell)], check=True)
    (site,) = (STORE / cell / "lib").glob("python*/site-packages")
    (site / "cell.pth").write_text("".join(f"{path}\n" for path in paths))
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]  # for the entry points
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    return python


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main(words: list[str]) -> int:
    every, cells = "--all" in words, [word for word in words if word != "--all"] or list(CELLS)
    if unknown := [cell for cell in cells if cell not in CELLS]:
        sys.exit(f"there is no cell {unknown[0]}; expected some of {', '.join(CELLS)}")
    if not any(one.name == "pip" for one in distributions()):
        sys.exit(f"{sys.executable} has no pip, which installs the cells")
    STORE.mkdir(parents=True, exist_ok=True)
    results = []
    for cell in cells:
        path = STORE / f"{cell}{'-all' if every else ''}-{commit()}.json"
        if not path.exists():
            print(f"{cell} ...", file=sys.stderr, flush=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(run(cell, every), indent=1))
            temporary.rename(path)
        results.append(json.loads(path.read_text()))
    for result in results:
        torch = next(row for row in result["versions"] if row.startswith("torch=="))
        print(f"{result['cell']:24} {torch:16} {result['said']}")
        for name in result["failed"]:
            print(f"{'':24} {name}")
    return int(any(result["code"] for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
