"""The costs of pipeline stages, from a plan of the entire model: each part of the model per microbatch, and the time line of a step.

The plan is of one microbatch on the devices of one stage. `part_of` says to which part of the model an op belongs. The tasks of a part,
simulated alone, have these costs:

    forward, backward    seconds of a microbatch, communication overlapped within the part
    weight               of backward, the kernels that lead to one parameter's gradient and to nothing else, and adding it to a sum
    finish               gradient reductions and optimizer, after the end of the last backward, which hides some of them
    activation_bytes     saved by forward for backward, including values received from the part before
    fixed_bytes          parameters, gradients, optimizer state, inputs;  working_bytes: the peak on top of both
    send, send_back      bytes that a device sends to the corresponding device of the next part, or of the one before
    tied_bytes           gradient of parameters that several parts hold: added between them once per step, over the same link

Every microbatch takes the same, so one is simulated and `schedule_times.run` schedules all of them.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autoshard.cost import accumulation_bytes, axis_transfer_seconds, cost_of, transfer_latency
from autoshard.graph import Graph, Value
from autoshard.layout import local_numel
from autoshard.mesh import Axis
from autoshard.pipeline.schedule_times import ScheduleRun, run
from autoshard.pipeline.schedules import Schedule
from autoshard.simulate import Task, TaskProgram, run_streams


@dataclass(frozen=True)
class StageCost:
    """The cost of a part of the model for one microbatch on one device."""

    forward: float  # seconds
    backward: float
    weight: float
    finish: float
    activation_bytes: float
    fixed_bytes: float
    working_bytes: float
    send: float = 0.0  # bytes
    send_back: float = 0.0
    tied_bytes: float = 0.0


def run_stages(parts: Sequence[StageCost], schedule: Schedule, link: Axis | Sequence[Axis] | None = None, chains: int = 1) -> ScheduleRun:
    """The time line of a step. link: between a part and the next, one for all or one per part; parts may be on different devices.
    chains: data parallel pipelines that share it (`schedule_times.run`).

    ValueError unless there are as many parts as the schedule has.
    """
    if len(parts) != schedule.parts:
        raise ValueError(f"{len(parts)} parts for a schedule of {schedule.parts}; expected as many")
    links = [link] * len(parts) if link is None or isinstance(link, Axis) else list(link)
    p = schedule.devices
    finish = [part.finish + axis_transfer_seconds(part.tied_bytes, axis) for part, axis in zip(parts, links)]
    times = run(
        schedule,
        forward=[part.forward for part in parts],
        backward=[part.backward for part in parts],
        weight=[min(part.weight, part.backward) for part in parts],
        transfer=[axis_transfer_seconds(part.send, axis) for part, axis in zip(parts, links)],
        transfer_back=[axis_transfer_seconds(part.send_back, axis) for part, axis in zip([*parts[1:], parts[0]], links)],
        finish=[math.fsum(finish[d::p]) for d in range(p)],
        activation_bytes=[part.activation_bytes for part in parts],
        fixed_bytes=[part.fixed_bytes for part in parts],
        latency=[transfer_latency(axis) for axis in links],
        chains=chains,
    )
    working = [max(part.working_bytes for part in parts[d::p]) for d in range(p)]
    return replace(times, peak_bytes=tuple(a + b for a, b in zip(times.peak_bytes, working)))


def stage_costs_of(
    program: TaskProgram, part_of: Sequence[int], count: int, K: int, *, partial: Collection[int] = (), communication: bool = True
) -> tuple[StageCost, ...]:
    """The costs of the parts of a plan.

    part_of: per op of the graph the number of its part, -1 for ops that every part computes itself. K: microbatches of a step. partial:
    ops that add the gradients of a parameter that several parts hold. communication: False leaves all communication out.
    """
    graph = program.graph
    of = _placed(graph, part_of)
    weights = weight_ops(graph)
    sent, sent_back, came, tied = _crossing(program, of, count, partial) if communication else ([0.0] * count,) * 4
    mine: list[list[int]] = [[] for _ in range(count)]
    for t, task in enumerate(program.tasks):
        if communication or task.kind in ("compute", "optimizer"):
            mine[of[task.op]].append(t)
    bytes_of, adding = _bytes(program, of, count), accumulation_seconds(program, of, count, K)
    costs = []
    for v in range(count):
        forward = _seconds(program, [t for t in mine[v] if program.tasks[t].phase == "forward"])
        back = [t for t in mine[v] if program.tasks[t].phase == "backward"]
        backward = _seconds(program, back)
        with_update = _seconds(program, [t for t in mine[v] if program.tasks[t].phase in ("backward", "update")])
        weight = math.fsum(program.tasks[t].seconds for t in back if program.tasks[t].op in weights and program.tasks[t].kind == "compute")
        finish, weight, backward = with_update - backward, min(weight, backward) + adding[v], backward + adding[v]
        activations, fixed, working = bytes_of[v]
        costs.append(
            StageCost(
                forward, backward, weight, finish, activations + came[v], fixed, working,
                sent[v], sent_back[v], tied[v],
            )  # fmt: skip
        )
    return tuple(costs)


def kernel_seconds(program: TaskProgram) -> tuple[float, float]:
    """Seconds of the kernels of a microbatch's forward and of its backward pass, without any communication."""
    kernels = [(t, task.phase) for t, task in enumerate(program.tasks) if task.kind == "compute"]
    forward, backward = ([t for t, of in kernels if of == phase] for phase in ("forward", "backward"))
    return _seconds(program, forward), _seconds(program, backward)


def accumulation_seconds(program: TaskProgram, of: Sequence[int], count: int, K: int) -> list[float]:
    """Per part the seconds in which the gradients of one of K microbatches are added up: before a reduction, or after one that scatters."""
    formulation, ops, seconds = program.formulation, program.graph.ops, [0.0] * count
    mesh, choice = formulation.mesh, program.choice
    for link in formulation.tensor_edges if K > 1 else ():
        if link.b < len(ops) and ops[link.b].kind == "parameter":
            layouts = link.source_layouts[choice[link.a]], link.target_layouts[choice[link.b]]
            moved = accumulation_bytes(min(local_numel(link.tensor.shape, one, mesh) for one in layouts), *[link.tensor.itemsize] * 2)
            seconds[of[link.value[0]]] += float(cost_of(mesh).memory("accumulate", moved, mesh.device))
    return seconds


def _placed(graph: Graph, part_of: Sequence[int]) -> list[int]:
    """`part_of`, where a placeholder or op without a part is assigned to the first part that reads it."""
    of = list(part_of)
    for i in range(len(of) - 1, -1, -1):
        if of[i] < 0:
            readers = [of[j] for k in range(len(graph.ops[i].outputs)) for j, _ in graph.users.get((i, k), ()) if of[j] >= 0]
            of[i] = min(readers, default=0)
    return of


def _seconds(program: TaskProgram, chosen: Sequence[int]) -> float:
    """Seconds of the chosen tasks alone; a task waits only for chosen tasks."""
    place = {t: n for n, t in enumerate(chosen)}
    tasks = []
    for t in chosen:
        task = program.tasks[t]
        after = tuple(place[j] for j in task.after if j in place)
        tasks.append(Task(task.name, task.kind, task.seconds, task.stream if program.overlap else 0, after, task.phase, task.op))
    return max(run_streams(tasks, program.formulation.mesh).end, default=0.0)


def weight_ops(graph: Graph) -> frozenset[int]:
    """Backward ops that lead to the gradient of one parameter and to nothing else."""
    reached: list[set[str]] = [set() for _ in graph.ops]
    for result in graph.results:
        if result.value is not None:
            reached[result.value[0]] |= {result.name} if result.kind == "gradient" else {result.name, "more"}
    for i in range(len(graph.ops) - 1, -1, -1):
        if len(reached[i]) < 2:
            for k in range(len(graph.ops[i].outputs)):
                for j, _ in graph.users.get((i, k), ()):
                    reached[i] |= reached[j]
        if len(reached[i]) > 1:
            reached[i] = {"many", "more"}
    return frozenset(i for i, op in enumerate(graph.ops) if op.backward and len(reached[i]) == 1)


def _crossing(program: TaskProgram, of: Sequence[int], count: int, partial: Collection[int]) -> tuple[list[float], ...]:
    """Per part the bytes of a device that are sent to the next part, sent back, received from parts before, and added between parts."""
    graph, formulation = program.graph, program.formulation
    far: dict[Value, tuple[int, float]] = {}  # storage -> (furthest part that reads it, bytes)
    tied = [0.0] * count
    for i, op in enumerate(graph.ops):
        for a, value in enumerate(op.inputs):
            producer, here, there = graph.ops[value[0]], of[i], of[value[0]]
            if producer.is_placeholder or op.is_placeholder or producer.backward != op.backward or here == there:
                continue
            if (here > there) == producer.backward:  # in the other direction: every part computes such a value itself
                continue
            tensor, layout = graph.tensor(value), formulation.candidate(i, program.choice).inputs[a]
            size = float(local_numel(tensor.shape, layout, formulation.mesh) * tensor.itemsize)
            if i in partial:
                tied[here] += size
                tied[there] += size
                continue
            known = far.get(graph.storage(value), (here, 0.0))
            furthest = min(known[0], here) if producer.backward else max(known[0], here)
            far[graph.storage(value)] = (furthest, max(known[1], size))
    on, back, came = [0.0] * count, [0.0] * count, [0.0] * count
    for (i, _), (furthest, size) in far.items():
        if graph.ops[i].backward:
            for v in range(furthest + 1, of[i] + 1):
                back[v] += size
        else:
            for v in range(of[i], furthest):
                on[v] += size
                came[v + 1] += size
    return on, back, came, tied


def _bytes(program: TaskProgram, of: Sequence[int], count: int) -> list[tuple[float, float, float]]:
    """Per part the bytes of activations saved for the backward pass, the bytes held throughout, and the peak on top of both."""
    graph, problem, choice = program.graph, program.formulation.problem, program.choice
    turn = next((i for i, op in enumerate(graph.ops) if op.backward), len(graph.ops))
    rows: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    fixed, waiting = [0.0] * count, [0.0] * count
    for usage, kind in zip(problem.usages, program.formulation.held, strict=True):
        amount, op = usage.held(choice), usage.ends[0] if usage.edge is None else usage.start
        v = of[op if op < len(of) else min(usage.start, len(of) - 1)]
        if kind in ("parameters", "gradients", "optimizer_state", "inputs"):
            for part in _holders(graph, of, op):
                fixed[part] += amount
            continue
        rows[v] += [(usage.start, amount), (usage.end, -amount)]
        if usage.start < turn < usage.end:
            waiting[v] += amount
    # at equal times, memory is freed first
    peaks = (max(accumulate((amount for _, amount in sorted(of_part)), initial=0.0)) for of_part in rows)
    return [(saved, held, max(peak - saved, 0.0)) for peak, saved, held in zip(peaks, waiting, fixed, strict=True)]


def _holders(graph: Graph, of: Sequence[int], i: int) -> list[int]:
    """The parts that read a placeholder in the forward pass; the part that it is assigned to where none does."""
    readers = {of[j] for j, _ in graph.users.get((i, 0), ()) if not graph.ops[j].backward} if i < len(of) else set()
    return sorted(readers) or [of[min(i, len(of) - 1)]]
