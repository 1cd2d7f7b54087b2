"""A plan of few layers, extended to a model of many: `extrapolate(solution, model, example_inputs)`.

The few layers are captured again (the model with its containers shortened to the layers that the plan has). Every op of the deep model
gets the choice of the corresponding op of the shallow one (shallow.py), and the result is evaluated on the full graph: its cost, its peak,
and a bound on all plans of the full graph, by dual ascent. The gap says how much a plan of the full model could gain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.capture import capture, capture_deep, containers, in_turn, shrunk
from autoshard.graph import chunked_loss, in_order
from autoshard.planning.certify import describe
from autoshard.planning.context import Context, extended_from, formulate_for, stepped
from autoshard.planning.describe import choice_of
from autoshard.planning.options import Infeasible, Options, Progress, Stopwatch, checked_options
from autoshard.planning.ordering import order_for
from autoshard.planning.shallow import completed, op_choices
from autoshard.problem import evaluate
from autoshard.solution import Solution, differences
from autoshard.solvers import certified, converged
from autoshard.strategies import candidates

# options of the plan that apply unless others are given
KEPT = ("optimizer", "master_weights", "memory_limit", "precision", "microbatches", "accumulation_dtype")


@in_turn
def extrapolate(
    solution: Solution, model: nn.Module, example_inputs: Any, *, progress: Progress | None = None, **options: Any
) -> Solution:
    """The plan of a model with few layers, on the same model with many: evaluated on the full graph, with a bound on all of its plans.

    model, example_inputs: as for `plan`, the deep model; its layers sit in a ModuleList or Sequential. options: of `Options`;
    optimizer, precision, master_weights and memory_limit are the plan's own where they aren't given. ValueError where the plan is not
    of the model's first layers, `Infeasible` where it needs more than the memory limit.

        deep = autoshard.extrapolate(autoshard.load("llama-2.json"), *llama.llama3_8b(layers=32)); print(deep.cost, deep.gap)
    """
    kept = {key: value for key, value in solution.noted(*KEPT).items() if value is not None}
    chosen: Options = checked_options(Options, {**kept, "training": solution.training, **options})
    clock, mesh = Stopwatch(progress), solution.mesh
    with clock.phase("capture", "capturing the model", 0.0):
        depths = _depths(solution, model)
        graph, depth = capture_deep(model, example_inputs, training=solution.training, precision=chosen.precision)
        shallow = capture(shrunk(model, depths), example_inputs, training=solution.training, precision=chosen.precision)
        order = None if solution.sequence_order is None else order_for(graph, mesh)
        if order is not None:
            graph, shallow = in_order(graph, order), in_order(shallow, solution.sequence_order)
            depth = replace(depth, shallow=None)  # whose ops have the natural order
        if rows := solution.chunked_loss:
            graph, shallow = chunked_loss(graph, rows), chunked_loss(shallow, rows)
            depth = replace(depth, shallow=None if depth.shallow is None else chunked_loss(depth.shallow, rows))
        context = Context(graph, mesh, chosen, clock, shallow=depth.shallow).stepped()
        graph, shallow = context.graph, stepped(shallow, chosen)
        if reasons := differences(solution, shallow, mesh):
            layers = ", ".join(f"{n} of {name}" for name, n in depths.items())
            raise ValueError(f"the plan is not one of this model's first layers ({layers}): {'; '.join(reasons)}; plan those first")
    with clock.phase("formulate", "pricing layouts", 0.5):
        deep, small = (formulate_for(g, candidates(g, mesh), mesh, chosen) for g in (graph, shallow))
        choice = completed(deep, op_choices(deep, small, choice_of(small, solution)))
    evaluation = evaluate(deep.problem, choice)
    if not evaluation.fits:
        limit, peak = (chosen.memory_limit or 0.0) / 1e9, evaluation.peak / 1e9
        raise Infeasible(f"on the full model the plan needs {peak:.3f} GB per device, the limit is {limit:.3f} GB; plan the full model")
    with clock.phase("solve", "bounding all plans", 0.7):
        few = extended_from(context.shallow, deep, chosen)
        left: dict[str, Any] = {"time_limit": context.seconds_left(), "clock": clock.now}
        messages = None if few is None else few.correspondence.messages(few.formulated, converged(few.formulated.problem, **left)[1])
        answer = certified(deep.problem, choice, messages=messages, gap=chosen.gap, **left | {"time_limit": context.seconds_left()})
    with clock.phase("describe", "writing the plan", 0.95):
        assumptions = solution.noted("model", "set") | ({"ignored": depth.ignored} if depth.ignored else {})
        if order is not None:
            assumptions["sequence_order"] = order.to_dict()
        if solution.chunked_loss:
            assumptions["chunked_loss"] = solution.chunked_loss
        extended = describe(deep, answer, chosen, {}, {**assumptions, "extrapolated_from": depths})
    return replace(extended, seconds=clock.seconds())


def _depths(solution: Solution, model: nn.Module) -> dict[str, int]:
    """How many layers of each of the model's containers the plan has."""
    depths = {}
    for container in containers(model):
        prefix = container.name + "."
        known = {name[len(prefix) :].split(".")[0] for name in solution.parameters if name.startswith(prefix)}
        if not known or len(known) > container.layers:
            raise ValueError(
                f"the plan has {len(known)} layers of {container.name}, the model {container.layers}; expected a plan of fewer layers"
            )
        depths[container.name] = len(known)
    if not depths:
        raise ValueError("the model has no ModuleList or Sequential of equal layers to extrapolate over; plan the model itself")
    return depths
