"""Where a graph can be cut so that more layers can be put in.

Repetitions that are linked to each other form a group; in repetition r with period P_r an item has the coordinate b, counted
from the bottom of the model (`blocks.coordinate`).

    read     item b of r reads b' of s; it is regular, if item b + P_r reads b' + P_s, or if both read the same value
    span     cuts B_r for which all items of [B_r - P_r, B_r) have regular reads                                    `_spans`
    depth    u = b / P_r + o_r, with offsets o_r such that reads go to the same depth (at the median)               `_offsets`
    cut      a B_r in a span of each repetition, all at one depth as nearly as the spans allow, such that no irregular read
             goes from one side of the cuts to the other: from b < B_r to b' >= B_s or back                         `_cuts`
"""

from __future__ import annotations

from typing import NamedTuple

from autoshard.graph.blocks import Links, Repetition, coordinate, homes, links, orientations
from autoshard.graph.records import Value

Inputs = list[tuple[Value, ...]]


class Part(NamedTuple):
    """A repetition of the group with its cut."""

    repetition: Repetition
    sign: int  # +1 if it walks upwards, like the parameters
    cut: int  # B


def cut_parts(found: list[Repetition], inputs: Inputs, seeds: list[int], container: str) -> list[Part]:
    """The repetitions linked to those of the container's parameters, in order. Those without a place for a cut are left out."""
    group = set(range(len(found)))
    while True:
        home = [r if r in group else -1 for r in homes(found, len(inputs))]
        linked = {pair: link for pair, link in links(found, inputs, home).items() if pair[0] in group}
        signs: dict[int, int] = {}
        for seed in seeds:
            if seed in group and seed not in signs:
                signs |= orientations(seed, linked)
        spans = {r: _spans(r, found, inputs, home, signs) for r in signs}
        if all(spans.values()):
            break
        group = {r for r in signs if spans[r]}
    cuts = _cuts(found, inputs, home, signs, spans, linked)
    if cuts is None:
        raise ValueError(f"the layers of {container} repeat, but no place has the same wiring on both sides in all parts of the graph")
    return [Part(found[r], signs[r], cuts[r]) for r in sorted(signs)]


def _spans(r: int, found: list[Repetition], inputs: Inputs, home: list[int], signs: dict[int, int]) -> list[tuple[int, int]]:
    """Intervals [low, high] of the cuts that have a whole period of regular reads below them."""
    repetition, sign = found[r], signs[r]
    P = repetition.period
    spans, run = [], 0
    for b in range(repetition.matches + 1):
        if b < repetition.matches and _regular(repetition, sign, b, found, inputs, home, signs):
            run += 1
            continue
        if run >= P:
            spans.append((b - run + P, b))
        run = 0
    return spans


def item_at(repetition: Repetition, sign: int, b: int) -> int:
    """The inverse of `coordinate`."""
    return repetition.start + b if sign > 0 else repetition.stop - 1 - b


def _regular(repetition: Repetition, sign: int, b: int, found: list, inputs: Inputs, home: list[int], signs: dict[int, int]) -> bool:
    low, high = inputs[item_at(repetition, sign, b)], inputs[item_at(repetition, sign, b + repetition.period)]
    if len(low) != len(high):
        return False
    for (a, k), (later, l) in zip(low, high):  # noqa: E741
        s = home[a]
        moves = s in signs and home[later] == s and (later - a) * signs[s] == found[s].period
        if k != l or not (later == a or moves):
            return False
    return True


def _cuts(found: list, inputs: Inputs, home: list[int], signs: dict[int, int], spans: dict, linked: Links) -> dict[int, int] | None:
    """A cut per repetition, all at the same depth u = b / P + o_r of the model as nearly as the spans allow."""
    offsets = _offsets(found, signs, linked)
    bounds = [(low / found[r].period + offsets[r], high / found[r].period + offsets[r]) for r in signs for low, high in spans[r]]
    ends = sorted({u for bound in bounds for u in bound})
    depths = sorted({*ends, *((u + v) / 2 for u, v in zip(ends, ends[1:]))})
    scored = []
    for depth in depths:
        cuts, off, room = {}, 0.0, float("inf")
        for r in signs:
            P = found[r].period
            wanted = (depth - offsets[r]) * P
            low, high = min(spans[r], key=lambda span: max(span[0] - wanted, wanted - span[1], 0))
            cuts[r] = round(min(max(wanted, low), high))
            off = max(off, abs(cuts[r] - wanted) / P if not low <= wanted <= high else 0.0)
            room = min(room, (wanted - low) / P, (high - wanted) / P)
        scored.append((round(off, 6), -round(room, 6), depth, cuts))
    for *_, cuts in sorted(scored, key=lambda score: score[:3]):
        if not _crossed(found, inputs, home, signs, cuts):
            return cuts
    return None


def _offsets(found: list, signs: dict[int, int], linked: Links) -> dict[int, float]:
    """o_r: where in the model repetition r begins, in layers, so that reads go to the same depth (at the median)."""
    offsets = {min(signs): 0.0}
    grown = True
    while grown:
        grown = False
        for (r, s), link in linked.items():
            if r in signs and s in signs and (r in offsets) != (s in offsets):
                steps = sorted(
                    coordinate(found[r], signs[r], i) / found[r].period - coordinate(found[s], signs[s], a) / found[s].period
                    for i, a in link.reads
                )
                step = steps[len(steps) // 2]
                if r in offsets:
                    offsets[s] = offsets[r] + step
                else:
                    offsets[r] = offsets[s] - step
                grown = True
    return {r: offsets.get(r, 0.0) for r in signs}


def _crossed(found: list, inputs: Inputs, home: list[int], signs: dict[int, int], cuts: dict[int, int]) -> bool:
    """Whether a read that no other layer does goes from below the cuts to above them, or back."""
    for r in signs:
        repetition, P = found[r], found[r].period
        for i in range(repetition.start, repetition.stop):
            b = coordinate(repetition, signs[r], i)
            source = cuts[r] - P + (b - cuts[r]) % P
            typical = inputs[item_at(repetition, signs[r], source)]
            follows = inputs[item_at(repetition, signs[r], source + P)]
            for (a, _), (t, _), (f, _) in zip(inputs[i], typical, follows):
                s = home[a]
                if s not in signs or a == t == f:
                    continue
                there = coordinate(found[s], signs[s], a)
                if home[t] == s and t != f and (there - coordinate(found[s], signs[s], t)) * P == (b - source) * found[s].period:
                    continue
                if (b < cuts[r]) != (there < cuts[s]):
                    return True
    return False
