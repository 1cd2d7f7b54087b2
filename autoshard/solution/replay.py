"""Applies a saved plan to the captured graph of a model: with the same blocks recomputed, and with the reasons where it does not fit.

    replay(solution, graph)            the captured graph, with the blocks recomputed that the plan recomputes, and its microbatches
    replay(...).misfits                why the plan can't be applied to that graph; empty where it can
    replay(...).checked()              the graph; ValueError where the plan does not fit it

Verifying, simulating, running, explaining and checking a plan all begin here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoshard.graph import ACCUMULATED, KEPT, Graph, checkpointed, chunked_loss, in_order, selective, with_microbatches
from autoshard.mesh import Mesh
from autoshard.solution.compare import misfits
from autoshard.solution.record import Placed, Solution


@dataclass(frozen=True, eq=False)
class Replay:
    """A plan and the graph that it is applied to."""

    solution: Solution
    graph: Graph
    mesh: Mesh | None = None  # the plan's own where none is given
    microbatch: Graph | None = None  # the graph without kept copies and sums, where the plan has several microbatches

    @cached_property
    def misfits(self) -> tuple[str, ...]:
        """Why the plan can't be applied to the graph; empty where it can."""
        return misfits(self.solution, self.graph, self.mesh or self.solution.mesh)

    def checked(self, name: str = "the solution", program: str = "model", advice: str = "") -> Graph:
        """The graph. ValueError, with the reasons, where the plan (called `name`) does not fit it."""
        if self.misfits:
            raise ValueError(f"{name} does not fit this {program}: {'; '.join(self.misfits)}{advice}")
        return self.graph


def replay(solution: Solution, graph: Graph, mesh: Mesh | None = None) -> Replay:
    """A plan on the captured graph of a model, with its sequence in the plan's order, its losses in chunks, the blocks and values
    recomputed that the plan recomputes, and the copies and sums of its microbatches where it has several."""
    graph = in_order(graph, solution.sequence_order)
    if solution.chunked_loss:
        graph = chunked_loss(graph, solution.chunked_loss)
    graph = selective(checkpointed(graph, solution.recompute), solution.chosen)
    if solution.microbatches == 1:
        return Replay(solution, graph, mesh)
    return Replay(solution, with_microbatches(graph, solution.accumulation_dtype), mesh, graph)


def of_one_microbatch(solution: Solution) -> tuple[dict[str, Placed], dict[str, str]]:
    """The layouts and results of a microbatch alone: parameters as their kept copies, gradients as they are added up."""
    layouts, results = dict(solution.layouts), dict(solution.results)
    if solution.microbatches == 1:
        return layouts, results
    for name in solution.parameters:
        if (kept := layouts.pop(f"{name}.{KEPT}", None)) is not None:
            layouts[name] = Placed((), kept.outputs, kept.hubs)
        if (total := layouts.pop(f"{name}.{ACCUMULATED}", None)) is not None:
            assert total.outputs[0] is not None
            results[f"gradient:{name}"] = total.outputs[0]
    return layouts, results
