"""Layouts of the parameters by module, as DTensorSpecs for a launcher, or by name as plain JSON.

    {"h.0.attn.c_attn": {"node": "h.0.attn.c_attn.weight", "sharding": {"weight": DTensorSpec, "bias": DTensorSpec}}}

A launcher distributes each attribute with its spec's placements on its own device mesh. The root module's parameters are under "".

Layouts as types of spmd_types, which torchtitan's and Megatron's code is checked with:

    S(dim)    V on the axis; at dim the PartitionSpec names it, the slower axis first where several shard one dim
    R         R: all ranks hold the same; a graph without autograd has no other kind of equal values (I)
    P         P: a sum that is still to be made; other reductions have no type
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from autoshard.exports.record import Export, Left, sent_tokens
from autoshard.layout import Layout, parse, text
from autoshard.mesh import Mesh
from autoshard.solution import Solution
from autoshard.torch_private import DTensorSpec, TensorMeta

LEFT = (Left("layouts of activations, and routes between them", "this speaks of parameters; whoever reads it decides the rest"),)


def sharding_map(solution: Solution, device_mesh: DeviceMesh | None = None) -> Export:
    """`{module: {"node": its first parameter, "sharding": {attribute: DTensorSpec}}}` with one entry per parameter.

    device_mesh: the mesh of the specs. By default it is a mesh of the plan's shape without process groups: its specs can be read,
    compared and pickled, but nothing can run on it. ValueError where the mesh has another shape than the plan's, or a parameter has a
    dtype that this torch lacks.
    """
    device_mesh = unbacked_mesh(solution.mesh) if device_mesh is None else device_mesh
    if tuple(device_mesh.shape) != solution.mesh.shape:
        raise ValueError(
            f"the device mesh has shape {tuple(device_mesh.shape)}, but the plan is for {solution.mesh.shape}; plan again for it"
        )
    modules: dict[str, dict] = {}
    for name, row in solution.parameters.items():
        module, _, attribute = name.rpartition(".")
        entry = modules.setdefault(module, {"node": name, "sharding": {}})
        dtype = getattr(torch, row["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"parameter {name!r} has dtype {row['dtype']!r}, which this torch {torch.__version__} lacks; plan again")
        entry["sharding"][attribute] = spec_of(row["shape"], dtype, parse(row["layout"]), device_mesh)
    return Export(modules, left=LEFT + sent_tokens(solution), plan_seconds=solution.cost)


def unbacked_mesh(mesh: Mesh) -> DeviceMesh:
    """A DeviceMesh of this shape without processes."""
    with torch.device("cpu"):  # whatever the caller's default device is
        ranks = torch.arange(mesh.num_devices).reshape(mesh.shape)
        return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.axis_names, _init_backend=False, _rank=0)


def spec_of(shape: Sequence[int], dtype: torch.dtype, layout: Layout, device_mesh: DeviceMesh) -> DTensorSpec:
    """The spec of a contiguous tensor."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(device_mesh, layout, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def as_text(sharding: dict[str, dict]) -> dict[str, dict]:
    """The same map with each spec as layout text."""
    texts = {key: {name: text(spec.placements) for name, spec in entry["sharding"].items()} for key, entry in sharding.items()}
    return {module: {"node": entry["node"], "sharding": texts[module]} for module, entry in sharding.items()}


def portable(solution: Solution) -> Export:
    """Plain data for tools without torch: the mesh, and per parameter its layout and placements, one per mesh axis."""
    parameters = {}
    for name, row in solution.parameters.items():
        known = {"layout": row["layout"], "placements": [_placement(p) for p in parse(row["layout"])]}
        parameters[name] = {**known, "shape": list(row["shape"]), "dtype": row["dtype"]}
    mesh = {"shape": list(solution.mesh.shape), "axis_names": list(solution.mesh.axis_names)}
    return Export({"format": 1, "mesh": mesh, "parameters": parameters}, left=LEFT + sent_tokens(solution), plan_seconds=solution.cost)


def _placement(placement: Placement) -> str | dict:
    if isinstance(placement, Shard):
        return {"shard": placement.dim}
    return {"partial": placement.reduce_op} if isinstance(placement, Partial) else "replicate"


@cache
def _package() -> Any:
    """None where it isn't installed."""
    try:
        import spmd_types
    except ImportError:
        return None
    return spmd_types


def spmd_type(layout: Layout, axes: Sequence[str], dims: int) -> Any:
    """The SpmdType of a local tensor of so many dims on axes of these names; None where it has none, or the package isn't installed."""
    if (spmd := _package()) is None or any(p.is_partial() and not p.is_partial("sum") for p in layout):
        return None
    sharded = [tuple(axis for axis, p in zip(axes, layout, strict=True) if p.is_shard(dim)) for dim in range(dims)]
    local = {axis: spmd.V if p.is_shard() else spmd.P if p.is_partial() else spmd.R for axis, p in zip(axes, layout, strict=True)}
    return spmd.SpmdType(local, spmd.PartitionSpec(*(of if len(of) > 1 else of[0] if of else None for of in sharded)))
