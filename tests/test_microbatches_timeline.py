"""The time line of a step of several microbatches: its tasks, what waits for what, and its memory."""

from functools import cache

import pytest

from autoshard.graph import ACCUMULATED
from autoshard.mesh import Mesh
from autoshard.simulate.from_solution import formulation_of_solution
from autoshard.simulate.timeline import timeline_of
from autoshard.solution import replay
from tests.helpers import tiny_graph
from tests.helpers_models import scheme_plan

MORE = [("mlp", "zero2"), ("mlp", "hsdp"), ("llama", "zero3")]
CASES = [*(("mlp", scheme) for scheme in ("data_parallel", "zero1", "zero3")), *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)]


@cache
def planned(name: str, scheme: str, m: int):
    graph = tiny_graph(name, True)
    solution = scheme_plan(graph, Mesh.from_bandwidths((2, 2)), scheme, microbatches=m)
    return solution, *formulation_of_solution(replay(solution, graph).checked(), solution)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_one_after_the_other_the_step_takes_the_cost_and_holds_the_peak_of_the_plan(case):
    solution, formulated, choice = planned(*case, 3)
    serial = timeline_of(formulated, choice, overlap=False)
    assert serial.seconds == pytest.approx(solution.cost, rel=1e-9)
    assert serial.peak_bytes == pytest.approx(solution.peak_bytes, rel=1e-9)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_tasks_are_those_of_m_microbatches_and_one_update(case):
    _, formulated, choice = planned(*case, 3)
    timeline = timeline_of(formulated, choice)
    graph, program = formulated.graph, timeline.program
    spans = [*(of_op for of_op, _ in program.earlier), program.of_op]
    assert len(spans) == 3
    for i, op in enumerate(graph.ops):
        tasks = [[timeline.tasks[k] for k in range(*of_op[i])] for of_op in spans]
        if not op.is_placeholder:
            names = [[(task.kind, task.seconds) for task in one] for one in tasks]
            assert names[0] == names[1] == names[2]
    kinds = [task.kind for task in timeline.tasks]
    trained = sum(op.kind == ACCUMULATED for op in graph.ops)
    assert kinds.count("accumulation") == 3 * trained
    assert kinds.count("optimizer") == trained
    assert 0.999 * max(stream_seconds(timeline)) <= timeline.seconds <= 1.001 * sum(task.seconds for task in timeline.tasks)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_step_of_more_microbatches_holds_no_more(case):
    """Copies are fetched once, and a view is free when it is read, however long its op's gradient waits to be added up."""
    two, four = (timeline_of(*planned(*case, m)[1:]).memory for m in (2, 4))
    assert {kind: four[kind].max() for kind in four if kind != "seconds"} == {kind: two[kind].max() for kind in two if kind != "seconds"}


def stream_seconds(timeline) -> list[float]:
    """A stream does one thing at a time: no step is shorter than any of them."""
    streams = {task.stream for task in timeline.tasks}
    return [sum(task.seconds for task in timeline.tasks if task.stream == stream) for stream in streams]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_task_begins_after_those_that_it_waits_for_and_microbatches_do_not_mix(case):
    _, formulated, choice = planned(*case, 3)
    timeline = timeline_of(formulated, choice)
    program, times = timeline.program, timeline.times
    for k, task in enumerate(timeline.tasks):
        assert all(j < k and times.end[j] <= times.begin[k] for j in task.after)
    spans = [*(of_op for of_op, _ in program.earlier), program.of_op]
    ops = [i for i, op in enumerate(formulated.graph.ops) if not op.is_placeholder]
    ends = [max(times.end[stop - 1] for i in ops for first, stop in [of_op[i]] if first < stop) for of_op in spans]
    begins = [min(times.begin[first] for i in ops for first, stop in [of_op[i]] if first < stop) for of_op in spans]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


def test_more_microbatches_repeat_all_but_the_update():
    seconds = {m: timeline_of(*planned("mlp", "zero1", m)[1:]).seconds for m in (2, 3, 4)}
    assert seconds[4] - seconds[3] == pytest.approx(seconds[3] - seconds[2], rel=1e-6)


def test_sums_are_held_throughout_and_activations_are_not():
    _, formulated, choice = planned("mlp", "zero1", 3)
    timeline = timeline_of(formulated, choice)
    times, memory = timeline.times, timeline.memory
    begin = min(times.begin[k] for k, task in enumerate(timeline.tasks) if task.kind == "compute")
    end = max(times.end[k] for k, task in enumerate(timeline.tasks) if task.kind == "accumulation")
    within = (memory["seconds"] > begin) & (memory["seconds"] < end)
    assert set(memory["gradients"][within]) == {sum(op.output.bytes for op in formulated.graph.ops if op.kind == ACCUMULATED)}
    assert len(set(memory["activations"][within])) > 3
