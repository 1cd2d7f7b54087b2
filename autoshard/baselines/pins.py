"""From classes to pins: every op is pinned to the candidate that cuts the wanted classes.

    admissible(c)  every S(d) of candidate c is on a wanted class; a Partial input is what its only producer gives
    best(c)        = (sum over axes of the highest priority, fewest inputs that lie otherwise than produced, first)

Ops are walked in order, so what is produced is known. Partial sums run on through views and sums of partial sums to
where they are needed whole or cut, unless several ops read them: then one reduction serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoshard.graph import Graph, Value
from autoshard.layout import Layout
from autoshard.strategies import Candidate, Candidates

Code = tuple[int, ...]  # a layout as numbers: the dim that is cut, WHOLE, SUM or OTHER_PARTIAL per axis
Coded = tuple[tuple[Code, ...], tuple[Code | None, ...]]  # inputs, outputs of a candidate
Cuts = tuple[tuple[int, ...], ...]  # per axis, per dim: the priority with which it is to be cut, 0 not at all
Source = tuple[Code, bool]  # how an input is produced, and whether nobody else reads it
WHOLE, SUM, OTHER_PARTIAL = -1, -2, -3
SECOND, STAYS_PARTIAL, FIRST = 1, 2, 3  # priorities: of a sequence, of sums that are left for later, of batch and tensor parallel classes


@dataclass(frozen=True)
class Pin:
    """Which candidates of one op are allowed: those with these layouts; None stands for any."""

    outputs: tuple[Layout | None, ...] | None = None
    inputs: tuple[Layout | None, ...] | None = None


def matches(pin: Pin, candidate: Candidate) -> bool:
    return _fits(pin.outputs, candidate.outputs) and _fits(pin.inputs, candidate.inputs)


def _fits(pinned: tuple[Layout | None, ...] | None, given: tuple[Layout | None, ...]) -> bool:
    if pinned is None:
        return True
    return len(pinned) == len(given) and all(p is None or p == g for p, g in zip(pinned, given, strict=True))


def allowed(pins: Mapping[str, Pin], graph: Graph, candidates: Candidates) -> dict[int, tuple[bool, ...]]:
    """For every pinned op, by index, which of its candidates match; ops that share candidates and pin are asked once."""
    made: dict[tuple[int, int], tuple[bool, ...]] = {}
    found = {}
    for name, pin in pins.items():
        options = candidates.of[graph.index[name]]
        key = (id(pin), id(options))
        if key not in made:
            made[key] = tuple(matches(pin, c) for c in options)
        found[graph.index[name]] = made[key]
    return found


class Coder:
    """Candidates as numbers, made once per signature: comparing torch's placements would take most of the time."""

    def __init__(self, candidates: Candidates):
        self.candidates = candidates
        self.made: dict[int, list[Coded]] = {}

    def __getitem__(self, index: int) -> list[Coded]:
        options = self.candidates.of[index]
        if id(options) not in self.made:
            self.made[id(options)] = [
                (tuple(map(code, c.inputs)), tuple(None if out is None else code(out) for out in c.outputs)) for c in options
            ]
        return self.made[id(options)]


def code(layout: Layout) -> Code:
    def one(p: object) -> int:
        if p.is_shard():  # type: ignore[attr-defined]
            return p.dim  # type: ignore[attr-defined]
        if p.is_replicate():  # type: ignore[attr-defined]
            return WHOLE
        return SUM if p.reduce_op == "sum" else OTHER_PARTIAL  # type: ignore[attr-defined]

    return tuple(map(one, layout))


def settle(
    graph: Graph, coder: Coder, wanted: Callable[[Value], Cuts], fixed: Mapping[int, Layout], carried: frozenset[int]
) -> dict[str, Pin]:
    """A pin for every op. fixed: placeholders whose layout is given; carried: ops that keep the layout of their only input."""
    readers = _count_readers(graph)
    given: dict[Value, Code] = {}
    made: dict[tuple, int] = {}
    pins: dict[str, Pin] = {}
    shared: dict[tuple[int, int], Pin] = {}
    for i, op in enumerate(graph.ops):
        options = coder.candidates.of[i]
        if i in fixed:
            chosen = next(j for j, c in enumerate(options) if c.outputs[0] == fixed[i])
        else:
            sources = tuple((given[v], readers[v] == 1) for v in op.inputs)
            cuts = tuple(map(wanted, op.inputs)), tuple(None if t is None else wanted((i, k)) for k, t in enumerate(op.outputs))
            key = (id(options), sources, cuts, i in carried)
            if key not in made:
                made[key] = _best(coder[i], cuts, sources, i in carried)
            chosen = made[key]
        for k, out in enumerate(coder[i][chosen][1]):
            if out is not None:
                given[i, k] = out
        pins[op.name] = shared.setdefault((id(options), chosen), Pin(options[chosen].outputs, options[chosen].inputs))
    return pins


def _count_readers(graph: Graph) -> dict[Value, int]:
    readers = {value: len(pairs) for value, pairs in graph.users.items()}
    for result in graph.results:
        if result.value is not None:
            readers[result.value] = readers.get(result.value, 0) + 1
    return readers


def _best(options: list[Coded], cuts: tuple, sources: tuple[Source, ...], carried: bool) -> int:
    """The best admissible candidate; the one in which all is whole always is."""
    if carried:
        for j, (inputs, _) in enumerate(options):
            if inputs[0] == sources[0][0]:
                return j
    scored = ((_score(option, cuts, sources), -j) for j, option in enumerate(options))
    return -max((score, j) for score, j in scored if score is not None)[1]


def _score(option: Coded, cuts: tuple, sources: tuple[Source, ...]) -> tuple[int, int] | None:
    """(priority cut, -inputs that are moved); None where the candidate cuts what it may not, or takes what isn't partial as such."""
    inputs, outputs = option
    moved = 0
    for layout, (given, alone) in zip(inputs, sources, strict=True):
        for placed, produced in zip(layout, given, strict=True):
            if placed != produced or not alone and placed < WHOLE:
                if placed < WHOLE:
                    return None
                moved += 1
    priority = 0
    layouts = [layout for layout in (*inputs, *outputs) if layout is not None]
    dims = [cut for cut in (*cuts[0], *cuts[1]) if cut is not None]
    for lying, allowed in zip(zip(*layouts, strict=True), zip(*dims, strict=True), strict=True):  # axis by axis
        reached = [cut[p] for p, cut in zip(lying, allowed, strict=True) if p >= 0]
        if 0 in reached:
            return None
        priority += max(reached, default=STAYS_PARTIAL if all(p < WHOLE for p in lying) else 0)
    return priority, -moved
