"""Mixed precision on real processes: four gloo ranks run a plan, and torch's `fully_shard` with the same MixedPrecisionPolicy beside it."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import autoshard
from autoshard.capture import capture
from autoshard.exports import apply_recipe
from autoshard.lower.program import lower
from autoshard.lower.unsharded import materialized
from benchmarks.studies.peaks import TOLERANCE as OF_MEMORY
from benchmarks.studies.peaks import measured_peak
from models import gpt2, llama
from tests.helpers import fast_mesh
from tests.helpers_lower import bytes_sent
from tests.helpers_models import Model, Sent, full, losses_of, parallel, right_plan, scheme_plan
from tests.helpers_ranks import results

WORLD, BATCHES = 4, 4
MODELS = {"gpt2": gpt2, "llama": llama}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, 128, (8, 17), generator=torch.Generator().manual_seed(step % BATCHES))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


@cache
def planned(name: str, reduce: str, scheme: str, layers: int, shape: tuple[int, ...] = (WORLD,)):
    """(graph, solution) of a scheme, or of the best plan."""
    module, inputs = MODELS[name].tiny(layers=layers)
    precision = autoshard.Precision(torch.bfloat16, reduce)
    graph = capture(module, inputs, training=True, precision=precision)
    if scheme == "best":
        options = {"training": True, "precision": precision, "gap": 1e-3, "baselines": shape != (WORLD,)}
        return graph, autoshard.plan(module, inputs, fast_mesh(shape), **options)
    return graph, scheme_plan(graph, fast_mesh(shape), scheme, training=True, precision=precision)


def train(module: nn.Module, steps: int, own: slice | None = None) -> tuple[list[float], dict]:
    """Losses, and the bytes sent in the second step's forward and backward. own: this rank's rows, where the module is given those."""
    optimizer, losses, counted = torch.optim.AdamW(module.parameters(), lr=1e-3), [], Sent(WORLD)
    for step in range(steps):
        inputs = batch(step) if own is None else tuple(x[own] for x in batch(step))
        with counted if step == 1 else torch.enable_grad():
            loss = module(*inputs)
            loss.backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in module.parameters())
        optimizer.step()
        optimizer.zero_grad()
        loss = full(loss.detach()).clone()
        if own is not None:
            dist.all_reduce(loss)
            loss /= WORLD
        losses.append(loss.item())
    return losses, counted.bytes


def fully_sharded(module: nn.Module, reduce: str, device_mesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce))
    for block in [*(module.h if isinstance(module, gpt2.GPT2) else module.layers), module]:
        fully_shard(block, mesh=device_mesh, mp_policy=policy, reshard_after_forward=True)
    return module


def work(rank: int, name: str, reduce: str, steps: int, layers: int, solutions: dict) -> dict:
    device_mesh, runs = init_device_mesh("cpu", (WORLD,)), {}
    for scheme, solution in solutions.items():
        module = parallel(materialized(MODELS[name].tiny(layers=layers)[0], 0), solution)
        assert all(p.dtype == torch.float32 for p in module.parameters())
        runs[scheme] = train(module, steps)
    module = fully_sharded(materialized(MODELS[name].tiny(layers=layers)[0], 0), reduce, device_mesh)
    runs["torch"] = train(module, steps, slice(2 * rank, 2 * rank + 2))
    return runs


def compare(name: str, reduce: str, steps: int, layers: int = 2) -> None:
    plans = {scheme: planned(name, reduce, scheme, layers) for scheme in ("fsdp", "best")}
    runs = results(WORLD, work, name, reduce, steps, layers, {scheme: solution for scheme, (_, solution) in plans.items()})[0]
    losses, by_torch = runs["torch"]
    assert steps < 30 or losses[-1] < 0.95 * losses[0]
    for scheme, (graph, solution) in plans.items():
        mine, counted = runs[scheme]
        apart = max(abs(a - b) / b for a, b in zip(mine, losses, strict=True))
        predicted = predicted_bytes(graph, solution)
        measured = solution.peak_bytes / measured_peak(graph, solution)
        print(f"{name} {reduce} {scheme}: losses {apart:.1e} apart, counted {counted}, predicted {predicted}, peak {measured:.3f}")
        assert apart <= 1e-3  # bfloat16, added in other orders, also by one CPU and another
        for kind in ("all_gather", "reduce_scatter", "all_to_all"):
            total = sum(sent for (of, _), sent in counted.items() if of == kind)
            assert total == pytest.approx(predicted.get(kind, 0.0), rel=0.01)
        assert abs(measured - 1) <= OF_MEMORY
    sent = predicted_bytes(*plans["fsdp"])
    assert set(by_torch) == {("all_gather", "bfloat16"), ("reduce_scatter", reduce)}
    assert sent["reduce_scatter"] == pytest.approx(by_torch["reduce_scatter", reduce], rel=0.05)
    assert sent["all_gather"] == pytest.approx(by_torch["all_gather", "bfloat16"], rel=0.05)  # torch gathers an embedding twice


def predicted_bytes(graph, solution) -> dict[str, float]:
    """The bytes that a rank sends, by collective."""
    program = lower(graph, solution.layouts, solution.results, solution.mesh)
    return {kind: sum(sent) for kind, sent in bytes_sent(program).items()}


@pytest.mark.slow
def test_a_plan_trains_as_fully_shard_does_with_the_same_policy():
    compare("gpt2", "float32", 5, layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_thirty_steps_are_those_of_fully_shard(name, reduce):
    compare(name, reduce, 30)


def exported(rank: int, recipe: dict) -> tuple[float, float, dict]:
    """The loss of the exported recipe, of the module in float32, and the bytes that the recipe's run sends."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("axis0", "axis1"))
    alone = materialized(gpt2.tiny(layers=1)[0], 0)(*batch(0)).item()
    module = apply_recipe(recipe, materialized(gpt2.tiny(layers=1)[0], 0), device_mesh)
    half = slice(4 * (rank // 2), 4 * (rank // 2) + 4)
    with Sent(WORLD) as counted:
        loss = module(*(x[half] for x in batch(0)))
        loss.backward()
    loss = full(loss.detach()).clone()
    dist.all_reduce(loss)
    return loss.item() / WORLD, alone, counted.bytes


def test_the_fully_shard_export_carries_the_policy():
    _, solution = planned("gpt2", "float32", "best", 1, (2, 2))
    found, alone, sent = results(WORLD, exported, autoshard.export(solution, "fully_shard"))[0]
    assert found == pytest.approx(alone, rel=1e-2) and found != alone
    assert sent["reduce_scatter", "float32"] > 0 and ("all_gather", "float32") not in sent and sent["all_gather", "bfloat16"] > 0


def autocast(m, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = m.b(torch.relu(m.norm(m.a(x))))
    return nn.functional.mse_loss(out.float(), y)


def autocast_model(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return Model(autocast, a=nn.Linear(16, width), norm=nn.LayerNorm(width), b=nn.Linear(width, 16))


def autocast_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def autocast_work(rank: int, solution) -> tuple[list[float], ...]:
    models = parallel(autocast_model(), solution), autocast_model()
    return tuple(losses_of(model, torch.optim.SGD(model.parameters(), lr=0.1), [autocast_inputs()] * 4) for model in models)


def test_a_model_with_autocast_in_its_forward_is_planned_verified_and_run():
    model, inputs = autocast_model(), autocast_inputs()
    graph = capture(model, inputs, training=True)
    assert {op.output.dtype for op in graph.ops if ".mm." in op.target or "addmm" in op.target} == {"bfloat16"}
    pins = {"a.weight": "S(0)", "input_0": "S(0)"}
    solution = right_plan(model, inputs, fast_mesh((2,)), training=True, pins=pins, random=3, fault=True)
    mine, alone = results(2, autocast_work, solution)[0]
    assert mine == pytest.approx(alone, rel=5e-3) and mine[-1] < mine[0]
