"""The optimization problem of a saved plan, built again from the model as it is now; `explain` and `check` solve variants of it.

    problem  = the candidates, priced, under the plan's own options and pins                          (`reopened`)
    x        = the plan's choice in it                                                                (`choice_of`)
    M        = the messages at which dual ascent ends on it, without the memory limit                           (`Reopened.messages`)
    V(K)     = min cost(x') over the x' that fit in memory and have x'_v in K_v for the nodes v of K    (`Reopened.best`)
    low_v(i) <= V({v: {i}}), from one sweep over M                                                     (`Reopened.floors`)

Messages give a valid bound for any costs, so the search for every V(K) starts from M, which is near the end already. K is written as pins,
`plan(pins={**pins, name: layout})`; where pins can't express K, it replaces the plan's own pins on its nodes.

The problem itself, and the numbers that prove how good the plan is, can be written for others, who check both without autoshard.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import networkx
import numpy as np
from torch import nn
from torch.export import ExportedProgram

from autoshard.capture import graphs_of, in_turn
from autoshard.formulate import Formulation, with_pins
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.options import SOLVERS, Options, having
from autoshard.planning import allowed_by_pins, choice_of, formulate_for, solve_tied
from autoshard.problem import Edge, Evaluation, Problem, contest_record, costs_beside, evaluate, without_limit
from autoshard.solution import Replay, Solution, replay
from autoshard.solvers import Answer, Messages, certificate, converged, solve, to_record, write_program
from autoshard.strategies import candidates
from autoshard.writing import replacement, write_json

Choice = tuple[int, ...]
Kept = Mapping[int, np.ndarray]  # node -> which of its choices are allowed
ENDINGS = (".mps", ".lp", ".json")


@dataclass(frozen=True, eq=False)
class Way:
    """One alternative layout: the choices that it allows each node, or the reason why it is impossible."""

    label: str  # a layout; of a block also a scheme, `fsdp`
    kept: Kept = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)  # the same for `plan`, where pins can say it
    reason: str = ""  # why it is impossible


def options_of(solution: Solution) -> Options:
    """The options that a plan was made with, to be solved to the optimum on a graph in which recomputed blocks are ops already."""
    noted = solution.noted(*having(Options, "reopened"))
    if noted.get("solver") not in SOLVERS:  # an object of the planner's
        noted.pop("solver", None)
    return Options(**{**noted, "training": solution.training, "objective": solution.objective}, baselines=False)


def captured(model: nn.Module | ExportedProgram, example_inputs: Any, solution: Solution, mesh: Mesh | None = None) -> Replay:
    """The plan on the model as it is now."""
    for graph in graphs_of(model, example_inputs, training=solution.training, precision=solution.precision):
        one = replay(solution, graph, mesh)
        if not one.misfits:
            break
    return one


@dataclass(frozen=True, eq=False)
class Reopened:
    """A plan and the problem that it solves."""

    formulated: Formulation
    options: Options
    pinned: Kept  # by the plan's own pins
    choice: Choice  # of the plan

    @cached_property
    def problem(self) -> Problem:
        return with_pins(self.formulated, self.pinned)

    @cached_property
    def judged(self) -> Evaluation:
        """Cost and memory of the plan's choice, without the plan's pins."""
        return evaluate(self.formulated.problem_as_run(self.choice), self.choice)

    @cached_property
    def messages(self) -> np.ndarray:
        return converged(self.problem)[1]

    @cached_property
    def floors(self) -> list[np.ndarray]:
        """low_v(i), seconds; of the problem without any pins."""
        met = Messages(without_limit(self.formulated.problem))
        met.message[:] = self.messages
        for forward in (True, False):  # the second sweep adds the bound that its totals are above
            met.sweep(forward)
        return np.split(met.reduced + met.previous_bound, met.first[1:-1])

    def asked(self, way: Way) -> Options:
        """The plan's options with these pins."""
        return replace(self.options, pins={**self.options.pins, **way.pins})

    def narrowed(self, way: Way) -> Problem:
        if way.pins:
            return with_pins(self.formulated, allowed_by_pins(self.formulated, self.asked(way)))
        return with_pins(self.formulated, {**self.pinned, **way.kept})

    def best(self, problem: Problem, *, starts: Sequence[Choice] = (), time_limit: float) -> Answer:
        """The best choice of a problem that was `narrowed`, and its proof."""
        solver = self.options.solver
        if self.options.tie_blocks:
            options: dict[str, Any] = {"preference": self.formulated.preference, "progress": None}
            return solve_tied(self.formulated, problem, solver=solver, time_limit=time_limit, gap=0.0, **options)
        return solve(problem, solver=solver, time_limit=time_limit, starts=starts, messages=self.messages).in_passing()

    def best_beside(self, problem: Problem, nodes: Sequence[int]) -> Choice | None:
        """The best choice for some ops and the hubs of their outputs, all others as planned; None where there is none.

        Where none fits in memory, the best of those that do not fit.
        """
        ours = set(nodes)
        hubs = [node for (i, _), node in self.formulated.hubs.items() if i in ours]
        part, free = beside(problem, self.choice, sorted([*ours, *hubs]))
        solved = solve(part).choice
        if solved is None:
            return None
        changed = dict(zip(free, solved, strict=True))
        choice = tuple(changed.get(v, i) for v, i in enumerate(self.choice))
        return choice if evaluate(problem, choice).fits else solve(_only(problem, choice, set(free))).choice or choice


def reopened(graph: Graph, solution: Solution, mesh: Mesh | None = None) -> Reopened:
    """The plan's problem on this graph (`captured`), at the prices of `mesh` where one is passed.

    ValueError where the plan's pins or layouts are not possible any more. The plan must fit the graph: ask `misfits` first.
    """
    options, mesh = options_of(solution), mesh or solution.mesh
    formulated = formulate_for(graph, candidates(graph, mesh), mesh, options)
    return Reopened(formulated, options, allowed_by_pins(formulated, options), choice_of(formulated, solution))


def beside(problem: Problem, choice: Choice, free: Sequence[int]) -> tuple[Problem, list[int]]:
    """The problem of some nodes alone, all others at their choice, without the memory limit; and those nodes, in its order."""
    place = {v: k for k, v in enumerate(free)}
    costs = costs_beside(problem, free, choice)
    edges = tuple(Edge(place[e.a], place[e.b], e.table) for e in problem.edges if e.a in place and e.b in place)
    return Problem(tuple(problem.names[v] for v in free), tuple(costs[v] for v in free), edges), list(free)


def _only(problem: Problem, choice: Choice, free: set[int]) -> Problem:
    """The full problem, memory limit included, in which all nodes but the free ones have one choice only."""
    costs = (c if v in free else np.where(np.arange(len(c)) == i, c, np.inf) for v, (c, i) in enumerate(zip(problem.node_costs, choice)))
    return replace(problem, node_costs=tuple(costs))


def nearest(problem: Problem, best: Choice, plan: Choice, fixed: Sequence[int]) -> Choice:
    """A choice as good as `best` that differs from `plan` in fewer nodes: nodes whose change saves nothing get the plan's choice back.

    First groups of nodes that differ and that their edges bind together are put back, then single nodes; the nodes of `fixed` stay. Where
    the result costs more (by rounding) or does not fit, `best` is returned.
    """
    differ = {v for v, (i, j) in enumerate(zip(best, plan, strict=True)) if i != j}
    edges: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in differ}
    for e in problem.edges:
        if e.a in differ:
            edges[e.a].append((e.b, e.table))
        if e.b in differ:
            edges[e.b].append((e.a, e.table.T))
    now = list(best)

    def gain(group: Sequence[int]) -> float:
        """Seconds saved by putting the group back."""
        inside, terms = set(group), []
        for v in group:
            terms += [problem.node_costs[v][now[v]], -problem.node_costs[v][plan[v]]]
            for u, table in edges[v]:
                if u not in inside:
                    terms += [table[now[v], now[u]], -table[plan[v], now[u]]]
                elif u > v:
                    terms += [table[now[v], now[u]], -table[plan[v], plan[u]]]
        return math.fsum(terms)

    def binds(v: int, u: int, table: np.ndarray) -> bool:
        """Whether one end wants to differ because the other does: T(x', y') + T(x, y) is not T(x', y) + T(x, y')."""
        mixed = table[best[v], best[u]] + table[plan[v], plan[u]] - table[best[v], plan[u]] - table[plan[v], best[u]]
        return not abs(mixed) <= slack  # NaN, of forbidden pairs, binds

    slack = ROUNDING * abs(evaluate(problem, best).cost) / max(len(differ), 1)
    bound = {v: [u for u, table in edges[v] if u in differ and binds(v, u, table)] for v in differ}
    bundles = networkx.connected_components(networkx.Graph({v: bound[v] for v in sorted(differ)}))
    for group in [*map(sorted, bundles), *([v] for v in sorted(differ))]:
        if not set(group) & set(fixed) and gain(group) >= -slack:
            for v in group:
                now[v] = plan[v]
    before, after = evaluate(problem, best), evaluate(problem, now)
    return tuple(now) if after.fits and after.cost <= before.cost * (1 + ROUNDING) else best


ROUNDING = 1e-12  # relative: costs this near are equal


@in_turn
def problem_of(model: Any, example_inputs: Any, solution: Solution) -> Problem:
    """The problem in numbers of a plan of this model: seconds per choice and pair of choices, bytes over time, the memory limit.

    model: a module, or the graph that was planned. Choices that pins and forbidden layouts exclude cost inf. ValueError where the plan is
    of another model.
    """
    return _plan(model, example_inputs, solution).problem


@in_turn
def certificate_of(model: Any, example_inputs: Any, solution: Solution) -> dict[str, Any]:
    """The numbers that prove a plan's cost and a bound on all plans, which `autoshard/certify.py` checks with numpy alone.

    Both are of the sum of all seconds (`solution.cost`); the seconds of the simulated time line, and their bound, need the simulator. The
    bound is what duality proves: `claims["bound"]` is below `solution.bound` where the search has branched.
    """
    plan = _plan(model, example_inputs, solution)
    return to_record(plan.problem, certificate(plan.problem, plan.choice))


def _plan(model: Any, example_inputs: Any, solution: Solution) -> Reopened:
    return reopened(captured(model, example_inputs, solution).checked(), solution)


def write_problem(problem: Problem, path: str | os.PathLike[str]) -> None:
    """Writes a problem for another solver: `.mps` or `.lp`, by HiGHS, costs in nanoseconds; `.json`, the format of `autoshard solve`."""
    ending = os.path.splitext(path)[1]
    if ending not in ENDINGS:
        raise ValueError(f"{path} ends in {ending or 'nothing'}; a problem is written to {', '.join(ENDINGS)}")
    if ending == ".json":
        write_json(contest_record(problem), path)
        return
    with replacement(path) as temporary:
        write_program(problem, os.fspath(temporary))
