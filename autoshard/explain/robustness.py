"""The range of each link's bandwidth in which a plan stays best, and how much slower than the best plan it is outside of that range.

    theta    = bandwidth when planned / bandwidth now, of one link (the axes of equal bandwidth and latency)
    C(theta) = C_0 + beta (theta - 1)          seconds of the plan on its routes; beta = its seconds that scale with theta  (`_moving`)
    V(theta) = min over plans                  by planning anew with that bandwidth                                        (`_Planner.at`)
    r(theta) = (C - V) / V                     the regret

C is affine and V, a minimum of affine functions, is concave. So the theta with C <= (1 + slack) V form one interval around 1, and its
ends are found exactly (`_end`): plan at the far end of the range that is searched; if another plan c' wins there, go to where the lines
of C and C' cross and plan again, until no other plan wins. An end is proven where the plan made there is proven. With routes
chosen anew the plan's layouts may cost less than the line says, so the true range may be wider than reported; the regret is computed
with the best routes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autoshard.capture import in_turn
from autoshard.cost import axes_by_link, size_independent_seconds
from autoshard.explain.reopened import captured, reopened
from autoshard.formulate import Formulation, op_collectives, with_pins
from autoshard.graph import Graph
from autoshard.mesh import Axis, LinkCurve, Mesh
from autoshard.planning import Progress, Stopwatch, allowed_by_pins, formulate_for
from autoshard.problem import evaluate
from autoshard.solution import Solution
from autoshard.solvers import solve

SPAN = 8.0  # bandwidths are searched from 1/SPAN to SPAN times what was planned with
PROBES = (1 / 8, 1 / 4, 1 / 2, 2.0, 4.0, 8.0)  # times the bandwidth: where the regret is reported
SLACK = 1e-6  # relative: plans this near are equally good
STEPS = 12  # crossings tried towards one end


@in_turn
def robustness(
    model: nn.Module,
    example_inputs: Any,
    solution: Solution,
    *,
    slack: float = SLACK,
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> dict:
    """How far each link's bandwidth may be off before another plan is better, and how much slower this plan is then.

    slack: regret that still counts as best. time_limit: seconds for each of the plans that are solved on the way. Returns `cost_seconds`,
    `planned_seconds` (what the solution says: another figure where model or rules have changed), `regret` (at the prices planned
    with: 0 for an optimal plan), `slack`, `span`, `links` [{axes, bandwidth, seconds (that scale with it), low, high (bytes/s; None
    where the plan stays best up to the end of the search), searched, proven, regret [{bandwidth, plan_seconds, best_seconds,
    regret}]}]. ValueError when the solution is of another model.
    """
    if not (math.isfinite(slack) and slack >= 0):
        raise ValueError(f"slack is {slack!r}; expected a number of 0 or more, relative: 0.01 is one percent")
    report = Stopwatch(progress).say
    report("capturing the model", 0.0)
    graph = captured(model, example_inputs, solution).checked()
    planner = _Planner(graph, solution, max(slack, SLACK), time_limit)
    links = link_groups(solution.mesh)
    planner.planned = lambda axes, factor: report(
        f"planning with {axes} at {factor:.3g} times its bandwidth", (links.index(planner.link) + 0.5) / max(len(links), 1)
    )
    rows = [planner.row(link) for link in links]
    about = {"cost_seconds": planner.cost, "planned_seconds": solution.cost, "regret": planner.regret}
    return {**about, "slack": planner.slack, "span": SPAN, "links": rows}


def link_groups(mesh: Mesh) -> list[tuple[int, ...]]:
    """The axes of each link; an axis of one device has none."""
    groups = [tuple(k for k in axes if mesh.axes[k].size > 1) for axes in axes_by_link(mesh.axes)]
    return [axes for axes in groups if axes]


def scaled(mesh: Mesh, link: Sequence[int], theta: float) -> Mesh:
    """The mesh with transfers on these axes theta times as long; latencies stay."""

    def longer(curve: LinkCurve) -> LinkCurve:
        first = curve.seconds[0]
        return replace(curve, seconds=tuple(first + (t - first) * theta for t in curve.seconds), tail=curve.tail * theta)

    def slower(axis: Axis) -> Axis:
        return replace(axis, bandwidth=axis.bandwidth / theta, curves=tuple(map(longer, axis.curves)))

    return replace(mesh, axes=tuple(slower(axis) if k in link else axis for k, axis in enumerate(mesh.axes)))


@dataclass(frozen=True)
class _Line:
    """C(theta) of one choice: the line through (theta, seconds)."""

    theta: float
    seconds: float
    slope: float

    def at(self, theta: float) -> float:
        return self.seconds + self.slope * (theta - self.theta)


class _Planner:
    """Plans the same graph under other bandwidths, and computes the cost of the saved plan under them."""

    def __init__(self, graph: Graph, solution: Solution, slack: float, time_limit: float):
        self.graph, self.mesh, self.slack, self.time_limit = graph, solution.mesh, slack, time_limit
        plan = reopened(graph, solution)
        self.options, self.candidates, self.choice = replace(plan.options, time_limit=time_limit), plan.formulated.candidates, plan.choice
        self.link: tuple[int, ...] = ()
        self.planned: Callable[[str, float], None] = lambda axes, factor: None
        judged = evaluate(plan.problem, self.choice)
        if not math.isfinite(judged.cost):
            raise ValueError("the plan's layouts are no longer possible under today's rules; plan again")
        self.cost, self.formulated = judged.cost, plan.formulated
        self.regret = 0.0
        if not (solution.gap <= 1e-9 and math.isclose(judged.cost, solution.cost, rel_tol=1e-9)):  # else it is proven already
            self.regret = judged.cost / solve(plan.problem, time_limit=time_limit, starts=[self.choice]).in_passing().cost - 1

    def row(self, link: tuple[int, ...]) -> dict:
        """The row of one link in the result."""
        self.link = link
        self.plans: dict[float, tuple[float, float, _Line, float]] = {}
        moving = _moving(self.formulated, self.choice, link)
        line = _Line(1.0, self.cost, moving)
        best = self.regret <= self.slack
        slowest, fastest = (self._end(line, SPAN), self._end(line, 1 / SPAN)) if best else (1.0, 1.0)
        bandwidth = self.mesh.axes[link[0]].bandwidth
        outside = [f for f in PROBES if (slowest is not None and 1 / f > slowest) or (fastest is not None and 1 / f < fastest)]
        regrets = [self._regret(bandwidth, factor) for factor in outside]
        return {
            "axes": [self.mesh.axes[k].name for k in link],
            "bandwidth": bandwidth,
            "seconds": moving,
            "low": None if slowest is None else bandwidth / slowest,
            "high": None if fastest is None else bandwidth / fastest,
            "searched": [bandwidth / SPAN, bandwidth * SPAN],
            "proven": all(best - bound <= self.slack * best for best, bound, _, _ in self.plans.values()),
            "regret": regrets,
        }

    def at(self, theta: float) -> tuple[float, float, _Line, float]:
        """The best plan at theta: its seconds, its bound, its line; and the seconds of the saved plan with routes chosen anew."""
        if theta not in self.plans:
            self.planned(" and ".join(self.mesh.axes[k].name for k in self.link), 1 / theta)
            formulated = formulate_for(self.graph, self.candidates, scaled(self.mesh, self.link, theta), self.options)
            problem = with_pins(formulated, allowed_by_pins(formulated, self.options))
            ours = evaluate(problem, self.choice).cost
            answer = solve(problem, solver=self.options.solver, time_limit=self.time_limit, starts=[self.choice]).in_passing()
            assert answer.choice is not None  # the saved plan is one
            slope = _moving(formulated, answer.choice, self.link) / theta
            self.plans[theta] = (answer.cost, answer.bound, _Line(theta, answer.cost, slope), ours)
        return self.plans[theta]

    def _end(self, line: _Line, theta: float) -> float | None:
        """The theta up to which the plan stays best on the way from 1 to `theta`; None where that is all the way."""
        far = theta
        for _ in range(STEPS):
            best, _, other, ours = self.at(theta)
            if min(line.at(theta), ours) <= (1 + self.slack) * best:
                return None if theta == far else theta
            nearer = _crossing(line, other, 1 + self.slack)
            if not min(1.0, theta) < nearer < max(1.0, theta):  # only where the saved plan is not the best at 1 either, or by rounding
                return 1.0
            theta = nearer
        return theta

    def _regret(self, bandwidth: float, factor: float) -> dict:
        best, _, _, ours = self.at(1 / factor)  # PROBES reach to the ends of the search, which are planned already
        return {"bandwidth": bandwidth * factor, "plan_seconds": ours, "best_seconds": best, "regret": max(ours / best - 1, 0.0)}


def _crossing(line: _Line, other: _Line, factor: float) -> float:
    """theta where line = factor * other; inf where they are parallel."""
    slope = line.slope - factor * other.slope
    return (factor * other.at(0.0) - line.at(0.0)) / slope if slope else math.inf


def _moving(formulated: Formulation, choice: Sequence[int], link: Sequence[int]) -> float:
    """Seconds of a choice that scale with the link's theta: those of every collective over the link, without the latency."""
    graph, mesh = formulated.graph, formulated.mesh
    total = 0.0
    for i, op in enumerate(graph.ops):
        for one in op_collectives(op, graph.input_tensors(i), formulated.candidate(i, choice), mesh):
            if one.axis in link:
                latency = size_independent_seconds(one.collective, mesh.axes[one.axis])
                total += formulated.microbatches * max(one.seconds - latency, 0.0)
    for edge in formulated.tensor_edges:
        route = formulated.route(edge, choice)
        for step in route.steps if route else ():
            if step.axis in link and step.collective != "split":
                total += edge.times * (step.seconds - size_independent_seconds(step.collective, mesh.axes[step.axis]))
    return total
