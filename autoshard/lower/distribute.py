"""Tensors onto a device mesh: parameters as DTensors under their own names, inputs as this rank's parts.

A rank's part is what `torch.chunk` along the axes, left to right, gives it: DTensor's own convention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autoshard.layout import Layout, rank_bounds, rank_shape
from autoshard.mesh import Mesh


def spec_of(shape: Sequence[int], dtype: torch.dtype, layout: Layout, device_mesh: DeviceMesh) -> DTensorSpec:
    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(device_mesh, tuple(layout), tensor_meta=TensorMeta(shape, stride, dtype))


def as_dtensor(part: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of this rank's part, which must be as the spec says."""
    return DTensor(part, spec, requires_grad=False)


def part_of(whole: Tensor, layout: Layout, mesh: Mesh, where: tuple[int, ...]) -> Tensor:
    """This rank's part of a tensor that it holds whole; a view."""
    for dim, (begin, end) in enumerate(rank_bounds(tuple(whole.shape), layout, mesh, where)):
        whole = whole.narrow(dim, begin, end - begin) if end - begin != whole.shape[dim] else whole
    return whole


def distributed(whole: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh, *, from_first_rank: bool) -> DTensor:
    """The tensor on the mesh, in storage of its own. A meta tensor becomes nan (0 for integers), so that a forgotten load is seen.

    from_first_rank: what rank 0 holds counts and is sent to the others; else every rank takes its part of its own copy.
    """
    device, where = torch.device(device_mesh.device_type), tuple(device_mesh.get_coordinate() or ())
    if whole.is_meta:
        shape, fill = rank_shape(tuple(whole.shape), layout, mesh, where), torch.nan if whole.dtype.is_floating_point else 0
        return as_dtensor(torch.full(shape, fill, dtype=whole.dtype, device=device), spec_of(whole.shape, whole.dtype, layout, device_mesh))
    if from_first_rank:
        # a copy: distribute_tensor keeps what it is given where it is replicated, and receives the first rank's values in it
        copied = whole.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        return distribute_tensor(copied, device_mesh, list(layout))
    part = part_of(whole.detach(), layout, mesh, where).to(device).clone(memory_format=torch.contiguous_format)
    return as_dtensor(part, spec_of(whole.shape, whole.dtype, layout, device_mesh))


def copy_with(model: nn.Module, replaced: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of the module whose parameters and buffers are replaced by name (tied ones stay tied); the model is left as it is."""
    memo: dict[int, Any] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) not in memo:
            new = replaced(name, tensor)
            memo[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return copy.deepcopy(model, memo)


def on_meta(model: nn.Module) -> nn.Module:
    """The module without storage, to be captured."""
    return copy_with(model, lambda _, tensor: torch.empty_like(tensor, device="meta"))
