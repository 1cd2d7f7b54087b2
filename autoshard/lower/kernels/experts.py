"""Local programs of grouped matmuls whose experts are sharded: a rank multiplies the tokens of its own experts.

Tokens are sorted by expert; those of experts [s, s + v) are the rows [first, last), first = offs[s - 1], last = offs[s + v - 1].
A cyclic shift by `first` rows brings them to the front, so that the ends of the local groups are offs - first. The rows behind the
last group are set to 0. No size here depends on data.

The MLPs of the experts that a rank has (capture/experts.py) work on rows that are sorted by expert, forward and backward.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, autograd, local
from autoshard.lower.literals import overload

aten = torch.ops.aten


def aligned_grouped_mm(self: Tensor, mat2: Tensor, *options: Any, **named: Any) -> Tensor:
    """torch's grouped matmul, of operands whose rows begin at multiples of 16 bytes, as it needs them."""
    return aten._grouped_mm.default(_aligned(self), _aligned(mat2), *options, **named)


def _aligned(x: Tensor) -> Tensor:
    unit = 16 // x.element_size()
    if 1 in x.stride()[-2:] and all(step % unit == 0 for step in x.stride() if step != 1):
        return x
    return F.pad(x, (0, -x.shape[-1] % unit)).contiguous().narrow(-1, 0, x.shape[-1])


FUNCTIONS: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": aligned_grouped_mm}


def _function(target: str) -> Callable[..., Any]:
    return FUNCTIONS[target] if target in FUNCTIONS else overload(target)


def _own_groups(rank: Rank, axes: Axes, offs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The first row of this rank's experts, and the ends of their groups counted from there."""
    ends = torch.cat((offs.new_zeros(1), offs))
    at = rank.start(axes, offs.shape[0])
    first = ends.index_select(0, at.reshape(1))
    return first, ends.index_select(0, at + 1 + torch.arange(num_experts, device=offs.device)) - first


def _shifted(x: Tensor, by: Tensor, dim: int = 0) -> Tensor:
    """A cyclic shift: row i of the result is row i + by of x."""
    size = x.shape[dim]
    return x.index_select(dim, (torch.arange(size, device=x.device) + by) % size)


def _without_rest(x: Tensor, ends: Tensor) -> Tensor:
    """Sets the rows behind the last group to 0, which torch's kernels leave uninitialised."""
    behind = torch.arange(x.shape[0], device=x.device) >= ends[-1]
    return x.masked_fill(behind.unsqueeze(-1), 0)


@local
def grouped_mm(rank: Rank, a: Arguments, *, target: str, x: str, w: str, axes: Axes) -> Tensor:
    first, ends = _own_groups(rank, axes, a["offs"], a[w].shape[0])
    products = _function(target)(**{**a, x: _shifted(a[x], first), "offs": ends})
    return _shifted(_without_rest(products, ends), -first)


@local
def weight_gradient(rank: Rank, a: Arguments, *, target: str, num_experts: int, axes: Axes) -> Tensor:
    """x'[k, s] @ g[s, n] for each expert, s the tokens. num_experts: on all ranks together."""
    first, ends = _own_groups(rank, axes, a["offs"], rank.length(axes, num_experts))
    shifted = {"self": _shifted(a["self"], first, 1), "mat2": _shifted(a["mat2"], first), "offs": ends}
    return _function(target)(**{**a, **shifted})


@local
def grouped_mm_backward(rank: Rank, a: Arguments, *, target: str, axes: Axes) -> Any:
    first, ends = _own_groups(rank, axes, a["offs"], a["weight"].shape[0])
    x, g = _shifted(a["input"], first), _shifted(a["grad_output"], first)
    x_grad, w_grad = overload(target)(x, a["weight"], ends, g)
    return _shifted(_without_rest(x_grad, ends), -first), w_grad


def _grouped_mm(sharded: ShardedOp, *, x: str, w: str) -> Kernel | None:
    if sharded.layout("offs") is None:
        return None
    if sharded.ndim(w) == 3:
        axes = sharded.axes_of(w, 0)
        return partial(grouped_mm, target=sharded.op.target, x=x, w=w, axes=axes) if axes else None
    axes = sharded.output_axes(0)
    if not axes:
        return None
    return partial(weight_gradient, target=sharded.op.target, num_experts=sharded.op.output.shape[0], axes=axes)


def _grouped_mm_backward(sharded: ShardedOp) -> Kernel | None:
    axes = sharded.axes_of("weight", 0)
    return partial(grouped_mm_backward, target=sharded.op.target, axes=axes) if axes else None


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    "aten._grouped_mm.default": partial(_grouped_mm, x="self", w="mat2"),
    "transformers.grouped_mm_fallback.default": partial(_grouped_mm, x="input", w="weight"),
    "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
}


@dataclass(frozen=True)
class Parameters:
    """Of the experts of a rank. up [e, H, F], down [e, I, H], biases [e, F] and [e, H] or None."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str

    @staticmethod
    def of(tensors: Sequence[Tensor], activation: str) -> "Parameters":
        up, down, up_bias, down_bias = (*tensors, None, None)[:4]
        assert up is not None and down is not None
        return Parameters(up, down, up_bias, down_bias, activation)  # type: ignore[arg-type]

    def ends(self, ids: Tensor) -> Tensor:
        """Where the rows of each expert end; ids are sorted."""
        return torch.searchsorted(ids, torch.arange(self.up.shape[0], device=ids.device), right=True).to(torch.int32)


@cache
def _calls(activation: str) -> tuple[tuple[str, list, dict], ...]:
    return tuple((name, arguments, named) for name, arguments, named in json.loads(activation))


def activate(activation: str, x: Tensor) -> Tensor:
    values: list[Any] = [x]

    def filled(item: Any) -> Any:
        if isinstance(item, list):
            return [filled(part) for part in item]
        return values[int(item[1:])] if isinstance(item, str) and item[:1] == "$" else item

    for name, arguments, named in _calls(activation):
        if name == "getitem":
            values.append(filled(arguments[0])[arguments[1]])
        else:
            values.append(overload(name)(*filled(arguments), **{key: filled(item) for key, item in named.items()}))
    return values[-1]


torch.library.define("autoshard::activation_backward", "(Tensor grad, Tensor x, str activation) -> Tensor")


@torch.library.register_fake("autoshard::activation_backward")
def _(grad, x, activation):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@torch.library.impl("autoshard::activation_backward", "CompositeExplicitAutograd")
def _(grad, x, activation):  # type: ignore[no-untyped-def]
    """The gradient of x from that of its activation, as one op: autograd has no place in a graph that is traced."""
    with autograd():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(activate(activation, x), x, grad)
    return gradient


def _grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Each row by the matrix of its expert; rows may be none."""
    return aligned_grouped_mm(x, w, ends) if x.shape[0] else x.new_zeros(0, w.shape[-1])


def _summed(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """For each expert the product x' y over its rows: (s, m), (s, n) -> (e, m, n)."""
    if not x.shape[0]:
        return x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    return aligned_grouped_mm(x.t(), y, ends).contiguous()


def _hidden(rows: Tensor, ids: Tensor, ends: Tensor, own: Parameters) -> Tensor:
    hidden = _grouped(rows, own.up, ends)
    return hidden if own.up_bias is None else hidden + own.up_bias[ids]


def _kept(hidden: Tensor, count: int) -> Tensor:
    """The first rows of hidden values, so many whatever the routing is: 0 behind those of a rank with fewer, a copy where it has more."""
    if hidden.shape[0] > count:
        return hidden[:count].clone()
    return F.pad(hidden, (0, 0, 0, count - hidden.shape[0])) if hidden.shape[0] < count else hidden


def _completed(kept: Tensor, rows: Tensor, ids: Tensor, own: Parameters) -> Tensor:
    """The hidden values of all rows; those of rows beyond the kept ones are computed again."""
    count, rest = kept.shape[0], ids[kept.shape[0] :]
    if rows.shape[0] <= count:
        return kept[: rows.shape[0]]
    return torch.cat([kept, _hidden(rows[count:], rest, own.ends(rest), own)])


def multiply(rows: Tensor, ids: Tensor, own: Parameters, kept: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Rows [s, H], sorted by their local experts ids [s], through the MLPs of these; and the hidden values of the first `kept` rows."""
    ends = own.ends(ids)
    hidden = _hidden(rows, ids, ends, own)
    active, hidden = activate(own.activation, hidden), None if kept is None else _kept(hidden, kept)  # type: ignore[assignment]
    out = _grouped(active, own.down, ends)
    del active
    return out if own.down_bias is None else out + own.down_bias[ids], hidden


def multiply_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, ids: Tensor, own: Parameters, kept: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Gradients of rows [s, H], of weights [s], and of the parameters, from those of the weighted outputs, [s, H], and the hidden values
    that are kept."""
    ends = own.ends(ids)
    hidden = _hidden(rows, ids, ends, own) if kept is None else _completed(kept, rows, ids, own)
    active = activate(own.activation, hidden)
    through = _grouped(grad, own.down.transpose(1, 2), ends)
    grad_weights = (through * active).sum(1, dtype=weights.dtype)
    weighted = (grad * weights.unsqueeze(1)).to(grad.dtype)
    grad_hidden = torch.ops.autoshard.activation_backward((through * weights.unsqueeze(1)).to(active.dtype), hidden, own.activation)
    grad_up, grad_down = _summed(rows, grad_hidden, ends), _summed(active, weighted, ends)
    grad_rows = _grouped(grad_hidden, own.up.transpose(1, 2), ends)
    if own.down_bias is None:
        return grad_rows, grad_weights, grad_up, grad_down
    ones = rows.new_ones(rows.shape[0], 8)  # as many as a matmul's rows in memory need
    biases = [_summed(ones, x, ends)[:, 0] for x in (grad_hidden, weighted)]
    return grad_rows, grad_weights + (grad * own.down_bias[ids]).sum(1, dtype=weights.dtype), grad_up, grad_down, *biases
