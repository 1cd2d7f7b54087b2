"""Reinforcement learning in small (GRPO): generate with a cache, score by a rule, train; two programs on one set of weights.

    torchrun --nproc-per-node 4 examples/grpo_loop.py     # and `python examples/grpo_loop.py`: the same losses in one process
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))  # the models live beside the package, not in it

import autoshard
from autoshard import Mesh, Program
from autoshard.lower.unsharded import materialized
from models import llama

SAMPLES, LENGTH, STEPS = 8, 6, 4


class Policy(llama.Llama):
    def forward(self, tokens, targets, advantages):
        losses = F.cross_entropy(super().forward(tokens).float().flatten(0, 1), targets.flatten(), reduction="none")
        return (losses.view_as(tokens) * advantages[:, None]).mean()


def loop(policy, decoder, switched):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(STEPS):
        generator, tokens = torch.Generator().manual_seed(step), torch.zeros(SAMPLES, 1, dtype=torch.int64)
        with torch.no_grad(), switched("generate"):
            for k in range(LENGTH):
                logits = decoder(tokens[:, -1:], torch.tensor([k]))
                logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
                tokens = torch.cat([tokens, torch.multinomial(logits[:, 0].softmax(-1), 1, generator=generator)], 1)
        rewards = (tokens[:, 1:] % 2 == 0).float().mean(1)  # even tokens are good ones
        loss = policy(tokens[:, :-1], tokens[:, 1:], (rewards - rewards.mean()) / (rewards.std() + 1e-6))
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}: reward {rewards.mean():.4f}, loss {loss.item():.6f}", flush=True)


with torch.device("meta"):
    batch = (*torch.empty(2, SAMPLES, LENGTH, dtype=torch.int64), torch.empty(SAMPLES))
    token = (torch.empty(SAMPLES, 1, dtype=torch.int64), torch.empty(1, dtype=torch.int64))
    policy = Policy(layers=1, heads=8, kv_heads=4, width=64, hidden=128, vocab=64, theta=5e5)
policy = materialized(policy, 0)
models = {"train": policy, "generate": llama.with_cache(policy, SAMPLES, LENGTH)}
if "RANK" not in os.environ:
    loop(*models.values(), lambda name: nullcontext())
else:
    two = {"train": Program(policy, batch, training=True), "generate": Program(models["generate"], token, weight=LENGTH)}
    plan = autoshard.plan(two, Mesh.from_bandwidths((4,)))
    model = autoshard.parallelize(models, plan, autoshard.device_mesh(plan))
    loop(model, model, model.switched)
