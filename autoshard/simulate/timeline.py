"""The time line of a planned program: the times of its tasks, the seconds of a step, memory over time, and the critical path.

    seconds     the end of the last task
    exposed     communication that no kernel hides: the time in which no kernel runs and some collective does
    memory      bytes over time, by kind (simulate/memory.py)
    critical    from the last task backwards: each task and the one whose end it waited for last

Without overlap the tasks run one after the other: seconds is the plan's cost, and the peak of memory is the plan's peak.

Small reductions of gradients are joined to one collective, as in the lowered program. Only the optimizer reads a reduced gradient, so a
bucket delays no other task:

    a bucket    consecutive gradients whose routes are the same reductions over the same axes, and whose buffers together have at most
                `cost.bucket_limit` bytes, and fit beside what is held until the last of them is there (the rule of runtime/bucketing.py)
    it begins   when the last member's gradient is computed, and takes the seconds of a collective of all their bytes
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.cost import bucket_limit, bytes_sent, collective_seconds, shared_links
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation
from autoshard.graph import Graph
from autoshard.mesh import Axis, Mesh
from autoshard.simulate.engine import Times, run_in_turn, run_tasks
from autoshard.simulate.from_solution import formulation_of_solution
from autoshard.simulate.memory import memory_over_time
from autoshard.simulate.tasks import PREFETCH, Task, TaskProgram, program_of
from autoshard.solution import Solution

KERNELS = ("compute", "accumulation", "optimizer")  # kinds of tasks
JOINED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")  # a route can scatter, reduce and gather


@dataclass(frozen=True, eq=False)
class Timeline:
    """The tasks of one rank with their times. All ranks of the plan run the same."""

    program: TaskProgram
    times: Times

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.program.tasks

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the streams, by their numbers."""
        axes = self.program.formulation.mesh.axes
        names = [f"link {axis.name}" for axis in axes]
        names = ["compute", *names, *(f"{name}, in the background" for name in names), "to the host", "from the host"]
        return tuple(names[: 1 + max(len(axes), *(task.stream for task in self.tasks))])

    @cached_property
    def seconds(self) -> float:
        """Of the full step."""
        return max(self.times.end, default=0.0)

    @cached_property
    def compute_seconds(self) -> float:
        return math.fsum(task.seconds for task in self.tasks if task.kind in KERNELS)

    @cached_property
    def communication_seconds(self) -> float:
        """Seconds of all collectives, hidden or not; splits included."""
        return math.fsum(task.seconds for task in self.tasks if task.kind not in KERNELS)

    @cached_property
    def exposed_communication_seconds(self) -> float:
        """Seconds in which collectives run and no kernel does."""
        kernels = [i for i, task in enumerate(self.tasks) if task.kind in KERNELS]
        return _covered(self.times, range(len(self.tasks))) - _covered(self.times, kernels)

    @cached_property
    def memory(self) -> dict[str, np.ndarray]:
        """`seconds` at which memory changes, and from there on the bytes held of each kind (formulate.usages.KINDS) and in `total`."""
        with no_search_for_cycles():
            return memory_over_time(self.program, self.times, self.seconds)

    @property
    def peak_bytes(self) -> float:
        total = self.memory["total"]
        return float(total.max()) if len(total) else 0.0

    @property
    def peak_seconds(self) -> float:
        """When the peak is reached first."""
        total = self.memory["total"]
        return float(self.memory["seconds"][int(total.argmax())]) if len(total) else 0.0

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Indexes of tasks, first to last: each began when the one before it ended."""
        if not self.tasks:
            return ()
        path = [int(np.argmax(self.times.end))]
        while self.times.cause[path[-1]] >= 0:
            path.append(self.times.cause[path[-1]])
        return tuple(reversed(path))

    @property
    def critical_seconds(self) -> dict[str, float]:
        """Seconds on the critical path, by kind of task; the largest first."""
        seconds: dict[str, list[float]] = {}
        for i in self.critical_path:
            seconds.setdefault(self.tasks[i].kind, []).append(self.times.end[i] - self.times.begin[i])
        return dict(sorted(((kind, math.fsum(parts)) for kind, parts in seconds.items()), key=lambda pair: (-pair[1], pair[0])))


def timeline_of(
    formulation: Formulation,
    choice: Sequence[int],
    *,
    overlap: bool = True,
    prefetch: int = PREFETCH,
    join: bool = False,
    links: Sequence[int] | None = None,
) -> Timeline:
    """The time line of a choice.

    join: small gradient reductions are joined to buckets, with overlap (`with_joined_gradients`), in a step of one microbatch. links: per
    mesh axis the number of its link; default `shared_links`.
    """
    program = program_of(formulation, choice, overlap=overlap, prefetch=prefetch)
    program = with_joined_gradients(program) if join and overlap and formulation.microbatches == 1 else program
    return Timeline(program, run_program(program, links))


def timeline_of_solution(graph: Graph, solution: Solution, mesh: Mesh | None = None, **options) -> Timeline:
    """The time line of a plan; options as in `timeline_of`. mesh: other prices. ValueError where the plan is of another graph."""
    with no_search_for_cycles():
        return timeline_of(*formulation_of_solution(graph, solution, mesh), **options)


def run_program(program: TaskProgram, links: Sequence[int] | None = None) -> Times:
    if not program.overlap:
        return run_in_turn(task.seconds for task in program.tasks)
    return run_streams(program.tasks, program.formulation.mesh, links)


def run_streams(tasks: Sequence[Task], mesh: Mesh, links: Sequence[int] | None = None) -> Times:
    """Times of tasks of one device. links: per mesh axis the number of its link; default `shared_links`."""
    links, n = shared_links(mesh) if links is None else tuple(links), len(mesh.axes)
    return run_tasks(tasks, (-1, *links, *links), slowed=mesh.device.beside, background=range(n + 1, 2 * n + 1))


def _covered(times: Times, tasks: Sequence[int]) -> float:
    """Length of the union of the tasks' intervals."""
    spans = sorted((times.begin[i], times.end[i]) for i in tasks if times.end[i] > times.begin[i])
    total, until = [], -math.inf
    for a, b in spans:
        if b > until:
            total.append(b - max(a, until))
            until = b
    return math.fsum(total)


def with_joined_gradients(program: TaskProgram) -> TaskProgram:
    """The same program with buckets; their members stay in the list with 0 seconds, except the last one, which is the collective."""
    tasks = list(program.tasks)
    instead: dict[int, int] = {}  # member -> the last of its bucket
    for routes in _buckets(program):
        for members in zip(*(range(first, stop) for first, stop in routes)):  # step by step
            tasks[members[-1]] = _joined(program, members, instead)
            for i in members[:-1]:
                tasks[i] = replace(tasks[i], seconds=0.0, bytes=0.0)
                instead[i] = members[-1]
    tasks = [replace(t, after=tuple(sorted({instead.get(j, j) for j in t.after}))) if t.kind == "optimizer" else t for t in tasks]
    of_link = []
    for first, stop in program.of_link:
        last = instead.get(stop - 1, -1) if first < stop else -1
        of_link.append((first, stop) if last < 0 else (last, last + 1))
    return replace(program, tasks=tuple(tasks), of_link=tuple(of_link))


def _joined(program: TaskProgram, members: Sequence[int], instead: Mapping[int, int]) -> Task:
    """One collective of a bucket, at the place of its last member."""
    task = program.tasks[members[-1]]
    axis, size = _axis(program, task), math.fsum(_size(program, i) for i in members)
    after = tuple(sorted({instead.get(j, j) for i in members for j in program.tasks[i].after}))
    seconds, sent = float(collective_seconds(task.kind, axis, size)), float(bytes_sent(task.kind, axis, size))
    return replace(task, name=f"{task.name} and {len(members) - 1} more", seconds=seconds, bytes=sent, after=after)


def _axis(program: TaskProgram, task: Task) -> Axis:
    axes = program.formulation.mesh.axes
    return axes[(task.stream - 1) % len(axes)]


def _size(program: TaskProgram, i: int) -> float:
    """Bytes of the buffer that a reduction works on."""
    task = program.tasks[i]
    return task.bytes / float(bytes_sent(task.kind, _axis(program, task), 1.0))


def _buckets(program: TaskProgram) -> list[list[tuple[int, int]]]:
    """The tasks, as ranges, of the routes in each bucket of two or more."""
    tasks, live = program.tasks, program.live.copy()
    buckets: list[list[tuple[int, int]]] = []
    open_buckets: dict[tuple, tuple[list[tuple[int, int]], list[float], int]] = {}
    producers = {span: link.value[0] for span, link in zip(program.of_link, program.formulation.tensor_edges) if span[0] < span[1]}
    for (first, stop), op in sorted(producers.items()):
        route = tasks[first:stop]
        if any(task.phase != "update" or task.kind not in JOINED for task in route):
            continue
        key, sizes = tuple((task.stream, task.kind) for task in route), [_size(program, i) for i in range(first, stop)]
        members, together, last = open_buckets.get(key, ([], [0.0] * len(sizes), op))
        grown, waiting = [a + b for a, b in zip(together, sizes)], live[last + 2 : op + 2]  # of each alone its move is beside the next op
        fits = waiting.max(initial=0.0) + together[0] <= program.limit
        if members and fits and all(size <= bucket_limit(_axis(program, task)) for size, task in zip(grown, route)):
            waiting += together[0]
            members.append((first, stop))
            open_buckets[key] = (members, grown, op)
        else:
            open_buckets[key] = ([(first, stop)], sizes, op)
            buckets.append(open_buckets[key][0])
    return [members for members in buckets if len(members) > 1]
