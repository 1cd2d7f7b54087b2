"""From dimension classes to pins: every op is pinned to the candidate that shards the wanted classes.

    admissible(c)  every S(d) of candidate c is on a wanted class; an input layout is Partial only where its producer's output layout is
                   the same and nothing else reads it
    best(c)        = (sum over axes of the highest priority, fewest inputs that are resharded, first)

Ops are visited in the order of the graph, so the output layouts of their producers are known. Partial sums pass through views and
additions up to the op that needs them replicated or sharded. If several ops read a partial sum, it is reduced once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoshard.graph import Graph, Value
from autoshard.layout import Layout
from autoshard.strategies import Candidate, Candidates

Code = tuple[int, ...]  # a layout as numbers: per axis the sharded dim, REPLICATED, SUM or OTHER_PARTIAL
Coded = tuple[tuple[Code, ...], tuple[Code | None, ...]]  # inputs, outputs of a candidate
Priorities = tuple[tuple[int, ...], ...]  # per axis, per dim: the priority with which it is to be sharded, 0 not at all
Source = tuple[Code, bool]  # the output layout of an input's producer, and whether it has no other reader
REPLICATED, SUM, OTHER_PARTIAL = -1, -2, -3
SECOND, STAYS_PARTIAL, FIRST = 1, 2, 3  # priorities: of a sequence, of sums that are reduced later, of batch and tensor parallel classes


@dataclass(frozen=True)
class Pin:
    """Which candidates of one op are allowed: those with these layouts; None stands for any."""

    outputs: tuple[Layout | None, ...] | None = None
    inputs: tuple[Layout | None, ...] | None = None


def matches(pin: Pin, candidate: Candidate) -> bool:
    return _fits(pin.outputs, candidate.outputs) and _fits(pin.inputs, candidate.inputs)


def _fits(pinned: tuple[Layout | None, ...] | None, layouts: tuple[Layout | None, ...]) -> bool:
    if pinned is None:
        return True
    return len(pinned) == len(layouts) and all(p is None or p == layout for p, layout in zip(pinned, layouts, strict=True))


def allowed(pins: Mapping[str, Pin], graph: Graph, candidates: Candidates) -> dict[int, tuple[bool, ...]]:
    """For every pinned op, by index, which of its candidates match; computed once for ops that share candidates and pin."""
    masks: dict[tuple[int, int], tuple[bool, ...]] = {}
    by_op = {}
    for name, pin in pins.items():
        options = candidates.of[graph.index[name]]
        key = (id(pin), id(options))
        if key not in masks:
            masks[key] = tuple(matches(pin, c) for c in options)
        by_op[graph.index[name]] = masks[key]
    return by_op


class Coder:
    """Candidates as numbers, computed once per signature: comparing torch's placements would take most of the time."""

    def __init__(self, candidates: Candidates):
        self.candidates = candidates
        self.coded: dict[int, list[Coded]] = {}

    def __getitem__(self, index: int) -> list[Coded]:
        options = self.candidates.of[index]
        if id(options) not in self.coded:
            self.coded[id(options)] = [
                (tuple(map(code, c.inputs)), tuple(None if out is None else code(out) for out in c.outputs)) for c in options
            ]
        return self.coded[id(options)]


def code(layout: Layout) -> Code:
    def one(p: object) -> int:
        if p.is_shard():  # type: ignore[attr-defined]
            return p.dim  # type: ignore[attr-defined]
        if p.is_replicate():  # type: ignore[attr-defined]
            return REPLICATED
        return SUM if p.reduce_op == "sum" else OTHER_PARTIAL  # type: ignore[attr-defined]

    return tuple(map(one, layout))


def settle(
    graph: Graph,
    coder: Coder,
    wanted: Callable[[Value], Priorities],
    fixed: Mapping[int, Layout],
    carried: frozenset[int],
    choices: Mapping[int, int] | None = None,
) -> dict[str, Pin]:
    """A pin for every op. fixed: ops whose output layout is known; carried: ops that keep the layout of their only input; choices: ops
    whose candidate is known, with its number."""
    readers = _count_readers(graph)
    produced: dict[Value, Code] = {}
    best: dict[tuple, int] = {}
    pins: dict[str, Pin] = {}
    shared: dict[tuple[int, int], Pin] = {}
    for i, op in enumerate(graph.ops):
        options = coder.candidates.of[i]
        if choices and i in choices:
            chosen = choices[i]
        elif i in fixed:
            chosen = next(j for j, c in enumerate(options) if c.outputs[0] == fixed[i])
        else:
            sources = tuple((produced[v], readers[v] == 1) for v in op.inputs)
            priorities = tuple(map(wanted, op.inputs)), tuple(None if t is None else wanted((i, k)) for k, t in enumerate(op.outputs))
            key = (id(options), sources, priorities, i in carried)
            if key not in best:
                best[key] = _best(coder[i], priorities, sources, i in carried)
            chosen = best[key]
        for k, out in enumerate(coder[i][chosen][1]):
            if out is not None:
                produced[i, k] = out
        pins[op.name] = shared.setdefault((id(options), chosen), Pin(options[chosen].outputs, options[chosen].inputs))
    return pins


def _count_readers(graph: Graph) -> dict[Value, int]:
    readers = {value: len(pairs) for value, pairs in graph.users.items()}
    for result in graph.results:
        if result.value is not None:
            readers[result.value] = readers.get(result.value, 0) + 1
    return readers


def _best(options: list[Coded], priorities: tuple, sources: tuple[Source, ...], carried: bool) -> int:
    """The best admissible candidate; the fully replicated one is always admissible."""
    if carried:
        for j, (inputs, _) in enumerate(options):
            if inputs[0] == sources[0][0]:
                return j
    scored = ((_score(option, priorities, sources), -j) for j, option in enumerate(options))
    return -max((score, j) for score, j in scored if score is not None)[1]


def _score(option: Coded, priorities: tuple, sources: tuple[Source, ...]) -> tuple[int, int] | None:
    """(sum of priorities, -inputs that are resharded); None where the candidate is not admissible."""
    inputs, outputs = option
    resharded = 0
    for layout, (source, alone) in zip(inputs, sources, strict=True):
        for placed, produced in zip(layout, source, strict=True):
            if placed != produced or not alone and placed < REPLICATED:
                if placed < REPLICATED:
                    return None
                resharded += 1
    priority = 0
    layouts = [layout for layout in (*inputs, *outputs) if layout is not None]
    wanted = [rows for rows in (*priorities[0], *priorities[1]) if rows is not None]
    for placed_on_axis, of_dims in zip(zip(*layouts, strict=True), zip(*wanted, strict=True), strict=True):
        reached = [of_dim[p] for p, of_dim in zip(placed_on_axis, of_dims, strict=True) if p >= 0]
        if 0 in reached:
            return None
        priority += max(reached, default=STAYS_PARTIAL if all(p < REPLICATED for p in placed_on_axis) else 0)
    return priority, -resharded
