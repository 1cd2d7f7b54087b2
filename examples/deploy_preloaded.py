"""Plan once, deploy often: the compiler pipeline where the model is served reads the plan, and solves nothing.

    python examples/deploy_preloaded.py plan.json       # the first time: plans and writes it
    python examples/deploy_preloaded.py plan.json       # from then on: reads it

The file belongs beside the code. A model whose ops or shapes the layouts don't fit is refused, with a sentence that says which.
"""

import sys
from pathlib import Path

import torch
from torch import fx, nn

import autoshard

CLUSTER = {"mesh_shape": (2, 4), "intra_node_bandwidth": 300e9, "inter_node_bandwidth": 50e9}


class Head(nn.Module):
    def __init__(self, width: int, classes: int):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x)).softmax(-1)


def sharded(path: Path, batch: int = 4096, width: int = 1024, classes: int = 32768) -> tuple[fx.GraphModule, dict]:
    """The annotated graph, from the plan in `path` where there is one. ValueError where the layouts in it do not fit."""
    with torch.device("meta"):
        head, inputs = Head(width, classes), (torch.empty(batch, width),)
    preload = path.exists()
    return autoshard.autosharding_pass(
        fx.symbolic_trace(head), example_inputs=inputs, preload_solution=preload, ilp_solution_file=str(path), **CLUSTER
    )


if __name__ == "__main__":
    graph, info = sharded(Path(sys.argv[1]))
    print(f"{info['status']}, {info['cost_seconds'] * 1e3:.3f} ms per call; planning took {info['autosharding_time']:.2f} s")
    for node in graph.graph.nodes:
        if "autoshard" in node.meta:
            print(f"{node.name:>8}: {node.meta['autoshard'].placements}")
    try:
        sharded(Path(sys.argv[1]), batch=1)
    except ValueError as error:
        print(f"with a batch of 1: {error}")
