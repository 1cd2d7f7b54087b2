"""A graph whose sizes are functions of named dims, such as batch and sequence: from a few captures, at any point of their ranges.

    corner c    every dim at its least or its greatest size
    n(x)        = sum over corners c of  n(c) * prod over dims d of (t_d if c has d's greatest size, else 1 - t_d),
                  t_d = (x_d - least_d) / (greatest_d - least_d)

n is the one function that is linear in each dim (batch * sequence, sequence - 1, 3 * batch * width) and right at the corners. Every
size of a tensor and every whole number among an op's literals is taken to be one. `SizedGraph.of` compares the captures op by op, and with
one more in the middle of the ranges, where a size that is no such function (sequence ** 2) has another value.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from autoshard.graph.records import Graph, Op, Tensor

LARGE = 10_000_019  # a prime above the sizes that models have, and low enough for numbers of elements below 2 ** 63
FAR = 1 << 62  # beyond all sizes: ends of slices that have none
WIDEST = 4  # times: the next size of a dim that is planned


class Range(NamedTuple):
    """The sizes of a dim: the multiples of `multiple` from `least` to `greatest`, both of which are such multiples."""

    least: int
    greatest: int
    multiple: int = 1

    def sizes(self) -> list[int]:
        """The ends and sizes between them, at most WIDEST times apart and at least one, multiples of what divides both ends."""
        n = max(2, math.ceil(math.log(self.greatest / self.least, WIDEST)))
        step, ratio = math.gcd(self.least, self.greatest), self.greatest / self.least
        between = (round(self.least * ratio ** (k / n) / step) * step for k in range(1, n))
        return sorted({self.least, *between, self.greatest})

    def holds(self, size: int) -> bool:
        return self.least <= size <= self.greatest and size % self.multiple == 0

    def above(self, size: int) -> int:
        """The least size of the range that is not smaller."""
        return max(self.least, -(-size // self.multiple) * self.multiple)


Ranges = Mapping[str, Range]
Sizes = Mapping[str, int]  # by dim


def grid(ranges: Ranges) -> list[dict[str, int]]:
    """All combinations of the `sizes` of the dims, the last dim fastest; the last combination has all the greatest."""
    return [dict(zip(ranges, sizes)) for sizes in product(*(one.sizes() for one in ranges.values()))]


def corners(ranges: Ranges) -> list[dict[str, int]]:
    """Every dim at its least or its greatest size."""
    return [dict(zip(ranges, ends)) for ends in product(*(sorted({one.least, one.greatest}) for one in ranges.values()))]


def middle(ranges: Ranges) -> dict[str, int]:
    """A point that is no corner, unless no dim has a third size."""
    return {name: (sizes := one.sizes())[len(sizes) // 2] for name, one in ranges.items()}


def sizes_of(named: Mapping[str, Sequence[str | None]], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes of the dims in inputs of these shapes. named: by input the names of its dims. ValueError where two inputs don't agree."""
    sizes: dict[str, int] = {}
    for name, k, dim in [(name, k, dim) for name, dims in named.items() for k, dim in enumerate(dims) if dim is not None]:
        if name not in shapes or k >= len(shapes[name]) or sizes.setdefault(dim, shapes[name][k]) != shapes[name][k]:
            shape = tuple(shapes.get(name, ())) or "missing"
            raise ValueError(f"{name} is {shape}; expected {dim} as dim {k}, the same in all inputs" + f", {sizes[dim]}" * (dim in sizes))
    return sizes


def size_at(ranges: Ranges, values: Sequence[int], at: Sizes) -> Fraction:
    """n(x), from its values at the corners."""
    shares = []
    for name, one in ranges.items():
        t = Fraction(at[name] - one.least, max(one.greatest - one.least, 1))
        shares.append([1 - t, t] if one.greatest > one.least else [Fraction(1)])
    return Fraction(sum(math.prod(share) * n for share, n in zip(product(*shares), values, strict=True)))


def written(at: Sizes) -> str:
    """batch=1, sequence=128"""
    return ", ".join(f"{name}={size}" for name, size in at.items())


@dataclass(frozen=True, eq=False)
class SizedGraph:
    """The graph of a program at every point of the ranges of its dims."""

    ranges: Ranges
    graphs: tuple[Graph, ...]  # at the corners

    @staticmethod
    def of(ranges: Ranges, captured: Callable[[Sizes], Graph]) -> "SizedGraph":
        """captured: the graph at a point. ValueError where the graphs at the corners and in the middle are not one program."""
        sized = SizedGraph(ranges, tuple(captured(at) for at in corners(ranges)))
        between = captured(middle(ranges))
        for at, graph in [*zip(corners(ranges), sized.graphs, strict=True), (middle(ranges), between)]:
            if why := _difference(sized.graphs[0], graph):
                raise ValueError(f"at {written(at)} the model is another program than at {written(corners(ranges)[0])}: {why}; {INSTEAD}")
        for a, b in zip(sized.at(middle(ranges)).ops, between.ops, strict=True):
            if (a.outputs, a.literals) != (b.outputs, b.literals):
                raise ValueError(f"a size of {a.name} ({a.target}) isn't linear in {' and in '.join(ranges)}; {INSTEAD}")
        return sized

    def at(self, sizes: Sizes) -> Graph:
        """The graph at a point. ValueError where a size there is no whole number."""
        size = self._size(sizes)
        return replace(self.graphs[0], ops=tuple(_op(ops, size) for ops in zip(*(graph.ops for graph in self.graphs), strict=True)))

    def literals_at(self, sizes: Sizes, at_corners: Sequence[Any]) -> Any:
        """The whole numbers in a tuple at a point, from the tuples at the corners; what else is in the first of them."""
        return _mapped(self._size(sizes), *at_corners)

    def _size(self, sizes: Sizes) -> Callable[..., int]:
        """A size at a point from its values at the corners."""

        @cache
        def size(*values: int) -> int:
            n = size_at(self.ranges, values, sizes)
            if n.denominator != 1:
                raise ValueError(f"a size of the program is {float(n):g} at {written(sizes)}; expected sizes for which it is whole")
            return int(n)

        return size


def resized(graph: Graph, to: int) -> Graph:
    """The graph of a program that was captured with the size LARGE in one dim, such as the batch, at another size of it. ValueError where a
    size or a whole number above LARGE is no multiple of it."""

    @cache
    def size(n: int) -> int:
        if n % LARGE and LARGE < abs(n) < FAR:
            raise ValueError(f"a size of the program is {n}; expected a multiple of {LARGE}, or less")
        return to * (n // LARGE) if n % LARGE == 0 else n

    return replace(graph, ops=tuple(_mapped_op([op], size) for op in graph.ops))


INSTEAD = "make the ranges smaller (to torch a size of 1 is often special), or plan one shape, without dynamic_shapes"


def _op(ops: Sequence[Op], size: Callable[..., int]) -> Op:
    first = ops[0]
    if all(op.literals == first.literals and op.outputs == first.outputs for op in ops):
        return first
    return _mapped_op(ops, size)


def _mapped_op(ops: Sequence[Op], size: Callable[..., int]) -> Op:
    first = ops[0]
    outputs = [
        first.outputs[k] and Tensor(tuple(map(size, *(op.outputs[k].shape for op in ops))), first.outputs[k].dtype)  # type: ignore[union-attr]
        for k in range(len(first.outputs))
    ]
    return replace(first, outputs=tuple(outputs), literals=_mapped(size, *(op.literals for op in ops)))


def _mapped(size: Callable[..., int], *literals: Any) -> Any:
    if isinstance(literals[0], tuple):
        return tuple(_mapped(size, *items) for items in zip(*literals, strict=True))
    return size(*literals) if type(literals[0]) is int else literals[0]


def _difference(a: Graph, b: Graph) -> str:
    """The first difference of two graphs that is no size; empty without one."""
    for x, y in zip(a.ops, b.ops):
        if (x.name, x.target, x.kind, x.backward) != (y.name, y.target, y.kind, y.backward):
            return f"{y.name} ({y.target}) is in the place of {x.name} ({x.target})"
        if (x.inputs, x.alias) != (y.inputs, y.alias):
            return f"{x.name} ({x.target}) reads other values, or copies what was a view"
        if _without_sizes(x) != _without_sizes(y):
            return f"{x.name} ({x.target}) has other arguments, dtypes or numbers of dims"
    if (len(a.ops), a.results, a.tied) != (len(b.ops), b.results, b.tied):
        return f"it has {len(b.ops)} ops instead of {len(a.ops)}, or other results"
    return ""


def _without_sizes(op: Op) -> tuple:
    outputs = tuple(None if t is None else (len(t.shape), t.dtype) for t in op.outputs)
    return outputs, _mapped(lambda _: 0, op.literals)
