"""The subjects of `explain`, by name: an op (a parameter, buffer, input or step of the computation) or a block.

A block is a module path, `h.3` or `h.3.attn`. It holds the parameters under that path and the ops that the module runs, backward ops
included. Where an op and a block have one name, the name means the op; with a dot at the end, `h.3.`, it means the block.
"""

import difflib
from dataclasses import dataclass

import numpy as np

from autoshard.baselines import allowed, baselines
from autoshard.explain.differences import layout_text
from autoshard.explain.reopened import Way
from autoshard.formulate import Formulation
from autoshard.layout import Layout, parse, text, why_illegal

NEAR = 5  # similar names listed


@dataclass(frozen=True)
class Subject:
    """The op or block that is asked about. nodes: the indices of its ops."""

    name: str
    kind: str  # parameter, buffer, input, tangent, op or block
    nodes: tuple[int, ...]


def subject(formulated: Formulation, name: str) -> Subject:
    """The subject of that name; ValueError, with similar names, where there is none."""
    graph = formulated.graph
    if len(of := next((names[name] for names in graph.names[:3] if name in names), ())) == 1:
        op = graph.ops[of[0][0]]
        return Subject(op.name, op.kind if op.is_placeholder else "op", (of[0][0],))
    if of:  # of a source line
        return Subject(name, "block", tuple(i for i, _ in of))
    path = name.rstrip(".")
    owners = (op.name.rpartition(".")[0] if op.is_placeholder else op.module for op in graph.ops)
    nodes = tuple(i for i, owner in enumerate(owners) if path and f"{owner}.".startswith(f"{path}."))
    if nodes:
        return Subject(path, "block", nodes)
    near = near_names(formulated, path)
    raise ValueError(
        f"there is no parameter, buffer, input, op or block {name!r} in the plan" + (f"; near are {', '.join(near)}" if near else "")
    )


def near_names(formulated: Formulation, name: str) -> list[str]:
    """Names that contain the name, shortest first; without any, names of similar spelling."""
    graph = formulated.graph
    paths: dict[str, None] = {}
    for op in graph.ops:
        parts = (op.name.split(".")[:-1] if op.is_placeholder else op.module.split(".")) if op.name else []
        paths |= dict.fromkeys(".".join(parts[:k]) for k in range(1, len(parts) + 1) if parts[0])
    names = list(dict.fromkeys([*graph.parameters, *paths, *graph.called, *graph.index, *(second for second, _ in graph.tied)]))
    containing = sorted((known for known in names if name and name in known), key=len)[:NEAR]
    return containing or difflib.get_close_matches(name, names, n=NEAR, cutoff=0.5)


def chosen(formulated: Formulation, about: Subject, choice: tuple[int, ...]) -> str:
    """The planned layout of an op's first output; "" for a block."""
    return "" if about.kind == "block" else layout_text(formulated.candidate(about.nodes[0], choice).outputs[0])


def ways(formulated: Formulation, about: Subject) -> list[Way]:
    """All output layouts of an op, in the order of its candidates; for a block the usual schemes, applied to this block alone."""
    if about.kind == "block":
        inside = {formulated.graph.ops[i].name for i in about.nodes}
        schemes = baselines(formulated.graph, formulated.mesh, formulated.candidates)
        pins = {scheme.name: {name: pin for name, pin in scheme.pins.items() if name in inside} for scheme in schemes}
        return [Way(name, allowed(of, formulated.graph, formulated.candidates)) for name, of in pins.items()]
    i = about.nodes[0]
    layouts = dict.fromkeys(c.outputs[0] for c in formulated.candidates.of[i])
    return [Way(layout_text(layout), {i: _with_output(formulated, i, layout)}, {about.name: layout_text(layout)}) for layout in layouts]


def _with_output(formulated: Formulation, i: int, layout: Layout | None) -> np.ndarray:
    return np.array([c.outputs[0] == layout for c in formulated.candidates.of[i]])


def wanted(formulated: Formulation, about: Subject, written: str) -> Way:
    """The written layout for an op; for a block, that layout for each of its parameters that can have it.

    ValueError where the text is not a layout; an impossible layout returns a Way with a reason.
    """
    layout = parse(written)
    if about.kind != "block":
        i = about.nodes[0]
        reason = why_impossible(formulated, i, layout)
        return Way(text(layout), reason=reason) if reason else _pinned(formulated, layout, [i])
    parameters = [i for i in about.nodes if formulated.graph.ops[i].kind == "parameter"]
    able = [i for i in parameters if not why_impossible(formulated, i, layout)]
    if able:
        return _pinned(formulated, layout, able)
    if not parameters:
        return Way(text(layout), reason=f"block {about.name} has no parameters; name one of its ops")
    why = why_impossible(formulated, parameters[0], layout)
    return Way(text(layout), reason=f"no parameter of block {about.name} can have it: {why}")


def _pinned(formulated: Formulation, layout: Layout, nodes: list[int]) -> Way:
    names = {formulated.graph.ops[i].name: text(layout) for i in nodes}
    return Way(text(layout), {i: _with_output(formulated, i, layout) for i in nodes}, names)


def why_impossible(formulated: Formulation, i: int, layout: Layout) -> str:
    """Why an op's first output can't have the layout; "" where it can."""
    op = formulated.graph.ops[i]
    if op.outputs[0] is None:
        return f"{op.name} returns no tensor"
    if illegal := why_illegal(op.outputs[0].shape, layout, formulated.mesh):
        return illegal
    possible = dict.fromkeys(c.outputs[0] for c in formulated.candidates.of[i])
    if layout in possible:
        return ""
    return f"{text(layout)} is no output layout of {op.target}; possible are {', '.join(layout_text(known) for known in possible)}"
