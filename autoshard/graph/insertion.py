"""Where more layers can be inserted into a graph.

Repetitions that are linked to each other form a group; in repetition r with period P_r an item has the coordinate b, counted
from the bottom of the model (`Repetition.coordinate`).

    read     item b of r reads item b' of s; the read is regular if item b + P_r reads b' + P_s, or if both read the same value
    span     an interval of coordinates B_r for which all items of [B_r - P_r, B_r) have regular reads            `_Group.spans_of`
    depth    u = b / P_r + o_r, with offsets o_r such that a read and its value have equal depths (at the median) `_Group.offsets`
    point    the insertion point B_r of r: in a span of r, all at one depth as nearly as the spans allow, such that no irregular
             read connects the two sides of the points, as from b < B_r to b' >= B_s or back                      `_Group.points`
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.graph.blocks import BlockLinks, Repetition, links, oriented, repetition_of
from autoshard.graph.records import Value

Inputs = list[tuple[Value, ...]]
Span = tuple[int, int]  # lowest and highest B


@dataclass(frozen=True)
class TiledRepetition(Repetition):
    """A repetition of the group with its insertion point."""

    point: int = 0  # B


def tiled_repetitions(repeats: Sequence[Repetition], inputs: Inputs, seeds: list[int], container: str) -> list[TiledRepetition]:
    """The repetitions linked to those of the container's parameters, in order. Those without a span are left out."""
    members = set(range(len(repeats)))
    while True:
        numbers = [r if r in members else -1 for r in repetition_of(repeats, len(inputs))]
        linked = {pair: link for pair, link in links(repeats, inputs, numbers).items() if pair[0] in members}
        repetitions: dict[int, Repetition] = {}
        for seed in seeds:
            if seed in members and seed not in repetitions:
                repetitions |= oriented(seed, repeats, linked)
        group = _Group(repetitions, inputs, numbers, linked)
        spans = {r: group.spans_of(r) for r in repetitions}
        if all(spans.values()):
            break
        members = {r for r in repetitions if spans[r]}
    points = group.points(spans)
    if points is None:
        raise ValueError(f"the layers of {container} repeat, but no place has the same wiring on both sides in all parts of the graph")
    return [TiledRepetition(r.start, r.stop, r.period, r.sign, points[n]) for n, r in sorted(repetitions.items())]


@dataclass(frozen=True)
class _Group:
    """Linked repetitions, by number."""

    repetitions: dict[int, Repetition]
    inputs: Inputs  # of each item
    number_of: list[int]  # of each item, that of the repetition that it is in, or -1
    linked: BlockLinks

    def inputs_at(self, r: int, b: int) -> tuple[Value, ...]:
        return self.inputs[self.repetitions[r].item_at(b)]

    def spans_of(self, r: int) -> list[Span]:
        """The spans of repetition r: each B in them has a period of regular reads below it."""
        repetition = self.repetitions[r]
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
        low, high = self.inputs_at(r, b), self.inputs_at(r, b + self.repetitions[r].period)
        return len(low) == len(high) and all(
            k == l and (later == a or self._periods(a, later) == 1)
            for (a, k), (later, l) in zip(low, high)  # noqa: E741
        )

    def _periods(self, a: int, later: int) -> float | None:
        """By how many periods an item is above another one of its repetition; None where they are in no repetition of the group."""
        s = self.number_of[a]
        if s not in self.repetitions or self.number_of[later] != s:
            return None
        return (self.repetitions[s].coordinate(later) - self.repetitions[s].coordinate(a)) / self.repetitions[s].period

    def points(self, spans: dict[int, list[Span]]) -> dict[int, int] | None:
        """The insertion point of each repetition, all at the same depth of the model as nearly as the spans allow."""
        periods = {r: repetition.period for r, repetition in self.repetitions.items()}
        offsets = self.offsets()
        bounds = [(low / periods[r] + offsets[r], high / periods[r] + offsets[r]) for r in periods for low, high in spans[r]]
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
        offsets = {min(self.repetitions): 0.0}
        grown = True
        while grown:
            grown = False
            for (r, s), link in self.linked.items():
                if r in self.repetitions and s in self.repetitions and (r in offsets) != (s in offsets):
                    reader, read = self.repetitions[r], self.repetitions[s]
                    steps = sorted(reader.coordinate(i) / reader.period - read.coordinate(a) / read.period for i, a in link.reads)
                    step = steps[len(steps) // 2]
                    if r in offsets:
                        offsets[s] = offsets[r] + step
                    else:
                        offsets[r] = offsets[s] - step
                    grown = True
        return {r: offsets.get(r, 0.0) for r in self.repetitions}

    def _is_crossed(self, points: dict[int, int]) -> bool:
        """Whether a read that no other layer has goes from below the points to above them, or back."""
        for r, repetition in self.repetitions.items():
            P = repetition.period
            for i in range(repetition.start, repetition.stop):
                b = repetition.coordinate(i)
                source = points[r] - P + (b - points[r]) % P
                typical, following = self.inputs_at(r, source), self.inputs_at(r, source + P)
                for (a, _), (t, _), (f, _) in zip(self.inputs[i], typical, following):
                    s = self.number_of[a]
                    if s not in self.repetitions or a == t == f:
                        continue
                    if t != f and self._periods(t, a) == (b - source) / P:  # b - source is a multiple of P
                        continue
                    if (b < points[r]) != (self.repetitions[s].coordinate(a) < points[s]):
                        return True
        return False
