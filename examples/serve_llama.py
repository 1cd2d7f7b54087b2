"""Serve a Llama with tensor parallelism: plan, export as Hugging Face's `tp_plan`, load with it, answer a prompt.

    torchrun --nproc-per-node 2 examples/serve_llama.py [FOLDER]

FOLDER holds a saved LlamaForCausalLM; without one a tiny model with random weights is made. Runs on gloo and CPUs.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import autoshard

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}


def tp_plan(folder: str, ranks: int) -> dict[str, str]:
    """What from_pretrained needs, from a plan for one token sequence at a time, each device holding half of the weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, use_cache=False)).eval()
        tokens = torch.empty(1, 32, dtype=torch.int64)
    mesh = autoshard.Mesh.from_bandwidths((ranks,), device="cpu", intra_node_latency=1e-7)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    solution = autoshard.plan(model, {"input_ids": tokens}, mesh, memory_limit=0.8 * weights + 2e5)
    return autoshard.export(solution, "tp_plan", within=float("inf"))  # a tiny model's step may take much longer in these styles


def tiny_llama() -> str:
    """Made by rank 0; all ranks get its folder."""
    folder = [tempfile.mkdtemp(prefix="tiny-llama-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=128, **TINY)).save_pretrained(folder[0])
    dist.barrier()
    return folder[0]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = sys.argv[1] if len(sys.argv) > 1 else tiny_llama()
    plan = tp_plan(folder, dist.get_world_size())  # the same on every rank
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan=dict(plan))).eval()
    tokens, cache = torch.tensor([[1, 7, 42]]), DynamicCache()
    with torch.no_grad():
        for _ in range(8):
            new = tokens if cache.get_seq_length() == 0 else tokens[:, -1:]
            logits = model(new, past_key_values=cache, use_cache=True).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    if dist.get_rank() == 0:
        print(*plan.said, sep="\n")
        print("tokens", tokens[0].tolist())
    dist.destroy_process_group()
