"""Whole tiny models in random layouts, and wrong layouts that must be found at the op that has them."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

import autoshard
from autoshard.capture import capture
from autoshard.graph import Const, Graph, Op, Ref, Result, Tensor
from autoshard.layout import parse
from autoshard.lower import lower, plant_fault, run_global, verify_program
from autoshard.lower.program import FreeTensors, LoadPlaceholder, Redistribute, ReturnResult, RunOp
from autoshard.lower.run import SimulatedRanks, check
from autoshard.lower.verify import NOISE, relative_error
from autoshard.routes import Routes
from autoshard.solution import Placed
from autoshard.strategies import candidates
from models import dlrm
from tests.helpers import tiny_graph
from tests.helpers_kept import assert_stays
from tests.helpers_local_tensor import run_local_tensor
from tests.helpers_lower import bytes_sent, laid, mesh_of, one_op, random_layouts, run_simulated, values_of, with_placed
from tests.helpers_refusals import assert_refused

MODELS = ("mlp", "gpt2", "llama", "bert")


@cache
def setting(name, training, sizes):
    """Everything about a model on a mesh that does not depend on the layouts."""
    graph, mesh = tiny_graph(name, training), mesh_of(*sizes)
    return graph, mesh, candidates(graph, mesh), Routes(mesh), values_of(graph, words=2 if name == "bert" else 100)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (8,), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_layouts_compute_the_same(seed, name, sizes, training):
    graph, mesh, possible, routes, values = setting(name, training, sizes)
    layouts, results = random_layouts(graph, mesh, seed, possible)
    found = verify_program(graph, layouts, results, mesh, values, run_global(graph, values), routes=routes)
    assert found.ok and not found.placement_mismatches, found
    assert found.ranks == mesh.num_devices and found.redistributes > 0
    assert found.max_relative_error_outputs < 1e-6
    assert (found.max_relative_error_gradients > 0) == training


@pytest.mark.parametrize("name", ["mlp", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert"))])
def test_every_planted_fault_is_found_where_it_is(name):
    for sizes in ((2, 2), (8,)):
        graph, mesh, possible, routes, values = setting(name, True, sizes)
        for seed in range(3):
            layouts, results = random_layouts(graph, mesh, seed, possible)
            lied = plant_fault(layouts, graph, mesh, seed)
            assert lied == plant_fault(layouts, graph, mesh, seed)
            (culprit,) = [op for op in layouts if layouts[op] != lied[op]]
            found = verify_program(graph, lied, results, mesh, values, routes=routes)
            assert not found.ok
            assert [m.op for m in found.placement_mismatches] == [culprit]


def test_no_fault_fits_one_device():
    graph, values = one_op("aten.relu.default", torch.ones(4))
    assert_refused("needs two devices", plant_fault, laid(graph, ["R"], ["R"]), graph, mesh_of(1), 0)


FOLLOW = {  # ops whose local result has any shape that their output's layout says
    "aten.empty.memory_format": ([4, 4],), "aten.bernoulli.default": (torch.ones(4, 4),),
    "aten.new_zeros.default": (torch.ones(4, 4), [4, 4]),
}  # fmt: skip


@pytest.mark.parametrize("target", FOLLOW)
def test_no_fault_is_planted_in_what_follows_its_layout(target):
    graph, values = one_op(target, *FOLLOW[target])
    assert_refused("can be wrong on a mesh", plant_fault, laid(graph, ["R"] * len(values), ["R"]), graph, mesh_of(2), 0)


# -- wrong rows by hand: (target, arguments, taken, claimed, the layout that is there) --------------------------------------------

X, Y = torch.arange(16.0).reshape(4, 4), torch.eye(4) + 1
WRONG = {
    "a sum taken for the whole": ("aten.mm.default", (X, Y), ["S(1)", "S(0)"], "R", "P"),
    "a whole taken for a sum": ("aten.mm.default", (X, Y), ["R", "R"], "P", "R"),
    "a whole taken for a part": ("aten.mm.default", (X, Y), ["R", "R"], "S(0)", "R"),
    "the other dim": ("aten.mm.default", (X, Y), ["S(0)", "R"], "S(1)", "S(0)"),
    "a square on sums": ("aten.pow.Tensor_Scalar", (X, 2), ["S(0)"], "R", "S(0)"),
    "rows of a transposed tensor": ("aten.t.default", (X,), ["S(0)"], "S(0)", "S(1)"),
    "a reshape that mixes": ("aten.view.default", (X, [16]), ["S(1)"], "S(0)", "no layout: (8,) float32 on each rank"),
    "a sum over a cut dim": ("aten.sum.dim_IntList", (X, [0]), ["S(0)"], "R", "P"),
    "the largest over a cut dim": ("aten.amax.default", (X, [0]), ["S(0)"], "R", "no layout: (4,) float32 on each rank"),
    "a sorted part": ("aten.flip.default", (X, [0]), ["S(0)"], "S(0)", "no layout: (2, 4) float32 on each rank"),
    "an op that fails": ("aten.view.default", (X, [2, 8]), ["S(0)"], "R", "RuntimeError: shape '[2, 8]' is invalid for input of size 8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_named_with_what_is_there(case):
    target, arguments, taken, claimed, there = WRONG[case]
    graph, values = one_op(target, *arguments)
    found = verify_program(graph, laid(graph, taken, [claimed]), {}, mesh_of(2), values)
    assert [(m.op, m.output, m.planned, m.actual) for m in found.placement_mismatches] == [("op", 0, claimed, there)]
    assert not found.ok


def two_ops():
    """y = relu(x @ x), z = y @ y; y has two readers."""
    t = Tensor((4, 4), "float32")
    ops = (
        Op("x", "input", (), (), (t,), "input"),
        Op("mm", "aten.mm.default", ((0, 0), (0, 0)), ((Ref(0), Ref(1)), ()), (t,)),
        Op("relu", "aten.relu.default", ((1, 0),), ((Ref(0),), ()), (t,)),
        Op("mm_1", "aten.mm.default", ((2, 0), (2, 0)), ((Ref(0), Ref(1)), ()), (t,)),
    )
    return Graph(ops, (Result("output", "0", (3, 0)), Result("output", "1", (2, 0)), Result("gradient", "unused", None)))


LAYOUTS = {
    "x": Placed((), ("S(0)",)),
    "mm": Placed(("S(1)", "S(0)"), ("P",)),
    "relu": Placed(("S(1)",), ("S(1)",), ("S(0)",)),
    "mm_1": Placed(("S(0)", "R"), ("S(0)",)),
}


@pytest.mark.parametrize(("name", "sizes"), [("mlp", (2, 3)), ("gpt2", (2, 2))])
def test_programs_of_random_layouts_stay_what_they_are(name, sizes):
    graph, mesh, possible, routes, _ = setting(name, True, sizes)
    program, said = lower(graph, *random_layouts(graph, mesh, 0, possible), mesh), []
    for record in program.records:
        match record:
            case RunOp():
                slots = [(slot.shape, slot.shapes) for slot in record.outputs if slot]
                kernel = getattr(record.kernel, "func", record.kernel)
                said.append((record.name, record.target, record.arguments, record.by_rank, getattr(kernel, "__name__", ""), slots))
            case Redistribute():
                steps = [(step.collective, step.axis, str(step.before), str(step.after), round(step.bytes)) for step in record.steps]
                said.append((record.name, record.source.shape, record.target.shape, steps))
            case FreeTensors():
                said.append(record.slots)
    assert_stays(f"programs/{name}.txt", "".join(f"{line}\n" for line in said))


def test_the_program_is_as_planned():
    program = lower(two_ops(), LAYOUTS, {"output:0": "R"}, mesh_of(2))
    written = []
    for record in program.records:
        match record:
            case LoadPlaceholder() | ReturnResult():
                written.append(f"{type(record).__name__} {record.slot.name}")
            case Redistribute():
                written.append(f"{record.source.name} -> {record.target.name} by {[step.collective for step in record.steps]}")
            case RunOp():
                written.append(f"{record.name}({', '.join(slot.name for slot in record.inputs)})")
            case FreeTensors():
                written.append(f"free {' '.join(record.slots)}")
    assert written == [
        "LoadPlaceholder x:0",
        "x:0 -> mm.in0 by ['all_to_all']",
        "mm(mm.in0, x:0)",
        "free x:0 mm.in0",
        "mm:0 -> relu.in0 by ['reduce_scatter']",
        "free mm:0",
        "relu(relu.in0)",
        "free relu.in0",
        "relu:0 -> relu:0@hub by ['all_to_all']",  # for the first who reads it: the result
        "free relu:0",
        "ReturnResult relu:0@hub",
        "relu:0@hub -> mm_1.in1 by ['all_gather']",
        "mm_1(relu:0@hub, mm_1.in1)",
        "free relu:0@hub mm_1.in1",
        "mm_1:0 -> output:0= by ['all_gather']",
        "free mm_1:0",
        "ReturnResult output:0=",
        "free output:0=",
    ]
    assert program.redistributes == 5
    counts = {collective: len(sent) for collective, sent in bytes_sent(program).items()}
    assert counts == {"all_gather": 2, "all_to_all": 2, "reduce_scatter": 1}
    assert bytes_sent(program)["all_gather"] == [32, 32]  # half of 64 bytes goes to the other rank, twice


def test_simulated_results_are_the_whole_ones_and_nothing_is_kept():
    graph, mesh = two_ops(), mesh_of(2)
    values = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))}
    program = lower(graph, LAYOUTS, {"output:0": "R"}, mesh)
    results, expected = run_simulated(program, values), run_global(graph, values)
    assert list(results) == ["output:1", "output:0"] and set(expected) == set(results)
    for key in results:
        torch.testing.assert_close(results[key], expected[key])
    world = SimulatedRanks(mesh)
    for record in program.records:
        if not isinstance(record, ReturnResult):
            world.do(record, values)
    assert not world.held


def test_the_end_result_may_be_right_and_the_row_still_wrong():
    """relu of a sum is not the sum of relus; the ops after it are judged on the right value and are right."""
    layouts = {**LAYOUTS, "relu": Placed(("P",), ("P",)), "mm_1": Placed(("S(0)", "R"), ("S(0)",))}
    graph, mesh = two_ops(), mesh_of(2)
    generator = torch.Generator().manual_seed(0)
    found = verify_program(graph, layouts, {"output:0": "R"}, mesh, {"x": torch.randn(4, 4, generator=generator)})
    assert [m.op for m in found.placement_mismatches] == ["relu"]
    assert found.max_relative_error_outputs < 1e-6 and not found.ok  # later ops are judged on their own


def test_a_wrong_reference_is_no_placement_mismatch():
    graph, mesh, values = two_ops(), mesh_of(2), {"x": torch.eye(4)}
    reference = run_global(graph, values)
    found = verify_program(graph, LAYOUTS, {"output:0": "R"}, mesh, values, {**reference, "output:0": reference["output:0"] * 1.01})
    assert not found.ok and not found.placement_mismatches
    assert found.max_relative_error_outputs == pytest.approx(0.01, rel=0.02)
    with pytest.raises(ValueError, match="the reference lacks 'output:1'"):
        verify_program(graph, LAYOUTS, {"output:0": "R"}, mesh, values, {"output:0": reference["output:0"]})


def test_an_error_is_relative_to_the_largest_value_or_to_what_rounding_explains():
    x, tolerance = torch.tensor([0.5, -4.0]), 1e-3
    rows = [(0.0, 0, 0.0), (2e-3, 1.0, 5e-4), (2.0, 0.0, 0.5), (2.0, 1e-4, 0.5), (2.0, math.inf, 0.5), (2.0, 1.0, 2.0 * tolerance / NOISE)]
    for apart, noise, error in rows:
        assert relative_error(apart, x, partial(float, noise), tolerance) == pytest.approx(error)
    assert relative_error(2.0, 0 * x, float, tolerance) == 2.0


def test_what_is_zero_but_for_rounding_is_not_compared_with_itself():
    """The gradient of a key bias: softmax does not change when all its scores do, so it is 0 for every input."""
    graph, mesh, possible, routes, values = setting("bert", True, (8,))
    layouts, results = random_layouts(graph, mesh, 0, possible)
    reference = run_global(graph, values)
    bias = "gradient:layers.0.attention.key.bias"
    assert reference[bias].abs().max() < 1e-5 * reference["gradient:layers.0.attention.query.bias"].abs().max()
    assert verify_program(graph, layouts, results, mesh, values, reference, routes=routes).ok
    reference[bias] = reference[bias] + 1e-3  # but what is not rounding is an error there too
    assert not verify_program(graph, layouts, results, mesh, values, reference, routes=routes).ok


def test_an_all_zero_reference_is_compared_absolutely():
    graph, values = one_op("aten.mul.Tensor", torch.zeros(4), torch.ones(4))
    layouts = laid(graph, ["S(0)", "S(0)"], ["S(0)"])
    assert verify_program(graph, layouts, {}, mesh_of(2), values).ok
    found = verify_program(graph, layouts, {}, mesh_of(2), values, {"output:0": torch.full((4,), 1e-3)})
    assert not found.ok
    found = verify_program(graph, layouts, {}, mesh_of(2), {**values, "x0": torch.full((4,), 1e-3)}, {"output:0": torch.zeros(4)})
    assert found.max_relative_error_outputs == pytest.approx(1e-3)


def test_the_smallest_numbers_differ_by_their_step():
    """Means of numbers of about 1e-43, of which float32 has 1.4e-45, 2.8e-45, 4.2e-45 ...: those of two halves are rounded before."""
    x = torch.rand(64, 8, generator=torch.Generator().manual_seed(0)) * torch.linspace(1e-43, 1e-42, 64)[:, None]
    whole, halves = x.mean(0), (x[:32].mean(0) + x[32:].mean(0)) / 2
    assert (whole - halves).abs().max().item() > 3e-4 * whole.max().item() > 0  # above the tolerance of an op
    graph, values = one_op("aten.mean.dim", x, [0])
    found = verify_program(graph, laid(graph, ["S(0)"], ["P(avg)"]), {"output:0": "R"}, mesh_of(2), values)
    assert found.ok
    assert not verify_program(graph, laid(graph, ["S(0)"], ["R"]), {}, mesh_of(2), values).ok


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-10), ("float16", 5e-3), ("bfloat16", 3e-2)])
def test_the_tolerance_follows_the_least_precise_type(dtype, tolerance):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    graph, values = one_op("aten.mm.default", x, x)
    found = verify_program(graph, laid(graph, ["S(1)", "S(0)"], ["P"]), {"output:0": "R"}, mesh_of(4), values)
    assert found.ok and found.tolerance == tolerance
    assert not verify_program(graph, laid(graph, ["S(1)", "S(0)"], ["R"]), {}, mesh_of(4), values).ok


# -- layouts that can't be lowered, values that don't fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layouts, results, sentence",
    [
        ({k: v for k, v in LAYOUTS.items() if k != "relu"}, {}, "the layouts lack op 'relu'"),
        (with_placed(LAYOUTS, "mm", inputs=("R",)), {}, "op mm .* has 2 inputs and 1 outputs, its layouts have 1 and 1"),
        (with_placed(LAYOUTS, "mm", outputs=("S(2)",)), {}, "mm:0: .*shards dim 2, the tensor has 2 dims"),
        (with_placed(LAYOUTS, "mm", outputs=("S(0),R",)), {}, "mm:0: .*has 2 placements, the mesh 2 has 1 axes"),
        (with_placed(LAYOUTS, "mm", outputs=(None,)), {}, "op mm .* has no layout for an output that is a tensor"),
        (with_placed(LAYOUTS, "relu", inputs=("P",), hubs=("P",)), {}, "no route for relu:0 from S.1. to relu:0@hub in P"),
        (LAYOUTS, {"output:0": "P"}, "no route for mm_1:0 from S.0. to output:0= in P"),
    ],
)
def test_layouts_that_cannot_be_lowered_name_the_op(layouts, results, sentence):
    assert_refused(sentence, lower, two_ops(), layouts, results, mesh_of(2))


def test_values_that_do_not_fit_are_refused():
    program = lower(two_ops(), LAYOUTS, {}, mesh_of(2))
    assert_refused("there is no value for 'x'", run_simulated, program, {})
    assert_refused(r"the value of 'x' is \(3, 4\)", run_simulated, program, {"x": torch.ones(3, 4)})
    assert_refused("float64", run_simulated, program, {"x": torch.ones(4, 4, dtype=torch.float64)})


def test_a_run_stops_at_the_first_wrong_shape():
    program = lower(two_ops(), with_placed(LAYOUTS, "relu", outputs=("R",), hubs=(None,)), {}, mesh_of(2))
    assert_refused("op relu gave relu:0 as .*the row or a size literal of the op is wrong", run_simulated, program, {"x": torch.ones(4, 4)})


@pytest.mark.parametrize("training", [True, False])
def test_shapes_that_the_kernel_of_a_device_chooses_are_no_mismatch(training):
    model, inputs = dlrm.tiny(batch=4, dtype="bfloat16")  # of fake tensors the bags of all indexes have another shape than on a CPU
    solution = autoshard.plan(model, inputs, mesh_of(4), training=training, baselines=False)
    report = autoshard.verify(model, inputs, solution)
    assert report["ok"] and not report["plans"][0]["placement_mismatches"]
    program = lower(capture(model, inputs, training=training), solution.layouts, solution.results, solution.mesh)
    slots = [slot for record in program.records if isinstance(record, RunOp) for slot in record.outputs if slot is not None]
    assert sum(slot.of_kernel for slot in slots) == 6  # of three tables, and nothing else
    (chosen, *_) = [slot for slot in slots if slot.of_kernel]
    check(chosen, torch.zeros(7, dtype=torch.int64), "here")
    assert_refused("planned is", check, chosen, torch.zeros(7), "here")


def test_devices_in_literals_are_where_it_runs():
    t = Tensor((4,), "float32")
    graph = Graph((Op("zeros", "aten.zeros.default", (), (((4,),), (("device", Const("device", "cuda")),)), (t,)),), ())
    program = lower(graph, {"zeros": Placed((), ("S(0)",))}, {}, mesh_of(2), device="meta")
    (run,) = [record for record in program.records if isinstance(record, RunOp)]
    assert run.arguments["device"] == torch.device("meta") and run.arguments["size"] == (2,)


def test_a_user_of_the_same_value_twice_and_a_placeholder_as_result():
    t = Tensor((4,), "float32")
    ops = (Op("x", "input", (), (), (t,), "input"), Op("mul", "aten.mul.Tensor", ((0, 0), (0, 0)), ((Ref(0), Ref(1)), ()), (t,)))
    graph = Graph(ops, (Result("output", "0", (1, 0)), Result("buffer", "x", (0, 0))))
    layouts = {"x": Placed((), ("S(0)",)), "mul": Placed(("R", "R"), ("R",))}
    found = verify_program(graph, layouts, {"output:0": "S(0)", "buffer:x": "R"}, mesh_of(2), {"x": torch.arange(4.0)})
    assert found.ok and found.redistributes == 4  # x twice into mul (each edge has its route), output and buffer
    assert parse("S(0)") != parse("R") and replace(graph, results=()).results == ()


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("llama", marks=pytest.mark.slow)])
def test_torchs_own_simulator_of_ranks_computes_the_same(name):
    graph, mesh, possible, routes, values = setting(name, True, (2, 2))
    layouts, results = random_layouts(graph, mesh, 0, possible)
    program = lower(graph, layouts, results, mesh, routes=routes)
    expected, found = run_global(graph, values), run_local_tensor(program, values)
    assert found.keys() <= expected.keys() and program.redistributes > 0  # the drawn layouts move tensors
    for key, y in found.items():
        assert (y - expected[key]).abs().max() <= 1e-5 * max(float(expected[key].abs().max()), 1.0), key


@pytest.mark.parametrize("collective, taken", [("all_reduce", "R"), ("reduce_scatter", "S(0)")])
def test_processes_divide_a_mean_by_their_number(collective, taken):
    graph, values = one_op("aten.mul.Tensor", X, 1.0)
    layouts = {"x0": Placed((), ("P(avg)",)), "op": Placed((taken,), (taken,))}
    program = lower(graph, layouts, {"output:0": taken}, mesh_of(2))
    assert [step.collective for record in program.records if isinstance(record, Redistribute) for step in record.steps] == [collective]
    assert torch.equal(run_local_tensor(program, values)["output:0"], X)
