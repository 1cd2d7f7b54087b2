"""Our own rows for matmuls with a bias, embeddings, softmax and losses, for which torch has no rows or has worse ones.

Matmuls with a bias: torch needs a Partial bias when the contraction dim is sharded; here the bias is replicated and added once.
Losses: of torch's rows for nll_loss only the replicated one can be used, and a plan of GPT-2 is then 1.96x slower; here the batch or
the classes can be sharded. With sharded classes the local program needs small reductions (`internal.py` lists them).
"""

from autoshard.graph import BACKWARD, FORWARD, Op, Tensor
from autoshard.layout import Layout, P, Placement, R, S, local_shape
from autoshard.mesh import Mesh
from autoshard.strategies.rows import Inputs, Row, argument, row, rule

# the dims of the factors and of the output, by letters; a bias, where there is one, is the first input
PRODUCTS = {
    "aten.addmm.default": "mk,kn->mn", "aten.baddbmm.default": "bmk,bkn->bmn", "aten.addbmm.default": "bmk,bkn->mn",
    "aten.addr.default": "m,n->mn", "aten.addmv.default": "mk,k->m", "aten.mv.default": "mk,k->m", "aten.vdot.default": "i,i->",
}  # fmt: skip


@rule(*PRODUCTS)
def product(op: Op, inputs: Inputs) -> list[Row]:
    """One row per letter: those that are summed over first, then those of the output in their order."""
    left, out = PRODUCTS[op.target].split("->")
    factors = left.split(",")
    bias, rows = inputs[: len(inputs) - len(factors)], []
    for letter in dict.fromkeys([*(x for x in left if x not in "," + out), *out]):
        places = [S(factor.index(letter)) if letter in factor else R for factor in factors]
        if letter in out:
            d = out.index(letter)
            rows.append(row(S(d), *(_of_bias(t, d - len(out)) for t in bias), *places))
        else:
            rows.append(row(P(), *(R for _ in bias), *places))
    return rows if bias else [*rows, row(P(), P(), R), row(P(), R, P())]


def _of_bias(bias: Tensor, dim: int) -> Placement:
    """The placement of a bias when dim `dim` (counted from the end) of the output is sharded: replicated where the bias is broadcast."""
    has = len(bias.shape) >= -dim and bias.shape[dim] > 1
    return S(len(bias.shape) + dim) if has else R


@rule("aten._trilinear.default")
def trilinear(op: Op, inputs: Inputs) -> list[Row]:
    """The product of three tensors, each with dims of size 1 inserted at its places, summed along some dims, which are removed."""
    inserted, summed = op.literals[0][3:6], op.literals[0][6]
    rank = len(inputs[0].shape) + len(inserted[0])
    rows = [Row((P(),), tuple(P() if k == linear else R for k in range(3))) for linear in range(3)]
    for d in range(rank):
        places = [None if d in new else d - sum(e < d for e in new) for new in inserted]
        sizes = [1 if k is None else t.shape[k] for k, t in zip(places, inputs, strict=True)]
        out = P() if d in summed else S(d - sum(e < d for e in summed))
        rows.append(Row((out,), tuple(S(k) if k is not None and n > 1 else R for k, n in zip(places, sizes, strict=True))))
    return [r for r in rows if any(p != R for p in r.inputs)]


@rule("aten.embedding_renorm.default")
def embedding_renorm(op: Op, inputs: Inputs) -> list[Row]:
    """weight with the rows that indices name scaled down to a norm."""
    return [row(S(0), S(0), R)]


@rule("aten.embedding.default")
def embedding(op: Op, inputs: Inputs) -> list[Row]:
    """out[..., h] = weight[ids[...], h]; with the vocabulary sharded, the results of masked look-ups add up."""
    rank = len(inputs[1].shape)
    sharded_ids = [row(S(d), R, S(d)) for d in range(rank)]
    return [row(S(rank), S(1), R), row(P(), S(0), R), *sharded_ids]


@rule("aten.embedding_dense_backward.default")
def embedding_backward(op: Op, inputs: Inputs) -> list[Row]:
    """out[v, h] = sum of grad[..., h] where ids[...] == v"""
    rank = len(inputs[1].shape)
    if argument(op, 4, "scale_grad_by_freq", False):
        return []
    return [row(S(1), S(rank), R), row(S(0), R, R), *(row(P(), S(d), S(d)) for d in range(rank)), row(P(), P(), R)]


SOFTMAXES = ("aten._log_softmax", "aten._softmax")


@rule("aten._safe_softmax.default", *(f"{name}{way}.default" for name in SOFTMAXES for way in ("", "_backward_data")))
def softmax(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(inputs[0].shape)
    local_only = op.target == "aten._safe_softmax.default"  # there is no local program for a sharded softmax dim
    dims = [d for d in range(rank) if not (local_only and d == int(argument(op, 1, "dim")) % rank)]
    return [row(S(d), *[S(d)] * len(inputs)) for d in dims]


@rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss(op: Op, inputs: Inputs) -> list[Row]:
    """loss = -sum over n of w_n logp[n, target_n] / sum of w_n (mean), w_n = 0 where the target is ignored; n may be several dims."""
    if len(inputs[0].shape) == 1:
        return []
    none, weighted = argument(op, 3, "reduction") == 0, argument(op, 2, "weight") is not None
    more = (R,) if weighted else ()  # input 2: a weight per class, replicated
    rows = [row((S(n) if none else P(), R), S(d), S(n), *more) for d, n in _places(inputs[0])]
    return rows if weighted else [*rows, row((P(), R), S(1), R)]


@rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(op: Op, inputs: Inputs) -> list[Row]:
    if len(inputs[1].shape) == 1:
        return []
    none = argument(op, 4, "reduction") == 0
    weights = (R,) * (len(inputs) - 3)  # the weights, if there are any, and their total
    rows = [row(S(d), S(n) if none else R, S(d), S(n), *weights) for d, n in _places(inputs[1])]
    rows.append(row(P(), P(), R, R, *weights))
    return rows if argument(op, 3, "weight") is not None else [*rows, row(S(1), R, S(1), R, *weights)]


def _places(scores: Tensor) -> list[tuple[int, int]]:
    """(dim of the scores, dim of the targets) of all dims but the classes."""
    return [(d, max(d - 1, 0)) for d in range(len(scores.shape)) if d != 1]


# target: (position of the first of the two tensors, of the weights per element or -1, of the reduction)
LOSSES = {
    **{f"aten.{name}_loss.default": (0, -1, 2) for name in ("mse", "smooth_l1", "huber", "soft_margin")},
    **{f"aten.{name}_loss_backward.default": (1, -1, 3) for name in ("mse", "smooth_l1", "huber", "soft_margin")},
    "aten.binary_cross_entropy.default": (0, 2, 3),
    "aten.binary_cross_entropy_with_logits.default": (0, 2, 4),
    "aten.binary_cross_entropy_backward.default": (1, 3, 4),
}


@rule(*LOSSES)
def loss_per_element(op: Op, inputs: Inputs) -> list[Row]:
    """Of two tensors of one shape; with weights per element or class only the replicated row remains."""
    first, weights, at_reduction = LOSSES[op.target]
    x, y = inputs[first], inputs[first + 1]
    if x.shape != y.shape or (weights >= 0 and argument(op, weights) is not None) or len(inputs) != first + 2:
        return []
    none, dims = argument(op, at_reduction, "reduction", 1) == 0, range(len(x.shape))
    if first:
        return [row(S(d), S(d) if none else R, S(d), S(d)) for d in dims]
    return [row(S(d) if none else P(), S(d), S(d)) for d in dims]


@rule("autoshard.ctc_loss.default")
def ctc_loss(op: Op, inputs: Inputs) -> list[Row]:
    """log_probs [T, N, C], targets, lengths -> losses, log_alpha: the batch, where targets are padded."""
    return [row((S(0), S(0)), S(1), *[S(0)] * 3)] if len(inputs[1].shape) == 2 else []


@rule("autoshard.ctc_loss_backward.default")
def ctc_loss_backward(op: Op, inputs: Inputs) -> list[Row]:
    """Gradient of the losses, then as above, losses, log_alpha -> gradient of log_probs."""
    batch = [row(S(1), S(0), S(1), *[S(0)] * 5)] if len(inputs[2].shape) == 2 else []
    return [*batch, row(P(), P(), *[R] * 6)]


WEIGHT_NORM, WEIGHT_NORM_BACKWARD = "aten._weight_norm_interface.default", "aten._weight_norm_interface_backward.default"


@rule(WEIGHT_NORM)
def weight_norm(op: Op, inputs: Inputs) -> list[Row]:
    """w[o, i] = g[o] v[o, i] / n[o],  n[o] = |v[o]|, for each o of a dim; v sharded on another dim adds up the squares of all ranks."""
    rank = len(inputs[0].shape)
    dim = int(argument(op, 2, "dim", 0)) % rank
    return [row((S(d), S(d)), S(d), S(d)) if d == dim else row((S(d), R), S(d), R) for d in range(rank)]


@rule(WEIGHT_NORM_BACKWARD)
def weight_norm_backward(op: Op, inputs: Inputs) -> list[Row]:
    """Gradient of w, v, g and n -> gradients of v and g."""
    rank = len(inputs[0].shape)
    dim = int(argument(op, 4, "dim")) % rank
    rows = [row((S(d), S(d)), *[S(d)] * 4) if d == dim else row((S(d), R), S(d), S(d), R, R) for d in range(rank)]
    return [*rows, row((P(), P()), P(), R, R, R)]


# -- the cross entropy in chunks of tokens (`graph.chunked_loss`): its rows, what its ranks tell each other, the logits that they hold -----

WIDE = 4  # bytes per element: logits are cast to float32
HELD = 2  # tensors of a chunk's logits at a time


@rule(FORWARD)
def chunked_loss(op: Op, inputs: Inputs) -> list[Row]:
    """x [t, h], weight [h, v], targets [t] -> loss, total weight, logsumexp [t]: tokens sharded, or classes."""
    return [row((P(), R, S(0)), S(0), R, S(0)), row((P(), R, R), R, S(1), R)]


@rule(BACKWARD)
def chunked_loss_backward(op: Op, inputs: Inputs) -> list[Row]:
    """Gradient of the loss, x, weight, targets, total weight, logsumexp -> gradients of x and of the transposed weight [v, h]."""
    return [
        row((S(0), P()), R, S(0), R, S(0), R, S(0)),
        row((P(), S(0)), R, R, S(1), R, R, R),
        row((P(), P()), P(), R, R, R, R, R),
    ]


def loss_collectives(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> list[tuple[str, int, int]]:
    """Of the forward: maximum and sum of the logsumexp over shards of the classes, the total weight over shards of the tokens."""
    if op.target != FORWARD:
        return []
    (tokens,) = local_shape(inputs[2].shape, layouts[2], mesh)
    of_classes = [("all_reduce", k, tokens * WIDE) for k, p in enumerate(layouts[1]) if p.is_shard(1) for _ in range(2)]
    return [*of_classes, *(("all_reduce", k, WIDE) for k, p in enumerate(layouts[0]) if p.is_shard(0))]


def loss_bytes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Logits of a chunk; in the backward the most of those beside the sum of the weight's gradient in float32, of their gradient beside
    that sum and a chunk's, and of the sum beside the output. The output counts by itself, and isn't there before."""
    first = int(op.target == BACKWARD)
    (tokens, width), (_, classes) = (local_shape(inputs[k].shape, layouts[k], mesh) for k in (first, first + 1))
    rows = int(argument(op, 8 if first else 5, "rows"))
    logits, product, size = min(rows, tokens) * classes, width * classes, inputs[first].itemsize
    if not first:
        return HELD * WIDE * logits
    sums = WIDE * product * (tokens > rows)
    return max(HELD * WIDE * logits + sums, size * (logits + product) + sums, (WIDE + size) * product * (size < WIDE)) - size * product
