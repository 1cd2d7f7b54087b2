"""The question that every step of planning reads. It is created once; a step that needs another one makes it with `replace` or `map`.

ModelGraphs       the graph of a model, and that of the same model with few layers: the search starts from the latter's plan
Question    a model on a mesh, with the options, the clock, and what else planning depends on
ask         the question about a module: what was given is checked, and the module captured
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.capture import capture_deep
from autoshard.cycles import no_search_for_cycles
from autoshard.graph import Graph, checkpointed, forward_blocks, with_microbatches
from autoshard.mesh import Mesh
from autoshard.options import Options, having
from autoshard.planning.options import Stopwatch
from autoshard.solution import Solution
from autoshard.strategies import is_experts

LEAST_SECONDS = 1.0  # of search, at most the time limit, where capture and pricing leave less


@dataclass(frozen=True, eq=False)
class ModelGraphs:
    """The graph to plan, and the same model with few layers where it has many."""

    graph: Graph
    few_layers: Graph | None = None

    def map(self, transform: Callable[[Graph], Graph | None]) -> ModelGraphs:
        """Both graphs transformed; without few layers where `transform` has no such graph."""
        graph = transform(self.graph)
        assert graph is not None
        return ModelGraphs(graph, None if self.few_layers is None else transform(self.few_layers))


@dataclass(frozen=True, eq=False)
class Question:
    """The model to plan and everything that planning it depends on."""

    model: ModelGraphs
    mesh: Mesh
    options: Options
    clock: Stopwatch
    assumptions: Mapping = field(default_factory=dict)  # further facts that the plan notes
    recomputable: Graph | None = None  # the graph without recomputation, where a refusal may advise to recompute every block
    explains: bool = True  # a refusal names the demands that conflict
    has_fallback: bool = False  # where it has no plan soon, variants that need less memory are tried
    known: tuple[Solution, ...] = ()  # plans of near questions, from which the search starts
    on_plan: Callable[[Solution], None] | None = None  # called with the plan before the advice beside it is worked out

    def __post_init__(self) -> None:
        if (imbalance := self.options.expert_imbalance) is not None:
            object.__setattr__(self, "mesh", replace(self.mesh, expert_imbalance=imbalance))

    @property
    def graph(self) -> Graph:
        return self.model.graph

    def map(self, transform: Callable[[Graph], Graph | None], **noted: Any) -> Question:
        """The question about the transformed model, with further facts to note."""
        return replace(self, model=self.model.map(transform), assumptions={**self.assumptions, **noted})

    def with_fallback(self) -> Question:
        """The question of a variant after which, under a memory limit, another one follows that needs less and explains a refusal."""
        return self if self.options.memory_limit is None else replace(self, explains=False, has_fallback=True)

    def with_options(self, **changed: Any) -> Question:
        return replace(self, options=replace(self.options, **changed))

    def seconds_left(self) -> float:
        """Of the time limit; never nothing, so that a solver can begin."""
        return max(self.options.time_limit - self.clock.elapsed, min(LEAST_SECONDS, self.options.time_limit))

    def within(self, share: float) -> Question:
        """The same question for a part of the time that is left."""
        return self.with_options(time_limit=self.clock.elapsed + share * self.seconds_left()) if share < 1 else self

    @property
    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return self.clock.is_past(self.options.time_limit)

    def lacks_time_to_formulate(self) -> bool:
        """Whether to price another graph of this size would exceed the time limit, by what the first one took."""
        return self.clock.elapsed + self.clock.wall.get("formulate", 0.0) >= self.options.time_limit

    def all_recomputed(self) -> Graph | None:
        """The graph with every block recomputed; None where that is no alternative, or the model has no repeated blocks."""
        num_blocks = 0 if self.recomputable is None else len(forward_blocks(self.recomputable))
        if self.recomputable is None or not num_blocks:
            return None
        return stepped(checkpointed(self.recomputable, num_blocks), self.options)

    def stepped(self) -> Question:
        """The question about a step: with the copies and sums of its microbatches, where there are several."""
        if self.options.microbatches == 1:
            return self
        if not self.graph.trains:
            raise ValueError(f"microbatches is {self.options.microbatches}, but nothing is trained; plan with training=True, or without it")
        return self.map(lambda graph: stepped(graph, self.options))


def stepped(graph: Graph, options: Options) -> Graph:
    """The graph as it is planned: with the copies and sums of its microbatches, where there are several."""
    return with_microbatches(graph, options.accumulation_dtype) if options.microbatches > 1 else graph


def ask(
    model: torch.nn.Module, example_inputs: Any, mesh: Mesh, options: Options, clock: Stopwatch, assumptions: Mapping | None = None
) -> Question:
    """The question about a module, which is captured. ValueError where something else than a module or a mesh was given."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {type(mesh).__name__}; expected an autoshard.Mesh, for example Mesh.from_bandwidths((2, 4))")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    with clock.phase("capture", "capturing the model", 0.0), no_search_for_cycles():
        graph, depth = capture_deep(model, example_inputs, training=options.training, precision=options.precision)
    return Question(ModelGraphs(graph, depth.shallow), mesh, options, clock, {**(assumptions or {}), **depth.noted})


def check_effects(question: Question) -> None:
    """ValueError where an option has nothing in the model that it is about."""
    options = question.options
    if (options.expert_imbalance or 1) > 1 and not any(map(is_experts, question.graph.ops)):
        raise ValueError(f"expert_imbalance is {options.expert_imbalance:g}, but the model has no experts; leave it out")
    for name in having(Options, "of_training") if not options.training else ():
        if (value := getattr(options, name)) != getattr(Options, name):
            raise ValueError(f"{name} is {value!r}, which has no effect on a forward pass; add training=True, or leave it out")


def with_number_of_microbatches(question: Question) -> Question:
    """The question with `microbatches` in place of `global_batch`; ValueError where the batch of the inputs doesn't divide that."""
    options = question.options
    if options.global_batch is None:
        return question
    sizes = Counter(op.output.shape[0] for op in question.graph.ops if op.kind == "input" and op.output.shape)
    batch, m = max(sizes, key=lambda size: (sizes[size], size), default=None), options.microbatches  # of most inputs, the larger of equals
    if batch is None or options.global_batch % batch:
        raise ValueError(f"global_batch is {options.global_batch}, the example inputs' batch is {batch}; expected a multiple of that")
    if m not in (1, options.global_batch // batch):
        raise ValueError(f"global_batch {options.global_batch} is {options.global_batch // batch} batches of {batch}, not {m}; give one")
    return question.with_options(microbatches=options.global_batch // batch, global_batch=None)


def part_of(clock: Stopwatch, words: str, begin: float, width: float) -> Stopwatch:
    """The clock of one of several questions, whose progress is part of that of all. words: `{}` stands for what is being done."""
    part, progress = copy(clock), clock.progress
    if progress is not None:
        part.progress = lambda what, fraction: progress(words.format(what), begin + width * fraction)
    return part
