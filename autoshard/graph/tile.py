"""The graph of a deeper model, built from that of a shallow one: one period of layers is copied `times` times.

Items are the ops and, after them, the results. The repetitions that are linked to the container's parameters (parameters,
buffers, forward, backward, gradients) form a group, and each is a part of the graph; in repetition r with period P_r an item has
the coordinate b, counted from the bottom of the model (`Repetition.coordinate`).

    point    B_r, the insertion point: a place with the same wiring on both sides                    `insertion.tiled_repetitions`
    copies   the layers [B_r, B_r + times P_r): item b + m P_r is a copy of item b of [B_r - P_r, B_r), m = 1 ... times
    moved    an item at b >= B_r moves to b + times P_r and has m = times; an item below the point stays and has m = 0
    less     times = -1: the layers [B_r, B_r + P_r) are left out, and an item above them moves down, m = -1
    wiring   a regular read of b' becomes a read of b' + m P_s; every other read keeps the value that it read        `_Tiling.read`
    names    the container's index grows by m * (layers per period). fx numbers the names of one stem in order: the number of a
             copy grows by as many numbers of that stem as the periods before it use                                 `_Tiling.named`

The graph that `tile` returns is checked: every op reads values that exist (`check`), and every copy has the readers of its
source. That doesn't prove that it is the graph of the deeper model: `capture_deep` compares it with a capture of the model with one
more period.
"""

import re
from collections import Counter
from dataclasses import replace
from itertools import accumulate

from autoshard.graph.blocks import Repetition, repetition_of, repetitions, symbols
from autoshard.graph.insertion import Inputs, TiledRepetition, tiled_repetitions
from autoshard.graph.records import Graph, Op, Result


def tile(graph: Graph, times: int, *, container: str, period: int = 1) -> Graph:
    """The graph of the model whose container has `times * period` more layers, or, with times = -1, `period` less.

    container: the qualified name of the ModuleList or Sequential ("model.layers"). period: after how many layers they repeat
    (2 where every second one is a mixture of experts). ValueError says why the graph can't be tiled.
    """
    if times < -1:
        raise ValueError(f"times is {times}; a graph can be made deeper, or a period less deep (-1)")
    if any(_index(name, container) is not None for pair in graph.tied for name in pair):
        raise ValueError(f"parameters of {container} are tied: {graph.tied}; copies of them would have to be tied too")
    return graph if times == 0 else _Tiling(graph, times, container, period).tiled()


def check(graph: Graph) -> Graph:
    """Returns the graph; ValueError if an op reads a value that comes later or doesn't exist, or if two ops have one name."""
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


class _Tiling:
    """One tiling. `items` are ops, then results; `parts` are the repetitions of the group; `part_of[i]` is that of item i, or -1."""

    def __init__(self, graph: Graph, times: int, container: str, period: int):
        self.graph, self.times, self.container, self.period = graph, times, container, period
        ops = graph.ops
        self.items: list[Op | Result] = [*ops, *graph.results]
        self.inputs: Inputs = [op.inputs for op in ops] + [() if r.value is None else (r.value,) for r in graph.results]
        self.split = [_split_name(item) for item in self.items]
        self.last_layer = max((_index(op.name, container) or 0 for op in ops if op.is_placeholder), default=0)
        repeats = repetitions(self._symbols())
        seeds = [r for r, rep in enumerate(repeats) if self._holds_parameters(rep)]
        if not seeds:
            raise ValueError(f"the parameters of {container} don't repeat after {period} of its layers")
        self.parts = tiled_repetitions(repeats, self.inputs, seeds, container)
        if all(ops[part.start].is_placeholder for part in self.parts if part.start < len(ops)):
            raise ValueError(f"no part of the graph repeats with the layers of {container}: they differ, or there are too few of them")
        self.part_of = repetition_of(self.parts, len(self.items))
        self.shifts = [0, *accumulate(part.period * times for part in self.parts)]  # by how much the items between the parts move
        self.deeper = [  # the parts in the deeper graph
            replace(part, start=part.start + shift, stop=part.stop + shift + times * part.period)
            for part, shift in zip(self.parts, self.shifts)
        ]
        self.numbers = [self._numbers(part) for part in self.parts]
        part = next(part for part in self.parts if self._holds_parameters(part))
        last = _index(self.items[part.item_at(part.point - 1)].name, container)
        self.first_moved = (last or 0) + 1  # layer, from which on layers get a new number (for names of items in no part)
        self.moves: dict[tuple[int, int], bool] = {}  # by item and input, for all copies: whether the read moves up with its reader

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
        """Whether it consists of placeholders in the container up to its last layer (not of a head that repeats, too) and has the
        container's period (not that of repeated parts of a layer)."""
        item, later = self.items[repetition.start], self.items[repetition.start + repetition.period]
        if not (isinstance(item, Op) and item.is_placeholder):
            return False
        low, high = _index(item.name, self.container), _index(later.name, self.container)
        top = _index(self.items[repetition.stop - 1].name, self.container)
        return low is not None and high is not None and high - low == self.period and top == self.last_layer

    def _numbers(self, part: TiledRepetition) -> Counter[str]:
        """How many numbers of each fx stem a period uses."""
        steps: dict[str, int] = {}
        for b in range(part.point - part.period, part.point):
            i, above = part.item_at(b), part.item_at(b + part.period)
            (stem, number), (later_stem, later) = self.split[i], self.split[above]
            step = (later - number) * part.sign
            if number < 0 and later < 0:
                continue
            if stem != later_stem or steps.setdefault(stem, step) != step:
                raise ValueError(f"the names {self.items[i].name} and {self.items[above].name} aren't numbered in order")
        return Counter(steps)

    def tiled(self) -> Graph:
        ops: list[Op] = []
        results: list[Result] = []
        sources: list[int] = []
        numbers: Counter[str] = Counter()
        i = 0
        while i < len(self.items):
            p = self.part_of[i]
            if p < 0:
                items = [(i, self._copied(i, -1, 0, 0, numbers))]
                i += 1
            else:
                items = self._part_items(p, numbers)
                numbers.update({stem: step * self.times for stem, step in self.numbers[p].items()})
                i = self.parts[p].stop
            for source, item in items:
                sources.append(source)
                if isinstance(item, Op):
                    ops.append(item)
                else:
                    results.append(item)
        graph = check(Graph(tuple(ops), tuple(results), self.graph.tied))
        self._check_readers(graph, sources)
        return graph

    def _part_items(self, p: int, numbers: Counter[str]) -> list[tuple[int, Op | Result]]:
        """All items of a part of the deeper graph in order, each with the index of the item that it copies."""
        part, deeper, items = self.parts[p], self.deeper[p], []
        for position in range(deeper.start, deeper.stop):
            b = deeper.coordinate(position)
            m = 0 if b < part.point else min((b - part.point) // part.period + 1, self.times)
            source = part.item_at(b - m * part.period)
            items.append((source, self._copied(source, p, m, m if part.sign > 0 else self.times - m, numbers)))
        return items

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
        """The op of the deeper graph that input n of a copy of item i, m periods higher, reads; item i reads op a."""
        s = self.part_of[a]
        if s < 0:
            return self.place(a, -1)
        part = self.parts[s]
        there = part.coordinate(a)
        if p >= 0 and (i, n) not in self.moves:
            self.moves[i, n] = self._moves(i, p, n, a)
        if p >= 0 and self.moves[i, n]:
            return self.place(there + m * part.period, s)
        return self.place(there + self.times * part.period * (there >= part.point), s)

    def _moves(self, i: int, p: int, n: int, a: int) -> bool:
        """Whether input n of item i moves up with its reader, as that of the corresponding item next to the insertion point does."""
        part, P = self.parts[p], self.parts[p].period
        b = part.coordinate(i)
        source = part.point - P + (b - part.point) % P
        t = self.inputs[part.item_at(source)][n][0]
        if t == self.inputs[part.item_at(source + P)][n][0] or self.part_of[t] != self.part_of[a]:
            return False
        read = self.parts[self.part_of[a]]
        return (read.coordinate(a) - read.coordinate(t)) * P == (b - source) * read.period

    def place(self, b: int, s: int) -> int:
        """The index in the deeper graph of the item with coordinate b of part s (s = -1: of item b, which is in no part)."""
        if s < 0:
            return b + self.shifts[sum(part.start < b for part in self.parts)]
        deeper = self.deeper[s]
        if not 0 <= b < deeper.stop - deeper.start:
            raise ValueError(f"a copy of a layer of {self.container} reads beyond the last one")
        return deeper.item_at(b)

    def named(self, i: int, p: int, m: int, later: int, numbers: Counter[str]) -> str:
        item, (stem, number) = self.items[i], self.split[i]
        if number < 0:
            return self.moved_name(item.name, p, m)
        further = numbers[stem] + (later * self.numbers[p][stem] if p >= 0 else 0)
        if further == 0:
            return item.name
        number += further
        if isinstance(item, Result):
            return str(number)
        return f"{stem}_{number}" if number else stem

    def moved_name(self, name: str, p: int, m: int) -> str:
        """The qualified name, m periods higher; an item in no part moves if its layer does."""
        index = _index(name, self.container)
        if index is None:
            return name
        if p < 0:
            m = self.times if index >= self.first_moved else 0
        return f"{self.container}.{index + m * self.period}{name[len(self.container) + 1 + len(str(index)) :]}"

    def _check_readers(self, graph: Graph, sources: list[int]) -> None:
        """ValueError unless every copy has the readers of its item in the last layer below the copies, or in the first layer above them."""
        readers: list[list[tuple[int, int, int, int]]] = [[] for _ in graph.ops]
        inputs = [op.inputs for op in graph.ops] + [() if r.value is None else (r.value,) for r in graph.results]
        for j, values in enumerate(inputs):
            for n, (a, k) in enumerate(values):
                readers[a].append((*self._phase(sources[j]), n, k))
        for s, part in enumerate(self.parts):
            P = part.period
            if part.start >= len(self.graph.ops):
                continue
            for below in range(part.point - P, part.point):
                source, above = (self.place(at, s) for at in (below, below + (self.times + 1) * P))
                known = (sorted(readers[source]), sorted(readers[above]))
                for m in range(1, self.times + 1):
                    copy = self.place(below + m * P, s)
                    if sorted(readers[copy]) not in known:
                        raise ValueError(self._why_unread(graph.ops[source].name, {*readers[source]} ^ {*readers[copy]}))

    def _why_unread(self, name: str, readers: set[tuple[int, int, int, int]]) -> str:
        for i, values in enumerate(self.inputs):
            read = Counter(self._phase(a) for a, _ in values if self.part_of[a] >= 0)
            if self.part_of[i] < 0 and max(read.values(), default=0) >= 3:
                return f"{self._phase_name(-1, i)} reads every layer of {self.container} at once: it has as many inputs as there are layers"
        names = sorted(self._phase_name(p, x) for p, x, *_ in readers)
        return (
            f"{', '.join(names)} reads {name} of a layer of {self.container}, and nothing would read that of its copies: "
            "its reader doesn't repeat, or the layers are too few to tell"
        )

    def _phase(self, i: int) -> tuple[int, int]:
        p = self.part_of[i]
        return (-1, i) if p < 0 else (p, (i - self.parts[p].start) % self.parts[p].period)

    def _phase_name(self, p: int, x: int) -> str:
        item = self.items[x if p < 0 else self.parts[p].start + x]
        return f"{item.name} ({item.target})" if isinstance(item, Op) else f"result {item.name}"


def _index(name: str, container: str) -> int | None:
    """2 of "h.2.attn" in the container "h"."""
    if not name.startswith(container + "."):
        return None
    digits = name[len(container) + 1 :].partition(".")[0]
    return int(digits) if digits.isdigit() else None


def _split_name(item: Op | Result) -> tuple[str, int]:
    """Stem and number of a name that fx numbers ("mm_3" is 3, "mm" is 0); -1 for a name that fx doesn't number."""
    if isinstance(item, Result):
        return ("result", int(item.name)) if item.kind == "output" and item.name.isdigit() else (item.name, -1)
    if item.is_placeholder:
        return (item.name, -1)
    match = re.fullmatch(r"(.*)_(\d+)", item.name)
    return (match[1], int(match[2])) if match else (item.name, 0)
