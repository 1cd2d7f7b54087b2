"""The choices that remain for each tensor under the user's demands: pins, kept layouts and forbidden layouts.

    pins      layout by name or glob: the tensor has this layout. An exact name wins over a glob, a later glob over an earlier one
    keep      layout by name, of an older plan, unless a pin governs the tensor; or all layouts of an op, `inputs -> outputs`, each
              list separated by `;`
    forbid    layouts by name or glob: the tensor has another layout. All of them hold
    layout    a placement per mesh axis; `*` stands for any:  "*,S(0)"

A name is that of a parameter, buffer or input; of a node of the graph that was given, or a source line of it, `model.py:42`; of an op; or
the path of a module, which means its result: the last that its forward computes. A glob is one of fnmatch, in which `*` also matches dots;
it looks at the first of these kinds that has a match. Which pin governs which tensor is decided once, from all pins together. After that a
pin only forbids choices, so that taking one away never makes less possible.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain

import numpy as np
from torch.distributed.tensor.placement_types import Placement

from autoshard.formulate import Formulation
from autoshard.graph import Graph, Value
from autoshard.layout import Layout, parse, placement_text, why_illegal
from autoshard.mesh import shape_text
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
        if not pinned.intersection(node for node, _ in nodes):
            row = isinstance(written, str) and ROW in written
            demands.append(_kept_row(masks, name, written, nodes) if row else _pinned(masks, "keep", name, written, nodes))
    governed = {node for one in demands for node in one.allowed}
    demands += [_forbidden(masks, name, written) for name, layouts in options.forbid.items() for written in layouts]
    if options.skip_fully_replicated:
        demands.append(Demanded(Demand("skip_fully_replicated"), _sharded_only(formulated, governed)))
    return demands


def broken_by(solution: Solution, graph: Graph, options: Options) -> list[Demand]:
    """The pins and forbidden layouts of the options that a plan of this graph does not obey; ValueError on an unknown name."""

    def obeys(value: Value, pattern: Pattern) -> bool:
        written = solution.layouts[graph.ops[value[0]].name].outputs[value[1]]
        return _matches(pattern, None if written is None else parse(written))

    broken = []
    for name, nodes in _governed(graph, options.pins).items():
        pattern = _pattern(options.pins[name], f"pin on {name!r}")
        if not all(obeys(value, pattern) for value in nodes):
            broken.append(Demand("pin", name, pattern_text(pattern)))
    for name, several in options.forbid.items():
        for pattern in (_pattern(written, f"forbid on {name!r}") for written in several):
            if any(obeys(value, pattern) for value in _find(graph, name, "forbid")):
                broken.append(Demand("forbid", name, pattern_text(pattern)))
    return broken


def _pinned(masks: _Masks, kind: str, name: str, written: object, nodes: Mapping[Value, str]) -> Demanded:
    pattern = _pattern(written, f"{kind} on {name!r}")
    allowed: dict[int, np.ndarray] = {}
    for value, tensor in nodes.items():
        keep = masks.of(value, pattern)
        if not keep.any():
            on = f"{kind} on {name!r}" + ("" if tensor == name else f" ({tensor})")
            raise ValueError(f"{on}: {masks.why_not(value, pattern)}")
        allowed[value[0]] = keep & allowed.get(value[0], True)
    return Demanded(Demand(kind, name, pattern_text(pattern)), allowed)


def _kept_row(masks: _Masks, name: str, written: str, nodes: Mapping[Value, str]) -> Demanded:
    """As `_pinned`, for all output layouts of an op and, where they are written, its input layouts."""
    inputs, outputs = (tuple(map(_layout_or_none, part.split(";"))) if part.strip() else None for part in written.split(ROW, 1))
    allowed = {}
    for node, _ in nodes:
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
    allowed: dict[int, np.ndarray] = {}
    for value in nodes:
        allowed[value[0]] = ~masks.of(value, pattern) & allowed.get(value[0], True)
    if all(keep.all() for keep in allowed.values()):
        raise ValueError(f"forbid on {name!r}: nothing is forbidden by it, {masks.why_not(next(iter(nodes)), pattern)}")
    return Demanded(Demand("forbid", name, pattern_text(pattern)), allowed)


def _governed(graph: Graph, pins: Mapping[str, str]) -> dict[str, dict[Value, str]]:
    """By pin the values that it governs, each with its name: an exact name before any glob, a later glob before an earlier one."""
    matches = {name: _find(graph, name, "pin") for name in pins}
    exact = {value for name, of in matches.items() for value, tensor in of.items() if tensor == name}
    last = {value: name for name, of in matches.items() for value in of}
    return {
        name: {value: tensor for value, tensor in of.items() if (tensor == name if value in exact else last[value] == name)}
        for name, of in matches.items()
    }


def _find(graph: Graph, name: str, kind: str, *, exactly: bool = False) -> dict[Value, str]:
    """The values that a name or a glob means, each with one of its names; ValueError where there are none."""
    is_glob = not exactly and any(sign in name for sign in "*?[")
    for names in graph.names:
        if name in names:
            return dict.fromkeys(names[name], name)
        if is_glob and (of := [n for n in names if fnmatchcase(n, name)]):
            matched: dict[Value, str] = {}
            for n in of:
                matched |= {value: n for value in names[n] if value not in matched}
            return matched
    wrong = "no tensor of the model matches" if is_glob else "the model has no such tensor"
    raise ValueError(f"{kind} on {name!r}: {wrong}" + near_names(name.strip("*") or name, dict.fromkeys(chain(*graph.names))))


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
        self.masks: dict[tuple[int, int, Pattern], np.ndarray] = {}

    def of(self, value: Value, pattern: Pattern) -> np.ndarray:
        candidates, k = self.formulated.candidates.of[value[0]], value[1]
        key = (id(candidates), k, pattern)
        if key not in self.masks:
            self.masks[key] = np.array([_matches(pattern, c.outputs[k]) for c in candidates], dtype=bool)
        return self.masks[key]

    def why_not(self, value: Value, pattern: Pattern) -> str:
        """Why the value has such a layout in no choice of its op."""
        graph, mesh, (node, k) = self.formulated.graph, self.formulated.mesh, value
        tensor = graph.ops[node].outputs[k]
        placements = tuple(p for p in pattern if p is not None)
        if len(pattern) != len(mesh.axes):
            axes = f"the mesh {shape_text(mesh.shape)} has {len(mesh.axes)} axes"
            return f"layout {pattern_text(pattern)} has {len(pattern)} placements, {axes}"
        if tensor is not None and len(placements) == len(pattern) and (reason := why_illegal(tensor.shape, placements, mesh)):
            return reason
        outputs = (c.outputs[k] for c in self.formulated.candidates.of[node])
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
