"""What a plan for ranges of sizes says of each shape: whether its layouts divide it, its seconds there, and what re-planning could gain.

It is kept among the plan's assumptions, as `dynamic_shapes`:

    ranges      by dim: its least and its greatest size, and what its sizes are multiples of
    inputs      by input: the names of its dims, null where the size is fixed
    points      the shapes that were planned: the sizes of the dims, those to which the plan has it padded, the plan's seconds there,
                and seconds that no plan of the shape as it is can go below
    sharded     the sizes that layouts divide: n at the corners of the ranges (graph.sized), and into how many equal parts
    criterion   what was made small over the points, relative to the best plan of each: "average", the seconds of all together; "worst" or
                "median", of the ratios; `ratio` is what it is, and no plan has less than `bound_ratio` (0: unknown)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.graph import Range, Sizes, corners, size_at, sizes_of, written


@dataclass(frozen=True)
class Coverage:
    """What a plan says of one shape. It is true where the plan covers the shape."""

    reason: str  # why it doesn't; empty where it does
    padded: dict[str, int]  # the least shape that it covers and to which this one can be padded; empty where there is none
    seconds: float  # of the plan, in the padded shape; inf where there is none
    bound: float  # seconds below which no plan of this shape can be: proven where the shape was planned, else estimated; 0: unknown

    def __bool__(self) -> bool:
        return not self.reason

    @property
    def gain(self) -> float:
        """By which fraction of its seconds a plan for this shape alone could be faster, at most."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class DynamicShapes:
    """The ranges of a plan, and what is known of it over them."""

    ranges: dict[str, Range]
    inputs: dict[str, tuple[str | None, ...]]
    points: tuple[dict[str, Any], ...]  # {"sizes": {dim: size}, "padded": {dim: size}, "seconds", "bound_seconds"}
    sharded: tuple[tuple[tuple[int, ...], int], ...]
    criterion: str
    ratio: float
    bound_ratio: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {one.least} to {one.greatest}" for name, one in self.ranges.items())
        return f"{sizes}; {self.ratio:.4g} times the seconds of the best plans, {self.criterion} of {len(self.points)} shapes"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` is the inverse."""
        return asdict(self) | {"ranges": {name: list(one) for name, one in self.ranges.items()}}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> DynamicShapes:
        """ValueError where a file has something else there."""
        try:
            ranges = {str(name): Range(*map(int, one)) for name, one in data["ranges"].items()}
            inputs = {str(name): tuple(dims) for name, dims in data["inputs"].items()}
            points = tuple(
                {of: {dim: int(row[of][dim]) for dim in ranges} for of in OF} | {key: float(row[key]) for key in FIGURES}
                for row in data["points"]
            )
            sharded = tuple((tuple(map(int, n)), int(parts)) for n, parts in data["sharded"])
            wrong = any(len(n) != len(corners(ranges)) for n, _ in sharded)
            if wrong or not points or {dim for dims in inputs.values() for dim in dims} - {None, *ranges}:
                raise ValueError("its points, inputs or sizes are of other dims than its ranges")
            return DynamicShapes(ranges, inputs, points, sharded, str(data["criterion"]), float(data["ratio"]), float(data["bound_ratio"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the plan's dynamic_shapes can't be read ({error}); plan again") from error

    def covers(self, sizes: Sizes) -> Coverage:
        """What the plan says of a shape, by the sizes of all its dims. ValueError where they are others than those of the plan."""
        if set(sizes) != set(self.ranges):
            raise ValueError(f"the sizes are of {', '.join(sizes) or 'no dim'}; the plan's dims are {', '.join(self.ranges)}")
        bound = self._between(sizes, "sizes", "bound_seconds") if self._is_within(sizes) else 0.0
        padded = self._padded(sizes)
        return Coverage(self._why_not(sizes), padded or {}, self._between(padded, "padded", "seconds") if padded else math.inf, bound)

    def _is_within(self, sizes: Sizes) -> bool:
        return all(one.least <= sizes[name] <= one.greatest for name, one in self.ranges.items())

    def _why_not(self, sizes: Sizes) -> str:
        for name, one in self.ranges.items():
            if not one.least <= sizes[name] <= one.greatest:
                return f"{name} is {sizes[name]}, planned were {one.least} to {one.greatest}"
        for values, parts in self.sharded:
            n = size_at(self.ranges, values, sizes)
            if n % parts:
                return f"a tensor has {float(n):g} rows at {written(sizes)}, which its layout divides into {parts} parts"
        return ""

    def _padded(self, sizes: Sizes) -> dict[str, int] | None:
        """The least covered shape that is nowhere smaller: dims are made larger in steps of their own layouts, up to their greatest."""
        steps = {name: math.lcm(one.multiple, *(parts for _, parts in self.sharded)) for name, one in self.ranges.items()}
        for finest in (True, False):
            grown = {}
            for name, one in self.ranges.items():
                step = one.multiple if finest else steps[name]
                grown[name] = max(one.least, sizes[name], min(-(-sizes[name] // step) * step, one.greatest))
            if self._is_within(grown) and not self._why_not(grown):
                return self._smaller(grown, sizes)
        return None

    def _smaller(self, grown: dict[str, int], sizes: Sizes) -> dict[str, int]:
        """Each dim as small as the others allow."""
        for name, one in self.ranges.items():
            options = range(one.above(sizes[name]), grown[name] + 1, one.multiple)
            grown[name] = next(n for n in options if not self._why_not({**grown, name: n}))
        return grown

    def _between(self, sizes: Sizes, of: str, key: str) -> float:
        """A figure of the points, between them by powers of the sizes."""
        rows, names = {tuple(row[of].values()): row[key] for row in self.points}, list(self.ranges)

        def at(known: tuple[int, ...]) -> float:
            if len(known) == len(names):
                return math.log(max(rows[known], 1e-30))
            k = len(known)
            planned, x = sorted({one[k] for one in rows}), max(sizes[names[k]], min(one[k] for one in rows))
            low, high = max(n for n in planned if n <= x), min(n for n in planned if n >= x)
            t = math.log(x / low) / math.log(high / low) if high > low else 0.0
            return (1 - t) * at((*known, low)) + (t * at((*known, high)) if t else 0.0)

        return math.exp(at(()))

    def padded(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of a call's inputs, padded to the least that the plan covers. ValueError where there are none."""
        sizes = sizes_of(self.inputs, shapes)
        coverage = self.covers(sizes)
        if not coverage.padded:
            raise ValueError(f"the plan covers no shape to which {written(sizes)} can be padded: {coverage.reason}")
        return {
            name: tuple(n if dim is None else coverage.padded[dim] for n, dim in zip(shapes[name], dims, strict=True))
            for name, dims in self.inputs.items()
        }


OF, FIGURES = ("sizes", "padded"), ("seconds", "bound_seconds")
