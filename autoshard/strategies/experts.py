"""Rows of matmuls of tokens sorted by expert: y[s] = x[s] @ w[e], where e is the expert of token s; its tokens end at `offs[e]`.

    columns    w S(2) -> y S(1)         contraction   x S(1), w S(1) -> y P         sums   x P -> y P
    experts    w S(0) -> y P            expert parallelism: each rank multiplies the tokens of its experts, the rest of y is 0

Rows of experts as one operator (capture/experts.py); tokens are x, ids and weights, and y is sharded as they are:

    tokens S(0), experts replicated     each rank multiplies its own tokens; the gradients of the experts are Partial
    tokens S(0), experts S(0)           expert parallelism: all_to_all to the experts and back
    tokens replicated, experts S(0)     expert parallelism without all_to_all: y is P

Hidden values that are kept (graph/hidden_values.py) are S(0), S(1) and S(2) in these; a rank keeps those of t k / n_o pairs.

Batched experts (x[e, c, k] @ w[e, k, n], a bmm) need no row here: the batch dim of the bmm is the experts, and tokens go from
shards of the batch to shards of the experts by all-to-all. Local programs with sharded experts are in `lower.kernels.experts`
and `lower.kernels.expert_parallel`.

What the local program of experts works on and sends, which no local shape tells:
A pair is a token and one of its k experts of E. Tokens are assumed to choose any k experts alike; of n groups of E / n experts a token then
needs D(n), expected, and a rank of n_o, one of them on each axis that shards the experts and not the tokens, has

    D(n) = n (1 - C(E - E/n, k) / C(E, k))                           `distinct`
    pairs = t k / n_o           t: the tokens of a rank              the pairs that it sends, and that its experts get
    rows  = t D(n_o P) / n_o    P: the sizes of the axes so far      the tokens that it sends over an axis, and gets

On the busiest rank both are `Mesh.expert_imbalance` times that. Each axis that shards experts and tokens has these all_to_alls:

    forward     counts, pairs (an expert and a row, int64), weights; rows of x; rows of y, back
    backward    counts, pairs, weights; rows of x and of the gradient of y; of the gradients of weights and of x, back
"""

import math
from dataclasses import dataclass

from autoshard.graph import KEEPING, READING, Op
from autoshard.layout import Layout, P, R, S, local_shape
from autoshard.mesh import Mesh
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


EXPERTS, EXPERTS_BACKWARD = (*KEEPING, *KEEPING.values()), (*READING, *READING.values())
# y and gradients of tokens, gradients of parameters, hidden values; tokens, parameters. Each has hidden values of its own layout, so that
# forward and backward of one hidden tensor, which can't be redistributed, are sharded alike
ROWS = ((S(0), P(), S(0), S(0), R), (S(0), S(0), S(1), S(0), S(0)), (P(), S(0), S(2), R, S(0)))
EVEN_ONLY.update((*EXPERTS, *EXPERTS_BACKWARD))


@rule(*EXPERTS)
def experts(op: Op, inputs: Inputs) -> list[Row]:
    """x, ids, weights, parameters -> y, hidden."""
    parameters = len(inputs) - 3
    return [Row((y, hidden)[: len(op.outputs)], (tokens,) * 3 + (of,) * parameters) for y, _, hidden, tokens, of in ROWS]


@rule(*EXPERTS_BACKWARD)
def experts_backward(op: Op, inputs: Inputs) -> list[Row]:
    """The gradient of y, x, ids, weights, parameters, hidden -> gradients of x, weights and parameters."""
    parameters = len(op.outputs) - 2
    return [
        Row((of_tokens,) * 2 + (gradients,) * parameters, ((tokens,) * 4 + (of,) * parameters + (hidden,))[: len(inputs)])
        for of_tokens, gradients, hidden, tokens, of in ROWS
    ]


def sends_tokens(op: Op, row: Row) -> bool:
    """Whether a row of experts shards tokens and experts: two dims of no relation, as all_to_all is between them."""
    if op.target not in EXPERTS + EXPERTS_BACKWARD:
        return False
    first = int(op.target in EXPERTS_BACKWARD)
    return row.inputs[first].is_shard(0) and row.inputs[first + 3].is_shard(0)


INTEGER = 8  # bytes of an expert's number, and of a count


def is_experts(op: Op) -> bool:
    return op.target in EXPERTS or op.target in EXPERTS_BACKWARD


def _operands(op: Op, of: tuple) -> tuple:
    """x, ids, weights, up, down among the op's inputs, or their layouts."""
    return of[1:6] if op.target in EXPERTS_BACKWARD else of[:5]


def _axes(op: Op, layouts: tuple[Layout, ...], mesh: Mesh) -> tuple[list[int], list[int]]:
    """The axes over which pairs are sent, and those on which each rank has the pairs of its own experts."""
    tokens, *_, up, _ = _operands(op, layouts)
    sharded = [k for k, p in enumerate(up) if p.is_shard(0) and mesh.shape[k] > 1]
    return [k for k in sharded if tokens[k].is_shard(0)], [k for k in sharded if not tokens[k].is_shard(0)]


def distinct(n: int, num_experts: int, k: int) -> float:
    """How many of n equal groups of experts have one of the k experts of a token, expected."""
    return n * (1 - math.comb(num_experts - num_experts // n, k) / math.comb(num_experts, k))


@dataclass(frozen=True)
class _Load:
    """Of the busiest rank."""

    sent: list[int]  # axes over which tokens are sent
    pairs: int
    rows: list[int]  # tokens that are sent over each of these axes
    tokens: int  # of a rank, before


def _load(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> _Load:
    sent, own = _axes(op, layouts, mesh)
    ids, num_experts = _operands(op, inputs)[1], _operands(op, inputs)[3].shape[0]
    tokens, k = local_shape(ids.shape, _operands(op, layouts)[1], mesh)
    n_o, busy = math.prod(mesh.shape[axis] for axis in own), mesh.expert_imbalance if sent or own else 1.0
    sizes = [math.prod(mesh.shape[axis] for axis in sent[: j + 1]) for j in range(len(sent))]
    rows = [math.ceil(busy * tokens * distinct(n_o * P, num_experts, k) / n_o) for P in sizes]
    return _Load(sent, min(math.ceil(busy * tokens * k / n_o), math.prod(ids.shape)), rows, tokens)


def worked_shapes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> list[tuple[int, ...]]:
    """The local shapes of the inputs, for experts with the pairs of the busiest rank in place of ids."""
    shapes = [local_shape(t.shape, layout, mesh) for t, layout in zip(inputs, layouts, strict=True)]
    if is_experts(op):
        shapes[2 if op.target in EXPERTS_BACKWARD else 1] = (_load(op, inputs, layouts, mesh).pairs, 1)
    return shapes


def expert_passes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Bytes of copies: the busiest rank has more pairs than it keeps hidden values of, which are copied out of all, and back beside the
    others."""
    sent, own = _axes(op, layouts, mesh)
    if op.target in KEEPING or op.target in READING or not (sent or own):
        return 0
    up = _operands(op, inputs)[3]
    return 2 * _load(op, inputs, layouts, mesh).pairs * up.shape[2] * up.itemsize


def expert_collectives(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> list[tuple[str, int, int]]:
    x, _, weights, *_ = _operands(op, inputs)
    width, load = x.shape[1] * x.itemsize, _load(op, inputs, layouts, mesh)
    collectives = []
    for axis, rows in zip(load.sent, load.rows, strict=True):
        sizes = [2 * INTEGER * mesh.shape[axis], 2 * INTEGER * load.pairs, weights.itemsize * load.pairs]
        if op.target in EXPERTS:
            sizes += [rows * width, rows * width]
        else:
            sizes += [2 * rows * width, weights.itemsize * load.pairs, rows * width]
        collectives += [("all_to_all", axis, B) for B in sizes]
    return collectives


def expert_bytes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """The most bytes of temporary tensors on the busiest rank: while rows are sent, are multiplied, or their products are added up."""
    x, _, weights, up, down = _operands(op, inputs)
    load = _load(op, inputs, layouts, mesh)
    H, F, N = x.shape[1], up.shape[2], down.shape[1]
    b, wide = x.itemsize, max(x.itemsize, weights.itemsize)
    computes = op.target in KEEPING or op.target in READING or any(_axes(op, layouts, mesh))  # else hidden is an output, or an input
    rows = max(load.rows, default=load.tokens)
    adding = (load.pairs * H + rows * H) * wide + b * load.pairs * H
    if op.target in EXPERTS:  # while three copies of rows are sent, it holds no more than while it adds: there are no more rows than pairs
        return max(b * load.pairs * max(H + F * computes + 2 * N, 2 * H + N), adding)
    return max(2 * b * (load.tokens + 3 * rows) * H, b * load.pairs * (4 * H + F + F * computes + 5 * N), adding)
