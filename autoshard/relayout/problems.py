"""A redistribution problem, its route, and both as plain data.

    {"id": "p1", "shape": [800, 400], "mesh": [4, 2], "src": [[0, 1], []], "src_bs": [100, -1], "dst": [[], [1]], "dst_bs": [-1, 200],
     "mem": null}

src, dst: per dim the mesh axes that shard it, major to minor; *_bs: block size per dim (read only where the dim is sharded; without
it the parts are torch.chunk's); mem: elements per rank, null for the default. Also read: "src_partial", "dst_partial" (axes),
"reduce_op", "itemsize" (bytes), and `D_[4,2]⊥{(0,1),∅}(100,∅)` as "src" or "dst". Items may be wrapped as {"problem": {...}}.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.reading import checked
from autoshard.relayout.blocks import CHUNKS, UNSHARDED, Axes, BlockLayout, Sizes, canonical, local_elements, why_not

ITEMSIZE = 8  # bytes per element of TensorCraft's problems
KEYS = ("id", "shape", "mesh", "src", "src_bs", "src_partial", "dst", "dst_bs", "dst_partial", "reduce_op", "itemsize", "mem")
MOST_RANKS = 2**13  # the messages of a step between all of them are counted pair by pair
NEAR = 0.75  # likeness of a key that was meant as another: item_size, dst_block


@dataclass(frozen=True)
class BlockProblem:
    """Redistribute a tensor from the source layout to the target layout. ValueError, one sentence, for an impossible problem."""

    shape: Sizes
    mesh: Sizes
    source: BlockLayout
    target: BlockLayout
    itemsize: int = ITEMSIZE
    name: str = ""
    limit: float | None = None  # elements per rank, None: the default of the count

    def __post_init__(self) -> None:
        for what, sizes in (("shape", self.shape), ("mesh", self.mesh)):
            if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
                raise ValueError(f"{self._what()}{what} is {list(sizes)}; expected one or more whole numbers, each at least 1")
        if (ranks := math.prod(self.mesh)) > MOST_RANKS:
            raise ValueError(
                f"{self._what()}mesh {list(self.mesh)} has {ranks} ranks; expected {MOST_RANKS} at most: leave out the axes that neither "
                "the source nor the target uses, or plan one axis after the other"
            )
        if isinstance(self.itemsize, bool) or not isinstance(self.itemsize, int) or self.itemsize < 1:
            raise ValueError(f"{self._what()}itemsize is {self.itemsize!r}; expected whole bytes per element, at least 1")
        for end in ("source", "target"):
            why = why_not(self.shape, getattr(self, end), self.mesh)
            if why is not None:
                raise ValueError(f"{self._what()}{end}: {why}")
        new = sorted(set(self.target.partial) - set(self.source.partial))
        if new or (self.target.partial and self.target.reduce_op != self.source.reduce_op):
            raise ValueError(
                f"{self._what()}the target is partial on axes {list(self.target.partial)}, the source on {list(self.source.partial)}; "
                "no step makes a tensor partial, so expected a subset of the source's axes, with the same reduction"
            )

    def _what(self) -> str:
        return f"problem {self.name}: " if self.name else ""

    def elements(self, layout: BlockLayout) -> int:
        return local_elements(self.shape, layout, self.mesh)

    def memory_limit(self, limit: float | None, count: str) -> float:
        """The limit in elements per rank: the argument, or the problem's, or the default. ValueError where no route can keep it.

        count "resident": of the shards between steps, by default the larger end. "buffers": of a step's input and output together,
        by default twice the larger end, so that every step between shards no larger than the ends is possible.
        """
        ends = [self.elements(self.source), self.elements(self.target)]
        needed = max(ends) if count == "resident" or self.same else 2 * max(ends)
        limit = self.limit if limit is None else limit
        if limit is None:
            return needed
        if math.isnan(limit) or limit < max(ends):
            raise ValueError(
                f"{self._what()}the memory limit is {limit:g} elements ({limit * self.itemsize:g} bytes) per rank; the source takes "
                f"{ends[0]} and the target {ends[1]}, so give at least {needed} elements ({needed * self.itemsize} bytes)"
            )
        return limit

    @property
    def same(self) -> bool:
        return canonical(self.shape, self.source, self.mesh) == canonical(self.shape, self.target, self.mesh)


@dataclass(frozen=True)
class BlockStep:
    """One step over the ranks that differ along `axes` only, or a local slice (`split`)."""

    collective: str  # a kind of cost.block_prices
    axes: Axes  # mesh axes, ascending
    dims: tuple[int, ...]  # tensor dims that it changes
    before: BlockLayout
    after: BlockLayout
    seconds: float
    bytes: int  # the most that one rank sends; 0 for split
    executable_by: str  # "dtensor": one of DTensor's own steps; "autoshard": relayout/execute.py


@dataclass(frozen=True)
class BlockRoute:
    """Steps in order. No route costs less than bound_seconds, which equals seconds where status is "optimal"."""

    problem: BlockProblem
    steps: tuple[BlockStep, ...]
    status: str  # "optimal", "feasible" (the search stopped early or is not exact), or "infeasible"
    seconds: float
    bound_seconds: float
    peak_elements: int  # the largest shard between steps, or input + output of a step, as counted
    count: str  # resident | buffers
    explored: int  # states expanded

    @property
    def peak_bytes(self) -> int:
        return self.peak_elements * self.problem.itemsize

    @property
    def executable_by(self) -> str:
        return "dtensor" if all(step.executable_by == "dtensor" for step in self.steps) else "autoshard"

    def to_dict(self) -> dict[str, Any]:
        """The object of the command line's --json (without `cpu_seconds`)."""
        problem, mesh = self.problem, self.problem.mesh
        steps = [
            {
                "collective": step.collective, "axes": list(step.axes), "dims": list(step.dims), "layout": step.after.text(mesh),
                "seconds": step.seconds, "bytes": step.bytes, "held_bytes": problem.elements(step.after) * problem.itemsize,
                "executable_by": step.executable_by,
            }
            for step in self.steps
        ]  # fmt: skip
        return {
            "id": problem.name, "status": self.status, "cost_seconds": self.seconds, "bound_seconds": self.bound_seconds,
            "peak_elements": self.peak_elements, "peak_bytes": self.peak_bytes, "counted": self.count,
            "source": problem.source.text(mesh), "target": problem.target.text(mesh),
            "source_bytes": problem.elements(problem.source) * problem.itemsize, "steps": steps, "executable_by": self.executable_by,
            "explored": self.explored,
        }  # fmt: skip


def read_problems(data: Any) -> list[BlockProblem]:
    """One problem, a list of them, or {"problems": [...]}, their keys as above. ValueError, one sentence, on anything else and on an
    impossible problem; a problem without an "id" is called by its number."""
    checked(data, "the data", "redistribution")
    items = data["problems"] if isinstance(data, Mapping) and "problems" in data else data
    return [_problem(item.get("problem", item), str(i)) for i, item in enumerate([items] if isinstance(items, Mapping) else items)]


def read_problem(data: Any) -> BlockProblem:
    """One problem, as `read_problems`."""
    return read_problems([data])[0]


def _problem(item: Mapping, number: str) -> BlockProblem:
    name = str(item.get("id", number))
    for key in (key for key in item if key not in KEYS):  # a file may hold notes; what nearly is a key is a mistake
        if near := difflib.get_close_matches(str(key), KEYS, n=1, cutoff=NEAR):
            raise ValueError(f"problem {name} has an unknown key {str(key)[:40]!r}; did you mean {near[0]!r}?")
    shape, mesh = (tuple(map(int, item[key])) for key in ("shape", "mesh"))
    ends = [_layout(item, end, mesh, item.get("reduce_op", "sum"), f"problem {name}: {end}") for end in ("src", "dst")]
    return BlockProblem(shape, mesh, ends[0], ends[1], item.get("itemsize", ITEMSIZE), name, item.get("mem"))


def _layout(item: Mapping, end: str, mesh: Sizes, op: str, what: str) -> BlockLayout:
    written = item[end]
    if isinstance(written, str):
        written_mesh, layout = BlockLayout.parse(written)
        if written_mesh != mesh:
            raise ValueError(f"{what} is written for the mesh {list(written_mesh)}, the problem has {list(mesh)}")
        return replace(layout, reduce_op=op)
    axes = tuple(tuple(map(int, some)) for some in written)
    partial = tuple(sorted(map(int, item.get(f"{end}_partial", []))))
    sizes = item.get(f"{end}_bs")
    if sizes is None:
        return BlockLayout(axes, (CHUNKS,) * len(axes), partial, op)
    sizes = list(sizes) if isinstance(sizes, Sequence) else [sizes] * len(axes)
    if len(sizes) != len(axes):
        raise ValueError(f"{what}_bs has {len(sizes)} block sizes, {end} {len(axes)} dims; give one per dim, -1 where no axis shards it")
    blocks = tuple(UNSHARDED if b is None or not some else int(b) for b, some in zip(sizes, axes))
    if any(some and b < 1 for b, some in zip(blocks, axes)):
        raise ValueError(f"{what}_bs is {list(sizes)}; expected a block size of at least 1 for each dim that an axis shards")
    return BlockLayout(axes, blocks, partial, op)
