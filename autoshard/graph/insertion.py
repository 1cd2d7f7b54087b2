"""Where more layers can be inserted into a graph.

Repetitions that are linked to each other form a group; in repetition r with period P_r an item has the coordinate b, counted
from the bottom of the model (`blocks.coordinate`).

    read     item b of r reads item b' of s; the read is regular if item b + P_r reads b' + P_s, or if both read the same value
    span     an interval of coordinates B_r for which all items of [B_r - P_r, B_r) have regular reads            `_Group.spans_of`
    depth    u = b / P_r + o_r, with offsets o_r such that a read and its value have equal depths (at the median) `_Group.offsets`
    point    the insertion point B_r of r: in a span of r, all at one depth as nearly as the spans allow, such that no irregular
             read connects the two sides of the points, as from b < B_r to b' >= B_s or back                      `_Group.points`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autoshard.graph.blocks import BlockLinks, Repetition, coordinate, homes, links, orientations
from autoshard.graph.records import Value

Inputs = list[tuple[Value, ...]]
Span = tuple[int, int]  # lowest and highest B


class TiledRepetition(NamedTuple):
    """A repetition of the group with its insertion point."""

    repetition: Repetition
    sign: int  # +1 if it goes through the layers upwards, in the order of the parameters
    point: int  # B


def tiled_repetitions(repeats: list[Repetition], inputs: Inputs, seeds: list[int], container: str) -> list[TiledRepetition]:
    """The repetitions linked to those of the container's parameters, in order. Those without a span are left out."""
    members = set(range(len(repeats)))
    while True:
        home = [r if r in members else -1 for r in homes(repeats, len(inputs))]
        linked = {pair: link for pair, link in links(repeats, inputs, home).items() if pair[0] in members}
        signs: dict[int, int] = {}
        for seed in seeds:
            if seed in members and seed not in signs:
                signs |= orientations(seed, linked)
        group = _Group(repeats, inputs, home, linked, signs)
        spans = {r: group.spans_of(r) for r in signs}
        if all(spans.values()):
            break
        members = {r for r in signs if spans[r]}
    points = group.points(spans)
    if points is None:
        raise ValueError(f"the layers of {container} repeat, but no place has the same wiring on both sides in all parts of the graph")
    return [TiledRepetition(repeats[r], signs[r], points[r]) for r in sorted(signs)]


def item_at(repetition: Repetition, sign: int, b: int) -> int:
    """The inverse of `coordinate`."""
    return repetition.start + b if sign > 0 else repetition.stop - 1 - b


@dataclass(frozen=True)
class _Group:
    """Linked repetitions: the keys of `signs`, which are indices of `repeats`."""

    repeats: list[Repetition]
    inputs: Inputs  # of each item
    home: list[int]  # of each item, the repetition that it is in, or -1
    linked: BlockLinks
    signs: dict[int, int]

    def coordinate(self, r: int, i: int) -> int:
        return coordinate(self.repeats[r], self.signs[r], i)

    def inputs_at(self, r: int, b: int) -> tuple[Value, ...]:
        return self.inputs[item_at(self.repeats[r], self.signs[r], b)]

    def spans_of(self, r: int) -> list[Span]:
        """The spans of repetition r: each B in them has a period of regular reads below it."""
        repetition = self.repeats[r]
        spans, run = [], 0
        for b in range(repetition.matches + 1):
            if b < repetition.matches and self._is_regular(r, b):
                run += 1
                continue
            if run >= repetition.period:
                spans.append((b - run + repetition.period, b))
            run = 0
        return spans

    def _is_regular(self, r: int, b: int) -> bool:
        low, high = self.inputs_at(r, b), self.inputs_at(r, b + self.repeats[r].period)
        if len(low) != len(high):
            return False
        for (a, k), (later, l) in zip(low, high):  # noqa: E741
            s = self.home[a]
            moves = s in self.signs and self.home[later] == s and (later - a) * self.signs[s] == self.repeats[s].period
            if k != l or not (later == a or moves):
                return False
        return True

    def points(self, spans: dict[int, list[Span]]) -> dict[int, int] | None:
        """The insertion point of each repetition, all at the same depth of the model as nearly as the spans allow."""
        periods = {r: self.repeats[r].period for r in self.signs}
        offsets = self.offsets()
        bounds = [(low / periods[r] + offsets[r], high / periods[r] + offsets[r]) for r in self.signs for low, high in spans[r]]
        ends = sorted({u for bound in bounds for u in bound})
        depths = sorted({*ends, *((u + v) / 2 for u, v in zip(ends, ends[1:]))})
        scored = []
        for depth in depths:
            points, off, room = {}, 0.0, float("inf")
            for r, P in periods.items():
                wanted = (depth - offsets[r]) * P
                low, high = min(spans[r], key=lambda span: max(span[0] - wanted, wanted - span[1], 0))
                points[r] = round(min(max(wanted, low), high))
                off = max(off, abs(points[r] - wanted) / P if not low <= wanted <= high else 0.0)
                room = min(room, (wanted - low) / P, (high - wanted) / P)
            scored.append((round(off, 6), -round(room, 6), depth, points))
        for *_, points in sorted(scored, key=lambda score: score[:3]):
            if not self._is_crossed(points):
                return points
        return None

    def offsets(self) -> dict[int, float]:
        """o_r: the depth at which repetition r begins, in layers, such that a read and its value have equal depths (at the median)."""
        offsets = {min(self.signs): 0.0}
        grown = True
        while grown:
            grown = False
            for (r, s), link in self.linked.items():
                if r in self.signs and s in self.signs and (r in offsets) != (s in offsets):
                    steps = sorted(
                        self.coordinate(r, i) / self.repeats[r].period - self.coordinate(s, a) / self.repeats[s].period
                        for i, a in link.reads
                    )
                    step = steps[len(steps) // 2]
                    if r in offsets:
                        offsets[s] = offsets[r] + step
                    else:
                        offsets[r] = offsets[s] - step
                    grown = True
        return {r: offsets.get(r, 0.0) for r in self.signs}

    def _is_crossed(self, points: dict[int, int]) -> bool:
        """Whether a read that no other layer has goes from below the points to above them, or back."""
        for r in self.signs:
            repetition, P = self.repeats[r], self.repeats[r].period
            for i in range(repetition.start, repetition.stop):
                b = self.coordinate(r, i)
                source = points[r] - P + (b - points[r]) % P
                typical, following = self.inputs_at(r, source), self.inputs_at(r, source + P)
                for (a, _), (t, _), (f, _) in zip(self.inputs[i], typical, following):
                    s = self.home[a]
                    if s not in self.signs or a == t == f:
                        continue
                    there = self.coordinate(s, a)
                    if self.home[t] == s and t != f and (there - self.coordinate(s, t)) * P == (b - source) * self.repeats[s].period:
                        continue
                    if (b < points[r]) != (there < points[s]):
                        return True
        return False
