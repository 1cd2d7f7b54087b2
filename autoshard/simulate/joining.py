"""Buckets: small reductions of gradients joined to one collective, as in the lowered program.

    a bucket    consecutive gradients whose routes are the same reductions over the same axes, and whose buffers together have at most
                `cost.bucket_limit` bytes (the rule of runtime/bucketing.py)
    it begins   when the last member's gradient is computed, and takes the seconds of a collective of all their bytes

Only the optimizer reads a reduced gradient, so a bucket delays no other task.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.cost import bucket_limit, bytes_sent, collective_seconds
from autoshard.mesh import Axis
from autoshard.simulate.tasks import Task, TaskProgram

JOINED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")  # a route can scatter, reduce and gather


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
    tasks = program.tasks
    buckets: list[list[tuple[int, int]]] = []
    open_buckets: dict[tuple, tuple[list[tuple[int, int]], list[float]]] = {}
    for first, stop in sorted({span for span in program.of_link if span[0] < span[1]}):
        route = tasks[first:stop]
        if any(task.phase != "update" or task.kind not in JOINED for task in route):
            continue
        key, sizes = tuple((task.stream, task.kind) for task in route), [_size(program, i) for i in range(first, stop)]
        members, together = open_buckets.get(key, ([], [0.0] * len(sizes)))
        grown = [a + b for a, b in zip(together, sizes)]
        if members and all(size <= bucket_limit(_axis(program, task)) for size, task in zip(grown, route)):
            members.append((first, stop))
            open_buckets[key] = (members, grown)
        else:
            open_buckets[key] = ([(first, stop)], sizes)
            buckets.append(open_buckets[key][0])
    return [members for members in buckets if len(members) > 1]
