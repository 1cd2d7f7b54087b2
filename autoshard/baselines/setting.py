"""A graph on a mesh as the schemes see it: its dimension classes, its batch, the layouts of its parameters, and the pins that follow."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, TypeVar

from autoshard.baselines.classes import DimClasses, Slots, dim_classes, number_slots
from autoshard.baselines.megatron import from_parameters
from autoshard.baselines.pins import FIRST, SECOND, Pin, Priorities, settle
from autoshard.graph import REDUCE_THEN_CAST, Graph, Value, private_values
from autoshard.layout import Layout, shards_of
from autoshard.mesh import Mesh
from autoshard.strategies import Candidate, Candidates

T = TypeVar("T")
NOTHING: frozenset[int] = frozenset()
Wanted = Callable[[Value], Priorities]  # for every axis and dim of a value the priority of sharding it


@dataclass(frozen=True)
class Baseline:
    """A scheme as pins by op name; `matched` says in words what was recognised in the graph."""

    name: str
    pins: dict[str, Pin]
    matched: str
    hubs: Mapping[Value, Layout] = field(default_factory=dict)  # in which several readers read a value; those not named are free


@dataclass(frozen=True, eq=False)
class AxisSharding:
    """The classes that one mesh axis shards, with their priorities."""

    classes: DimClasses
    priority: Mapping[int, int]


AxisShardings = Mapping[int, AxisSharding]  # by axis; an axis that is left out shards nothing


class Setting:
    """What several schemes need of a graph, each worked out once. slots: of this graph, if known."""

    def __init__(self, graph: Graph, mesh: Mesh, candidates: Candidates, slots: Slots | None = None):
        self.graph, self.mesh, self.candidates = graph, mesh, candidates
        self.slots = slots or number_slots(graph, candidates)
        self.classes = dim_classes(self.slots)
        self.axes = [k for k, axis in enumerate(mesh.axes) if axis.size > 1]  # those that are used
        self.batch = self._batch_class()
        sizes = (n for n, of in zip(self.slots.sizes, self.classes.roots, strict=True) if of == self.batch)
        self.batch_size = math.gcd(*sizes)  # the number that every dim of the batch is a multiple of
        self.known: dict[Callable, Any] = {}  # what `once` keeps

    def _batch_class(self) -> int | None:
        """The class of most inputs' dim 0 (the larger class among equals) that no parameter's dim is in; None when there is none."""
        graph, classes = self.graph, self.classes
        of_parameters = {classes.of((i, 0), d) for i in graph.parameters.values() for d in range(len(graph.tensor((i, 0)).shape))}
        votes: dict[int, int] = {}
        for i, op in enumerate(graph.ops):
            if op.kind == "input" and graph.tensor((i, 0)).shape[:1] > (1,):
                c = classes.of((i, 0), 0)
                votes[c] = votes.get(c, 0) + 1
        return max(votes.keys() - of_parameters, key=lambda c: (votes[c], classes.roots.count(c), -c), default=None)

    def shard_batch(self, axes: Sequence[int]) -> tuple[dict[int, AxisSharding], str]:
        """The batch sharded over those of `axes` that divide it into the most shards (the fastest among equals), and that in words."""
        if not axes or self.batch is None:
            return {}, "batch replicated" if self.batch is not None else "no batch dim found"

        def devices(subset: tuple[int, ...]) -> int:
            return math.prod(self.mesh.axes[k].size for k in subset)

        subsets = [s for n in range(len(axes) + 1) for s in combinations(axes, n)]
        chosen = max((s for s in subsets if not self.batch_size % devices(s)), key=lambda s: (devices(s), s))
        words = f"batch sharded over {axes_in_words(chosen)}" if chosen else "batch replicated"
        if left := [k for k in axes if k not in chosen]:
            further = " further" if chosen else ""
            words += f" ({self.batch_size} does not divide{further}: compute is repeated over {axes_in_words(left)})"
        return {k: AxisSharding(self.classes, {self.batch: FIRST}) for k in chosen}, words

    @cached_property
    def data_parallel(self) -> tuple[dict[int, AxisSharding], str]:
        """The batch over all axes that are used."""
        return self.shard_batch(self.axes)

    @cached_property
    def by_batch(self) -> Wanted:
        return self.wanted(self.data_parallel[0])

    def wanted(self, sharding: AxisShardings) -> Wanted:
        """Of the classes that each axis shards. A placeholder has no priority below FIRST, nor a view as a matrix: a batch of one sequence
        can be flattened in shards, but readers of several views would each gather it, where what they view is gathered once."""
        known: dict[Value, Priorities] = dict.fromkeys(private_values(self.graph), ())

        def of_axis(k: int, value: Value, rank: int) -> tuple[int, ...]:
            return sharding[k].classes.priorities(value, rank, sharding[k].priority) if k in sharding else (0,) * rank

        def wanted(value: Value) -> Priorities:
            if value not in known:
                rank, op = len(self.graph.tensor(value).shape), self.graph.ops[value[0]]
                least = FIRST if op.is_placeholder or (op.alias is not None and rank < 3) else SECOND
                rows = [of_axis(k, value, rank) for k in range(len(self.mesh.axes))]
                known[value] = tuple(tuple(p if p >= least else 0 for p in row) for row in rows)
            return known[value]

        return wanted

    @cached_property
    def shards(self) -> dict[int, Layout]:
        """Of each parameter the layout with the most shards over all axes."""
        return {i: self.most_sharded(self.candidates.of[i]) for i in self.graph.parameters.values()}

    def most_sharded(self, options: Sequence[Candidate], axes: Sequence[int] | None = None) -> Layout:
        """The layout, among a parameter's, with the most shards over these axes (default: all), along as few dims as possible, the first
        dims first."""

        def order(layout: Layout) -> tuple:
            dims = [p.dim for p in layout if p.is_shard()]  # type: ignore[attr-defined]
            return (num_shards(layout, self.mesh), -len(set(dims)), [-d for d in dims])

        layouts = [c.outputs[0] for c in options if c.outputs[0] is not None]
        allowed = (layout for layout in layouts if axes is None or all(k in axes or p.is_replicate() for k, p in enumerate(layout)))
        return max(allowed, key=order)

    @cached_property
    def views(self) -> frozenset[int]:
        """Ops of one input that are computed from parameters only. Not what makes more of it (expand): a launcher gathers the parameter.
        Nor what the backward pass computes again and reads more than once: that is gathered once for a recomputation and its gradients."""
        graph, views = self.graph, from_parameters(self.graph)
        again = {i for i in views if graph.ops[i].backward and len(graph.users.get((i, 0), ())) > 1}
        of_one = (i for i in views if len(graph.ops[i].inputs) == 1 and i not in again)
        return frozenset(i for i in of_one if all(t is None or t.numel <= graph.input_tensors(i)[0].numel for t in graph.ops[i].outputs))

    def with_casts(self, fixed: Mapping[int, Layout]) -> dict[int, Layout]:
        """The fixed layouts, and those of the gradient casts that want a reduced gradient: it is reduced to the parameter's layout."""
        parameters = self.graph.parameters
        pairs = [(r.value[0], parameters[r.name]) for r in self.graph.results if r.value is not None and r.name in parameters]
        return {**fixed, **{cast: fixed[i] for cast, i in pairs if self.graph.ops[cast].kind == REDUCE_THEN_CAST and i in fixed}}

    def pins(self, wanted: Wanted, fixed: Mapping[int, Layout], carried: frozenset[int] = NOTHING, **choices: Any) -> dict[str, Pin]:
        """As `settle`."""
        return settle(self.graph, self.candidates, wanted, fixed, carried, **choices)


def once(rule: Callable[[Setting], T]) -> Callable[[Setting], T]:
    """The rule, worked out once for each setting."""

    def known(s: Setting) -> T:
        if rule not in s.known:
            s.known[rule] = rule(s)
        return s.known[rule]

    return known


def num_shards(layout: Layout, mesh: Mesh) -> int:
    return math.prod(shards_of(layout, mesh, d) for d in {p.dim for p in layout if p.is_shard()})  # type: ignore[attr-defined]


def axes_in_words(axes: Sequence[int]) -> str:
    return ("axis " if len(axes) == 1 else "axes ") + ",".join(map(str, axes))
