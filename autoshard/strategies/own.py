"""Rows of our own for ops that compute, where torch has none or where its rows mislead.

Matmuls with a bias: torch wants a Partial bias when the contraction is cut; here the bias stays whole and is added once.
Losses decide everything: with torch's rows for nll_loss only the replicated one survives, 1.96x slower on GPT-2; here the
batch or the classes can be cut. A row that cuts the classes needs small reductions inside the op (`internal.py` lists them).
"""

from __future__ import annotations

from autoshard.graph import Op
from autoshard.layout import P, R, S
from autoshard.strategies.rows import Inputs, Row, argument, row, rule


@rule("aten.addmm.default")
def addmm(op: Op, inputs: Inputs) -> list[Row]:
    """out[m,n] = bias + a[m,k] b[k,n]"""
    last = len(inputs[0].shape) - 1
    scaled = dict(op.literals[1])
    if scaled.get("beta", 1) != 1 or scaled.get("alpha", 1) != 1:
        return []
    rows_of_bias = S(0) if len(inputs[0].shape) == 2 and inputs[0].shape[0] > 1 else R
    columns_of_bias = S(last) if last >= 0 and inputs[0].shape[last] > 1 else R
    return [row(P(), R, S(1), S(0)), row(S(0), rows_of_bias, S(0), R), row(S(1), columns_of_bias, R, S(1))]


@rule("aten.embedding.default")
def embedding(op: Op, inputs: Inputs) -> list[Row]:
    """out[..., h] = weight[ids[...], h]; a cut of the vocabulary gives masked look-ups that add up."""
    rank = len(inputs[1].shape)
    cut_ids = [row(S(d), R, S(d)) for d in range(rank)]
    return [row(S(rank), S(1), R), row(P(), S(0), R), *cut_ids]


@rule("aten.embedding_dense_backward.default")
def embedding_backward(op: Op, inputs: Inputs) -> list[Row]:
    """out[v, h] = sum of grad[..., h] where ids[...] == v"""
    rank = len(inputs[1].shape)
    if argument(op, 4, "scale_grad_by_freq", False):
        return []
    return [row(S(1), S(rank), R), row(S(0), R, R), *(row(P(), S(d), S(d)) for d in range(rank)), row(P(), P(), R)]


@rule("aten._log_softmax.default", "aten._softmax.default", "aten._safe_softmax.default")
def softmax(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(inputs[0].shape)
    dim = int(argument(op, 1, "dim")) % rank
    whole = op.target == "aten._safe_softmax.default"  # no local program with the softmax dim cut
    return [row(S(d), S(d)) for d in range(rank) if not (whole and d == dim)]


@rule("aten._log_softmax_backward_data.default", "aten._softmax_backward_data.default")
def softmax_backward(op: Op, inputs: Inputs) -> list[Row]:
    return [row(S(d), S(d), S(d)) for d in range(len(inputs[0].shape))]


@rule("aten.nll_loss_forward.default")
def nll_loss(op: Op, inputs: Inputs) -> list[Row]:
    """loss = -sum over n of w_n logp[n, target_n] / sum of w_n (mean), w_n = 0 where the target is ignored."""
    if argument(op, 2, "weight") is not None or len(inputs[0].shape) != 2:
        return []
    none = argument(op, 3, "reduction") == 0
    return [row((S(0) if none else P(), R), S(0), S(0)), row((P(), R), S(1), R)]


@rule("aten.nll_loss_backward.default")
def nll_loss_backward(op: Op, inputs: Inputs) -> list[Row]:
    if argument(op, 3, "weight") is not None or len(inputs[1].shape) != 2:
        return []
    of_loss = S(0) if argument(op, 4, "reduction") == 0 else R
    return [row(S(0), of_loss, S(0), S(0), R), row(S(1), R, S(1), R, R), row(P(), P(), R, R, R)]


@rule("aten.mse_loss.default")
def mse_loss(op: Op, inputs: Inputs) -> list[Row]:
    none = argument(op, 2, "reduction", 1) == 0
    same_shape = inputs[0].shape == inputs[1].shape
    return [row(S(d) if none else P(), S(d), S(d)) for d in range(len(inputs[0].shape))] if same_shape else []


@rule("aten.mse_loss_backward.default")
def mse_loss_backward(op: Op, inputs: Inputs) -> list[Row]:
    if inputs[1].shape != inputs[2].shape:
        return []
    none = argument(op, 3, "reduction", 1) == 0
    return [row(S(d), S(d) if none else R, S(d), S(d)) for d in range(len(inputs[1].shape))]


ATTENTION = (
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
)


@rule(*ATTENTION)
def attention(op: Op, inputs: Inputs) -> list[Row]:
    """Batch (dim 0) and heads (dim 1) are independent; every tensor of the op starts with them. A mask may broadcast.

    Forward q, k, v [, mask] -> out, logsumexp; backward grad, q, k, v, out, logsumexp [, mask] -> gradients of q, k, v.
    """
    num_core = 6 if "backward" in op.target else 3
    rows = []
    for d in (0, 1):
        masks = [S(d) if len(t.shape) == 4 and t.shape[d] != 1 else R for t in inputs[num_core:]]
        if all(len(t.shape) == 4 or t.shape == () for t in inputs[num_core:]):
            rows.append(Row(tuple(None if t is None else S(d) for t in op.outputs), (*[S(d)] * num_core, *masks)))
    return rows
