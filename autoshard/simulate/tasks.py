"""A plan as an ordered list of tasks: kernels on a device, collectives on mesh axes, and the tasks that each of them waits for.

    op i              its kernel on the compute stream, then its internal collectives, each on the stream of its mesh axis; of an op that
                      computes while it sends (a ring), its stages
    link a -> b       the steps of its route, one after the other: collectives, and splits after them, on a stream of their axis, other
                      splits on the compute stream
    parameter         the optimizer's step, last, after its gradient's route
    view, hub         no task
    cast of a shard   of a large parameter, where its first fetch begins; a run casts small ones early, too, and joins their gathers
    offload, reload   its copy on the host link's stream of its direction; without overlap the share that the plan counts

The list holds every task once, after all tasks that it waits for; each stream runs its tasks in this order. Where in the list those of a
link stand is said in simulate/positions.py.

With m microbatches (graph.accumulation):

    once              first the fetches of kept copies, last the reductions of the sums of gradients, both one after the other
    m times           all other tasks; a microbatch begins when the preceding one has ended
    add to a sum      right after the gradient; where it has to be reduced before, at the end of the microbatch

The sum of all seconds is the cost of the plan, where no op computes while it sends or nothing overlaps. All ranks of an SPMD program do
the same at the same times, so one is simulated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost import PricedCollective, TimedStage, host_seconds
from autoshard.formulate import Formulation, op_collectives, op_stages
from autoshard.graph import ACCUMULATED, OFFLOADED, RELOADED, Graph
from autoshard.layout import local_numel
from autoshard.simulate.positions import REST, LinkPositions, facts_of

COMPUTE = 0  # stream; of n mesh axes, axis k has the streams k + 1 and, for what no kernel waits for soon, n + k + 1
PREFETCH = 12  # fetches of parameters ahead of their readers: about a block of a transformer, as fully_shard has it


@dataclass(frozen=True)
class Task:
    """One kernel or collective. Its stream runs tasks in order; it also waits for the tasks `after`."""

    name: str
    kind: str  # compute, accumulation, optimizer, split, offloaded, reloaded, or the collective
    seconds: float
    stream: int
    after: tuple[int, ...]
    phase: str  # forward, backward, update
    op: int  # index into the graph: the kernel's op; for a moved value its reader (its producer, where it has no reader)
    bytes: float = 0.0  # that each rank sends


@dataclass(frozen=True, eq=False)
class TaskProgram:
    """Tasks of one rank of a plan, and the position of those of each op and link."""

    tasks: tuple[Task, ...]
    formulation: Formulation
    choice: tuple[int, ...]
    of_op: tuple[tuple[int, int], ...]  # per op the range of its tasks, in the last microbatch
    of_link: tuple[tuple[int, int], ...]  # per link the range of its tasks; empty where nothing moves
    overlap: bool
    live: np.ndarray  # bytes during each op, with what is fetched early
    limit: float  # of these; inf where the plan has none, or exceeds it
    earlier: tuple[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]], ...] = ()  # of_op, of_link of the microbatches before

    @property
    def graph(self) -> Graph:
        return self.formulation.graph


def program_of(formulation: Formulation, choice: Sequence[int], *, overlap: bool = True, prefetch: int = PREFETCH) -> TaskProgram:
    """The tasks of a plan. prefetch: how many fetches of parameters may be ahead of their readers (at least 1 with overlap)."""
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}; expected a number of fetches, 0 or more")
    return _Builder(formulation, tuple(choice), overlap, prefetch).build()


class _Builder:
    """Builds the list: for each op the moves before it, its tasks, the moves after it."""

    def __init__(self, formulation: Formulation, choice: tuple[int, ...], overlap: bool, prefetch: int):
        self.formulation, self.choice, self.overlap = formulation, choice, overlap
        self.graph, self.links = formulation.graph, formulation.tensor_edges
        self.tasks: list[Task] = []
        self.facts = facts_of(formulation)
        self.places = LinkPositions(formulation, self.facts, choice, overlap, max(prefetch, 1))
        self.steps = self.places.steps
        self.ready: dict[int, tuple[int, ...]] = {}  # node -> the tasks after which its value is available
        self.of_op = [(0, 0)] * len(self.graph.ops)
        self.of_link = [(0, 0)] * len(self.links)
        self.last_compute: tuple[int, ...] = ()
        self.begins_after: tuple[int, ...] = ()  # tasks that the microbatch waits for
        self.axes = len(formulation.mesh.axes)

    def build(self) -> TaskProgram:
        slots, earlier = self.places.by_slot(), []
        self._fetch()
        fetched, of_link = dict(self.ready), list(self.of_link)
        for k in range(self.formulation.microbatches):
            if k:
                earlier.append((tuple(self.of_op), tuple(self.of_link)))
                self.ready, self.of_link, self.begins_after = dict(fetched), list(of_link), self.last_compute
            self._microbatch(slots)
        self._reduce()
        for i, op in enumerate(self.graph.ops):
            if op.is_placeholder:
                self._update(i)
        spans = tuple(self.of_op), tuple(self.of_link)
        limit = self.formulation.problem.usage_limit
        room = self.places.live, math.inf if limit is None or limit < self.places.peak else limit
        return TaskProgram(tuple(self.tasks), self.formulation, self.choice, *spans, self.overlap, *room, tuple(earlier))

    def _fetch(self) -> None:
        """The kept copies, all of which the first op waits for."""
        self._move_all(self.facts.fetches)
        ends = tuple(self.of_link[k][1] - 1 for k in self.facts.fetches if self.steps[k])
        self.ready |= dict.fromkeys((self.links[k].b for k in self.facts.fetches), ends)

    def _microbatch(self, slots: dict[int, list[int]]) -> None:
        n, waiting = len(self.graph.ops), []
        self._move_all(slots.get(-1, ()))
        for i, op in enumerate(self.graph.ops):
            self._move_all(slots.get(2 * i, ()))
            if op.kind == ACCUMULATED and any(self.steps[k] for k in self.facts.inputs[i]):
                waiting.append(i)
            elif self.facts.phases[i] != REST and i not in self.ready:  # a cast may have run
                self._run(i)
            self._move_all(slots.get(2 * i + 1, ()))
        self._move_all(slots.get(2 * n, ()))
        for i in waiting:
            self._run(i)

    def _reduce(self) -> None:
        """The sums of gradients, one after the other, once the last microbatch has ended."""
        ended = self.last_compute
        for k in self.facts.reductions:
            self.ready[self.links[k].a] = ended
            self._move(k)
            ended = self._ends(k)

    def _move_all(self, links: Sequence[int]) -> None:
        for k in links:
            self._move(k)

    def _add(self, task: Task) -> None:
        if task.stream == COMPUTE:
            self.last_compute = (len(self.tasks),)
        self.tasks.append(task)

    def _move(self, k: int) -> None:
        link, cast = self.links[k], self.places.cast_of.get(self.links[k].a, -1)
        if cast >= 0 and cast not in self.ready:
            if not self.steps[k]:  # nothing is fetched yet
                return
            self._run(cast)
        first = len(self.tasks)
        after = self._available(link.a) or self.begins_after
        if k in self.places.later:  # not before the compute stream has reached this position
            after = tuple(sorted({*after, *self.last_compute}))
        name, reader = self.graph.ops[link.value[0]].name, self.facts.reader[k]
        reader = reader if reader < len(self.graph.ops) else link.value[0]
        for n, step in enumerate(self.steps[k]):
            sends = any(one.collective != "split" for one in self.steps[k][: n + 1])
            stream = step.axis + 1 + self.axes * (k in self.places.unhurried) if sends else COMPUTE
            self._add(Task(name, step.collective, step.seconds, stream, after, self.places.phase_of_move(k), reader, step.bytes))
            after = (len(self.tasks) - 1,)
        self.of_link[k] = (first, len(self.tasks))
        if k in self.facts.hub_links:
            self.ready[link.b] = after

    def _available(self, node: int) -> tuple[int, ...]:
        """The tasks after which the value of a node is available; of a view whose turn is still to come, those of its inputs."""
        node = node if node in self.ready else self.places.cast_of.get(node, node)
        return self.ready[node] if node in self.ready else self._all_ends(node)

    def _all_ends(self, i: int) -> tuple[int, ...]:
        """The tasks after which all inputs of op i are available."""
        links = self.facts.inputs.get(i, ())
        return self._ends(links[0]) if len(links) == 1 else tuple(sorted({t for k in links for t in self._ends(k)}))

    def _ends(self, k: int) -> tuple[int, ...]:
        """The tasks after which the value of link k is available in its target layout."""
        first, end = self.of_link[k]
        return (end - 1,) if first < end else self._available(self.links[k].a)

    def _copy(self, i: int) -> None:
        """A copy to the host's memory, or back once the kernels have reached this position."""
        op, layout = self.graph.ops[i], self.formulation.candidate(i, self.choice).outputs[0]
        assert layout is not None
        size = local_numel(op.output.shape, layout, self.formulation.mesh) * op.output.itemsize
        after = {*self._all_ends(i), *(self.last_compute if op.kind == RELOADED else ())}
        stream = 2 * self.axes + (1 if op.kind == OFFLOADED else 2)
        self.of_op[i] = (len(self.tasks), len(self.tasks) + 1)
        seconds = host_seconds(size, self.formulation.mesh.device)
        self._add(Task(op.name, op.kind, seconds, stream, tuple(sorted(after)), self.facts.phases[i], i, float(size)))
        self.ready[i] = (len(self.tasks) - 1,)

    def _run(self, i: int) -> None:
        if self.overlap and self.graph.ops[i].kind in (OFFLOADED, RELOADED):
            self._copy(i)
            return
        op, phase, first, after = self.graph.ops[i], self.facts.phases[i], len(self.tasks), self._all_ends(i)
        seconds = float(self.formulation.problem.node_costs[i][self.choice[i]]) / self.formulation.microbatches
        collectives, stages = self._internal(i)
        if stages and self.overlap:
            self._run_stages(i, stages, after)
            return
        kernel = max(seconds - sum([one.seconds for one in collectives]), 0.0) if collectives else seconds
        if kernel:
            self._add(Task(op.name, "accumulation" if op.kind == ACCUMULATED else "compute", kernel, COMPUTE, after, phase, i))
            after = (len(self.tasks) - 1,)
        for one in collectives:
            self._add(Task(op.name, one.collective, one.seconds, one.axis + 1, after, phase, i, one.sent))
            after = (len(self.tasks) - 1,)
        self.of_op[i] = (first, len(self.tasks))
        self.ready[i] = after

    def _run_stages(self, i: int, stages: Sequence[TimedStage], after: tuple[int, ...]) -> None:
        name, phase, first = self.graph.ops[i].name, self.facts.phases[i], len(self.tasks)
        for one in stages:
            waits = tuple(first + k for k in one.after) or after
            self._add(Task(name, one.collective or "compute", one.seconds, one.axis + 1, waits, phase, i, one.sent))
        self.of_op[i] = (first, len(self.tasks))
        waited_for = {k for one in stages for k in one.after}
        self.ready[i] = tuple(first + k for k in range(len(stages)) if k not in waited_for)

    def _internal(self, i: int) -> tuple[tuple[PricedCollective, ...], tuple[TimedStage, ...]]:
        """The internal collectives of op i, and its stages where it computes while it sends."""
        key = (id(self.formulation.candidates.of[i]), self.choice[i])
        if key not in self.facts.internal:
            candidate, mesh = self.formulation.candidate(i, self.choice), self.formulation.mesh
            op = self.graph.ops[i], self.graph.input_tensors(i)
            self.facts.internal[key] = op_collectives(*op, candidate, mesh), op_stages(*op, candidate, mesh)
        return self.facts.internal[key]

    def _update(self, i: int) -> None:
        """The optimizer's step, once the gradient is in the parameter's layout."""
        seconds = float(self.formulation.problem.node_costs[i][self.choice[i]])
        if seconds:
            after = self._ends(self.facts.gradients[i]) if i in self.facts.gradients else ()
            self.of_op[i] = (len(self.tasks), len(self.tasks) + 1)
            self._add(Task(self.graph.ops[i].name, "optimizer", seconds, COMPUTE, after, "update", i))
