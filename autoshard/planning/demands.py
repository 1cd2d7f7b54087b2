"""The choices that remain for each tensor under the user's demands: pins, kept layouts and forbidden layouts.

    pins      layout by name or glob: the tensor has this layout. An exact name wins over a glob, a later glob over an earlier one
    keep      layout by name, of an older plan, unless a pin governs the tensor; or all layouts of an op, `inputs -> outputs`, each
              list separated by `;`
    forbid    layouts by name or glob: the tensor has another layout. All of them hold
    layout    a placement per mesh axis; `*` stands for any:  "*,S(0)"

A glob is one of fnmatch, in which `*` also matches dots; it looks at parameters, buffers and inputs, and at ops only where it matches
none of those. Which pin governs which tensor is decided once, from all pins together. After that a pin only forbids choices, so that
taking one away never makes less possible.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
from torch.distributed.tensor.placement_types import Placement

from autoshard.formulate import Formulation
from autoshard.graph import Graph
from autoshard.layout import Layout, parse, placement_text, why_illegal
from autoshard.planning.options import Demand, Options
from autoshard.solution import Solution

Pattern = tuple[Placement | None, ...]  # a layout in which None stands for any placement
ROW = "->"  # in a kept layout, between the input layouts and the output layouts of an op
NEAR = 0.5  # how similar a name must be to be suggested
SHOWN = 5  # names of which a sentence names some


@dataclass(frozen=True, eq=False)
class Demanded:
    """A demand and which choices it leaves, by node; other nodes are free."""

    demand: Demand
    allowed: Mapping[int, np.ndarray] = field(default_factory=dict)


def allowed_by_pins(formulated: Formulation, options: Options) -> dict[int, np.ndarray]:
    """Which choices the user's pins leave, by node; ValueError on an unknown name or a layout that can't be."""
    return together(demanded(formulated, options))


def together(demands: Iterable[Demanded]) -> dict[int, np.ndarray]:
    """Which choices all of the demands leave, by node."""
    kept: dict[int, np.ndarray] = {}
    for one in demands:
        for node, keep in one.allowed.items():
            kept[node] = keep & kept[node] if node in kept else keep
    return kept


def demanded(formulated: Formulation, options: Options) -> list[Demanded]:
    """The demands on layouts, in the order given: pins, kept layouts, forbidden ones, skip_fully_replicated."""
    masks = _Masks(formulated)
    demands = [_pinned(masks, "pin", name, options.pins[name], nodes) for name, nodes in _governed(formulated.graph, options.pins).items()]
    pinned = {node for one in demands for node in one.allowed}
    for name, written in options.keep.items():
        nodes = _find(formulated.graph, name, "keep", exactly=True)
        if not pinned.intersection(nodes.values()):
            row = isinstance(written, str) and ROW in written
            demands.append(_kept_row(masks, name, written, nodes) if row else _pinned(masks, "keep", name, written, nodes))
    governed = {node for one in demands for node in one.allowed}
    demands += [_forbidden(masks, name, written) for name, layouts in options.forbid.items() for written in layouts]
    if options.skip_fully_replicated:
        demands.append(Demanded(Demand("skip_fully_replicated"), _sharded_only(formulated, governed)))
    return demands


def broken_by(solution: Solution, graph: Graph, options: Options) -> list[Demand]:
    """The pins and forbidden layouts of the options that a plan of this graph does not obey; ValueError on an unknown name."""
    layouts = [solution.layouts[op.name].outputs[0] if op.outputs else None for op in graph.ops]

    def obeys(node: int, pattern: Pattern) -> bool:
        return _matches(pattern, None if (written := layouts[node]) is None else parse(written))

    broken = []
    for name, nodes in _governed(graph, options.pins).items():
        pattern = _pattern(options.pins[name], f"pin on {name!r}")
        if not all(obeys(node, pattern) for node in nodes.values()):
            broken.append(Demand("pin", name, pattern_text(pattern)))
    for name, several in options.forbid.items():
        for pattern in (_pattern(written, f"forbid on {name!r}") for written in several):
            if any(obeys(node, pattern) for node in _find(graph, name, "forbid").values()):
                broken.append(Demand("forbid", name, pattern_text(pattern)))
    return broken


def _pinned(masks: _Masks, kind: str, name: str, written: object, nodes: Mapping[str, int]) -> Demanded:
    pattern = _pattern(written, f"{kind} on {name!r}")
    allowed = {}
    for tensor, node in nodes.items():
        keep = masks.of(node, pattern)
        if not keep.any():
            on = f"{kind} on {name!r}" + ("" if tensor == name else f" ({tensor})")
            raise ValueError(f"{on}: {masks.why_not(node, pattern)}")
        allowed[node] = keep
    return Demanded(Demand(kind, name, pattern_text(pattern)), allowed)


def _kept_row(masks: _Masks, name: str, written: str, nodes: Mapping[str, int]) -> Demanded:
    """As `_pinned`, for all output layouts of an op and, where they are written, its input layouts."""
    inputs, outputs = (tuple(map(_layout_or_none, part.split(";"))) if part.strip() else None for part in written.split(ROW, 1))
    allowed = {}
    for node in nodes.values():
        of = masks.formulated.candidates.of[node]
        keep = np.array([(inputs is None or tuple(c.inputs) == inputs) and (outputs is None or tuple(c.outputs) == outputs) for c in of])
        if not keep.any():
            target = masks.formulated.graph.ops[node].target
            instead = "edit its output layouts alone, and plan the rest"
            raise ValueError(f"keep on {name!r}: {target} can't have the layouts {written}; {instead}")
        allowed[node] = keep
    return Demanded(Demand("keep", name, written), allowed)


def _layout_or_none(written: str) -> Layout | None:
    return None if written.strip() == "None" else parse(written)


def _forbidden(masks: _Masks, name: str, written: object) -> Demanded:
    nodes = _find(masks.formulated.graph, name, "forbid")
    pattern = _pattern(written, f"forbid on {name!r}")
    allowed = {node: ~masks.of(node, pattern) for node in nodes.values()}
    if all(keep.all() for keep in allowed.values()):
        node = next(iter(nodes.values()))
        raise ValueError(f"forbid on {name!r}: nothing is forbidden by it, {masks.why_not(node, pattern)}")
    return Demanded(Demand("forbid", name, pattern_text(pattern)), allowed)


def _governed(graph: Graph, pins: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """By pin the tensors that it governs, as {name: node}: an exact name before any glob, a later glob before an earlier one."""
    matches = {name: _find(graph, name, "pin") for name in pins}
    exact = {node for name, nodes in matches.items() for tensor, node in nodes.items() if tensor == name}
    last = {node: name for name, nodes in matches.items() for node in nodes.values()}
    return {
        name: {tensor: node for tensor, node in nodes.items() if (tensor == name if node in exact else last[node] == name)}
        for name, nodes in matches.items()
    }


def _find(graph: Graph, name: str, kind: str, *, exactly: bool = False) -> dict[str, int]:
    """The nodes that a name or a glob matches, each by one of its names; ValueError where it matches none."""
    tied = dict(graph.tied)
    if (known := tied.get(name, name)) in graph.index:
        return {name: graph.index[known]}
    stored = [op.name for op in graph.ops if op.is_placeholder] + list(tied)
    if not exactly and any(sign in name for sign in "*?["):
        for names in (stored, list(graph.index)):
            nodes: dict[int, str] = {}
            for n in names:
                if fnmatchcase(n, name):
                    nodes.setdefault(graph.index[tied.get(n, n)], n)
            if nodes:
                return {n: node for node, n in nodes.items()}
        raise ValueError(f"{kind} on {name!r}: no tensor of the model matches" + near_names(name, stored))
    raise ValueError(f"{kind} on {name!r}: the model has no such tensor" + near_names(name, [*graph.index, *tied]))


def near_names(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that suggests names: those that are near, or some of all."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=NEAR)
    if not near:  # a glob resembles no name, but its last part may resemble that of a name
        ends: dict[str, str] = {}
        for known in names:
            ends.setdefault(known.rpartition(".")[2], known)
        near = [ends[end] for end in difflib.get_close_matches(name.rpartition(".")[2], list(ends), n=3, cutoff=NEAR)]
    if near or not names:
        return f"; near are {', '.join(near)}" if near else ""
    return f"; it has {', '.join(names[:SHOWN])}" + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _pattern(written: object, what: str) -> Pattern:
    if not isinstance(written, str):
        raise ValueError(f"{what}: {written!r} is no layout; expected R, S(dim) per mesh axis, for example 'S(0),R'")
    parts = [part.strip() for part in written.split(",")]
    if "*" not in parts:
        return parse(written)
    return tuple(None if part == "*" else parse(part)[0] for part in parts)


def pattern_text(pattern: Pattern) -> str:
    return ",".join("*" if p is None else placement_text(p) for p in pattern)


class _Masks:
    """Which choices of a node have a layout; ops of one signature share their candidates and are asked once."""

    def __init__(self, formulated: Formulation):
        self.formulated = formulated
        self.masks: dict[tuple[int, Pattern], np.ndarray] = {}

    def of(self, node: int, pattern: Pattern) -> np.ndarray:
        candidates = self.formulated.candidates.of[node]
        key = (id(candidates), pattern)
        if key not in self.masks:
            self.masks[key] = np.array([_matches(pattern, c.outputs[0]) for c in candidates], dtype=bool)
        return self.masks[key]

    def why_not(self, node: int, pattern: Pattern) -> str:
        """Why no choice of the node has such a layout."""
        graph, mesh = self.formulated.graph, self.formulated.mesh
        tensor = graph.ops[node].outputs[0]
        placements = tuple(p for p in pattern if p is not None)
        if len(pattern) != len(mesh.axes):
            shape = "x".join(map(str, mesh.shape))
            return f"layout {pattern_text(pattern)} has {len(pattern)} placements, the mesh {shape} has {len(mesh.axes)} axes"
        if tensor is not None and len(placements) == len(pattern) and (reason := why_illegal(tensor.shape, placements, mesh)):
            return reason
        outputs = (c.outputs[0] for c in self.formulated.candidates.of[node])
        listed = ", ".join(dict.fromkeys(pattern_text(layout) for layout in outputs if layout is not None))
        return f"layout {pattern_text(pattern)} is no output layout of {graph.ops[node].target}; possible are {listed}"


def _matches(pattern: Pattern, layout: Layout | None) -> bool:
    return layout is not None and len(layout) == len(pattern) and all(p is None or p == q for p, q in zip(pattern, layout))


def _sharded_only(formulated: Formulation, governed: set[int]) -> dict[int, np.ndarray]:
    """No op fully replicated where it has another candidate; ops that can't be sharded are left alone, and those that are pinned."""
    allowed = {}
    for i, op in enumerate(formulated.graph.ops):
        if op.is_placeholder or i in governed:
            continue
        layouts = [[layout for layout in (*c.inputs, *c.outputs) if layout is not None] for c in formulated.candidates.of[i]]
        sharded = np.array([any(not p.is_replicate() for layout in of for p in layout) for of in layouts])
        if sharded.any():
            allowed[i] = sharded
    return allowed
