"""The statements of the package that a file of tests executes, in a copy of the repository with a mark before every statement.

Marks are bytes of a file that is mapped into memory, so those of processes that tests start count too. What a file of tests executes is
measured once and kept in build/mutation/, for as long as neither it nor the package changes.
"""

import ast
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "build" / "mutation"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis")
LONGEST = 1800  # seconds for a file of tests
MOST_BYTES = 16 << 30  # of a process: a mutant may ask for any number
MARKS = """import builtins, mmap
with open({path!r}, "r+b") as _file:
    builtins._marks = mmap.mmap(_file.fileno(), 0)  # also of a function that is called with globals of its own
"""


def package_files() -> list[Path]:
    return sorted(path for path in ROOT.glob("autoshard/**/*.py") if not (path.parent.name == "autoshard" and path.name.startswith("__")))


def statements(tree: ast.AST) -> list[ast.stmt]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def is_compiled(node: ast.AST, path: Path) -> bool:
    """Whether numba compiles a function, in which nothing can be marked."""
    return isinstance(node, ast.FunctionDef) and (path.name == "loops.py" or "compiled" in map(ast.unparse, node.decorator_list))


def comes_first(node: ast.stmt) -> bool:
    """A docstring, or an import from __future__."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def marked(path: Path, first: int) -> str:
    """A file of the package with marks; the statements are counted from `first`."""
    tree = ast.parse(path.read_text())
    mark = {id(one): ast.parse(f"_marks[{number}] = 1").body[0] for number, one in enumerate(statements(tree), first)}
    compiled = {id(inner) for node in ast.walk(tree) if is_compiled(node, path) for inner in ast.walk(node)}
    blocks = [(node, field) for node in ast.walk(tree) if id(node) not in compiled for field in ("body", "orelse", "finalbody")]
    for node, field in blocks:
        block = getattr(node, field, None)
        if isinstance(block, list):  # the body of a lambda isn't
            setattr(node, field, [each for one in block for each in ([one] if comes_first(one) else [mark[id(one)], one])])
    at = next((number for number, one in enumerate(tree.body) if not comes_first(one)), len(tree.body))
    tree.body[at:at] = ast.parse("import mutation_marks").body
    return ast.unparse(ast.fix_missing_locations(tree))


def run_tests(folder: Path, words: list[str], limit: float) -> tuple[int | None, str, float]:
    """Runs pytest in a copy of the repository: its exit code, or None after `limit` seconds; what it printed; and its seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES)),
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests started
        except ProcessLookupError:
            process.poll()
        process.wait()
        output.seek(0)
        return code, output.read(), time.monotonic() - began


def failed(output: str) -> list[str]:
    """The names of the tests that failed."""
    return re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)


class Executed:
    """What files of tests execute, measured in a copy of the repository in `folder`."""

    def __init__(self, folder: Path):
        self.folder, self.marks, self.first = folder, folder / "marks", {}
        digest, total = hashlib.sha256(), 0
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        for path in package_files():
            self.first[path], total = total, total + len(statements(ast.parse(path.read_text())))
            (folder / path.relative_to(ROOT)).write_text(marked(path, self.first[path]))
            digest.update(path.read_bytes())
        self.marks.write_bytes(bytes(total))
        (folder / "mutation_marks.py").write_text(MARKS.format(path=str(self.marks)))
        self.store = STORE / digest.hexdigest()[:12]

    def by(self, test: Path) -> dict:
        """{"code": of pytest, "failed": tests that fail with marks alone, "seconds":, "marks": a byte per statement, in hexadecimal}."""
        kept = self.store / f"{test.stem}-{hashlib.sha256((self.folder / 'tests' / test.name).read_bytes()).hexdigest()[:12]}.json"
        if not kept.exists():
            self.marks.write_bytes(bytes(self.marks.stat().st_size))
            code, output, seconds = run_tests(self.folder, [f"tests/{test.name}"], LONGEST)
            print(f"    {test.name}: {output.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            marks = self.marks.read_bytes().hex()
            kept.write_text(json.dumps({"code": code, "failed": failed(output), "seconds": seconds, "marks": marks}))
        return json.loads(kept.read_text())

    def executes(self, test: Path, path: Path, statement: int) -> bool:
        """Whether the tests execute the statement of this number in a file of the package."""
        return self.by(test)["code"] in (0, 1) and bytes.fromhex(self.by(test)["marks"])[self.first[path] + statement] == 1
