"""The room table, executable: which part of autoshard knows which, and the house rules that an AST can see.

A room is a module or package directly below `autoshard`. Every import in every file counts, also one inside a function
or under TYPE_CHECKING. A room may import the rooms and the third-party packages of its row, the standard library, and
itself. Each row names only rooms above it, so a cycle can't be written.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import autoshard

PACKAGE = Path(__file__).parent.parent / "autoshard"

# room: (rooms it may import, third-party packages it may import)
PLANNER = (  # what planning and the rooms that plan again know
    "mesh layout precision graph capture strategies cost routes problem solvers formulate baselines solution cycles options reading units "
    "writing torch_private"
)
TABLE = {
    "version": ("", ""),
    "certify": ("", "numpy"),  # alone: others check our certificates with it
    "cycles": ("", ""),
    "units": ("", ""),
    "torch_private": ("", "torch"),
    "writing": ("", ""),
    "precision": ("", ""),
    "options": ("precision", ""),
    "reading": ("options", "jsonschema_rs"),  # what a file notes of options is declared with them
    "devices": ("reading", ""),  # with the constants of their kernels, which are files
    "mesh": ("devices reading", ""),
    "layout": ("mesh", "torch"),
    "graph": ("precision", "networkx"),
    "capture": ("graph precision reading torch_private", "torch transformers huggingface_hub"),
    "strategies": ("graph layout mesh torch_private", "numpy torch"),
    "cost": ("devices graph layout mesh options reading writing", "numpy scipy"),
    "routes": ("cost layout mesh", "numpy"),
    "problem": ("reading writing", "numpy"),
    "solvers": ("problem", "numpy highspy networkx numba"),
    "formulate": ("cost graph layout mesh problem routes strategies", "numpy"),
    "baselines": ("graph layout mesh strategies", "numpy"),
    "solution": ("graph layout mesh precision reading torch_private version writing", "dill fsspec"),
    "simulate": ("cost cycles formulate graph layout mesh problem routes solution strategies", "numpy"),
    "planning": (PLANNER + " simulate", "numpy torch"),  # the time line judges plans of the objective "overlapped"
    "pipeline": (PLANNER + " devices planning simulate", "numpy networkx torch"),
    "explain": (PLANNER + " planning simulate", "networkx numpy torch"),
    "lower": ("capture cost graph layout mesh precision reading routes solution torch_private", "torch fla"),
    "runtime": ("capture cost graph layout lower mesh reading routes solution torch_private", "torch"),
    "calibrate": ("devices cost mesh lower reading", "numpy scipy torch"),
    "launch": ("devices cost graph mesh planning reading", "numpy yaml"),
    "exports": ("graph layout mesh solution torch_private units writing", "torch spmd_types"),
    "relayout": ("cost layout mesh lower reading", "numpy torch"),  # its schemas say the types of problems
    "tables": (PLANNER + " planning", "numpy torch torchrec"),
    "serving": (PLANNER + " planning", "torch transformers"),  # transformers: its caches and its table of attention functions
    "report": ("graph layout mesh pipeline problem reading serving simulate solution units version writing", "rich jinja2 matplotlib"),
    "api": (
        PLANNER + " planning simulate pipeline explain lower runtime calibrate exports relayout tables report launch",
        "torch numpy",
    ),
    "cli": (
        "api calibrate capture certify cost launch mesh options pipeline precision problem reading relayout report serving simulate "
        "solvers tables units torch_private version writing",
        "typer rich torch huggingface_hub distributed",
    ),
    "pytest_plugin": ("api", "pytest"),
}

# lines of Python; a ceiling falls with the room, and rises only in a commit that says why
BUDGETS: dict[str, int] = {
    "version": 3, "certify": 110, "cycles": 22, "units": 34, "torch_private": 165, "writing": 186, "precision": 78, "options": 607,
    "reading": 318, "devices": 321, "mesh": 301, "layout": 173, "graph": 2355, "capture": 4063, "strategies": 2480, "cost": 2115,
    "routes": 616, "problem": 377, "solvers": 4994, "formulate": 1596, "baselines": 1199, "solution": 1723, "simulate": 1378,
    "planning": 4935, "pipeline": 3408, "explain": 1336, "lower": 5869, "runtime": 4729, "calibrate": 998, "launch": 5328, "exports": 1093,
    "relayout": 1608, "tables": 2246, "serving": 858, "report": 3224, "api": 1408, "cli": 3518, "pytest_plugin": 34,
}  # fmt: skip

LAZY_FACADE = ("__init__.py", "__main__.py")  # directly below autoshard: they name what is public
PAGES = ("report", "simulate", "solvers")  # rooms of which single modules are loaded when they are asked for
# they load the names that they list: test_api_door.py, test_report.py, test_torch_private.py
LAZY_NAMES = ("api/__init__.py", "report/__init__.py", "torch_private.py")
# what comes from outside passes one door, which knows sizes, soundness and schemas; the shards of checkpoints are torch's own files
READS_FILES = ("reading", "runtime/checkpoint_files", "certify")  # which runs as a script, alone
OPENS_FILES = ("certify", "writing", "reading", "solution", "report", "cli", "runtime/checkpoint_files")
READING_CALLS = {
    "read_text", "read_bytes", "torch.load", "json.load", "pickle.load", "np.load", "np.loadtxt", "np.fromfile", "np.memmap",
}  # fmt: skip
FILE_CALLS = {
    "open", "write_text", "write_bytes", "mkdir", "touch", "unlink", "rmtree", "mkstemp",
    "NamedTemporaryFile", "TemporaryDirectory",
    "os.open", "os.replace", "os.remove", "os.rename", "torch.save", "np.save", "np.savez", "np.savez_compressed", "np.savetxt",
}  # fmt: skip
PRIVATE_REGISTRIES = {
    "_op_dispatcher", "sharding_propagator", "op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules",
    "propagate_op_sharding_non_cached",
}  # fmt: skip


def files(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py"))


def place(path: Path, package: Path) -> str:
    """`autoshard/cost/curves.py` -> `cost/curves`."""
    return path.relative_to(package).with_suffix("").as_posix()


def is_in(place_name: str, *rooms: str) -> bool:
    return any(place_name == room or place_name.startswith(room + "/") for room in rooms)


def imported_modules(tree: ast.AST, package_parts: list[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported; `from a import b` gives `a.b`, `import_module("a.b")` too, and `?` where the
    name is computed. `package_parts` is where the file lies."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package_parts[: len(package_parts) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            yield node.lineno, name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "?"


@cache
def imports(source: str, *package_parts: str) -> list[tuple[int, str]]:
    return list(imported_modules(ast.parse(source), [*package_parts]))


def import_violations(package: Path) -> list[str]:
    found = []
    for path in files(package):
        where = path.relative_to(package)
        if where.as_posix() in LAZY_FACADE:
            continue
        room = where.parts[0].removesuffix(".py")
        if room not in TABLE:
            found.append(f"{where}: {room} is no room of the table")
            continue
        ours, third_party = (set(names.split()) for names in TABLE[room])
        for line, module in imports(path.read_text(), package.name, *where.parts[:-1]):
            if module == "?" and where.as_posix() in LAZY_NAMES:
                continue
            top, _, rest = module.partition(".")
            if top == package.name:
                target = rest.partition(".")[0]
                if target not in ours | {room}:
                    found.append(f"{where}:{line}: {room} may not import {'.'.join(filter(None, [top, target]))}")
            elif top not in sys.stdlib_module_names and top not in third_party:
                found.append(f"{where}:{line}: {room} may not import {top}")
    return found


def defined(door: Path) -> set[str]:
    """What a room's door names: imports, functions, classes and constants of its `__init__`."""
    names: set[str] = set()
    for node in ast.parse(door.read_text()).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def deep_imports(package: Path) -> list[str]:
    """Imports from another room that go past its door. Modules of PAGES may be named through their room."""
    found = []
    for path in files(package):
        where = path.relative_to(package)
        room = where.parts[0].removesuffix(".py")
        if where.as_posix() in (*LAZY_FACADE, *LAZY_NAMES):
            continue
        for line, module in imports(path.read_text(), package.name, *where.parts[:-1]):
            top, *inner = module.split(".")
            if top != package.name or len(inner) < 2 or inner[0] == room or not (package / inner[0]).is_dir():
                continue
            is_module = (package / inner[0] / f"{inner[1]}.py").exists() and inner[1] not in defined(package / inner[0] / "__init__.py")
            if len(inner) > 2 or (is_module and inner[0] not in PAGES):
                found.append(f"{where}:{line}: {module} is past the door of {inner[0]}")
    return found


def idle_names(package: Path, readers: Path) -> list[str]:
    """What doors name and nobody outside of the room does: no other room, and no file below `readers` (tests, benchmarks, docs)."""
    folders = [readers / name for name in ("autoshard", "tests", "benchmarks", "docs", "examples")]
    read = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    words = {path: set(re.findall(r"\w+", path.read_text())) for path in read}
    found = []
    for door in sorted(package.glob("*/__init__.py")):
        outside = set().union(*(named for path, named in words.items() if door.parent not in path.parents))
        offered = set(re.findall(r"\bimport (?:.*, )?(\w+) as \1\b", door.read_text()))
        found += [f"{door.parent.name}: {name}" for name in sorted(offered - outside)]
    return found


def lines_of(package: Path) -> dict[str, int]:
    """Lines of Python by room."""
    counted: dict[str, int] = {}
    for path in files(package):
        where = path.relative_to(package)
        if where.as_posix() not in LAZY_FACADE:
            room = where.parts[0].removesuffix(".py")
            counted[room] = counted.get(room, 0) + len(path.read_text().splitlines())
    return counted


def over_budget(lines: dict[str, int]) -> list[str]:
    return [f"{room} has {n:,} lines, {BUDGETS.get(room, 0):,} are its budget" for room, n in lines.items() if n > BUDGETS.get(room, 0)]


def dotted(node: ast.expr) -> str:
    """`os.environ` of the expression os.environ; an unknown base gives `?`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def is_one_of(name: str, names: set[str]) -> bool:
    """A name with a dot is meant whole; one without matches the last part too (`path.read_text`)."""
    return name.replace("numpy.", "np.") in names or name.rpartition(".")[2] in names


def does_nothing(body: list[ast.stmt]) -> bool:
    return all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body)


def broken_rules(node: ast.AST, place_name: str) -> Iterator[str]:
    name = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    called = dotted(node.func) if isinstance(node, ast.Call) else ""
    imported = {module for _, module in imported_modules(node, [])} if isinstance(node, ast.Import | ast.ImportFrom) else set()
    if not is_in(place_name, "cli", "certify") and (called == "print" or name in ("sys.stdout", "sys.stderr")):
        yield "only cli prints"
    if not is_in(place_name, "cli", "api", "capture/explain") and any(module.split(".")[0] == "logging" for module in imported):
        yield "only api logs"  # and cli says where the lines go; capture/explain keeps torch's own loggers quiet
    if name in ("os.environ", "os.environb", "os.getenv") or imported & {"os.environ", "os.environb", "os.getenv"}:
        yield "nobody reads the environment"
    if not is_in(place_name, *OPENS_FILES) and called and is_one_of(called, FILE_CALLS):
        yield f"files are opened in {', '.join(OPENS_FILES)} only"
    if not is_in(place_name, *READS_FILES) and called and is_one_of(called, READING_CALLS):
        yield f"files are read in {', '.join(READS_FILES)} only"
    if isinstance(node, ast.ExceptHandler):
        stopped_by_user = node.type is not None and dotted(node.type) == "KeyboardInterrupt"  # what is known so far may be the answer
        if node.type is None or (does_nothing(node.body) and not stopped_by_user):
            yield "no bare except, no except that does nothing"
    if called.rpartition(".")[2] == "suppress":
        yield "no bare except, no except that does nothing"
    if imported and any(module.endswith(".*") for module in imported):
        yield "no import *"
    if place_name != "strategies/torch_rules" and (
        (isinstance(node, ast.Attribute) and node.attr in PRIVATE_REGISTRIES)
        or imported & {f"autoshard.torch_private.{name}" for name in PRIVATE_REGISTRIES}
    ):
        yield "only strategies/torch_rules touches torch's private registries"


RULED = (ast.Name, ast.Attribute, ast.Call, ast.Import, ast.ImportFrom, ast.ExceptHandler)  # what the rules are about


def rule_violations(package: Path) -> list[str]:
    found = []
    for path in files(package):
        name = place(path, package)
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if isinstance(node, RULED):
                found += [f"{path.relative_to(package)}:{node.lineno}: {rule}" for rule in broken_rules(node, name)]
    return found


def test_each_room_names_only_rooms_above_it():
    above: set[str] = set()
    for room, (ours, _) in TABLE.items():
        assert set(ours.split()) <= above, f"{room} names a room that isn't above it: {set(ours.split()) - above}"
        above.add(room)


def test_the_numeric_rooms_may_not_import_torch():
    for room in ("mesh", "graph", "problem", "solvers"):
        assert "torch" not in TABLE[room][1].split()


def test_every_import_is_in_the_room_table():
    assert files(PACKAGE), f"no file under {PACKAGE}"
    assert import_violations(PACKAGE) == []


def test_every_room_is_entered_through_its_door():
    assert deep_imports(PACKAGE) == []


@pytest.mark.parametrize(
    "source",
    [
        "from autoshard.cost.curves import lookup",
        "from autoshard.cost.curves.records import Curve",
        "from ..cost.curves import lookup",
        "from ..cost import curves",
        "import autoshard.cost.curves",
        "def f():\n    from autoshard.cost import curves as prices",
    ],
)
def test_a_planted_import_past_a_door_is_caught(tmp_path, source):
    plant(tmp_path, "cost/curves.py", "def lookup(): ...")
    plant(tmp_path, "cost/__init__.py", "from .curves import lookup as lookup")
    (violation,) = deep_imports(plant(tmp_path, "routes/shortest.py", source))
    assert "past the door of cost" in violation


@pytest.mark.parametrize("source", ["from autoshard.cost import lookup", "from ..cost import lookup as priced", "from . import steps"])
def test_a_name_that_a_door_has_passes(tmp_path, source):
    plant(tmp_path, "cost/curves.py", "def lookup(): ...")
    plant(tmp_path, "cost/__init__.py", "from .curves import lookup as lookup")
    assert deep_imports(plant(tmp_path, "routes/shortest.py", source)) == []


def test_doors_name_what_others_use(tmp_path):
    assert idle_names(PACKAGE, PACKAGE.parent) == []
    plant(tmp_path, "cost/__init__.py", "from .curves import lookup as lookup\nfrom .curves import slope as slope")
    plant(tmp_path, "cost/curves.py", "def lookup(): ...\ndef slope(): ...")
    assert idle_names(plant(tmp_path, "routes/shortest.py", "from autoshard.cost import lookup"), tmp_path) == ["cost: slope"]


def test_every_room_keeps_its_budget(tmp_path):
    assert over_budget(lines_of(PACKAGE)) == []
    assert set(BUDGETS) == set(TABLE)
    over = over_budget(lines_of(plant(tmp_path, "units.py", "\n" * (BUDGETS["units"] + 1))))
    assert over == [f"units has {BUDGETS['units'] + 1} lines, {BUDGETS['units']} are its budget"]


def test_no_budget_is_far_above_its_room():
    """A ceiling that nobody lowers is none."""
    assert [room for room, n in lines_of(PACKAGE).items() if BUDGETS[room] > 1.02 * n + 20] == []


def test_house_rules():
    assert rule_violations(PACKAGE) == []


@pytest.mark.parametrize("module", ["mesh", "graph", "problem", "solvers"])
def test_the_numeric_rooms_import_without_torch(module):
    script = f"import sys, autoshard, autoshard.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PACKAGE.parent)


def plant(folder: Path, place_name: str, source: str) -> Path:
    """A package `autoshard` under `folder` that holds one file."""
    path = folder / "autoshard" / place_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return folder / "autoshard"


@pytest.mark.parametrize(
    ("place_name", "source", "room"),
    [
        ("mesh.py", "import autoshard.layout", "autoshard.layout"),
        ("mesh.py", "import os, torch.fx as fx", "torch"),
        ("mesh.py", "import autoshard", "autoshard"),  # the facade would bring everything
        ("mesh.py", "from autoshard import Mesh", "autoshard.Mesh"),
        ("problem.py", "from autoshard.layout import Layout", "autoshard.layout"),
        ("problem.py", "def f():\n    from torch import Tensor", "torch"),
        ("problem.py", "def f():\n    from . import api", "autoshard.api"),
        ("problem.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .mesh import Mesh", "autoshard.mesh"),
        ("solvers/ilp.py", "from ..graph import Graph", "autoshard.graph"),
        ("solvers/ilp.py", "from .. import problem, layout", "autoshard.layout"),
        ("solvers/deep/er.py", "from ... import mesh", "autoshard.mesh"),
        ("solvers/__init__.py", "from ..cost import curves", "autoshard.cost"),
        ("graph.py", "import numpy", "numpy"),
        ("solution/record.py", "import importlib\nimportlib.import_module('autoshard.api')", "autoshard.api"),
        ("mesh.py", "from importlib import import_module\nimport_module('autoshard')", "autoshard"),
        ("mesh.py", "__import__(name)", "may not import ?"),
        ("utils.py", "", "utils is no room"),
    ],
)
def test_a_planted_import_is_caught(tmp_path, place_name, source, room):
    (violation,) = import_violations(plant(tmp_path, place_name, source))
    assert room in violation


@pytest.mark.parametrize(
    ("place_name", "source"),
    [
        ("__init__.py", "def __getattr__(name):\n    from . import api\n    return getattr(api, name)"),
        ("__main__.py", "from autoshard.cli import main"),
        ("solvers/ilp.py", "from __future__ import annotations\nimport numpy as np, numba"),
        ("solvers/ilp.py", "from ..problem import Problem\nfrom . import dual"),
        ("solvers/__init__.py", "from .ilp import ILP as ILP"),
        ("cost/curves.py", "import json\nfrom autoshard.mesh import Mesh\nfrom autoshard.cost import compute"),
        ("cli.py", "import typer\nfrom . import api, report"),
    ],
)
def test_an_import_that_the_table_allows_passes(tmp_path, place_name, source):
    assert import_violations(plant(tmp_path, place_name, source)) == []


@pytest.mark.parametrize(
    ("place_name", "source", "rule"),
    [
        ("api.py", "print('x')", "only cli prints"),
        ("report/text.py", "import sys\nsys.stdout.write('x')", "only cli prints"),
        ("solvers/ilp.py", "import logging", "only api logs"),
        ("api.py", "import os\nos.environ.get('X')", "environment"),
        ("cli.py", "import os\nos.getenv('X')", "environment"),
        ("cli.py", "from os import environ", "environment"),
        ("lower/verify.py", "def f():\n    with open('x'): ...", "files are opened in"),
        ("cost/compute.py", "from pathlib import Path\nPath('x').read_text()", "files are read in"),
        ("cli/verbs_without_model.py", "from pathlib import Path\nPath('x').read_bytes()", "files are read in"),
        ("cost/curves.py", "open('x')", "files are opened in"),
        ("simulate.py", "import gzip\ngzip.open('x')", "files are opened in"),
        ("api.py", "import torch\ntorch.load('x')", "files are read in"),
        ("tables/io.py", "import numpy\nnumpy.loadtxt('x')", "files are read in"),
        ("api.py", "try:\n    f()\nexcept:\n    raise", "except"),
        ("cli.py", "try:\n    f()\nexcept ValueError:\n    pass", "except"),
        ("cli.py", "import contextlib\nwith contextlib.suppress(OSError):\n    f()", "except"),
        ("api.py", "from .mesh import *", "import *"),
        ("strategies/matmuls_and_losses.py", "from autoshard.torch_private import sharding_propagator", "private registries"),
        ("formulate.py", "DTensor._op_dispatcher", "private registries"),
    ],
)
def test_a_planted_breach_of_a_house_rule_is_caught(tmp_path, place_name, source, rule):
    (violation,) = rule_violations(plant(tmp_path, place_name, source))
    assert rule in violation


@pytest.mark.parametrize(
    ("place_name", "source"),
    [
        ("cli.py", "import sys\nprint('x', file=sys.stderr)\nopen('x')"),
        ("solution.py", "import os\nfrom pathlib import Path\nPath('x').write_text('')\nos.replace('x', 'y')"),
        ("reading.py", "open('x')\nPath('x').read_text()"),
        ("api.py", "import logging\ntry:\n    f()\nexcept ValueError as error:\n    raise TypeError('x') from error"),
        ("solvers/solve.py", "try:\n    f()\nexcept KeyboardInterrupt:\n    pass"),
        ("strategies/torch_rules.py", "DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs"),
    ],
)
def test_what_the_house_rules_allow_passes(tmp_path, place_name, source):
    assert rule_violations(plant(tmp_path, place_name, source)) == []


def test_public_functions_hide_rooms_of_their_name():
    autoshard.pipeline = import_module("autoshard.pipeline")  # as the import of a room does
    with pytest.warns(FutureWarning):
        assert callable(autoshard.pipeline) and autoshard.pipeline is not sys.modules["autoshard.pipeline"]


LINK_FIELDS = {"latency", "device_bandwidth", "shared_by"}


def reads_of_links(package: Path) -> list[str]:
    """Where a link's figures are read outside of the rooms that turn them into seconds."""
    rows = []
    for path in files(package):
        text = path.read_text()
        if not is_in(place(path, package), "mesh", "cost", "calibrate") and any(name in text for name in LINK_FIELDS):
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute) and node.attr in LINK_FIELDS]
            rows += [f"{place(path, package)}:{node.lineno} .{node.attr}" for node in nodes]
    return rows


def test_seconds_over_links_have_one_home(tmp_path):
    assert reads_of_links(PACKAGE) == []
    (tmp_path / "simulate").mkdir()
    (tmp_path / "simulate" / "planted.py").write_text("x = axis.latency + size / axis.device_bandwidth")
    assert len(reads_of_links(tmp_path)) == 2


def imported_files(package: Path) -> dict[str, set[str]]:
    """For each module the modules of ours that it imports."""
    paths = {path.relative_to(package).with_suffix(""): path for path in files(package)}
    modules = {".".join((package.name, *name.parts)).removesuffix(".__init__"): path for name, path in paths.items()}
    edges = {}
    for module, path in modules.items():
        parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        names = [name for _, name in imports(path.read_text(), *parts)]
        known = [name if name in modules else name.rpartition(".")[0] for name in names]
        edges[module] = {name for name in known if name in modules and name != module}
    return edges


def cycle_of(edges: dict[str, set[str]]) -> list[str]:
    """A cycle of imports; empty where there is none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in sorted(edges[module]):
                if cycle := walk(other, [*path, module]):
                    return cycle
            done.add(module)
        return []

    return next((cycle for module in sorted(edges) if (cycle := walk(module, []))), [])


def test_files_import_each_other_in_no_circle():
    assert cycle_of(imported_files(PACKAGE)) == []
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def underscore_imports(package: Path) -> list[str]:
    """Imports of another room's names that begin with an underscore."""
    rows = []
    for path in files(package):
        where = path.relative_to(package)
        for line, module in imports(path.read_text(), package.name, *where.parts[:-1]):
            parts = module.split(".")
            if parts[0] == package.name and parts[-1].startswith("_") and parts[1] != where.parts[0].removesuffix(".py"):
                rows.append(f"{where}:{line} {module}")
    return rows


def test_names_with_an_underscore_stay_in_their_room(tmp_path):
    assert underscore_imports(PACKAGE) == []
    (tmp_path / "autoshard" / "cli").mkdir(parents=True)
    (tmp_path / "autoshard" / "cli" / "planted.py").write_text("from autoshard.planning.plan import _refused")
    assert len(underscore_imports(tmp_path / "autoshard")) == 1
