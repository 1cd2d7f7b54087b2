"""A model that runs its plan: an nn.Module whose parameters are DTensors and whose forward is this rank's graph.

    sharded = parallel_module(model, ...)        a copy of the model; its class is a subclass of the model's own
    loss = sharded(tokens, targets)              the forward graph; what the backward needs is kept by autograd's node
    loss.backward()                              the backward graph; p.grad is a DTensor laid out as p

One set of graphs per kind of call (shapes and constants of the inputs, training or not), made when it is first needed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

from autoshard.layout import Layout, replicated, text
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
    leaves: Sequence[Any]  # of that, in order; what is no constant is an output of the graphs
    constants: dict[str, Tensor]  # this rank's shards of tensors that the program reads beside the module's and the inputs
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
    build: Callable[[Any, Any, Sequence[bool]], Step]  # from a call's inputs, their tensors on the meta device, whole; modes of all modules
    listed: Callable[[Any], Any]  # inputs with the list of its tensors in the place of each object
    filled: Callable[[Any, Any], Any]  # the inverse: inputs with other tensors in them
    state_of: Callable[[Any], Any]  # what else these objects hold
    names: Callable[[Any], list[str]]  # of the leaves of a call's inputs
    inputs: dict[str, Layout]
    planned: dict[str, tuple[int, ...] | None]  # global shapes of the inputs, where the plan knows them
    steps: dict[Any, Step] = field(default_factory=dict)
    where: tuple[int, ...] = ()
    batch_layouts: dict[str, Layout] = field(init=False)  # in which this rank's shards come
    known_names: dict[pytree.TreeSpec, list[str]] = field(default_factory=dict)
    random: Tensor | None = None  # state of the generator that dropout draws from, the same on every rank

    def __post_init__(self) -> None:
        self.batch_layouts = batch_layouts(self.inputs, self.planned)

    def call(self, module: nn.Module, args: tuple, kwargs: dict, compiled: bool) -> Any:
        inputs = self._bound(module, args, kwargs)
        leaves, spec = pytree.tree_flatten(self.listed(inputs))
        names = self._names(spec, inputs)
        wholes = [self._whole_shape(name, leaf) if isinstance(leaf, Tensor) else None for name, leaf in zip(names, leaves, strict=True)]
        step = self._step(inputs, spec, leaves, wholes, modes(module), compiled)
        tensors = [(name, leaf) for name, leaf, whole in zip(names, leaves, wholes, strict=True) if whole is not None]
        given = {name: self._local(name, leaf) for name, leaf in tensors}
        if not step.graphs.is_random:
            return self._run(step, module, dict(tensors), given)
        generator: Any = torch.cuda if self.device_mesh.device_type == "cuda" else torch
        own = generator.get_rng_state()
        generator.set_rng_state(share(own, None, "agreeing on a seed") if self.random is None else self.random)
        try:
            return self._run(step, module, dict(tensors), given)
        finally:
            self.random = generator.get_rng_state()
            generator.set_rng_state(own)

    def prepare(self, module: nn.Module, inputs: Any) -> Step:
        """The graphs for inputs like these, given whole: their shapes are from now on the planned ones."""
        bound = self._bound(module, *_arguments(inputs))
        leaves, spec = pytree.tree_flatten(self.listed(bound))
        pairs = zip(self._names(spec, bound), leaves, strict=True)
        self.planned = self.planned | {name: tuple(leaf.shape) for name, leaf in pairs if isinstance(leaf, Tensor)}
        wholes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        return self._step(bound, spec, leaves, wholes, modes(module), False)

    def _step(
        self,
        inputs: Any,
        spec: pytree.TreeSpec,
        leaves: Sequence[Any],
        wholes: Sequence[Shape | None],
        modes: Sequence[bool],
        by_inductor: bool,
    ) -> Step:
        pairs = list(zip(leaves, wholes, strict=True))
        key = (spec, tuple((whole, leaf.dtype) if whole is not None else leaf for leaf, whole in pairs), modes, self.state_of(inputs))
        if key not in self.steps:
            meta = [torch.empty(whole, dtype=leaf.dtype, device="meta") if whole is not None else leaf for leaf, whole in pairs]
            self.steps[key] = self.build(inputs, pytree.tree_unflatten(meta, spec), modes)
        if not by_inductor:
            return self.steps[key]
        return self.steps.setdefault((*key, "inductor"), replace(self.steps[key], make=compiled, made={}))

    def _names(self, spec: pytree.TreeSpec, inputs: Any) -> list[str]:
        if spec not in self.known_names:
            self.known_names[spec] = self.names(inputs)
        return self.known_names[spec]

    def _bound(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | dict:
        """The arguments of a call as they were planned: a dict by name in the plan's order, or a tuple by position."""
        if not kwargs and not self.is_by_name:
            return args
        own: Any = next(c for c in type(module).__mro__ if "forward" in vars(c) and not issubclass(c, Parallel))
        signature = inspect.signature(own.forward)
        bound = signature.bind(module, *args, **kwargs)
        if not self.is_by_name:
            places = [p for p in list(signature.parameters.values())[1:] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            given = [k for k, p in enumerate(places) if p.name in kwargs]
            if len(given) < len(kwargs):
                name = next(name for name in kwargs if name not in {p.name for p in places})
                raise ValueError(f"the plan's inputs came by position, {name!r} can come by name only; plan with a dict of inputs")
            last = max(*given, len(args) - 1) if args else max(given)
            return tuple(bound.arguments.get(p.name, p.default) for p in places[: last + 1])
        rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        more = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), "")
        if bound.arguments.get(more):
            raise ValueError(f"the plan's inputs came by name, {len(bound.arguments[more])} of this call have none; give them by name")
        named = {name: value for name, value in list(bound.arguments.items())[1:] if name not in (rest, more)}
        named |= bound.arguments.get(rest, {})
        first = {name: k for k, name in reversed(list(enumerate(name.split(".")[0] for name in self.planned)))}
        order = sorted(named, key=lambda name: first.get(name, len(first)))
        return {name: named[name] for name in order if named[name] is not None}

    @property
    def is_by_name(self) -> bool:
        """Were the plan's inputs keyword arguments?"""
        return any(re.fullmatch(r"input_\d+", name) is None for name in self.inputs)

    def shard(self, module: nn.Module, batch: Any, *, local: bool) -> Any:
        """As `Parallel.shard_inputs`."""
        args, kwargs = _arguments(batch)
        leaves, spec = pytree.tree_flatten(self.listed(kwargs or args))

        def bound(leaves: Sequence[Any]) -> Any:
            tree = pytree.tree_unflatten(leaves, spec)
            return self._bound(module, *((), tree) if kwargs else (tree, {}))

        flat, bound_spec = pytree.tree_flatten(bound([_Leaf(k) for k in range(len(leaves))]))
        pairs = zip(self._names(bound_spec, bound(leaves)), flat, strict=True)
        names = {leaf.index: name for name, leaf in pairs if isinstance(leaf, _Leaf)}
        made = [self._sharded(names[k], leaf, local) if isinstance(leaf, Tensor) and k in names else leaf for k, leaf in enumerate(leaves)]
        if local:
            self._check_one_batch({names[k]: x for k, x in enumerate(made) if isinstance(x, DTensor) and k in names})
        sharded = self.filled(kwargs or args, pytree.tree_unflatten(made, spec))
        return sharded[0] if isinstance(batch, Tensor) else type(batch)(sharded) if isinstance(batch, list) else sharded

    def _check_one_batch(self, sharded: Mapping[str, DTensor]) -> None:
        """Inputs that were planned with one first dim have one: else they were sharded otherwise than was taken here."""
        first: dict[int, str] = {}
        for name, x in sharded.items():
            if not (planned := self.planned.get(name)) or not x.dim():
                continue
            other = first.setdefault(planned[0], name)
            if x.shape[0] != sharded[other].shape[0]:
                layouts = ", ".join(f"{n} as {text(self.batch_layouts.get(n, self._layout(n)))}" for n in (other, name))
                raise ValueError(
                    f"shards of {other} and {name} make up inputs of {sharded[other].shape[0]} and {x.shape[0]} rows; they are of "
                    f"one batch. Shard them as model.input_layouts says: {layouts}"
                )

    def _sharded(self, name: str, given: Tensor, local: bool) -> DTensor:
        layout = self.batch_layouts.get(name, self._layout(name)) if local else self._layout(name)
        if isinstance(given, DTensor):
            return given.redistribute(placements=list(layout))
        device = self.device_mesh.device_type
        whole = self._shape_of_shards(name, given, layout) if local else tuple(given.shape)
        shard = given if local else part_of(given, layout, self.mesh, self.where)
        return as_dtensor(shard.to(device).contiguous(), spec_of(whole, given.dtype, layout, self.device_mesh))

    def _shape_of_shards(self, name: str, given: Tensor, layout: Layout) -> Shape:
        """The global shape of which `given` is this rank's shard: the planned one where that fits, else that of equal shards."""
        planned = self.planned.get(name)
        if planned is not None and part_of(torch.empty(planned, device="meta"), layout, self.mesh, self.where).shape == given.shape:
            return planned  # of uneven shards the global shape can't be told from one of them
        whole = list(given.shape)
        for placement, axis in zip(layout, self.mesh.axes, strict=True):
            if placement.is_shard():
                if placement.dim >= len(whole):
                    raise ValueError(f"{name} has shape {tuple(given.shape)}, but the plan shards it as {text(layout)}; plan this model")
                whole[placement.dim] *= axis.size
        return tuple(whole)

    def _layout(self, name: str) -> Layout:
        return self.inputs.get(name) or replicated(len(self.mesh.axes))

    def _whole_shape(self, name: str, given: Tensor) -> Shape:
        """The global shape of an input. A plain tensor is the whole input: of another shape than the planned one it could as well be
        a shard, so that has to be said."""
        shape, layout, planned = tuple(given.shape), self._layout(name), self.planned.get(name)
        if isinstance(given, DTensor) or shape == planned or all(p.is_replicate() for p in layout):
            return shape
        raise ValueError(
            f"{name} is a plain tensor of shape {shape}, the plan has {planned or 'no shape'} for it, sharded as {text(layout)}; a plain "
            "tensor is the whole input in its planned shape. Give model.shard_inputs(batch) of a whole batch of another shape, the same on "
            "every rank, or model.shard_inputs(batch, local=True) of this rank's shards, in the layouts model.input_layouts"
        )

    def _local(self, name: str, given: Tensor) -> Tensor:
        layout = self._layout(name)
        if isinstance(given, DTensor):
            if given.device_mesh != self.device_mesh:
                raise ValueError(f"{name} is a DTensor on {given.device_mesh}, the module is on {self.device_mesh}; use one mesh for both")
            return given.redistribute(placements=list(layout)).to_local()
        return part_of(given.to(self.device_mesh.device_type), layout, self.mesh, self.where).contiguous()

    def _run(self, step: Step, module: nn.Module, inputs: dict[str, Tensor], given: dict[str, Tensor]) -> Any:
        """inputs: as the caller has them; given: this rank's shards of them."""
        held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
        held |= step.constants | given
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
                name = key.removeprefix("buffer:")
                if name in inputs and name != key:
                    self._write(inputs[name], as_dtensor(local(value), self._spec(step, key, value)))
                elif name != key:
                    local(held[name]).copy_(local(value))
        return pytree.tree_unflatten([results.get(f"output:{k}", leaf) for k, leaf in enumerate(step.leaves)], step.structure)

    def _spec(self, step: Step, key: str, value: Tensor) -> DTensorSpec:
        return spec_of(step.shapes[key], value.dtype, step.graphs.slots[key].layout, self.device_mesh)

    def _write(self, given: Tensor, value: DTensor) -> None:
        """What the forward writes into an input of the caller, all of it where that is a plain tensor."""
        if isinstance(given, DTensor):
            given._local_tensor.copy_(value.redistribute(placements=given.placements).to_local())
        else:
            given.copy_(value.full_tensor())

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


def modes(module: nn.Module) -> tuple[bool, ...]:
    """Which modules are in training mode: of a model under fine-tuning, parts may not be."""
    return tuple(part.training for part in module.modules())


def local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def batch_layouts(inputs: Mapping[str, Layout], planned: Mapping[str, Shape | None]) -> dict[str, Layout]:
    """For each input the layout in which all inputs of its batch (those with the same first dim) can be loaded: from there each of them
    is sliced into its planned layout, nothing is sent."""
    made: dict[str, Layout] = {}
    for name, layout in inputs.items():
        batch = [other for key, other in inputs.items() if (planned.get(key) or (key,))[0] == (planned.get(name) or (name,))[0]]
        shared = list(replicated(len(layout)))
        for placement in {p for p in layout if p.is_shard()}:  # shards of shards of one dim are counted from the left
            axes = [[k for k, p in enumerate(other) if p == placement] for other in batch]
            for together in zip(*axes, strict=False):
                if len(set(together)) > 1:
                    break
                shared[together[0]] = placement
        made[name] = tuple(shared)
    return made


@dataclass(frozen=True)
class _Leaf:
    """In place of a leaf of a batch, to see where binding puts it."""

    index: int


def _arguments(batch: Any) -> tuple[tuple, dict]:
    """A batch as the arguments of a call: a mapping is by name, a tuple or list by position, anything else the only argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


class Parallel(nn.Module):
    """The methods that a parallel module has in place of its model's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self, args, kwargs, torch.compiler.is_compiling())

    def shard_inputs(self, batch: Any, *, local: bool = False) -> Any:
        """The inputs of a call as DTensors, each in the layout that the plan has for it; what is no tensor stays as it is.

        batch: a tuple, a dict by the names of forward's arguments, or a tensor: whole inputs of any shape, the same on every rank.
        local: they are what this rank has loaded, sharded as `input_layouts` says; shards are equal, or those of the planned shape.
        Nothing is sent. A call with a batch of another shape than the planned one captures the model again, once per shape.
        """
        return self.__dict__["_runner"].shard(self, batch, local=local)

    @property
    def input_layouts(self) -> dict[str, str]:
        """The layout in which `shard_inputs(batch, local=True)` expects each input: the same for all inputs of a batch. What the plan
        shards further is sliced on the way."""
        return {name: text(layout) for name, layout in self.__dict__["_runner"].batch_layouts.items()}

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
    refused = {name: _refusing(name, why) for name, why in NOT_PLANNED.items() if hasattr(of, name)}
    return type(f"Parallel{of.__name__}", (Parallel, of), {"__module__": of.__module__, "__doc__": of.__doc__, **refused})


_GATHERED = "load the gathered parameters into the model that was given to parallelize, and call it there: docs/huggingface.md"
NOT_PLANNED = {  # methods that a model may have and that a plan of its forward can't run; and what to do instead
    "generate": f"it calls the model with inputs that were not planned; {_GATHERED}",
    "save_pretrained": f"its files would hold this rank's shards; {_GATHERED}",
    "push_to_hub": f"its files would hold this rank's shards; {_GATHERED}",
    "resize_token_embeddings": "the plan is of another shape; resize the model, then plan it",
}


def _refusing(name: str, why: str) -> Callable[..., None]:
    def refused(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{name}() can't run on a parallel module: {why}")

    return refused


OF_PARTS = ("forward", *(name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("_hook") and "dict" not in name))


def refuse_parts(module: nn.Module) -> None:
    """From now on the module's inner modules can't be called, nor hooked: its forward is a graph that calls none of them."""
    for name, part in module.named_modules():
        if name and not isinstance(part, torch.jit.ScriptModule):
            part.__dict__.update({method: partial(_refuse_part, name, method) for method in OF_PARTS})


def _refuse_part(name: str, method: str, *args: Any, **kwargs: Any) -> None:
    asked = f"{name} can't be called" if method == "forward" else f"{name}.{method}() has no effect"
    raise ValueError(
        f"{asked}: it is a part of a parallel module, which runs the plan's graph and calls none of its parts; use the model that was "
        "given to parallelize, or return what you need from its forward and plan that"
    )


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
