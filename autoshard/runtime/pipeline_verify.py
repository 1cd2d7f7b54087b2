"""Does a pipeline compute what the model computes? All ranks of all stages run in this process, microbatch after microbatch.

    x      loss and gradients of the unsharded model: the mean over the microbatches
    x~     the same with parameters and inputs that are perturbed by their own rounding, several times where it matters
    y      of the stages: programs on simulated ranks, values in the pieces that the ranks would send, sums reduced once per step
    error = `relative_error` of y, as in lower.verify

Random ops draw from a state of their stage, as on ranks (runtime.pipelines); the unsharded model draws each of its numbers from the
state of the stage that the op is in. A stage that fails to run is a placement mismatch; there is nothing to compare then.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture import draws, input_names
from autoshard.graph import is_drawn_in_full, is_random
from autoshard.lower import (
    TOLERANCES,
    LoadPlaceholder,
    Mismatch,
    SimulatedRanks,
    Verification,
    assemble,
    failure,
    first_of_backward,
    first_state,
    from_state,
    gap,
    index_bounds,
    least_precise,
    noise_of,
    out_of_order,
    perturbed,
    relative_error,
    seeded,
    slots_of,
    state_of_generator,
    state_of_module,
)
from autoshard.runtime.stages import LOSS_TANGENT, LoweredStage, LoweredStages, lower_stages, why_no_loss
from autoshard.runtime.transfers import simulated
from autoshard.solution import RECEIVED, SENT, PipelineToRun
from autoshard.torch_private import TorchDispatchMode, pytree

PERTURBED = 5  # times
Values = dict[str, list[Tensor]]  # by name, a local tensor for each device of a stage


@torch.no_grad()
def verify_stages(
    model: nn.Module, example_inputs: Any, plan: PipelineToRun, constants: Mapping[str, Tensor], seed: int
) -> Verification:
    """Loss and gradients of the stages against the unsharded model, on seeded values where the model has none.

    ValueError where a stage can't be lowered, or draws numbers that the unsharded model can't draw, and for a model that doesn't return its
    loss.
    """
    drawing = [[op for op in stage.graph.ops if is_random(op)] for stage in plan.stages]
    if odd := [op.name for ops in drawing for op in ops if op.backward or not is_drawn_in_full(op)]:
        raise ValueError(f"{odd[0]} draws per shard or in the backward pass, as the unsharded model does not; plan and verify model.eval()")
    if (why := why_no_loss(plan)) is not None:
        raise ValueError(why)
    stages = lower_stages(plan)
    bounds = index_bounds(*(stage.graph for stage in plan.stages))
    module, args, kwargs = seeded(model, example_inputs, bounds, seed)
    names, leaves = input_names(model, example_inputs), pytree.tree_leaves((args, kwargs))
    inputs = {name: x for name, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)}
    values = {**constants, **{name: x.detach().clone() for name, x in state_of_module(module).items()}}
    dtype = least_precise(stage.graph for stage in plan.stages)
    tolerance, devices = TOLERANCES[dtype][0], len({device for stage in plan.stages for device in stage.devices})
    moved = sum(stage.program.redistributes for stage in stages.of)
    try:
        results = _Simulation(stages, plan, values, inputs, seed).run()
    except _Failed as failure:
        return Verification(devices, 0.0, 0.0, (failure.mismatch,), moved, tolerance)
    draws = [len(ops) for ops in drawing]

    def reference(module: nn.Module, change: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
        new = {id(x): change(x, k) if x.is_floating_point() else x for k, x in enumerate(inputs.values())}
        leaves, named = pytree.tree_map(lambda x: new.get(id(x), x), ((args, kwargs), inputs))
        return _reference(module, *leaves, plan, named, DrawsOfStages(draws, seed))

    @cache
    def with_noise() -> list[dict[str, Tensor]]:
        several, eps = [], torch.finfo(getattr(torch, dtype)).eps
        for n in range(PERTURBED):
            changed = copy.deepcopy(module)
            for k, p in enumerate(changed.parameters()):
                p.copy_(perturbed(p, eps, (seed + n) * 1_000_003 + k))
            several.append(reference(changed, lambda x, k, n=n: perturbed(x, eps, (seed - n) * 1_000_003 - k - 1)))  # type: ignore[misc]
        return several

    expected, worst = reference(module, lambda x, k: x), {"output": 0.0, "gradient": 0.0}
    for key, y in results.items():
        x, kind = expected[key], key.split(":")[0]
        noise = partial(lambda key, x: noise_of(x, [one[key] for one in with_noise()]), key, x)
        worst[kind] = max(worst[kind], relative_error(gap(y.to(x.dtype), x), x, noise, tolerance))
    mismatches = tuple(one for stage in stages.of for one in out_of_order(stage.program))
    return Verification(devices, worst["output"], worst["gradient"], mismatches, moved, tolerance)


def _part(plan: PipelineToRun, inputs: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    return {name: x.chunk(plan.microbatches)[k] if name in plan.split else x for name, x in inputs.items()}


class DrawsOfStages(TorchDispatchMode):
    """In a block, a microbatch's forward pass, each random op draws from the state of its stage. counts: random ops of each stage."""

    def __init__(self, counts: Sequence[int], seed: int):
        super().__init__()
        self.stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
        self.states = [first_state(seed + stage) for stage in range(len(counts))]
        self.waiting: list[int] = []

    def __enter__(self) -> Any:
        self.waiting = list(self.stages)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not draws(func):
            return func(*args, **(kwargs or {}))
        if not self.waiting:
            raise ValueError(f"the model draws random numbers ({func}) more often than its captured program; plan and verify model.eval()")
        stage = self.waiting.pop(0)
        with from_state(self.states[stage]):
            result = func(*args, **(kwargs or {}))
            self.states[stage] = state_of_generator()
        return result


@torch.enable_grad()
def _reference(
    module: nn.Module, args: tuple, kwargs: dict, plan: PipelineToRun, inputs: Mapping[str, Tensor], draws: DrawsOfStages
) -> dict[str, Tensor]:
    """The model's mean loss over the microbatches, and its gradients."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    by_id = {id(x): name for name, x in inputs.items()}
    module.zero_grad()
    total: Any = 0.0
    for k in range(plan.microbatches):
        part = _part(plan, inputs, k)
        one, named = pytree.tree_unflatten([part[by_id[id(x)]] if id(x) in by_id else x for x in leaves], spec)
        with draws:
            returned = module(*one, **named)
        loss = next(x for x in pytree.tree_leaves(returned) if isinstance(x, Tensor)) / plan.microbatches
        if plan.training:
            loss.backward()
        total = total + loss.detach()
    named = module.named_parameters(remove_duplicate=False)
    return {"output:0": total, **{f"gradient:{name}": p.grad.clone() for name, p in named if p.grad is not None}}


class _Failed(Exception):
    """A stage could not run."""

    def __init__(self, mismatch: Mismatch):
        super().__init__(mismatch)
        self.mismatch = mismatch


class _Simulation:
    """A step: for each microbatch all forward passes, then all backward passes from the last stage."""

    def __init__(self, stages: LoweredStages, plan: PipelineToRun, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor], seed: int):
        self.random = [first_state(seed + stage.index) for stage in stages.of]
        self.stages, self.plan, self.values, self.inputs = stages.of, plan, values, inputs
        self.loss: Tensor | float = 0.0
        self.sums: list[Values] = [{} for _ in stages.of]

    def run(self) -> dict[str, Tensor]:
        for k in range(self.plan.microbatches):
            tangents = {op.name: _tangent(op, self.plan) for s in self.stages for op in s.graph.ops if op.kind == "tangent"}
            values = {**self.values, **_part(self.plan, self.inputs, k), **tangents}
            passes = [_StageRanks(stage, values) for stage in self.stages]
            for forward in (True, False) if self.plan.training else (True,):
                held: Values = {}
                for one in passes if forward else reversed(passes):
                    held = self._run(one, forward, held)
        gradients = dict[str, Tensor]()
        for stage, sums in zip(self.stages, self.sums, strict=True):
            for name, x in _reduced(stage, sums):
                gradients[name] = gradients[name] + x if name in gradients else x
        return {"output:0": torch.as_tensor(self.loss), **gradients}

    def _run(self, one: "_StageRanks", forward: bool, held: Values) -> Values:
        """One pass of a stage: what it sends on, of what the stage before it held."""
        stage = one.stage
        received = {}
        for transfer in stage.arrives[forward]:
            senders = self.stages[stage.index + (-1 if forward else 1)].devices
            arrived = simulated(transfer, dict(zip(senders, held[transfer.name], strict=True)))
            received[transfer.name] = [arrived[device] for device in stage.devices]
        one.random = self.random[stage.index]
        results = one.results_of(forward, received)
        self.random[stage.index] = one.random
        for key, tensors in results.items():
            kind, name = key.split(":", 1)
            if key == "output:0":
                layout = next(record.slot.layout for record in stage.program.results if record.key == key)
                self.loss = self.loss + assemble(tensors, layout, stage.mesh) / self.plan.microbatches
            elif kind == "gradient" and not name.startswith(SENT):
                former = self.sums[stage.index].get(name)
                self.sums[stage.index][name] = tensors if former is None else [a + b for a, b in zip(former, tensors, strict=True)]
        sent = {key.split(SENT, 1)[1]: tensors for key, tensors in results.items() if f":{SENT}" in key}
        return {**received, **sent}


class _StageRanks(SimulatedRanks):
    """The ranks of a stage in one microbatch: its forward records, later its backward records."""

    def __init__(self, stage: LoweredStage, values: Mapping[str, Tensor]):
        super().__init__(stage.mesh)
        self.stage, self.values, self.received = stage, values, Values()
        records, end = stage.program.records, first_of_backward(stage.program, stage.graph)
        late = [r for r in records[:end] if isinstance(r, LoadPlaceholder) and stage.graph.ops[r.slot.value[0]].kind == "tangent"]
        self.records = {True: [r for r in records[:end] if r not in late], False: [*late, *records[end:]]}

    def load(self, record: LoadPlaceholder, values: Mapping[str, Tensor]) -> list[Tensor]:
        name = record.name.removeprefix(RECEIVED)
        return super().load(record, values) if name == record.name else self.received[name]

    def results_of(self, forward: bool, received: Values) -> Values:
        """The results of a pass. received: by name, in the layouts in which they arrive."""
        self.received, self.results = received, {}
        for record in self.records[forward]:
            try:
                self.do(record, self.values)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                slot = next(slot for slot in getattr(record, "outputs", slots_of(record)) if slot is not None)
                raise _Failed(failure(self.stage.graph, slot, error)) from error
        return self.results


def _tangent(op: Any, plan: PipelineToRun) -> Tensor:
    weight = 1.0 / plan.microbatches if op.name == LOSS_TANGENT else 0.0
    return torch.full(op.output.shape, weight, dtype=getattr(torch, op.output.dtype))


def _reduced(stage: LoweredStage, sums: Values) -> Iterator[tuple[str, Tensor]]:
    """The gradients of a stage in the layouts of their parameters, as global tensors."""
    for name, tensors in sums.items():
        ranks, move = SimulatedRanks(stage.mesh), stage.reductions[name]
        ranks.held[move.source.name] = tensors
        yield f"gradient:{name}", assemble(ranks.redistribute(move), move.target.layout, stage.mesh, tolerance=1e-4)
