"""Every kernel on every way to lie that it serves, on meshes where several axes cut one dim, against the op on whole tensors."""

import math

import pytest
import torch

from autoshard.lower import lower
from autoshard.lower.kernels import recurrent
from autoshard.lower.kernels.table import KERNELS
from autoshard.lower.program import RunOp
from tests.helpers_lower import check_op, crossed, laid, mesh_of, one_op
from tests.helpers_refusals import assert_refused
from tests.test_coverage_ops import CASES as MORE_CASES

MESHES = [(2,), (4,), (2, 2), (2, 3), (2, 2, 2)]


def x(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape, below=24, seed=0):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def masked(*shape):
    """Scores of which some are -inf, the whole part of some rank among them."""
    scores = x(*shape)
    scores[..., : shape[-1] // 2] = torch.where(x(*shape, seed=9)[..., : shape[-1] // 2] > 0, -math.inf, scores[..., : shape[-1] // 2])
    scores[0, 12:] = -math.inf
    return scores


def targets_for_loss(ignore):
    """Ignored targets pile up in the first rows, so that a mean of local means would be wrong."""
    t = ids(24, seed=3)
    t[:5] = ignore
    t[20] = ignore
    return t


LOG = torch.log_softmax(x(24, 24), -1)
SOFT = torch.softmax(x(6, 24, 8, seed=4), 1)
SOFTMAX, LOSS = "R -> R, S0 -> S0, S1 -> S1", "R R -> R R, S0 S0 -> P R, S1 R -> P R"
GRAD, SQUARE, SECOND = x(24, 24, seed=5), x(24, 24), x(24, 24, seed=1)
IMAGE = (x(6, 24, 4, 4), x(8, 24, 3, 3, seed=1), x(8, seed=2))
PADDED, ONCE = (x(12, 8, 6), ids(12, 8, below=15), 24, 13, False), [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
IGNORED, WEIGHTS, TOTAL = targets_for_loss(-100), x(24, seed=8).abs(), torch.tensor(18.0)
# name: target without "aten." and, mostly, ".default"; arguments; its rows over one mesh axis
_CASES = {
    "embedding": ("embedding", (x(24, 6), ids(12, 8)), "R R -> R, S0 R -> P, S1 R -> S2, R S0 -> S0, R S1 -> S1"),
    "embedding backward":
        ("embedding_dense_backward", (x(12, 8, 6), ids(12, 8), 24, -1, False), "R R -> R, R R -> S0, S2 R -> S1, S0 S0 -> P"),
    "embedding backward, padding": ("embedding_dense_backward", PADDED, "R R -> R, R R -> S0, S1 S1 -> P"),
    "embedding backward, by frequency":
        ("embedding_dense_backward", (x(48, 6), ids(48), 24, 2, True), "R R -> R, R R -> S0, S1 R -> S1"),
    "log_softmax": ("_log_softmax", (SQUARE, -1, False), SOFTMAX),
    "log_softmax, masked": ("_log_softmax", (masked(24, 24), 1, False), SOFTMAX),
    "softmax": ("_softmax", (masked(24, 24), 1, False), SOFTMAX),
    "softmax, inner dim": ("_softmax", (x(6, 24, 8), -2, False), SOFTMAX + ", S2 -> S2"),
    "softmax, half": ("_softmax", (SQUARE.bfloat16(), 1, False), SOFTMAX),
    "log_softmax backward": ("_log_softmax_backward_data", (GRAD, LOG, 1, torch.float32), "R R -> R, S0 S0 -> S0, S1 S1 -> S1"),
    "softmax backward":
        ("_softmax_backward_data", (x(6, 24, 8, seed=5), SOFT, -2, torch.float32), "R R -> R, S0 S0 -> S0, S1 S1 -> S1, S2 S2 -> S2"),
    "loss, mean": ("nll_loss_forward", (LOG, IGNORED, None, 1, -100), LOSS),
    "loss, ignored in range": ("nll_loss_forward", (LOG, targets_for_loss(7), None, 1, 7), LOSS),
    "loss, sum": ("nll_loss_forward", (LOG, IGNORED, None, 2, -100), LOSS),
    "loss, none": ("nll_loss_forward", (LOG, IGNORED, None, 0, -100), "R R -> R R, S0 S0 -> S0 R, S1 R -> P R"),
    "loss, weights": ("nll_loss_forward", (LOG, IGNORED, WEIGHTS, 1, -100), "R R R -> R R, S0 S0 R -> P R"),
    "loss backward, mean": ("nll_loss_backward", (torch.tensor(1.5), LOG, IGNORED, None, 1, -100, TOTAL),
                            "R R R R -> R, R S0 S0 R -> S0, R S1 R R -> S1"),
    "loss backward, none": ("nll_loss_backward", (x(24), LOG, targets_for_loss(7), None, 0, 7, TOTAL),
                            "R R R R -> R, S0 S0 S0 R -> S0, R S1 R R -> S1"),
    "addmm": ("addmm", (x(24), SECOND, x(24, 24, seed=2)), "R R R -> R, R S1 S0 -> P, S0 R S1 -> S1, R S0 R -> S0"),
    "addmm, scaled": ("addmm", (SQUARE, SECOND, x(24, 24, seed=2)), "R R R -> R, R S1 S0 -> P, S0 S0 R -> S0"),
    "addmv": ("addmv", (x(24), SECOND, x(24, seed=2)), "R R R -> R, R S1 S0 -> P, S0 S0 R -> S0"),
    "baddbmm":
        ("baddbmm", (x(6, 24, 8), x(6, 24, 24, seed=1), x(6, 24, 8, seed=2)), "R R R -> R, R S2 S1 -> P, S0 S0 S0 -> S0"),
    "linear": ("linear", (SQUARE, SECOND, x(24, seed=2)), "R R R -> R, S1 S1 R -> P, R S0 S0 -> S1"),
    "convolution": ("convolution", (*IMAGE, *ONCE), "R R R -> R, S1 S1 R -> P, S0 R R -> S0, R S0 S0 -> S1"),
    "mean": ("mean", (SQUARE,), "R -> R, S0 -> P, S1 -> P"),
    "mean of a dim": ("mean.dim", (SQUARE, [-1], True), "R -> R, S0 -> S0, S1 -> P"),
    "mean of local means": ("mean.dim", (SQUARE, [0]), "R -> R, S1 -> S0, S0 -> P(avg)"),
}  # fmt: skip
KEPT, SUMMED = "R R -> R, S0 S0 -> S0, S1 S1 -> S1", "R R -> R, S0 S0 -> P, S1 S1 -> P"
for _name, _more in (("mse_loss", ()), ("smooth_l1_loss", (0.5,)), ("huber_loss", (0.5,))):
    for _kind, _reduction, _rows in (("mean", 1, SUMMED), ("sum", 2, SUMMED), ("none", 0, KEPT)):
        _CASES[f"{_name}, {_kind}"] = (_name, (SQUARE, SECOND, _reduction), _rows)
    _arguments = (torch.tensor(2.0), SQUARE, SECOND, 1, *_more)
    _CASES[f"{_name}_backward"] = (f"{_name}_backward", _arguments, "R R R -> R, R S0 S0 -> S0, R S1 S1 -> S1")
CASES = {
    name: (f"aten.{target}" if "." in target else f"aten.{target}.default", arguments, rows.split(", "))
    for name, (target, arguments, rows) in _CASES.items()
}


def test_every_kernel_has_a_case():
    cases = {target for target, *_ in [*CASES.values(), *MORE_CASES.values()]}
    elsewhere = {*recurrent.KERNELS}  # compared in test_coverage_ops
    elsewhere |= {target for target in KERNELS if "native_layer_norm" in target}  # of 16 bits only: test_precision
    of = ("attention", "dropout", "experts", "biased_experts", "chunked_loss")  # test_attention, test_experts, test_chunked_loss ...
    own = tuple(f"autoshard.{name}" for name in of)
    elsewhere |= {target for target in KERNELS if target.startswith(own)}
    named = [target for target in KERNELS if target.startswith("transformers.")]  # older versions lack some
    elsewhere |= {target for target in named if not hasattr(torch.ops.transformers, target.split(".")[1])}
    assert cases >= set(KERNELS) - elsewhere


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_gives_the_whole_op(name, sizes):
    target, arguments, rows = CASES[name]
    keywords = {"beta": 0.5, "alpha": 2.0} if name == "addmm, scaled" else {}
    graph, values = one_op(target, *arguments, **keywords)
    mesh = mesh_of(*sizes)
    for inputs, outputs in crossed(rows, mesh, graph):
        check_op(graph, values, mesh, inputs, outputs)


def runs(target, arguments, inputs, outputs, *sizes):
    graph, _ = one_op(target, *arguments)
    program = lower(graph, laid(graph, inputs, outputs), {}, mesh_of(*sizes))
    return next(record for record in program.records if isinstance(record, RunOp))


def test_the_plain_op_runs_where_it_is_right():
    addmm = CASES["addmm"][1]
    assert runs("aten.addmm.default", addmm, ["S(0)", "R", "S(1)"], ["S(1)"], 2).kernel is None
    assert runs("aten.addmm.default", addmm, ["R", "S(1)", "S(0)"], ["P"], 2).kernel is not None
    assert runs("aten.mean.dim", CASES["mean of a dim"][1], ["S(0)"], ["S(0)"], 2).kernel is None
    assert runs("aten._softmax.default", CASES["softmax"][1], ["S(0)"], ["S(0)"], 2).kernel is None


@pytest.mark.parametrize(
    "name, inputs, outputs, why",
    [
        ("loss, weights", ["S(1)", "R", "R"], ["P", "R"], "without class weights"),
        ("loss, mean", ["S(0)", "R"], ["P", "R"], "sharded alike on the batch"),
        ("log_softmax backward", ["R", "S(1)"], ["S(1)"], "sharded alike on the dim of the softmax"),
    ],
)
def test_layouts_without_a_local_program_are_refused_by_name(name, inputs, outputs, why):
    target, arguments, _ = CASES[name]
    assert_refused(f"op op .* has no local program for the input layouts .*{why}", runs, target, arguments, inputs, outputs, 2)
