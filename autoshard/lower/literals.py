"""Literals of an op that depend on the global shape, made local.

    view(x, [8, 16])   with the output sharded as S(0) over 4 ranks   ->   view(x_local, [2, 16])

ROWS has one entry per (ATen target, argument): how the local value follows from the local shapes of the op's tensors. Every other
literal is the same on every rank. Where an entry is missing, the local output has another shape than planned, and every run checks the
shapes after each op; so a wrong literal never passes unnoticed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from autoshard.graph import UPSAMPLED, Const, Op
from autoshard.torch_private import OpOverload

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """The global and local shapes of one op's tensors. `value` is the literal to replace."""

    arguments: dict[str, Any]
    global_inputs: tuple[Shape, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape | None, ...]
    value: Any

    @property
    def out(self) -> Shape:
        assert self.outputs[0] is not None
        return self.outputs[0]

    def local(self, name: str) -> Shape:
        """The local shape of a tensor argument."""
        return self.inputs[self.arguments[name].index]

    def unsharded(self, name: str) -> Shape:
        """The global shape of a tensor argument."""
        return self.global_inputs[self.arguments[name].index]


Rule = Callable[[Shapes], Any]


def out_shape(s: Shapes) -> Shape:
    return s.out


def out_strides(s: Shapes) -> Shape:
    """The dense strides of the local shape, with dims in the order of the global strides."""
    order = sorted(range(len(s.out)), key=lambda d: (s.value[d], -d))
    strides, step = [0] * len(s.out), 1
    for d in order:
        strides[d] = step
        step *= max(s.out[d], 1)
    return tuple(strides)


def repeats(s: Shapes) -> Shape:
    """As many repeats as in the global op where input and output are sharded alike; fewer where a repeated dim of the output is sharded."""
    sizes = (1,) * (len(s.out) - len(s.inputs[0])) + s.inputs[0]
    return tuple(o // max(i, 1) for o, i in zip(s.out, sizes, strict=True))


def groups_of_channels(s: Shapes) -> int:
    """Where channels are sharded, each rank has its own groups; otherwise every rank has all groups."""
    return s.value * s.local("input")[1] // s.unsharded("input")[1] if s.value > 1 else 1


NORM: dict[str, Rule] = {
    "N": lambda s: s.local("input")[0],
    "C": lambda s: s.local("input")[1],
    "HxW": lambda s: math.prod(s.local("input")[2:]),
    "group": groups_of_channels,
}
RESHAPING = ("view", "_unsafe_view", "view_copy", "_reshape_alias")
EMBEDDINGS = ("embedding_dense", "_embedding_bag", "_embedding_bag_dense")
SIZED = (
    *RESHAPING, "expand", "expand_copy", "as_strided", "full", "zeros", "_efficientzerotensor", "ones", "new_zeros", "new_ones", "new_full",
    "new_empty",
)  # fmt: skip
ROWS: dict[str, dict[str, Rule]] = {
    **{f"aten.{name}.default": {"size": out_shape} for name in SIZED},
    "aten.empty.memory_format": {"size": out_shape},
    "aten.reshape.default": {"shape": out_shape},
    **{f"aten.{name}.default": {"size": out_shape, "stride": out_strides} for name in ("empty_strided", "new_empty_strided")},
    "aten.repeat.default": {"repeats": repeats},
    "aten.affine_grid_generator.default": {"size": lambda s: (s.out[0], *s.value[1:])},
    **{f"aten.{name}_backward.default": {"input_sizes": out_shape} for name in ("slice", "select", "diagonal", "unfold")},
    **{f"aten.{name}_backward.default": {"num_weights": lambda s: s.out[0]} for name in EMBEDDINGS},
    **{f"aten.native_group_norm{way}.default": NORM for way in ("", "_backward")},
    "aten.convolution.default": {"groups": groups_of_channels},
    "aten.convolution_backward.default": {
        "groups": groups_of_channels, "bias_sizes": lambda s: None if s.value is None else (s.local("grad_output")[1],),
    },
    **{f"aten.{name}_backward.default": {"input_size": out_shape} for name in UPSAMPLED},
}

FACTORY = {name: name for name in ("dtype", "layout", "device", "pin_memory")}  # arguments of factories
# The op that runs in place of another: the result of a collective may have other strides than the captured tensor.
INSTEAD = {
    **{f"aten.{name}.default": ("aten.reshape.default", {"self": "self", "size": "shape"}) for name in RESHAPING},
    # The tangent of a constant in forward mode has no storage: no kernel of another operator may read it.
    "aten._efficientzerotensor.default": ("aten.zeros.default", {"size": "size", **FACTORY}),
    # Uninitialised tensors hold arbitrary values, and verify compares them: all ranks and the unsharded program hold zeros.
    "aten.empty.memory_format": ("aten.zeros.default", {"size": "size", **FACTORY}),
    "aten.new_empty.default": ("aten.new_zeros.default", {"self": "self", "size": "size", **FACTORY}),
    "aten.empty_like.default": ("aten.zeros_like.default", {n: n for n in ("self", "dtype", "layout", "device", "memory_format")}),
}

# Factories: a constant comes from the op's literals alone, so that every output layout is right for it.
FACTORIES = ("full", "zeros", "ones", "empty", "empty_strided", "_efficientzerotensor")
CONSTANTS = frozenset(t for t in ROWS if t.split(".")[1].removeprefix("new_") in FACTORIES)
UNINITIALISED = frozenset(t for t in CONSTANTS if "empty" in t) | {"aten.empty_like.default"}


@cache
def overload(target: str) -> OpOverload:
    """The ATen function of a target. ValueError when this torch has none."""
    namespace, name, which = target.split(".", 2)
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), which)
    except AttributeError:
        raise ValueError(f"torch {torch.__version__} has no operator {target}; the graph comes from another version") from None


def by_name(op: Op) -> dict[str, Any]:
    """The op's arguments by the names of its schema."""
    args, kwargs = op.literals
    names = [argument.name for argument in overload(op.target)._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **dict(kwargs)}


def localise(op: Op, *shapes: tuple[Shape | None, ...]) -> dict[str, Any]:
    """The op's arguments by name, with its size literals made local. shapes: global ones of inputs, local ones of inputs and outputs."""
    arguments, rows, (global_inputs, inputs, outputs) = by_name(op), ROWS.get(op.target, {}), shapes
    given = partial(Shapes, arguments, global_inputs, inputs, outputs)  # type: ignore[arg-type]
    return {name: rows[name](given(value)) if name in rows else value for name, value in arguments.items()}


def torch_constants(literal: Any, device: str) -> Any:
    """Const -> torch's object. A device literal becomes the device that runs the program."""
    if isinstance(literal, tuple):
        return tuple(torch_constants(item, device) for item in literal)
    if isinstance(literal, Const):
        return torch.device(device) if literal.kind == "device" else getattr(torch, literal.text)
    return literal

