"""Plan: a model and a mesh in, a Solution out. A question is asked, its best variant searched, and the answer described.

docs/how.md follows the model and the mesh through this, call by call.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from autoshard.baselines import baseline as scheme_called
from autoshard.capture import capture_deep, dims_of, in_turn, inputs_at
from autoshard.formulate import with_pins
from autoshard.graph import Graph, Sizes
from autoshard.mesh import Mesh
from autoshard.planning.advice import ADVICE, with_modules
from autoshard.planning.baselining import masks_of
from autoshard.planning.demands import Demanded
from autoshard.planning.describe import described
from autoshard.planning.dynamic import plan_ranges
from autoshard.planning.instance import instance_of
from autoshard.planning.options import Demand, Options, Progress, Stopwatch, checked_options
from autoshard.planning.question import ModelGraphs, Question, ask, check_effects, with_number_of_microbatches
from autoshard.planning.recomputing import hidden_values
from autoshard.planning.refusal import infeasible
from autoshard.planning.search import search
from autoshard.planning.variants import Answered
from autoshard.solution import Solution
from autoshard.solvers import solve


@in_turn
def plan(
    model: torch.nn.Module,
    example_inputs: Any,
    mesh: Mesh,
    *,
    progress: Progress | None = None,
    assumptions: Mapping | None = None,
    watch: Stopwatch | None = None,
    on_plan: Callable[[Solution], None] | None = None,
    **options: Any,
) -> Solution:
    """`autoshard.plan` of one program on one mesh. watch: the clock, by default of wall seconds."""
    checked = checked_options(Options, options)
    question = ask(model, example_inputs, mesh, checked, watch or Stopwatch(progress), assumptions)
    if checked.dynamic_shapes is not None:
        ranges, named = dims_of(model, example_inputs, checked.dynamic_shapes)

        def captured(sizes: Sizes) -> Graph:
            inputs = inputs_at(model, example_inputs, named, sizes)
            return capture_deep(model, inputs, training=checked.training, precision=checked.precision)[0]

        return plan_ranges(question, ranges, named, captured, options)
    return plan_captured(replace(question, on_plan=on_plan))


def plan_captured(question: Question) -> Solution:
    """The plan in the best of the variants that the options ask for. ValueError where an option has no effect on the model."""
    check_effects(question)
    return described(search(with_number_of_microbatches(question)), ADVICE)


def plan_graph(question: Question) -> Solution:
    """The plan of the question's graph as it is, but for the hidden values of experts."""
    return described(search(question, (hidden_values,)), ADVICE)


def baseline_only(question: Question, name: str, modules: bool = True) -> Solution:
    """The plan of one baseline, its pins completed by the solver; the bound is that of the pinned problem. modules: with what launchers
    that know modules only can be told."""
    alone = replace(question, model=ModelGraphs(question.graph))
    best = search(alone, (hidden_values,), partial(_pinned, name=name))
    solution = described(best)
    return replace(with_modules(best, solution) if modules else solution, seconds=question.clock.seconds())


def _pinned(question: Question, name: str) -> Answered:
    question = question.stepped()
    clock, options = question.clock, question.options
    instance = instance_of(question)
    baseline = scheme_called(question.graph, question.mesh, instance.formulated.candidates, name)
    masks = masks_of(instance.formulated, baseline)
    scheme = Demanded(Demand("algo", value=name), masks)
    costs = tuple(map(np.maximum, instance.problem.node_costs, with_pins(instance.formulated, masks).node_costs))
    instance = replace(instance, problem=replace(instance.problem, node_costs=costs), scheme=scheme)
    with clock.phase("solve", f"completing {name}", 0.5):
        answer = solve(
            instance.problem, solver=options.solver, time_limit=question.seconds_left(), clock=clock.now, gap=options.gap,
            preference=instance.formulated.preference,
        )  # fmt: skip
    if answer.choice is None:
        raise infeasible(question, instance, answer)
    noted = {**question.assumptions, "pinned_to": name, "matched": baseline.matched}
    return Answered(replace(question, assumptions=noted), instance, answer)
