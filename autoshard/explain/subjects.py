"""What one may ask about in a plan: an op (a parameter, buffer, input or step of the computation) or a block, by name.

A block is a module path, `h.3` or `h.3.attn`: the parameters under it and the ops that come from it, backward ones too. An op of the
same name comes first; `h.3.` with a dot at the end is the block in any case.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.baselines import allowed, baselines
from autoshard.explain.reopened import Way
from autoshard.formulate import Formulation
from autoshard.graph import Op
from autoshard.layout import Layout, parse, text, why_illegal

NEAR = 5  # names listed


@dataclass(frozen=True)
class Subject:
    """What is asked about. nodes: the ops' indices."""

    name: str
    kind: str  # parameter, buffer, input, tangent, op or block
    nodes: tuple[int, ...]


def subject(formulated: Formulation, name: str) -> Subject:
    """ValueError with near names where there is nothing of that name."""
    graph = formulated.graph
    known = dict(graph.tied).get(name, name)
    if known in graph.index:
        op = graph.ops[graph.index[known]]
        return Subject(known, op.kind if op.is_placeholder else "op", (graph.index[known],))
    path = name.rstrip(".")
    nodes = tuple(i for i, op in enumerate(graph.ops) if path and _is_under(op, path))
    if nodes:
        return Subject(path, "block", nodes)
    near = near_names(formulated, path)
    raise ValueError(
        f"there is no parameter, buffer, input, op or block {name!r} in the plan" + (f"; near are {', '.join(near)}" if near else "")
    )


def _is_under(op: Op, path: str) -> bool:
    return op.name.startswith(path + ".") if op.is_placeholder else op.module == path or op.module.startswith(path + ".")


def near_names(formulated: Formulation, name: str) -> list[str]:
    """Names that contain it, shortest first, then names that are spelled alike."""
    graph = formulated.graph
    paths: dict[str, None] = {}
    for op in graph.ops:
        parts = (op.name.split(".")[:-1] if op.is_placeholder else op.module.split(".")) if op.name else []
        paths |= dict.fromkeys(".".join(parts[:k]) for k in range(1, len(parts) + 1) if parts[0])
    names = list(dict.fromkeys([*graph.parameters, *paths, *graph.index, *(second for second, _ in graph.tied)]))
    containing = sorted((known for known in names if name and name in known), key=len)[:NEAR]
    return containing or difflib.get_close_matches(name, names, n=NEAR, cutoff=0.5)


def chosen(formulated: Formulation, about: Subject, choice: tuple[int, ...]) -> str:
    """The layout of an op's first output; of a block nothing."""
    return "" if about.kind == "block" else _said(formulated.candidate(about.nodes[0], choice).outputs[0])


def _said(layout: Layout | None) -> str:
    return "-" if layout is None else text(layout)


def ways(formulated: Formulation, about: Subject) -> list[Way]:
    """All layouts that an op can give, in the order of its candidates; of a block the usual schemes, in it alone."""
    if about.kind == "block":
        inside = {formulated.graph.ops[i].name for i in about.nodes}
        schemes = baselines(formulated.graph, formulated.mesh, formulated.candidates)
        pins = {scheme.name: {name: pin for name, pin in scheme.pins.items() if name in inside} for scheme in schemes}
        return [Way(name, _masks(allowed(of, formulated.graph, formulated.candidates))) for name, of in pins.items()]
    i = about.nodes[0]
    given = dict.fromkeys(c.outputs[0] for c in formulated.candidates.of[i])
    return [Way(_said(layout), {i: _gives(formulated, i, layout)}, {about.name: _said(layout)}) for layout in given]


def _masks(kept: Mapping[int, tuple[bool, ...]]) -> dict[int, np.ndarray]:
    return {i: np.array(keep, dtype=bool) for i, keep in kept.items()}


def _gives(formulated: Formulation, i: int, layout: Layout | None) -> np.ndarray:
    return np.array([c.outputs[0] == layout for c in formulated.candidates.of[i]])


def wanted(formulated: Formulation, about: Subject, written: str) -> Way:
    """The way that a layout names; of a block: that layout for each of its parameters that can have it.

    ValueError where the text is no layout at all; a layout that can't be is a way with a reason.
    """
    layout = parse(written)
    if about.kind != "block":
        i = about.nodes[0]
        reason = why_not_given(formulated, i, layout)
        return Way(text(layout), reason=reason) if reason else _pinned(formulated, layout, [i])
    parameters = [i for i in about.nodes if formulated.graph.ops[i].kind == "parameter"]
    able = [i for i in parameters if not why_not_given(formulated, i, layout)]
    if able:
        return _pinned(formulated, layout, able)
    if not parameters:
        return Way(text(layout), reason=f"block {about.name} has no parameters; name one of its ops")
    why = why_not_given(formulated, parameters[0], layout)
    return Way(text(layout), reason=f"no parameter of block {about.name} can have it: {why}")


def _pinned(formulated: Formulation, layout: Layout, nodes: list[int]) -> Way:
    names = {formulated.graph.ops[i].name: text(layout) for i in nodes}
    return Way(text(layout), {i: _gives(formulated, i, layout) for i in nodes}, names)


def why_not_given(formulated: Formulation, i: int, layout: Layout) -> str:
    """Why an op can't give its first output so; "" where it can."""
    op = formulated.graph.ops[i]
    if op.outputs[0] is None:
        return f"{op.name} gives no tensor"
    if illegal := why_illegal(op.outputs[0].shape, layout, formulated.mesh):
        return illegal
    given = dict.fromkeys(c.outputs[0] for c in formulated.candidates.of[i])
    if layout in given:
        return ""
    return f"{text(layout)} is not one that {op.target} can give; possible are {', '.join(_said(known) for known in given)}"
