"""The sharding pass inside a compiler pipeline: trace, shard, then a pass of your own that reads the annotations.

    python examples/compiler_pipeline.py

Every tensor node carries `node.meta["autoshard"]`, a DTensorSpec of what it gives: which dims are cut over which mesh axis. The pass below
counts what each device holds. In which layouts an op reads its operands, and so where collectives are, is in the solution, op by op.
"""

import torch
from torch import fx, nn

import autoshard


class MLP(nn.Module):
    def __init__(self, width: int = 512):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def local_bytes(graph: fx.GraphModule) -> dict[str, int]:
    """Bytes of every tensor on one device."""
    held = {}
    for node in graph.graph.nodes:
        spec = node.meta.get("autoshard")
        if spec is not None and not isinstance(spec, tuple):
            parts = [size for size, p in zip(spec.mesh.shape, spec.placements, strict=True) if p.is_shard()]
            held[node.name] = spec.shape.numel() * spec.tensor_meta.dtype.itemsize // torch.Size(parts).numel()
    return held


def pipeline(module: nn.Module, inputs: tuple) -> tuple[fx.GraphModule, dict]:
    graph = fx.symbolic_trace(module)  # 1. trace
    graph, info = autoshard.autosharding_pass(  # 2. shard: annotates the nodes, gives the map of parameters
        graph,
        mesh_shape=(2, 4),
        inter_node_bandwidth=25e9,
        intra_node_bandwidth=300e9,
        example_inputs=inputs,
    )
    return graph, info


if __name__ == "__main__":
    graph, info = pipeline(MLP(), (torch.empty(4096, 512, device="meta"),))
    print(f"{info['status']}: {info['cost_seconds']:.3g} s per call, proven at least {info['bound_seconds']:.3g} s")
    for module, entry in info["tensor_sharding_map"].items():
        print(module, {name: spec.placements for name, spec in entry["sharding"].items()})
    for name, size in local_bytes(graph).items():  # 3. whatever comes next reads node.meta
        print(f"{name:>12} {size:>10} bytes on each device")
    for name, placed in info["solution"].layouts.items():  # by the names of the ATen ops that were captured
        print(f"{name:>12} reads {' and '.join(map(str, placed.inputs)) or 'nothing'}, gives {', '.join(map(str, placed.outputs))}")
