"""The inputs of a call of a parallel module: which input of the plan each argument is, and which shard of it this rank needs.

A plan names its inputs (`input_0`, or the names of keyword arguments) and has a layout and a global shape for each. An argument may be a
plain tensor, which is the global input in its planned shape, or a DTensor of any shape, which `shard` makes of other batches.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.layout import Layout, replicated, text
from autoshard.runtime.distribute import Where
from autoshard.torch_private import pytree

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BoundInputs:
    """The inputs of one call in the plan's form, and their leaves."""

    inputs: Any  # a dict by name in the plan's order, or a tuple by position
    structure: pytree.TreeSpec
    leaves: Sequence[Any]
    names: Sequence[str]  # of the leaves
    shapes: Sequence[Shape | None]  # global shapes of the leaves; None where a leaf is no tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: leaf for name, leaf, shape in zip(self.names, self.leaves, self.shapes, strict=True) if shape is not None}

    @property
    def named_shapes(self) -> dict[str, Shape]:
        return {name: shape for name, shape in zip(self.names, self.shapes, strict=True) if shape is not None}

    def on_meta(self) -> Any:
        """The inputs as global tensors on the meta device."""
        pairs = zip(self.leaves, self.shapes, strict=True)
        meta = [torch.empty(shape, dtype=x.dtype, device="meta") if shape is not None else x for x, shape in pairs]
        return pytree.tree_unflatten(meta, self.structure)

    @property
    def key(self) -> tuple:
        """Equal for calls that one capture serves."""
        pairs = zip(self.leaves, self.shapes, strict=True)
        return (self.structure, tuple((shape, x.dtype) if shape is not None else (type(x), repr(x)) for x, shape in pairs))  # 1 == True


@dataclass(frozen=True)
class Pads:
    """How inputs whose shape the plan doesn't cover are padded."""

    values: Mapping[str, float]  # by input
    shapes: Callable[[dict[str, Shape]], dict[str, Shape]]  # to which inputs of these shapes are padded


def padded(name: str, x: Tensor, shape: Shape, values: Mapping[str, float]) -> Tensor:
    """An input padded at the end of each dim. ValueError where it has no value to be padded with."""
    if tuple(x.shape) == shape:
        return x
    if name not in values:
        raise ValueError(f"{name} of {tuple(x.shape)} is to be padded to {shape}; say with what, as pad={{{name!r}: 0}}")
    ends = [n for a, b in zip(reversed(x.shape), reversed(shape), strict=True) for n in (0, b - a)]
    return torch.nn.functional.pad(x, ends, value=values[name])


@dataclass(eq=False)
class CallInputs:
    """How a parallel module's inputs were planned."""

    where: Where
    listed: Callable[[Any], Any]  # inputs with each object replaced by the list of its tensors
    filled: Callable[[Any, Any], Any]  # the inverse: inputs with other tensors in them
    names: Callable[[Any], list[str]]  # of the leaves of a call's inputs
    signature: inspect.Signature  # of the model's forward
    layouts: dict[str, Layout]
    planned: dict[str, Shape | None]  # global shapes, where the plan knows them
    pads: Pads | None = None  # where a plan for ranges of sizes has inputs padded
    loaded: dict[str, Layout] = field(init=False)  # in which this rank loads its shards
    known_names: dict[pytree.TreeSpec, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loaded = batch_layouts(self.layouts, self.planned)

    def of_call(self, args: tuple, kwargs: dict) -> BoundInputs:
        return self._read(self._bound(args, kwargs), self._global_shape)

    def of_any_shape(self, args: tuple, kwargs: dict) -> BoundInputs:
        """The inputs of a call in the shapes that its tensors have."""
        return self._read(self._bound(args, kwargs), lambda _, leaf: tuple(leaf.shape))

    def as_planned(self, batch: Any) -> BoundInputs:
        """The inputs of a call with this global batch, whose shapes are from now on the planned ones."""
        bound = self.of_any_shape(*arguments_of(batch))
        self.planned = {**self.planned, **bound.named_shapes}
        return bound

    def _read(self, inputs: Any, shape_of: Callable[[str, Tensor], Shape]) -> BoundInputs:
        leaves, structure = pytree.tree_flatten(self.listed(inputs))
        names = self._names(structure, inputs)
        shapes = [shape_of(name, leaf) if isinstance(leaf, Tensor) else None for name, leaf in zip(names, leaves, strict=True)]
        return BoundInputs(inputs, structure, leaves, names, shapes)

    def shards(self, bound: BoundInputs) -> dict[str, Tensor]:
        return {name: self._local(name, x) for name, x in bound.tensors.items()}

    def resized(self, batch: Any) -> str:
        """The inputs whose shapes are not the planned ones, in words; empty where all are as planned."""
        leaves, structure = pytree.tree_flatten(self.listed(batch))
        pairs = zip(self._names(structure, batch), leaves, strict=True)
        shapes = {name: (tuple(x.shape), self.planned.get(name)) for name, x in pairs if isinstance(x, Tensor)}
        return " and ".join(f"{name} is {now} instead of {then}" for name, (now, then) in shapes.items() if then and now != then)

    def _names(self, spec: pytree.TreeSpec, inputs: Any) -> list[str]:
        if spec not in self.known_names:
            self.known_names[spec] = self.names(inputs)
        return self.known_names[spec]

    def _bound(self, args: tuple, kwargs: dict) -> tuple | dict:
        """The arguments of a call in the form that was planned: a dict by name in the plan's order, or a tuple by position."""
        if not kwargs and not self.is_by_name:
            return args
        signature = self.signature
        bound = signature.bind(None, *args, **kwargs)
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
        default = {p.name: p.default for p in signature.parameters.values()}  # where it is no None, a None is another value
        return {name: named[name] for name in order if named[name] is not None or default.get(name) is not None}

    @property
    def is_by_name(self) -> bool:
        return any(re.fullmatch(r"input_\d+", name) is None for name in self.layouts)

    def microbatches(self, batch: Any, number: int, *, local: bool) -> Callable[[int], Any]:
        """The inputs of microbatch k as DTensors, as `ParallelModule.microbatches` splits a batch."""
        leaves, spec, names = self._named_leaves(batch)
        tensors = {k: x for k, x in enumerate(leaves) if isinstance(x, Tensor) and k in names}
        repeated = {k for k, x in tensors.items() if tuple(x.shape) == self._planned_shape(names[k], local)}
        split = {k for k, x in tensors.items() if k not in repeated and x.dim() and x.shape[0] % number == 0}
        if any(isinstance(x, DTensor) for x in tensors.values()) or split | repeated != set(tensors) or not (split or number == 1):
            shapes = ", ".join(f"{names[k]} of {tuple(x.shape)}" for k, x in tensors.items())
            raise ValueError(
                f"the batch has {shapes}; expected plain tensors of {number} times the planned first dim, which are the "
                f"{number} microbatches of a step"
            )

        def inputs(index: int) -> Any:
            parts = [x.chunk(number)[index] if k in split else x for k, x in enumerate(leaves)]
            args, kwargs = arguments_of(batch)
            return self.shard(self.filled(kwargs or args, pytree.tree_unflatten(parts, spec)), local=local)

        return inputs

    def _planned_shape(self, name: str, local: bool) -> Shape | None:
        planned = self.planned.get(name)
        if planned is None or not local:
            return planned
        return self.where.local_shape(planned, self.loaded.get(name, self._layout(name)))

    def _named_leaves(self, batch: Any) -> tuple[list[Any], pytree.TreeSpec, dict[int, str]]:
        """The leaves of a batch, its structure, and the plan's names of those that are inputs."""
        args, kwargs = arguments_of(batch)
        leaves, spec = pytree.tree_flatten(self.listed(kwargs or args))

        def bound(leaves: Sequence[Any]) -> Any:
            tree = pytree.tree_unflatten(leaves, spec)
            return self._bound(*((), tree) if kwargs else (tree, {}))

        flat, bound_spec = pytree.tree_flatten(bound([_Leaf(k) for k in range(len(leaves))]))
        pairs = zip(self._names(bound_spec, bound(leaves)), flat, strict=True)
        return leaves, spec, {int(leaf): name for name, leaf in pairs if isinstance(leaf, _Leaf)}

    def shard(self, batch: Any, *, local: bool) -> Any:
        """As `ParallelModule.shard_inputs`."""
        (args, kwargs), (leaves, spec, names) = arguments_of(batch), self._named_leaves(batch)
        if self.pads is not None and not local:
            tensors = {names[k]: x for k, x in enumerate(leaves) if isinstance(x, Tensor) and k in names}
            shapes = self.pads.shapes({name: tuple(x.shape) for name, x in tensors.items()})
            plain = {name: tensors[name] for name in shapes if not isinstance(tensors[name], DTensor)}
            grown = {name: padded(name, x, shapes[name], self.pads.values) for name, x in plain.items()}
            leaves = [grown.get(names[k], x) if k in names else x for k, x in enumerate(leaves)]
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
                layouts = ", ".join(f"{n} as {text(self.loaded.get(n, self._layout(n)))}" for n in (other, name))
                raise ValueError(
                    f"shards of {other} and {name} make up inputs of {sharded[other].shape[0]} and {x.shape[0]} rows; they are of "
                    f"one batch. Shard them as model.input_layouts says: {layouts}"
                )

    def _sharded(self, name: str, x: Tensor, local: bool) -> DTensor:
        layout = self.loaded.get(name, self._layout(name)) if local else self._layout(name)
        if isinstance(x, DTensor):
            return x.redistribute(placements=list(layout))
        shape = self._shape_of_shards(name, x, layout) if local else tuple(x.shape)
        shard = x.to(self.where.device).contiguous() if local else self.where.shard(x, layout)
        return self.where.dtensor(shard, shape, layout).requires_grad_(x.requires_grad)

    def _shape_of_shards(self, name: str, shard: Tensor, layout: Layout) -> Shape:
        """The global shape of which `shard` is this rank's shard: the planned one where that fits, otherwise that of equal shards."""
        planned = self.planned.get(name)
        if planned is not None and self.where.local_shape(planned, layout) == tuple(shard.shape):
            return planned  # one of several uneven shards doesn't determine the global shape
        shape = list(shard.shape)
        for placement, axis in zip(layout, self.where.mesh.axes, strict=True):
            if placement.is_shard():
                if placement.dim >= len(shape):
                    raise ValueError(f"{name} has shape {tuple(shard.shape)}, but the plan shards it as {text(layout)}; plan this model")
                shape[placement.dim] *= axis.size
        return tuple(shape)

    def _layout(self, name: str) -> Layout:
        return self.layouts.get(name) or replicated(len(self.where.mesh.axes))

    def _global_shape(self, name: str, x: Tensor) -> Shape:
        """The global shape of an input. A plain tensor counts as the global input. If its shape isn't the planned one, it could as well
        be a shard: ValueError."""
        shape, layout, planned = tuple(x.shape), self._layout(name), self.planned.get(name)
        if isinstance(x, DTensor) or shape == planned or all(p.is_replicate() for p in layout):
            return shape
        raise ValueError(
            f"{name} is a plain tensor of shape {shape}, the plan has {planned or 'no shape'} for it, sharded as {text(layout)}; a plain "
            "tensor is the global input in its planned shape. Pass model.shard_inputs(batch) of a global batch of another shape, the same "
            "on every rank, or model.shard_inputs(batch, local=True) of this rank's shards (model.input_layouts says which)"
        )

    def _local(self, name: str, x: Tensor) -> Tensor:
        if isinstance(x, DTensor) and x.device_mesh != self.where.device_mesh:
            raise ValueError(f"{name} is a DTensor on {x.device_mesh}, the module is on {self.where.device_mesh}; use one mesh for both")
        return self.where.local(x, self._layout(name))


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


def arguments_of(batch: Any) -> tuple[tuple, dict]:
    """A batch as the arguments of a call: a mapping is by name, a tuple or list by position, anything else the only argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}
