"""Models made of a function and parts; plans of named schemes, and of any layouts that are right; training in one process or on ranks."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.plan import baseline_only
from autoshard.planning.question import ModelGraphs, Question
from autoshard.solution import Solution


class Model(nn.Module):
    """A module with these attributes, tensors among them as buffers, whose forward is `function(self, *inputs)`."""

    def __init__(self, function: Callable, **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


# -- plans ---------------------------------------------------------------------------------------------------------------------------


def asked(graph: Graph, mesh: Mesh, noted: dict | None = None, **options: Any) -> Question:
    """The question for a plan of a captured graph."""
    return Question(ModelGraphs(graph), mesh, Options(**options), Stopwatch(None), noted or {})


def scheme_plan(graph: Graph, mesh: Mesh, scheme: str, **options: Any) -> Solution:
    """The plan of a baseline by its name."""
    return baseline_only(asked(graph, mesh, **options), scheme)


def right_plan(model: nn.Module, inputs: Any, mesh: Mesh, *, random: int = 0, fault: bool = False, **options: Any) -> Solution:
    """The plan of a model, verified with so many random layouts; fault: a planted one is found in it. Of least cost, unless options say
    otherwise: a plan of the shortest time line takes three times as long, and is verified in the same way."""
    solution = autoshard.plan(model, inputs, mesh, **{"objective": "serial", "baselines": False, **options})
    found = autoshard.verify(model, inputs, solution, random=random)
    assert found["ok"], found
    assert not fault or not autoshard.verify(model, inputs, solution, plant_fault=True)["ok"]
    return solution


def refusal(call: Callable, *args: Any, **options: Any) -> str:
    """The sentence, in one line, with which a call is refused."""
    with pytest.raises(ValueError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def said(call: Callable, *args: Any, **options: Any) -> str:
    """What a call is refused with, on a rank that goes on; "nothing" where it isn't."""
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


# -- training ------------------------------------------------------------------------------------------------------------------------


def parallel(model: nn.Module, solution: Solution | None) -> nn.Module:
    """The model on a rank of the plan's mesh; without a plan the model itself."""
    return model if solution is None else autoshard.parallelize(model, solution, init_device_mesh("cpu", solution.mesh.shape))


def full(x: Any) -> Any:
    """A distributed tensor as the one that it stands for; all else as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def losses_of(module: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable, clip: float | None = None) -> list[float]:
    """The losses of a step for each batch, which is a tuple or a dict of inputs. A module may return its loss first or as `.loss`.

    clip: the largest norm of the gradients."""
    losses = []
    for inputs in batches:
        made = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        loss = made if isinstance(made, torch.Tensor) else made.loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(full(loss.detach()).item())
    return losses


# -- what is sent and held -----------------------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Bytes that a rank of n sends, by (collective, dtype), by formula: (n - 1)/n of the larger side, all-reduces twice that."""

    times = {"allgather": 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "allreduce": 2, "all_reduce": 2}

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks, self.bytes = ranks, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        kind = next((kind for kind in self.times if "c10d" in str(function) and kind in str(function)), None)
        if kind is not None:
            largest = max((x for x in pytree.tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)), key=torch.Tensor.numel)
            key = kind.replace("allgather", "all_gather").replace("allreduce", "all_reduce"), str(largest.dtype).removeprefix("torch.")
            sent = self.times[kind] * (self.ranks - 1) / self.ranks * largest.nbytes
            self.bytes[key] = self.bytes.get(key, 0.0) + sent
        return out


class Held(TorchDispatchMode):
    """Bytes of the tensors that are allocated within, at most at one time, without those in the host's memory."""

    def __init__(self):
        super().__init__()
        self.peak, self.alive = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if str(function) == "autoshard.offload.default":
            return output
        given = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in pytree.tree_leaves(output):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in given | self.alive.keys():
                self.alive[key] = x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return output
