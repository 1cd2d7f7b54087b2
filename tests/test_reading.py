"""The one door for files: what is no file, too large, too deep or unsound is refused in one sentence; schemas judge as they are written."""

import gzip
import json
import os
import random
import re
import zlib
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing import Registry, Resource

from autoshard.cli import main
from autoshard.reading import DEEPEST, FORMATS, check_sound, checked, content_of, data_of, parsed, rows_of, schemas, text_of
from autoshard.solution.plan_format import packed
from tests.helpers_models import refusal
from tests.helpers_mutations import bad_json

DATA = Path(__file__).parent / "data"
EXAMPLE = (DATA / "iopddl" / "example.json").read_text()
SCHEMAS = schemas()
REGISTRY = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items())


# -- what is no file, or too large ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    others = {tmp_path / "pipe": "a pipe", tmp_path / "link": "a pipe", tmp_path: "a folder", Path("/dev/zero"): "a device"}
    for path, what in others.items():
        assert refusal(content_of, path, kind).startswith(f"{path} is {what}; expected {FORMATS[kind].expected}")
    assert "there is no file" in refusal(content_of, tmp_path / "missing", kind)
    assert "there is no file" in refusal(content_of, tmp_path / "pipe" / "below", kind)
    assert "can't be the name of a file" in refusal(content_of, "a\0b", kind)


VERBS = {
    "show": "show FILE", "solve": "solve FILE", "tables": "tables FILE", "redistribute": "redistribute FILE", "fit": "calibrate fit FILE",
    "plan": "plan models/mlp.py:tiny --cluster FILE", "keep": "plan models/mlp.py:tiny --keep FILE",
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("file", ["pipe", "/dev/zero"])
def test_a_verb_refuses_pipes_and_devices(tmp_path, capsys, verb, file):
    path = str(tmp_path / file)  # an absolute name stays as it is
    if file == "pipe":
        os.mkfifo(path)
    assert main([path if word == "FILE" else word for word in VERBS[verb].split()]) == 2
    said = capsys.readouterr().err
    assert re.match(rf"autoshard: {path} is a (pipe|device); expected ", said) and said.count("\n") == 1


@pytest.fixture
def small(monkeypatch):
    """A limit of one MB for every format."""
    for kind, form in FORMATS.items():
        monkeypatch.setitem(FORMATS, kind, replace(form, most_bytes=10**6))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_beyond_its_formats_size_is_refused(tmp_path, small, kind):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(10**6 + 1)
    assert f"{path} is larger than 1 MB, which {FORMATS[kind].name} never is" in refusal(content_of, path, kind)
    os.truncate(path, 10**6)
    assert len(content_of(path, kind)) == 10**6


def test_what_gzip_unpacks_to_is_limited_too(tmp_path, small):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"[" * 10**6) + gzip.compress(b"["))
    assert "unpacks to more than 1 MB, which a problem never is" in refusal(data_of, path, "problem")
    path.write_bytes(gzip.compress(b" " * (10**6 - len(EXAMPLE))) + gzip.compress(EXAMPLE.encode()) + b"\0" * 99)
    assert data_of(path, "problem") == json.loads(EXAMPLE)  # several members, padding


def test_the_contests_instances_are_far_below_the_limit():
    largest = 70_145_220  # bytes of asplos-2025-iopddl-M.json, the largest that is published beside its solution
    assert FORMATS["problem"].most_bytes > 10 * largest


# -- unsound JSON -----------------------------------------------------------------------------------------------------------------------

UNSOUND = {
    "[" * 100_000: "no sound JSON|ends early",
    "[" * 100_000 + "]" * 100_000: "no sound JSON",
    "[" * (DEEPEST + 2) + "]" * (DEEPEST + 2): f"more than {DEEPEST} levels",
    '{"a":' * (DEEPEST + 2) + "1" + "}" * (DEEPEST + 2): f"more than {DEEPEST} levels",
    '{"a": 1e999}': "a number too large for a float",
    '{"a": [-1e999]}': "a number too large for a float",
    '{"a": NaN}': "it holds NaN",
    '{"a": -Infinity}': "it holds -Infinity",
    f'{{"a": {2**63}}}': "more than 64 bits",
    '{"a": ' + "9" * 5000 + "}": "no sound JSON",
    '{"a": "x\\u0000"}': "NUL",
    '{"\\u0000": 1}': "NUL",
    '{"a": "x\0"}': "no sound JSON",
    '{"a": "\\ud800"}': "half a character",
    '{"a": 1': "ends early",
    '{"a" 1}': "no sound JSON at line 1",
    "": "is empty",
    " \n": "is empty",
}


@pytest.mark.parametrize("text", UNSOUND, ids=lambda text: repr(text[:20]))
@pytest.mark.parametrize("kind", ["plan", "cluster", "frontier", "tables", "redistribution", "config"])
def test_unsound_json_is_refused(tmp_path, text, kind):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode())
    said = refusal(data_of, path, kind)
    assert re.search(UNSOUND[text], said) and said.startswith(str(path))


def test_sound_json_is_let_through():
    text = json.dumps({"a": [1, -1.5e308, 2**63 - 1, None, True, "ü \U0001f600"], "b": {}})  # a pair of halves is one character
    assert parsed(text, "x", "plan") == json.loads(text)
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert parsed(deep, "x", "plan") == json.loads(deep)
    assert parsed(b"\xef\xbb\xbf{}", "x", "plan") == {}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("nodes", "costs", 0, 0), float("inf")),
        (("nodes", "costs", 0, 0), True),
        (("nodes", "costs", 0, 0), "1"),
        (("nodes", "costs", 0), [[1.0]]),
        (("nodes", "usages", 0, 0), None),
        (("nodes", "intervals", 0, 0), 0.5),
        (("edges", "nodes", 0, 0), 0.5),
        (("edges", "nodes", 0, 0), -1),
        (("edges", "nodes", 0), [0, 1, 2]),
        (("edges", "costs", 0, 0), {"a": 1}),
        (("usage_limit",), "all"),
        (("nodes", "costs", 0, 0), "1e999"),
    ],
)
def test_a_problem_holds_numbers_where_numbers_belong(tmp_path, path, value):
    data = json.loads(EXAMPLE)
    where = data["problem"]
    for step in path[:-1]:
        where = where[step]
    where[path[-1]] = "HERE"
    text = json.dumps(data).replace('"HERE"', "1e999" if value == float("inf") else json.dumps(value))
    (tmp_path / "p.json").write_text(text)
    said = refusal(data_of, tmp_path / "p.json", "problem")
    assert "/".join(map(str, ("problem", *path))) in said


# -- text ---------------------------------------------------------------------------------------------------------------------------------


NO_TEXT = {b"\xff\xfe": "is no text", b"a,b\n1,\x002\n": "it has NUL at character 6"}


@pytest.mark.parametrize(("content", "sentence"), NO_TEXT.items())
def test_what_is_no_text_is_refused(tmp_path, content, sentence):
    (tmp_path / "a.csv").write_bytes(content)
    assert sentence in refusal(text_of, tmp_path / "a.csv", "tables")


def test_csv_of_any_line_ends_is_read_and_a_field_without_end_refused(tmp_path):
    for ends in ("\n", "\r\n", "\r"):
        (tmp_path / "a.csv").write_bytes(ends.join(["\ufeffname,rows", "a,1", "b, 2", ""]).encode())
        header, rows = rows_of(text_of(tmp_path / "a.csv", "tables"), "a.csv")
        assert header == ["name", "rows"] and rows == [(2, {"name": "a", "rows": "1"}), (3, {"name": "b", "rows": "2"})]
    assert "a.csv is no sound CSV at line" in refusal(rows_of, 'name,rows\n"' + "a" * 200_000 + '",1\n', "a.csv")


# -- schemas ------------------------------------------------------------------------------------------------------------------------------

SAMPLES = {
    "plan": json.dumps(packed(json.loads((DATA / "solutions" / "gpt2-tiny-2x2.format1.json").read_text()))),
    "problem": EXAMPLE,
    "tables": '{"tables": [{"name": "user", "rows": 10, "columns": 4, "options": [{"seconds": 1.0, "hbm_bytes": [1]}]}]}',
    "redistribution": '[{"problem": {"id": "a", "shape": [8], "mesh": [4], "src": [[0]], "src_bs": [2], "dst": [[]], "mem": null}}]',
    "config": (DATA / "hf" / "gpt2" / "config.json").read_text(),
    "frontier": json.dumps(
        {"format": "autoshard.frontier/1", "model": "m", "mesh": [2], "training": True, "planning_seconds": 1.0, "points": [
            {"memory_bytes": 1.0, "seconds": 1.0, "bound_seconds": None, "gap": 0.0, "status": "optimal", "limit_bytes": 2.0}
        ]}
    ),
}  # fmt: skip


def accepted(data: object, kind: str) -> bool:
    try:
        checked(data, "file", kind)
        return True
    except ValueError:
        return False


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_good_file_is_accepted_and_the_reference_implementation_agrees_on_bad_ones(kind):
    """jsonschema is slow and known; what comes here was parsed, so that both see finite numbers only."""
    schema = SCHEMAS[f"{FORMATS[kind].schema}.json"]
    reference = jsonschema.Draft202012Validator(schema, registry=REGISTRY)
    assert accepted(json.loads(SAMPLES[kind]), kind)
    verdicts = []
    for k in range(60):
        try:
            data = parsed(bad_json(SAMPLES[kind], random.Random(zlib.crc32(f"{kind}:{k}".encode()))), "file", kind)
            check_sound(data, "file")  # a problem is not looked at for that
        except ValueError:
            continue
        verdicts.append(accepted(data, kind))
        assert verdicts[-1] == reference.is_valid(data), json.dumps(data)[:300]
    assert not all(verdicts) and len(verdicts) > 15


keys = st.sampled_from(["format", "tables", "problem", "points", "a"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(value=json_values, kind=st.sampled_from([kind for kind, form in FORMATS.items() if form.schema]))
def test_any_value_is_accepted_or_refused_in_one_sentence(value, kind):
    try:
        check_sound(value, "file")
        checked(value, "file", kind)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
