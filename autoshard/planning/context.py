"""The two values that every step of planning reads. Each is created once, and no step changes it.

Context     the question: a graph, a mesh, the options, the clock, and what else is known about the model
Instance    the same question in numbers: the formulation of the graph, and the problem that obeys the pins
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.formulate import Formulation, Training, formulate, with_pins
from autoshard.graph import Graph, checkpointed, forward_blocks, with_microbatches
from autoshard.mesh import Mesh
from autoshard.planning.demands import Demanded, allowed_by_pins
from autoshard.planning.homes import homes
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.shallow import Shallow, correspondence
from autoshard.problem import Problem
from autoshard.solution import Solution
from autoshard.solvers import Answer
from autoshard.strategies import Candidates, candidates

LEAST_SECONDS = 1.0  # of search, at most the time limit, where capture and pricing leave less


@dataclass(frozen=True, eq=False)
class Context:
    """The graph to plan and everything that planning it depends on."""

    graph: Graph
    mesh: Mesh
    options: Options
    clock: Stopwatch
    assumptions: Mapping = field(default_factory=dict)  # further facts that the plan notes
    shallow: Graph | None = None  # the same model with fewer layers; the search starts from its plan
    recomputable: Graph | None = None  # the graph without recomputation, where a refusal may advise to recompute every block
    explains: bool = True  # a refusal names the demands that conflict
    on_plan: Callable[[Solution], None] | None = None  # called with the plan before what is beside it is worked out

    def __post_init__(self) -> None:
        if (imbalance := self.options.expert_imbalance) is not None:
            object.__setattr__(self, "mesh", replace(self.mesh, expert_imbalance=imbalance))

    def seconds_left(self) -> float:
        """Of the time limit; never nothing, so that a solver can begin."""
        return max(self.options.time_limit - self.clock.elapsed, min(LEAST_SECONDS, self.options.time_limit))

    def within(self, share: float) -> Context:
        """The same question for a part of the time that is left."""
        until = self.clock.elapsed + share * self.seconds_left()
        return replace(self, options=replace(self.options, time_limit=until))

    @property
    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return self.clock.elapsed >= self.options.time_limit

    def lacks_time_to_formulate(self) -> bool:
        """Whether to price another graph of this size would exceed the time limit, by what the first one took."""
        return self.clock.elapsed + self.clock.wall.get("formulate", 0.0) >= self.options.time_limit

    def all_recomputed(self) -> Graph | None:
        """The graph with every block recomputed; None where that is no alternative, or the model has no repeated blocks."""
        num_blocks = 0 if self.recomputable is None else len(forward_blocks(self.recomputable))
        if self.recomputable is None or not num_blocks:
            return None
        return stepped(checkpointed(self.recomputable, num_blocks), self.options)

    def stepped(self) -> Context:
        """The context of a step: with the copies and sums of its microbatches, where there are several."""
        if self.options.microbatches == 1:
            return self
        if not any(r.kind == "gradient" for r in self.graph.results):
            raise ValueError(f"microbatches is {self.options.microbatches}, but nothing is trained; plan with training=True, or without it")
        shallow = None if self.shallow is None else stepped(self.shallow, self.options)
        return replace(self, graph=stepped(self.graph, self.options), shallow=shallow)


def stepped(graph: Graph, options: Options) -> Graph:
    """The graph as it is planned: with the copies and sums of its microbatches, where there are several."""
    return with_microbatches(graph, options.accumulation_dtype) if options.microbatches > 1 else graph


@dataclass(frozen=True, eq=False)
class Instance:
    """A context in numbers."""

    formulated: Formulation
    problem: Problem  # without the choices that pins, kept and forbidden layouts exclude
    shallow: Shallow | None = None  # the same model with fewer layers, and how its answers extend to this one
    scheme: Demanded | None = None  # a baseline that the plan has to follow
    completed: dict[tuple, Answer] = field(default_factory=dict, init=False)  # proven answers of baselines: several have the same pins

    @cached_property
    def homes(self) -> list[int]:
        """The layer of every node, for the solvers."""
        return homes(self.formulated)


def instance_of(context: Context, layouts: Candidates) -> Instance:
    """The problem that the solvers get. ValueError where a pin names no tensor, or a layout that is not possible."""
    formulated = formulate_for(context.graph, layouts, context.mesh, context.options)
    problem = with_pins(formulated, allowed_by_pins(formulated, context.options))
    use_shallow = context.shallow is not None and context.options.solver == "auto"
    return Instance(formulated, problem, extended_from(context.shallow, formulated, context.options) if use_shallow else None)


def extended_from(shallow: Graph | None, formulated: Formulation, options: Options) -> Shallow | None:
    """The problem of the same model with fewer layers, and how it extends to this one; None where some op has no corresponding op."""
    if shallow is None:
        return None
    small = formulate_for(shallow, candidates(shallow, formulated.mesh), formulated.mesh, options)
    try:
        return Shallow(small, correspondence(formulated, small), homes(small))
    except ValueError:  # this is no error: the deep problem is solved without the shallow one
        return None


def formulate_for(graph: Graph, layouts: Candidates, mesh: Mesh, options: Options) -> Formulation:
    """The graph's problem with the optimizer and the memory limit of the options, before any pins."""
    trains = any(r.kind == "gradient" for r in graph.results)
    training = Training(options.optimizer, options.master_weights, options.microbatches) if trains else None
    return formulate(graph, layouts, mesh, training=training, memory_limit=options.memory_limit)
