"""The range of each link's bandwidth in which a plan stays best, and how much slower than the best plan it is outside of that range.

    theta    = bandwidth when planned / bandwidth now, of one link (the axes of equal bandwidth and latency)
    C(theta) = seconds of the plan's layouts, on the cheapest routes                                           (`_Planner.at`)
    V(theta) = min over plans, by planning anew with that bandwidth
    r(theta) = (C - V) / V                     the regret

Where routes stay, C is affine and V, a minimum of affine functions, is concave. So the theta with C <= (1 + slack) V form one interval
around 1, and its ends are found exactly (`_end`): plan at the far end of the range that is searched; if another plan wins there, go to
where the lines of the two, through their seconds here and at 1, cross, and plan again, until no other plan wins. An end is proven where
the plan made there is proven. Where routes change on the way, a line is below the seconds that it stands for, which a concave function
has between two points.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from autoshard.capture import in_turn
from autoshard.cost import axes_by_link
from autoshard.explain.reopened import captured, reopened
from autoshard.formulate import with_pins
from autoshard.graph import Graph
from autoshard.mesh import Axis, LinkCurve, Mesh
from autoshard.planning import Progress, Stopwatch, allowed_by_pins, formulate_for
from autoshard.problem import Problem, evaluate
from autoshard.solution import Solution
from autoshard.solvers import solve

SPAN = 8.0  # bandwidths are searched from 1/SPAN to SPAN times what was planned with
PROBES = (1 / 8, 1 / 4, 1 / 2, 2.0, 4.0, 8.0)  # times the bandwidth: where the regret is reported
SLACK = 1e-6  # relative: plans this near are equally good
STEPS = 12  # crossings tried towards one end
STEP = 1e-3  # of theta: the seconds that scale with it are a difference


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


class _Best(NamedTuple):
    """The best plan at some theta."""

    seconds: float
    bound: float  # of all plans there
    ours: float  # seconds of the saved plan there
    at_one: float  # the best plan's seconds at 1


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
        self.cost, self.problem = judged.cost, plan.problem
        self.regret = 0.0
        if not (solution.gap <= 1e-9 and math.isclose(judged.cost, solution.cost, rel_tol=1e-9)):  # else it is proven already
            self.regret = judged.cost / solve(plan.problem, time_limit=time_limit, starts=[self.choice]).in_passing().cost - 1

    def row(self, link: tuple[int, ...]) -> dict:
        """The row of one link in the result."""
        self.link = link
        self.plans: dict[float, _Best] = {}
        best = self.regret <= self.slack
        slowest, fastest = (self._end(SPAN), self._end(1 / SPAN)) if best else (1.0, 1.0)
        bandwidth = self.mesh.axes[link[0]].bandwidth
        outside = [f for f in PROBES if (slowest is not None and 1 / f > slowest) or (fastest is not None and 1 / f < fastest)]
        regrets = [self._regret(bandwidth, factor) for factor in outside]
        moved = evaluate(self._problem(1 + STEP), self.choice).cost
        return {
            "axes": [self.mesh.axes[k].name for k in link],
            "bandwidth": bandwidth,
            "seconds": (moved - self.cost) / STEP,
            "low": None if slowest is None else bandwidth / slowest,
            "high": None if fastest is None else bandwidth / fastest,
            "searched": [bandwidth / SPAN, bandwidth * SPAN],
            "proven": all(one.seconds - one.bound <= self.slack * one.seconds for one in self.plans.values()),
            "regret": regrets,
        }

    def _problem(self, theta: float) -> Problem:
        formulated = formulate_for(self.graph, self.candidates, scaled(self.mesh, self.link, theta), self.options)
        return with_pins(formulated, allowed_by_pins(formulated, self.options))

    def at(self, theta: float) -> _Best:
        """The best plan at theta, beside the saved one."""
        if theta not in self.plans:
            self.planned(" and ".join(self.mesh.axes[k].name for k in self.link), 1 / theta)
            problem = self._problem(theta)
            answer = solve(problem, solver=self.options.solver, time_limit=self.time_limit, starts=[self.choice]).in_passing()
            assert answer.choice is not None  # the saved plan is one
            ours, at_one = evaluate(problem, self.choice).cost, evaluate(self.problem, answer.choice).cost
            self.plans[theta] = _Best(answer.cost, answer.bound, ours, at_one)
        return self.plans[theta]

    def _end(self, theta: float) -> float | None:
        """The theta up to which the plan stays best on the way from 1 to `theta`; None where that is all the way."""
        far, factor = theta, 1 + self.slack
        for _ in range(STEPS):
            best = self.at(theta)
            more = best.ours - factor * best.seconds
            if more <= 0:
                return None if theta == far else theta
            less = factor * best.at_one - self.cost
            if less <= 0:  # only where the saved plan is not the best at 1 either, or by rounding
                return 1.0
            theta = 1 + (theta - 1) * less / (less + more)
        return theta

    def _regret(self, bandwidth: float, factor: float) -> dict:
        best = self.at(1 / factor)  # PROBES reach to the ends of the search, which are planned already
        regret = max(best.ours / best.seconds - 1, 0.0)
        return {"bandwidth": bandwidth * factor, "plan_seconds": best.ours, "best_seconds": best.seconds, "regret": regret}
