"""What `python -m tests.mutants` would say of a reader that fails: each way of failing is planted once."""

import json
import os
import pickle
import sys

import pytest

from tests import mutants
from tests.test_mutations import LOADERS, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sys.addaudithook(mutants.watch)
    folder = tmp_path_factory.mktemp("mutants")
    (folder / "plan.json").write_text(written("plan.2"))
    return folder


def spends(path: str) -> None:
    while mutants.time.process_time() - began[0] < 1.2:
        pass


began = [0.0]
FAULTS = {
    "KeyError": lambda path: {}["missing"],
    "pickle.find_class": lambda path: pickle.loads(pickle.dumps(os.getcwd)),
    "os.system": lambda path: os.system("true"),
    "MB": lambda path: len(bytes(bytearray(b"x") * (320 * 2**20))),
    "s, ": spends,
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_reader_that_fails_is_seen(folder, monkeypatch, what):
    monkeypatch.setitem(LOADERS, "load curves", FAULTS[what])
    began[0], row = mutants.time.process_time(), mutants.Row()
    row.add("it", *mutants.tried("load curves", b"{}", folder))
    assert len(row.failures) == 1 and what in row.failures[0], row.failures
    monkeypatch.undo()
    row = mutants.Row()
    row.add("it", *mutants.tried("load curves", b"{}", folder))
    assert row.failures == [] and row.refused == 1


def test_every_place_is_met_with_every_value():
    data = {"a": [1, {"b": 2}, 3], "c": "x"}
    assert list(mutants.places(data)) == [("a",), ("a", 0), ("a", 2), ("c",)]
    made = [one() for one in mutants.systematic_json(json.dumps(data))]
    assert len(made) == 4 * (1 + len(mutants.HOSTILE)) and b'{"a": [1, {"b": 2}, 3]}' in made and b'{"a": null, "c": "x"}' in made


@pytest.mark.slow
def test_some_mutants_of_every_format_are_taken_well(capsys):
    assert mutants.main_of_mutants(["--random", "100", "--systematic", "300", "--seed", "7"]) == 0, capsys.readouterr().out
