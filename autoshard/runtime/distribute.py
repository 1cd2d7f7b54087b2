"""A model's parameters and buffers as DTensors on a device mesh.

A rank's shard is the one that `torch.chunk` along the mesh axes, left to right, yields for it, as in DTensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autoshard.layout import Layout, rank_shape
from autoshard.lower import shard_of_rank
from autoshard.mesh import Mesh
from autoshard.torch_private import DTensorSpec, TensorMeta


def spec_of(shape: Sequence[int], dtype: torch.dtype, layout: Layout, device_mesh: DeviceMesh) -> DTensorSpec:
    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(device_mesh, tuple(layout), tensor_meta=TensorMeta(shape, stride, dtype))


def as_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of this rank's local tensor, which must be as the spec says."""
    return DTensor(local, spec, requires_grad=False)


def distributed(tensor: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh, *, from_first_rank: bool) -> DTensor:
    """A global tensor on the mesh, in new storage. A meta tensor becomes nan (0 for integers), so that a load that was forgotten shows.

    from_first_rank: rank 0 sends its values to the others; otherwise every rank slices its own copy.
    """
    device, where = torch.device(device_mesh.device_type), tuple(device_mesh.get_coordinate() or ())
    spec = spec_of(tensor.shape, tensor.dtype, layout, device_mesh)
    if tensor.is_meta:
        shape, fill = rank_shape(tuple(tensor.shape), layout, mesh, where), torch.nan if tensor.dtype.is_floating_point else 0
        return as_dtensor(torch.full(shape, fill, dtype=tensor.dtype, device=device), spec)
    if from_first_rank:
        # a copy: distribute_tensor keeps a replicated tensor as its own storage and receives the first rank's values in it
        copied = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        return distribute_tensor(copied, device_mesh, list(layout))
    shard = shard_of_rank(tensor.detach(), layout, mesh, where)
    return as_dtensor(shard.to(device).clone(memory_format=torch.contiguous_format), spec)


def copy_with(model: nn.Module, replaced: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of the module whose parameters and buffers are replaced by name (tied ones stay tied); the model stays unchanged."""
    memo: dict[int, Any] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) not in memo:
            new = replaced(name, tensor)
            is_new = isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_new else new
    return copy.deepcopy(model, memo)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the module without storage, to be captured."""
    return copy_with(model, lambda _, tensor: torch.empty_like(tensor, device="meta"))
