"""The plans that are compared for a model on a measured mesh: data parallel, FSDP, Megatron, and ours in Megatron's memory: of tasks one
after the other, and where collectives overlap the one of the shortest time line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from autoshard.baselines import baselines
from autoshard.capture import capture_deep
from autoshard.cost import bytes_sent
from autoshard.formulate import Formulation, with_pins
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.planning.baselining import masks_of
from autoshard.planning.describe import describe
from autoshard.planning.instance import Instance, formulate_for
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.overlapped import overlapped
from autoshard.planning.question import ModelGraphs, Question
from autoshard.solution import Solution
from autoshard.solvers import solve
from autoshard.strategies import candidates, internal_collectives
from models import gpt2, llama, mlp

SLOW = 0  # the mesh axis that is the link between the nodes
IDLE = 256  # floats in the largest buffer of a collective that is run for what gloo says beside its data

MODELS: dict[str, Callable] = {
    "mlp": lambda: mlp.mlp(batch=256, width=256, hidden=1024, layers=4),
    "gpt2": lambda: gpt2.build(layers=2, heads=8, width=128, positions=64, vocab=8192, batch=8, seq=32, loss=True, dtype="float32"),
    "llama": lambda: llama.build(
        layers=2, heads=8, kv_heads=4, width=128, hidden=352, vocab=4096, batch=8, seq=32, loss=True, dtype="float32"
    ),
}
PIPELINED: dict[str, Callable] = {  # with or without the loss, which a pipeline computes on its last stage; no tied parameters
    "mlp": lambda loss: mlp.mlp(batch=512, width=256, hidden=1024, layers=4, loss=loss),
    "llama": lambda loss: llama.build(
        layers=4, heads=8, kv_heads=4, width=128, hidden=352, vocab=512, batch=32, seq=32, loss=loss, dtype="float32"
    ),
}
TINY_PIPELINES: dict[str, Callable] = {  # no bytes and no FLOPs to speak of: what they take is the interpreter's and the runtime's
    "tiny mlp": lambda loss: mlp.mlp(batch=64, width=16, hidden=32, layers=4, loss=loss),
    "tiny llama": lambda loss: llama.build(
        layers=4, heads=2, kv_heads=1, width=16, hidden=32, vocab=32, batch=32, seq=8, loss=loss, dtype="float32"
    ),
}
MIDDLE_PIPELINES: dict[str, Callable] = {  # large weights and few tokens: what they take beyond the tiny ones' is the kernels'
    "middle mlp": lambda loss: mlp.mlp(batch=256, width=128, hidden=2048, layers=8, loss=loss),
    "middle llama": lambda loss: llama.build(
        layers=6, heads=8, kv_heads=4, width=128, hidden=1024, vocab=256, batch=32, seq=8, loss=loss, dtype="float32"
    ),
}
OTHERS: dict[str, Callable] = {  # none of the cells: what a kernel takes within a step is measured with them
    "tiny gpt2": lambda: gpt2.tiny(batch=4, seq=8, vocab=64),
    **{name: partial(build, loss=True) for name, build in MIDDLE_PIPELINES.items()},
}


@dataclass(frozen=True)
class Planned:
    """A plan and what is predicted of it. seconds: of a step, and of its collectives over the slow link; bytes: that leave a node."""

    name: str
    solution: Solution
    seconds: float
    link_seconds: float
    link_bytes: float
    link_calls: dict[str, int]  # of a rank over the slow link, by what gloo runs


def graph_of(build: Callable) -> Graph:
    module, inputs = build()
    return capture_deep(module, inputs, training=True)[0]


def plans(graph: Graph, mesh: Mesh, *, time_limit: float, overlaps: bool = False) -> Iterator[Planned]:
    """Ours last: their memory is limited to what Megatron's plan holds. time_limit: seconds for its solver, without the others."""
    options = Options(training=True, time_limit=time_limit)
    found = candidates(graph, mesh)
    formulated = formulate_for(graph, found, mesh, options)
    starts, peaks = [], {}
    for baseline in baselines(graph, mesh, found):
        answer = solve(with_pins(formulated, masks_of(formulated, baseline)), time_limit=time_limit)
        assert answer.choice is not None, f"{baseline.name} has no plan"
        starts.append(answer.choice)
        peaks[baseline.name] = answer.peak
        yield planned(baseline.name, formulated, answer, options)
    limit = peaks["megatron"]
    fitting = [choice for choice, peak in zip(starts, peaks.values()) if peak <= limit]
    limited = replace(formulated.problem, usage_limit=limit)
    began = time.monotonic()
    answer = solve(limited, time_limit=time_limit, gap=0.01, starts=fitting, preference=formulated.preference)
    assert answer.choice is not None, f"nothing was found in {time.monotonic() - began:.0f} s"
    options = replace(options, memory_limit=limit)
    if overlaps:
        context = Question(ModelGraphs(graph), mesh, options, Stopwatch(None))
        shortest = overlapped(context, Instance(formulated, limited), answer, fitting)
        yield planned("overlapped", formulated, shortest.answer, options)
    yield planned("ours", formulated, answer, options)


def planned(name: str, formulated: Formulation, answer, options: Options) -> Planned:
    solution = describe(formulated, answer, options, {}, {"plan": name})
    collectives = solution.breakdown["communication"]
    slow = formulated.mesh.axes[SLOW].name
    link_seconds = sum(seconds for what, seconds in collectives.items() if what.endswith(f" {slow}"))
    return Planned(name, solution, answer.cost, link_seconds, *link_bytes(formulated, answer.choice))


def link_bytes(formulated: Formulation, choice) -> tuple[float, dict[str, int]]:
    """Bytes that leave one node in a step: what its ranks send over the slow axis. And how many collectives of each kind they run there."""
    graph, mesh = formulated.graph, formulated.mesh
    axis = mesh.axes[SLOW]
    total, calls = 0.0, dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), 0)

    def call(collective: str) -> None:
        calls["all_reduce" if collective == "reduce_scatter" else collective] += 1  # gloo has no reduce_scatter

    for link in formulated.tensor_edges:
        route = formulated.route(link, choice)
        for step in route.steps if route else ():
            if step.axis == SLOW and step.bytes > 0:
                call(step.collective)
                # gloo has an all_to_all of its own, which the program calls: no all_gather of everything
                total += step.bytes / (axis.size if step.collective == "all_to_all" and axis.backend == "gloo" else 1)
    for i, op in enumerate(graph.ops):
        for collective, k, size in internal_collectives(op, graph.input_tensors(i), formulated.candidate(i, choice).inputs, mesh):
            if k == SLOW:
                total += bytes_sent(collective, axis, float(size))
                call(collective)
    return total * mesh.num_devices / axis.size, calls
