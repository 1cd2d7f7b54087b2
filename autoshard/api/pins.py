"""Which choices the user's pins leave, demand by demand.

    pins      layout by name or glob: the tensor lies like this. An exact name wins over a glob, a later glob over an earlier one
    keep      layout by name, of an older plan: where no pin says otherwise
    forbid    layouts by name or glob: the tensor lies otherwise. All of them hold
    layout    a placement per mesh axis; `*` stands for any:  "*,S(0)"

A glob is one of fnmatch, in which `*` also matches dots; it looks at parameters, buffers and inputs, and at ops only where it matches
none of those. Which pin governs which tensor is settled once, from all of them: from there on each only forbids choices, so that
taking one away never makes less possible.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
from torch.distributed.tensor.placement_types import Placement

from autoshard.api.options import Demand, Options
from autoshard.formulate import Formulation
from autoshard.graph import Graph
from autoshard.layout import Layout, parse, placement_text, why_illegal
from autoshard.solution import Solution

Pattern = tuple[Placement | None, ...]  # a layout in which None stands for any placement
NEAR = 0.5  # how alike a name must be to be suggested


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
    """What is asked of layouts, one by one in the order given: pins, kept layouts, forbidden ones, skip_fully_replicated."""
    masks = _Masks(formulated)
    found = [_pinned(masks, "pin", name, options.pins[name], nodes) for name, nodes in _governed(formulated.graph, options.pins).items()]
    pinned = {node for one in found for node in one.allowed}
    for name, written in options.keep.items():
        nodes = _find(formulated.graph, name, "keep", exactly=True)
        if not pinned.intersection(nodes.values()):
            found.append(_pinned(masks, "keep", name, written, nodes))
    governed = {node for one in found for node in one.allowed}
    found += [_forbidden(masks, name, written) for name, layouts in options.forbid.items() for written in layouts]
    if options.skip_fully_replicated:
        found.append(Demanded(Demand("skip_fully_replicated"), _cut_only(formulated, governed)))
    return found


def kept_layouts(solution: Solution, free: Sequence[str] = ()) -> dict[str, str]:
    """The layouts of a plan's parameters, for `plan(..., keep=)`; those whose names match one of the globs in `free` are left out.

    Read from `parameters` of the file, which is the table to edit. ValueError where that is empty, where a glob matches no parameter,
    or where two names of one tensor were given two layouts.
    """
    rows = solution.parameters
    if not rows:
        raise ValueError("the plan to keep has no parameters; expected one that `autoshard plan --out` wrote")
    for glob in free:
        if not any(fnmatchcase(name, glob) for name in rows):
            raise ValueError(f"free {glob!r}: no parameter of the plan matches" + _near(glob, rows))
    for name, row in rows.items():
        owner = row.get("tied_to")
        if owner in rows and rows[owner]["layout"] != row["layout"]:
            raise ValueError(
                f"{name} is laid out as {row['layout']}, but {owner}, the same tensor, as {rows[owner]['layout']}; give both the same"
            )
    held = {name: row["layout"] for name, row in rows.items() if not any(fnmatchcase(name, glob) for glob in free)}
    return {name: layout for name, layout in held.items() if rows[name].get("tied_to") not in held}


def edited_layouts(solution: Solution) -> dict[str, list[str | None]]:
    """Parameters whose layout was edited in the file: by name [what the plan had, what the file says now]."""
    before = {name: solution.layouts[name].outputs[0] for name in solution.parameters if name in solution.layouts}
    return {name: [had, now] for name, had in before.items() if (now := solution.parameters[name]["layout"]) != had}


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
    found = {name: _find(graph, name, "pin") for name in pins}
    exact = {node for name, nodes in found.items() for tensor, node in nodes.items() if tensor == name}
    last = {node: name for name, nodes in found.items() for node in nodes.values()}
    return {
        name: {tensor: node for tensor, node in nodes.items() if (tensor == name if node in exact else last[node] == name)}
        for name, nodes in found.items()
    }


def _find(graph: Graph, name: str, kind: str, *, exactly: bool = False) -> dict[str, int]:
    """The nodes that a name or a glob means, each by one of its names; ValueError where there is none."""
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
        raise ValueError(f"{kind} on {name!r}: no tensor of the model matches" + _near(name, stored))
    raise ValueError(f"{kind} on {name!r}: the model has no such tensor" + _near(name, [*graph.index, *tied]))


def _near(name: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=NEAR)
    if not near:  # a glob is unlike any name; its last part may be like theirs
        ends: dict[str, str] = {}
        for known in names:
            ends.setdefault(known.rpartition(".")[2], known)
        near = [ends[end] for end in difflib.get_close_matches(name.rpartition(".")[2], list(ends), n=3, cutoff=NEAR)]
    return f"; near are {', '.join(near)}" if near else ""


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
        self.made: dict[tuple[int, Pattern], np.ndarray] = {}

    def of(self, node: int, pattern: Pattern) -> np.ndarray:
        candidates = self.formulated.candidates.of[node]
        key = (id(candidates), pattern)
        if key not in self.made:
            self.made[key] = np.array([_matches(pattern, c.outputs[0]) for c in candidates], dtype=bool)
        return self.made[key]

    def why_not(self, node: int, pattern: Pattern) -> str:
        """Why no choice of the node has such a layout."""
        graph, mesh = self.formulated.graph, self.formulated.mesh
        tensor = graph.ops[node].outputs[0]
        whole = tuple(p for p in pattern if p is not None)
        if len(pattern) != len(mesh.axes):
            shape = "x".join(map(str, mesh.shape))
            return f"layout {pattern_text(pattern)} has {len(pattern)} placements, the mesh {shape} has {len(mesh.axes)} axes"
        if tensor is not None and len(whole) == len(pattern) and (reason := why_illegal(tensor.shape, whole, mesh)):
            return reason
        given = (c.outputs[0] for c in self.formulated.candidates.of[node])
        listed = ", ".join(dict.fromkeys(pattern_text(layout) for layout in given if layout is not None))
        return f"layout {pattern_text(pattern)} is not one that {graph.ops[node].target} can give; possible are {listed}"


def _matches(pattern: Pattern, layout: Layout | None) -> bool:
    return layout is not None and len(layout) == len(pattern) and all(p is None or p == q for p, q in zip(pattern, layout))


def _cut_only(formulated: Formulation, governed: set[int]) -> dict[int, np.ndarray]:
    """No op fully replicated where it has another candidate (an op that can't be cut stays, and one that is pinned)."""
    allowed = {}
    for i, op in enumerate(formulated.graph.ops):
        if op.is_placeholder or i in governed:
            continue
        layouts = [[layout for layout in (*c.inputs, *c.outputs) if layout is not None] for c in formulated.candidates.of[i]]
        cut = np.array([any(not p.is_replicate() for layout in of for p in layout) for of in layouts])
        if cut.any():
            allowed[i] = cut
    return allowed
