"""Rows of matmuls of tokens sorted by expert: y[s] = x[s] @ w[e], where e is the expert of token s; its tokens end at `offs[e]`.

    columns    w S(2) -> y S(1)         contraction   x S(1), w S(1) -> y P         sums   x P -> y P
    experts    w S(0) -> y P            expert parallelism: each rank multiplies the tokens of its experts, the rest of y is 0

Rows of experts as one operator (capture/experts.py); tokens are x, ids and weights, and y is sharded as they are:

    tokens S(0), experts replicated     each rank multiplies its own tokens; the gradients of the experts are Partial
    tokens S(0), experts S(0)           expert parallelism: all_to_all to the experts and back
    tokens replicated, experts S(0)     expert parallelism without all_to_all: y is P

Batched experts (x[e, c, k] @ w[e, k, n], a bmm) need no row here: the batch dim of the bmm is the experts, and tokens go from
shards of the batch to shards of the experts by all-to-all. Local programs with sharded experts are in `lower.kernels.experts`
and `lower.kernels.expert_parallel`.
"""

from __future__ import annotations

from autoshard.graph import Op
from autoshard.layout import P, R, S
from autoshard.strategies.rows import EVEN_ONLY, Inputs, Row, argument, row, rule

EVEN_ONLY.add("aten._grouped_mm.default")  # its kernel needs strides that are multiples of 16 bytes

FORWARD = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@rule(*FORWARD)
def grouped_mm(op: Op, inputs: Inputs) -> list[Row]:
    ranks = tuple(len(t.shape) for t in inputs)
    if ranks == (3, 3):  # a plain batched matmul
        return [row(S(0), S(0), S(0)), row(S(1), S(1), R), row(S(2), R, S(2)), row(P(), S(2), S(1))]
    if argument(op, 3, "bias") is not None or len(inputs) != 3:
        return []
    if ranks == (2, 3, 1):
        return [row(S(1), R, S(2), R), row(P(), S(1), S(1), R), row(P(), R, S(0), R), row(P(), P(), R, R)]
    if ranks == (2, 2, 1):  # the gradient of w: x'[k, s] @ g[s, n], summed over the tokens of each expert
        return [row(S(1), S(0), R, R), row(S(2), R, S(1), R), row(S(0), R, R, R), row(P(), R, P(), R)]
    return []


@rule("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward(op: Op, inputs: Inputs) -> list[Row]:
    """x, w, offs, gradient of y -> gradients of x and w."""
    return [
        row((P(), S(2)), R, S(2), R, S(1)),
        row((S(1), S(1)), S(1), S(1), R, R),
        row((P(), S(0)), R, S(0), R, R),
        row((P(), P()), R, R, R, P()),
    ]


EXPERTS = ("autoshard.experts.default", "autoshard.biased_experts.default")
EXPERTS_BACKWARD = ("autoshard.experts_backward.default", "autoshard.biased_experts_backward.default")
EVEN_ONLY.update((*EXPERTS, *EXPERTS_BACKWARD))


@rule(*EXPERTS)
def experts(op: Op, inputs: Inputs) -> list[Row]:
    """x, ids, weights, parameters -> y."""
    parameters = len(inputs) - 3
    return [
        Row((y,), (tokens,) * 3 + (of_experts,) * parameters)
        for y, tokens, of_experts in ((S(0), S(0), R), (S(0), S(0), S(0)), (P(), R, S(0)))
    ]


@rule(*EXPERTS_BACKWARD)
def experts_backward(op: Op, inputs: Inputs) -> list[Row]:
    """The gradient of y, x, ids, weights, parameters -> gradients of x, weights and parameters."""
    parameters = len(inputs) - 4
    return [
        Row((of_tokens,) * 2 + (of_parameters,) * parameters, (tokens,) * 4 + (of_experts,) * parameters)
        for of_tokens, of_parameters, tokens, of_experts in ((S(0), P(), S(0), R), (S(0), S(0), S(0), S(0)), (P(), S(0), R, S(0)))
    ]


def sends_tokens(op: Op, row: Row) -> bool:
    """Whether a row of experts shards tokens and experts: two dims of no relation, as all_to_all is between them."""
    if op.target not in EXPERTS + EXPERTS_BACKWARD:
        return False
    first = int(op.target in EXPERTS_BACKWARD)
    return row.inputs[first].is_shard(0) and row.inputs[first + 3].is_shard(0)
