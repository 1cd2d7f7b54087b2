"""Why something lies as it does: prices, alternatives, `--why-not`, against plans made from nothing and brute force."""

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

import autoshard
from autoshard.api import plan, simulate
from autoshard.cli.model import load_model
from autoshard.explain.differences import cost_differences, edge_term, held_at_once, op_term, touching
from autoshard.explain.reopened import captured, nearest, reopened
from autoshard.explain.subjects import subject, wanted, ways
from autoshard.explain.why import explain
from autoshard.mesh import Mesh
from autoshard.problem import Edge, NodeUsage, Problem, evaluate
from autoshard.solution import Solution
from autoshard.units import seconds
from tests.helpers_refusals import assert_refused
from tests.test_cli import ROOT, check_refused, run

MODEL = f"{ROOT}/models/mlp.py:mlp"
SETTINGS = {"layers": 2, "batch": 16384, "width": 512, "hidden": 2048}
MESH = Mesh.from_bandwidths((2, 2), intra_node_bandwidth=100e9, inter_node_bandwidth=50e9, tf32=True)
SMALL = {"layers": 1, "batch": 4096, "width": 512, "hidden": 2048}
LIMIT = 88e6  # bytes, of SMALL; without a limit its plan takes 132 MB
WEIGHT = "layers.0.up.weight"
SAME = 1e-9  # relative: what the solvers call equal


def model(training: bool = True, sizes: dict = SETTINGS) -> tuple:
    return load_model(MODEL, sizes | {"loss": training}, training=training)


def planned(training: bool = True, sizes: dict = SETTINGS, **asked) -> Solution:
    settings = {"model": MODEL, "set": sizes | {"loss": training}}
    return plan(*model(training, sizes), MESH, training=training, baselines=False, assumptions=settings, **{"objective": "serial", **asked})


def cost_of_a_cold_plan(*words, **asked) -> float:
    """inf where there is none."""
    try:
        return planned(*words, **asked).cost
    except autoshard.Infeasible:
        return math.inf


@pytest.fixture(scope="module")
def solution() -> Solution:
    return planned()


@pytest.fixture(scope="module")
def opened(solution):
    return reopened(captured(*model(), solution).graph, solution)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_edges_and_the_bytes_of_some_nodes_are_those_by_definition(opened, share):
    f, choice = opened.formulated, opened.choice
    some, edges = {v for v in range(len(choice)) if random.Random(f"{share} {v}").random() < share}, f.problem.edges
    ends = [(edge.a in some, edge.b in some) for edge in edges]
    assert touching(f, list(some)) == tuple([e for e, two in enumerate(ends) if sum(two) == n] for n in (1, 2))
    held = [(u.start, u.end, kind, u.held(choice)) for kind, u in zip(f.held, f.problem.usages) if u.ends[-1] in some]
    totals = [math.fsum(b for a, z, _, b in held if a <= t < z) for t in range(len(choice))]
    when = totals.index(max(totals))
    kinds = {kind: math.fsum(b for a, z, k, b in held if a <= when < z and k == kind) for kind in {k for _, _, k, _ in held}}
    assert held_at_once(f, list(some), choice) == pytest.approx({kind: b for kind, b in kinds.items() if b}, rel=1e-12)


# --- globally


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (WEIGHT, "R,R"), ("layers.1.down.bias", "S(0),R"), ("input_0", "S(1),S(0)"), ("gelu_1", "S(0),R"), ("addmm", "P,S(0)"),
    ],
)
def test_why_not_costs_what_a_cold_plan_with_that_pin_costs(solution, name, layout):
    one = explain(*model(), solution, name, why_not=layout, most=0).why_not
    cold = planned(pins={name: layout})
    assert one.proven and one.cost == pytest.approx(cold.cost, rel=SAME) and one.bound <= cold.cost * (1 + SAME)
    assert one.extra == pytest.approx(one.cost - solution.cost, abs=1e-15) and one.extra >= -SAME * solution.cost
    assert one.pins == {name: layout} and one.peak_bytes > 0


def test_so_it_does_in_a_forward_pass_and_beside_the_plans_own_pins(solution):
    forward = planned(training=False, pins={"layers.1.up.weight": "R,R", "layers.*.bias": "R,R"})
    for name, layout in (("layers.0.down.weight", "R,S(0)"), ("layers.1.up.weight", "S(0),R")):
        one = explain(*model(False), forward, name, why_not=layout, most=0).why_not
        cold = planned(training=False, pins={"layers.1.up.weight": "R,R", "layers.*.bias": "R,R"} | {name: layout})
        assert one.cost == pytest.approx(cold.cost, rel=SAME)
    assert one.cost != pytest.approx(planned(training=False).cost, rel=1e-6)  # the pins on biases, or the layout, cost something


def test_so_it_does_with_tied_blocks():
    tied = planned(tie_blocks=True)
    one = explain(*model(), tied, WEIGHT, why_not="R,R", most=0).why_not
    assert one.cost == pytest.approx(planned(tie_blocks=True, pins={WEIGHT: "R,R"}).cost, rel=SAME)
    assert set(one.changed) == {"layers.1.up.weight"} or one.changed["layers.1.up.weight"][1] == "R,R"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "sizes", "limit", "count"),
    [(True, SETTINGS, None, 12), (False, SETTINGS, None, 12), (True, SMALL, LIMIT, 5), (True, SMALL, 105e6, 3), (False, SMALL, 24e6, 9)],
)
def test_why_not_of_everything(training, sizes, limit, count):
    """Every layout of some tensors, each against a plan made from nothing."""
    base = planned(training, sizes, memory_limit=limit)
    again = reopened(captured(*model(training, sizes), base).graph, base)
    names = random.Random(f"{training}{limit}").sample(sorted(again.formulated.graph.index), count)
    for name in names:
        for way in ways(again.formulated, subject(again.formulated, name)):
            one = explain(*model(training, sizes), base, name, why_not=way.label, most=0).why_not
            cold = cost_of_a_cold_plan(training, sizes, memory_limit=limit, pins={name: way.label})
            assert one.cost == pytest.approx(cold, rel=SAME), (name, way.label)


@pytest.fixture(scope="module")
def told(solution):
    return explain(*model(), solution, WEIGHT, why_not=solution.parameters[WEIGHT]["layout"], most=99)


def test_the_alternatives_are_all_layouts_but_the_chosen_one_cheapest_first(opened, solution, told):
    given = {way.label for way in ways(opened.formulated, subject(opened.formulated, WEIGHT))}
    assert told.layout == solution.parameters[WEIGHT]["layout"] and {one.label for one in told.alternatives} == given - {told.layout}
    costs = [one.cost for one in told.alternatives]
    assert costs == sorted(costs) and costs[0] >= told.cost * (1 - SAME) and len(set(costs)) > 1 and not told.left_out


def test_the_chosen_layout_costs_nothing_more(told):
    one = told.why_not
    assert one.extra == pytest.approx(0.0, abs=SAME * told.cost) and one.local_extra == 0.0
    assert not one.changed and not one.changed_ops and not one.dearer


def test_fewer_alternatives_are_the_cheapest_and_what_is_left_out_costs_no_less(solution, told):
    few = explain(*model(), solution, WEIGHT, most=2)
    assert [one.cost for one in few.alternatives] == [one.cost for one in told.alternatives[:2]]
    costs = {one.label: one.cost for one in told.alternatives}
    assert set(few.left_out) == set(costs) - {one.label for one in few.alternatives}
    assert all(few.alternatives[-1].cost * (1 - SAME) <= floor <= costs[label] * (1 + SAME) for label, floor in few.left_out.items())


def test_what_is_dearer_and_what_is_cheaper_add_up_to_the_difference(told):
    for one in told.alternatives:
        assert one.dearer_seconds + one.cheaper_seconds == pytest.approx(one.extra, abs=1e-12 * told.cost)
        assert all(row.extra_seconds > 0 for row in one.dearer) and all(row.extra_seconds < 0 for row in one.cheaper)
        assert one.extra == 0 or one.dearer


# --- blocks


def test_a_block_is_its_parameters_and_ops(opened, solution):
    found = explain(*model(), solution, "layers.1", most=2, why_not="S(0),R")
    own = [f"layers.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")]
    assert found.kind == "block" and list(found.parameters) == own
    assert all(found.parameters[name] == solution.parameters[name]["layout"] for name in found.parameters)
    inside = [i for i, op in enumerate(opened.formulated.graph.ops) if "layers.1" in (op.name + " " + op.module)]
    assert found.seconds == pytest.approx(sum(opened.formulated.problem.node_costs[i][opened.choice[i]] for i in inside))
    assert len(found.alternatives) == 2 and len(found.left_out) == 2
    assert {*found.left_out, *(one.label for one in found.alternatives)} == {"data_parallel", "fsdp", "megatron", "megatron_sp"}
    assert found.why_not.pins == {name: "S(0),R" for name in found.parameters}
    assert found.why_not.cost == pytest.approx(planned(pins=found.why_not.pins).cost, rel=SAME)


def test_a_block_that_is_pinned_to_a_scheme_takes_it_and_no_other_does(opened, solution):
    about = subject(opened.formulated, "layers.0.")
    (scheme,) = (way for way in ways(opened.formulated, about) if way.label == "data_parallel")
    answer = opened.best(opened.narrowed(scheme), time_limit=60.0)
    given = {name: opened.formulated.candidate(i, answer.choice).outputs[0] for name, i in opened.formulated.graph.parameters.items()}
    assert all(p.is_replicate() for name, layout in given.items() if name.startswith("layers.0.") for p in layout)
    assert set(scheme.kept) == set(about.nodes)


# --- names and refusals


@pytest.mark.parametrize(
    ("name", "near"),
    [("layers.0.up.weihgt", WEIGHT), ("up.weight", WEIGHT), ("layer.1", "layers.1"), ("geluu", "gelu")],
)
def test_of_a_name_that_is_not_there_near_ones_are_said(solution, name, near):
    assert_refused(f"there is no parameter, buffer, input, op or block '{name}'.*near are .*{near}", explain, *model(), solution, name)


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        (WEIGHT, "S(2),R", "shards dim 2, the tensor has 2 dims"),
        (WEIGHT, "R", "has 1 placements, the mesh 2x2 has 2 axes"),
        (WEIGHT, "P,R", "P,R is no output layout of parameter; possible are S"),
        ("layers.1", "S(2),R", "no parameter of block layers.1 can have it"),
    ],
)
def test_a_layout_that_cannot_be_says_why(solution, name, layout, reason):
    one = explain(*model(), solution, name, why_not=layout, most=0).why_not
    assert reason in one.reason and reason in one.local_reason and math.isinf(one.cost) and math.isinf(one.extra)
    assert (one.dearer, one.dearer_seconds, one.cheaper, one.cheaper_seconds) == ((), 0, (), 0)


@pytest.mark.parametrize("name", ["layers.0", "input_0"])
def test_over_memory_says_so_globally_and_locally(name):
    small = planned(False, SMALL, memory_limit=24e6)
    one = explain(*model(False, SMALL), small, name, why_not="R,R", most=0).why_not
    assert math.isinf(one.cost) and "no plan fits in 24.000 MB per device; the smallest limit that works is" in one.reason
    assert one.local_reason.startswith("over memory: ") and math.isinf(one.local_extra)
    assert cost_of_a_cold_plan(False, SMALL, memory_limit=24e6, pins=one.pins) == math.inf


def test_what_the_plan_was_asked_for_stays_asked_for():
    asked = {"forbid": {WEIGHT: ["S(0),S(0)"], "layers.*.bias": "*,S(0)"}}
    base = planned(False, SMALL, **asked)
    never = explain(*model(False, SMALL), base, WEIGHT, why_not="S(0),S(0)", most=0).why_not
    assert math.isinf(never.cost) and "they forbid each other" in never.reason and "asked for" in never.local_reason
    other = explain(*model(False, SMALL), base, WEIGHT, why_not="S(1),R", most=0).why_not
    assert other.cost == pytest.approx(planned(False, SMALL, pins=other.pins, **asked).cost, rel=SAME)


@pytest.mark.slow
def test_what_time_did_not_prove_is_said(capsys, tmp_path):
    tight = planned(sizes=SMALL, memory_limit=LIMIT)
    one = explain(*model(sizes=SMALL), tight, WEIGHT, why_not="R,R", most=0, time_limit=1e-9).why_not
    assert not one.proven and 0 < one.bound < one.cost < math.inf
    tight.save(tmp_path / "tight.json")
    out = run(capsys, "explain", str(tmp_path / "tight.json"), WEIGHT, "--trust", "--why-not", "R,R", "--time-limit", "1e-9", "--quiet")[1]
    assert ", or less" in out and "and at least" in " ".join(out.split())


def test_another_model_and_words_that_are_no_layout_are_refused(solution):
    assert_refused("does not fit this model", explain, *load_model(MODEL, SETTINGS | {"layers": 1}), solution, WEIGHT)
    assert_refused("expected R, S", explain, *model(), solution, WEIGHT, why_not="rows")
    assert_refused("most is -1", explain, *model(), solution, WEIGHT, most=-1)


# --- the command line


@pytest.fixture
def path(tmp_path, solution) -> str:
    solution.save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_the_verb_prints_the_record_of_the_function(capsys, path, solution, told):
    code, out, _ = run(capsys, "explain", path, WEIGHT, "--trust", "--why-not", told.layout, "--alternatives", "99", "--json", "--quiet")
    record = json.loads(out)
    assert code == 0 and set(record) == {"cost_seconds", "explained"}
    found, expected = record["explained"], told.to_dict()
    assert {k: v for k, v in found.items() if k != "cpu_seconds"} == {k: v for k, v in expected.items() if k != "cpu_seconds"}
    assert {"alternatives", "why_not", "left_out", "edges", "parts", "bytes", "layout", "seconds", "edge_seconds"} <= set(found)
    row = found["alternatives"][-1]["dearer"][0]
    assert set(row) == {"kind", "name", "module", "before", "after", "extra_seconds"}
    assert set(row["before"]) == set(row["after"]) == {"takes", "gives", "seconds", "steps"}


@pytest.mark.parametrize("name", [WEIGHT, "layers.1", "addmm"])
def test_the_verb_in_words_fits_a_hundred_columns(capsys, path, name):
    code, out, _ = run(capsys, "explain", path, name, "--trust", "--why-not", "R,R", "--quiet")
    assert code == 0 and name in out and "Why not R,R?" in out and "changes elsewhere" in out and "the rest as it is" in out
    assert max(map(len, out.splitlines())) <= 100 and "%" in out


@pytest.mark.parametrize("lines", [{}, {"seconds": 1e-3, "bound_seconds": 9e-4, "serial_plan_seconds": 1e-3}])
def test_the_sums_of_a_plan_of_the_shortest_time_line_are_said_to_be_sums(capsys, tmp_path, lines):
    path, one = str(tmp_path / "small.json"), planned(False, SMALL)
    replace(one, overlapped=lines).save(path)
    out = run(capsys, "explain", path, "layers.0.up.bias", "--trust", "--alternatives", "0", "--quiet")[1]
    said = f"the plan takes {seconds(one.cost)} and no plan less than {seconds(one.bound)}; with overlap"
    assert (said in " ".join(out.split())) == bool(lines)


def test_alternatives_to_a_plan_of_the_shortest_time_line_are_simulated(capsys, tmp_path):
    """Their sums were all that was said, which are less than the plan's where the time line is longer."""
    path, one = str(tmp_path / "small.json"), planned(False, SMALL, objective="overlapped")
    one.save(path)
    (asked,) = explain(*model(False, SMALL), one, "layers.0.up.weight", why_not="S(1),R", most=1).alternatives[:1]
    found = explain(*model(False, SMALL), one, "layers.0.up.weight", why_not="S(1),R", most=0)
    cold = planned(False, SMALL, pins={"layers.0.up.weight": "S(1),R"})
    assert found.step_seconds == pytest.approx(one.step_seconds) and found.why_not.cost == pytest.approx(cold.cost)
    assert found.why_not.step_seconds == pytest.approx(simulate(*model(False, SMALL), cold).seconds)
    assert asked.step_seconds >= one.overlapped["bound_seconds"]
    out = run(capsys, "explain", path, "layers.0.up.weight", "--trust", "--alternatives", "1", "--why-not", "S(1),R", "--quiet")[1]
    assert out.count("its time line") == 2 and max(map(len, out.splitlines())) <= 100


def test_with_robust_both_are_answered(capsys, tmp_path):
    path = str(tmp_path / "small.json")
    planned(False, SMALL).save(path)
    code, out, _ = run(capsys, "explain", path, "layers.0.up.bias", "--trust", "--robust", "--alternatives", "0", "--json", "--quiet")
    assert code == 0 and set(json.loads(out)) == {"cost_seconds", "explained", "robust"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((f"{ROOT}/models/mlp.py:mlp",), "which is a model; give it as --model"),
        (("--why-not", "R,R"), "--why-not 'R,R' asks about nothing"),
        ((WEIGHT, "--alternatives", "-2"), "--alternatives is -2"),
        (("nothing.at.all", "--trust", "--quiet"), "there is no parameter, buffer, input, op or block 'nothing.at.all'"),
    ],
)
def test_bad_words_are_refused(capsys, path, words, sentence):
    check_refused(capsys, ("explain", path, *words), sentence)


# -- ops and edges one by one, and what differs for nothing ------------------------------------------------------------------------------


# --- one by one


def test_the_ops_and_edges_of_a_plan_add_up_to_its_cost(opened):
    formulated, choice = opened.formulated, opened.choice
    ops = [op_term(formulated, i, choice).seconds for i in range(len(formulated.graph.ops))]
    edges = [edge_term(formulated, e, choice) for e in range(len(formulated.tensor_edges))]
    assert math.fsum(ops) + math.fsum(edge.seconds for edge in edges) == pytest.approx(opened.judged.cost)
    gradients = {edge.name.partition(" -> ")[2] for edge in edges if edge.kind == "gradient"}
    assert gradients == set(formulated.graph.parameters)
    assert {edge.kind for edge in edges} == {"copy", "input", "gradient", "output"}
    for edge in edges:
        assert bool(edge.steps) == (edge.inputs != edge.outputs) and (edge.seconds > 0) == (edge.inputs != edge.outputs)


def test_between_a_plan_and_itself_nothing_moves(opened):
    assert cost_differences(opened.formulated, opened.choice, opened.choice) == []


def test_locally_the_best_candidate_and_copy_are_taken_with_all_else_as_planned(opened, solution):
    """Against every candidate with every layout of the copies."""
    formulated, problem = opened.formulated, opened.formulated.problem
    node = formulated.graph.index["addmm"]
    hubs = [hub for (i, _), hub in formulated.hubs.items() if i == node]
    told = explain(*model(), solution, "addmm", most=3)
    assert hubs and len(told.alternatives) == 3
    for one in told.alternatives:
        way = wanted(formulated, subject(formulated, "addmm"), one.label)
        costs = []
        for k, *waits in itertools.product(np.flatnonzero(way.kept[node]), *(range(len(problem.node_costs[hub])) for hub in hubs)):
            choice = list(opened.choice)
            for v, i in zip([node, *hubs], [k, *waits]):
                choice[v] = int(i)
            costs.append(evaluate(problem, choice).cost)
        assert one.local_extra == pytest.approx(min(costs) - told.cost, abs=1e-12 * told.cost)
        assert one.local_extra >= one.extra * (1 - 1e-6)


def test_what_its_neighbours_cannot_take_is_impossible_locally_and_says_where(solution):
    """A view that takes partial sums has none to take where the sum before it is whole."""
    partial = planned(pins={"t_7": "R,P"})
    edges = [edge.name.split(" -> ") for edge in explain(*model(), partial, "t_7", most=0).edges]
    (source,) = (source for source, reader in edges if reader == "t_7")
    assert partial.layouts["t_7"].inputs == partial.layouts[source].outputs == ("R,P",)
    found = {one.label: one for one in explain(*model(), partial, source, most=99).alternatives}
    assert found["R,R"].local_reason == f"there is no route from R,R to R,P on {source} -> t_7" and math.isinf(found["R,R"].local_extra)
    assert math.isinf(found["R,R"].cost) and found["R,R"].reason  # for t_7 is pinned, globally too
    free = explain(*model(), solution, source, most=0, why_not="R,R").why_not
    assert math.isfinite(free.cost) and not free.reason  # where it isn't, there is a plan


def test_floors_are_below_what_is_found(opened, told):
    node = opened.formulated.graph.index[WEIGHT]
    given = [way for way in ways(opened.formulated, subject(opened.formulated, WEIGHT)) if way.label != told.layout]
    costs = {one.label: one.cost for one in told.alternatives}
    floors = {way.label: float(opened.floors[node][way.kept[node]].min()) for way in given}
    assert all(0 < floors[label] <= costs[label] * (1 + SAME) for label in costs)
    assert max(floors.values()) > 0.9 * max(costs.values())  # and near enough to decide something


# --- fewest changes


def chain(costs: list[list[float]], tables: list[list[list[float]]], **more) -> Problem:
    names = tuple(f"v{k}" for k in range(len(costs)))
    edges = tuple(Edge(k, k + 1, np.array(table)) for k, table in enumerate(tables))
    return Problem(names, tuple(np.array(c) for c in costs), edges, **more)


def test_what_differs_for_nothing_is_put_back():
    same = [[0.0, 1.0], [1.0, 0.0]]
    problem = chain([[1.0, 1.0]] * 5, [same, same, [[0.0, 0.0], [0.0, 0.0]], same])
    plan, found = (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)
    assert nearest(problem, found, plan, fixed=[0]) == (1, 1, 1, 0, 0)  # 1 and 2 follow 0: put back they would cost more
    assert nearest(problem, found, plan, fixed=[]) == plan


def test_what_is_dearer_or_does_not_fit_is_not_put_back():
    problem = chain([[1.0, 1.0], [2.0, 1.0]], [[[0.0, 0.0], [0.0, 0.0]]])
    assert nearest(problem, (1, 1), (0, 0), fixed=[0]) == (1, 1)
    usage = NodeUsage(1, 0, 1, np.array([9.0, 1.0]))
    full = chain([[1.0, 1.0], [1.0, 1.0]], [[[0.0, 0.0], [0.0, 0.0]]], usages=(usage,), usage_limit=5.0)
    assert nearest(full, (1, 1), (0, 0), fixed=[0]) == (1, 1)
    assert nearest(chain([[1.0, 1.0], [1.0, 1.0]], [[[0.0, 0.0], [0.0, 0.0]]]), (1, 1), (0, 0), fixed=[0]) == (1, 0)
