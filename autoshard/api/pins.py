"""Which choices the user's pins leave."""

from __future__ import annotations

import difflib

import numpy as np

from autoshard.api.options import Options
from autoshard.formulate import Formulation
from autoshard.layout import parse, text, why_illegal


def allowed_by_pins(formulated: Formulation, options: Options) -> dict[int, np.ndarray]:
    """Which choices the user's pins leave, by node; ValueError on an unknown name or a layout that can't be."""
    graph, mesh = formulated.graph, formulated.mesh
    tied = dict(graph.tied)
    kept: dict[int, np.ndarray] = {}
    for name, written in options.pins.items():
        known = tied.get(name, name)
        if known not in graph.index:
            near = difflib.get_close_matches(name, [*graph.index, *tied], n=3, cutoff=0.5)
            raise ValueError(f"pin on {name!r}: the model has no such tensor" + (f"; near are {', '.join(near)}" if near else ""))
        if not isinstance(written, (str, tuple)):
            raise ValueError(f"pin on {name!r}: {written!r} is no layout; expected R, S(dim) per mesh axis, for example 'S(0),R'")
        i = graph.index[known]
        layout = written if isinstance(written, tuple) else parse(written)
        reason = why_illegal(graph.tensor((i, 0)).shape, layout, mesh)
        keep = np.array([c.outputs[0] == layout for c in formulated.candidates.of[i]])
        if reason is None and not keep.any():
            given = ", ".join(dict.fromkeys(text(c.outputs[0]) for c in formulated.candidates.of[i] if c.outputs[0] is not None))
            reason = f"layout {text(layout)} is not one that {graph.ops[i].target} can give; possible are {given}"
        if reason is not None:
            raise ValueError(f"pin on {name!r}: {reason}")
        kept[i] = keep & kept.get(i, np.ones(len(keep), dtype=bool))
    if options.skip_fully_replicated:
        _drop_replicated(formulated, kept)
    return kept


def _drop_replicated(formulated: Formulation, kept: dict[int, np.ndarray]) -> None:
    """No op fully replicated where it has another candidate (an op that can't be cut stays)."""
    for i, op in enumerate(formulated.graph.ops):
        if op.is_placeholder or i in kept:
            continue
        layouts = [[layout for layout in (*c.inputs, *c.outputs) if layout is not None] for c in formulated.candidates.of[i]]
        cut = np.array([any(not p.is_replicate() for layout in of for p in layout) for of in layouts])
        if cut.any():
            kept[i] = cut
