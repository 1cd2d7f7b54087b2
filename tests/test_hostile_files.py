"""Files that are small and stand for much: refused before it is made. What is written is what the format's own parser reads."""

import ast
import gzip
import json
import tomllib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autoshard.calibrate.importers import nccl_tests, sniff
from autoshard.launch import Overrides, read_configuration
from autoshard.launch.texts import PlainLoader, arguments_of, toml_text, yaml_text
from autoshard.reading import content_of
from autoshard.writing import write_atomically
from tests.helpers_bounds import in_bounds
from tests.helpers_refusals import assert_refused

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --bf16\n"
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}], k{i}: 1}}" for i in range(1, 10))
LAUGHS = "a0: &a0 [x,x,x]\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
ESCAPED = '."\\"!"'
HOSTILE = {
    "variables of variables.sh": "A=xxxxxxxxxx\n" + "".join(f"{chr(66 + i)}={f'${chr(65 + i)}' * 10}\n" for i in range(20)) + MODEL,
    "a variable of itself.sh": "A=xxxxxxxxxx\n" + f"A={'$A' * 9}\n" * 20 + MODEL,
    "a long variable often.sh": f"A={'x' * 30000}\n" + "--x $A\n" * 4000 + MODEL,
    "empty lines.sh": "\n" * 60000 + MODEL,
    "spaces.sh": f"A=b{' ' * 60000}x\n" + MODEL,
    "defaults without an end.sh": "${a:-" * 12000 + MODEL,
    "defaults in defaults.sh": "${a:-" * 6000 + "}" * 6000 + MODEL,
    "dollars.sh": "$" * 60000 + MODEL,
    "comments.sh": " #" * 30000 + MODEL,
    "merges.yaml": MERGES,
    "aliases.yaml": LAUGHS,
    "itself.yaml": "a: &a {b: *a}\n",
    "merged with itself.yaml": "a: &a\n  <<: *a\n",
    "a tag of another type.yaml": "a: !!bool x\n",
    "a tag of nothing.yaml": 'a: !!float ""\n',
    "a set.yaml": "a: !!set {x}\n",
    "bytes.yaml": 'a: !!binary "####"\n',
    "code.yaml": 'a: !!python/object/apply:os.system ["exit 3"]\n',
    "a number in base 60.yaml": f"a: 1{':59' * 20000}\n",
    "brackets.yaml": "[" * 60000,
    "braces.yaml": "a: " + "{a: " * 15000,
    "dashes.yaml": "- " * 30000,
    "a dotted key.toml": ".".join("a" * 30000) + "=1",
    "a dotted key with spaces.toml": " . ".join("a" * 15000) + "=1",
    "a dotted key of text.toml": ESCAPED.join(['"a"'] * 8000) + "=1",
    "a dotted key of literals.toml": ".".join(["'!'"] * 15000) + "=1",
    "a dotted key in a table.toml": "x = ['''\n''', {" + ".".join("a" * 20000) + '=1, b = ""}]',
    "quotes.toml": '"' * 60000,
    "quotes of both kinds.toml": "\"'" * 30000,
    "brackets.toml": "a=" + "[" * 60000,
    "tables in tables.toml": "a=" + "{a=" * 15000,
    "many sections.toml": "\n".join("[[" + ".".join("a" * 60) + "]]" for _ in range(500)),
    "many keys.toml": "\n".join(f"parallelism{i}=1" for i in range(4000)),
    "brackets.json": "[" * 60000,
    "a long number.json": '{"a":' + "9" * 5000 + "}",
}
LAUNCHERS = {"sh": "megatron", "yaml": "nanotron", "toml": "torchtitan", "json": "torchtitan"}
HARMLESS = {"empty lines.sh", "spaces.sh"}  # long, but they mean what a short script means


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_configuration_is_refused_in_bounds(name):
    launcher = LAUNCHERS[name.rpartition(".")[2]]
    answer = in_bounds(lambda: read_configuration(launcher, HOSTILE[name], name, Overrides(devices=8)), megabytes=200)
    assert isinstance(answer, ValueError) != (name in HARMLESS), answer
    assert "\n" not in str(answer) or name in HARMLESS


def test_the_bounds_are_some():
    assert in_bounds(lambda: json.dumps(yaml.load(LAUGHS, Loader=yaml.SafeLoader)), megabytes=200, seconds=1) == "killed"
    assert in_bounds(lambda: bytearray(400 * 2**20)) == "killed" and in_bounds(lambda: 7) == 7


@pytest.mark.parametrize("unit", [b" ", b"[", b"0,", b"\0"])
def test_a_gzip_file_that_unpacks_to_much_is_refused_in_bounds(tmp_path, unit):
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(150):
            file.write(unit * (2**20 // len(unit)))
    for kind in ("problem", "plan", "cluster"):
        said = str(in_bounds(lambda kind=kind: content_of(path, kind), megabytes=100))
        assert str(path) in said and "unpacks to more than 100 times its size" in said and path.stat().st_size < 10**6


def test_gzip_files_of_many_members_and_of_repetitions_are_unpacked(tmp_path):
    """In time that grows with their size: fifty thousand empty members, padding, and content of a kind that compresses well."""
    path, rows = tmp_path / "good.json.gz", json.dumps([{"name": f"h.{k}", "layout": "S(0),R"} for k in range(150_000)]).encode()
    path.write_bytes(gzip.compress(b"") * 50_000 + gzip.compress(rows[:100]) + gzip.compress(rows[100:]) + b"\0" * 10**6)
    assert len(rows) > 5 * 10**6 and in_bounds(lambda: content_of(path, "problem") == rows) is True
    path.write_bytes(gzip.compress(b"{}") + gzip.compress(rows)[:-9])
    assert "truncated" in str(in_bounds(lambda: content_of(path, "problem")))


@pytest.mark.parametrize("line", ["# algbw " * 40_000, "#" + " algbw" * 60_000, "Rank 1 " * 60_000, "# Rank 1 on " * 40_000])
def test_a_long_line_of_a_log_takes_no_more_than_its_length(line):
    answer = in_bounds(lambda: (sniff(line, "log").__name__, nccl_tests(line + "\n", "log", "all_reduce", 8)), seconds=5)
    assert answer[1] == []


def test_many_ranks_of_a_log_take_no_more_than_their_number():
    lines = [f"#  Rank {k} Pid 1 on h{k} device 0" for k in range(20_000)] + ["# size time busbw"] + ["8 1 1"] * 20_000
    rows = in_bounds(lambda: nccl_tests("\n".join(lines), "log", "all_reduce", 8), seconds=10)
    assert len(rows) == 20_000 and rows[0].of.nodes == rows[0].of.devices == 20_000


# -- what was read before is read as before ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, options",
    [
        ("TP=8\n--tensor $TP", {"tensor": ["8"]}),
        ("export\tTP=8  # devices\n--tensor ${TP}", {"tensor": ["8"]}),
        ("A=1 # c\nB=${A}2\n--x=$B --y ${C:-7} --z ${D:-a ${A}", {"x": ["12"], "y": ["7"], "z": ["a", "${A"]}),
        ("A='x y'\n--x $A --flag", {"x": ["x", "y"], "flag": []}),
        ("# A=1\n--x $A", {"x": ["$A"]}),
        ("ARGS=(\n --x 1 \\\n --y 2\n)", {"x": ["1"], "y": ["2"]}),
        ("--x ${A:-\n1}", {"x": ["1"]}),
    ],
)
def test_scripts_are_read_as_before(text, options):
    assert arguments_of(text) == options


def test_yaml_with_anchors_and_merges_is_read():
    text = "base: &b {dp: 2, tp: 4}\nparallelism:\n  <<: *b\n  tp: 8\nwhen: 2001-01-01\n"
    data = yaml.load(text, Loader=PlainLoader)
    assert data == {"base": {"dp": 2, "tp": 4}, "parallelism": {"dp": 2, "tp": 8}, "when": "2001-01-01"}


# -- what is written -----------------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_what_is_written_as_toml_and_yaml_is_what_their_parsers_read(data):
    for write, read in ((toml_text, tomllib.loads), (yaml_text, lambda text: yaml.load(text, Loader=PlainLoader))):
        try:
            text = write(data)
        except ValueError as error:
            assert "can't be written" in str(error)
        else:
            assert read(text) == data


def test_any_character_is_written_as_toml():
    for letter in ("\U0001f600", "\x7f", "\x00", "\x85", "\u2028", '"', "\\", "\n", "é"):
        assert tomllib.loads(toml_text({letter: {"x": letter}})) == {letter: {"x": letter}}
    assert_refused("can't be written", toml_text, {"x": "\ud83d"})


@pytest.mark.parametrize("check, content", [(json.loads, '{"a": NaN} x'), (ast.parse, "x = (\n"), (json.loads, '"\ud83d"')])
def test_nothing_is_replaced_by_what_could_not_be_read_back(tmp_path, check, content):
    path = tmp_path / "file"
    path.write_text("before")
    assert_refused("was not written: it could not be read back", write_atomically, content, path, check)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
