"""One tensor object in several places of the example inputs is several inputs: graphs, plans and ranks are those of different tensors."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import capture
from autoshard.lower.unsharded import materialized
from models import llama
from tests.helpers import fast_mesh
from tests.helpers_pipelines import CLUSTER
from tests.helpers_ranks import results
from tests.test_long_context import every_sequence_is_long  # noqa: F401 - a fixture

WIDTH = 8


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Sums(nn.Module):
    """Every place counts another number of times. Its buffer may be an input, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("held", torch.arange(4.0 * WIDTH).reshape(4, WIDTH))

    def forward(self, x, *more, **named):
        places = [*more, *named.values()]
        total = self.linear(x) * self.held
        while places:
            place = places.pop(0)
            if isinstance(place, dict):
                places += place.values()
            elif isinstance(place, (list, tuple)):
                places += place
            elif isinstance(place, Pair):
                places += [place.first, place.second]
            else:
                total = total * 2 + place
        return total.square().mean()


# (a, b, c, d) -> example inputs; a, b and c are three tensors or one, d is another one or the module's buffer
PLACES = {
    "tuple": lambda a, b, c, d: (a, b, c, d),
    "by name": lambda a, b, c, d: {"x": a, "second": b, "third": c, "fourth": d},
    "nested": lambda a, b, c, d: (a, {"p": b, "q": [c, d]}),
    "nested by name": lambda a, b, c, d: {"x": a, "d": {"p": b, "q": (c, (d,))}},
    "an object and a tensor": lambda a, b, c, d: (a, Pair(b, d), c),
    "two objects": lambda a, b, c, d: (a, Pair(b, d), Pair(c, d.clone())),
}


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(4)]


def examples(place, model):
    """With different tensors, and with one tensor and the module's own."""
    a, b, c, d = tensors()
    return PLACES[place](a, b, c, d), PLACES[place](a, a, a, model.held)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_the_graph_is_that_of_different_tensors(place, training):
    model = Sums()
    apart, together = examples(place, model)
    graph = capture(model, together, training=training)
    assert graph == capture(model, apart, training=training)
    inputs = [op.name for op in graph.ops if op.kind == "input"]
    assert len(inputs) == 4 + (place == "two objects") and all((graph.index[name], 0) in graph.users for name in inputs)


def test_what_the_module_does_with_one_tensor_is_not_what_it_does_with_two():
    """The negative control: a graph that reads the first input in both places is another one."""
    a, b, c, d = tensors()
    graphs = [capture(Sums(), given, training=False) for given in ((a, a, c, d), (a, b, a, d), (a, b, c, d))]
    assert graphs[0] == graphs[1] == graphs[2]

    class First(Sums):
        def forward(self, x, *more):
            return super().forward(x, x, *more[1:])

    assert capture(First(), (a, b, c, d), training=False) != graphs[0]


def test_verify_tells_the_places_apart(monkeypatch):
    """The second place has other values than the first one, so that a program that reads the wrong one is found."""
    model, x = Sums(), torch.randn(4, WIDTH)
    solution = autoshard.plan(model, (x, x), fast_mesh((2,)), training=True, baselines=False, objective="serial")
    assert autoshard.verify(model, (x, x), solution)["ok"]
    monkeypatch.setattr("autoshard.capture.inputs.apart", lambda module, args, kwargs: (args, kwargs))
    assert not autoshard.verify(model, (x, x), solution)["ok"]


# -- plans ---------------------------------------------------------------------------------------------------------------------------


def lm(batch=4):
    return llama.tiny(batch=batch, layers=1)[0], tuple(torch.empty(batch, 16, dtype=torch.int64, device="meta") for _ in range(2))


def a_plan(given, model, **options):
    return autoshard.plan(model, given, fast_mesh((2,)), training=True, baselines=False, objective="serial", **options)


MODES = {
    "natural": lambda given, model: a_plan(given, model, sequence_order="natural"),
    "head-tail": lambda given, model: a_plan(given, model, sequence_order="head_tail"),
    "microbatches": lambda given, model: a_plan(given, model, microbatches=2),
    "chunked loss": lambda given, model: a_plan(given, model, chunked_loss="always"),
    "recomputed": lambda given, model: a_plan(given, model, recompute="all"),
    "pipeline": lambda given, model: autoshard.plan(model, given, CLUSTER, microbatches=(2,), stages=2, grid=False),
    "programs": lambda given, model: autoshard.plan(
        {"train": autoshard.Program(model, given, training=True), "score": autoshard.Program(model, given)}, fast_mesh((2,))
    ),
}  # fmt: skip


def described(plan):
    """All that is planned, without how long that took."""
    if hasattr(plan, "programs"):
        return {name: described(one) for name, one in plan.programs.items()}
    return (plan.layouts, plan.results, plan.inputs, plan.assumptions, plan.cost) if hasattr(plan, "layouts") else plan.stages


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODES if name != "head-tail"]


@pytest.mark.parametrize("mode", ["head-tail", *SLOW])
def test_the_plan_is_that_of_different_tensors(mode, every_sequence_is_long):  # noqa: F811
    model, (x, y) = lm()
    assert described(MODES[mode]((x,) * 2, model)) == described(MODES[mode]((x, y), model))


# -- ranks ---------------------------------------------------------------------------------------------------------------------------


def batches(step, batch=4):
    """Tokens and targets: different ones, and one tensor for both in every other step."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, 128, (batch, 16), generator=generator) for _ in range(2))
    return (x, y) if step % 2 == 0 else (x, x)


def trained(rank, plan, mode):
    model = materialized(lm(2 if mode == "microbatches" else 4)[0], 0)
    if plan is not None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        model = autoshard.parallelize(model, plan, mesh, **({"example_inputs": lm()[1]} if mode == "pipeline" else {}))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        if mode == "pipeline" and plan is not None:
            loss = model.step(*batches(step))
        elif mode == "microbatches" and plan is not None:
            loss = 0.0
            for part in model.microbatches(batches(step)):
                one = model(*part) / 2
                one.backward()
                loss = loss + one.detach()
        else:
            loss = model(*batches(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ranks_train_as_one_process_on_different_tensors_and_on_one(mode, every_sequence_is_long):  # noqa: F811
    batch = 2 if mode == "microbatches" else 4
    plan = MODES[mode]((torch.empty(batch, 16, dtype=torch.int64, device="meta"),) * 2, lm(batch)[0])
    (expected,) = results(1, trained, None, mode)
    for losses in results(4 if mode == "pipeline" else 2, trained, plan, mode):
        assert losses == pytest.approx(expected, rel=1e-5)
