"""The numbers of a Problem against sums and lifetimes by definition, told from the layouts alone."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from autoshard.capture import capture
from autoshard.cost import collective_seconds, op_seconds, optimizer_state_bytes, optimizer_step_bytes
from autoshard.formulate import Formulation, Tables, Training, formulate, with_pins
from autoshard.formulate.records import _preferences
from autoshard.graph import Graph, Op, Ref, Result, Tensor
from autoshard.layout import all_layouts, has_partial, is_legal, local_shape, parse, replicated, text
from autoshard.mesh import Mesh
from autoshard.planning.demands import allowed_by_pins
from autoshard.planning.describe import describe, layouts_of, results_of
from autoshard.planning.options import Options
from autoshard.planning.warm_starts import random_choice
from autoshard.problem import evaluate
from autoshard.routes import Routes
from autoshard.simulate.from_solution import formulation_of_solution
from autoshard.solvers import Answer, Status, solve
from autoshard.strategies import candidates, internal_collectives
from models import gpt2, mlp
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import assert_refused

MODELS = {"mlp": (mlp.tiny, {"layers": 1}), "gpt2": (gpt2.tiny, {"layers": 1})}
CASES = [(name, training, sizes) for name in MODELS for training in (True, False) for sizes in ((2,), (2, 2))]
IDS = [f"{name}-{'training' if training else 'inference'}-{'x'.join(map(str, sizes))}" for name, training, sizes in CASES]


@cache
def graph_of(name: str, training: bool) -> Graph:
    make, sizes = MODELS[name]
    module, example_inputs = make(**sizes)
    return capture(module, example_inputs, training=training)


@cache
def formulated(name: str, training: bool, sizes: tuple[int, ...]) -> Formulation:
    graph, mesh = graph_of(name, training), Mesh.from_bandwidths(sizes)
    return formulate(graph, candidates(graph, mesh), mesh, training=Training() if training else None)


def choices(f: Formulation, count: int = 4):
    yield from (random_choice(f, seed) for seed in range(count))
    yield solve(f.problem).choice


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 3)])
def test_what_sends_no_message_is_a_split(sizes):
    mesh, tensor = Mesh.from_bandwidths(sizes), Tensor((12, 12), "float32")
    layouts, tables = all_layouts(tensor.shape, mesh), Tables(mesh)
    move = tables.move(tensor, layouts, layouts)
    for (k, source), (j, target) in product(enumerate(layouts), repeat=2):
        steps = () if source == target else tables.routes.route(tensor.shape, tensor.itemsize, source, target).steps
        silent = all(step.collective == "split" for step in steps)
        assert move.seconds_of(2, silent=True)[k, j] == (2 * move.seconds[k, j] if silent else np.inf)


def readers_of(graph: Graph) -> dict:
    """Who reads a value: (op, argument), or the number of a result."""
    found = defaultdict(list)
    for i, op in enumerate(graph.ops):
        for a, value in enumerate(op.inputs):
            found[value].append((i, a))
    for k, result in enumerate(graph.results):
        if result.value is not None:
            found[result.value].append(k)
    return found


def trained(graph: Graph) -> dict[str, int]:
    return {r.name: r.value[0] for r in graph.results if r.kind == "gradient" and r.value is not None}


def bytes_of(tensor: Tensor, written: str, mesh: Mesh) -> int:
    return int(np.prod(local_shape(tensor.shape, parse(written), mesh))) * tensor.itemsize


# -- cost --------------------------------------------------------------------------------------------------------------------------


def cost_by_definition(graph: Graph, layouts: dict, results: dict, mesh: Mesh) -> float:
    """Each op on its local shapes, each tensor's way from its producer, through its hub, to each reader."""
    routes, seconds = Routes(mesh), []
    for i, op in enumerate(graph.ops):
        placed = layouts[op.name]
        if op.is_placeholder:
            if op.name in trained(graph):
                n = bytes_of(op.outputs[0], placed.outputs[0], mesh) // op.outputs[0].itemsize
                seconds.append(optimizer_step_bytes(n, op.outputs[0].itemsize, "adamw") / mesh.device.memory_rate)
            continue
        inputs = graph.input_tensors(i)
        local_in = [(local_shape(t.shape, parse(w), mesh), t.dtype) for t, w in zip(inputs, placed.inputs, strict=True)]
        local_out = [t and (local_shape(t.shape, parse(w), mesh), t.dtype) for t, w in zip(op.outputs, placed.outputs, strict=True)]
        seconds.append(op_seconds(op.target, local_in, local_out, op.alias, mesh.device))
        if "softmax" in op.target and any(p.is_shard(len(inputs[0].shape) - 1) for p in parse(placed.inputs[0])):
            # the classes, in several kernels
            passes = {"aten._softmax.default": 6, "aten._log_softmax.default": 6, "aten._log_softmax_backward_data.default": 5}[op.target]
            seconds.append(passes * 4 * int(np.prod(local_in[0][0])) / mesh.device.memory_rate)
        for collective, axis, size in internal_collectives(op, inputs, tuple(map(parse, placed.inputs)), mesh):
            seconds.append(collective_seconds(collective, mesh.axes[axis], size))
    for (i, k), readers in readers_of(graph).items():
        tensor, placed = graph.tensor((i, k)), layouts[graph.ops[i].name]
        source = placed.outputs[k]
        ways = []
        assert (placed.hubs[k] is not None) == (len(readers) > 1)
        if placed.hubs[k]:
            ways.append((source, placed.hubs[k]))
            source = placed.hubs[k]
        for reader in readers:
            if isinstance(reader, tuple):
                ways.append((source, layouts[graph.ops[reader[0]].name].inputs[reader[1]]))
            else:
                result = graph.results[reader]
                to_parameter = result.kind != "output" and result.name in graph.index
                ways.append((source, layouts[result.name].outputs[0] if to_parameter else results[f"{result.kind}:{result.name}"]))
        seconds += [routes.route(tensor.shape, tensor.itemsize, parse(a), parse(b)).seconds for a, b in ways]
    return sum(seconds)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_cost_is_the_sum_over_ops_and_ways(case):
    f = formulated(*case)
    for choice in choices(f):
        expected = cost_by_definition(f.graph, layouts_of(f, choice), results_of(f, choice), f.mesh)
        assert evaluate(f.problem, choice).cost == pytest.approx(expected, rel=1e-12)


def test_problems_stay_what_they_are():
    told = {}
    for case, name in zip(CASES, IDS):
        f = formulated(*case)
        costs = f.problem.node_costs, [edge.table for edge in f.problem.edges]
        nodes, edges = ([float(x[np.isfinite(x)].sum()) for x in some] for some in costs)
        usages = [(list(u.ends), u.start, u.end, float(u.bytes.sum())) for u in f.problem.usages]
        told[name] = {"choices": [len(x) for x in f.problem.node_costs], "nodes": nodes, "edges": edges, "usages": usages}
    assert_stays("rooms/problems.json", told)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_plan_is_read_back_with_its_cost_and_peak(case):
    f, unread = formulated(*case), 0
    for choice in choices(f):
        judged = evaluate(f.problem, choice)
        answer = Answer(Status.FEASIBLE, tuple(choice), judged.cost, 0.0, "auto", peak=judged.peak)
        solution = describe(f, answer, Options(training=case[1]), {}, {})
        small, placed = formulation_of_solution(f.graph, solution)
        again = evaluate(small.problem, placed)
        assert (again.cost, again.peak) == pytest.approx((judged.cost, judged.peak), rel=1e-12)
        for (i, k), readers in readers_of(f.graph).items():
            hub, ops = solution.layouts[f.graph.ops[i].name].hubs[k], [reader for reader in readers if isinstance(reader, tuple)]
            unread += hub is not None and all(solution.layouts[f.graph.ops[r].name].inputs[a] != hub for r, a in ops)
    assert unread  # hubs in a layout in which no reader has them, fewer bytes perhaps


def test_a_value_in_a_layout_that_it_cannot_have_is_refused():
    f = formulated("mlp", True, (2,))
    choice = random_choice(f, 0)
    solution = describe(f, Answer(Status.FEASIBLE, tuple(choice), 1.0, 0.0, "auto", peak=1.0), Options(training=True), {}, {})
    name, placed = next((name, placed) for name, placed in solution.layouts.items() if any(placed.hubs))
    for layout, sentence in (("S(5)", f"{name}: its layout in the plan, S.5., is none that"), ("P", "is that of none of its readers")):
        wrong = replace(placed, hubs=tuple(hub and layout for hub in placed.hubs))
        assert_refused(sentence, formulation_of_solution, f.graph, replace(solution, layouts={**solution.layouts, name: wrong}))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_edge_is_priced_as_its_route(case):
    f = formulated(*case)
    for choice in choices(f, 2):
        for edge, link in zip(f.problem.edges, f.tensor_edges, strict=True):
            route = f.route(link, choice)
            assert route.seconds == edge.table[choice[edge.a], choice[edge.b]]
            assert route.seconds == pytest.approx(sum(step.seconds for step in route.steps), rel=1e-12)


# -- memory ------------------------------------------------------------------------------------------------------------------------


class Memory:
    """Buffers by when they come and when they are last needed. A thing is a name for a buffer; several things may share one."""

    def __init__(self):
        self.bytes: list[int] = []
        self.interval: list[list[int]] = []  # first and last time

    def make(self, size: int, time: int) -> int:
        self.bytes.append(size)
        self.interval.append([time, time])
        return len(self.bytes) - 1

    def need(self, buffer: int, time: int) -> None:
        self.interval[buffer][1] = max(self.interval[buffer][1], time)

    def peak(self, end: int) -> int:
        return max(sum(b for b, (first, last) in zip(self.bytes, self.interval, strict=True) if first <= t <= last) for t in range(end + 1))


def peak_by_running(graph: Graph, layouts: dict, results: dict, mesh: Mesh) -> int:
    """Run op after op; a buffer lives until it, or a view of it, is read last. Parameters, buffers and inputs live throughout."""
    memory, end, second_names = Memory(), len(graph.ops), dict(graph.tied)
    at: dict = {}  # value -> (buffer, layout) where its readers find it

    def moved(value, written: str, time: int) -> int:
        """The buffer that holds a value in a layout: the one it is in, or a new one."""
        buffer, have = at[value]
        memory.need(buffer, time)
        return buffer if have == written else memory.make(bytes_of(graph.tensor(value), written, mesh), time)

    def to_hub(value, time: int) -> None:
        hub = layouts[graph.ops[value[0]].name].hubs[value[1]]
        if hub and value not in arrived:
            arrived.add(value)
            at[value] = (moved(value, hub, time), hub)

    arrived: set = set()
    for i, op in enumerate(graph.ops):
        placed = layouts[op.name]
        if op.is_placeholder:
            size = 0 if op.name in second_names else bytes_of(op.outputs[0], placed.outputs[0], mesh)
            at[i, 0] = (memory.make(size, 0), placed.outputs[0])
            memory.need(at[i, 0][0], end)
            continue
        inputs = []
        for value, written in zip(op.inputs, placed.inputs, strict=True):
            to_hub(value, i)
            inputs.append(moved(value, written, i))
            memory.need(inputs[-1], i)
        for k, tensor in enumerate(op.outputs):
            if tensor is not None:
                buffer = inputs[op.alias] if op.alias is not None else memory.make(bytes_of(tensor, placed.outputs[k], mesh), i)
                memory.need(buffer, i)
                at[i, k] = (buffer, placed.outputs[k])
    for name, ready in trained(graph).items():
        tensor, written = graph.tensor((graph.index[name], 0)), layouts[name].outputs[0]
        local = bytes_of(tensor, written, mesh)
        memory.need(memory.make(local, ready + 1), end)  # the gradient
        memory.need(memory.make(optimizer_state_bytes(local // tensor.itemsize, "adamw"), 0), end)
    for result in graph.results:
        if result.value is not None and result.kind == "output":
            to_hub(result.value, end)
            moved(result.value, results[f"output:{result.name}"], end)
    return memory.peak(end)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_peak_is_never_below_that_of_a_run(case):
    """Above it where buffers of moves count; tests/test_memory.py compares with the bytes that the program itself takes."""
    f = formulated(*case)
    for choice in choices(f, 6):
        expected = peak_by_running(f.graph, layouts_of(f, choice), results_of(f, choice), f.mesh)
        assert expected <= evaluate(f.problem, choice).peak <= 2 * expected


def test_the_peak_without_moves_is_exactly_that_of_a_run():
    for case in CASES:
        f = formulated(*case)
        whole = replicated(len(f.mesh.axes))
        choice = [next(j for j, c in enumerate(cs) if all(x == whole for x in (*c.inputs, *c.outputs) if x)) for cs in f.candidates.of]
        choice += [layouts.index(whole) for layouts in f.hub_layouts.values()]
        choice += [f.result_layouts[k].index(whole) for k, node in f.results.items() if node >= len(choice)]
        assert evaluate(f.problem, choice).peak == peak_by_running(f.graph, layouts_of(f, choice), results_of(f, choice), f.mesh)


def small(*ops: Op, results: tuple[Result, ...], tied=()) -> Formulation:
    graph, mesh = Graph(ops, results, tied), Mesh.from_bandwidths((2,))
    training = Training() if any(r.kind == "gradient" for r in results) else None
    return formulate(graph, candidates(graph, mesh), mesh, training=training)


MATRIX = Tensor((8, 8), "float32")  # 256 bytes
X = Op("x", "input", (), ((), ()), (MATRIX,), "input")
W = Op("w", "parameter", (), ((), ()), (MATRIX,), "parameter")


def unary(name: str, target: str, source, *, alias=None, args=()) -> Op:
    return Op(name, f"aten.{target}.default", (source,), ((Ref(0), *args), ()), (MATRIX,), alias=alias)


def usages(f: Formulation, name: str) -> list[tuple]:
    """(start, end, largest bytes) of what belongs to a node, and to the edges that lead to it."""
    node = f.problem.names.index(name)
    own = [(u.start, u.end, u.bytes.max()) for u in f.problem.usages if u.ends == (node,)]
    edges = [u for u in f.problem.usages if u.edge is not None and u.ends[1] == node]
    return [*own, *(("edge", u.start, u.end, u.bytes.max()) for u in edges)]


def test_a_chain_holds_each_tensor_until_its_reader_ran():
    f = small(X, unary("a", "exp", (0, 0)), unary("b", "exp", (1, 0)), unary("c", "exp", (2, 0)), results=(Result("output", "0", (3, 0)),))
    assert usages(f, "x") == [(0, 5, 256)]  # inputs live throughout
    assert usages(f, "a") == [(1, 3, 256), ("edge", 1, 2, 256)]  # until b has run; the copy of x while a runs
    assert usages(f, "c") == [(3, 5, 256), ("edge", 3, 4, 256)]  # returned
    assert usages(f, "output:0") == [("edge", 4, 5, 256)]


def test_a_hub_takes_over_what_several_read():
    f = small(
        X, unary("a", "exp", (0, 0)), unary("b", "exp", (1, 0)), unary("c", "exp", (1, 0)), unary("d", "exp", (3, 0)),
        results=(Result("output", "0", (4, 0)), Result("output", "1", (2, 0))),
    )  # fmt: skip
    assert usages(f, "a") == [(1, 2, 256), ("edge", 1, 2, 256)]  # until the hub has it
    assert usages(f, "a.0 (hub)") == [(2, 4, 256), ("edge", 2, 3, 256 + 128)]  # first reader to last; moved, with an all_to_all's buffer


def test_a_hub_of_a_parameter_is_a_copy_that_lives_as_long_as_it_is_read():
    f = small(W, unary("a", "exp", (0, 0)), unary("b", "exp", (1, 0)), unary("c", "exp", (0, 0)), results=(Result("output", "0", (3, 0)),))
    assert usages(f, "w") == [(0, 5, 256)]
    assert usages(f, "w.0 (hub)")[:1] == [("edge", 1, 4, 256)]  # nothing where its layout is the parameter's
    assert usages(f, "w.0 (hub)")[1:] == [("edge", 1, 2, 256)]  # the buffers of the dearest route, while the copy is made
    edge = next(u for u in f.problem.usages if u.edge is not None and f.problem.names[u.ends[1]] == "w.0 (hub)")
    gives, takes = f.candidates.of[0], f.hub_layouts[0, 0]
    for i, c in enumerate(gives):
        for j, layout in enumerate(takes):
            held = bytes_of(MATRIX, text(layout), f.mesh)
            assert edge.bytes[i, j] == (0 if c.outputs[0] == layout else held)


def test_a_view_holds_nothing_and_keeps_its_base():
    f = small(
        X, unary("a", "exp", (0, 0)), unary("t", "t", (1, 0), alias=0), unary("b", "exp", (0, 0)), unary("c", "exp", (2, 0)),
        results=(Result("output", "0", (4, 0)), Result("output", "1", (3, 0))),
    )  # fmt: skip
    assert usages(f, "a") == [(1, 3, 256), ("edge", 1, 2, 256)]  # until t has read it: moved for t or not,
    assert usages(f, "t")[:2] == [(3, 5, 256), ("edge", 2, 3, 256)]  # t's layout of it then counts, until c has read the view


def test_a_view_takes_over_when_the_other_readers_are_done():
    f = small(
        X, unary("a", "exp", (0, 0)), unary("t", "t", (1, 0), alias=0), unary("b", "exp", (1, 0)), unary("c", "exp", (2, 0)),
        unary("d", "exp", (4, 0)), results=(Result("output", "0", (5, 0)), Result("output", "1", (3, 0))),
    )  # fmt: skip
    hub = [entry for entry in usages(f, "a.0 (hub)") if entry[0] != "edge"]
    assert hub == [(2, 4, 256)]  # b is the last to read a itself
    assert usages(f, "t")[:2] == [(4, 5, 256), ("edge", 2, 4, 256)]  # a copy beside it before, alone from then on


def test_a_slice_keeps_the_whole_of_what_it_is_cut_from():
    part = Op("t", "aten.select.int", ((1, 0),), ((Ref(0), 0, 0), ()), (Tensor((8,), "float32"),), alias=0)
    row = Op("c", "aten.exp.default", ((2, 0),), ((Ref(0),), ()), (Tensor((8,), "float32"),))
    last = Op("d", "aten.exp.default", ((3, 0),), ((Ref(0),), ()), (Tensor((8,), "float32"),))
    f = small(X, unary("a", "exp", (0, 0)), part, row, last, results=(Result("output", "0", (4, 0)),))
    assert usages(f, "t")[0] == (3, 4, 256)  # not the 32 bytes of its own


def test_a_gradient_is_held_from_its_making_to_the_end_in_the_parameters_layout():
    results = (Result("gradient", "w", (2, 0)), Result("output", "0", (3, 0)))
    f = small(X, W, unary("g", "exp", (0, 0)), unary("h", "exp", (0, 0)), results=results)
    node = f.problem.names.index("w")
    held = [(kind, u) for kind, u in zip(f.held, f.problem.usages, strict=True) if u.ends == (node,)]
    own = {kind: (u.start, u.end, u.bytes.max()) for kind, u in held}
    assert own == {"gradients": (3, 5, 256), "optimizer_state": (0, 5, 2 * 256), "parameters": (0, 5, 256)}
    link = next(link for link in f.tensor_edges if link.value == (2, 0))
    assert link.b == 1  # the edge leads to the parameter itself


def test_a_second_name_of_a_parameter_costs_nothing():
    second = replace(W, name="head")
    ops = (X, W, second, unary("g", "exp", (1, 0)))
    results = (Result("gradient", "w", (3, 0)), Result("gradient", "head", None), Result("output", "0", (3, 0)))
    tied, alone = small(*ops, results=results, tied=(("head", "w"),)), small(*ops, results=results)
    assert usages(tied, "head") == [] and usages(alone, "head") != []
    assert not tied.problem.node_costs[2].any()
    best = solve(tied.problem).choice
    for other in range(len(tied.problem.node_costs[2])):
        layouts = layouts_of(tied, (*best[:2], other, *best[3:]))
        assert layouts["head"] == layouts["w"] == layouts_of(tied, best)["w"] and [*layouts] == ["x", "w", "head", "g"]
    ops, results = (X, W, unary("g", "exp", (1, 0))), (Result("output", "0", (2, 0)),)
    unread = small(*ops, results=results, tied=(("head", "w"),))  # the second name is of a module that does not run
    assert [*layouts_of(unread, solve(unread.problem).choice)] == ["x", "w", "g"]


# -- what can be chosen ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_partial_never_comes_from_what_is_not_partial(case):
    f = formulated(*case)
    for edge, link in zip(f.problem.edges, f.tensor_edges, strict=True):
        for i, source in enumerate(link.source_layouts):
            for j, target in enumerate(link.target_layouts):
                grows = any(t.is_partial() and not s.is_partial() for s, t in zip(source, target, strict=True))
                possible = np.isfinite(edge.table[i, j])
                assert not (grows and possible)
                assert possible or has_partial(target), (text(source), text(target))  # else there is always a way


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_nodes_are_the_ops_a_hub_per_value_with_several_readers_and_the_outputs(case):
    f = formulated(*case)
    readers = readers_of(f.graph)
    hubs = {value for value, who in readers.items() if len(who) > 1}
    outputs = sum(r.kind == "output" for r in f.graph.results)
    assert set(f.hubs) == hubs
    assert len(f.problem.node_costs) == len(f.graph.ops) + len(hubs) + outputs
    assert len(f.problem.edges) == sum(map(len, readers.values())) + len(hubs)
    for k, result in enumerate(f.graph.results):
        if result.kind == "gradient" and result.value is not None:
            assert f.results[k] == f.graph.index[result.name]
    assert not any(has_partial(layout) for layouts in f.result_layouts.values() for layout in layouts)
    for link in f.tensor_edges:
        assert all(is_legal(link.tensor.shape, layout, f.mesh) for layout in (*link.source_layouts, *link.target_layouts))


def test_equal_tables_are_one_array():
    f = formulated("gpt2", True, (2, 2))
    assert len({id(e.table) for e in f.problem.edges}) < 0.7 * len(f.problem.edges)  # one layer; more layers share more


SCHEMES = {"data parallel": {"input": "S(0)", "parameter": "R"}, "fsdp": {"input": "S(0)", "parameter": "S(0)"}}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_data_parallel_and_fsdp_are_points_of_the_space(name, scheme):
    f = formulated(name, True, (2,))
    pins = {op.name: SCHEMES[scheme][op.kind] for op in f.graph.ops if op.kind in ("parameter", "input")}
    problem = with_pins(f, allowed_by_pins(f, Options(pins=pins)))
    answer = solve(problem)
    found = layouts_of(f, answer.choice)
    assert np.isfinite(answer.cost)
    assert {n: found[n].outputs[0] for n in pins} == pins
    results = results_of(f, answer.choice)
    assert all(results[f"gradient:{n}"] == pins[n] for n in f.graph.parameters)  # ZeRO: the gradient ends where the parameter lies


def test_pins_forbid_the_other_choices_and_keep_the_numbers():
    f = formulated("mlp", True, (2,))
    name = next(iter(f.graph.parameters))
    node = f.graph.index[name]
    pinned = with_pins(f, allowed_by_pins(f, Options(pins={name: "S(1)"})))
    kept = [c.outputs[0] == parse("S(1)") for c in f.candidates.of[node]]
    assert np.isfinite(pinned.node_costs[node]).tolist() == kept
    assert all(a is b for k, (a, b) in enumerate(zip(pinned.node_costs, f.problem.node_costs, strict=True)) if k != node)


def test_the_optimizer_is_priced_on_trained_parameters_only():
    training, inference = formulated("mlp", True, (2,)), formulated("mlp", False, (2,))
    for f, priced in ((training, True), (inference, False)):
        assert all((f.problem.node_costs[i] > 0).all() == priced for i in f.graph.parameters.values())
        assert not any(f.problem.node_costs[i].any() for i, op in enumerate(f.graph.ops) if op.kind in ("input", "buffer", "tangent"))


def test_among_equal_costs_lower_dims_come_before_higher_ones_replicated_and_partial():
    along = [parse(f"{one},{other}") for one in ("S(0)", "S(1)", "S(2)", "R", "P(sum)") for other in ("S(0)", "R")]
    values = _preferences([*along, None])
    assert (np.diff(values[:10:2]) > 0).all() and (np.diff(values[1:10:2]) > 0).all() and values[-1] == 0
    first, second = _preferences([parse("S(0),R"), parse("R,S(0)")])
    assert first < second < 1.01 * first  # the earlier axis counts a little more
