"""The program of one kind of call on this rank: its forward and backward graphs as one function that autograd can differentiate.

forward    local tensors of parameters, buffers and inputs -> outputs, and the values that the backward graph reads
backward   those values, gradients of the outputs          -> gradients, each in the layout of its parameter
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autoshard.capture import Returned
from autoshard.layout import Layout, text
from autoshard.lower import Boxed, RankGraphs, boxed, is_random, write_in_place
from autoshard.runtime.agreement import agree, rank_lost
from autoshard.runtime.distribute import Where, as_dtensor, local, spec_of
from autoshard.runtime.microbatches import OpenStep, StepMoves
from autoshard.runtime.overlap import Overlapped
from autoshard.runtime.shared_generator import SharedGenerator
from autoshard.torch_private import DTensorSpec


@dataclass(eq=False)
class TracedCall:
    """The graphs that a rank runs for one kind of call, and how its outputs are put together."""

    graphs: RankGraphs
    inference: fx.GraphModule  # as forward, without saved values
    shapes: dict[str, tuple[int, ...]]  # global shapes of the graphs' outputs
    returned: Returned  # the model's return value, whose tensors come from the graphs' outputs
    constants: dict[str, Tensor]  # this rank's shards of tensors that the program reads beside the module's and the inputs
    where: Where
    patiently: Callable[[], AbstractContextManager]  # the context in which the passes are prepared
    moves: StepMoves | None = None  # of a plan with several microbatches
    timelines: dict[str, tuple[Overlapped, ...]] = field(default_factory=dict)  # by pass
    as_function: Callable[[fx.GraphModule], Boxed] = boxed
    passes: dict[str, Boxed] = field(default_factory=dict)
    random_passes: set[str] = field(default_factory=set)  # those that may draw
    checked: dict[str, DTensorSpec] = field(default_factory=dict)  # of parameters and buffers that were found to be as planned

    def __call__(
        self, held: Mapping[str, Tensor], inputs: Mapping[str, Tensor], step: OpenStep, random: SharedGenerator
    ) -> dict[str, Tensor]:
        """The outputs and the new values of buffers and inputs, by key.

        held: the module's parameters and buffers; inputs: this rank's shards; step: the step of the optimizer that the call is part of;
        random: from which the passes draw.
        """
        self._check(held)
        tensors = [inputs.get(name, held.get(name, self.constants.get(name))) for name in self.graphs.loads]
        if self.graphs.backward is not None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            outputs = _Train.apply(self, step, random, *tensors)
        else:
            with torch.no_grad():
                outputs = self.outputs(self.run("inference", self.read(step, tensors) + self.where.position, random))
        return dict(zip(self.graphs.outputs, outputs, strict=True))

    def read(self, step: OpenStep, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The local tensors that the graphs load: of parameters their kept copies, where a plan has microbatches."""
        if self.moves is None:
            return [local(t) for t in tensors]
        return [step.parameter(self.moves, name, t) for name, t in zip(self.graphs.loads, tensors, strict=True)]

    def _check(self, held: Mapping[str, Tensor]) -> None:
        """ValueError where a parameter or buffer is no longer as the plan has it: the graphs would compute something else."""
        for name in self.graphs.loads:
            x, slot = held.get(name), self.graphs.slots[name]
            if self.moves is not None and name in self.moves.fetches:
                slot = self.moves.fetches[name].source
            if x is None or getattr(x, "_spec", None) is self.checked.get(name, 0):
                continue
            if not isinstance(x, DTensor) or tuple(x._spec.placements) != tuple(slot.layout):
                now = f"a DTensor in {text(tuple(x.placements))}" if isinstance(x, DTensor) else "a plain tensor"
                raise ValueError(f"{name} is {now}, the plan has {text(slot.layout)} for it; write values with load_state_dict, not with =")
            if str(x.dtype) != f"torch.{slot.dtype}":
                raise ValueError(f"{name} is {x.dtype}, planned was {slot.dtype}; convert the model before it is planned, not afterwards")
            self.checked[name] = x._spec

    def packed(self, results: Mapping[str, Tensor]) -> Any:
        keys = {f"output:{k}": k for k in range(len(self.returned.leaves))}
        return self.returned.packed({k: results[key] for key, k in keys.items() if key in results})

    @property
    def present(self) -> dict[str, fx.GraphModule]:
        return {**self.graphs.passes, "inference": self.inference}

    def run(self, which: str, arguments: list[Tensor], random: SharedGenerator) -> Sequence[Tensor]:
        """One pass: "forward" and "backward" of a training step, or "inference". The graphs hold the casts that autocast would add."""
        if which not in self.passes:
            present = {name: graph for name, graph in self.present.items() if (name == "inference") == (which == "inference")}
            self.random_passes |= {name for name, graph in present.items() if is_random(graph.graph)}
            with self.patiently():
                if which == "inference":
                    write_in_place(self.inference, self.graphs.loads, self.graphs.outputs)
                self.passes |= {name: self.as_function(graph) for name, graph in present.items()}
                agree(None, "making the graphs ready", self.where.group)
        drawing = random.drawing() if which in self.random_passes else nullcontext()
        with rank_lost(f"running the {which} pass"), torch.autocast(self.where.device.type, enabled=False), drawing:
            return self.passes[which](arguments)

    def as_dtensor(self, key: str, value: Tensor) -> DTensor:
        """A result's local tensor as a DTensor in its planned layout."""
        return self.where.dtensor(value, self.shapes[key], self.graphs.slots[key].layout)

    def outputs(self, locals_: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The graph's outputs for the user: plain tensors where they are replicated, otherwise DTensors."""
        outputs = []
        for key, x in zip(self.graphs.outputs, locals_, strict=False):
            is_plain = all(p.is_replicate() for p in self.graphs.slots[key].layout) or key.startswith("buffer:")
            outputs.append(x if is_plain else self.as_dtensor(key, x))
        return tuple(outputs)


class _Train(torch.autograd.Function):
    """The two graphs as one differentiable function of parameters, buffers and inputs."""

    @staticmethod
    def forward(ctx: Any, traced: TracedCall, step: OpenStep, random: SharedGenerator, *tensors: Tensor) -> tuple[Tensor, ...]:
        if torch.is_anomaly_enabled():
            raise ValueError(
                "torch.autograd.detect_anomaly can't check a parallel module: torch has no DTensor rule for its check; turn it off and "
                "look at torch.isfinite(p.grad).all() after backward()"
            )
        graphs = traced.graphs
        inputs = traced.read(step, tensors)
        values = traced.run("forward", inputs + traced.where.position, random)
        outputs = traced.outputs(values)
        updated = {id(x) for name, x in zip(graphs.loads, inputs, strict=True) if f"buffer:{name}" in graphs.outputs}
        returned = {id(local(output)) for output in outputs}
        saved = values[len(graphs.outputs) :]
        # a saved output would make a reference cycle with its node; a buffer gets its new value before the backward pass
        ctx.saved = [x.clone() if id(x) in updated else x.detach() if id(x) in returned else x for x in saved]
        storages = {x.untyped_storage()._cdata for x in saved}  # an operator on a DTensor counts in its own version, not its shard's
        held = [(t, local(t).untyped_storage()._cdata) for t in tensors if isinstance(t, nn.Parameter)]
        ctx.reads = [*ctx.saved, *(t for t, storage in held if storage in storages)]
        ctx.versions = [x._version for x in ctx.reads]
        ctx.traced, ctx.step, ctx.is_last, ctx.random = traced, step, step.is_last, random
        ctx.specs = [t._spec if isinstance(t, DTensor) else None for t in tensors]
        pairs = zip(graphs.outputs, outputs, strict=True)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for key, output in pairs if _tangent(key) not in graphs.tangents))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the plan has no second derivatives; call backward() or autograd.grad() without create_graph=True")
        traced, saved = ctx.traced, ctx.saved
        graphs = traced.graphs
        if saved is None:
            raise RuntimeError("backward() was called a second time on one forward pass, whose values are freed; call the module again")
        if any(x._version != version for x, version in zip(ctx.reads, ctx.versions, strict=True)):
            raise RuntimeError("a parameter or input was changed between forward and backward; call backward() before optimizer.step()")
        ctx.saved = ctx.reads = None
        pairs = zip(graphs.outputs, grad_outputs, strict=True)
        tangents = {_tangent(key): tangent for key, tangent in pairs if tangent is not None}
        ctx.step.reached |= {key for key, of in graphs.reach.items() if not of.isdisjoint(tangents)}  # others are None, as torch's are
        where, slots = traced.where, graphs.slots
        saved += [where.local(tangents[x], slots[x].layout) if x in tangents else where.zeros(slots[x]) for x in graphs.tangents]
        saved += where.position
        if traced.moves is None:
            gradients = dict(zip(graphs.gradients, traced.run("backward", saved, ctx.random), strict=True))
        else:
            gradients = _summed(ctx, traced.moves, saved)
        seen: set[tuple[int, int]] = set()
        grad_inputs = []
        for name, spec, needed in zip(graphs.loads, ctx.specs, ctx.needs_input_grad[3:], strict=True):
            grad = gradients.get(f"gradient:{name}") if needed and f"gradient:{name}" in ctx.step.reached else None
            if grad is not None:
                layout = spec.placements if name in graphs.sums and spec is not None else graphs.slots[f"gradient:{name}"].layout
                grad = _gradient(grad, spec, layout, seen)
            grad_inputs.append(grad)
        return (None, None, None, *grad_inputs)


def _summed(ctx: Any, moves: StepMoves, saved: list[Tensor]) -> dict[str, Tensor]:
    """The gradients that a microbatch returns: those of inputs, and in the last one those of parameters, the sums of all, reduced."""
    graphs, step = ctx.traced.graphs, ctx.step
    saved += step.summed(moves, graphs.sums)
    values = dict(zip(graphs.gradients, ctx.traced.run("backward", saved, ctx.random), strict=True))
    values = {key: x for key, x in values.items() if key.removeprefix("gradient:") not in graphs.sums}
    if not ctx.is_last:
        return values
    reduced = step.reduced(moves, lambda name: getattr(torch, graphs.slots[name].dtype))
    return values | {f"gradient:{name}": x for name, x in reduced.items()}


def _tangent(key: str) -> str:
    return "tangent_" + key.removeprefix("output:")


def _gradient(x: Tensor, spec: DTensorSpec | None, layout: Layout, seen: set[tuple[int, int]]) -> Tensor:
    """A gradient in its parameter's layout and in storage of its own: the graph may return one tensor for two parameters."""
    where = (x.untyped_storage().data_ptr(), x.storage_offset())
    x = x.clone(memory_format=torch.contiguous_format) if where in seen else x.contiguous()
    seen.add(where)
    if spec is None:
        return x
    if tuple(spec.placements) == tuple(layout):
        return as_dtensor(x, spec)
    return as_dtensor(x, spec_of(spec.shape, x.dtype, layout, spec.mesh)).redistribute(placements=list(spec.placements))
