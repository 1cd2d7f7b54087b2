"""A plan as a backend of torch.compile: every graph is planned, lowered and run on the ranks, with global tensors in and out.

    torchrun --nproc-per-node 4 examples/compile_backend.py

For inference. The model's parameters keep their names, so that pins and the plan's text speak of them.
"""

import torch
import torch.distributed as dist

import autoshard
from models import gpt2

MESH = autoshard.Mesh.from_bandwidths((2, 2), device="cpu", intra_node_bandwidth=10e9, inter_node_bandwidth=1e9, intra_node_latency=1e-7)


def logits_of(mesh: autoshard.Mesh = MESH) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of the planned model and of the plain one."""
    torch.manual_seed(0)
    model = gpt2.GPT2(layers=2, heads=4, width=64, positions=32, vocab=128).eval()
    tokens = torch.randint(128, (8, 32))
    compiled = torch.compile(model, backend=autoshard.backend(mesh, pins={"h.*.mlp.c_fc.weight": "R,S(0)"}))
    with torch.no_grad():
        return compiled(tokens), model(tokens)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    planned, plain = logits_of()
    if dist.get_rank() == 0:
        print(f"logits {tuple(planned.shape)}, largest difference {(planned - plain).abs().max():.1e}")
    dist.destroy_process_group()
