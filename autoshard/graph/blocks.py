"""Repeated blocks: which ops of a graph are the same op in different layers. Blocks are recognized by structure, not by names.

    symbol       y_i = (what op i computes, its shapes, and which placeholder it is a unary function of)     `symbols`
    repetition   an interval [s, e) with y_i = y_{i+P} for all i in [s, e - P), e - s >= 2P, not extendable   `repetitions`
    link         ops i and i + P of one repetition read a and a + D of another one with period |D|: both      `links`
                 go through the layers in the same order (D > 0) or in opposite orders (D < 0)
    coordinate   b = i - s where a repetition starts at layer 0 (forward), e - 1 - i where it starts at the last layer
                 (backward). In both cases b counts from the bottom of the model and grows by P per layer

Linked repetitions are one block: its parameters, its forward, its backward (gradients are results of the graph, not ops). The
first repetition says how many instances there are; ops that repeat beyond them by chance (the norm after the last layer) have no
place. A place is (block, instance, position): instances are the layers from the bottom, and ops at equal positions of a block have
the same operator, literals, and shapes of inputs and outputs, and therefore the same candidates.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from autoshard.graph.records import Graph, Op, grouped

ATTRIBUTE = "repeated_blocks"  # of a Graph
FREE = re.compile(b"\0+")  # items that no repetition has taken


@dataclass(frozen=True)
class Repetition:
    """Items start ... stop - 1 of a sequence repeat with this period; the last instance may be incomplete."""

    start: int
    stop: int
    period: int
    sign: int = 1  # +1 if it goes through the layers of the model upwards, -1 if downwards

    @property
    def matches(self) -> int:
        """How many items equal the item one period later."""
        return self.stop - self.start - self.period

    def coordinate(self, i: int) -> int:
        """b of item i: its distance from the bottom of the model."""
        return i - self.start if self.sign > 0 else self.stop - 1 - i

    def item_at(self, b: int) -> int:
        """The inverse of `coordinate`."""
        return self.start + b if self.sign > 0 else self.stop - 1 - b


class Place(NamedTuple):
    """Where an op is in the repeated blocks of its graph."""

    block: int
    instance: int  # layer, from the bottom of the model
    position: int


@dataclass(frozen=True)
class Blocks:
    """For each op of a graph its place, or None where the op is in no repeated block."""

    places: tuple[Place | None, ...]

    @cached_property
    def equal(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(block, position) -> the ops there, bottom layer first. A planner may give them equal layouts."""
        placed = ((place, i) for i, place in enumerate(self.places) if place is not None)
        members = grouped(((place.block, place.position), (place.instance, i)) for place, i in placed)
        return {key: tuple(i for _, i in sorted(pairs)) for key, pairs in members.items()}


def repeated_blocks(graph: Graph) -> Blocks:
    """The places of the graph's ops; kept with the graph, as its own cached properties are."""
    if ATTRIBUTE not in graph.__dict__:
        graph.__dict__[ATTRIBUTE] = _repeated_blocks(graph)
    return graph.__dict__[ATTRIBUTE]


def _repeated_blocks(graph: Graph) -> Blocks:
    repeats = repetitions(symbols(graph))
    inputs = [op.inputs for op in graph.ops]
    linked = links(repeats, inputs, repetition_of(repeats, len(graph.ops)))
    places: list[Place | None] = [None] * len(graph.ops)
    block = 0
    seen: set[int] = set()
    for first in range(len(repeats)):  # parameters come first, so that the instances are those of their layers
        if first in seen:
            continue
        group = oriented(first, repeats, linked)
        seen.update(group)
        offset = 0  # of the positions of this repetition among those of its block
        count = -(-(repeats[first].stop - repeats[first].start) // repeats[first].period)
        shifts = _shifts(first, group, linked)
        for r, repetition in sorted(group.items()):
            for i in range(repetition.start, repetition.stop):
                instance, position = divmod(repetition.coordinate(i) + shifts[r], repetition.period)
                if 0 <= instance < count:
                    places[i] = Place(block, instance, offset + position)
            offset += repetition.period
        block += 1
    return Blocks(tuple(places))


def _shifts(first: int, group: dict[int, Repetition], linked: "BlockLinks") -> dict[int, int]:
    """The d_r for which item b of repetition r belongs to instance (b + d_r) // P_r: that of most of its inputs or readers.

    A read between an item b of a known instance v and an item b' of s belongs to that instance if v P_s <= b' + d_s < (v + 1) P_s,
    an interval of d_s. d_s is where most of these intervals overlap, there as near to 0 as possible: a repetition begins with the first
    op of its first layer, which may be several ops before the first one that reads a parameter (a norm).
    """
    shifts = {first: 0}
    while len(shifts) < len(group):
        for (r, s), link in linked.items():
            if r not in group or (r in shifts) == (s in shifts):
                continue
            known, unknown = (r, s) if r in shifts else (s, r)
            P = group[unknown].period
            opened: Counter[int] = Counter()  # per point, how many intervals begin there minus how many end there
            for i, a in link.reads if r in shifts else [read[::-1] for read in link.reads]:
                low = (group[known].coordinate(i) + shifts[known]) // group[known].period * P - group[unknown].coordinate(a)
                opened[low] += 1
                opened[low + P] -= 1
            ends = sorted(opened)
            overlapping = list(accumulate(opened[at] for at in ends))
            spans = [(low, high - 1) for low, high, number in zip(ends, ends[1:], overlapping) if number == max(overlapping)]
            shifts[unknown] = min((min(max(low, 0), high) for low, high in spans), key=abs)
    return shifts


def symbols(graph: Graph, label: Callable[[Op], object] = lambda op: None) -> list[int]:
    """A number per op, equal for ops that differ at most in their names and inputs. label: a further property of placeholders."""
    numbers: dict[object, int] = {}
    known: dict[int, int] = {}  # id of a literal or shape record -> number; records are shared between the layers of a tiled graph

    def number(record: object) -> int:
        if id(record) not in known:
            known[id(record)] = numbers.setdefault(record, len(numbers))
        return known[id(record)]

    op_symbols: list[int] = []
    roots: list[int | None] = []  # symbol of the placeholder that the op is a unary function of
    for op in graph.ops:
        sources = {i for i, _ in op.inputs}
        root = roots[next(iter(sources))] if len(sources) == 1 else None
        shapes = tuple([number(graph.ops[i].outputs[k]) for i, k in op.inputs])
        labelled = label(op) if op.is_placeholder else None
        key = (op.target, number(op.literals), number(op.outputs), op.kind, op.alias, op.backward, shapes, root, labelled)
        symbol = numbers.setdefault(key, len(numbers))
        op_symbols.append(symbol)
        roots.append(symbol if op.is_placeholder else root)
    return op_symbols


def repetitions(items: Sequence[int]) -> list[Repetition]:
    """Disjoint maximal repetitions, in order; where two overlap, the one with more matches stays and the other is shortened."""
    seeds: dict[int, list[int]] = {}  # distance to the next equal item -> the items with it
    after: dict[int, int] = {}
    for i in range(len(items) - 1, -1, -1):
        if items[i] in after:
            seeds.setdefault(after[items[i]] - i, []).append(i)
        after[items[i]] = i
    runs = [run for period, where in seeds.items() for run in _runs(items, period, reversed(where))]
    chosen: list[Repetition] = []
    taken = bytearray(len(items))
    for run in sorted(runs, key=lambda run: (-run.matches, run.period, run.start)):
        for start, stop in [gap.span() for gap in FREE.finditer(taken, run.start, run.stop)]:
            if stop - start >= 2 * run.period:
                chosen.append(Repetition(start, stop, run.period))
                taken[start:stop] = b"\1" * (stop - start)
    return sorted(chosen, key=lambda run: run.start)


def _runs(items: Sequence[int], period: int, seeds: Iterator[int]) -> Iterator[Repetition]:
    end = 0
    for seed in seeds:  # ascending
        if seed < end:
            continue
        low, end = seed, seed + 1
        while low > 0 and items[low - 1] == items[low - 1 + period]:
            low -= 1
        while end + period < len(items) and items[end] == items[end + period]:
            end += 1
        if end - low >= period:
            yield Repetition(low, end + period, period)


@dataclass
class BlockLink:
    """The reads of repetition s by repetition r: one layer of r further, they are one layer of s further, up (sign +1) or down (-1)."""

    sign: int
    reads: list[tuple[int, int]]  # (item of r, item of s that it reads)


BlockLinks = dict[tuple[int, int], BlockLink]


def repetition_of(repeats: Sequence[Repetition], count: int) -> list[int]:
    """For each of `count` items the number of its repetition, or -1."""
    numbers = [-1] * count
    for r, repetition in enumerate(repeats):
        numbers[repetition.start : repetition.stop] = [r] * (repetition.stop - repetition.start)
    return numbers


def links(repeats: Sequence[Repetition], inputs: Sequence[Sequence[tuple[int, int]]], numbers: Sequence[int]) -> BlockLinks:
    """The links by (r, s), r the repetition that reads s; where reads disagree about the direction, that of the majority.

    numbers: of each item, that of its repetition.
    """
    votes: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for r, repetition in enumerate(repeats):
        P = repetition.period
        for i in range(repetition.start, repetition.stop - P):
            for (a, _), (later, _) in zip(inputs[i], inputs[i + P]):
                s = numbers[a]
                if s >= 0 and s != r and numbers[later] == s and abs(later - a) == repeats[s].period:
                    votes.setdefault((r, s, 1 if later > a else -1), []).append((i, a))
    linked: BlockLinks = {}
    for (r, s, sign), reads in sorted(votes.items(), reverse=True):
        if (r, s) not in linked or len(reads) > len(linked[r, s].reads):
            linked[r, s] = BlockLink(sign, reads)
    return linked


def oriented(first: int, repeats: Sequence[Repetition], linked: BlockLinks) -> dict[int, Repetition]:
    """The repetitions linked to `first`, directly or not, by number; sign +1 if they go through the layers in the same order as it."""
    signs = {first: 1}
    grown = True
    while grown:
        grown = False
        for (r, s), link in linked.items():
            if (r in signs) != (s in signs):
                signs[r if s in signs else s] = signs[s if s in signs else r] * link.sign
                grown = True
    return {r: replace(repeats[r], sign=sign) for r, sign in signs.items()}
