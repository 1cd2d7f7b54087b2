"""A model that runs its plan: an nn.Module whose parameters are DTensors and whose forward is this rank's graph.

    sharded = parallelize(model, ...)            a copy of the model; its class is a subclass of the model's own
    loss = sharded(tokens, targets)              runs the forward graph; autograd's node keeps what the backward graph reads
    loss.backward()                              runs the backward graph; p.grad is a DTensor in the layout of p

There is one set of graphs per kind of call (shapes and constants of the inputs, training or not), traced when it is first needed.
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
from autoshard.lower.distribute import as_dtensor, spec_of
from autoshard.lower.fx_program import Boxed, RankGraphs, boxed, compiled
from autoshard.lower.overlap import Overlapped, described
from autoshard.lower.sharding import shard_of_rank
from autoshard.mesh import Mesh

Shape = tuple[int, ...]


@dataclass(eq=False)
class TracedCall:
    """The graphs that a rank runs for one kind of call, and how its outputs are put together."""

    graphs: RankGraphs
    inference: fx.GraphModule  # as forward, without saved values
    shapes: dict[str, tuple[int, ...]]  # global shapes of the graphs' outputs
    structure: pytree.TreeSpec  # of the model's return value
    leaves: Sequence[Any]  # of the return value, in order; those that are no constants come from the graphs' outputs
    constants: dict[str, Tensor]  # this rank's shards of tensors that the program reads beside the module's and the inputs
    position: list[Tensor]
    timelines: dict[str, tuple[Overlapped, ...]]  # by pass
    patiently: Callable[[], AbstractContextManager]  # the context in which the passes are prepared
    as_function: Callable[[fx.GraphModule], Boxed] = boxed
    passes: dict[str, Boxed] = field(default_factory=dict)

    def run(self, which: str, arguments: list[Tensor]) -> Sequence[Tensor]:
        """One pass: "forward" and "backward" of a training step, or "inference"."""
        if which not in self.passes:
            self._prepare_all(("inference",) if which == "inference" else ("forward", "backward"))
        with rank_lost(f"running the {which} pass"):
            return self.passes[which](arguments)

    def _prepare_all(self, names: Sequence[str]) -> None:
        graphs = {"forward": self.graphs.forward, "backward": self.graphs.backward, "inference": self.inference}
        with self.patiently():
            self.passes |= {name: self.as_function(graph) for name in names if (graph := graphs[name]) is not None}
            agree(None, "making the graphs ready")


@dataclass(eq=False)
class Runner:
    """The state of a parallel module beside its parameters: its mesh, its inputs' layouts and its traced calls."""

    mesh: Mesh
    device_mesh: DeviceMesh
    build: Callable[[Any, Any, Sequence[bool]], TracedCall]  # of a call's inputs, their global tensors on meta, modes of all modules
    listed: Callable[[Any], Any]  # inputs with each object replaced by the list of its tensors
    filled: Callable[[Any, Any], Any]  # the inverse: inputs with other tensors in them
    state_of: Callable[[Any], Any]  # what else these objects hold
    names: Callable[[Any], list[str]]  # of the leaves of a call's inputs
    inputs: dict[str, Layout]
    planned: dict[str, tuple[int, ...] | None]  # global shapes of the inputs, where the plan knows them
    calls: dict[Any, TracedCall] = field(default_factory=dict)
    where: tuple[int, ...] = ()
    batch_layouts: dict[str, Layout] = field(init=False)  # in which this rank loads its shards
    known_names: dict[pytree.TreeSpec, list[str]] = field(default_factory=dict)
    random: Tensor | None = None  # state of the generator that dropout draws from, the same on every rank

    def __post_init__(self) -> None:
        self.batch_layouts = batch_layouts(self.inputs, self.planned)

    def call(self, module: nn.Module, args: tuple, kwargs: dict, compiled: bool) -> Any:
        if torch.is_autocast_enabled(self.device_mesh.device_type):
            raise ValueError(
                "a parallel module is called inside torch.autocast, which would change the dtypes of its planned ops; plan with "
                'precision="bf16", or with autocast in the model\'s forward, and call the module outside of it'
            )
        bound = self._bound(module, args, kwargs)
        leaves, spec = pytree.tree_flatten(self.listed(bound))
        names = self._names(spec, bound)
        shapes = [self._global_shape(name, leaf) if isinstance(leaf, Tensor) else None for name, leaf in zip(names, leaves, strict=True)]
        traced = self._traced_call(bound, spec, leaves, shapes, modes(module), compiled)
        tensors = [(name, leaf) for name, leaf, shape in zip(names, leaves, shapes, strict=True) if shape is not None]
        inputs = {name: self._local(name, leaf) for name, leaf in tensors}
        if not traced.graphs.is_random:
            return self._run(traced, module, dict(tensors), inputs)
        generator: Any = torch.cuda if self.device_mesh.device_type == "cuda" else torch
        former = generator.get_rng_state()
        generator.set_rng_state(share(former, None, "agreeing on a seed") if self.random is None else self.random)
        try:
            return self._run(traced, module, dict(tensors), inputs)
        finally:
            self.random = generator.get_rng_state()
            generator.set_rng_state(former)

    def prepare(self, module: nn.Module, inputs: Any) -> TracedCall:
        """The graphs for these global inputs, whose shapes are from now on the planned ones."""
        bound = self._bound(module, *_arguments(inputs))
        leaves, spec = pytree.tree_flatten(self.listed(bound))
        pairs = zip(self._names(spec, bound), leaves, strict=True)
        self.planned = self.planned | {name: tuple(leaf.shape) for name, leaf in pairs if isinstance(leaf, Tensor)}
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        return self._traced_call(bound, spec, leaves, shapes, modes(module), False)

    def _traced_call(
        self,
        inputs: Any,
        spec: pytree.TreeSpec,
        leaves: Sequence[Any],
        shapes: Sequence[Shape | None],
        modes: Sequence[bool],
        by_inductor: bool,
    ) -> TracedCall:
        pairs = list(zip(leaves, shapes, strict=True))
        key = (spec, tuple((shape, leaf.dtype) if shape is not None else leaf for leaf, shape in pairs), modes, self.state_of(inputs))
        if key not in self.calls:
            meta = [torch.empty(shape, dtype=leaf.dtype, device="meta") if shape is not None else leaf for leaf, shape in pairs]
            self.calls[key] = self.build(inputs, pytree.tree_unflatten(meta, spec), modes)
        if not by_inductor:
            return self.calls[key]
        return self.calls.setdefault((*key, "inductor"), replace(self.calls[key], as_function=compiled, passes={}))

    def _names(self, spec: pytree.TreeSpec, inputs: Any) -> list[str]:
        if spec not in self.known_names:
            self.known_names[spec] = self.names(inputs)
        return self.known_names[spec]

    def _bound(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | dict:
        """The arguments of a call in the form that was planned: a dict by name in the plan's order, or a tuple by position."""
        if not kwargs and not self.is_by_name:
            return args
        own: Any = next(c for c in type(module).__mro__ if "forward" in vars(c) and not issubclass(c, ParallelModule))
        signature = inspect.signature(own.forward)
        bound = signature.bind(module, *args, **kwargs)
        if not self.is_by_name:
            places = [p for p in list(signature.parameters.values())[1:] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            by_name = [k for k, p in enumerate(places) if p.name in kwargs]
            if len(by_name) < len(kwargs):
                name = next(name for name in kwargs if name not in {p.name for p in places})
                raise ValueError(f"the plan's inputs came by position, {name!r} can come by name only; plan with a dict of inputs")
            last = max(*by_name, len(args) - 1) if args else max(by_name)
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
        """As `ParallelModule.shard_inputs`."""
        args, kwargs = _arguments(batch)
        leaves, spec = pytree.tree_flatten(self.listed(kwargs or args))

        def bound(leaves: Sequence[Any]) -> Any:
            tree = pytree.tree_unflatten(leaves, spec)
            return self._bound(module, *((), tree) if kwargs else (tree, {}))

        flat, bound_spec = pytree.tree_flatten(bound([_Leaf(k) for k in range(len(leaves))]))
        pairs = zip(self._names(bound_spec, bound(leaves)), flat, strict=True)
        names = {int(leaf): name for name, leaf in pairs if isinstance(leaf, _Leaf)}
        shards = [self._sharded(names[k], x, local) if isinstance(x, Tensor) and k in names else x for k, x in enumerate(leaves)]
        if local:
            self._check_one_batch({names[k]: x for k, x in enumerate(shards) if isinstance(x, DTensor) and k in names})
        sharded = self.filled(kwargs or args, pytree.tree_unflatten(shards, spec))
        return sharded[0] if isinstance(batch, Tensor) else type(batch)(sharded) if isinstance(batch, list) else sharded

    def _check_one_batch(self, sharded: Mapping[str, DTensor]) -> None:
        """ValueError where inputs that were planned with the same first dim differ in it: they were not sharded in the expected layouts."""
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

    def _sharded(self, name: str, x: Tensor, local: bool) -> DTensor:
        layout = self.batch_layouts.get(name, self._layout(name)) if local else self._layout(name)
        if isinstance(x, DTensor):
            return x.redistribute(placements=list(layout))
        device = self.device_mesh.device_type
        shape = self._shape_of_shards(name, x, layout) if local else tuple(x.shape)
        shard = x if local else shard_of_rank(x, layout, self.mesh, self.where)
        return as_dtensor(shard.to(device).contiguous(), spec_of(shape, x.dtype, layout, self.device_mesh))

    def _shape_of_shards(self, name: str, shard: Tensor, layout: Layout) -> Shape:
        """The global shape of which `shard` is this rank's shard: the planned one where that fits, otherwise that of equal shards."""
        planned = self.planned.get(name)
        if planned is not None and shard_of_rank(torch.empty(planned, device="meta"), layout, self.mesh, self.where).shape == shard.shape:
            return planned  # one of several uneven shards doesn't determine the global shape
        shape = list(shard.shape)
        for placement, axis in zip(layout, self.mesh.axes, strict=True):
            if placement.is_shard():
                if placement.dim >= len(shape):
                    raise ValueError(f"{name} has shape {tuple(shard.shape)}, but the plan shards it as {text(layout)}; plan this model")
                shape[placement.dim] *= axis.size
        return tuple(shape)

    def _layout(self, name: str) -> Layout:
        return self.inputs.get(name) or replicated(len(self.mesh.axes))

    def _global_shape(self, name: str, x: Tensor) -> Shape:
        """The global shape of an input. A plain tensor counts as the global input. If its shape isn't the planned one, it could as well
        be a shard: ValueError."""
        shape, layout, planned = tuple(x.shape), self._layout(name), self.planned.get(name)
        if isinstance(x, DTensor) or shape == planned or all(p.is_replicate() for p in layout):
            return shape
        raise ValueError(
            f"{name} is a plain tensor of shape {shape}, the plan has {planned or 'no shape'} for it, sharded as {text(layout)}; a plain "
            "tensor is the global input in its planned shape. Pass model.shard_inputs(batch) of a global batch of another shape, the same "
            "on every rank, or model.shard_inputs(batch, local=True) of this rank's shards, in the layouts model.input_layouts"
        )

    def _local(self, name: str, x: Tensor) -> Tensor:
        layout = self._layout(name)
        if isinstance(x, DTensor):
            if x.device_mesh != self.device_mesh:
                raise ValueError(f"{name} is a DTensor on {x.device_mesh}, the module is on {self.device_mesh}; use one mesh for both")
            return x.redistribute(placements=list(layout)).to_local()
        return shard_of_rank(x.to(self.device_mesh.device_type), layout, self.mesh, self.where).contiguous()

    def _run(self, traced: TracedCall, module: nn.Module, inputs: dict[str, Tensor], locals_: dict[str, Tensor]) -> Any:
        """inputs: the caller's tensors; locals_: this rank's shards of them."""
        held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
        held |= traced.constants | locals_
        tensors = [held[name] for name in traced.graphs.loads]
        trains = traced.graphs.backward is not None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if trains:
            outputs = _Train.apply(self, traced, *tensors)
        else:
            with torch.no_grad():
                outputs = self.outputs(traced, traced.run("inference", [local(t) for t in tensors] + traced.position))
        results = dict(zip(traced.graphs.outputs, outputs, strict=True))
        with torch.no_grad():
            for key, value in results.items():
                name = key.removeprefix("buffer:")
                if name in inputs and name != key:
                    self._write(inputs[name], as_dtensor(local(value), self._spec(traced, key, value)))
                elif name != key:
                    local(held[name]).copy_(local(value))
        return pytree.tree_unflatten([results.get(f"output:{k}", leaf) for k, leaf in enumerate(traced.leaves)], traced.structure)

    def _spec(self, traced: TracedCall, key: str, value: Tensor) -> DTensorSpec:
        return spec_of(traced.shapes[key], value.dtype, traced.graphs.slots[key].layout, self.device_mesh)

    def _write(self, target: Tensor, value: DTensor) -> None:
        """Writes what the forward wrote into an input of the caller: the global tensor where that is a plain tensor."""
        if isinstance(target, DTensor):
            target._local_tensor.copy_(value.redistribute(placements=target.placements).to_local())
        else:
            target.copy_(value.full_tensor())

    def outputs(self, traced: TracedCall, locals_: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The graph's outputs for the user: plain tensors where they are replicated, otherwise DTensors."""
        outputs = []
        for key, x in zip(traced.graphs.outputs, locals_, strict=False):
            layout = traced.graphs.slots[key].layout
            if all(p.is_replicate() for p in layout) or key.startswith("buffer:"):
                outputs.append(x)
            else:
                outputs.append(as_dtensor(x, spec_of(traced.shapes[key], x.dtype, layout, self.device_mesh)))
        return tuple(outputs)

    def tangent(self, traced: TracedCall, name: str, x: Tensor) -> Tensor:
        layout = traced.graphs.slots[name].layout
        if isinstance(x, DTensor):
            return x.redistribute(placements=list(layout)).to_local()
        return shard_of_rank(x, layout, self.mesh, self.where).contiguous()


def modes(module: nn.Module) -> tuple[bool, ...]:
    """Which modules are in training mode: of a model under fine-tuning, parts may not be."""
    return tuple(part.training for part in module.modules())


def local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def batch_layouts(inputs: Mapping[str, Layout], planned: Mapping[str, Shape | None]) -> dict[str, Layout]:
    """For each input the layout in which all inputs of its batch (those with the same first dim) can be loaded. Each of them is then
    sliced into its planned layout without communication."""
    layouts: dict[str, Layout] = {}
    for name, layout in inputs.items():
        batch = [other for key, other in inputs.items() if (planned.get(key) or (key,))[0] == (planned.get(name) or (name,))[0]]
        shared = list(replicated(len(layout)))
        for placement in {p for p in layout if p.is_shard()}:  # several axes on one dim shard it from left to right
            axes = [[k for k, p in enumerate(other) if p == placement] for other in batch]
            for together in zip(*axes, strict=False):
                if len(set(together)) > 1:
                    break
                shared[together[0]] = placement
        layouts[name] = tuple(shared)
    return layouts


class _Leaf(int):
    """The number of a leaf of a batch, in its place, to see where the binding of arguments puts it. An int, as capture opens objects."""


def _arguments(batch: Any) -> tuple[tuple, dict]:
    """A batch as the arguments of a call: a mapping is by name, a tuple or list by position, anything else the only argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


class ParallelModule(nn.Module):
    """The methods that replace the model's own in a parallel module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self, args, kwargs, torch.compiler.is_compiling())

    def shard_inputs(self, batch: Any, *, local: bool = False) -> Any:
        """The inputs of a call as DTensors, each in the layout that the plan has for it. Values that are not tensors stay unchanged.

        batch: a tuple, a dict by the names of forward's arguments, or a tensor: global inputs of any shape, the same on every rank.
        local: the batch holds this rank's shards, in the layouts `input_layouts`; shards have equal sizes, or those of the planned shape.
        There is no communication. A call with a batch of another shape than the planned one captures the model again, once per shape.
        """
        return self.__dict__["_runner"].shard(self, batch, local=local)

    @property
    def input_layouts(self) -> dict[str, str]:
        """The layout in which `shard_inputs(batch, local=True)` expects each input: the same for all inputs of a batch. Inputs that the
        plan shards on more axes are sliced after that."""
        return {name: text(layout) for name, layout in self.__dict__["_runner"].batch_layouts.items()}

    @property
    def random_state(self) -> Tensor | None:
        """The state of the generator from which dropout draws, the same on every rank; None before the first draw."""
        return self.__dict__["_runner"].random

    @random_state.setter
    def random_state(self, state: Tensor) -> None:
        self.__dict__["_runner"].random = state

    def timeline(self) -> str:
        """The estimated time line of the last kind of call as text: which collectives overlap with compute. Empty before the first call."""
        calls = self.__dict__["_runner"].calls
        return described(next(reversed(calls.values())).timelines, self.__dict__["_runner"].mesh) if calls else ""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """From now on inductor compiles the rank's graphs, as with torch.compile(module)."""
        self.__dict__["_by_inductor"] = True


@torch.compiler.disable
def _call(module: nn.Module, args: tuple, kwargs: dict, compiling: bool) -> Any:
    """Runs outside of dynamo: the graphs are traced already, and are compiled without it."""
    state = module.__dict__
    return state["_runner"].call(module, args, kwargs, compiling or state.get("_by_inductor", False))


def parallel_class(of: type) -> type:
    refused = {name: _refusing(name, why) for name, why in NOT_PLANNED.items() if hasattr(of, name)}
    return type(f"Parallel{of.__name__}", (ParallelModule, of), {"__module__": of.__module__, "__doc__": of.__doc__, **refused})


_GATHERED = "load the gathered parameters into the model that was given to parallelize, and call it there: docs/huggingface.md"
NOT_PLANNED = {  # methods that a model may have, which a plan of its forward can't run, and what to do instead
    "generate": f"it calls the model with inputs that were not planned; {_GATHERED}",
    "save_pretrained": f"its files would hold this rank's shards; {_GATHERED}",
    "push_to_hub": f"its files would hold this rank's shards; {_GATHERED}",
    "resize_token_embeddings": "the plan is of another shape; resize the model, then plan it",
}


def _refusing(name: str, why: str) -> Callable[..., None]:
    def refused(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{name}() can't run on a parallel module: {why}")

    return refused


HOOKS = tuple(m for m in dir(nn.Module) if m.startswith("register_") and m.endswith("_hook") and "dict" not in m)
REFUSED = ("forward", *HOOKS)


def refuse_parts(module: nn.Module) -> None:
    """From now on the module's inner modules can't be called, nor hooked: its forward is a graph that calls none of them."""
    for name, inner in module.named_modules():
        if name and not isinstance(inner, torch.jit.ScriptModule):
            inner.__dict__.update({method: partial(_refuse_part, name, method) for method in REFUSED})


def _refuse_part(name: str, method: str, *args: Any, **kwargs: Any) -> None:
    asked = f"{name} can't be called" if method == "forward" else f"{name}.{method}() has no effect"
    raise ValueError(
        f"{asked}: it is a part of a parallel module, which runs the plan's graph and calls none of its parts; use the model that was "
        "given to parallelize, or return what you need from its forward and plan that"
    )


class _Train(torch.autograd.Function):
    """The two graphs as one differentiable function of parameters, buffers and inputs."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, traced: TracedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        graphs = traced.graphs
        inputs = [local(t) for t in tensors]
        values = traced.run("forward", inputs + traced.position)
        outputs = runner.outputs(traced, values)
        updated = {id(x) for name, x in zip(graphs.loads, inputs, strict=True) if f"buffer:{name}" in graphs.outputs}
        returned = {id(local(output)) for output in outputs}
        saved = values[len(graphs.outputs) :]
        # a saved output would make a reference cycle with its node; a buffer gets its new value before the backward pass
        ctx.saved = [x.clone() if id(x) in updated else x.detach() if id(x) in returned else x for x in saved]
        ctx.versions = [x._version for x in ctx.saved]
        ctx.runner, ctx.traced = runner, traced
        ctx.specs = [t._spec if isinstance(t, DTensor) else None for t in tensors]
        pairs = zip(graphs.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(output for key, output in pairs if _tangent(key) not in graphs.tangents))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        runner, traced, saved = ctx.runner, ctx.traced, ctx.saved
        graphs = traced.graphs
        if saved is None:
            raise RuntimeError("backward() was called a second time on one forward pass, whose values are freed; call the module again")
        if any(x._version != version for x, version in zip(saved, ctx.versions, strict=True)):
            raise RuntimeError("a parameter or input was changed between forward and backward; call backward() before optimizer.step()")
        ctx.saved = None
        tangents = {_tangent(key): tangent for key, tangent in zip(graphs.outputs, grad_outputs, strict=True)}
        for name in graphs.tangents:
            saved.append(runner.tangent(traced, name, tangents[name]))
        saved += traced.position
        gradients = dict(zip(graphs.gradients, traced.run("backward", saved), strict=True))
        seen: set[tuple[int, int]] = set()
        grad_inputs = []
        for name, spec, needed in zip(graphs.loads, ctx.specs, ctx.needs_input_grad[2:], strict=True):
            grad = gradients.get(f"gradient:{name}") if needed else None
            grad_inputs.append(None if grad is None else _gradient(grad, spec, graphs.slots[f"gradient:{name}"].layout, seen))
        return (None, None, *grad_inputs)


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
