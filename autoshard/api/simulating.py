"""Simulated steps of a plan."""

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.capture import in_turn
from autoshard.explain import captured
from autoshard.mesh import Mesh
from autoshard.planning import Progress, Stopwatch
from autoshard.simulate import PREFETCH, Timeline, timeline_of_solution
from autoshard.solution import Solution


@in_turn
def simulate(
    model: torch.nn.Module,
    example_inputs: Any,
    solution: Solution,
    *,
    overlap: bool = True,
    prefetch: int = PREFETCH,
    join: bool = True,
    links: Sequence[int] | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Timeline:
    """The time line of a plan: `.seconds` of a step, `.peak_bytes`, `.exposed_communication_seconds`, `.critical_path`.

    overlap: collectives overlap with kernels (else one after the other, and seconds is the plan's cost). prefetch: parameters fetched
    ahead of their use. join: small gradient reductions are joined to buckets, as in the lowered program. links: per mesh axis the number
    of the link that it uses, where `shared_links` is wrong. mesh: other prices. ValueError where the plan is of another model.
    """
    report = Stopwatch(progress).say
    report("capturing the model", 0.1)
    graph = captured(model, example_inputs, solution).graph
    report("simulating", 0.8)
    return timeline_of_solution(graph, solution, mesh, overlap=overlap, prefetch=prefetch, join=join, links=links)
