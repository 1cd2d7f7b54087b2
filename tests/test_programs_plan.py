"""Plans of several programs: files, reports, refusals, shares of devices, and both ends of the weights."""

import json
import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

import autoshard
from autoshard import Mesh, Program
from autoshard.cli import main
from autoshard.layout import all_layouts, rank_bounds, text
from autoshard.planning import programs as planning
from autoshard.planning.programs import sub_mesh
from autoshard.report.changes import comparison
from autoshard.report.programs import programs_record, programs_report
from autoshard.report.terminal import as_text
from autoshard.routes import DeviceSet, Transfers
from models import mlp
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import assert_refused

MESH = Mesh.from_bandwidths((4,))


def batch_of(rows):
    return (torch.empty(rows, *mlp.tiny()[1][0].shape[1:], device="meta"),)


@cache
def planned(weight=1.0, switches=1.0, devices=None):
    module, batch = mlp.tiny()
    programs = {"train": Program(module, batch, training=True), "use": Program(module, batch, weight=weight, devices=devices)}
    return autoshard.plan(programs, MESH, switches=switches)


def test_plans_of_programs_stay_what_they_are():
    told = {}
    for name, options in {"all": {}, "some": {"devices": (0, 1)}}.items():
        one = planned(**options)
        told[name] = {**programs_record(one), "cpu_seconds": None, "wall_seconds": None}
    assert_stays("rooms/programs.json", told)


# -- files and reports -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".pkl"])
def test_a_plan_is_what_its_file_holds(tmp_path, suffix):
    plan, path = planned(devices=(0, 1)), tmp_path / f"plan{suffix}"
    plan.save(path)
    assert autoshard.load(path) == plan
    assert autoshard.load(f"{path}#use") == plan["use"]
    assert_refused("several programs; name one of them, as .*#train", autoshard.api.load_one, path)
    assert_refused("no program 'serve'; the plan has train, use", autoshard.load, f"{path}#serve")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [("home", "other", "its home is 'other'"), ("weights", {"train": 1.0}, "its weights are of train"), ("bound", 1e9, "above its cost")],
)
def test_a_file_whose_parts_do_not_belong_together_is_refused(tmp_path, key, value, sentence):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(planned().to_dict() | {key: value}))
    assert_refused(sentence, autoshard.load, path)


def test_the_table_says_what_sharing_costs_and_what_is_kept_twice():
    plan = planned(devices=(0, 1))
    record, said = programs_record(plan), as_text(programs_report(plan), width=200)
    assert record["programs"]["use"]["copied"] == len(plan.copies) == len(plan["use"].parameters) > 0
    assert "What sharing costs each program" in said and "train (home)" in said and "Parameters kept twice" in said
    own = {row["name"]: row for row in plan.rows()}
    total = sum(row["weight"] * row["seconds"] for row in own.values()) + plan.switch_seconds("use")
    assert plan.cost == pytest.approx(total, rel=1e-12) and plan.bound <= plan.cost


def test_differences_of_plans_are_those_of_their_programs():
    same, other = comparison(planned(), planned()), comparison(planned(), planned(devices=(0, 1)))
    assert same["same"] and not other["same"] and set(other["programs"]) == {"train", "use"}


def test_the_verb_plans_shows_and_hands_on(tmp_path, capsys):
    source, plan = tmp_path / "rl.py", str(tmp_path / "rl.json")
    source.write_text(
        "from autoshard import Program\nfrom models import mlp\n\n\ndef programs(rows=8):\n    module, batch = mlp.tiny()\n"
        "    return {'train': Program(module, batch, training=True), 'use': Program(module, batch, weight=rows)}\n"
    )
    assert main(["plan", f"{source}:programs", "--mesh", "2", "--set", "rows=3", "--out", plan, "--json", "--quiet"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["programs"]["use"]["weight"] == 3 and record["gap"] <= 0.001
    assert set(autoshard.load(plan).switches.values()) == {1.0}, autoshard.load(plan).switches
    for words in (["show", plan], ["show", f"{plan}#use"], ["show", plan, plan]):
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
    assert main(["verify", f"{plan}#train", "--trust", "--json", "--quiet"]) == 0 and json.loads(capsys.readouterr().out)["ok"]
    assert main(["show", plan, f"{plan}#use"]) == 2 and "name one of them as" in capsys.readouterr().err
    refused = (([], "--mesh"), (["--mesh", "auto", "--devices", "2"], "--mesh auto"), (["--mesh", "2", "--train"], "each program"))
    for words, said in refused:
        assert main(["plan", f"{source}:programs", *words]) == 2 and said in capsys.readouterr().err
    assert main(["plan", "models/mlp.py:tiny", "--mesh", "2", "--switches", "3"]) == 2
    assert "--switches is of several programs" in capsys.readouterr().err


def test_options_of_training_are_for_the_programs_that_train():
    module, batch = mlp.tiny()
    programs = {"train": Program(module, batch, training=True), "use": Program(module, batch)}
    plan = autoshard.plan(programs, MESH, microbatches=2, recompute="all")
    assert [(one.microbatches, one.recompute) for one in (plan["train"], plan["use"])] == [(2, 2), (1, 0)]


# -- what is planned -------------------------------------------------------------------------------------------------------------------


def test_a_program_with_almost_all_weight_loses_nothing():
    module, batch = mlp.tiny()
    for weights in ((1e6, 1.0), (1.0, 1e6)):
        programs = {
            "train": Program(module, batch, training=True, weight=weights[0], options={"pins": {"*.bias": "R"}}),
            "use": Program(module, batch, weight=weights[1]),
        }
        plan = autoshard.plan(programs, MESH, switches=None)
        assert plan.loss(("train", "use")[weights.index(1e6)]) <= 1e-5 and not plan.copies
        layouts = [{name: row["layout"] for name, row in plan[one].parameters.items()} for one in plan]
        assert layouts[0] == layouts[1]


@pytest.mark.parametrize("switches", [1.0, None])
def test_programs_with_few_layers_correspond_node_by_node_to_those_with_all(switches, monkeypatch):
    module, batch = mlp.tiny(layers=30)
    known = []

    def noted(joined, pieces, alone):
        known.append((joined, alone, real(joined, pieces, alone)))
        return known[-1][-1]

    real = planning._few_layers
    monkeypatch.setattr(planning, "_few_layers", noted)
    autoshard.plan({"train": Program(module, batch, training=True), "use": Program(module, batch)}, MESH, switches=switches)
    ((joined, alone, few),) = known
    again, to = few.formulated, few.correspondence
    for name, one in alone.items():
        own = one.instance.few_layers.correspondence
        assert [to.nodes[v] for v in joined.nodes[name]] == [again.nodes[name][w] for w in own.nodes]
        edges = range(joined.edges[name], joined.edges[name] + len(own.edges))
        assert [to.edges[e] for e in edges] == [again.edges[name] + other for other in own.edges]
    assert bool(joined.copies) == (switches is not None)
    for copy in joined.copies:
        edge = again.problem.edges[to.edges[copy.edge]]
        assert (edge.a, edge.b) == (to.nodes[copy.node], to.nodes[copy.other])
    for deep, shallow in zip(joined.problem.node_costs, (again.problem.node_costs[v] for v in to.nodes), strict=True):
        assert deep.shape == shallow.shape
    assert len(again.problem.node_costs) < len(joined.problem.node_costs) and few.layers == again.homes


def test_nothing_fits_is_said_of_all_programs():
    module, batch = mlp.tiny()
    programs = {"train": Program(module, batch, training=True), "use": Program(module, batch)}
    free = autoshard.plan(programs, MESH)
    least = max(row["peak_bytes"] for row in free.best.values())
    with pytest.raises(autoshard.Infeasible, match="no plan fits in"):
        autoshard.plan(programs, MESH, memory_limit=0.2 * least)


@pytest.mark.parametrize(
    ("programs", "options", "sentence"),
    [
        ({}, {}, "programs is empty; expected Programs by name"),
        ([1], {}, "programs is no dict of Programs, but has a list"),
        ({"a b": Program(*mlp.tiny())}, {}, "called 'a b'"),
        ({"a": Program(*mlp.tiny())}, {"tie_blocks": True}, "tie_blocks is no option"),
        ({"a": Program(*mlp.tiny(), options={"gap": 0.1})}, {}, "give it to plan_programs"),
        ({"a": Program(*mlp.tiny())}, {"switches": -1}, "switches is -1"),
        ({"a": Program(*mlp.tiny())}, {"switches": {"b": 1}}, "switches names 'b'"),
        ({"a": Program(*mlp.tiny(), devices=(0, 9))}, {}, "expected different numbers from 0 to 3"),
        ({"a": Program(*mlp.tiny(), devices=(0, 2))}, {}, "no block of the mesh"),
        ({"a": Program(*mlp.tiny())}, {"recompute": "auto"}, "plan it alone"),
        (
            {"a": Program(*mlp.tiny(), training=True), "b": Program(*mlp.tiny(), options={"microbatches": 2})},
            {},
            "microbatches is 2, which has no effect on a forward pass",
        ),
        ({"a": Program(*mlp.tiny())}, {"objective": "overlapped"}, "objective is no option of several programs"),
        ({"a": Program(*mlp.tiny())}, {"expert_imbalance": 3.0}, "the model has no experts"),
    ],
)
def test_what_can_not_be_planned_is_refused_in_a_sentence(programs, options, sentence):
    assert_refused(sentence, autoshard.plan, programs, MESH, **options)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"weight": 0}, "weight is 0"), ({"inputs": None}, "either inputs or shapes"), ({"model": 3}, "model is int")],
)
def test_a_program_that_is_none_is_refused(fields, sentence):
    module, batch = mlp.tiny()
    assert_refused(sentence, Program, **{"model": module, "inputs": batch, **fields})


# -- part of the devices ----------------------------------------------------------------------------------------------------------------


def test_some_devices_are_a_mesh_of_the_axes_on_which_they_differ():
    mesh = Mesh.from_bandwidths((2, 4))
    assert [sub_mesh(mesh, some).shape for some in (range(4), (0, 1, 4, 5), (4, 5), (3,), range(8))] == [(4,), (2, 2), (2,), (1,), (2, 4)]


def test_a_transfer_brings_every_element_once_and_its_seconds_are_those_of_the_table():
    cluster, shape = Mesh.from_bandwidths((2, 4)), (8, 6)
    source = DeviceSet(cluster, tuple(range(8)))
    target = DeviceSet(sub_mesh(cluster, (4, 5)), (4, 5))
    transfers = Transfers(cluster, source, target)
    sources, targets = all_layouts(shape, cluster), all_layouts(shape, target.mesh)
    table = transfers.table(shape, 4, sources, targets)
    for (i, before), (j, after) in product(enumerate(sources), enumerate(targets)):
        one = transfers.transfer(shape, 4, before, after)
        assert one.seconds == table[i, j] and math.isfinite(one.seconds), (text(before), text(after))
        for where, number in zip(target.mesh.coordinates(), target.numbers, strict=True):
            count = np.zeros(shape, int)
            for m in (m for m in one.messages if m.receiver == number):
                count[tuple(slice(lo, hi) for lo, hi in m.box)] += 1
                held = rank_bounds(shape, before, cluster, cluster.coordinates()[m.sender])
                assert all(lo <= a and b <= hi for (a, b), (lo, hi) in zip(m.box, held))  # the sender has it
            wanted = rank_bounds(shape, one.via, target.mesh, where)
            expected = np.zeros(shape, int)
            expected[tuple(slice(lo, hi) for lo, hi in wanted)] = 1
            assert (count == expected).all()
