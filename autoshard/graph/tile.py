"""The graph of a deeper model, made from that of a shallow one: one period of layers is copied `times` times.

Items are the ops and, after them, the results. The repetitions that are linked to the container's parameters (parameters,
buffers, forward, backward, gradients) form a group; in repetition r with period P_r an item has the coordinate b, counted
from the bottom of the model (`blocks.coordinate`).

    read     item b of r reads b' of s; it is regular, if item b + P_r reads b' + P_s, or if both read the same value
    cut      B_r: all items of [B_r - P_r, B_r) have regular reads, and no irregular read goes from one side of the cuts to
             the other: from b < B_r to b' >= B_s or back                                                            `_cuts`
    copies   the layers [B_r, B_r + times P_r): item b + m P_r is item b of [B_r - P_r, B_r), m = 1 ... times
    moved    what lay at b >= B_r comes to b + times P_r; it is m = times, what lay below has m = 0
    wiring   a regular read of b' becomes b' + m P_s; every other read stays with the value that it read             `_Tiling.read`
    names    the container's index grows by m * (layers per period). fx numbers names of one stem in order: a copy is numbered
             as many further as a period uses numbers of that stem                                                   `_Tiling.named`

What `tile` makes is checked (`check`, and every copy has the readers that its source has), which does not prove that the
deeper model is this graph: `capture_deep` compares with a real capture that is one period deeper.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from autoshard.graph.blocks import Links, Repetition, coordinate, homes, links, orientations, repetitions, symbols
from autoshard.graph.records import Graph, Op, Result, Value

Inputs = list[tuple[Value, ...]]


def tile(graph: Graph, times: int, *, container: str, period: int = 1) -> Graph:
    """The graph of the model whose container has `times * period` more layers.

    container: the qualified name of the ModuleList or Sequential ("model.layers"). period: after how many layers they repeat
    (2 where every second one is a mixture of experts). ValueError says why the graph can't be tiled.
    """
    if times < 0:
        raise ValueError(f"times is {times}; a graph can only be made deeper")
    if any(_index(name, container) is not None for pair in graph.tied for name in pair):
        raise ValueError(f"parameters of {container} are tied: {graph.tied}; copies of them would have to be tied too")
    return graph if times == 0 else _Tiling(graph, times, container, period).tiled()


def check(graph: Graph) -> Graph:
    """The graph itself; ValueError if an op reads what comes later or doesn't exist, or a name is taken twice."""
    names: set[str] = set()
    for i, op in enumerate(graph.ops):
        for a, k in op.inputs:
            if not 0 <= a < i or k >= len(graph.ops[a].outputs):
                raise ValueError(f"op {i} ({op.name}) reads value {(a, k)}, which no op before it makes")
        if op.name in names:
            raise ValueError(f"two ops are called {op.name}")
        names.add(op.name)
    for result in graph.results:
        if result.value is not None and not 0 <= result.value[0] < len(graph.ops):
            raise ValueError(f"result {result.name} is value {result.value}, which no op makes")
    return graph


# -- the group and its cuts ---------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A repetition of the group with its cut."""

    repetition: Repetition
    sign: int  # +1 if it walks upwards, like the parameters
    cut: int  # B


def _parts(found: list[Repetition], inputs: Inputs, seeds: list[int], container: str) -> list[_Part]:
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
    return [_Part(found[r], signs[r], cuts[r]) for r in sorted(signs)]


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


def _item(repetition: Repetition, sign: int, b: int) -> int:
    """The inverse of `coordinate`."""
    return repetition.start + b if sign > 0 else repetition.stop - 1 - b


def _regular(repetition: Repetition, sign: int, b: int, found: list, inputs: Inputs, home: list[int], signs: dict[int, int]) -> bool:
    low, high = inputs[_item(repetition, sign, b)], inputs[_item(repetition, sign, b + repetition.period)]
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
    # parameters have no reads and allow any cut: only the others say where
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
            typical = inputs[_item(repetition, signs[r], source)]
            follows = inputs[_item(repetition, signs[r], source + P)]
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


# -- the deeper graph -----------------------------------------------------------------------------------------------------------


class _Tiling:
    """One tiling. `items` are ops, then results; `home[i]` is the part that item i belongs to, or -1."""

    def __init__(self, graph: Graph, times: int, container: str, period: int):
        self.graph, self.times, self.container, self.period = graph, times, container, period
        ops = graph.ops
        self.items: list[Op | Result] = [*ops, *graph.results]
        self.inputs: Inputs = [op.inputs for op in ops] + [() if r.value is None else (r.value,) for r in graph.results]
        self.split = [_split_name(item) for item in self.items]
        found = repetitions(self._symbols())
        seeds = [r for r, rep in enumerate(found) if self._holds_parameters(rep)]
        if not seeds:
            raise ValueError(f"the parameters of {container} don't repeat after {period} of its layers")
        self.parts = _parts(found, self.inputs, seeds, container)
        if not any(self.graph.ops[part.repetition.start].kind == "compute" for part in self.parts if part.repetition.start < len(ops)):
            raise ValueError(f"no part of the graph repeats with the layers of {container}: they differ, or there are too few of them")
        self.home = homes([part.repetition for part in self.parts], len(self.items))
        grown = [part.repetition.period * times for part in self.parts]
        self.shifts = [0, *accumulate(grown)]  # by how much what lies between the parts moves
        self.numbers = [self._numbers(part) for part in self.parts]
        self.first_moved = self._first_moved_layer()

    def _symbols(self) -> list[int]:
        label = lambda op: self.template(op.name)  # noqa: E731
        of_ops = symbols(self.graph, label)
        numbers: dict[object, int] = {}
        for result in self.graph.results:
            name = "" if result.kind == "output" else self.template(result.name)
            tensor = None if result.value is None else self.graph.ops[result.value[0]].outputs[result.value[1]]
            of_ops.append(-1 - numbers.setdefault((result.kind, name, tensor), len(numbers)))
        return of_ops

    def template(self, name: str) -> str:
        """The name with the index of the container replaced by its phase in the period."""
        index = _index(name, self.container)
        return name if index is None else f"{self.container}.*{index % self.period}{name[len(self.container) + 1 + len(str(index)) :]}"

    def _holds_parameters(self, repetition: Repetition) -> bool:
        """Whether it is of placeholders in the container, and its period is that of the container (not one within a layer)."""
        item, later = self.items[repetition.start], self.items[repetition.start + repetition.period]
        if not (isinstance(item, Op) and item.is_placeholder):
            return False
        low, high = _index(item.name, self.container), _index(later.name, self.container)
        return low is not None and high is not None and high - low == self.period

    def _first_moved_layer(self) -> int:
        """Layers from this one on lie above the cut (for names of what isn't repeated)."""
        part = next(part for part in self.parts if self._holds_parameters(part.repetition))
        index = _index(self.items[_item(part.repetition, part.sign, part.cut - 1)].name, self.container)
        assert index is not None
        return index + 1

    def _numbers(self, part: _Part) -> Counter[str]:
        """How many fx names of each stem a period uses up."""
        repetition, P = part.repetition, part.repetition.period
        low = part.cut - P
        found: dict[str, int] = {}
        for b in range(low, part.cut):
            i = _item(repetition, part.sign, b)
            (stem, number), (later_stem, later) = self.split[i], self.split[i + P * part.sign]
            step = (later - number) * part.sign
            if number < 0 and later < 0:
                continue
            if stem != later_stem or found.setdefault(stem, step) != step:
                raise ValueError(f"the names {self.items[i].name} and {self.items[i + P * part.sign].name} aren't numbered in order")
        return Counter(found)

    def tiled(self) -> Graph:
        ops: list[Op] = []
        results: list[Result] = []
        sources: list[int] = []
        numbers: Counter[str] = Counter()
        i = 0
        while i < len(self.items):
            p = self.home[i]
            if p < 0:
                made = [(i, self._copied(i, -1, 0, 0, numbers))]
                i += 1
            else:
                made = self._part_items(p, numbers)
                numbers.update({stem: step * self.times for stem, step in self.numbers[p].items()})
                i = self.parts[p].repetition.stop
            for source, item in made:
                sources.append(source)
                if isinstance(item, Op):
                    ops.append(item)
                else:
                    results.append(item)
        graph = check(Graph(tuple(ops), tuple(results), self.graph.tied))
        self._check_readers(graph, sources)
        return graph

    def _part_items(self, p: int, numbers: Counter[str]) -> list[tuple[int, Op | Result]]:
        """All items of a part in order, each with the item that it is a copy of."""
        repetition, sign, cut = self.parts[p]
        P, length = repetition.period, repetition.stop - repetition.start
        deep = length + self.times * P
        made = []
        for position in range(deep):
            b = position if sign > 0 else deep - 1 - position
            m = 0 if b < cut else min((b - cut) // P + 1, self.times)
            source = _item(repetition, sign, b - m * P)
            made.append((source, self._copied(source, p, m, m if sign > 0 else self.times - m, numbers)))
        return made

    def _copied(self, i: int, p: int, m: int, later: int, numbers: Counter[str]) -> Op | Result:
        """Item i of part p, m periods higher in the model and `later` periods later in its part."""
        item = self.items[i]
        inputs = tuple([(self.read(i, p, n, a, m), k) for n, (a, k) in enumerate(self.inputs[i])])
        name = self.named(i, p, m, later, numbers)
        if isinstance(item, Result):
            return Result(item.kind, name, inputs[0] if inputs else None)
        module = self.moved_name(item.module, p, m) if item.module else ""
        return Op(name, item.target, inputs, item.literals, item.outputs, item.kind, module, item.alias, item.backward)

    def read(self, i: int, p: int, n: int, a: int, m: int) -> int:
        """Where the value is that a copy of item i, m periods higher, takes as its input number n; item i takes a."""
        s = self.home[a]
        if s < 0:
            return self.place(a, -1)
        part = self.parts[s]
        there = coordinate(part.repetition, part.sign, a)
        if p >= 0 and self._moves(i, p, n, a):
            return self.place(there + m * part.repetition.period, s)
        return self.place(there + self.times * part.repetition.period * (there >= part.cut), s)

    def _moves(self, i: int, p: int, n: int, a: int) -> bool:
        """Whether input n of item i goes up with its reader, as that of the item next to the cut does."""
        (repetition, sign, cut), P = self.parts[p], self.parts[p].repetition.period
        b = coordinate(repetition, sign, i)
        source = cut - P + (b - cut) % P
        t = self.inputs[_item(repetition, sign, source)][n][0]
        if t == self.inputs[_item(repetition, sign, source + P)][n][0] or self.home[t] != self.home[a]:
            return False
        other = self.parts[self.home[a]]
        step = coordinate(other.repetition, other.sign, a) - coordinate(other.repetition, other.sign, t)
        return step * P == (b - source) * other.repetition.period

    def place(self, b: int, s: int) -> int:
        """The place in the deeper graph of item b of part s (s = -1: of item b, which is in no part)."""
        if s < 0:
            return b + self.shifts[sum(part.repetition.start < b for part in self.parts)]
        repetition, sign, _ = self.parts[s]
        deep = repetition.stop - repetition.start + self.times * repetition.period
        if not 0 <= b < deep:
            raise ValueError(f"a copy of a layer of {self.container} reads beyond the last one")
        return repetition.start + self.shifts[s] + (b if sign > 0 else deep - 1 - b)

    # -- names --

    def named(self, i: int, p: int, m: int, later: int, numbers: Counter[str]) -> str:
        item, (stem, number) = self.items[i], self.split[i]
        if number < 0:
            return self.moved_name(item.name, p, m)
        number += numbers[stem] + (later * self.numbers[p][stem] if p >= 0 else 0)
        if isinstance(item, Result):
            return str(number)
        return f"{stem}_{number}" if number else stem

    def moved_name(self, name: str, p: int, m: int) -> str:
        """The qualified name, m periods higher; what is in no part lies as high as its layer."""
        index = _index(name, self.container)
        if index is None:
            return name
        if p < 0:
            m = self.times if index >= self.first_moved else 0
        return f"{self.container}.{index + m * self.period}{name[len(self.container) + 1 + len(str(index)) :]}"

    def _check_readers(self, graph: Graph, sources: list[int]) -> None:
        """Every copy is read like the item of the last layer below the copies or that of the first layer above them."""
        readers: list[list[tuple[int, int, int, int]]] = [[] for _ in graph.ops]
        inputs = [op.inputs for op in graph.ops] + [() if r.value is None else (r.value,) for r in graph.results]
        for j, values in enumerate(inputs):
            for n, (a, k) in enumerate(values):
                readers[a].append((*self._phase(sources[j]), n, k))
        for s, (repetition, sign, cut) in enumerate(self.parts):
            P = repetition.period
            if repetition.start >= len(self.graph.ops):
                continue
            for b in range(cut, cut + self.times * P):
                below = cut - P + (b - cut) % P
                copy, source, above = (self.place(at, s) for at in (b, below, below + (self.times + 1) * P))
                if sorted(readers[copy]) not in (sorted(readers[source]), sorted(readers[above])):
                    found, wanted = ({self._phase_name(r) for r in readers[at]} for at in (copy, source))
                    raise ValueError(
                        f"{', '.join(sorted(wanted ^ found)) or 'an op'} reads {graph.ops[source].name} of a layer of {self.container}, "
                        "but not that of every layer: an op that reads all layers can't be tiled, or there are too few of them to tell"
                    )

    def _phase(self, i: int) -> tuple[int, int]:
        p = self.home[i]
        return (-1, i) if p < 0 else (p, (i - self.parts[p].repetition.start) % self.parts[p].repetition.period)

    def _phase_name(self, reader: tuple[int, int, int, int]) -> str:
        p, x = reader[:2]
        item = self.items[x if p < 0 else self.parts[p].repetition.start + x]
        return item.name if isinstance(item, Op) else f"result {item.name}"


def _index(name: str, container: str) -> int | None:
    """2 of "h.2.attn" in the container "h"."""
    if not name.startswith(container + "."):
        return None
    digits = name[len(container) + 1 :].partition(".")[0]
    return int(digits) if digits.isdigit() else None


def _split_name(item: Op | Result) -> tuple[str, int]:
    """Stem and number of a name that fx counts ("mm_3", "mm" is 0); number -1 for a name that isn't counted."""
    if isinstance(item, Result):
        return ("result", int(item.name)) if item.kind == "output" and item.name.isdigit() else (item.name, -1)
    if item.is_placeholder:
        return (item.name, -1)
    match = re.fullmatch(r"(.*)_(\d+)", item.name)
    return (match[1], int(match[2])) if match else (item.name, 0)
