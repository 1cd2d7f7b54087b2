"""Where a rank is on its mesh, and global tensors as DTensors there.

A rank's shard is the one that `torch.chunk` along the mesh axes, left to right, yields for it, as in DTensor.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoshard.layout import Layout, rank_shape
from autoshard.lower import Groups, Rank, Slot, shard_of_rank, state_of_module
from autoshard.mesh import Mesh
from autoshard.runtime.agreement import gathered
from autoshard.torch_private import DTensorSpec, TensorMeta, pytree, world


@dataclass(frozen=True, eq=False)
class Where:
    """This rank's place: a mesh, the same mesh as torch has it, and the rank's coordinate on it; () where it is not on it."""

    mesh: Mesh
    device_mesh: DeviceMesh
    coordinate: tuple[int, ...]
    group: ProcessGroup | None = None  # of the mesh's ranks; None where these are all ranks
    second: dict[int, ProcessGroup] = field(default_factory=dict)  # of mesh axes, as they are needed

    @staticmethod
    def on(mesh: Mesh, device_mesh: DeviceMesh, group: ProcessGroup | None = None) -> "Where":
        return Where(mesh, device_mesh, tuple(device_mesh.get_coordinate() or ()), group)

    @staticmethod
    def among(mesh: Mesh, ranks: Sequence[int], device_type: str, group: ProcessGroup | None = None) -> "Where":
        """This rank's place on a mesh of some ranks; every rank calls this."""
        device_mesh = DeviceMesh(device_type, torch.tensor(ranks).reshape(mesh.shape), mesh_dim_names=mesh.axis_names)
        return Where.on(mesh, device_mesh, group)

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_mesh.device_type)

    @property
    def groups(self) -> Groups:
        """The process groups of the mesh axes."""
        return replace(Groups.of(self.device_mesh), background={group.group_name: axis for axis, group in self.second.items()})

    def second_group(self, axis: int) -> str:
        """The name of another group of an axis, whose collectives don't queue behind those of the first; all its ranks call this."""
        if axis not in self.second:
            first = self.device_mesh.get_group(axis)
            of = dist.get_process_group_ranks(first), None, dist.get_backend_config(first)
            # torch names such a group by its ranks and the number of groups that this rank has, which may have made some of its own
            most = max(gathered(len(world.pg_names), "making a group", first))
            for _ in range(most - len(world.pg_names)):
                dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            self.second[axis] = dist.new_group(*of, use_local_synchronization=True)
        return self.second[axis].group_name

    @cached_property
    def position(self) -> list[Tensor]:
        """The coordinate as 0-d tensors, the last inputs of every graph."""
        return [torch.tensor(c, device=self.device) for c in self.coordinate]

    @property
    def rank(self) -> Rank:
        return Rank(self.mesh, tuple(self.position), self.coordinate)

    def local_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        return rank_shape(shape, layout, self.mesh, self.coordinate)

    def shard(self, tensor: Tensor, layout: Layout) -> Tensor:
        """This rank's shard of a global tensor, on the mesh's devices."""
        return shard_of_rank(tensor, layout, self.mesh, self.coordinate).to(self.device).resolve_conj().resolve_neg().contiguous()

    def local(self, tensor: Tensor, layout: Layout) -> Tensor:
        """This rank's shard of a global tensor, which may be a DTensor of another layout."""
        if isinstance(tensor, DTensor):
            return tensor.redistribute(placements=list(layout)).to_local()
        return self.shard(tensor, layout)

    def zeros(self, slot: Slot) -> Tensor:
        return torch.zeros(slot.shape_on(self.rank.number), dtype=getattr(torch, slot.dtype), device=self.device)

    def dtensor(self, local: Tensor, shape: Sequence[int], layout: Layout) -> DTensor:
        """A DTensor of this global shape, of which this rank's shard is `local`."""
        return as_dtensor(local, spec_of(shape, local.dtype, layout, self.device_mesh))

    def distributed(self, tensor: Tensor, layout: Layout, *, from_first_rank: bool) -> DTensor:
        """A global tensor as a DTensor, in new storage. A meta tensor becomes nan (0 for integers), so that a forgotten load shows.

        from_first_rank: rank 0 sends its values to the others; otherwise every rank slices its own copy.
        """
        if tensor.is_meta:
            shape, fill = self.local_shape(tuple(tensor.shape), layout), torch.nan if tensor.dtype.is_floating_point else 0
            return self.dtensor(torch.full(shape, fill, dtype=tensor.dtype, device=self.device), tensor.shape, layout)
        if from_first_rank:
            # a copy: distribute_tensor keeps a replicated tensor as its own storage and receives the first rank's values in it
            copied = tensor.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
            return distribute_tensor(copied, self.device_mesh, list(layout))
        shard = shard_of_rank(tensor.detach(), layout, self.mesh, self.coordinate)
        return self.dtensor(shard.to(self.device).clone(memory_format=torch.contiguous_format), tensor.shape, layout)

    def placed(self, value: Tensor, held: Tensor) -> Tensor:
        """A global tensor, or a DTensor of another mesh, in the layout of a parameter or buffer; other DTensors stay as they are."""
        if isinstance(value, DTensor) and isinstance(held, DTensor) and value.device_mesh != held.device_mesh:
            value = value.full_tensor()  # torch copies none from mesh to mesh
        if isinstance(value, DTensor) or not isinstance(held, DTensor) or value.shape != held.shape:
            return value
        return self.dtensor(self.shard(value, tuple(held.placements)), value.shape, tuple(held.placements))


def spec_of(shape: Sequence[int], dtype: torch.dtype, layout: Layout, device_mesh: DeviceMesh) -> DTensorSpec:
    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(device_mesh, tuple(layout), tensor_meta=TensorMeta(shape, stride, dtype))


def as_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of this rank's local tensor, which must be as the spec says."""
    return DTensor(local, spec, requires_grad=False)


def local(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor; another tensor itself."""
    return x._local_tensor if isinstance(x, DTensor) else x


def versions(x: Tensor) -> tuple[int, int]:
    """An operator on a DTensor counts in its own version alone, one on its shard in that of the shard."""
    return x._version, local(x)._version


@cache  # once for all modules
def count_steps() -> None:
    """From now on an optimizer's step changes the versions of the shards that it updates: torch's foreach and fused kernels change none."""

    def count(optimizer: Optimizer, *_: object) -> None:
        updated = (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor) and p.grad is not None)
        torch.autograd.graph.increment_version([local(p) for p in updated])

    register_optimizer_step_post_hook(count)


def copy_with(model: nn.Module, replaced: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of the module whose parameters and buffers are replaced by name (tied ones stay tied); the model stays unchanged."""
    held = (x for part in model.modules() for x in pytree.tree_leaves(vars(part)) if isinstance(x, Tensor) and not x.is_leaf)
    memo: dict[int, Any] = {id(x): x.detach() for x in held}  # results of a former forward, which can't be copied
    for name, tensor in state_of_module(model).items():
        if id(tensor) not in memo:
            new = replaced(name, tensor)
            is_new = isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_new else new
    return copy.deepcopy(model, memo)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the module without storage, to be captured."""
    return copy_with(model, lambda _, tensor: torch.empty_like(tensor, device="meta"))
