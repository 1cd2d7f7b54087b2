"""A model run by its plan on real gloo ranks against the same model in one process: curves, gradients, checkpoints, faults."""

import copy
import math
import os
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard.lower.fx_program import boxed
from autoshard.lower.unsharded import materialized
from autoshard.runtime.agreement import RankLost
from autoshard.runtime.module import ParallelModule
from models import gpt2, mlp
from tests.helpers import fast_mesh
from tests.helpers_models import Model, gradients_of, losses_of, parallel
from tests.helpers_ranks import results, run_ranks

TEXT = (Path(__file__).parent.parent / "README.md").read_bytes()
BATCH, SEQ = 8, 16
STEPS, SAVED_AT = 4, 2
c10d = torch.ops._c10d_functional


def build(layers: int = 1) -> nn.Module:
    """GPT-2 over bytes, the same weights everywhere."""
    return materialized(gpt2.tiny(vocab=256, layers=layers)[0], 0)


@cache
def planned(shape: tuple[int, ...], training: bool = True, loss: bool = True):
    module, inputs = gpt2.tiny(vocab=256, layers=1, loss=loss)
    return autoshard.plan(module, inputs, fast_mesh(shape), training=training, baselines=False, objective="serial")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Real text, a function of the step."""
    begins = torch.randint(0, len(TEXT) - SEQ - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = torch.tensor([list(TEXT[b : b + SEQ + 1]) for b in begins.tolist()])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3)


@cache
def alone() -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """In one process: loss by step; gradients of batch 0, and of batches 0 and 1 together."""
    return results(1, _alone)[0]  # in a process of its own: a process that has run backward() can't be forked


def _alone(rank: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    module, gradients = build(), []
    for step in range(2):
        module(*batch(step)).backward()
        gradients.append(copy.deepcopy(gradients_of(module)))
    module.zero_grad()
    return losses_of(module, adamw(module), map(batch, range(STEPS))), gradients


def train(rank: int, solution, begin: int, end: int, folder: str, resume: bool) -> tuple[list[float], dict]:
    module = parallel(build(), solution)
    calls = {} if resume else kinds_of_call(module, solution)
    optimizer = adamw(module)
    if resume:
        begin = autoshard.load_checkpoint(folder, module, optimizer)["step"]
    losses = losses_of(module, optimizer, map(batch, range(begin, end)))
    if not resume:
        autoshard.save_checkpoint(folder, module, optimizer, extra={"step": end})
    facts = {
        "names": [name for name, _ in module.named_parameters()],
        "dtensors": all(isinstance(p, DTensor) for p in module.parameters()),
        "layouts": {name: autoshard.layout.text(p.placements) for name, p in module.named_parameters()},
        "is_a": isinstance(module, gpt2.GPT2) and isinstance(module, ParallelModule),
        "calls": calls,
    }
    return losses, facts


def close(found, expected) -> bool:
    return len(found) == len(expected) and all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(found, expected))


# -- gradients, inputs, outputs ----------------------------------------------------------------------------------------------------


def error(found: dict, expected: dict) -> float:
    return max(float((found[name] - g).abs().max() / g.abs().max().clamp(min=1e-4)) for name, g in expected.items())


def kinds_of_call(module: nn.Module, solution) -> dict:
    """What whole, local and distributed inputs, two micro-batches and a call without gradients give."""
    device_mesh, inputs, found = next(module.parameters()).device_mesh, batch(0), {}
    layouts = [autoshard.layout.parse(solution.layouts[f"input_{k}"].outputs[0]) for k in range(2)]
    spread = [distribute_tensor(x, device_mesh, list(layout)) for x, layout in zip(inputs, layouts)]
    other = [distribute_tensor(x, device_mesh, [Shard(1), Shard(0)][: device_mesh.ndim]) for x in inputs]
    loaded = [autoshard.layout.parse(written) for written in module.input_layouts.values()]
    parts = tuple(distribute_tensor(x, device_mesh, list(layout)).to_local() for x, layout in zip(inputs, loaded))
    shards = module.shard_inputs(parts, local=True)
    for kind, given in (("whole", inputs), ("dtensor", spread), ("local", shards), ("other layout", other)):
        module(*given).backward()
        found[kind] = gradients_of(module)
        module.zero_grad()
    module(*inputs).backward()
    module(*batch(1)).backward()
    found["accumulated"] = gradients_of(module)
    with torch.no_grad():
        found["no_grad"] = module(*inputs).item()
    loss = module(*inputs)
    module.zero_grad()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as again:
        found["twice"] = str(again)
    module.zero_grad()
    found["timeline"] = module.timeline()
    return found


def check_calls(found: dict) -> None:
    losses, (first, both) = alone()
    for kind in ("whole", "dtensor", "local", "other layout"):
        assert error(found[kind], first) < 1e-5, kind
    assert error(found["accumulated"], both) < 1e-5
    assert found["no_grad"] == pytest.approx(losses[0], rel=1e-5)
    assert "call the module again" in found["twice"]
    assert "forward" in found["timeline"] and "backward" in found["timeline"]


@pytest.mark.parametrize(("shape", "later"), [((2,), (1,)), pytest.param((2, 2), (2,), marks=pytest.mark.slow)])
def test_calls_of_all_kinds_and_training_resumed_on_fewer_ranks_give_what_one_process_gives(shape, later, tmp_path):
    folder, solution = str(tmp_path / "saved"), planned(shape)
    assert any("S" in row["layout"] for row in solution.parameters.values())
    done = results(math.prod(shape), train, solution, 0, SAVED_AT, folder, False)
    for losses, facts in done:
        assert close(losses, alone()[0][:SAVED_AT])
        assert facts["names"] == [name for name, _ in build().named_parameters()]
        assert facts["dtensors"] and facts["is_a"]
        check_calls(facts["calls"])
        assert facts["layouts"] == {name: row["layout"] for name, row in solution.parameters.items()}
    for losses, _ in results(math.prod(later), train, planned(later), None, STEPS, folder, True):
        assert close(losses, alone()[0][SAVED_AT:])
    assert sorted(os.listdir(tmp_path)) == ["saved"]  # nothing half-written beside it


# -- faults ------------------------------------------------------------------------------------------------------------------------


def perceptron(**sizes) -> nn.Module:
    return materialized(mlp.tiny(**sizes)[0], 0)


@cache
def planned_mlp():
    return autoshard.plan(*mlp.tiny(), fast_mesh((2, 2)), training=True, baselines=False, objective="serial")


def faults(rank: int, solution, folder: str) -> dict[str, str]:
    """The error of each fault; the last one kills rank 3 between forward and backward."""
    found, longest, given = {}, [0.0], [torch.randn(16, 32, generator=torch.Generator().manual_seed(k)) for k in range(2)]

    def attempt(name: str, do) -> None:
        began = time.monotonic()
        try:
            do()
        except (ValueError, RankLost) as raised:
            found[name] = str(raised)
        longest[0] = max(longest[0], time.monotonic() - began)

    def tried(name: str, *args) -> None:
        attempt(name, lambda: autoshard.parallelize(*args)(*given))

    square, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    tried("mesh", perceptron(), solution, line)
    tried("shape", perceptron(hidden=128) if rank == 2 else perceptron(), solution, square)  # one rank only
    tried("model", perceptron(layers=3), solution, square)
    module = perceptron()
    module.layers[0].forward = lambda x: x  # the same parameters, another program
    tried("program", module, solution, square)
    module = autoshard.parallelize(perceptron(), solution, square)
    attempt("no folder", lambda: autoshard.load_checkpoint(folder, module))
    attempt("unwritable", lambda: autoshard.save_checkpoint("/proc/nothing/here", module))
    autoshard.save_checkpoint(folder, module, extra={"step": 7})
    loss = module(*given)
    if rank == 3:
        os._exit(1)
    attempt("dies", loss.backward)
    attempt("saving", lambda: autoshard.save_checkpoint(folder, module, extra={"step": 8}))
    found["seconds"] = str(longest[0])
    return found


@pytest.mark.slow  # a rank that stops answering is waited for
def test_every_fault_is_the_same_sentence_on_every_rank_and_nothing_hangs(tmp_path):
    folder = tmp_path / "saved"
    found = run_ranks(4, faults, planned_mlp(), str(folder), dies=3)
    assert found[3] is None
    for rank in range(3):
        assert isinstance(found[rank], dict), found[rank]
        assert float(found[rank].pop("seconds")) < 60
        assert found[rank] == found[0]
    said = found[0]
    assert "the device mesh is 4" in said["mesh"] and "2x2" in said["mesh"]
    assert "has shape" in said["shape"] and "(on rank 2 of 4)" in said["shape"]
    assert "of another model" in said["model"] and "of another model" in said["program"]
    assert "is not a complete checkpoint" in said["no folder"] and "can't be written" in said["unwritable"]
    assert said["dies"] == said["saving"] and said["dies"].startswith("a rank of the mesh died or stopped answering")
    assert sorted(os.listdir(tmp_path)) in (["saved"], [".saved.partial", "saved"])
    assert results(4, saved_step, planned_mlp(), str(folder)) == [7] * 4  # the checkpoint before is whole


def saved_step(rank: int, solution, folder: str) -> int:
    return autoshard.load_checkpoint(folder, parallel(perceptron(), solution))["step"]


def test_another_number_of_ranks_is_refused_on_every_rank():
    found = run_ranks(2, lambda rank, solution: autoshard.device_mesh(solution), planned((2, 2)))
    said = "2 ranks run, but the plan is for 4 on a mesh of 2x2; start 4 ranks or plan for another mesh"
    assert [str(error) for error in found] == [said] * 2
    assert dist.is_initialized() is False


# -- dropout -----------------------------------------------------------------------------------------------------------------------


def drops() -> nn.Module:
    def forward(m, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(m.down(m.drop(m.up(x).relu())), y)

    return Model(forward, up=nn.Linear(16, 32), drop=nn.Dropout(0.3), down=nn.Linear(32, 8))


def dropped(rank: int, solution) -> list[float]:
    """Losses of three steps and one in eval mode; ranks come with different seeds of their own."""
    module = parallel(materialized(drops(), 0), solution)
    torch.manual_seed(42 + rank)
    optimizer, generator, losses = torch.optim.SGD(module.parameters(), lr=0.1), torch.Generator().manual_seed(3), []
    for step in range(4):
        module.train(step < 3)
        given = torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)
        with torch.set_grad_enabled(step < 3):
            loss = module(*given)
        if step < 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_dropout_is_that_of_one_process_whatever_the_seeds_of_the_ranks():
    inputs, options = (torch.empty(8, 16), torch.empty(8, 8)), {"training": True, "baselines": False, "objective": "serial"}
    solution = autoshard.plan(drops(), inputs, fast_mesh((2, 2)), **options)
    assert "S" in solution.layouts["native_dropout"].outputs[0]  # cut, so that ranks must draw different parts of the mask
    (expected,) = results(1, dropped, None)
    for losses in results(4, dropped, solution):
        assert losses == pytest.approx(expected, rel=1e-5)


def many_gathers(rank: int, times: int) -> int:
    """Passes that keep four gathers of a group under way; how many gave what they should."""
    group = dist.distributed_c10d._get_default_group().group_name

    def four(*given):
        begun = [c10d.all_gather_into_tensor(x.unsqueeze(0), 2, group) for x in given]
        return [c10d.wait_tensor(y) for y in begun[::-1]]

    run = boxed(make_fx(four, tracing_mode="fake")(*(torch.empty(n) for n in (16, 128, 1024, 16384))))
    given = [torch.full((n,), float(rank)) for n in (16, 128, 1024, 16384)]
    both = [torch.tensor([[0.0], [1.0]]).expand(2, n) for n in (16384, 1024, 128, 16)]
    return sum(all(map(torch.equal, run(list(given)), both)) for _ in range(times))


@pytest.mark.slow
def test_many_gathers_of_a_group_may_be_under_way():  # with torch's own op a rank dies within seconds
    assert results(2, many_gathers, 20000) == [20000, 20000]
