"""Plans with microbatches on real gloo ranks: losses as in one process, and the bytes that are sent and held as planned."""

from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.api import autosharding_pass
from autoshard.lower.unsharded import materialized
from models import gpt2, mlp
from tests.helpers import fast_mesh, tiny_graph
from tests.helpers_ranks import results
from tests.test_zero_stages import formulas, used  # noqa: F401  (the formulas of the literature)

SHAPE, M, STEPS = (2, 2), 4, 20
SCHEMES = ("data_parallel", "zero1", "zero2", "zero3", "hsdp")
BUILDERS = {"mlp": lambda: mlp.tiny(batch=8), "gpt2": lambda: gpt2.tiny(batch=4, vocab=64, layers=1)}
c10d = torch.ops._c10d_functional


@cache
def planned(name: str, scheme: str, **settings):
    module, inputs = BUILDERS[name]()
    options = {"example_inputs": inputs, "training": True, "ilp_solution_file": None, "mesh_shape": SHAPE}
    return autosharding_pass(module, algo=scheme, microbatches=M, **options)[1]["solution"]


def batch(name: str, step: int) -> tuple[torch.Tensor, ...]:
    """The examples of all microbatches of a step."""
    generator = torch.Generator().manual_seed(step)
    shapes = [(M * x.shape[0], *x.shape[1:]) for x in BUILDERS[name]()[1]]
    if name == "mlp":
        return tuple(torch.randn(shape, generator=generator) for shape in shapes)
    return tuple(torch.randint(0, 64, shape, generator=generator) for shape in shapes)


def build(name: str) -> torch.nn.Module:
    return materialized(BUILDERS[name]()[0], 0)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)


def alone(rank: int, name: str, steps: int) -> list[float]:
    module = build(name)
    optimizer, losses = adamw(module), []
    for step in range(steps):
        loss = module(*batch(name, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Sent(TorchDispatchMode):
    """Bytes that this rank sends, by collective, as formulas count them: all-reduces 2 (n - 1)/n x, others (n - 1)/n of the larger side."""

    def __init__(self, ranks: int):
        super().__init__()
        self.bytes, self.ranks = 0.0, ranks

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if packet in (c10d.all_reduce, c10d.reduce_scatter_tensor, c10d.all_gather_into_tensor, c10d.all_gather_into_tensor_out):
            size = max(x.numel() * x.element_size() for x in (args[0], output))
            self.bytes += (2 if packet is c10d.all_reduce else 1) * (self.ranks - 1) / self.ranks * size
        return output


def step_of(module, optimizer, given) -> float:
    total = 0.0
    for inputs in module.microbatches(given):
        loss = module(*inputs) / M
        loss.backward()
        total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(rank: int, name: str, solution, steps: int) -> tuple[list[float], float, float]:
    """Losses; bytes sent in a step; bytes held at most in a step."""
    device_mesh = init_device_mesh("cpu", SHAPE)
    module = autoshard.parallelize(build(name), solution, device_mesh)
    optimizer = adamw(module)
    losses = [step_of(module, optimizer, batch(name, step)) for step in range(steps)]
    with Sent(SHAPE[0]) as counted:
        step_of(module, optimizer, batch(name, 0))
    held = sum(p.to_local().numel() * p.element_size() for p in module.parameters())
    states = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, DTensor)]
    held += sum(s.to_local().numel() * s.element_size() for s in states)
    given = batch(name, 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step_of(module, optimizer, given)
    now = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return losses, counted.bytes, held + peak


def test_losses_with_zero1_and_microbatches_are_those_of_one_process():
    expected = results(1, alone, "mlp", 4)[0]
    for losses, *_ in results(4, train, "mlp", planned("mlp", "zero1"), 4):
        assert losses == pytest.approx(expected, rel=1e-5)
