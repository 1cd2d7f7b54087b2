"""Every row is run: random tensors are cut as it says, each rank computes its part, the parts make the whole op's output."""

import itertools
from dataclasses import replace

import pytest
import torch

from autoshard.graph import Graph, Op, Tensor, replace_refs
from autoshard.layout import P, R, S, is_legal, parse, text
from autoshard.lower.literals import UNINITIALISED, torch_constants
from autoshard.lower.program import Slot, run_record
from autoshard.lower.run import local_program, ranks, run_together
from autoshard.mesh import Mesh
from autoshard.strategies import Candidate, candidates, internal_collectives, one_axis_rows
from tests.helpers import TINY, candidate_error, difference, joined, one_op, overload, split, tiny_graph

aten = torch.ops.aten
MESHES = {"2": Mesh.from_bandwidths((2,)), "4": Mesh.from_bandwidths((4,)), "2x2": Mesh.from_bandwidths((2, 2))}
TOLERANCE = 1e-5  # float32, sums of up to 128 terms

generator = torch.Generator().manual_seed(0)


def f(*shape):
    return torch.randn(shape, generator=generator)


def positive(*shape):
    return torch.rand(shape, generator=generator) + 0.5


def ids(below, *shape):
    return torch.randint(0, below, shape, generator=generator)


def truth(*shape):
    return torch.randint(0, 2, shape, generator=generator).bool()


END = 2**63 - 1
LOGP = torch.log_softmax(f(8, 4), 1)
TARGETS = torch.tensor([0, 1, 2, 3, -100, 2, 2, -100])
IMAGES = f(4, 4, 8, 8)

# (target, arguments, keyword arguments)
EXTRA = [
    # cut up, join, move dims
    *[("cat.default", (parts, dim)) for parts, dim in (([f(4, 8), f(4, 8)], 0), ([f(4, 8), f(4, 4)], -1), ([f(4, 8), f(2, 8)], 0))],
    *[("stack.default", ([f(4, 8), f(4, 8)], dim)) for dim in (0, 1, -1)],
    ("split.Tensor", (f(8, 4), 4)), ("split.Tensor", (f(4, 8), 2, -1)), ("split.Tensor", (f(4, 8), 8, 1)),
    ("split_with_sizes.default", (f(4, 8), [4, 4], 1)), ("unbind.int", (f(4, 2, 4), 1)), ("unbind.int", (f(2, 4),)),
    ("slice.Tensor", (f(8, 8),)), ("slice.Tensor", (f(8, 8), 0, 0, 4)), ("slice.Tensor", (f(8, 8), -1, 4, END)),
    ("slice.Tensor", (f(8, 8), 1, 0, 8, 2)), ("slice.Tensor", (f(8, 8), 1, 0, END)), ("select.int", (f(4, 8, 4), 0, 1)),
    ("select.int", (f(4, 8, 4), -1, 1)), ("slice_backward.default", (f(4, 4), [4, 8], 1, 0, 4, 1)),
    ("select_backward.default", (f(4, 8), [4, 2, 8], 1, 0)), ("select_backward.default", (f(4, 8), [4, 8, 2], -1, 0)),
    ("expand.default", (f(1, 8), [4, 8])), ("expand.default", (f(4, 8), [4, 4, 8])), ("expand.default", (f(4, 1, 8), [4, 4, -1])),
    ("squeeze.dim", (f(4, 1, 8), 1)), ("squeeze.dim", (f(4, 8), 0)), ("squeeze.dims", (f(4, 1, 8, 1), [1, -1])),
    ("squeeze.dims", (f(4, 1, 8), [0, 1])), ("squeeze.default", (f(1, 4, 1, 8),)), ("unsqueeze.default", (f(4, 8), -1)),
    ("unsqueeze.default", (f(4, 8), 0)), ("permute.default", (f(4, 2, 8), [-1, 0, 1])), ("t.default", (f(4, 8),)), ("t.default", (f(8),)),
    ("transpose.int", (f(4, 2, 8), -1, 0)), ("view.default", (f(4, 8), [32])), ("view.default", (f(8, 8), [4, 2, 8])),
    ("view.default", (f(4, 8), [-1, 4])), ("view.default", (f(4, 6), [8, 3])), ("view.default", (f(1, 8), [8])),
    ("view.default", (f(2, 3, 4), [6, 4])), ("view.default", (f(4, 1), [4])), ("view.dtype", (f(4, 8), torch.int32)),
    ("view.dtype", (f(4, 8), torch.int16)), ("repeat.default", (f(4, 8), [2, 1])), ("flip.default", (f(4, 8), [-1])),
    ("roll.default", (f(4, 8), [1], [-1])), ("constant_pad_nd.default", (f(4, 8), [1, 1])), ("tril.default", (f(4, 8),)),
    ("diagonal.default", (f(4, 4),)), ("slice_scatter.default", (f(4, 8), f(4, 4), 1, 0, 4)), ("copy.default", (f(4, 8), f(4, 8))),
    # reductions and scans
    *[("sum.dim_IntList", (f(4, 8, 4), dims, keep)) for dims, keep in itertools.product(([-1], [0, 2], [], None), (False, True))],
    *[("mean.dim", (f(4, 8, 4), dims, keep)) for dims, keep in itertools.product(([-1], [0, -1], None), (False, True))],
    *[(f"{n}.default", (f(4, 8, 4), dims, keep)) for n in ("amax", "amin") for dims in ([-1], [1, -1]) for keep in (False, True)],
    ("sum.default", (f(4, 8),)), ("mean.default", (f(4, 8),)), ("amax.default", (f(4, 8),)), ("sum.default", (truth(4, 8),)),
    ("max.dim", (f(4, 8), -1)), ("max.default", (f(4, 8),)), ("argmax.default", (f(4, 8), -1)), ("prod.default", (positive(4, 8),)),
    ("any.default", (truth(4, 8),)), ("all.dim", (truth(4, 8), -1)), ("var.correction", (f(4, 8), [-1])),
    ("var_mean.correction", (f(4, 8), [-1])), ("linalg_vector_norm.default", (f(4, 8),)), ("logsumexp.default", (f(4, 8), [-1])),
    *[("cumsum.default", (f(4, 8), dim)) for dim in (0, 1, -1)], ("cumprod.default", (positive(4, 8), -1)),
    ("sort.default", (f(4, 8), -1)), ("topk.default", (f(4, 8), 2)),
    # look-ups
    ("embedding.default", (f(8, 4), ids(8, 4, 2))), ("embedding.default", (f(8, 4), ids(8, 4), 3)),
    *[("embedding_dense_backward.default", (f(8, 4), ids(8, 8), 8, padding, False)) for padding in (-1, 3)],
    ("embedding_dense_backward.default", (f(8, 4), ids(4, 8), 4, -1, True)), ("gather.default", (f(4, 8), -1, ids(8, 4, 4))),
    ("scatter_add.default", (f(4, 8), -1, ids(8, 4, 4), f(4, 4))), ("index_select.default", (f(4, 8), 0, ids(4, 8))),
    ("index.Tensor", (f(4, 8), [ids(4, 8)])), ("index.Tensor", (f(4, 8), [None, ids(8, 4)])),
    ("index_put.default", (f(4, 8), [ids(4, 2)], f(2, 8), True)), ("where.self", (truth(4, 8), f(4, 8), f(4, 8))),
    ("where.self", (truth(4, 8), f(4, 8), f())), ("where.self", (truth(1, 8), f(4, 8), f(4, 1))), ("where.self", (truth(8), f(4, 8), f())),
    ("masked_fill.Scalar", (f(4, 8), truth(1, 8), -1.0)),
    # losses
    *[("nll_loss_forward.default", (LOGP, TARGETS, weight, reduction, -100)) for reduction in (0, 1, 2) for weight in (None, positive(4))],
    ("nll_loss_forward.default", (LOGP, ids(4, 8), None, 1, 2)),
    ("nll_loss_forward.default", (torch.log_softmax(f(4), 0), torch.tensor(2), None, 1, -100)),
    *[
        ("nll_loss_backward.default", (f(8) if reduction == 0 else f(), LOGP, TARGETS, weight, reduction, -100, torch.tensor(6.0)))
        for reduction in (0, 1, 2) for weight in (None, positive(4))
    ],
    ("nll_loss2d_forward.default", (torch.log_softmax(IMAGES, 1), ids(4, 4, 8, 8), None, 1, -100)),
    *[(f"{name}.default", (f(4, 8), f(4, 8), how)) for name in ("mse_loss", "smooth_l1_loss", "huber_loss") for how in (0, 1, 2)],
    ("mse_loss.default", (f(4, 8), f(4, 8))),
    *[("mse_loss_backward.default", (f(4, 8) if reduction == 0 else f(), f(4, 8), f(4, 8), reduction)) for reduction in (0, 1, 2)],
    *[(f"{name}_backward.default", (f(), f(4, 8), f(4, 8), 1, 1.0)) for name in ("smooth_l1_loss", "huber_loss")],
    *[(f"{name}.default", (f(4, 8), dim, False)) for name in ("_log_softmax", "_softmax") for dim in (0, -1)],
    ("_safe_softmax.default", (f(4, 8), -1)), ("_softmax_backward_data.default", (f(4, 8), f(4, 8).softmax(-1), -1, torch.float32)),
    ("_log_softmax_backward_data.default", (f(4, 8), f(4, 8).log_softmax(0), 0, torch.float32)),
    # matmuls, norms, attention, convolution
    ("mm.default", (f(4, 8), f(8, 4))), ("bmm.default", (f(4, 2, 8), f(4, 8, 4))), ("mv.default", (f(4, 8), f(8))),
    ("dot.default", (f(8), f(8))),
    *[("addmm.default", (bias, f(8, 8), f(8, 4))) for bias in (f(4), f(8, 4), f(1, 4), f(8, 1), f())],
    ("addmm.default", (f(4), f(8, 8), f(8, 4)), {"beta": 2, "alpha": 3}), ("addmv.default", (f(4), f(4, 8), f(8))),
    *[("baddbmm.default", (bias, f(4, 4, 8), f(4, 8, 2)), {"beta": 0.5}) for bias in (f(4, 4, 2), f(1, 1, 2), f(4, 2), f(2), f(4, 1, 1))],
    ("native_layer_norm.default", (f(4, 2, 8), [8], positive(8), f(8), 1e-5)),
    ("native_layer_norm.default", (f(4, 8), [8], None, None, 1e-5)),
    ("native_layer_norm.default", (f(4, 2, 8), [2, 8], positive(2, 8), f(2, 8), 1e-5)),
    ("native_layer_norm_backward.default", (f(4, 8), f(4, 8), [8], f(4, 1), positive(4, 1), positive(8), f(8), [True, False, True])),
    ("native_group_norm.default", (f(4, 8, 4), positive(8), f(8), 4, 8, 4, 4, 1e-5)),
    ("convolution.default", (f(4, 4, 8), f(8, 4, 3), f(8), [1], [1], [1], False, [0], 1)),
    ("convolution_backward.default", (f(4, 8, 8), f(4, 4, 8), f(8, 4, 3), [8], [1], [1], [1], False, [0], 1, [True, True, True])),
    ("avg_pool2d.default", (IMAGES, [2, 2])), ("max_pool2d_with_indices.default", (IMAGES, [2, 2])),
    # constants
    ("full.default", ([4, 8], 1.5)), ("zeros.default", ([4, 8],)), ("ones_like.default", (f(4, 8),)), ("full_like.default", (f(4, 8), 2)),
    ("new_zeros.default", (f(4, 8), [4, 8])), ("new_full.default", (f(4, 8), [8], 3)), ("empty_like.default", (f(4, 8),)),
    ("fill.Scalar", (f(4, 8), 1.0)), ("arange.start_step", (0, 8, 2)), ("scalar_tensor.default", (1.5,)),
    # elementwise
    *[(f"{name}.default", (positive(4, 8),)) for name in ("gelu", "silu", "relu", "tanh", "sigmoid", "neg", "exp", "log", "abs", "rsqrt")],
    ("clone.default", (f(4, 8),)), ("floor.default", (f(4, 8),)),
    *[("add.Tensor", pair) for pair in ((f(4, 8), f(4, 8)), (f(4, 8), f(8)), (f(4, 1), f(1, 8)), (f(4, 8), 1.5), (f(4, 8), f()))],
    ("add.Tensor", (f(4, 8), f(4, 8)), {"alpha": 2}), ("sub.Tensor", (f(4, 8), f(8))), ("rsub.Scalar", (f(4, 8), 1.0)),
    *[("mul.Tensor", pair) for pair in ((f(4, 8), f(4, 8)), (f(4, 8), f(4, 1)), (f(4, 8), 2.0), (ids(4, 4, 8), ids(4, 4, 8)))],
    ("div.Tensor", (f(4, 8), positive(4, 8))), ("div.Tensor", (f(4, 8), 2.0)),
    ("div.Tensor_mode", (f(4, 8), 2.0), {"rounding_mode": "floor"}),
    ("pow.Tensor_Scalar", (f(4, 8), 2)), ("pow.Tensor_Tensor", (positive(4, 8), f(4, 8))), ("maximum.default", (f(4, 8), f(8))),
    ("clamp.default", (f(4, 8), -1, 1)), ("gt.Scalar", (f(4, 8), 0)), ("eq.Tensor", (ids(4, 4, 8), ids(4, 4, 8))),
    ("bitwise_not.default", (truth(4, 8),)), ("logical_and.default", (truth(4, 8), truth(4, 8))),
    ("gelu_backward.default", (f(4, 8), f(4, 8))),
    ("_to_copy.default", (f(4, 8),), {"dtype": torch.float64}), ("_to_copy.default", (3 * f(4, 8),), {"dtype": torch.int64}),
    ("_to_copy.default", (truth(4, 8),), {"dtype": torch.float32}), ("addcmul.default", (f(4, 8), f(4, 8), f(4, 8))),
    ("threshold_backward.default", (f(4, 8), f(4, 8), 0)), ("native_dropout_backward.default", (f(4, 8), truth(4, 8), 2.0)),
]  # fmt: skip


def check(graph: Graph, tensors: list, outputs: tuple, mesh: Mesh, tolerance: float = TOLERANCE) -> int:
    """The number of candidates; AssertionError names those that compute something else."""
    found = candidates(graph, mesh).of[-1]
    if graph.ops[-1].target not in UNINITIALISED:
        errors = {c: candidate_error(graph, tensors, outputs, c, mesh) for c in found}
        wrong = [([text(x) for x in c.inputs], [x and text(x) for x in c.outputs]) for c, error in errors.items() if not error < tolerance]
        assert not wrong, graph.ops[-1]
    return len(found)


# -- rows ------------------------------------------------------------------------------------------------------------------------


ON_MESHES = [  # each op on one mesh in the quick suite
    pytest.param(case, mesh, id=f"{k}-{case[0]}-{name}", marks=[pytest.mark.slow] * ((k + j) % 3 > 0))
    for k, case in enumerate(EXTRA) for j, (name, mesh) in enumerate(MESHES.items())
]  # fmt: skip


@pytest.mark.parametrize(("case", "mesh"), ON_MESHES)
def test_every_candidate_of_an_op_computes_it(case, mesh):
    target, args, kwargs = (*case, {})[:3]
    assert check(*one_op(f"aten.{target}", *args, **kwargs), mesh) >= 1


def tiny_ops() -> dict[tuple, tuple[Graph, int]]:
    """Every distinct op of the tiny models."""
    found: dict[tuple, tuple[Graph, int]] = {}
    for name, training in itertools.product(TINY, (True, False)):
        graph = tiny_graph(name, training)
        for i, op in enumerate(graph.ops):
            if not op.is_placeholder:
                found.setdefault(graph.signature(i), (graph, i))
    return found


def sensible(graph: Graph, i: int) -> list[torch.Tensor]:
    """Random inputs of an op that a model could give it: indexes in range, saved results of the forward op."""
    op, tensors = graph.ops[i], graph.input_tensors(i)
    matrices = [t for t in tensors if len(t.shape) == 2]
    bounds = {"aten.embedding.default": lambda: tensors[0].shape[0], "aten.embedding_dense_backward.default": lambda: op.literals[0][2]}
    bounds |= dict.fromkeys(("aten.nll_loss_forward.default", "aten.nll_loss_backward.default"), lambda: matrices[0].shape[1])
    below = bounds.get(op.target, lambda: 2)()
    xs = [positive(*t.shape) if t.dtype == "float32" else ids(below, *t.shape).to(getattr(torch, t.dtype)) for t in tensors]
    if op.target == "aten._log_softmax_backward_data.default":
        xs[1] = xs[1].log_softmax(-1)
    elif op.target == "aten.native_layer_norm_backward.default":
        xs[2:4] = aten.native_layer_norm(xs[1], xs[1].shape[-1:], None, None, 1e-5)[1:]
    elif op.target == "autoshard.attention_backward.default":
        xs[4:6] = torch.ops.autoshard.attention(*xs[1:4], *op.literals[0][6:])
    return xs


def alone(graph: Graph, i: int) -> tuple[Graph, list, tuple]:
    """One op of a graph as a graph, on `sensible` inputs, and its outputs."""
    op, xs = graph.ops[i], sensible(graph, i)
    args, kwargs = replace_refs(torch_constants(op.literals, "cpu"), tuple(xs))
    result = overload(op.target)(*args, **dict(kwargs))
    inputs = tuple(Op(f"x{k}", "input", (), ((), ()), (t,), "input") for k, t in enumerate(graph.input_tensors(i)))
    single = Graph((*inputs, replace(op, inputs=tuple((k, 0) for k in range(len(xs))))), ())
    return single, xs, tuple(result) if isinstance(result, (tuple, list)) else (result,)


@pytest.mark.parametrize("mesh", [pytest.param(MESHES[name], id=name, marks=[] if name == "4" else pytest.mark.slow) for name in MESHES])
def test_every_candidate_of_every_op_of_the_tiny_models_computes_it(mesh):
    ops = tiny_ops()
    assert len({op[0][0] for op in ops}) >= 47  # targets
    checked = [check(*alone(graph, i), mesh) for graph, i in ops.values()]
    assert sum(checked) > {"2": 700, "4": 700, "2x2": 3400}["x".join(map(str, mesh.shape))]


PLANTED = [
    ("aten.mm.default", (f(4, 8), f(8, 4)), ((S(1),), (S(0),)), ((R,),)),  # a sum that nobody adds up
    ("aten.mm.default", (f(4, 4), f(4, 4)), ((S(0),), (R,)), ((S(1),),)),  # parts of equal shape, of another dim
    ("aten.gelu.default", (f(4, 8),), ((P(),),), ((P(),),)),  # not linear
    ("aten.pow.Tensor_Scalar", (f(4, 8), 2), ((P(),),), ((P(),),)),  # right if all but one addend were 0
    ("aten._softmax.default", (f(4, 8), 0, False), ((S(0),),), ((S(1),),)),
    ("aten.cumsum.default", (f(4, 8), -1), ((S(1),),), ((S(1),),)),  # torch's own row for a negative dim
    ("aten.view.dtype", (f(4, 8), torch.int32), ((P(),),), ((P(),),)),  # torch's own row
    ("aten.sum.default", (truth(4, 8),), ((P(),),), ((P(),),)),
    ("aten.view.default", (f(2, 4), [8]), ((S(1),),), ((S(0),),)),
    ("aten.embedding_dense_backward.default", (f(8, 4), ids(8, 8), 8, -1, False), ((S(0),), (S(0),)), ((R,),)),
]


@pytest.mark.parametrize(("target", "args", "inputs", "outputs"), PLANTED, ids=[f"{k}-{case[0]}" for k, case in enumerate(PLANTED)])
def test_a_planted_wrong_row_is_caught_and_is_no_candidate(target, args, inputs, outputs):
    graph, tensors, expected = one_op(target, *args)
    planted = Candidate(inputs, outputs)
    assert planted not in candidates(graph, MESHES["2"]).of[-1]
    try:
        assert candidate_error(graph, tensors, expected, planted, MESHES["2"]) > 0.01
    except RuntimeError as error:
        assert "shape" in str(error)


# What a good plan needs; a rule that loses one of these makes plans slow without a word.
NEEDED = [
    ("aten.mm.default", (f(4, 8), f(8, 4)), {"S(0) R -> S(0)", "R S(1) -> S(1)", "S(1) S(0) -> P"}),
    ("aten.addmm.default", (f(4), f(8, 8), f(8, 4)), {"R S(0) R -> S(0)", "S(0) R S(1) -> S(1)", "R S(1) S(0) -> P"}),
    ("aten.bmm.default", (f(4, 2, 8), f(4, 8, 2)), {"S(0) S(0) -> S(0)", "S(1) R -> S(1)", "R S(2) -> S(2)", "S(2) S(1) -> P"}),
    ("aten.embedding.default", (f(8, 4), ids(8, 4, 2)), {"R S(0) -> S(0)", "S(1) R -> S(2)", "S(0) R -> P"}),
    ("aten.embedding_dense_backward.default", (f(4, 2, 4), ids(8, 4, 2), 8, -1, False),
     {"S(0) S(0) -> P", "S(2) R -> S(1)", "R R -> S(0)"}),
    ("aten._log_softmax.default", (f(4, 8), 1, False), {"S(0) -> S(0)", "S(1) -> S(1)"}),
    ("aten.nll_loss_forward.default", (LOGP, TARGETS, None, 1, -100), {"S(0) S(0) -> P R", "S(1) R -> P R"}),
    ("aten.nll_loss_backward.default", (f(), LOGP, TARGETS, None, 1, -100, f()), {"R S(0) S(0) R -> S(0)", "R S(1) R R -> S(1)"}),
    ("aten.view.default", (f(4, 2, 8), [8, 8]), {"S(0) -> S(0)", "S(2) -> S(1)", "P -> P"}),
    ("aten.add.Tensor", (f(4, 8), f(4, 8)), {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)", "P P -> P"}),
    ("aten.mul.Tensor", (f(4, 8), f(4, 8)), {"S(0) S(0) -> S(0)", "P R -> P", "R P -> P"}),
    ("aten.sum.dim_IntList", (f(4, 8), [0]), {"S(0) -> P", "S(1) -> S(0)", "P -> P"}),
    ("aten.native_layer_norm.default", (f(4, 2, 8), [8], f(8), f(8), 1e-5), {"S(0) R R -> S(0) S(0) S(0)", "S(1) R R -> S(1) S(1) S(1)"}),
    ("aten.native_layer_norm_backward.default",
     (f(4, 8), f(4, 8), [8], f(4, 1), positive(4, 1), f(8), f(8), [True, True, True]), {"S(0) S(0) S(0) S(0) R R -> S(0) P P"}),
    ("autoshard.attention.default", (f(4, 4, 8, 4), f(4, 4, 8, 4), f(4, 4, 8, 4)),
     {"S(0) S(0) S(0) -> S(0) S(0)", "S(1) S(1) S(1) -> S(1) S(1)"}),
]  # fmt: skip


@pytest.mark.parametrize(("target", "args", "needed"), NEEDED, ids=[f"{k}-{case[0]}" for k, case in enumerate(NEEDED)])
def test_the_rows_that_good_plans_need_are_there(target, args, needed):
    graph, tensors, _ = one_op(target, *args)
    rows = one_axis_rows(graph.ops[-1], graph.input_tensors(len(tensors)))
    written = {f"{' '.join(text((p,)) for p in r.inputs)} -> {' '.join(text((p,)) for p in r.outputs if p)}" for r in rows}
    assert needed <= written


def test_an_unknown_op_is_replicated_and_listed():
    graph, tensors, outputs = one_op("aten.take.default", f(4, 8), torch.arange(8).reshape(2, 4))
    found = candidates(graph, MESHES["2x2"])
    assert found.unknown == (2,)
    assert found.of[2] == (Candidate(((R, R), (R, R)), ((R, R),)),)


def test_the_tiny_models_have_no_unknown_op():
    assert [candidates(tiny_graph(name, training), MESHES["2"]).unknown for name in TINY for training in (True, False)] == [()] * 8


# -- crossing --------------------------------------------------------------------------------------------------------------------


OPS = [
    ("aten.mm.default", (f(4, 8), f(8, 4))),
    ("aten.bmm.default", (f(4, 2, 8), f(4, 8, 4))),
    ("aten.view.default", (f(4, 2, 8), [8, 8])),
    ("aten.amax.default", (f(4, 8), [-1])),
    ("aten.add.Tensor", (f(4, 6), f(6))),
    ("aten.cumsum.default", (f(3, 8), 1)),
]


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (1, 4), (2, 2, 2)], ids=["2x2", "2x4", "1x4", "2x2x2"])
@pytest.mark.parametrize(("target", "args"), OPS, ids=[target for target, _ in OPS])
def test_crossing_is_all_combinations_of_rows_that_are_legal(target, args, shape):
    graph, tensors, _ = one_op(target, *args)
    op, inputs, mesh = graph.ops[-1], graph.input_tensors(len(tensors)), Mesh.from_bandwidths(shape)
    rows = one_axis_rows(op, inputs)
    expected = set()
    for combination in itertools.product(*(rows if n > 1 else rows[:1] for n in shape)):
        ins = tuple(tuple(r.inputs[k] for r in combination) for k in range(len(inputs)))
        outs = tuple(tuple(r.outputs[k] for r in combination) for k in range(len(op.outputs)))
        layouts = [*zip(ins, inputs, strict=True), *zip(outs, op.outputs, strict=True)]
        if all(is_legal(t.shape, layout, mesh) for layout, t in layouts):
            expected.add(Candidate(ins, outs))
    found = candidates(graph, mesh).of[-1]
    assert set(found) == expected
    assert len(found) == len(expected)  # none twice
    assert found[0] == Candidate(*(tuple((R,) * len(shape) for _ in side) for side in (inputs, op.outputs)))  # replicated first


def test_candidates_of_equal_ops_are_one_object():
    found = candidates(tiny_graph("gpt2", True), MESHES["2x2"])
    assert len({id(cs) for cs in found.of}) == found.num_signatures < len(found.of) / 2


# -- collectives inside an op ------------------------------------------------------------------------------------------------------

INSIDE = [
    ("aten._log_softmax.default", (f(4, 8), -1, False)),
    ("aten._softmax_backward_data.default", (f(4, 8), f(4, 8).softmax(-1), -1, torch.float32)),
    *[("aten.nll_loss_forward.default", (LOGP, TARGETS, None, reduction, -100)) for reduction in (0, 1, 2)],
    ("aten.nll_loss_backward.default", (f(), LOGP, TARGETS, None, 1, -100, torch.tensor(6.0))),
    ("aten.embedding.default", (f(8, 4), ids(8, 4))),
    ("aten.mean.dim", (f(4, 8), [0])),
    ("aten.addmm.default", (f(4), f(8, 8), f(8, 4))),
]


@pytest.mark.parametrize(("target", "args"), INSIDE, ids=[f"{k}-{case[0]}" for k, case in enumerate(INSIDE)])
def test_the_collectives_that_are_priced_inside_an_op_are_those_that_run(target, args):
    graph, tensors, _ = one_op(target, *args)
    mesh, i = MESHES["2x2"], len(tensors)
    op, inputs = graph.ops[i], graph.input_tensors(i)
    for candidate in candidates(graph, mesh).of[i]:
        parts = [split(x, layout, mesh, generator) for x, layout in zip(tensors, candidate.inputs, strict=True)]
        slots = tuple(Slot(str(k), (k, 0), layout, tuple(parts[k][0].shape), inputs[k].dtype) for k, layout in enumerate(candidate.inputs))
        outs = tuple(
            None if t is None else Slot("", (i, k), layout, (), t.dtype)
            for k, (t, layout) in enumerate(zip(op.outputs, candidate.outputs, strict=True))
        )
        outs = tuple(replace(slot, shape=local) for slot, local in zip(outs, locals_of(op, candidate, mesh), strict=True))
        record, ran = run_record(graph, i, slots, outs, mesh), []

        def watched(program, ran=ran):
            answer = None
            while True:
                try:
                    ask = program.send(answer)
                except StopIteration as done:
                    return done.value
                ran.append((ask.collective, ask.axis, ask.tensor.numel() * ask.tensor.element_size()))
                answer = yield ask

        programs = [local_program(record, rank, [p[r] for p in parts]) for r, rank in enumerate(ranks(mesh))]
        programs = [watched(program) if r == 0 else program for r, program in enumerate(programs)]
        if record.kernel is not None:
            run_together(programs, lambda axis: [[0, 2], [1, 3]] if axis == 0 else [[0, 1], [2, 3]])
        assert sorted(ran) == sorted(internal_collectives(op, inputs, candidate.inputs, mesh)), candidate


def locals_of(op: Op, candidate: Candidate, mesh: Mesh) -> list[tuple[int, ...]]:
    shapes = []
    for t, layout in zip(op.outputs, candidate.outputs, strict=True):
        whole = torch.empty(t.shape, dtype=getattr(torch, t.dtype))
        shapes.append(tuple(split(whole, tuple(R if p.is_partial() else p for p in layout), mesh, generator)[0].shape))
    return shapes


# -- the reference itself ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["R,R", "S(0),R", "S(0),S(0)", "S(1),S(0)", "P,S(1)", "S(0),P", "P,P"])
def test_what_is_split_is_joined_again(layout):
    x, mesh = f(4, 8), MESHES["2x2"]
    whole, apart = joined(split(x, parse(layout), mesh, generator), parse(layout), mesh)
    assert difference(whole, x) < 1e-6 and apart == 0


def test_replicas_that_differ_and_nan_are_seen():
    x = f(4, 8)
    assert joined([x, x + 1], (R,), MESHES["2"])[1] > 0
    assert difference(torch.full((2,), torch.nan), torch.ones(2)) == float("inf")
    assert difference(torch.tensor([torch.inf, 1.0]), torch.tensor([torch.inf, 1.0])) == 0


def test_an_op_that_torch_does_not_have_has_no_rows():
    """Those that move values to the host's memory are defined where plans are run, not where they are made."""
    op = Op("x", "autoshard.no_such_op.default", ((0, 0),), (), (Tensor((8, 4), "float32"),))
    assert one_axis_rows(op, (op.output,)) is None
