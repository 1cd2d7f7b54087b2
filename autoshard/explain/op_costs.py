"""The cost of a plan by op: the seconds of each op and of the redistribution on each edge. Together they are the plan's cost:

    cost = sum over ops of seconds(op) + sum over (value, its copy for several readers), (op, input), results of seconds of the route
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autoshard.explain.reopened import Reopened, reopened
from autoshard.formulate import Place
from autoshard.graph import Graph
from autoshard.layout import text
from autoshard.routes import Step
from autoshard.solution import Solution


@dataclass(frozen=True)
class Redistribution:
    """A tensor on its way from one layout to another, by the cheapest route; no steps where the layouts are equal."""

    source: str
    target: str
    steps: tuple[Step, ...]  # collectives in order, each on one mesh axis
    seconds: float  # of all microbatches of a step
    bytes: float  # that each rank sends


class CandidateCost(NamedTuple):
    """Layouts that an op may have, and what they cost where all other ops are as planned."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    seconds: float  # of the op
    edge_seconds: float  # of the redistributions of its inputs and outputs; inf where one has no route
    planned: bool


class OpCosts:
    """Of a plan of this graph; everything is worked out when it is first asked for."""

    def __init__(self, graph: Graph, solution: Solution):
        self.graph, self.solution = graph, solution

    @cached_property
    def plan(self) -> Reopened:
        return reopened(self.graph, self.solution)

    def seconds(self, i: int) -> float:
        """Of op i: its kernel and the collectives of its local program; of a trained parameter, its update."""
        return float(self.plan.problem.node_costs[i][self.plan.choice[i]])

    @cached_property
    def redistributions(self) -> dict[Place, Redistribution]:
        """By what an edge leads to, in the order of the problem's edges."""
        formulated, choice = self.plan.formulated, self.plan.choice
        moved = {}
        for place, edge, link in zip(formulated.places, formulated.problem.edges, formulated.tensor_edges, strict=True):
            source, target = link.source_layouts[choice[link.a]], link.target_layouts[choice[link.b]]
            route = formulated.route(link, choice)
            steps, seconds = () if route is None else route.steps, float(edge.table[choice[edge.a], choice[edge.b]])
            moved[place] = Redistribution(text(source), text(target), steps, seconds, link.times * sum(step.bytes for step in steps))
        return moved

    def candidates(self, i: int) -> list[CandidateCost]:
        """All layouts that op i may have, the cheapest first."""
        formulated, problem, choice = self.plan.formulated, self.plan.formulated.problem, self.plan.choice
        beside = sum(
            (e.table[:, choice[e.b]] if e.a == i else e.table[choice[e.a], :] for e in problem.edges if i in (e.a, e.b)),
            0 * problem.node_costs[i],
        )
        rows = [
            CandidateCost(
                self.graph.ops[i].name, tuple(map(text, one.inputs)), tuple(None if y is None else text(y) for y in one.outputs),
                float(problem.node_costs[i][k]), float(beside[k]), k == choice[i],
            )
            for k, one in enumerate(formulated.candidates.of[i])
        ]  # fmt: skip
        return sorted(rows, key=lambda row: row.seconds + row.edge_seconds)
