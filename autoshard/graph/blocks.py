"""Repeated blocks: which ops of a graph are the same op of another layer. Found by structure, never by digits in names.

    symbol       y_i = (what op i computes, its shapes, and which placeholder it is a unary function of)     `symbols`
    repetition   an interval [s, e) with y_i = y_{i+P} for all i in [s, e - P), e - s >= 2P, not extendable   `repetitions`
    link         ops i and i + P of one repetition read a and a + D of another one with period |D|:           `links`
                 they walk through the layers together (D > 0) or against each other (D < 0)
    coordinate   b = i - s where a repetition walks upwards (layer 0 first), e - 1 - i where it walks downwards:
                 the backward pass; b counts from the bottom of the model in both, and grows by P per layer

Connected repetitions are one block: parameters, forward, backward (the gradients are results, and are no ops). The first one
says how many instances there are; what happens to repeat beyond them (the norm after the last layer) has no place. A place is
(block, instance, position): instances are the layers from the bottom, and ops at equal positions of a block have the same
operator, literals, and shapes of inputs and outputs, so that they have the same candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autoshard.graph.records import Graph, Op


@dataclass(frozen=True)
class Repetition:
    """Items start ... stop - 1 of a sequence repeat with this period; the last instance may be cut short."""

    start: int
    stop: int
    period: int

    @property
    def matches(self) -> int:
        """How many items equal the one a period later."""
        return self.stop - self.start - self.period


class Place(NamedTuple):
    """Where an op is in the repeated blocks of its graph."""

    block: int
    instance: int  # layer, from the bottom of the model
    position: int


@dataclass(frozen=True)
class Blocks:
    """For each op of a graph its place, or None where it repeats nothing."""

    places: tuple[Place | None, ...]

    @cached_property
    def equal(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(block, position) -> the ops there, bottom layer first: what a planner ties."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, place in enumerate(self.places):
            if place is not None:
                found.setdefault((place.block, place.position), []).append((place.instance, i))
        return {key: tuple(i for _, i in sorted(pairs)) for key, pairs in found.items()}


def repeated_blocks(graph: Graph) -> Blocks:
    """The places of the graph's ops."""
    found = repetitions(symbols(graph))
    inputs = [op.inputs for op in graph.ops]
    home = homes(found, len(graph.ops))
    linked = links(found, inputs, home)
    places: list[Place | None] = [None] * len(graph.ops)
    block = 0
    seen: set[int] = set()
    for first in range(len(found)):  # parameters come first, so that the instances are those of their layers
        if first in seen:
            continue
        signs = orientations(first, linked)
        seen.update(signs)
        offset = 0  # of the positions of this repetition among those of its block
        count = -(-(found[first].stop - found[first].start) // found[first].period)
        shifts = _shifts(first, found, signs, linked)
        for r in sorted(signs):
            repetition = found[r]
            for i in range(repetition.start, repetition.stop):
                instance, position = divmod(coordinate(repetition, signs[r], i) + shifts[r], repetition.period)
                if 0 <= instance < count:
                    places[i] = Place(block, instance, offset + position)
            offset += repetition.period
        block += 1
    return Blocks(tuple(places))


def _shifts(first: int, found: Sequence[Repetition], signs: dict[int, int], linked: Links) -> dict[int, int]:
    """d_r, such that item b of r is in instance (b + d_r) // P_r, that in which most of what it reads (or is read by) is.

    A read between b, whose instance v is known, and b' asks for v P_s <= b' + d_s < (v + 1) P_s: d_s is where most of these
    intervals overlap.
    """
    shifts = {first: 0}
    while len(shifts) < len(signs):
        for (r, s), link in linked.items():
            if r not in signs or (r in shifts) == (s in shifts):
                continue
            pairs = [(coordinate(found[r], signs[r], i), coordinate(found[s], signs[s], a)) for i, a in link.reads]
            known, unknown = (r, s) if r in shifts else (s, r)
            P = found[unknown].period
            opened: Counter[int] = Counter()
            for b, there in pairs if r in shifts else [pair[::-1] for pair in pairs]:
                low = (b + shifts[known]) // found[known].period * P - there
                opened[low] += 1
                opened[low + P] -= 1
            shifts[unknown] = _most_open(opened)
    return shifts


def _most_open(opened: Counter[int]) -> int:
    """The least point in most intervals. opened: how many begin less how many end there."""
    count = most = best = 0
    for at in sorted(opened):
        count += opened[at]
        if count > most:
            most, best = count, at
    return best


# -- symbols ----------------------------------------------------------------------------------------------------------------


def symbols(graph: Graph, label: Callable[[Op], object] = lambda op: None) -> list[int]:
    """A number per op; equal for ops that differ at most in names and in what they read. label: what else tells placeholders apart."""
    numbers: dict[object, int] = {}
    known: dict[int, int] = {}  # id of a literal or shape record -> number; records are shared between the layers of a tiled graph

    def number(record: object) -> int:
        if id(record) not in known:
            known[id(record)] = numbers.setdefault(record, len(numbers))
        return known[id(record)]

    found: list[int] = []
    roots: list[int | None] = []  # symbol of the placeholder that the op is a unary function of
    for op in graph.ops:
        sources = {i for i, _ in op.inputs}
        root = roots[next(iter(sources))] if len(sources) == 1 else None
        shapes = tuple([number(graph.ops[i].outputs[k]) for i, k in op.inputs])
        labelled = label(op) if op.is_placeholder else None
        key = (op.target, number(op.literals), number(op.outputs), op.kind, op.alias, op.backward, shapes, root, labelled)
        symbol = numbers.setdefault(key, len(numbers))
        found.append(symbol)
        roots.append(symbol if op.is_placeholder else root)
    return found


# -- repetitions ------------------------------------------------------------------------------------------------------------


def repetitions(items: Sequence[int]) -> list[Repetition]:
    """Disjoint maximal repetitions, in order; where two overlap the one with more matches wins and the other is cut back."""
    seeds: dict[int, list[int]] = {}  # distance to the next equal item -> where
    after: dict[int, int] = {}
    for i in range(len(items) - 1, -1, -1):
        if items[i] in after:
            seeds.setdefault(after[items[i]] - i, []).append(i)
        after[items[i]] = i
    runs = [run for period, where in seeds.items() for run in _runs(items, period, reversed(where))]
    chosen: list[Repetition] = []
    taken = bytearray(len(items))
    for run in sorted(runs, key=lambda run: (-run.matches, run.period, run.start)):
        for start, stop in _free(taken, run.start, run.stop):
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


def _free(taken: bytearray, start: int, stop: int) -> list[tuple[int, int]]:
    """The intervals of [start, stop) that aren't taken."""
    found = []
    while start < stop:
        low = taken.find(0, start, stop)
        if low < 0:
            break
        high = taken.find(1, low, stop)
        start = stop if high < 0 else high
        found.append((low, start))
    return found


# -- links ------------------------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """Repetition r reads repetition s one layer further for each of its own layers. sign: +1 if both walk the same way."""

    sign: int
    reads: list[tuple[int, int]]  # (item of r, item of s that it reads)


Links = dict[tuple[int, int], Link]


def homes(found: Sequence[Repetition], count: int) -> list[int]:
    """For each item the number of its repetition, or -1."""
    home = [-1] * count
    for r, repetition in enumerate(found):
        home[repetition.start : repetition.stop] = [r] * (repetition.stop - repetition.start)
    return home


def links(found: Sequence[Repetition], inputs: Sequence[Sequence[tuple[int, int]]], home: Sequence[int]) -> Links:
    """How different repetitions are linked; where reads disagree about the direction, the one that more of them go."""
    votes: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for r, repetition in enumerate(found):
        P = repetition.period
        for i in range(repetition.start, repetition.stop - P):
            for (a, _), (later, _) in zip(inputs[i], inputs[i + P]):
                s = home[a]
                if s >= 0 and s != r and home[later] == s and abs(later - a) == found[s].period:
                    votes.setdefault((r, s, 1 if later > a else -1), []).append((i, a))
    linked: Links = {}
    for (r, s, sign), reads in sorted(votes.items(), reverse=True):
        if (r, s) not in linked or len(reads) > len(linked[r, s].reads):
            linked[r, s] = Link(sign, reads)
    return linked


def orientations(first: int, linked: Links) -> dict[int, int]:
    """For each repetition connected to `first` +1 if it walks the same way as `first`, else -1."""
    signs = {first: 1}
    grown = True
    while grown:
        grown = False
        for (r, s), link in linked.items():
            if (r in signs) != (s in signs):
                signs[r if s in signs else s] = signs[s if s in signs else r] * link.sign
                grown = True
    return signs


def coordinate(repetition: Repetition, sign: int, i: int) -> int:
    """b of item i: its distance from the bottom of the model."""
    return i - repetition.start if sign > 0 else repetition.stop - 1 - i
