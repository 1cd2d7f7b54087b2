"""Mutants of the package by a seed, and whether the quick tests nearest to each notice: a comparison, an operator, a condition, a number.

    python benchmarks/mutation.py [--mutants 60] [--seed 0] [--only autoshard/solvers/] [--json]

A room is drawn by its lines, then a file, then a place in it: < becomes <= and == becomes !=, + becomes -, `and` becomes `or`, a condition
or a returned bool is negated, a number below 1000 becomes one more. Annotations, asserts and the texts of messages stay. --only runs those
mutants of the seed whose place or lines hold a text.
The mutant is written into a copy of the repository. Its tests are the first six files by rank that execute its statement (see executed.py);
24 are asked at most. The rank counts the names of the mutant's file that a file of tests mentions, and the words of its texts, such as the
names of operators (more where few others do, most for the function around the mutant), imports of the module and of the room, and equal
names of files.

    killed        a test fails, or a file takes six times as long as without the mutant, and a minute
    survived      all pass
    not reached   no file that was asked executes the statement
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.executed import LEFT_OUT, Executed, failed, is_compiled, package_files, run_tests, statements  # noqa: E402

NEAREST, ASKED = 6, 24
NO_TESTS = 5  # pytest's exit code
OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"),
    ast.Or: ("or", "and"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "/"), ast.Pow: ("**", "*"),
}  # fmt: skip
TESTS = {path: path.read_text() for path in sorted(ROOT.glob("tests/test_*.py"))}


@dataclass(frozen=True)
class Mutant:
    path: Path
    start: int  # in bytes
    end: int
    text: str  # instead of what is there
    statement: int  # its number in the file
    names: str  # of the functions and classes around it

    def source(self) -> bytes:
        old = self.path.read_bytes()
        return old[: self.start] + self.text.encode() + old[self.end :]

    def __str__(self) -> str:
        pairs = zip(self.path.read_text().splitlines(), self.source().decode().splitlines())
        line, (old, new) = next((line, pair) for line, pair in enumerate(pairs, 1) if pair[0] != pair[1])
        return f"{self.path.relative_to(ROOT)}:{line}\n    - {old.strip()}\n    + {new.strip()}"


def mutants(path: Path) -> list[Mutant]:
    """All mutants of a file."""
    source = path.read_bytes()
    tree = ast.parse(source)
    begins = [0, *(match.end() for match in re.finditer(b"\n", source))]
    numbers = {id(one): number for number, one in enumerate(statements(tree))}

    def place(node: ast.AST) -> tuple[int, int]:
        return begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset

    def swapped(operator: ast.AST, left: ast.AST, right: ast.AST) -> Iterator[tuple[int, int, str]]:
        start, end = place(left)[1], place(right)[0]
        if type(operator) in OPERATORS:
            yield start, end, source[start:end].decode().replace(*OPERATORS[type(operator)], 1)

    def negated(node: ast.AST) -> tuple[int, int, str]:
        start, end = place(node)
        return start, end, f"(not ({source[start:end].decode()}))"

    def changes(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Start, end and new text of the mutants at a node."""
        match node:
            case ast.Compare():
                for operator, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators):
                    yield from swapped(operator, left, right)
            case ast.BinOp():
                yield from swapped(node.op, node.left, node.right)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:]):
                    yield from swapped(node.op, left, right)
            case ast.If() | ast.While() | ast.IfExp() if ast.unparse(node.test) not in ("TYPE_CHECKING", "True"):
                yield negated(node.test)
            case ast.comprehension():
                yield from map(negated, node.ifs)
            case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.Constant(value=bool())):
                yield negated(node.value)
            case ast.Constant(value=int() | float()) if not isinstance(node.value, bool) and node.value < 1000:
                yield *place(node), repr(node.value + 1)

    def walk(node: ast.AST, statement: int, names: str, compiled: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.Assert):
            return
        statement = statement if compiled else numbers.get(id(node), statement)
        compiled = compiled or is_compiled(node, path)
        names = f"{names} {node.name}" if isinstance(node, ast.FunctionDef | ast.ClassDef) else names
        yield from (Mutant(path, *change, statement, names) for change in changes(node))
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and field not in ("annotation", "returns"):
                    yield from walk(child, statement, names, compiled)

    return list(walk(tree, 0, "", False))


def drawn(number: int, seed: int) -> list[Mutant]:
    rooms: dict[str, list[Path]] = {}
    for path in package_files():
        if path.name != "version.py":
            rooms.setdefault(path.relative_to(ROOT).parts[1], []).append(path)
    lines = [sum(len(path.read_text().splitlines()) for path in paths) for paths in rooms.values()]
    draw, chosen = random.Random(seed), {}
    while len(chosen) < number:
        (room,) = draw.choices(list(rooms), lines)
        path = draw.choice(rooms[room])
        if places := mutants(path):
            one = draw.choice(places)
            if ast.dump(ast.parse(one.source())) != ast.dump(ast.parse(path.read_bytes())):  # an operator in a comment
                chosen[one] = None
    return list(chosen)


def ranked(mutant: Mutant) -> list[Path]:
    """The files of tests that have to do with the mutant's file, the nearest first."""
    room, *inner = mutant.path.relative_to(ROOT).with_suffix("").parts[1:]
    tree = ast.parse(mutant.path.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names |= {word for word in re.findall(r"\w+", node.value) if len(word) > 2}
    words = {path: set(re.findall(r"\w+", text)) for path, text in TESTS.items()}
    shared = {name: sum(name in those for those in words.values()) for name in names}

    def rank(path: Path) -> float:
        named = sum((5 if name in mutant.names.split() else 1) / shared[name] for name in names & words[path])
        imported = 2 * (".".join(["autoshard", room, *inner]) in TESTS[path]) + (f"autoshard.{room}" in TESTS[path])
        return named + imported + sum(path.stem.startswith(f"test_{part}") for part in (room, *inner))

    return sorted((path for path in TESTS if rank(path)), key=rank, reverse=True)


def judged(mutant: Mutant, number: int, executed: Executed, folder: Path) -> dict:
    """The verdict, its reason, and the tests that were run with the mutant in the copy of the repository in `folder`."""
    copy, tests, began = folder / mutant.path.relative_to(ROOT), [], time.monotonic()
    copy.write_bytes(mutant.source())
    os.utime(copy, (number, number))  # what Python and numba keep of a file is known by its time and its size
    by = ""
    for test in ranked(mutant)[:ASKED]:
        if not by and len(tests) < NEAREST and executed.executes(test, mutant.path, mutant.statement):
            tests.append(f"tests/{test.name}")
            by = failure(folder, tests[-1], executed.by(test))
    shutil.copy2(mutant.path, copy)
    verdict = "killed" if by else "survived" if tests else "not reached"
    return {"verdict": verdict, "seconds": time.monotonic() - began, "by": by, "tests": tests}


def failure(folder: Path, test: str, unmutated: dict) -> str:
    """The test that failed, or what else ended the run; empty where nothing did."""
    words = [word for name in unmutated["failed"] for word in ("--deselect", name)]
    code, output, _ = run_tests(folder, ["-x", test, *words], max(60, 6 * unmutated["seconds"]))
    if code in (0, NO_TESTS):
        return ""
    return f"time: {test}" if code is None else (failed(output) or [" ".join(output.split())[-200:]])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose place or lines hold this")
    parser.add_argument("--json", action="store_true", help="a line of JSON per mutant")
    options = parser.parse_args()
    counts = {"killed": 0, "survived": 0, "not reached": 0}
    with tempfile.TemporaryDirectory() as scratch:
        folder, executed = Path(scratch, "mutated"), Executed(Path(scratch, "marked"))
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        for number, mutant in enumerate(drawn(options.mutants, options.seed), 1):
            if options.only in str(mutant):
                row = judged(mutant, number, executed, folder)
                counts[row["verdict"]] += 1
                line = f"{number:3} {row['verdict']:11} {row['seconds']:4.0f} s  {mutant}\n    {row['by'] or ' '.join(row['tests'])}"
                print(json.dumps({"number": number, "mutant": str(mutant), **row}) if options.json else line, flush=True)
    total = max(1, sum(counts.values()))
    print(", ".join(f"{name} {n} ({n / total:.0%})" for name, n in counts.items()), file=sys.stderr if options.json else sys.stdout)


if __name__ == "__main__":
    main()
