"""The API reference is what docs/api.py makes of the sources now, lacks no public name, and every name in it says what it is."""

import ast
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import autoshard
from tests.helpers_refusals import assert_refused

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.M | re.S)


def script():
    spec = importlib.util.spec_from_file_location("api_pages", DOCS / "api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


API = script()
MADE = functools.cache(API.pages)


def stale(folder: Path) -> list[str]:
    """Pages that differ from what the script makes now, are missing, or are left over."""
    made = MADE()
    there = {path.relative_to(folder).as_posix(): path.read_text() for path in [folder / "api.md", *sorted((folder / "api").glob("*.md"))]}
    return [name for name in dict.fromkeys([*made, *there]) if made.get(name) != there.get(name)]


def test_the_committed_pages_are_what_the_script_makes():
    assert not stale(DOCS), f"docs/{stale(DOCS)[0]} is stale; run: {API.COMMAND}"


def test_a_stale_page_is_seen(tmp_path):
    shutil.copy(DOCS / "api.md", tmp_path)
    shutil.copytree(DOCS / "api", tmp_path / "api")
    page = tmp_path / "api" / "mesh.md"
    page.write_text(page.read_text().replace("bytes/s", "GB/s", 1))
    (tmp_path / "api" / "left_over.md").write_text("# Gone\n")
    assert stale(tmp_path) == ["api/mesh.md", "api/left_over.md"]


def test_the_pages_say_nothing_of_the_machine():
    for name, text in MADE().items():
        found = re.findall(r"0x[0-9a-f]{4,}|<[\w.]+ object|/(?:home|root|work|usr)/", text)
        assert not found, f"docs/{name} holds {found[0]}"


def test_the_pages_are_the_same_under_any_hash_seed():
    code = "import sys; sys.path.insert(0, 'docs'); import api; print(repr(api.pages()))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # that of this process is another
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=ROOT, text=True) == f"{MADE()!r}\n"


# -- which names ---------------------------------------------------------------------------------------------------------------------


def imported(source: str) -> set[str]:
    """Qualified names of ours that a program imports: `from autoshard.mesh import Device` gives autoshard.mesh.Device."""
    froms = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    return {f"{n.module}.{alias.name}" for n in froms if n.module.split(".")[0] == "autoshard" for alias in n.names}


def unlisted(sources: list[str]) -> list[str]:
    """Classes and functions of ours that programs import but the reference lacks. Constants and modules are not looked for."""
    listed = {(found.path, found.node.name) for _, _, found in API.public()}
    missing = []
    for name in sorted(set().union(*map(imported, sources))):
        try:
            found = API.definition(name)
        except (ValueError, FileNotFoundError):  # a constant of that module; a module
            continue
        if (found.path, found.node.name) not in listed:
            missing.append(name)
    return missing


def programs() -> list[str]:
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    blocks = [block for page in pages for block in PYTHON.findall(page.read_text())]
    return [*blocks, *(path.read_text() for path in sorted((ROOT / "examples").glob("*.py")))]


def test_every_name_of_the_package_is_listed():
    assert set(autoshard.__all__) == {name.removeprefix("autoshard.") for _, name, _ in API.public() if name.count(".") == 1}


def test_every_name_that_docs_and_examples_import_is_listed():
    assert unlisted(programs()) == []


def test_an_unlisted_name_is_seen():
    assert unlisted(["from autoshard.planning.plan import plan_graph", "from autoshard.mesh import DEVICES, Device"]) == [
        "autoshard.planning.plan.plan_graph"
    ]


# -- what they say -------------------------------------------------------------------------------------------------------------------


def silent(names: list[str]) -> list[str]:
    return [name for name in names if not API.definition(name).docstring]


def test_every_public_name_has_a_docstring():
    assert silent([name for _, name, _ in API.public()]) == []


def test_a_name_without_a_docstring_is_seen(tmp_path, monkeypatch):
    (tmp_path / "mute.py").write_text(
        "from dataclasses import dataclass\nfrom typing import NamedTuple\n"
        "@dataclass\nclass Mute:\n    x: int  # bytes\n"
        "class Pair(NamedTuple):\n    x: int\n"
        "class Quiet(ValueError):\n    pass\n"
        "def nothing(x=1):\n    pass\n"
        'def said(x=1):\n    """Something."""\n'
    )
    monkeypatch.setattr(API, "ROOT", tmp_path)
    names = ["mute.Mute", "mute.Pair", "mute.Quiet", "mute.nothing", "mute.said"]
    assert silent(names) == names[:-1]
    assert_refused("no class or function mute.gone", API.definition, "mute.gone")
