"""Parts that are not equal: rows, routes and whole models on dims that the mesh does not divide, against the whole and against DTensor."""

import copy
import itertools
import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers grouped_mm_fallback)
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.api import autosharding_pass, plan
from autoshard.capture import capture
from autoshard.formulate import Training, formulate, op_candidate_seconds
from autoshard.layout import P, R, S, all_layouts, is_even, is_legal, parse, rank_bounds, text
from autoshard.lower import Pace, are_alike, lower, plant_fault, trace, verify_program, without_idle
from autoshard.lower.collectives import Groups, Rank, drive
from autoshard.lower.flow import STARTS
from autoshard.lower.kernels.losses import softmax, softmax_backward
from autoshard.lower.literals import UNINITIALISED
from autoshard.lower.program import Redistribute, slot_of
from autoshard.lower.run import SimulatedRanks
from autoshard.lower.sharding import distance, local_tensors
from autoshard.lower.unsharded import run_unsharded
from autoshard.planning import padding
from autoshard.planning.describe import layouts_of, results_of
from autoshard.planning.warm_starts import random_choice
from autoshard.report.planned import planned_report
from autoshard.report.terminal import as_text
from autoshard.routes import Routes
from autoshard.runtime.overlap import scheduled
from autoshard.solution import of_one_microbatch
from autoshard.strategies import Candidate, candidates, register_rule
from autoshard.strategies.internal import PASSES
from autoshard.strategies.rows import EVEN_ONLY, RULES
from models import bert, gpt2, llama, mlp
from tests.helpers import candidate_error, described, fast_mesh, one_op, tiny_graph
from tests.helpers_local_tensor import run_local_tensor
from tests.helpers_lower import mesh_of, run_simulated
from tests.helpers_models import Model
from tests.test_coverage_ops import CASES
from tests.test_strategies import EXTRA, f, ids


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def uneven(graph, candidate, mesh, i=-1):
    """Whether some tensor of op i, the last one, lies in unequal parts."""
    tensors = [*graph.input_tensors(i % len(graph.ops)), *graph.ops[i].outputs]
    layouts = [*candidate.inputs, *candidate.outputs]
    return any(t is not None and x is not None and not is_even(t.shape, x, mesh) for t, x in zip(tensors, layouts, strict=True))


# -- layouts -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3,), (4,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_parts_are_those_of_dtensor(sizes):
    mesh, seen = mesh_of(*sizes), 0
    for shape in [(5,), (7, 9), (13, 4), (3, 50257)]:
        for layout in all_layouts(shape, mesh):
            for c in mesh.coordinates():
                local, offset = _compute_local_shape_and_global_offset(shape, mesh.shape, list(c), layout)
                assert [(o, o + n) for o, n in zip(offset, local, strict=True)] == list(rank_bounds(shape, layout, mesh, c))
            seen += not is_even(shape, layout, mesh)
    assert seen >= 3


@pytest.mark.parametrize("sizes, shape", [((4,), (13, 7)), ((2, 2), (5, 7)), ((2, 3), (17, 7)), ((3, 2), (13, 8))], ids=str)
def test_every_route_ends_with_the_target_cut(sizes, shape):
    """Partial sums included; the steps are those that run on process groups too."""
    mesh, whole, moved = mesh_of(*sizes), f(*shape), 0
    routes, world = Routes(mesh), SimulatedRanks(mesh)
    layouts = [x for x in itertools.product([S(0), S(1), R, P()], repeat=len(sizes)) if is_legal(shape, x, mesh)]
    for source, target in itertools.product(layouts, layouts):
        route = routes.route(shape, 4, source, target)
        if route is None:
            assert any(q == P() != p for p, q in zip(source, target, strict=True))
            continue
        a, b = (slot_of(name, (0, 0), described(whole), x, mesh) for name, x in (("a", source), ("b", target)))
        world.held["a"] = local_tensors(whole, source, mesh)
        tensors = world.redistribute(Redistribute(a, b, route.steps, shape))
        assert distance(tensors, target, mesh, whole) < 1e-5, (text(source), text(target))
        moved += bool(a.shapes or b.shapes)
    assert moved >= 8


# -- rows --------------------------------------------------------------------------------------------------------------------------

ODD = [  # dims of 5, 7 and 13: other parts than the 3 + 3 + 2 of the cases that are shared with even parts
    ("aten.mm.default", f(5, 7), f(7, 13)), ("aten.addmm.default", f(13), f(5, 7), f(7, 13)), ("aten.bmm.default", f(5, 3, 7), f(5, 7, 3)),
    ("aten.embedding.default", f(13, 7), ids(13, 5, 7)),
    ("aten.embedding_dense_backward.default", f(7, 5), ids(13, 7), 13, -1, False),
    ("aten._log_softmax.default", f(5, 13), 1, False),
    ("aten._softmax_backward_data.default", f(5, 7), f(5, 7).softmax(0), 0, torch.float32),
    *[("aten.nll_loss_forward.default", f(7, 13).log_softmax(1), ids(13, 7), None, how, 3) for how in (0, 1, 2)],
    ("aten.nll_loss_backward.default", f(), f(7, 13).log_softmax(1), ids(13, 7), None, 1, -100, torch.tensor(7.0)),
    ("aten.native_layer_norm.default", f(5, 7, 4), [4], f(4), f(4), 1e-5),
    ("aten.mean.dim", f(5, 7, 13), [0, 2]), ("aten.mean.default", f(7, 5)),
    ("aten.mse_loss.default", f(5, 7), f(5, 7)), ("aten.mse_loss_backward.default", f(), f(5, 7), f(5, 7), 1),
    ("aten.view.default", f(5, 7, 3), [35, 3]), ("aten.view.default", f(7, 4), [14, 2]), ("aten.view.default", f(14, 2), [7, 4]),
    ("autoshard.attention.default", f(5, 14, 7, 4), f(5, 7, 7, 4), f(5, 7, 7, 4)),
    ("aten.index.Tensor", f(13, 5), [ids(13, 7) - 13]), ("aten.index_put.default", f(13, 5), [ids(13, 7)], f(7, 5), True),
    ("aten.index_select.default", f(13, 5), 0, ids(13, 7)), ("aten.gather.default", f(5, 13), 1, ids(13, 5, 7)),
    ("aten._embedding_bag.default", f(13, 7), ids(13, 20), torch.arange(0, 20, 4)),
    ("aten.amax.default", f(5, 7), [0]), ("aten.expand.default", f(1, 7), [5, 7]), ("aten.full.default", [5, 7], 2.0),
    ("aten.native_group_norm.default", f(5, 14, 3), f(14), f(14), 5, 14, 3, 7, 1e-5),
    ("aten.convolution.default", f(5, 7, 8), f(14, 1, 3), f(14), [1], [1], [1], False, [0], 7),
    ("aten.convolution.default", f(5, 14, 8), f(21, 2, 3), f(21), [1], [1], [1], False, [0], 7),
    ("aten.nll_loss2d_forward.default", f(5, 7, 3, 2).log_softmax(1), ids(7, 5, 3, 2), None, 1, 3),
    ("aten.nll_loss2d_backward.default", f(), f(5, 7, 3, 2).log_softmax(1), ids(7, 5, 3, 2), None, 1, 3, torch.tensor(7.0)),
    ("aten._native_batch_norm_legit_functional.default", f(5, 7, 3), f(7), f(7), f(7), f(7).abs(), True, 0.1, 1e-5),
    ("transformers.grouped_mm_fallback.default", f(16, 8), f(7, 8, 16), torch.tensor([3, 3, 5, 9, 9, 12, 16], dtype=torch.int32)),
]  # fmt: skip


def wrong_ones(graph, tensors, outputs, mesh):
    """(number of uneven candidates, those that compute something else)"""
    tolerance = 3e-2 if any(x.dtype == torch.bfloat16 for x in tensors) else 2e-5
    found = [c for c in candidates(graph, mesh).of[-1] if uneven(graph, c, mesh)]
    if graph.ops[-1].target in UNINITIALISED:
        return len(found), []
    wrong = [c for c in found if not candidate_error(graph, tensors, outputs, c, mesh) <= tolerance]
    return len(found), [([text(x) for x in c.inputs], [x and text(x) for x in c.outputs]) for c in wrong]


@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_every_candidate_of_odd_sizes_gives_the_whole_op(sizes):
    total = 0
    for target, *arguments in ODD:
        number, wrong = wrong_ones(*one_op(target, *arguments), mesh_of(*sizes))
        assert not wrong, (target, arguments)
        total += number
    assert total >= {(2,): 60, (3,): 50, (4,): 40, (2, 2): 200}[sizes]


@pytest.mark.parametrize("sizes", [(3,), slow((2, 3)), slow((3, 2))], ids=str)
def test_every_uneven_candidate_of_every_rule_gives_the_whole_op(sizes):
    cases = [*CASES.values(), *((f"aten.{target}", args, kwargs) for target, args, kwargs in ((*case, {})[:3] for case in EXTRA))]
    total = 0
    for target, args, kwargs in cases:
        number, wrong = wrong_ones(*one_op(target, *args, **kwargs), mesh_of(*sizes))
        assert not wrong, (target, args)
        total += number
    assert total >= {(3,): 300, (2, 3): 900, (3, 2): 900}[sizes]


MISALIGNED = [  # parts that do not belong together
    (("aten.view.default", f(5, 16), [80]), ("S(0)", "S(0)"), (3,)),  # 2 + 2 + 1 rows of 16, but 27 + 27 + 26
    (("aten.view.default", f(2, 7, 8), [2, 56]), ("S(1)", "S(1)"), (4,)),
    (("autoshard.attention.default", f(2, 6, 4, 4), f(2, 3, 4, 4), f(2, 3, 4, 4)),
     ("S(1)", "S(1)", "S(1)", "S(1)", "S(1)"), (2,)),  # 3 + 3 heads, 2 + 1 of keys
    (("aten.convolution.default", f(2, 12, 8), f(12, 4, 3), None, [1], [1], [1], False, [0], 3), ("S(1)", "S(0)", "S(1)"), (2,)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "written", "sizes"), MISALIGNED, ids=[case[0][0] for case in MISALIGNED])
def test_parts_that_do_not_match_are_no_candidates_and_would_be_wrong(op, written, sizes):
    mesh, (graph, tensors, outputs) = mesh_of(*sizes), one_op(*op)
    layouts = tuple(map(parse, written))
    planted = Candidate(layouts[: len(tensors)], layouts[len(tensors) :])
    assert all(is_legal(t.shape, x, mesh) for t, x in zip(graph.input_tensors(len(tensors)), planted.inputs, strict=True))
    assert planted not in candidates(graph, mesh).of[-1]
    try:
        assert candidate_error(graph, tensors, outputs, planted, mesh) > 0.01
    except RuntimeError as error:
        assert "shape" in str(error) or "size" in str(error) or "divisible" in str(error)


def attention_of_shared_heads(heads, key_heads, backward):
    q, grad, k, v = f(2, heads, 5, 4), f(2, heads, 5, 4), f(2, key_heads, 5, 4), f(2, key_heads, 5, 4)
    if not backward:
        return one_op("autoshard.attention.default", q, k, v, None, True)
    return one_op("autoshard.attention_backward.default", grad, q, k, v, *torch.ops.autoshard.attention(q, k, v, None, True), None, True)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2), (3, 2), (2, 4)], ids=str)
def test_query_heads_in_shards_that_begin_within_a_group_find_their_keys(sizes, backward):
    """6 heads of 3 keys on 2x2 are 2 + 1 + 2 + 1: the third rank's two heads have two keys, though two heads of one key would be 0, 1."""
    total = 0
    for heads, key_heads in [(6, 3), (14, 7), (12, 4), (12, 6), (10, 5), (9, 3), (15, 3), (20, 5)]:
        number, wrong = wrong_ones(*attention_of_shared_heads(heads, key_heads, backward), mesh_of(*sizes))
        assert not wrong, (heads, key_heads)
        total += number
    assert total >= 2


def test_heads_and_key_value_heads_that_match_are_cut_together():
    graph, _, _ = one_op("autoshard.attention.default", f(2, 14, 4, 4), f(2, 7, 4, 4), f(2, 7, 4, 4))
    assert (S(1),) in [c.inputs[0] for c in candidates(graph, mesh_of(4)).of[-1]]  # 4 + 4 + 4 + 2 and 2 + 2 + 2 + 1


def test_a_rule_of_the_users_own_is_for_equal_parts_unless_it_says_otherwise():
    graph, _, _ = one_op("aten.polar.default", f(5, 8).abs(), f(5, 8))
    for extra, number in (({}, 1), ({"uneven": True}, 2)):
        register_rule("aten.polar.default", "S(0), S(0) -> S(0)", replace=True, **extra)
        try:
            assert len(candidates(graph, mesh_of(2)).of[-1]) == number
        finally:
            del RULES["aten.polar.default"]
            EVEN_ONLY.discard("aten.polar.default")


def test_uneven_parts_are_priced_by_the_largest():
    """14 heads on 4 cost what 16 cost, forward and in bytes."""
    mesh, q = mesh_of(4), (S(1),)
    seconds = []
    for heads in (14, 16, 12):
        graph, _, _ = one_op("autoshard.attention.default", *(torch.zeros(4, heads, 512, 64) for _ in range(3)))
        candidate = Candidate((q, q, q), (q, q))
        assert candidate in candidates(graph, mesh).of[-1]
        seconds.append(op_candidate_seconds(graph.ops[-1], graph.input_tensors(3), candidate, mesh))
    assert seconds[0] == seconds[1] > seconds[2]


def test_sizes_that_are_powers_of_two_have_equal_parts_only():
    """What divides, or would leave ranks empty: the candidates of such a model are what they were without uneven parts."""
    graph = tiny_graph("llama", True)
    for mesh in (mesh_of(2, 4), mesh_of(8)):
        for i, found in enumerate(candidates(graph, mesh).of):
            assert not any(uneven(graph, c, mesh, i) for c in found)


# -- torch's own DTensor -----------------------------------------------------------------------------------------------------------

AGREED = [  # ops that DTensor has rules for
    ("aten.mm.default", f(5, 7), f(7, 13)), ("aten.add.Tensor", f(5, 7), f(7)), ("aten.gelu.default", f(13, 6)),
    ("aten.t.default", f(5, 7)),
    ("aten.sum.dim_IntList", f(5, 7), [0]), ("aten._softmax.default", f(5, 7), 1, False),
    ("aten.native_layer_norm.default", f(5, 7, 4), [4], f(4), f(4), 1e-5),
]  # fmt: skip


def dtensor_parts(target, arguments, layouts, shape):
    """Every rank's local outputs and the placements that DTensor gives the op on inputs laid so; None where it moves something first."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = mesh_of(*shape).num_devices
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        device_mesh = init_device_mesh("cpu", shape)
        with LocalTensorMode(world):
            left = iter(layouts)
            given = [distribute_tensor(x, device_mesh, list(next(left))) if isinstance(x, torch.Tensor) else x for x in arguments]
            with CommDebugMode() as moved:
                namespace, name, overload = target.split(".")
                result = getattr(getattr(getattr(torch.ops, namespace), name), overload)(*given)
            made = [y for y in (result if isinstance(result, tuple) else (result,)) if isinstance(y, DTensor)]
            parts = [[y.to_local()._local_tensors[r] for r in range(world)] for y in made]
            return (None if moved.get_total_counts() else [tuple(y.placements) for y in made]), parts
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(2,), slow((4,)), slow((2, 2))], ids=str)
def test_dtensor_lays_the_outputs_of_uneven_ops_as_we_do(shape):
    mesh, agreed = mesh_of(*shape), 0
    for target, *arguments in AGREED:
        graph, tensors, outputs = one_op(target, *arguments)
        for c in candidates(graph, mesh).of[-1]:
            if not uneven(graph, c, mesh) or any(P() in x for x in c.inputs):
                continue
            placements, parts = dtensor_parts(target, arguments, c.inputs, shape)
            if placements is None:  # DTensor has a cheaper way by its own prices
                continue
            assert placements == list(c.outputs), (target, [text(x) for x in c.inputs])
            for y, layout, local in zip(outputs, c.outputs, parts, strict=True):
                assert distance(local, layout, mesh, y) < 1e-5
            agreed += 1
    assert agreed >= {(2,): 10, (4,): 7, (2, 2): 20}[shape]


def test_torchs_own_collectives_give_the_same_on_uneven_parts():
    graph, values, _ = run_once("mlp", True)
    mesh = mesh_of(2, 2)
    layouts, results, number = drawn("mlp", True, mesh, 0)
    program = lower(graph, layouts, results, mesh)
    assert number > 5 and not program.is_even
    ours, theirs = run_simulated(program, values), run_local_tensor(program, values)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-6) for key in ours)


# -- models ------------------------------------------------------------------------------------------------------------------------

SMALL = {"seq": 12, "layers": 1, "loss": True, "dtype": "float32"}
MODELS = {
    "gpt2, 257 words": (gpt2.tiny, {"vocab": 257, "batch": 13, "layers": 1}),
    "gpt2, 7 heads": (gpt2.build, {"heads": 7, "width": 49, "positions": 31, "vocab": 131, "batch": 9, **SMALL}),
    "llama, 6 heads": (llama.build, {"heads": 6, "kv_heads": 6, "width": 36, "hidden": 75, "vocab": 101, "batch": 7, **SMALL}),
    "llama, 14 and 7 heads": (llama.build, {"heads": 14, "kv_heads": 7, "width": 56, "hidden": 75, "vocab": 101, "batch": 5, **SMALL}),
    "llama, 6 and 3 heads": (llama.build, {"heads": 6, "kv_heads": 3, "width": 24, "hidden": 46, "vocab": 52, "batch": 9, **SMALL}),
    "mlp": (mlp.tiny, {"batch": 17, "width": 35, "hidden": 63}),
    "bert": (bert.build, {"heads": 7, "width": 49, "positions": 31, "vocab": 131, "batch": 9, **SMALL}),
}
QUICK = [("gpt2, 257 words", (4,)), ("llama, 14 and 7 heads", (4,)), ("mlp", (2, 4)), ("bert", (2, 2))]
ALL = [(name, sizes) for name in MODELS for sizes in ((2, 2), (4,), (8,), (2, 4), (3,)) if (name, sizes) not in QUICK]


@cache
def run_once(name, training):
    build, keywords = MODELS[name]
    module, inputs = build(**keywords)
    graph = capture(module, inputs, training=training)
    return graph, *run_unsharded(module, inputs, graph, training=training, seed=0)


def drawn(name, training, mesh, seed):
    """Layouts drawn from all candidates, and how many ops give uneven parts."""
    graph, _, _ = run_once(name, training)
    formulated = formulate(graph, candidates(graph, mesh), mesh, training=Training() if training else None)
    choice = random_choice(formulated, seed)
    made = [(t, x) for i, op in enumerate(graph.ops) for t, x in zip(op.outputs, formulated.candidate(i, choice).outputs, strict=True)]
    number = sum(t is not None and x is not None and not is_even(t.shape, x, mesh) for t, x in made)
    return layouts_of(formulated, choice), results_of(formulated, choice), number


def check_drawn(name, sizes, training, seeds):
    graph, values, reference = run_once(name, training)
    mesh, numbers = mesh_of(*sizes), []
    for seed in seeds:
        layouts, results, number = drawn(name, training, mesh, seed)
        found = verify_program(graph, layouts, results, mesh, values, reference)
        assert found.ok, (seed, found)
        numbers.append(number)
    return sum(numbers)


@pytest.mark.parametrize(("name", "sizes"), QUICK, ids=str)
def test_random_uneven_layouts_train_as_the_module_does(name, sizes):
    assert check_drawn(name, sizes, True, range(1)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("name", "sizes"), [*QUICK, *ALL], ids=str)
def test_random_uneven_layouts_compute_what_the_module_does(name, sizes, training):
    assert check_drawn(name, sizes, training, range(3)) > 0


def test_a_fault_planted_into_uneven_layouts_is_found():
    """The negative control of the above."""
    graph, values, reference = run_once("gpt2, 257 words", True)
    mesh = mesh_of(4)
    layouts, results, number = drawn("gpt2, 257 words", True, mesh, 0)
    assert number > 3
    for seed in range(2):
        assert not verify_program(graph, plant_fault(layouts, graph, mesh, seed), results, mesh, values, reference).ok


def test_a_rank_that_counts_equal_parts_looks_up_the_wrong_rows(monkeypatch):
    """The negative control of offsets: parts of 13 rows on 2x2 are 4, 3, 3, 3, so the third begins at 7 and not at 2 x 4."""
    op = one_op("aten.embedding.default", f(13, 4), torch.arange(13))
    candidate = next(c for c in candidates(op[0], mesh_of(2, 2)).of[-1] if c.inputs[0] == (S(0), S(0)))
    assert candidate_error(*op, candidate, mesh_of(2, 2)) < 1e-6
    monkeypatch.setattr(Rank, "start", lambda self, axes, size: self.shard_index(axes) * -(-size // 4))
    assert candidate_error(*op, candidate, mesh_of(2, 2)) > 0.1


@pytest.mark.slow
def test_the_vocabulary_of_gpt2_is_cut_where_that_is_cheaper():
    """50257 words on 8 devices: never dearer than with equal parts only (the vocabulary whole), here by 4 %."""
    model, inputs = gpt2.small()
    found = plan(model, inputs, mesh_of(2, 4), training=True, baselines=False, objective="serial")
    whole = plan(model, inputs, mesh_of(2, 4), training=True, baselines=False, objective="serial", pins={"wte.weight": "R,S(1)"})
    assert found.parameters["wte.weight"]["layout"] == "S(0),S(0)"
    assert found.cost < 0.98 * whole.cost
    assert found.parameters["wte.weight"]["local_bytes"] == -(-50257 // 8) * 768 * 4


# -- padding -----------------------------------------------------------------------------------------------------------------------


def convolutions(channels):
    """Images too few to cut on 8, of which only the channels can be cut."""
    with torch.device("meta"):
        layers = [torch.nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, channels), (channels, 24))]
        return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]), (torch.empty(2, 3, 96, 96),)


def test_the_offer_to_pad_is_what_the_padded_model_saves():
    """20 channels on 8 leave a rank without any, so they stay whole; 24 don't."""
    found, padded = (plan(*convolutions(n), fast_mesh((8,)), objective="serial") for n in (20, 24))
    (offer,) = found.padding
    assert (offer["dim"], offer["from"], offer["to"]) == (0, 20, 24)
    assert offer["saves_seconds"] == pytest.approx(found.cost - padded.cost, rel=1e-3) and padded.cost < 0.9 * found.cost
    assert f"padding {offer['parameter']} rows 20 -> 24 would save" in as_text(planned_report(found), 200)
    assert not padded.padding


def reshaped(use):
    """The 3 channels of the weight are also those of an input that is used in another shape."""
    return Model(lambda m, x: m.linear(x).pow(2).mean() + use(x).pow(2).mean(), linear=torch.nn.Linear(3, 8))


def test_a_dim_that_meets_one_which_stays_is_not_offered():
    for use in (lambda x: x.reshape(16, 12), lambda x: x.reshape(-1), lambda x: x.cumsum(2), torch.sin):
        found = plan(reshaped(use), (torch.empty(16, 4, 3, device="meta"),), fast_mesh((4,)), training=True, objective="serial")
        assert found.status != "unjudged" and bool(found.padding) == (use is torch.sin)


W = lambda *shape: torch.nn.Parameter(torch.empty(shape, device="meta"))  # noqa: E731
DIMS = {  # parameters, devices, what is computed of them: the dims that may be padded, most bytes first
    "grows by half": ({"a": W(2, 5), "b": W(2, 5)}, 3, lambda m, x: (m.a + m.b).sin(), [("a", 0, 2), ("a", 1, 5)]),
    "with an activation": ({"a": W(2, 6), "b": W(6, 5)}, 3, lambda m, x: x @ m.a @ m.b, [("b", 1, 5), ("a", 0, 2)]),
    "grows by more": ({"a": W(6, 5), "b": W(9, 6)}, 4, lambda m, x: m.b @ m.a, [("a", 0, 6), ("b", 0, 9)]),
    "a kernel": ({"a": W(4, 2, 3, 3)}, 2, lambda m, x: torch.conv2d(m.image, m.a), []),
    "experts": ({"a": W(4, 2, 7)}, 4, lambda m, x: torch.bmm(m.image[0, 0, :3, :2].expand(4, 3, 2), m.a), [("a", 2, 7)]),
    "a hundredth": ({"a": W(528, 3), "b": W(4, 4)}, 3, lambda m, x: (m.a.sum(), m.b.sin()), [("b", 0, 4), ("b", 1, 4)]),
    "less": ({"a": W(534, 3), "b": W(2, 8)}, 3, lambda m, x: (m.a.sum(), m.image[0, 0, :, :2] @ m.b), []),
    "tied": ({"a": (both := W(7, 4)), "b": both}, 4, lambda m, x: m.a.sin() + m.b.cos(), [("a", 0, 7)]),
}


@pytest.mark.parametrize(("parameters", "devices", "function", "expected"), DIMS.values(), ids=DIMS)
def test_dims_that_may_be_padded(parameters, devices, function, expected):
    module, mesh = Model(function, image=torch.empty(1, 2, 4, 4, device="meta"), **parameters), fast_mesh((devices,))
    graph = capture(module, (torch.empty(6, 2, device="meta"),), training=False)
    found = padding._dims(formulate(graph, candidates(graph, mesh), mesh))
    assert [name for name, _ in found] == expected


PATTERNS = {  # an operation of 4x6: whether it is a view or broadcasts
    "view": (lambda m, x: x.reshape(24), True), "unary": (lambda m, x: x.sin(), True), "expand": (lambda m, x: m.row.expand(4, 6), False),
    "add": (lambda m, x: x + m.row, True), "matmul": (lambda m, x: x @ m.square, False), "reduction": (lambda m, x: x.sum(1), False),
    "vector": (lambda m, x: x @ m.row, False), "concatenation": (lambda m, x: torch.cat([x, x]), False),
    "arange": (lambda m, x: torch.arange(6), False), "addmm": (lambda m, x: torch.addmm(m.row, x, m.square), False),
}  # fmt: skip


@pytest.mark.parametrize(("function", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_which_ops_are_views_or_broadcast(function, expected):
    with torch.device("meta"):
        graph = capture(Model(function, row=torch.empty(6), square=torch.empty(6, 6)), (torch.empty(4, 6),), training=False)
    assert padding._pattern(graph, len(graph.ops) - 1) == expected


LEISURE = SimpleNamespace(lacks_time_to_formulate=bool)


@pytest.mark.parametrize(
    ("padded", "saves"), [(None, []), (1.8, [0.2, 0.2]), (2 - 2**-8, [2**-8] * 2), (2 - 2**-9, [0.0, 0.0]), (2.2, [0.0, 0.0])]
)
def test_a_saving_of_a_thousandth_counts_as_nothing_and_two_dims_are_tried(monkeypatch, padded, saves):
    monkeypatch.setattr(padding, "LEAST_SAVING", 2**-10)
    monkeypatch.setattr(padding, "_best_cost", lambda *_: padded)
    module, question = torch.nn.Sequential(*(torch.nn.Linear(n, n + 1) for n in (11, 12, 13))), LEISURE
    graph, mesh = capture(module, (torch.empty(3, 11),), training=False), fast_mesh((8,))
    offers = padding.padding_offers(question, formulate(graph, candidates(graph, mesh), mesh), 2.0)
    assert [offer["saves_seconds"] for offer in offers] == pytest.approx(saves)


def test_nothing_is_solved_where_the_padded_model_has_no_other_candidates(monkeypatch):
    """A transposed square matrix has the same shape, not one to which it broadcasts."""
    monkeypatch.setattr(padding, "_best_cost", pytest.fail)
    graph, mesh = capture(torch.nn.Linear(7, 7), (torch.empty(4, 7),), training=False), fast_mesh((4,))
    offers = padding.padding_offers(LEISURE, formulate(graph, candidates(graph, mesh), mesh), 1.0)
    assert offers and all(offer["saves_seconds"] == 0.0 for offer in offers)


def test_random_sizes_on_random_meshes_are_never_wrong():
    rng = random.Random(0)
    for _ in range(12):
        m, k, n = (rng.randint(2, 19) for _ in range(3))
        sizes = rng.choice([(2,), (3,), (5,), (2, 2), (2, 3)])
        number, wrong = wrong_ones(*one_op("aten.mm.default", f(m, k), f(k, n)), mesh_of(*sizes))
        assert not wrong, (m, k, n, sizes)


# -- graphs of ranks whose shards differ ---------------------------------------------------------------------------------------------


PADS = (torch.ops.aten.constant_pad_nd.default,)
ODD_MODELS = {"gpt2": lambda: gpt2.tiny(batch=8), "llama": lambda: llama.tiny(batch=6, layers=1), "mlp": mlp.tiny}


def graphs_of_ranks(name, shape, scheme):
    model, inputs = ODD_MODELS[name]()
    bandwidths = {"intra_node_bandwidth": 1e14, "inter_node_bandwidth": 1e14}
    options = {"algo": scheme, "mesh_shape": shape, "training": True, **bandwidths}
    solution = autosharding_pass(model, example_inputs=inputs, **options)[1]["solution"]
    graph = capture(model, inputs, training=True)
    program = lower(graph, *of_one_microbatch(solution), solution.mesh)
    groups = Groups(solution.mesh.axis_names, shape)
    coordinates = list(itertools.product(*map(range, shape)))
    return program, groups, solution.mesh, [trace(program, graph, groups, coordinate) for coordinate in coordinates]


ODD_PLANS = [("mlp", (3,), "zero2"), ("mlp", (2, 3), "fsdp")]
ODD_PLANS += [pytest.param(*one, "fsdp", marks=pytest.mark.slow) for one in (("gpt2", (3,)), ("llama", (2, 3)))]


@pytest.mark.parametrize("name, shape, scheme", ODD_PLANS)
def test_ranks_of_unlike_shards_start_their_collectives_in_one_order(name, shape, scheme):
    program, groups, mesh, ranks = graphs_of_ranks(name, shape, scheme)
    assert not program.is_even
    first, pace, orders, idle = list(ranks[0].passes.values()), Pace(mesh, groups), [], []
    for rank in ranks[1:]:
        passes = list(rank.passes.values())
        assert all(are_alike(a.graph, b.graph) for a, b in zip(first, passes, strict=True))
        reference = [copy.deepcopy(one) for one in first]
        before = sum(node.target in STARTS for one in passes for node in one.graph.nodes)
        rows = scheduled(passes, pace, 1e9, reference=reference)
        for one in passes:
            without_idle(one)
            one.graph.lint()
        nodes = [node for one in passes for node in one.graph.nodes]
        starts = [node for node in nodes if node.target in STARTS]
        assert len(starts) == sum(map(len, rows)) < before
        orders.append([(STARTS[node.target], pace.axis(node), len(node.meta.get("members", "1"))) for node in starts])
        idle.append(sum(node.target in PADS and node.meta["val"].shape == node.args[0].meta["val"].shape for node in nodes))
        pads = sum(node.target in PADS for node in nodes)
    assert all(order == orders[0] for order in orders)
    assert not any(idle) and pads  # the last rank's are not of nothing


def test_a_rank_that_runs_another_kernel_is_not_alike():
    _, _, _, (one, *_, other) = graphs_of_ranks("mlp", (3,), "fsdp")
    assert are_alike(one.forward.graph, other.forward.graph)
    without_idle(one.forward)
    assert not are_alike(one.forward.graph, other.forward.graph)


class Passes(TorchDispatchMode):
    """Counts how often operators read or write all of a tensor of so many elements; views are none."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if not function.is_view:
            self.count += sum(isinstance(x, torch.Tensor) and x.numel() == self.elements for x in (*args, out))
        return out


@pytest.mark.parametrize("log", [True, False])
def test_passes_of_a_softmax_over_a_sharded_dim_are_those_that_its_program_makes(log):
    x, y, name = f(6, 50), f(6, 50), "_log_softmax" if log else "_softmax"
    rank = Rank(mesh_of(2), (torch.tensor(0),), (0,))
    forward = {"self": x, "dim": 1, "half_to_float": False}
    backward = {"grad_output": x, "output": y, "dim": 1, "input_dtype": torch.float32}
    for given, kernel, native, suffix in ((forward, softmax, 2, ""), (backward, softmax_backward, 3, "_backward_data")):
        with Passes(x.numel()) as counted:
            drive(kernel(rank, given, axes=(0,), log=log), lambda call: call.tensor)
        assert PASSES[f"aten.{name}{suffix}.default"] == counted.count - native
