"""Pipelines of tiny models on four devices, and the same training in one process."""

import copy
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.mesh import Device
from models import gpt2, llama

SMALL = Device("small", flops=1e12, flops32=1e12, memory_bandwidth=1e11, memory=8e9)
CLUSTER = autoshard.Cluster.of(4, devices_per_node=2, device=SMALL, intra_node_bandwidth=5e9, inter_node_bandwidth=5e8)
MODELS = {"gpt2": gpt2, "llama": llama}
VOCAB, LR = 64, 3e-3


def model_of(name, layers):
    """The model with weights, and its inputs on meta."""
    torch.manual_seed(0)
    model, inputs = MODELS[name].tiny(layers=layers, vocab=VOCAB, batch=8)
    return gpt2.initialised(model), inputs


@cache
def planned(name, layers, *, stages, schedule="1f1b", microbatches=4, **options):
    model, inputs = MODELS[name].tiny(layers=layers, vocab=VOCAB, batch=8)
    options = {"grid": False, **options}
    return autoshard.plan(model, inputs, CLUSTER, microbatches=(microbatches,), schedules=(schedule,), stages=stages, **options)


def batch_of(step, inputs):
    """Three batches in turn, so that the loss falls."""
    rows, columns = inputs[0].shape
    tokens = torch.randint(0, VOCAB, (rows, columns + 1), generator=torch.Generator().manual_seed(step % 3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-6)  # without noise from gradients that are zero but for rounding


def in_one_process(model, inputs, steps, microbatches):
    """Losses and norms of gradients of the unsharded model, and its parameters afterwards."""
    model = copy.deepcopy(model)
    optimizer, rows = optimizer_of(model), []
    for step in range(steps):
        loss = 0.0
        for part in zip(*(x.chunk(microbatches) for x in batch_of(step, inputs))):
            one = model(*part) / microbatches
            one.backward()
            loss += one.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss, norm.item()))
    return rows, model.state_dict()


def as_pipeline(model, inputs, plan, schedule=None):
    device_mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = autoshard.parallelize(model, plan, device_mesh, example_inputs=inputs, schedule=schedule)
    return sharded, optimizer_of(sharded)


def train(model, optimizer, inputs, steps):
    rows = []
    for step in steps:
        loss = model.step(*batch_of(step, inputs))
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    return rows


def whole(model):
    """This rank's parameters and buffers, gathered over the devices of their stages."""
    return {name: x.full_tensor() for name, x in model.state_dict().items()}


def apart(rows, others):
    """The largest relative difference of losses and norms."""
    return max(abs(a - b) / abs(a) for row, other in zip(rows, others, strict=True) for a, b in zip(row, other, strict=True))


class Drops(nn.Module):
    """Layers with dropout and noise."""

    def __init__(self, layers=4, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3)) for _ in range(layers))

    def forward(self, x, target):
        for layer in self.layers:
            x = x + layer(x) * torch.rand_like(x)
        return nn.functional.mse_loss(x, target)


@cache
def dropping():
    torch.manual_seed(0)
    model, inputs = Drops(), (torch.randn(8, 8), torch.randn(8, 8))
    return model, inputs, autoshard.plan(model, inputs, CLUSTER, microbatches=(2,), schedules=("1f1b",), stages=2, grid=False)


class Shares(nn.Module):
    """Layers behind one layer and one gain that all share; what it returns beside its loss is differentiable too."""

    def __init__(self, layers=4, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.shared, self.gain = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x, target):
        for layer in self.layers:
            x = x + layer(self.shared(x).relu() * self.gain)
        loss = nn.functional.mse_loss(x, target)
        return {"loss": loss, "logits": x, "twice": loss * 2}


@cache
def sharing():
    torch.manual_seed(0)
    model, inputs = Shares().double(), (torch.randn(8, 8).double(), torch.randn(8, 8).double())
    cluster = autoshard.Cluster.of(2, device=SMALL)
    return model, inputs, autoshard.plan(model, inputs, cluster, microbatches=(2,), schedules=("1f1b",), stages=2, grid=False)
