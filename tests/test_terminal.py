"""What reaches the terminal: no control character of a name, no markup, and no line longer than the terminal is wide."""

import ast
import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.table import Table

from autoshard.cli import main, output
from autoshard.cli.output import Bar, Output, Visible, VisibleLines, complain, visible
from tests.helpers_solutions import linear_solution

CLI = Path(output.__file__).parent
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
OURS = re.compile(r"\x1b\[[\d;]*m")  # colours that rich writes to a terminal
HOSTILE = ["\x1b[2J", "\x1b]0;title\x07", "a\rb", "\x9b31m", "\u202egnp", "\ud800", "\x08", "\x7f", "[/x]", "[bold]", ":x:"]
NAME = "w" + "".join(word for word in HOSTILE if word != "\ud800")  # no file may hold half a surrogate pair


@given(st.text())
def test_visible_text_holds_nothing_that_a_terminal_obeys(text):
    said = visible(text)
    assert not OBEYED.search(said) and said.encode().decode() == said
    assert said == text or not text.isprintable()
    assert [line for line in said.split("\n")] == [visible(line) for line in text.split("\n")]


def test_a_name_is_escaped_as_json_escapes_it():
    assert visible("a\x1b[2J\u202e é 漢 \u00a0\tb\n") == "a\\u001b[2J\\u202e é 漢 \u00a0\\tb\n"
    for word in HOSTILE[:8]:
        assert json.loads(f'"{visible(word)}"') == word


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A plan, tables and a contest problem full of such names."""
    monkeypatch.chdir(tmp_path)
    row = {"layout": "R,S(1)", "shape": (8, 8), "dtype": NAME, "local_bytes": 64}
    changes = {
        "parameters": {NAME: row, f"h.0.{NAME}": row, f"h.1.{NAME}": row},
        "baselines": {NAME: {"cost_seconds": 3e-3, "peak_bytes": 5e8, "status": NAME, "matched": NAME}},
        "replicated_ops": ({"target": NAME, "count": 1, "seconds": 1.0, "bytes": 8},),
        "breakdown": {"compute": {NAME: 1.5e-3}, "communication": {NAME: {"axis1": 5e-4}}, "blocks": {}},
        "assumptions": {NAME: NAME, "padding": []},
        "peak": {"op": NAME, "module": NAME, "parts": {NAME: 3}},
        "solver": NAME,
    }
    for file, more in (("plan.json", changes), ("model.json", {"assumptions": {"model": NAME}})):
        linear_solution(**more).save(file)
    Path("tables.json").write_text(json.dumps({"tables": [{"name": NAME, "rows": 1000, "columns": 8}]}))
    return tmp_path


WORDS = [
    ["show", "plan.json"],
    ["show", "plan.json", "model.json"],
    ["explain", "plan.json"],
    ["export", "plan.json", "--format", "json"],
    ["check", "model.json"],
    ["check", "plan.json", "--within", NAME],
    ["tables", "tables.json", "--devices", "2"],
    ["show", NAME],
    ["solve", "tables.json"],
    [NAME],
    ["plan", NAME],
    ["redistribute", "plan.json"],
]


@pytest.mark.parametrize("words", WORDS, ids=lambda words: visible(" ".join(words))[:30])
@pytest.mark.parametrize("terminal", [False, True])
def test_no_verb_lets_a_name_through(hostile, capsys, monkeypatch, words, terminal):
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: terminal))
    main(words)
    out, err = capsys.readouterr()
    assert (out or err) and not OBEYED.search(OURS.sub("", out + err))


def test_a_name_that_reads_as_markup_is_shown_as_it_is(hostile, capsys):
    assert main(["show", "plan.json"]) == 0
    assert "[/x][bold]:x:" in "".join(capsys.readouterr().out.split())


def test_notes_progress_and_logs_are_visible_too(capsys, monkeypatch):
    with Output(as_json=False) as one:
        one.note(NAME)
        one.plain(NAME)
        complain(NAME)
    record = logging.LogRecord("a", logging.INFO, "b", 1, NAME, (), None)
    assert not OBEYED.search("".join(capsys.readouterr()) + VisibleLines("%(message)s").format(record))
    bar = Bar()
    bar.update(NAME, 0.5)
    bar.stop()
    shown = io.StringIO()
    Console(file=shown, width=200).print(bar.bar.get_renderable())
    assert "[/x][bold]" in shown.getvalue() and not OBEYED.search(shown.getvalue())


def test_without_the_filter_the_name_would_come_through():
    """The control of the tests above: rich itself lets escapes through."""
    table, shown = Table("name"), io.StringIO()
    table.add_row("\x1b[2J")
    Console(file=shown, width=80).print(table)
    assert OBEYED.search(shown.getvalue())
    shown = io.StringIO()
    Console(file=shown, width=80).print(Visible(table))
    assert not OBEYED.search(shown.getvalue()) and "\\u001b[2J" in shown.getvalue()


def test_only_output_writes_to_the_terminal():
    """So that there is one place to filter."""
    for path in sorted(CLI.glob("*.py")):
        if path.name == "output.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Name) and node.id in ("print", "Console")), f"{path.name}:{node.lineno}"
            writes = isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "echo", "secho")
            assert not writes, f"{path.name}:{node.lineno}"


# --- width


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("120", 120), (None, 80), ("wide", 80), ("0", 80)])
def test_tables_fit_the_columns(capsys, monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())  # whoever runs the tests may have a terminal
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    table = Table("a")
    table.add_row("word " * 60)
    with Output(as_json=False) as one:
        one.answer({}, lambda: table)
    assert max(map(len, capsys.readouterr().out.splitlines())) == pytest.approx(width, abs=5)


def shown(renderable, width):
    text = io.StringIO()
    Console(file=text, width=width).print(Visible(renderable))
    return text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("fixed", [False, True])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=10))
def test_a_table_too_wide_is_folded_and_loses_nothing(width, fixed, lengths):
    table = Table()
    for k, _ in enumerate(lengths):
        table.add_column(chr(65 + k), no_wrap=fixed)
    table.add_row(*(chr(97 + k) * length for k, length in enumerate(lengths)))
    said = shown(Group(Group(table)), width)
    assert max(len(line.rstrip()) for line in said.splitlines()) <= width and "…" not in said
    assert [said.count(chr(97 + k)) for k, _ in enumerate(lengths)] == lengths


def test_a_table_that_fits_keeps_its_lines():
    table = Table("name", "layout")
    table.add_row("w", "S(0),R")
    plain = io.StringIO()
    Console(file=plain, width=80).print(table)
    assert shown(table, 80) == plain.getvalue() and "│" in plain.getvalue()
