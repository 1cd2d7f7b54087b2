"""Files that are no plan: every one is refused in one sentence, and none of them runs anything. Folders take their names complete."""

import io
import json
import os
import pickle
import re
from pathlib import Path

import dill
import pytest
from torch.distributed.tensor.placement_types import Shard

from autoshard.solution import clear_folder, load, publish_folder
from tests.helpers_refusals import assert_file_refused, assert_refused
from tests.helpers_solutions import linear_solution


class Attack:
    """Unpickling this runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def changed(**changes) -> dict:
    """A file of format 1 with other values."""
    return {"format": 1, **linear_solution().to_dict(), **changes}


WRITERS = {
    "json": lambda data: json.dumps(data).encode(), "pickle": pickle.dumps, "old pickle": lambda data: pickle.dumps(data, protocol=0),
    "dill": dill.dumps,
}  # fmt: skip

BAD_RECORDS = [
    ({}, "is not a plan: it holds nothing and no 'format'"),
    ([1, 2], "holds a list, not a plan"),
    ({"weights": [1], "epoch": 3}, "is not a plan: it holds 'weights', 'epoch' and no 'format'"),
    (changed(format=3), "has format 3, this autoshard reads up to 2; update autoshard"),
    (changed(format="1"), "has format '1'; expected a whole number"),
    (changed(format=True), "has format True; expected a whole number"),
    ({k: v for k, v in changed().items() if k != "layouts"}, "parts/0 lacks 'layouts'"),
    (changed(colour="red"), "the file holds Additional properties are not allowed ('colour' was unexpected)"),
    (changed(layouts=[]), 'parts/0/layouts holds [] is not of type "object"'),
    (changed(cost="cheap"), 'cost holds "cheap" is not of types "null", "number"'),
    (changed(cost=1.0, bound=2.0), "its bound 2 is above its cost 1"),
    (changed(training="yes"), 'training holds "yes" is not of type "boolean"'),
    (changed(mesh={"axes": []}), "mesh"),
    (
        changed(mesh={**changed()["mesh"], "axes": [{"name": "a", "size": "2", "bandwidth": 1, "latency": 1}]}),
        'mesh/axes/0/size holds "2" is not of type "integer"',
    ),
    (changed(layouts={"w": ["R,R"]}), 'parts/0/layouts/w holds ["R,R"] is not of type "object"'),
    (changed(layouts={"w": {"inputs": "R,R", "outputs": []}}), 'parts/0/layouts/w/inputs holds "R,R" is not of type "array"'),
    (changed(layouts={"w": {"inputs": [], "outputs": ["R"]}}), "op 'w' has layout 'R' of 1 placements, the mesh has 2 axes"),
    (changed(layouts={"w": {"inputs": [], "outputs": ["Q,R"]}}), "parts/0/layouts/w/outputs/0 "),
    (changed(layouts={"w": {"inputs": [None], "outputs": []}}), 'parts/0/layouts/w/inputs/0 holds null is not of type "string"'),
    (changed(results={"output:0": 3}), 'parts/0/results/output:0 holds 3 is not of type "string"'),
    (changed(parameters={"w": {"shape": [8]}}), "parts/0/parameters/w lacks 'layout'"),
]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("record", "sentence"), BAD_RECORDS, ids=[sentence for _, sentence in BAD_RECORDS])
def test_a_record_that_is_no_plan_is_refused_in_one_sentence(tmp_path, writer, record, sentence):
    check_refused(tmp_path, WRITERS[writer](record), sentence)


def check_refused(tmp_path, content: bytes, sentence: str) -> None:
    path = tmp_path / "plan.file"
    path.write_bytes(content)
    assert_file_refused(re.escape(sentence), load, path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty; expected a plan"),
        (b"  \n", "is empty; expected a plan"),
        (b"hello", "is neither JSON nor a pickle"),
        (b"\x89PNG\r\n\x1a\n", "is neither JSON nor a pickle"),
        (b"{'a': 1}", "is no sound JSON at line 1, column 2"),
        (b'{"a": "\xff"}', "is no sound JSON"),
        (b'{"cost": NaN}', "is no sound JSON (it holds NaN)"),
        (b'{"cost": ' + b"9" * 5000 + b"}", "is no sound JSON"),
        (b"[" * 100_000, "is no sound JSON"),
        (b"\x80\x04garbage", "is no sound pickle"),
        (b"\x80\x04]\x94h\x00a.", "holds a list, not a plan"),  # a list that holds itself
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, content, sentence):
    check_refused(tmp_path, content, sentence)


@pytest.mark.parametrize("suffix", [".json", ".pkl"])
@pytest.mark.parametrize("kept", [0.02, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused(tmp_path, suffix, kept):
    linear_solution().save(tmp_path / f"whole{suffix}")
    content = (tmp_path / f"whole{suffix}").read_bytes().rstrip()
    check_refused(tmp_path, content[: int(kept * len(content))], "write it again")


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    assert_refused("is a folder; expected a plan's file", load, tmp_path)
    assert_refused("there is no file .*nothing.json; expected a plan's file", load, tmp_path / "nothing.json")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["alone", "in a plan", "in a record"])
def test_a_hostile_pickle_is_named_and_not_run(tmp_path, protocol, place):
    attack = Attack(f"touch {tmp_path}/owned")
    record = {
        "alone": attack,
        "in a plan": changed(assumptions={"a": attack}),
        "in a record": {"n": {"args": {"x": attack}, "results": {}}},
    }
    check_refused(tmp_path, pickle.dumps(record[place], protocol=protocol), f"{os.name}.system, which a plan never needs; it was not run")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "builtins.getattr", "torch.load", "torch.distributed.tensor.placement_types.Any"])
def test_other_names_are_refused_too(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    content = b"\x80\x04c" + module.encode() + b"\n" + attribute.encode() + b"\n."
    check_refused(tmp_path, content, f"{name}, which a plan never needs")


def test_references_outside_the_pickle_are_refused(tmp_path):
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.persistent_id = lambda thing: "elsewhere" if thing == "x" else None
    pickler.dump({"format": "x"})
    check_refused(tmp_path, buffer.getvalue(), "the pickle refers to objects outside itself")


def test_a_placement_in_a_plan_of_ours_is_refused(tmp_path):
    check_refused(tmp_path, pickle.dumps(changed(assumptions={"a": Shard(0)})), "Shard")  # where, or of which type, as jsonschema-rs says


def test_files_of_the_first_release_load_for_ever(tmp_path):
    path = Path(__file__).parent / "data" / "solutions" / "gpt2-tiny-2x2.format1.json"
    written = json.loads(path.read_text())
    solution = load(path)
    assert written["format"] == 1 and solution.cost == written["cost"] and solution.layouts.keys() == written["layouts"].keys()
    assert {name: row["layout"] for name, row in solution.parameters.items()} == {k: v["layout"] for k, v in written["parameters"].items()}
    solution.save(tmp_path / "again.json")
    assert load(tmp_path / "again.json") == solution and json.loads((tmp_path / "again.json").read_text())["format"] == 2


@pytest.mark.parametrize("before", [(), ("run",), (".run.old",), ("run", ".run.old")])
def test_a_folder_takes_its_name_complete_and_leaves_no_older_one(tmp_path, before):
    """`.run.old` is what a process that was killed between the two renames has left."""
    for name in before:
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("old")
    clear_folder(tmp_path / "run.partial", tmp_path / "run")
    (tmp_path / "run.partial" / "new").write_text("new")
    publish_folder(tmp_path / "run.partial", tmp_path / "run")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["run", "run/new"]


def test_a_folder_that_is_being_written_is_emptied_first_and_takes_no_files_name(tmp_path):
    clear_folder(tmp_path / "run.partial", tmp_path / "run")
    (tmp_path / "run.partial" / "half").write_text("half")
    clear_folder(tmp_path / "run.partial", tmp_path / "run")
    assert not list((tmp_path / "run.partial").iterdir())
    (tmp_path / "run").write_text("a file")
    with pytest.raises(NotADirectoryError, match=r"run is not a folder; give a folder, or a name that is free"):
        clear_folder(tmp_path / "run.partial", tmp_path / "run")
