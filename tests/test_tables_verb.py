"""`autoshard tables`: what it prints, and one sentence for each kind of bad input."""

import json

import pytest

from autoshard.cli.verbs_without_model import limits_line
from autoshard.mesh import Mesh
from autoshard.report.plan_tables import axis_line, mesh_line
from tests.helpers_command import record_of, refusal, run

GOOD = "name,rows,columns,pooling\n" + "".join(f"t{i},{1000 * (i + 1)},64,{1 + i % 3}\n" for i in range(12))
NINE_TABLES = [{"name": f"t{i}", "rows": 10**6, "columns": 128} for i in range(9)]


@pytest.fixture
def spec(tmp_path):
    def write(text: str, name: str = "tables.csv") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_plan_as_json(spec, tmp_path):
    out = tmp_path / "plan.json"
    record = record_of("tables", spec(GOOD), "--devices", "2x2", "--hbm", "1GB", "--effort", "0.05", "--out", str(out))
    assert record == json.loads(out.read_text())
    assert set(record["tables"]) == {f"t{i}" for i in range(12)} and len(record["devices"]) == 4
    assert record["hbm_limit_bytes"] == [1e9 * (1 - 0.15)] * 4  # the reserve
    assert 0 <= record["bound_seconds"] <= record["slowest_device_seconds"] == max(d["seconds"] for d in record["devices"])
    assert all({"sharding", "devices", "why"} <= set(row) for row in record["tables"].values())


def test_a_plan_for_people(spec, tmp_path):
    code, printed, _ = run("tables", spec(GOOD), "--devices", "2", "--effort", "0.05", "--plot", str(tmp_path / "load.svg"))
    assert code == 0 and "█" in printed and "slowest device" in printed and "options; " in printed
    assert (tmp_path / "load.svg").read_text().startswith("<?xml")


def test_what_was_assumed_is_printed(spec):
    words = ("tables", spec(GOOD), "--devices", "2x4", "--effort", "0.05")
    mesh = "mesh 2x4 of h100; axis0 x2 400 GB/s shared by 4, 15 us; axis1 x4 338 GB/s, 5 us"
    for hbm, host, expected, limits in (
        ("40GB", "512GB", 0, "limits 34 GB per device (40 GB less 15 % reserve), 435 GB per host (512 GB less 15 % reserve) table"),
        ("0.2MB", "0", 1, "limits 170 kB per device (200 kB less 15 % reserve), 0 per host infeasible: "),
    ):
        code, printed, _ = run(*words, "--hbm", hbm, "--host-memory", host)
        assert code == expected and " ".join(printed.split()).startswith(f"{mesh} {limits}")


def test_the_limits():
    assert limits_line(40e9, None, 0.0) == "limits 40 GB per device"
    assert limits_line(40e9, 0.0, 0.07) == "limits 37.2 GB per device (40 GB less 7 % reserve), 0 per host"


@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 2, 2)])
def test_the_line_of_the_mesh_is_that_of_a_plan_s_report(shape):
    mesh = Mesh.from_bandwidths(shape, intra_node_bandwidth=250e9, device="a100")
    assert mesh_line(mesh) == "; ".join([f"{'x'.join(map(str, shape))} of a100", *map(axis_line, mesh.axes)])


def test_host_memory_is_a_remedy_only_where_it_was_not_given(spec):
    words = ("tables", spec(json.dumps(NINE_TABLES), "t.json"), "--devices", "2", "--hbm", "1GB")
    reason = record_of(*words, code=1)["reason"]
    assert "--host-memory (in Python host_memory=)" in reason and "unlimited" not in reason and "of host memory" not in reason
    reason = record_of(*words, "--host-memory", "0", code=1)["reason"]
    assert "--host-memory" not in reason and "0 of host memory in all, and 1.7 GB and 0 are free" in reason


def test_options_of_ones_own(spec):
    tables = [{"name": f"t{i}", "options": [{"sharding": "table_wise", "seconds": 1.0, "hbm_bytes": 4e8}]} for i in range(4)]
    record = record_of("tables", spec(json.dumps({"tables": tables}), "t.json"), "--devices", "2", "--hbm", "1GB")
    assert (record["status"], record["slowest_device_seconds"]) == ("optimal", 2.0)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ([{"name": "t", "rows": 10**9, "columns": 512}], "table 't' does not fit"),
        (NINE_TABLES, "the tables do not fit: they take at least"),
    ],
)
def test_what_does_not_fit_is_no(spec, tables, sentence):
    record = record_of("tables", spec(json.dumps(tables), "t.json"), "--devices", "2", "--hbm", "1GB", code=1)
    assert record["status"] == "infeasible" and sentence in record["reason"]
    assert record["slowest_device_seconds"] is None and record["tables"] == {}


def with_option(**given):
    return json.dumps([{"name": "t", "options": [{"sharding": "x", "seconds": 1.0, "hbm_bytes": 1.0, **given}]}])


BAD_CSV = [
    ("name,rows,columns\n", "there are no tables"),
    ("", "the CSV has no column 'name'"),
    ("name,rows,cols\na,1,2\n", "the CSV has an unknown column 'cols'; did you mean 'columns'?"),
    ("name,num_embeddings,columns\na,1,2\n", "unknown column 'num_embeddings'; rows is what torchrec calls num_embeddings"),
    ("name,rows,embedding_dim\na,1,2\n", "columns is what torchrec calls embedding_dim"),
    ("name;rows;columns\na;1;2\n", "with semicolons in its name; expected columns separated by commas"),
    ("name\trows\tcolumns\na\t1\t2\n", "with tabs in its name; expected columns separated by commas"),
    ("name,rows\na,1\n", "the CSV has no column 'columns'"),
    ("name,rows,columns\na,x,2\n", "line 2 of the CSV: rows is 'x'; expected a number"),
    ("name,rows,columns\na,nan,2\n", "rows is 'nan'; expected a number"),
    ("name,rows,columns\na,-5,2\n", "rows is -5; expected a whole number"),
    ("name,rows,columns\na,1,2\na,1,2\n", "two tables are named 'a'"),
    ("name,rows,columns\na,1\n", "line 2 of the CSV has another number of fields"),
    ("name,rows,columns,pooling\na,1,2,inf\n", "pooling is inf"),
]
BAD_JSON = [
    ("[]", "there are no tables"),
    ("{", "ends early"),
    ('{"table": []}', "unknown key 'table'; did you mean 'tables'?"),
    ("3", 'the file holds 3 is not of type "object"'),
    ('[{"rows": 1, "columns": 1}]', "table 0 of the spec has no name"),
    ('[{"name": "t", "rows": 1}]', "table 't' has no 'columns'"),
    ('[{"name": "t", "num_embeddings": 1}]', "rows is what torchrec calls num_embeddings"),
    ('[{"name": "t", "options": []}]', "table 't' has no options"),
    (with_option(seconds=-1.0), "table 't': seconds of option 'x' is -1.0"),
    (with_option(seconds=float("nan")), "is no sound JSON (it holds NaN)"),
    (with_option(speed=1.0), "an option of table 't' has an unknown key 'speed'"),
]
BAD_WORDS = [
    (("--hbm", "0"), "--hbm is '0'"),
    (("--reserve", "1.5"), "reserve is 1.5"),
    (("--devices", "0"), "mesh shape is (0,)"),
    (("--batch", "0"), "--batch is 0; expected a whole number of 1 or more"),
    (("--out", "/nowhere/x.json"), "there is no folder"),
]
REFUSED = [
    *(("tables.csv", text, ("--json",), sentence) for text, sentence in BAD_CSV),
    *(("t.json", text, ("--json",), sentence) for text, sentence in BAD_JSON),
    *(("tables.csv", GOOD, words, sentence) for words, sentence in BAD_WORDS),
]


@pytest.mark.parametrize(("file", "text", "words", "sentence"), REFUSED, ids=[f"{k}-{row[0]}" for k, row in enumerate(REFUSED)])
def test_bad_files_and_words_are_one_sentence(spec, file, text, words, sentence):
    assert sentence in refusal("tables", spec(text, file), *words)
