"""The field's words: identifiers, docstrings and messages hold no private word where torch, compilers or operations research have one.

    identifiers             names of functions, classes, parameters, variables and fields, in pieces: `is_cut_evenly` is is, cut, evenly
    docstrings, messages    string constants of the package; a format's own letters and keys that users have are exceptions
    classes                 no two public classes of one name
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "autoshard"

# private word: what the field says
IDENTIFIERS = {
    "takes": "inputs, input layouts", "gives": "outputs, output layouts", "give": "return, yield", "lies": "is, is placed",
    "lie": "be", "laid": "sharded, placed", "lay": "place", "cut": "sharded, split, boundary", "cuts": "boundaries, splits",
    "cutting": "sharding", "twin": "corresponding", "twins": "corresponding", "like": "corresponding, reference",
    "likes": "corresponding", "dearer": "more expensive", "found": "what it holds: layouts, routes, rows ...",
    "made": "what it holds", "whole": "global, full", "wholes": "globals",
}  # fmt: skip
SENTENCES = ("cut", "cuts", "cutting", "lie", "lies", "laid", "twin", "twins", "dearer")
EXCEPTIONS = {  # identifier: why it stays
    "dearer": "key of `explain --json` and field of Alternative, which users have",
    "dearer_seconds": "the same",
    "local_dearer": "the same",
}  # fmt: skip
ALLOWED_SENTENCES: tuple[str, ...] = (  # phrases of the field, or of a file's format
    "min-cut", "minimum cut", "cutting plane", "cut off", "cut short", "cutting_planes",
)  # fmt: skip


def files(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def named_by(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


@cache
def read(source: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]], list[str]]:
    """Line and name of everything that a file names itself, line and text of its strings, its classes: a file is parsed once."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    strings = [(node.lineno, node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return list(named_by(nodes)), strings, [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def pieces(name: str) -> list[str]:
    """`_is_cutEvenly` -> is, cut, evenly."""
    return [piece.lower() for piece in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def private_identifiers(source: str) -> list[tuple[int, str, str]]:
    rows = []
    for line, name in read(source)[0]:
        if name not in EXCEPTIONS:
            rows += [(line, name, IDENTIFIERS[piece]) for piece in pieces(name) if piece in IDENTIFIERS]
    return rows


def private_sentences(source: str) -> list[tuple[int, str]]:
    rows = []
    for line, text in read(source)[1]:
        if " " in text:
            for phrase in ALLOWED_SENTENCES:
                text = re.sub(re.escape(phrase), "", text, flags=re.IGNORECASE)
            for match in re.finditer(rf"\b({'|'.join(SENTENCES)})\b", text, re.IGNORECASE):
                rows.append((line + text[: match.start()].count("\n"), text[max(0, match.start() - 30) : match.end() + 20]))
    return rows


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_file_has_the_fields_words(path):
    source = path.read_text()
    names = [f"{path.name}:{line} {name}: say {instead}" for line, name, instead in private_identifiers(source)]
    sentences = [f"{path.name}:{line} ...{text!r}" for line, text in private_sentences(source)]
    assert not names + sentences


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for path in files():
        for name in read(path.read_text())[2]:
            if not name.startswith("_"):
                places[name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_private_words_are_caught():
    """The negative control: each kind of name, and each kind of text."""
    planted = 'class Laid:\n    found: int\ndef twin_ops(takes):\n    "How it lies."\n    isCut = f"{1} is cut along"\n'
    assert {name for _, name, _ in private_identifiers(planted)} == {"Laid", "found", "twin_ops", "takes", "isCut"}
    assert len(private_sentences(planted)) == 2
    assert private_identifiers("def outputs(layouts):\n    shortcut = executed = 1") == []
    assert private_sentences('"a min-cut of the graph, laid-back or not: relay"')[0][1].startswith("a ") is True


def test_every_exception_is_used():
    names = {name for path in files() for _, name in read(path.read_text())[0]}
    assert set(EXCEPTIONS) <= names
