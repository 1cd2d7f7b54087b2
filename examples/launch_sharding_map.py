"""A launcher that knows torch but not autoshard: it lays a module's parameters out by a sharding map, and runs it as DTensors.

    autoshard plan models/mlp.py:tiny --set loss=0 --mesh 2x2 --memory 30kB --out mlp.json
    autoshard export mlp.json --format sharding_map --out map.pkl
    torchrun --nproc-per-node 4 examples/launch_sharding_map.py map.pkl

The map is {module: {"node": ..., "sharding": {attribute: DTensorSpec}}}. It speaks of parameters: how activations lie is DTensor's choice
here, and the planned routes between them are not carried. `autoshard.parallelize` runs the whole plan.
"""

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

from models import mlp


def lay_out(module: nn.Module, sharding: dict) -> DeviceMesh:
    """Every parameter of the module as a DTensor, as the map says, on a device mesh of the plan's shape."""
    planned = next(spec.mesh for entry in sharding.values() for spec in entry["sharding"].values())
    device_mesh = init_device_mesh("cpu", tuple(planned.shape), mesh_dim_names=planned.mesh_dim_names)
    for path, entry in sharding.items():
        owner = module.get_submodule(path)
        for attribute, spec in entry["sharding"].items():
            laid = distribute_tensor(getattr(owner, attribute).detach(), device_mesh, spec.placements)
            setattr(owner, attribute, nn.Parameter(laid))
    return device_mesh


def run(path: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What the laid-out module gives and what the whole one does; and the bytes of parameters that this rank holds."""
    torch.manual_seed(0)
    module, (x,) = mlp.tiny(loss=False)
    module = module.to_empty(device="cpu").apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    x = torch.randn(x.shape)
    expected = module(x).detach()
    device_mesh = lay_out(module, pickle.loads(Path(path).read_bytes()))
    got = module(distribute_tensor(x, device_mesh, [Replicate()] * device_mesh.ndim)).full_tensor().detach()
    return got, expected, sum(p.to_local().nbytes for p in module.parameters())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    got, expected, held = run(sys.argv[1])
    print(f"rank {dist.get_rank()}: {held} bytes of parameters, off by {(got - expected).abs().max().item():.1g}")
    dist.destroy_process_group()
