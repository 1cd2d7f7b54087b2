"""Memory against time: the fastest plans for less and less memory, with proof, from one formulation of the problem.

question = ask(model, example_inputs, mesh, options)
instance = instance_of(question)                              the same problem as for one plan, without a memory limit
swept    = hull(instance.problem)                              every answer that is best for some price per byte (solvers.memory_hull)
points   = the memory and seconds of each answer, and the bound on all plans within its memory
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from autoshard.capture import in_turn
from autoshard.mesh import Mesh
from autoshard.options import count, refuse_elsewhere
from autoshard.planning.describe import described
from autoshard.planning.instance import Instance, instance_of
from autoshard.planning.options import Infeasible, Options, Progress, Stopwatch, checked_options
from autoshard.planning.question import Question, ask, with_number_of_microbatches
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.planning.variants import Answered
from autoshard.solution import Solution, plain, provided
from autoshard.solvers import LEAST_GAP, PROVEN_GAP, Answer, Hull, HullPoint, Status, hull
from autoshard.writing import write_json

FORMAT = "autoshard.frontier/1"
OPTIMAL_GAP = 1e-6  # relative: points up to here are called optimal


@dataclass(frozen=True)
class FrontierPoint:
    """A plan, and the proof that none within its memory is faster."""

    memory_bytes: float  # per device, at its peak
    seconds: float
    bound_seconds: float  # no plan within limit_bytes is faster
    gap: float  # (seconds - bound_seconds) / seconds
    status: str  # optimal (gap up to 1e-6), proven (up to the requested gap), feasible
    limit_bytes: float  # the bound holds for plan(memory_limit=limit_bytes)


@dataclass(frozen=True, eq=False)
class Frontier:
    """Points in order of growing memory and falling seconds, and bounds for all limits. `solution(i)` is the plan of point i."""

    model: str
    mesh: Mesh
    training: bool
    gap: float  # the requested one, relative
    points: tuple[FrontierPoint, ...]
    seconds: dict[str, Any] = field(default_factory=dict)  # {"cpu": {capture, candidates, formulate, solve, total}, "wall": ...}
    assumptions: dict[str, Any] = field(default_factory=dict)
    _hull: Hull = field(default_factory=lambda: Hull((), (), ()), repr=False)
    _question: Question | None = field(default=None, repr=False)
    _instance: Instance | None = field(default=None, repr=False)

    @property
    def proven(self) -> tuple[FrontierPoint, ...]:
        """The points whose gap is at most the requested one."""
        return tuple(p for p in self.points if p.status != "feasible")

    def bound(self, limit: float) -> float:
        """Seconds that no plan within `limit` bytes per device beats; inf where none is that small."""
        return self._hull.bound(limit)

    def within(self, limit: float) -> FrontierPoint | None:
        """The fastest point that needs at most `limit` bytes per device; None where there is none."""
        return next((p for p in reversed(self.points) if p.memory_bytes <= limit), None)

    def solution(self, i: int) -> Solution:
        """The plan of point i (from the least memory), with its certificate for a memory limit of its own peak. IndexError without one."""
        point = self._hull.points[i]
        assert self._question is not None and self._instance is not None
        question = self._question.with_options(memory_limit=point.memory, gap=self.gap)
        status = Status.FEASIBLE if self.points[i].status == "feasible" else Status.OPTIMAL  # within the gap of the options
        answer = Answer(status, point.choice, point.cost, point.bound, "hull", peak=point.memory)
        return replace(described(Answered(question, self._instance, answer)), seconds=self.seconds)

    def _repr_html_(self) -> str:
        """The plot, for notebooks."""
        return provided("frontier_svg")(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The record that files hold: autoshard/schemas/frontier.1.json. Lines and limits bound all plans: see `bound`."""
        return {
            "format": FORMAT,
            "model": self.model,
            "mesh": list(self.mesh.shape),
            "device": self.mesh.device.name,
            "device_memory_bytes": self.mesh.device.memory,
            "training": self.training,
            "gap": self.gap,
            "points": plain(list(map(asdict, self.points)), "points"),
            "bound_lines": [{"seconds": line.intercept, "seconds_per_byte": line.price} for line in self._hull.lines],
            "bound_limits": plain([{"limit_bytes": most, "seconds": bound} for most, bound in self._hull.limits], "bound_limits"),
            "planning_seconds": self.seconds.get("cpu", {}).get("total", 0.0),
            "cpu_seconds": self.seconds.get("cpu", {}),
            "wall_seconds": self.seconds.get("wall", {}),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON, whole or not at all; OSError where that can't be."""
        write_json(self.to_dict(), path, indent=1)


@in_turn
def frontier(
    model: torch.nn.Module,
    example_inputs: Any,
    mesh: Mesh,
    *,
    points: int = 12,
    progress: Progress | None = None,
    assumptions: Mapping | None = None,
    **options: Any,
) -> Frontier:
    """The fastest plans of `model` on `mesh` for less and less memory: at least `points` of them, each proven, where there are so many.

    model, example_inputs, progress, assumptions: as for `plan`. options: the fields of `Options` that make sense without one memory
    limit: training, optimizer, master_weights, microbatches, pins, keep, forbid, recompute (a number of blocks, or "all"), time_limit
    in seconds, skip_fully_replicated; and gap, relative, up to which a point counts as proven (default 1e-3, at least 1e-8).
    ValueError on bad input, `Infeasible` where the pins leave no plan.

        curve = frontier(module, (tokens, targets), Mesh.from_bandwidths((8, 8)), training=True)
        curve.within(40e9), curve.bound(40e9), curve.solution(0).save("smallest.json")
    """
    checked = _checked(points, options)
    clock = Stopwatch(progress)
    question = with_recomputed_blocks(with_number_of_microbatches(ask(model, example_inputs, mesh, checked, clock, assumptions))).stepped()
    instance = instance_of(question)
    with clock.phase("solve", "sweeping the price of memory", 0.4):
        starts, messages = [], None  # of the plan without a limit, extended from few layers; nothing where pins make the layers differ
        if instance.few_layers is not None and instance.problem is instance.formulated.problem:
            choice, messages = instance.few_layers.converged(question.seconds_left(), clock.now)
            starts, messages = ([], None) if choice is None else ([choice], messages)
        swept = hull(
            instance.problem, points=points, gap=checked.gap, starts=starts, messages=messages, time_limit=question.seconds_left(),
            progress=_progress(clock), clock=clock.now,
        )  # fmt: skip
    if not swept.points:
        raise Infeasible("no plan was found at any memory: take away a pin, or raise the time limit")
    gap = max(checked.gap, LEAST_GAP)
    name = str(question.assumptions.get("model") or type(model).__name__)
    rows = tuple(_point(p, gap) for p in swept.points)
    return Frontier(name, mesh, question.graph.trains, gap, rows, clock.seconds(), dict(question.assumptions), swept, question, instance)


def _checked(points: object, options: Mapping[str, Any]) -> Options:
    count().check("points", points)
    refuse_elsewhere(Options, "frontier", options)
    checked = checked_options(Options, {"gap": PROVEN_GAP, **options})
    if checked.recompute in ("auto", "blocks"):
        said = f"recompute is {checked.recompute!r}, which depends on one memory limit"
        raise ValueError(f"{said}; give frontier a number of blocks, or 'all'")
    return checked


def _progress(clock: Stopwatch) -> Callable[[int, int], None] | None:
    if clock.progress is None:
        return None

    def show(proven: int, wanted: int) -> None:
        clock.say(f"sweeping the price of memory: {proven} of {wanted} points", 0.4 + 0.55 * min(proven / wanted, 1.0))

    return show


def _point(p: HullPoint, gap: float) -> FrontierPoint:
    status = "optimal" if p.gap <= min(OPTIMAL_GAP, gap) else "proven" if p.gap <= gap else "feasible"
    return FrontierPoint(p.memory, p.cost, p.bound, p.gap, status, p.memory)
