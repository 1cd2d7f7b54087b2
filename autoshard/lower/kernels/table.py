"""Local programs of ops that are not the plain op on local tensors.

A cut of a vocabulary or of classes: a rank whose part begins at s and has v indices holds the ids [s, s + v), so an id is local
as `id - s`, and outside when that is negative or >= v.

    embedding           out = w[id - s], 0 where outside                                          -> Partial
    embedding backward  rows of outside ids are dropped
    log_softmax         m = max over ranks of max x;  s = sum over ranks of sum e^(x - m);  x - m - log s
    ... backward        g - e^y (sum over ranks of sum g);       softmax:  (g - sum over ranks of sum g y) y
    nll_loss            loss = - sum_n w_n y[n, t_n] / W,  W = sum over batch ranks of sum_n w_n  -> Partial (classes: 0 where outside)
    matmul with bias    the bias is added by the first rank of the axes that cut the contraction  -> Partial
    mean, mse_loss      the local mean times (local count / whole count)                          -> Partial

A row of KERNELS looks at how the op is laid and says which axes need it; no axes: the plain op. A kernel is a generator
(collectives.py); its arguments come by the names of the op's schema, tensors local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from autoshard.graph import Op, is_dense
from autoshard.layout import Layout
from autoshard.lower.collectives import Asking, Rank, all_reduce
from autoshard.lower.kernels import dropout, experts, lookups, norms, recurrent
from autoshard.lower.kernels.local_inputs import Arguments, Axes, Kernel, ShardedOp, local, localised, wide
from autoshard.lower.literals import by_name, overload
from autoshard.mesh import Mesh

aten = torch.ops.aten
MEAN = 1  # of torch's reduction argument: 0 none, 1 mean, 2 sum


# -- look-ups ----------------------------------------------------------------------------------------------------------------


@local
def embedding(rank: Rank, a: Arguments, *, axes: Axes, words: int) -> Tensor:
    ids, outside = localised(a["indices"], rank, axes, words, a["weight"].shape[0])
    return aten.embedding.default(a["weight"], ids.masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), 0)


@local
def embedding_backward(rank: Rank, a: Arguments, *, axes: Axes, words: int) -> Tensor:
    size = a["num_weights"]
    ids, outside = localised(a["indices"], rank, axes, words, size)
    dropped = ids.masked_fill(outside | (a["indices"] == a["padding_idx"]), size)  # row `size` is cut off again
    return aten.embedding_dense_backward.default(a["grad_output"], dropped, size + 1, -1, a["scale_grad_by_freq"])[:size]


# -- softmax and loss --------------------------------------------------------------------------------------------------------


def softmax(rank: Rank, a: Arguments, *, axes: Axes, log: bool) -> Asking:
    x, dim = wide(a["self"]), a["dim"]
    m = yield from all_reduce(x.amax(dim, keepdim=True), axes, "max")
    z = x - m if log else (x - m).exp()  # one tensor is kept: strategies.internal_bytes counts them
    s = yield from all_reduce((z.exp() if log else z).sum(dim, keepdim=True), axes)
    y = z - s.log() if log else z / s
    return y if a["half_to_float"] else y.to(a["self"].dtype)


def softmax_backward(rank: Rank, a: Arguments, *, axes: Axes, log: bool) -> Asking:
    g, y, dim = wide(a["grad_output"]), wide(a["output"]), a["dim"]
    s = yield from all_reduce((g if log else g * y).sum(dim, keepdim=True), axes)
    return (g - y.exp() * s if log else (g - s) * y).to(a["input_dtype"])


def nll_loss(rank: Rank, a: Arguments, *, batch: Axes, classes: Axes, num_classes: int) -> Asking:
    y, t, reduction = a["self"], a["target"], a["reduction"]
    ignored = t == a["ignore_index"]
    if a.get("weight") is None:
        w = (~ignored).to(y.dtype)
    else:
        w = a["weight"][t.masked_fill(ignored, 0)].masked_fill(ignored, 0)
    t, outside = localised(t, rank, classes, num_classes, y.shape[1])
    unseen = outside | ignored
    losses = -(y.gather(1, t.masked_fill(unseen, 0).unsqueeze(1)).squeeze(1) * w).masked_fill(unseen, 0)
    if reduction == 0:
        return losses, w.new_zeros(())
    total = yield from all_reduce(w.sum(), batch)
    return (losses.sum() / total if reduction == MEAN else losses.sum()), total


@local
def nll_loss_backward(rank: Rank, a: Arguments, *, target: str, classes: Axes, num_classes: int) -> Tensor:
    t, outside = localised(a["target"], rank, classes, num_classes, a["self"].shape[1])
    unseen = outside | (a["target"] == a["ignore_index"])
    return overload(target)(**{**a, "target": t.masked_fill(unseen, -100), "ignore_index": -100})


# -- sums that add something once, means ----------------------------------------------------------------------------------------


@local
def bias_once(rank: Rank, a: Arguments, *, target: str, bias: str, axes: Axes) -> Tensor:
    return overload(target)(**{**a, bias: torch.where(rank.is_first(axes), a[bias], 0)})


@local
def scaled(rank: Rank, a: Arguments, *, target: str, dims: tuple[int, ...], count: int) -> Tensor:
    """count: of the whole tensor along `dims`."""
    return overload(target)(**a) * (math.prod(a["self"].shape[d] for d in dims) / count)


# -- which op needs which ----------------------------------------------------------------------------------------------------


def _embedding(laid: ShardedOp) -> Kernel | None:
    axes = laid.cutting("weight", 0)
    return partial(embedding, axes=axes, words=laid.shape("weight")[0]) if axes else None


def _embedding_backward(laid: ShardedOp) -> Kernel | None:
    out = laid.outputs[0] or ()
    axes = tuple(k for k, p in enumerate(out) if isinstance(p, Shard) and p.dim == 0)
    return partial(embedding_backward, axes=axes, words=laid.op.output.shape[0]) if axes else None


def _softmax(laid: ShardedOp, *, log: bool) -> Kernel | None:
    axes = laid.cutting("self", laid.arguments["dim"])
    return partial(softmax, axes=axes, log=log) if axes else None


def _softmax_backward(laid: ShardedOp, *, log: bool) -> Kernel | None:
    axes = laid.cutting("output", laid.arguments["dim"])
    if axes != laid.cutting("grad_output", laid.arguments["dim"]):
        raise laid.refuse("the gradient and the output must be cut alike along the softmax")
    return partial(softmax_backward, axes=axes, log=log) if axes else None


def _batch_and_classes(laid: ShardedOp) -> tuple[Axes, Axes]:
    batched = laid.ndim("self") >= 2
    others = [d for d in range(laid.ndim("self")) if d != 1] if batched else []
    classes = laid.cutting("self", 1 if batched else 0)
    batch = laid.cutting("self", *others) if batched else ()
    if batch != (laid.cutting("target", *(max(d - 1, 0) for d in others)) if batched else ()):
        raise laid.refuse("scores and targets must be cut alike along the batch")
    if classes and (laid.layout("weight") is not None or not batched):
        raise laid.refuse("a cut of the classes is possible for a batch without class weights only")
    return batch, classes


def _nll_loss(laid: ShardedOp) -> Kernel | None:
    batch, classes = _batch_and_classes(laid)
    return partial(nll_loss, batch=batch, classes=classes, num_classes=_num_classes(laid)) if batch or classes else None


def _nll_loss_backward(laid: ShardedOp) -> Kernel | None:
    _, classes = _batch_and_classes(laid)
    return partial(nll_loss_backward, target=laid.op.target, classes=classes, num_classes=_num_classes(laid)) if classes else None


def _num_classes(laid: ShardedOp) -> int:
    shape = laid.shape("self")
    return shape[1] if len(shape) > 1 else shape[0]


def _bias_once(laid: ShardedOp, *, bias: str) -> Kernel | None:
    out, given = laid.outputs[0] or (), laid.layout(bias) or ()
    axes = tuple(k for k, (o, b) in enumerate(zip(out, given)) if isinstance(o, Partial) and isinstance(b, Replicate))
    return partial(bias_once, target=laid.op.target, bias=bias, axes=axes) if axes else None


def _scaled_along(laid: ShardedOp, dims: Iterable[int]) -> Kernel | None:
    """Parts of a mean along `dims`: divided by the whole count. Partial(avg) wants the local means as they are."""
    out, given, shape = laid.outputs[0] or (), laid.layout("self") or (), laid.shape("self")
    averaged = {p.dim for o, p in zip(out, given) if isinstance(p, Shard) and isinstance(o, Partial) and o.reduce_op == "avg"}
    counted = {d % len(shape) for d in dims} - averaged if shape else set()
    cut = tuple(d for d in sorted(counted) if laid.cutting("self", d))
    return partial(scaled, target=laid.op.target, dims=cut, count=math.prod(shape[d] for d in cut)) if cut else None


@local
def reshaped(rank: Rank, a: Arguments) -> Tensor:
    return a["self"].reshape(a["size"])


@local
def strided(rank: Rank, a: Arguments) -> Tensor:
    """By position and not by storage: the tensor, which came from elsewhere, may be a part of a larger one."""
    places = torch.full((), a.get("storage_offset") or 0, device=a["self"].device)
    for n, step in zip(a["size"], a["stride"], strict=True):
        places = places.unsqueeze(-1) + torch.arange(n, device=places.device) * step
    return a["self"].reshape(-1)[places]


@local
def put_all(rank: Rank, a: Arguments) -> Tensor:
    return a["src"].reshape(a["self"].shape).clone()


@local
def put_strided(rank: Rank, a: Arguments) -> Tensor:
    return aten.as_strided_scatter.default(**{**a, "self": a["self"].clone(memory_format=torch.contiguous_format)})


def _as_strided(laid: ShardedOp) -> Kernel:
    return reshaped if _is_all(laid) else strided


def _as_strided_scatter(laid: ShardedOp) -> Kernel:
    return put_all if _is_all(laid) else put_strided


def _is_all(laid: ShardedOp) -> bool:
    return is_dense(laid.shape("self"), laid.arguments["size"], laid.arguments["stride"], laid.arguments.get("storage_offset"))


def _mean(laid: ShardedOp) -> Kernel | None:
    return _scaled_along(laid, laid.arguments.get("dim") or range(laid.ndim("self")))


def _loss_mean(laid: ShardedOp) -> Kernel | None:
    return _scaled_along(laid, range(laid.ndim("self"))) if laid.arguments.get("reduction", MEAN) == MEAN else None


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._log_softmax.default": partial(_softmax, log=True),
    "aten._softmax.default": partial(_softmax, log=False),
    "aten._log_softmax_backward_data.default": partial(_softmax_backward, log=True),
    "aten._softmax_backward_data.default": partial(_softmax_backward, log=False),
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
    "aten.addmm.default": partial(_bias_once, bias="self"),
    "aten.addmv.default": partial(_bias_once, bias="self"),
    "aten.baddbmm.default": partial(_bias_once, bias="self"),
    "aten.addbmm.default": partial(_bias_once, bias="self"),
    "aten.linear.default": partial(_bias_once, bias="bias"),
    "aten.convolution.default": partial(_bias_once, bias="bias"),
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.mse_loss.default": _loss_mean,
    "aten.mse_loss_backward.default": _loss_mean,
    "aten.smooth_l1_loss.default": _loss_mean,
    "aten.smooth_l1_loss_backward.default": _loss_mean,
    "aten.huber_loss.default": _loss_mean,
    "aten.huber_loss_backward.default": _loss_mean,
    "aten.soft_margin_loss.default": _loss_mean,
    "aten.soft_margin_loss_backward.default": _loss_mean,
    "aten.binary_cross_entropy.default": _loss_mean,
    "aten.binary_cross_entropy_backward.default": _loss_mean,
    "aten.binary_cross_entropy_with_logits.default": _loss_mean,
    **lookups.KERNELS,
    **norms.KERNELS,
    **experts.KERNELS,
    **dropout.KERNELS,
    **recurrent.KERNELS,
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_scatter.default": _as_strided_scatter,
}


def kernel_for(
    op: Op, shapes: tuple[tuple[int, ...], ...], inputs: tuple[Layout, ...], outputs: tuple[Layout | None, ...], mesh: Mesh
) -> Kernel | None:
    """The local program of an op with these layouts; None when it is the op itself. ValueError when there is none.

    shapes: of the whole inputs.
    """
    choose = KERNELS.get(op.target)
    if choose is None:
        return None
    return choose(ShardedOp(op, by_name(op), shapes, inputs, outputs, mesh))
