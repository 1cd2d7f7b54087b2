"""Local programs of norms that add over ranks: batch norm of a sharded batch, weight norm of a weight sharded on a dim it adds over.

mean = sum over ranks of sum x / N        var = sum over ranks of sum (x - mean)^2 / N      N: elements per channel, all ranks
y    = (x - mean) / sqrt(var + eps) * w + b
x'   = w / sqrt(var + eps) * (y' - (b' + z w') / N),   z = (x - mean) / sqrt(var + eps),   b' = sum y',   w' = sum y' z

weight norm of v[o, i] sharded on i:     n = sqrt(sum over ranks of sum v^2),  w = v g / n
s = sum over ranks of sum w' v:          g' = s / n,   v' = g / n (w' - v s / n^2)

torch 2.13's norms on a CPU refuse some strides of their inputs, and read others as if they were dense: wrong numbers, and no error. So
norms run on dense tensors, with one row-major order of dims for all of them (`on_dense`), which other devices want as well.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoshard.lower.collectives import Rank, RankGenerator, all_reduce
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, local, wide

aten = torch.ops.aten


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.reshape(1, -1, *(1,) * (x.dim() - 2))


def batch_norm(rank: Rank, a: Arguments, *, axes: Axes) -> RankGenerator:
    x, dims = wide(a["input"]), [d for d in range(a["input"].dim()) if d != 1]
    count = x.new_full((1,), x.numel() // x.shape[1])
    summed = yield from all_reduce(torch.cat((x.sum(dims), count)), axes)
    total = summed[-1]
    mean = summed[:-1] / total
    centred = x - _per_channel(mean, x)
    squares = yield from all_reduce(centred.square().sum(dims), axes)
    deviation = (squares / total + a["eps"]).rsqrt()
    scale = deviation if a.get("weight") is None else deviation * a["weight"]
    y = centred * _per_channel(scale, x)
    if a.get("bias") is not None:
        y = y + _per_channel(a["bias"], x)
    m, running_mean, running_var = a["momentum"], a["running_mean"], a["running_var"]
    new_mean = running_mean * (1 - m) + (mean * m).to(running_mean.dtype)
    new_var = running_var * (1 - m) + (squares / (total - 1) * m).to(running_var.dtype)
    return y.to(a["input"].dtype), mean, deviation, new_mean, new_var


def batch_norm_backward(rank: Rank, a: Arguments, *, axes: Axes) -> RankGenerator:
    x, g = wide(a["input"]), wide(a["grad_out"])
    dims = [d for d in range(x.dim()) if d != 1]
    deviation = a["save_invstd"]
    z = (x - _per_channel(a["save_mean"], x)) * _per_channel(deviation, x)
    count = x.new_full((1,), x.numel() // x.shape[1])
    summed = yield from all_reduce(torch.cat((g.sum(dims), (g * z).sum(dims), count)), axes)
    of_bias, of_weight, total = summed[: x.shape[1]], summed[x.shape[1] : -1], summed[-1]
    scale = deviation if a.get("weight") is None else deviation * a["weight"]
    of_x = _per_channel(scale, x) * (g - (_per_channel(of_bias, x) + z * _per_channel(of_weight, x)) / total)
    wanted, dtype = a["output_mask"], deviation.dtype if a.get("weight") is None else a["weight"].dtype
    gradients = (of_x.to(a["input"].dtype), of_weight.to(dtype), of_bias.to(dtype))
    return tuple(gradient if asked else None for gradient, asked in zip(gradients, wanted, strict=True))


def on_dense(op: Callable, **a: Any) -> Any:
    """The op on contiguous tensors; those that are contiguous are not copied."""
    return op(**{name: x.contiguous() if isinstance(x, Tensor) else x for name, x in a.items()})


@local
def float_statistics(rank: Rank, a: Arguments, *, op: Callable) -> tuple[Tensor, ...]:
    """A norm of an input of 16 bits, its mean and deviation in float32 on every device, and new running statistics in the old ones' dtype,
    which torch 2.15's fake tensors of them don't have."""
    y, mean, deviation, *rest = on_dense(op, **a)
    return y, mean.float(), deviation.float(), *(new.to(a[name].dtype) for new, name in zip(rest, ("running_mean", "running_var")))


@local
def from_float_statistics(rank: Rank, a: Arguments, *, op: Callable, names: tuple[str, str]) -> tuple[Tensor, ...]:
    """Its backward. Kernels want the statistics in the dtype in which their forward returns them: on a CPU (and in group norm) that of the
    input where the weight has it too, otherwise float32."""
    x, weight = a["input"], a.get("weight")
    plain = weight is None or weight.dtype == x.dtype
    dtype = x.dtype if plain and (x.device.type == "cpu" or op is aten.native_group_norm_backward.default) else torch.float32
    return on_dense(op, **{**a, **{name: a[name].to(dtype) for name in names}})


def _statistics(sharded: ShardedOp, kernel: Callable, **options: Any) -> Kernel | None:
    """The kernel where the norm is of 16 bits; None otherwise."""
    has_16_bits = any(t is not None and t.dtype in ("bfloat16", "float16") for t in sharded.op.outputs)
    _, name, overload = sharded.op.target.split(".")
    return partial(kernel, op=getattr(getattr(aten, name), overload), **options) if has_16_bits else None


def rms_norm_backward(**a: Any) -> Any:
    """z = x r,  g = y' w:    x' = r (g - z mean(g z)),  w' = sum over rows of y' z. torch's operator has no kernel for a CPU."""
    x, weight, (of_x, of_weight) = a["input"], a["weight"], a["output_mask"]
    if x.is_cuda:
        return on_dense(aten._fused_rms_norm_backward.default, **a)
    dims = len(a["normalized_shape"])
    z, g = x * a["rstd"], a["grad_out"].to(a["rstd"].dtype)
    by_weight = (g * z).sum(list(range(z.dim() - dims))).to(x.dtype) if of_weight else None
    g = g if weight is None else g * weight
    inner = (g * z).mean(list(range(-dims, 0)), keepdim=True)
    return (a["rstd"] * (g - z * inner)).to(x.dtype).contiguous() if of_x else None, by_weight


def _dims_but(rank: int, dim: int) -> list[int]:
    return [d for d in range(rank) if d != dim % rank]


def weight_norm(rank: Rank, a: Arguments, *, axes: Axes) -> RankGenerator:
    v = wide(a["v"])
    squares = yield from all_reduce(v.square().sum(_dims_but(v.dim(), a.get("dim", 0)), keepdim=True), axes)
    norms = squares.sqrt()
    return (v * (wide(a["g"]) / norms)).to(a["v"].dtype), norms


def weight_norm_backward(rank: Rank, a: Arguments, *, axes: Axes) -> RankGenerator:
    v, grad, n = wide(a["saved_v"]), wide(a["grad_w"]), wide(a["saved_norms"])
    s = yield from all_reduce((grad * v).sum(_dims_but(v.dim(), a["dim"]), keepdim=True), axes)
    of_v = wide(a["saved_g"]) / n * (grad - v * (s / n.square()))
    return of_v.to(a["saved_v"].dtype), (s / n).to(a["saved_g"].dtype)


def _weight_norm(sharded: ShardedOp, *, of: str, kernel: Callable[..., RankGenerator]) -> Kernel:
    """Never torch's own kernel: on a CPU it reads a transposed gradient as if it were dense."""
    return partial(kernel, axes=sharded.axes_of(of, *_dims_but(sharded.ndim(of), sharded.arguments.get("dim", 0))))


def _batch_norm(sharded: ShardedOp) -> Kernel | None:
    axes = sharded.axes_of("input", 0)
    if axes and sharded.arguments["training"]:
        return partial(batch_norm, axes=axes)
    return _statistics(sharded, float_statistics)


def _batch_norm_backward(sharded: ShardedOp) -> Kernel | None:
    axes = sharded.axes_of("input", 0)
    if axes != sharded.axes_of("grad_out", 0):
        raise sharded.refuse("the gradient and the input must be sharded alike on the batch")
    if axes and sharded.arguments["train"]:
        return partial(batch_norm_backward, axes=axes)
    return _statistics(sharded, from_float_statistics, names=("save_mean", "save_invstd"))


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    "aten._weight_norm_interface.default": partial(_weight_norm, of="v", kernel=weight_norm),
    "aten._weight_norm_interface_backward.default": partial(_weight_norm, of="saved_v", kernel=weight_norm_backward),
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_layer_norm.default": partial(_statistics, kernel=float_statistics),
    "aten.native_group_norm.default": partial(_statistics, kernel=float_statistics),
    **{
        f"aten.native_{kind}_norm_backward.default": partial(_statistics, kernel=from_float_statistics, names=("mean", "rstd"))
        for kind in ("layer", "group")
    },
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"aten.native_{name}.default": partial(on_dense, getattr(aten, f"native_{name}").default)
    for name in ("layer_norm", "layer_norm_backward", "group_norm", "group_norm_backward")
} | {
    "aten._fused_rms_norm.default": partial(on_dense, aten._fused_rms_norm.default),
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
}
