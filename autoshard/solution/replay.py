"""Applies a saved plan to the captured graph of a model: with the same blocks recomputed, and with the reasons where it does not fit.

    replay(solution, graph)            the captured graph, with the blocks recomputed that the plan recomputes, and its microbatches
    replay(...).misfits                why the plan can't be applied to that graph; empty where it can
    replay(...).checked()              the graph; ValueError where the plan does not fit it

Verifying, simulating, running, explaining and checking a plan all begin here.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.graph import (
    ACCUMULATED,
    KEPT,
    Graph,
    checkpointed,
    chunked_loss,
    in_order,
    recompute_ops,
    selective,
    with_hidden_values,
    with_microbatches,
)
from autoshard.mesh import Mesh
from autoshard.solution.compare import misfits
from autoshard.solution.record import Placed, Solution

VIEWS = ("aten.view.default", "aten._unsafe_view.default")  # torch's version and the device decide which of them a program has
VIEW_NAME = re.compile(r"(_unsafe_)?view(_\d+)?")


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
    """A plan on the captured graph of a model, with its sequence in the plan's order, its losses in chunks, the hidden values of experts
    kept, the blocks and values recomputed that the plan recomputes, and the copies and sums of its microbatches where it has several."""
    graph = in_order(_with_planned_views(graph, solution), solution.sequence_order)
    if solution.chunked_loss:
        graph = chunked_loss(graph, solution.chunked_loss)
    if solution.hidden_values:
        graph = with_hidden_values(graph, solution.hidden_values)
    graph = recompute_ops(checkpointed(graph, solution.recompute), solution.computed_again)
    graph = selective(graph, solution.chosen)
    if solution.microbatches == 1:
        return Replay(solution, graph, mesh)
    return Replay(solution, with_microbatches(graph, solution.accumulation_dtype), mesh, graph)


def _with_planned_views(graph: Graph, solution: Solution) -> Graph:
    """The graph in which views are called as in the plan, and are the operator of that name, where it has as many."""
    planned = [name for name in solution.layouts if VIEW_NAME.fullmatch(name)]
    views = [op.name for op in graph.ops if op.target in VIEWS]
    if len(planned) != len(views) or set(planned) == set(views):
        return graph
    names = dict(zip(views, planned))
    ops = (replace(op, name=name, target=VIEWS[name.startswith("_")]) if (name := names.get(op.name)) else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


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
