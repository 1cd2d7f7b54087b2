"""The MLPs of the experts that a rank has (capture/experts.py), on rows that are sorted by expert, forward and backward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autoshard.lower.kernels.experts import aligned_grouped_mm
from autoshard.lower.literals import overload


@dataclass(frozen=True)
class Parameters:
    """Of the experts of a rank. up [e, H, F], down [e, I, H], biases [e, F] and [e, H] or None."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str

    @staticmethod
    def of(tensors: Sequence[Tensor], activation: str) -> Parameters:
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
    """The activation on rows of hidden values."""
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
    with torch.enable_grad():
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


def multiply(rows: Tensor, ids: Tensor, own: Parameters) -> Tensor:
    """Rows [s, H], sorted by their local experts ids [s], through the MLPs of these."""
    ends = own.ends(ids)
    out = _grouped(activate(own.activation, _hidden(rows, ids, ends, own)), own.down, ends)
    return out if own.down_bias is None else out + own.down_bias[ids]


def multiply_backward(grad: Tensor, rows: Tensor, weights: Tensor, ids: Tensor, own: Parameters) -> tuple[Tensor, ...]:
    """Gradients of rows [s, H], of weights [s], and of the parameters, from those of the weighted outputs, [s, H]."""
    ends = own.ends(ids)
    hidden = _hidden(rows, ids, ends, own)
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
