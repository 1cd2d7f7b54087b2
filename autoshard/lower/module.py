"""A model that runs its plan: an nn.Module whose parameters are DTensors and whose forward is this rank's graph.

    sharded = parallel_module(model, ...)        a copy of the model; its class is a subclass of the model's own
    loss = sharded(tokens, targets)              the forward graph; what the backward needs is kept by autograd's node
    loss.backward()                              the backward graph; p.grad is a DTensor laid out as p

One set of graphs per kind of call (shapes and constants of the inputs, training or not), made when it is first needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

from autoshard.layout import Layout, replicated
from autoshard.lower.agreement import agree, rank_lost, share
from autoshard.lower.distribute import as_dtensor, part_of, spec_of
from autoshard.lower.fx_program import Boxed, RankGraphs, boxed, compiled
from autoshard.lower.overlap import Overlapped, described
from autoshard.mesh import Mesh

Shape = tuple[int, ...]


@dataclass(eq=False)
class Step:
    """What a rank runs for one kind of call."""

    graphs: RankGraphs
    inference: fx.GraphModule  # as forward, nothing saved
    shapes: dict[str, tuple[int, ...]]  # whole shapes of what the graphs give
    structure: pytree.TreeSpec  # of what the model returns
    leaves: list[Any]  # of that, TENSOR in place of each tensor
    position: list[Tensor]
    timelines: dict[str, tuple[Overlapped, ...]]  # by pass
    patiently: Callable[[], AbstractContextManager]  # while the passes are made
    make: Callable[[fx.GraphModule], Boxed] = boxed
    made: dict[str, Boxed] = field(default_factory=dict)

    def run(self, which: str, given: list[Tensor]) -> Sequence[Tensor]:
        """One pass: "forward" and "backward" of a training step, or "inference"."""
        if which not in self.made:
            self._make_all(("inference",) if which == "inference" else ("forward", "backward"))
        with rank_lost(f"running the {which} pass"):
            return self.made[which](given)

    def _make_all(self, passes: Sequence[str]) -> None:
        parts = {"forward": self.graphs.forward, "backward": self.graphs.backward, "inference": self.inference}
        with self.patiently():
            self.made |= {name: self.make(part) for name in passes if (part := parts[name]) is not None}
            agree(None, "making the graphs ready")


@dataclass(eq=False)
class Runner:
    """What a parallel module has beside its parameters."""

    mesh: Mesh
    device_mesh: DeviceMesh
    build: Callable[[pytree.TreeSpec, list[Any], bool], Step]  # from the inputs on the meta device, whole; is it in training mode
    inputs: dict[str, Layout]
    planned: dict[str, tuple[int, ...]]  # whole shapes of the inputs, where the plan knows them
    steps: dict[Any, Step] = field(default_factory=dict)
    where: tuple[int, ...] = ()
    random: Tensor | None = None  # state of the generator that dropout draws from, the same on every rank

    def call(self, module: nn.Module, args: tuple, kwargs: dict, compiled: bool) -> Any:
        leaves, spec = pytree.tree_flatten(kwargs if kwargs and not args else args if not kwargs else _bound(module, args, kwargs))
        wholes = [self._whole_shape(f"input_{k}", leaf) if isinstance(leaf, Tensor) else None for k, leaf in enumerate(leaves)]
        step = self._step(spec, leaves, wholes, module.training, compiled)
        given = {f"input_{k}": self._local(f"input_{k}", leaf, wholes[k]) for k, leaf in enumerate(leaves) if wholes[k] is not None}
        if not step.graphs.is_random:
            return self._run(step, module, given)
        generator: Any = torch.cuda if self.device_mesh.device_type == "cuda" else torch
        own = generator.get_rng_state()
        generator.set_rng_state(share(own, None, "agreeing on a seed") if self.random is None else self.random)
        try:
            return self._run(step, module, given)
        finally:
            self.random = generator.get_rng_state()
            generator.set_rng_state(own)

    def prepare(self, module: nn.Module, inputs: Any) -> Step:
        """The graphs for inputs like these, given whole."""
        leaves, spec = pytree.tree_flatten(inputs if isinstance(inputs, (dict, tuple)) else (inputs,))
        wholes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        return self._step(spec, leaves, wholes, module.training, False)

    def _step(
        self, spec: pytree.TreeSpec, leaves: Sequence[Any], wholes: Sequence[Shape | None], training: bool, by_inductor: bool
    ) -> Step:
        pairs = list(zip(leaves, wholes, strict=True))
        key = (spec, tuple((whole, leaf.dtype) if whole is not None else leaf for leaf, whole in pairs), training)
        if key not in self.steps:
            meta = [torch.empty(whole, dtype=leaf.dtype, device="meta") if whole is not None else leaf for leaf, whole in pairs]
            self.steps[key] = self.build(spec, meta, training)
        if not by_inductor:
            return self.steps[key]
        return self.steps.setdefault((*key, "inductor"), replace(self.steps[key], make=compiled, made={}))

    def _layout(self, name: str) -> Layout:
        return self.inputs.get(name) or replicated(len(self.mesh.axes))

    def _whole_shape(self, name: str, given: Tensor) -> tuple[int, ...]:
        """Of a DTensor its own; a plain tensor is whole when it has the shape that was planned, else this rank's part."""
        shape, layout = tuple(given.shape), self._layout(name)
        if isinstance(given, DTensor) or self.planned.get(name) == shape:
            return shape
        whole = list(shape)
        for placement, axis in zip(layout, self.mesh.axes, strict=True):
            if placement.is_shard() and placement.dim < len(whole):
                whole[placement.dim] *= axis.size
        planned = self.planned.get(name)
        if planned is not None and part_of(torch.empty(planned, device="meta"), layout, self.mesh, self.where).shape == given.shape:
            return planned  # of uneven parts the whole can't be told from one of them
        return tuple(whole)

    def _local(self, name: str, given: Any, whole: tuple[int, ...] | None) -> Tensor:
        layout = self._layout(name)
        if isinstance(given, DTensor):
            if given.device_mesh != self.device_mesh:
                raise ValueError(f"{name} is a DTensor on {given.device_mesh}, the module is on {self.device_mesh}; use one mesh for both")
            return given.redistribute(placements=list(layout)).to_local()
        given = given.to(self.device_mesh.device_type)
        return part_of(given, layout, self.mesh, self.where).contiguous() if tuple(given.shape) == whole else given.contiguous()

    def _run(self, step: Step, module: nn.Module, given: dict[str, Tensor]) -> Any:
        held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False)), **given}
        tensors = [held[name] for name in step.graphs.loads]
        trains = step.graphs.backward is not None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if trains:
            made = _Train.apply(self, step, *tensors)
        else:
            with torch.no_grad():
                made = self.outputs(step, step.run("inference", [local(t) for t in tensors] + step.position))
        results = dict(zip(step.graphs.outputs, made, strict=True))
        with torch.no_grad():
            for key, value in results.items():
                if key.startswith("buffer:"):
                    local(held[key.removeprefix("buffer:")]).copy_(local(value))
        outputs = iter(value for key, value in results.items() if key.startswith("output:"))
        return pytree.tree_unflatten([next(outputs) if leaf is TENSOR else leaf for leaf in step.leaves], step.structure)

    def outputs(self, step: Step, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the graph gave, for the user: plain where every rank holds all of it, else a DTensor."""
        found = []
        for key, part in zip(step.graphs.outputs, made, strict=False):
            layout = step.graphs.slots[key].layout
            if all(p.is_replicate() for p in layout) or key.startswith("buffer:"):
                found.append(part)
            else:
                found.append(as_dtensor(part, spec_of(step.shapes[key], part.dtype, layout, self.device_mesh)))
        return tuple(found)

    def tangent(self, step: Step, name: str, given: Tensor) -> Tensor:
        layout = step.graphs.slots[name].layout
        if isinstance(given, DTensor):
            return given.redistribute(placements=list(layout)).to_local()
        return part_of(given, layout, self.mesh, self.where).contiguous()


TENSOR = object()  # in place of a tensor among the leaves of what the model returns


def local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def _bound(module: nn.Module, args: tuple, kwargs: dict) -> dict:
    """Positional arguments by the names of the model's own forward, then the others."""
    own: Any = next(c for c in type(module).__mro__ if c.__name__ and "forward" in vars(c) and not issubclass(c, Parallel))
    names = [name for name in inspect.signature(own.forward).parameters if name != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class Parallel(nn.Module):
    """The methods that a parallel module has in place of its model's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self, args, kwargs, torch.compiler.is_compiling())

    @property
    def random_state(self) -> Tensor | None:
        """Of the generator that dropout draws from, the same on every rank; None before the first draw."""
        return self.__dict__["_runner"].random

    @random_state.setter
    def random_state(self, state: Tensor) -> None:
        self.__dict__["_runner"].random = state

    def timeline(self) -> str:
        """What ran beside what, by the estimates of the last kind of call; empty before the first one."""
        steps = self.__dict__["_runner"].steps
        return described(next(reversed(steps.values())).timelines, self.__dict__["_runner"].mesh) if steps else ""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """From now on the rank's graphs run through inductor, as with torch.compile(module)."""
        self.__dict__["_by_inductor"] = True


@torch.compiler.disable
def _call(module: nn.Module, args: tuple, kwargs: dict, compiling: bool) -> Any:
    """Outside of dynamo: the graphs are traced already, and compiled as they are."""
    state = module.__dict__
    return state["_runner"].call(module, args, kwargs, compiling or state.get("_by_inductor", False))


def parallel_class(of: type) -> type:
    return type(f"Parallel{of.__name__}", (Parallel, of), {"__module__": of.__module__, "__doc__": of.__doc__})


class _Train(torch.autograd.Function):
    """The two graphs as one differentiable function of parameters, buffers and inputs."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, step: Step, *tensors: Tensor) -> tuple[Tensor, ...]:
        graphs = step.graphs
        parts = [local(t) for t in tensors]
        made = step.run("forward", parts + step.position)
        outputs = runner.outputs(step, made)
        updated = {id(part) for name, part in zip(graphs.loads, parts, strict=True) if f"buffer:{name}" in graphs.outputs}
        returned = {id(local(output)) for output in outputs}
        saved = made[len(graphs.outputs) :]
        # an output on its own node would be a cycle; a buffer gets its new value before the backward pass
        ctx.saved = [x.clone() if id(x) in updated else x.detach() if id(x) in returned else x for x in saved]
        ctx.versions = [x._version for x in ctx.saved]
        ctx.runner, ctx.step = runner, step
        ctx.specs = [t._spec if isinstance(t, DTensor) else None for t in tensors]
        pairs = zip(graphs.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(output for key, output in pairs if _tangent(key) not in graphs.tangents))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        runner, step, saved = ctx.runner, ctx.step, ctx.saved
        graphs = step.graphs
        if saved is None:
            raise RuntimeError("backward() was called a second time on one forward pass, whose values are freed; call the module again")
        if any(x._version != version for x, version in zip(saved, ctx.versions, strict=True)):
            raise RuntimeError("a parameter or input was changed between forward and backward; call backward() before optimizer.step()")
        ctx.saved = None
        tangents = {_tangent(key): tangent for key, tangent in zip(graphs.outputs, given, strict=True)}
        for name in graphs.tangents:
            saved.append(runner.tangent(step, name, tangents[name]))
        saved += step.position
        gradients = dict(zip(graphs.gradients, step.run("backward", saved), strict=True))
        seen: set[tuple[int, int]] = set()
        found = []
        for name, spec, needed in zip(graphs.loads, ctx.specs, ctx.needs_input_grad[2:], strict=True):
            part = gradients.get(f"gradient:{name}") if needed else None
            found.append(None if part is None else _gradient(part, spec, graphs.slots[f"gradient:{name}"].layout, seen))
        return (None, None, *found)


def _tangent(key: str) -> str:
    return "tangent_" + key.removeprefix("output:")


def _gradient(part: Tensor, spec: DTensorSpec | None, layout: Layout, seen: set[tuple[int, int]]) -> Tensor:
    """A gradient laid out as its parameter, with numbers of its own: two parameters may be given one and the same tensor."""
    where = (part.untyped_storage().data_ptr(), part.storage_offset())
    part = part.clone(memory_format=torch.contiguous_format) if where in seen else part.contiguous()
    seen.add(where)
    if spec is None:
        return part
    if tuple(spec.placements) == tuple(layout):
        return as_dtensor(part, spec)
    whole = spec_of(spec.shape, part.dtype, layout, spec.mesh)
    return as_dtensor(part, whole).redistribute(placements=list(spec.placements))
