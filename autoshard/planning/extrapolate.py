"""A plan of few layers, extended to a model of many: `extrapolate(solution, model, example_inputs)`.

The few layers are captured again (the model with its containers shortened to the layers that the plan has). Every op of the deep model
gets the choice of the corresponding op (few_layers.py), and the result is evaluated on the full graph: its cost, its peak,
and a bound on all plans of the full graph, by dual ascent. The gap says how much a plan of the full model could gain.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.capture import capture, containers, in_turn, shrunk
from autoshard.graph import chunked_loss, in_order, with_hidden_values
from autoshard.planning.describe import choice_of, described
from autoshard.planning.few_layers import completed, op_choices
from autoshard.planning.instance import Instance, extended_from, formulate_for
from autoshard.planning.options import Infeasible, Options, Progress, Stopwatch, checked_options
from autoshard.planning.ordering import order_for
from autoshard.planning.question import ModelGraphs, ask, stepped
from autoshard.planning.variants import Answered
from autoshard.problem import evaluate
from autoshard.solution import Solution, differences
from autoshard.solvers import certified
from autoshard.strategies import candidates

# options of the plan that apply unless others are given
KEPT = ("optimizer", "master_weights", "memory_limit", "precision", "microbatches", "accumulation_dtype")


@in_turn
def extrapolate(solution: Solution, model: nn.Module, example_inputs: Any, *, progress: Progress | None = None, **options: Any) -> Solution:
    """The plan of a model with few layers, on the same model with many: evaluated on the full graph, with a bound on all of its plans.

    model, example_inputs: as for `plan`, the deep model; its layers sit in a ModuleList or Sequential. options: of `Options`;
    optimizer, precision, master_weights and memory_limit are the plan's own where they aren't given. ValueError where the plan is not
    of the model's first layers, `Infeasible` where it needs more than the memory limit.

        deep = autoshard.extrapolate(autoshard.load("llama-2.json"), *llama.llama3_8b(layers=32)); print(deep.cost, deep.gap)
    """
    kept = {key: value for key, value in solution.noted(*KEPT).items() if value is not None}
    chosen: Options = checked_options(Options, {**kept, "training": solution.training, **options})
    clock, mesh = Stopwatch(progress), solution.mesh
    question = ask(model, example_inputs, mesh, chosen, clock)
    ignored = {key: value for key, value in question.assumptions.items() if key == "ignored"}
    question = replace(question, assumptions=solution.noted("model", "set") | ignored)
    with clock.phase("capture", "capturing the model", 0.0):
        depths = _depths(solution, model)
        few_layers = capture(shrunk(model, depths), example_inputs, training=chosen.training, precision=chosen.precision)
        if solution.sequence_order is not None and (order := order_for(question.graph, mesh)) is not None:
            few_layers = in_order(few_layers, solution.sequence_order)
            alone = replace(question, model=ModelGraphs(question.graph))  # the few layers that were tiled have the natural order
            question = alone.map(lambda graph: in_order(graph, order), sequence_order=order.to_dict())
        if rows := solution.chunked_loss:
            few_layers = chunked_loss(few_layers, rows)
            question = question.map(lambda graph: chunked_loss(graph, rows), chunked_loss=rows)
        if parts := solution.hidden_values:
            few_layers = with_hidden_values(few_layers, parts)
            question = question.map(lambda graph: with_hidden_values(graph, parts), hidden_values=parts)
        question, few_layers = question.stepped(), stepped(few_layers, chosen)
        if reasons := differences(solution, few_layers, mesh):
            layers = ", ".join(f"{n} of {name}" for name, n in depths.items())
            raise ValueError(f"the plan is not one of this model's first layers ({layers}): {'; '.join(reasons)}; plan those first")
    with clock.phase("formulate", "pricing layouts", 0.5):
        deep, few = (formulate_for(g, candidates(g, mesh), mesh, chosen) for g in (question.graph, few_layers))
        choice = completed(deep, op_choices(deep, few, choice_of(few, solution)))
    evaluation = evaluate(deep.problem, choice)
    if not evaluation.fits:
        limit, peak = (chosen.memory_limit or 0.0) / 1e9, evaluation.peak / 1e9
        raise Infeasible(f"on the full model the plan needs {peak:.3f} GB per device, the limit is {limit:.3f} GB; plan the full model")
    with clock.phase("solve", "bounding all plans", 0.7):
        instance = Instance(deep, deep.problem, extended_from(question.model.few_layers, deep, chosen))
        own = instance.few_layers
        messages = None if own is None else own.converged(question.seconds_left(), clock.now)[1]
        answer = certified(
            deep.problem, choice, messages=messages, gap=chosen.gap, time_limit=question.seconds_left(), clock=clock.now
        )  # fmt: skip
    noted = {**question.assumptions, "extrapolated_from": depths}
    return described(Answered(replace(question, assumptions=noted), instance, answer))


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
