"""Steps of several microbatches: the formulation against brute force over all plans of a layer, and what plans and files say of them."""

import json
import random
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from autoshard.api import autosharding_pass, load, plan, verify
from autoshard.cost import accumulation_bytes, op_seconds, optimizer_step_bytes
from autoshard.formulate import Training, formulate
from autoshard.graph import ACCUMULATED, KEPT, Graph, Op, Ref, Result, Tensor, with_microbatches
from autoshard.layout import local_shape, parse
from autoshard.mesh import Mesh
from autoshard.pipeline.microbatches import batch_of, microbatch
from autoshard.problem import evaluate
from autoshard.routes import Routes, buffer_table
from autoshard.simulate.from_solution import formulation_of_solution
from autoshard.solution import replay
from autoshard.solvers import solve
from autoshard.strategies import candidates
from tests.helpers import TINY, tiny_graph
from tests.helpers_refusals import assert_refused

R, S0, S1, P = (parse(text) for text in ("R", "S(0)", "S(1)", "P"))
MATMUL = ((R, R, R), (S0, R, S0), (R, S1, S1), (S1, S0, P))  # a, b, a b
UNARY = ((R, R), (S0, S1), (S1, S0))  # x, its transpose
STORED = (R, S0, S1)


def layer(b: int, i: int, o: int) -> Graph:
    """y = x w and the gradient of w from that of y: the smallest training step."""
    mm, t = ((Ref(0), Ref(1)), ()), ((Ref(0),), ())
    x, w, y = (Tensor(shape, "float32") for shape in ((b, i), (i, o), (b, o)))
    ops = [Op(n, k, (), ((), ()), (v,), k) for n, k, v in (("x", "input", x), ("w", "parameter", w), ("dy", "tangent", y))]
    ops += [Op("y", "aten.mm.default", ((0, 0), (1, 0)), mm, (y,))]
    ops += [Op("xt", "aten.t.default", ((0, 0),), t, (Tensor((i, b), "float32"),), alias=0, backward=True)]
    ops += [Op("gw", "aten.mm.default", ((4, 0), (2, 0)), mm, (w,), backward=True)]
    return Graph(tuple(ops), (Result("output", "0", (3, 0)), Result("gradient", "w", (5, 0))))


class Reference:
    """Seconds and peak bytes of every plan of `layer` on one mesh axis, by definition. Plans are the columns of `at`."""

    nodes = ("x", "w", "dy", "hub", "kept", "y", "out", "xt", "gw", "sum")

    def __init__(self, b: int, i: int, o: int, mesh: Mesh, m: int):
        self.mesh, self.routes = mesh, Routes(mesh)
        X, W, Y, XT = (b, i), (i, o), (b, o), (i, b)
        sizes = [len(MATMUL) if n in ("y", "gw") else 4 if n == "sum" else 3 for n in self.nodes]
        self.at = dict(zip(self.nodes, np.indices(sizes).reshape(len(sizes), -1), strict=True))
        mm_a, mm_b, mm_out = zip(*MATMUL, strict=True)
        t_in, t_out = zip(*UNARY, strict=True)
        sums = (R, S0, S1, P)
        routes = [  # shape, from, its layouts, to, its layouts, times, when the copy is held, when its buffers are, what they fit in
            (X, "x", STORED, "hub", STORED, m, (4, 7), 4), (W, "w", STORED, "kept", STORED, 1, (0, 8), 3),
            (X, "hub", STORED, "y", mm_a, m, (4, 5), 4), (W, "kept", STORED, "y", mm_b, m, (4, 5), 4),
            (X, "hub", STORED, "xt", t_in, m, (5, 7), 5), (XT, "xt", t_out, "gw", mm_a, m, (6, 7), 6),
            (Y, "dy", STORED, "gw", mm_b, m, (6, 7), 6), (Y, "y", mm_out, "out", STORED, m, (8, 10), None),
            (W, "gw", mm_out, "sum", sums, m, (7, 8), 7), (W, "sum", sums, "w", STORED, 1, (8, 9), 8),
        ]  # fmt: skip
        held = [("x", X, STORED, 4, 0, 10), ("w", W, STORED, 4 + 8, 0, 10), ("dy", Y, STORED, 4, 0, 10), ("sum", W, sums, 4, 0, 9)]
        held += [("y", Y, mm_out, 4, 4, 9), ("gw", W, mm_out, 4, 6, 8), ("w", W, STORED, 4, 9, 10)]
        self.bytes = np.zeros((10, len(self.at["x"])))
        self.seconds = m * (self._matmul(X, W, Y)[self.at["y"]] + self._matmul(XT, Y, W)[self.at["gw"]])
        rate = mesh.device.memory_rate
        self.seconds += np.array([optimizer_step_bytes(n, 4, "adamw") / rate for n in self._numel(W, STORED)])[self.at["w"]]
        self.seconds += m * np.array([accumulation_bytes(n, 4, 4) / rate for n in self._numel(W, sums)])[self.at["sum"]]
        for name, shape, layouts, itemsize, begin, end in held:
            self.bytes[begin:end] += itemsize * self._numel(shape, layouts)[self.at[name]]
        for shape, a, from_layouts, b_, to_layouts, times, (begin, end), when in routes:
            pair = self.at[a], self.at[b_]
            self.seconds += times * self.routes.table(shape, 4, from_layouts, to_layouts)[pair]
            differ = np.array([[p != q for q in to_layouts] for p in from_layouts])
            copy = np.where(differ, 4 * self._numel(shape, to_layouts)[None, :], 0)
            self.bytes[begin:end] += copy[pair]
            if when is not None:
                buffers = np.maximum(buffer_table(self.routes, shape, 4, from_layouts, to_layouts) - copy, 0)
                written = {"y": 4 * self._numel(Y, mm_out), "gw": 4 * self._numel(W, mm_out)}.get(b_, np.zeros(len(to_layouts)))
                self.bytes[when] += np.maximum(buffers - written[None, :], 0)[pair]
        self.peak = self.bytes.max(axis=0)

    def _numel(self, shape, layouts):
        return np.array([np.prod(local_shape(shape, layout, self.mesh)) for layout in layouts], dtype=float)

    def _matmul(self, a, b, y):
        shapes = [[(local_shape(s, layout, self.mesh), "float32") for s, layout in zip((a, b, y), row, strict=True)] for row in MATMUL]
        return np.array([op_seconds("aten.mm.default", row[:2], row[2:], None, self.mesh.device) for row in shapes])


@cache
def case(seed: int):
    """A random layer, link and number of microbatches: its formulation, the reference, and each plan as a choice of the formulation."""
    draw = random.Random(seed)
    b, i, o = (draw.choice((4, 16, 64)) * 4 for _ in range(3))
    m, n = draw.choice((2, 4, 8)), draw.choice((2, 4))
    link = {"intra_node_bandwidth": draw.choice((1e9, 1e11)), "inter_node_bandwidth": 1e11, "intra_node_latency": draw.choice((1e-9, 1e-6))}
    mesh = Mesh.from_bandwidths((n,), **link, device="a100")
    graph = with_microbatches(layer(b, i, o))
    formulated = formulate(graph, candidates(graph, mesh), mesh, training=Training("adamw", microbatches=m))
    return formulated, Reference(b, i, o, mesh, m)


def choices(formulated, reference, plans):
    """These plans of the reference as choices of the formulation."""
    graph, of = formulated.graph, formulated.candidates.of

    def op(name, rows):
        index = graph.index[name]
        known = [(*c.inputs, *c.outputs) for c in of[index]]
        return index, [known.index(row) for row in rows]

    nodes = {n: op(n, [(layout,) for layout in STORED]) for n in ("x", "w", "dy")}
    nodes |= {"kept": op(f"w.{KEPT}", [(p, p) for p in STORED]), "sum": op(f"w.{ACCUMULATED}", [(p, p) for p in (R, S0, S1, P)])}
    nodes |= {n: op(n, MATMUL) for n in ("y", "gw")} | {"xt": op("xt", UNARY)}
    nodes["hub"] = formulated.hubs[0, 0], [list(formulated.hub_layouts[0, 0]).index(layout) for layout in STORED]
    nodes["out"] = formulated.results[0], [list(formulated.result_layouts[0]).index(layout) for layout in STORED]
    for plan_ in plans:
        choice = [0] * len(formulated.problem.node_costs)
        for name, (node, numbers) in nodes.items():
            choice[node] = numbers[reference.at[name][plan_]]
        yield tuple(choice)


SEEDS = pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])

@SEEDS
def test_every_plan_has_the_seconds_and_bytes_of_the_reference(seed):
    formulated, reference = case(seed)
    finite = np.flatnonzero(np.isfinite(reference.seconds))
    drawn = random.Random(seed).sample(list(finite), 300)
    for k, choice in zip(drawn, choices(formulated, reference, drawn), strict=True):
        evaluation = evaluate(formulated.problem, choice)
        assert evaluation.cost == pytest.approx(reference.seconds[k], rel=1e-12)
        assert evaluation.peak == pytest.approx(reference.peak[k], rel=1e-12)


@SEEDS
def test_the_optimum_is_that_of_brute_force_with_and_without_a_memory_limit(seed):
    formulated, reference = case(seed)
    assert solve(formulated.problem).cost == pytest.approx(reference.seconds.min(), rel=1e-9)
    fits = reference.peak[np.isfinite(reference.seconds)]
    for share in (0.0, 0.02, 0.2, 0.5):
        limit = fits.min() + share * (fits.max() - fits.min())
        best = reference.seconds[reference.peak <= limit].min()
        assert solve(replace(formulated.problem, usage_limit=limit)).cost == pytest.approx(best, rel=1e-9), share


@pytest.mark.parametrize("scheme", ("data_parallel", "zero1", "zero2", "zero3"))
def test_the_schemes_are_among_the_plans(scheme):
    """x, dy and both matmuls sharded over the batch; w, its copy and its sum as the scheme says."""
    w, kept, total = {"data_parallel": (R, R, P), "zero1": (S0, R, P), "zero2": (S0, R, S0), "zero3": (S0, S0, S0)}[scheme]
    formulated, reference = case(0)
    at, sums = reference.at, (R, S0, S1, P)
    batch = (at["x"] == 1) & (at["dy"] == 1) & (at["hub"] == 1) & (at["y"] == 1) & (at["out"] == 1) & (at["xt"] == 1) & (at["gw"] == 3)
    (k,) = np.flatnonzero(
        batch & (at["w"] == STORED.index(w)) & (at["kept"] == STORED.index(kept)) & (at["sum"] == sums.index(total))
    )  # fmt: skip
    (choice,) = choices(formulated, reference, [k])
    assert evaluate(formulated.problem, choice).cost == pytest.approx(reference.seconds[k], rel=1e-12)


def test_the_control_a_forgotten_multiplicity_is_seen():
    formulated, reference = case(0)
    once = formulate(formulated.graph, formulated.candidates, formulated.mesh, training=Training("adamw"))
    assert solve(once.problem).cost != pytest.approx(reference.seconds.min(), rel=1e-3)


# -- plans, files ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("mlp", pytest.param("gpt2", marks=pytest.mark.slow)))
def test_a_plan_with_microbatches_computes_what_the_model_does_and_its_file_says_so(name, tmp_path):
    model, inputs = TINY[name]()
    solution = plan(model, inputs, Mesh.from_bandwidths((2, 2), intra_node_bandwidth=1e12, inter_node_bandwidth=1e12), training=True,
                    microbatches=4, baselines=False, objective="serial")  # fmt: skip
    solution.save(tmp_path / "plan.json")
    loaded = load(tmp_path / "plan.json")
    assert loaded == solution and loaded.microbatches == 4
    assert verify(model, inputs, loaded, random=1)["ok"]
    graph = replay(loaded, tiny_graph(name, True)).checked()
    formulated, choice = formulation_of_solution(graph, loaded)
    evaluation = evaluate(formulated.problem, choice)
    assert (evaluation.cost, evaluation.peak) == pytest.approx((loaded.cost, loaded.peak_bytes), rel=1e-9)
    spent = [sum(seconds for seconds in loaded.breakdown[kind].values()) for kind in ("compute", "communication")]
    assert sum(spent) == pytest.approx(loaded.cost, rel=1e-9)


def test_a_plan_of_one_microbatch_says_nothing_of_them():
    solution = plan(*TINY["mlp"](), Mesh.from_bandwidths((2,)), training=True, baselines=False, objective="serial")
    assert solution.microbatches == 1
    assert "microbatch" not in json.dumps(solution.to_dict())


def test_a_microbatch_is_the_first_part_of_every_tensor_of_the_batch():
    scalar, rows, others = torch.tensor(3.0), torch.arange(24).reshape(12, 2), torch.zeros(5)
    inputs = {"a": (scalar, rows), "b": [others, "name", rows[:, 0]]}
    assert batch_of(inputs) == 12 and microbatch(inputs, 1) is inputs
    for count, data, size in ((4, 1, 3), (2, 3, 6), (1, 12, 12), (12, 1, 1)):
        part = microbatch(inputs, count, data)
        assert part["a"][0] is scalar and part["b"][0] is others and part["b"][1] == "name"
        assert part["a"][1].tolist() == rows[:size].tolist() and part["b"][2].tolist() == rows[:size, 0].tolist()
    for count, data, said in (
        (5, 1, "a batch of 12 has no 5 equal microbatches; take one of 1, 2, 3, 4, 6, 12, or another batch"),
        (3, 2, None), (2, 4, "has no 2 equal microbatches for 4 data-parallel ranks; take one of 1, 3, or another batch"),
        (1, 5, "a batch of 12 has no equal parts for 5 data-parallel ranks; take another batch"),
    ):  # fmt: skip
        assert_refused(said, microbatch, inputs, count, data) if said else microbatch(inputs, count, data)
    with pytest.raises(ValueError, match="one of 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 18, or"):
        microbatch(torch.zeros(360), 7)
    assert_refused("hold no tensor with a dim", batch_of, (scalar, 1))


def test_the_examples_of_a_step_give_the_number_of_microbatches():
    model, inputs = TINY["mlp"](batch=16)
    mesh = Mesh.from_bandwidths((2,))
    assert plan(model, inputs, mesh, training=True, global_batch=64, baselines=False, objective="serial").microbatches == 4
    for options, sentence in (
        ({"global_batch": 24}, "global_batch is 24, the example inputs' batch is 16; expected a multiple"),
        ({"global_batch": 64, "microbatches": 3}, "global_batch 64 is 4 batches of 16, not 3"),
        ({"microbatches": 0}, "microbatches is 0; expected a whole number"),
        ({"global_batch": 1.5}, "global_batch is 1.5; expected a whole number"),
        ({"accumulation_dtype": "int8"}, "accumulation_dtype is 'int8'"),
        ({"microbatches": 2, "training": False}, "microbatches is 2, which has no effect on a forward pass"),
    ):
        assert_refused(sentence, plan, model, inputs, mesh, **{"training": True, "baselines": False, **options})


def test_sums_have_the_dtype_asked_for():
    model, inputs = TINY["mlp"](dtype="bfloat16")
    mesh = Mesh.from_bandwidths((2,))
    plans = [
        plan(model, inputs, mesh, training=True, microbatches=2, accumulation_dtype=dtype, baselines=False, objective="serial")
        for dtype in (None, "float32")
    ]
    formulations = [formulation_of_solution(replay(p, _graph(model, inputs)).checked(), p)[0] for p in plans]
    dtypes = [{op.output.dtype for op in f.graph.ops if op.kind == ACCUMULATED} for f in formulations]
    assert dtypes == [{"bfloat16"}, {"float32"}]
    assert plans[1].cost > plans[0].cost and plans[1].peak_bytes > plans[0].peak_bytes
    assert verify(model, inputs, plans[1])["ok"]


def _graph(model, inputs):
    from autoshard.capture import capture

    return capture(model, inputs, training=True)


def test_pins_name_copies_and_sums():
    model, inputs = TINY["mlp"]()
    solution = plan(model, inputs, Mesh.from_bandwidths((4,)), training=True, microbatches=4, baselines=False,
                    pins={"*.weight": "S(0)", f"*.weight.{KEPT}": "R", f"*.weight.{ACCUMULATED}": "S(0)"}, objective="serial")  # fmt: skip
    weights = {name for name in solution.parameters if name.endswith("weight")}
    for name in weights:
        layouts = [solution.layouts[end].outputs[0] for end in (name, f"{name}.{KEPT}", f"{name}.{ACCUMULATED}")]
        assert layouts == ["S(0)", "R", "S(0)"]


def test_copies_and_sums_belong_to_the_module_of_their_parameter():
    added = [op for op in with_microbatches(tiny_graph("mlp", True)).ops if op.kind in (KEPT, ACCUMULATED)]
    modules = [f"layers.{k}.{part}" for k in (0, 1) for part in ("up", "down")]
    assert {(op.kind, op.module) for op in added} == set(product((KEPT, ACCUMULATED), modules))


def test_the_pass_plans_microbatches_and_reads_its_file_again(tmp_path):
    model, inputs = TINY["mlp"]()
    options = {"mesh_shape": (2, 2), "example_inputs": inputs, "training": True, "ilp_solution_file": str(tmp_path / "plan.json")}
    _, info = autosharding_pass(model, algo="zero2", microbatches=4, run_checks=True, **options)
    _, again = autosharding_pass(model, preload_solution=True, microbatches=4, **options)
    assert again["solution"].microbatches == 4 and again["cost_seconds"] == info["cost_seconds"]
