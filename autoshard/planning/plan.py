"""Plan: a model and a mesh in, a Solution out. This page holds the steps in their order; each is one call into the file named beside it.

capture_deep            what is computed: few layers are captured, then tiled to the model's depth    capture
as_asked                how many blocks are recomputed; "blocks" plans several numbers of them        recomputing
best_selected           with "auto" instead: which saved values are kept, recomputed or offloaded     selecting
planned_in_order        whether a long sequence is in head-tail order                                 ordering
planned_in_chunks       whether the logits of a loss exist for some tokens at a time                  chunking
candidates              which layouts each op may have                                                strategies
instance_of             what each choice costs, in numbers, and which choices the pins leave          context, formulate
solve_baselines         the usual plans, as comparison and as starts of the search                    baselining
solve_instance          the best choice, with a proof                                                 solving, solvers
infeasible              where there is no plan: which demands conflict, and what would help           refusal, conflicts
_overlapped             for the objective "overlapped": the plan whose simulated time line is shortest   overlapped, simulate
align_batches           inputs of one batch get one layout, where that costs nothing                  batches
describe                the choice as layouts by name, with its certificate                           certify, describe
modules_of              what launchers that know modules only can be told                             module_schemes
padding_offers          whether padding a parameter would pay                                         padding
pin_prices              what each pin costs                                                           pin_prices

All of them read one value, `Context`: the graph, the mesh, the options and the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autoshard.baselines import baseline as scheme_called
from autoshard.capture import capture_deep, in_turn
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import with_pins
from autoshard.graph import forward_blocks
from autoshard.mesh import Mesh
from autoshard.planning.baselining import masks_of, solve_baselines
from autoshard.planning.batches import align_batches
from autoshard.planning.certify import describe
from autoshard.planning.chunking import planned_in_chunks
from autoshard.planning.context import Context, Instance, instance_of
from autoshard.planning.demands import Demanded, allowed_by_pins
from autoshard.planning.microbatches import with_number_of_microbatches
from autoshard.planning.module_schemes import modules_of
from autoshard.planning.options import Demand, Infeasible, NoAnswer, Options, Progress, Stopwatch, checked_options
from autoshard.planning.ordering import planned_in_order
from autoshard.planning.overlapped import overlapped
from autoshard.planning.padding import padding_offers
from autoshard.planning.pin_prices import pin_prices
from autoshard.planning.recomputing import as_asked, cheapest, with_blocks_recomputed
from autoshard.planning.refusal import infeasible
from autoshard.planning.selecting import best_selected
from autoshard.planning.solving import solve_instance
from autoshard.solution import Solution, noted_choice
from autoshard.solvers import Answer, Status, solve
from autoshard.strategies import candidates, is_experts
from autoshard.units import seconds

KNOWN = "found a plan"  # what is said then; the command line keeps it on the screen
RECOMPUTE_GAP = 0.01  # relative: how well `auto` plans at least, the numbers of blocks that it compares and the one that it chooses

OF_TRAINING = ("optimizer", "master_weights", "recompute", "accumulation_dtype")  # options that a forward pass has no use for
BLOCKWISE = "blocks: single tensors are chosen for objective=serial without tie_blocks"


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
    """The fastest layout of every tensor of `model` on `mesh` that fits in memory, with its proof.

    model, example_inputs: a module and the inputs of its forward (a tuple, or a dict of keyword arguments); the meta device
    costs no memory. options: the fields of `Options` (training, optimizer, memory_limit in bytes per device, pins, forbid, keep,
    price_pins, solver, time_limit in seconds, gap, baselines, recompute, tie_blocks). progress: called with (what is being done,
    fraction done). assumptions: more facts to note in the solution. watch: the clock, by default of wall seconds. on_plan: called with
    the plan before what is beside it is worked out (schemes of modules, padding, prices of pins). Threads plan in turn. ValueError on bad
    input; `Infeasible` when nothing fits, with the demands that conflict.

    time_limit is for all of planning: the search ends then, and what is worked out beside the plan. Capture and pricing can't be
    shortened; where they take longer, the answer is the first plan that is found within three seconds more.

        solution = plan(module, (tokens, targets), Mesh.from_bandwidths((2, 4)), training=True, memory_limit=80e9)
    """
    checked = checked_options(Options, options)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {type(mesh).__name__}; expected an autoshard.Mesh, for example Mesh.from_bandwidths((2, 4))")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    clock = watch or Stopwatch(progress)
    with clock.phase("capture", "capturing the model", 0.0), no_search_for_cycles():
        graph, depth = capture_deep(model, example_inputs, training=checked.training, precision=checked.precision, witness=checked.witness)
    return plan_captured(Context(graph, mesh, checked, clock, {**(assumptions or {}), **depth.noted}, depth.shallow, on_plan=on_plan))


def plan_captured(context: Context) -> Solution:
    """The plan in the order of the sequence and with as many blocks recomputed as asked for; with "blocks" the cheapest of those that fit,
    with "auto" per tensor. ValueError where an option has nothing in the model that it is about."""
    if (context.options.expert_imbalance or 1) > 1 and not any(map(is_experts, context.graph.ops)):
        raise ValueError(f"expert_imbalance is {context.options.expert_imbalance:g}, but the model has no experts; leave it out")
    for name in OF_TRAINING if not context.options.training else ():
        if (value := getattr(context.options, name)) != getattr(Options, name):
            raise ValueError(f"{name} is {value!r}, which has no effect on a forward pass; add training=True, or leave it out")
    return planned_in_order(with_number_of_microbatches(context), lambda ordered: planned_in_chunks(ordered, _plan_recomputing))


def _plan_recomputing(context: Context) -> Solution:
    options = context.options
    if options.recompute == "auto" and options.training and not options.tie_blocks and options.objective == "serial":
        return _plan_per_tensor(context)
    if options.recompute in ("auto", "blocks") and options.training:
        if options.recompute == "auto":
            context = replace(context, assumptions={**context.assumptions, "recompute_by": BLOCKWISE})
        return _plan_with_cheapest_recomputation(context)
    return plan_graph(as_asked(context))


def _plan_per_tensor(context: Context) -> Solution:
    """The plan in which each saved value is kept, recomputed or offloaded; where none fits, as with "blocks", which says why."""
    clock, options = context.clock, replace(context.options, gap=max(context.options.gap, RECOMPUTE_GAP))
    with clock.phase("solve", "choosing what to keep, recompute and offload", 0.4):
        selected = best_selected(replace(context, options=options))
    if selected is None:
        return _plan_with_cheapest_recomputation(context)
    best, answer = selected
    plain = replace(context, options=replace(options, recompute=0)).stepped()
    rows: dict[str, dict] = {}
    if options.baselines:
        with clock.phase("solve", "solving the baselines", 0.8):
            rows, _ = solve_baselines(plain, instance_of(plain, candidates(plain.graph, context.mesh)))
    problem = with_pins(best.formulated, allowed_by_pins(best.formulated, options))
    instance = Instance(best.formulated, problem)
    answer = align_batches(best.formulated, problem, answer, options.gap)
    noted = replace(plain, assumptions={**context.assumptions, **noted_choice(best.chosen, context.graph)})
    with clock.phase("describe", "writing the plan", 0.95), no_search_for_cycles():
        solution = describe(best.formulated, answer, noted.options, rows, noted.assumptions)
    advised = replace(noted, graph=best.formulated.graph, options=options, shallow=None)
    assert answer.choice is not None
    solution = _with_advice(advised, instance, answer, answer.choice, solution)
    return replace(solution, seconds=clock.seconds())


def _plan_with_cheapest_recomputation(context: Context) -> Solution:
    num_blocks = len(forward_blocks(context.graph))
    careful = replace(context.options, gap=max(context.options.gap, RECOMPUTE_GAP))
    quick = replace(careful, baselines=False, objective="serial", solver="prices" if careful.solver == "auto" else careful.solver)

    def plan_with(k: int, options: Options) -> Solution:
        on_plan = None if options is not careful else context.on_plan
        context_k = with_blocks_recomputed(replace(context, options=options, on_plan=on_plan), k, num_blocks)
        return plan_graph(replace(context_k, explains=k == num_blocks))

    quick_plans: dict[int, Solution] = {}

    def quick_plan(k: int) -> Solution | None:
        until = context.within(1 / 4).options.time_limit  # the careful plan needs time too
        try:
            quick_plans[k] = plan_with(k, replace(quick, time_limit=until))
        except Infeasible:
            return None
        return quick_plans[k]

    best = cheapest(num_blocks, quick_plan)
    try:
        return plan_with(num_blocks if best is None else best, careful)
    except Infeasible as error:
        if best is not None:
            return quick_plans[best]
        if isinstance(error, NoAnswer):
            raise
        sentence = f"{error}, with all {num_blocks} blocks recomputed"
        raise Infeasible(sentence, error.smallest_limit, error.conflict, error.minimal) from None


def plan_graph(context: Context) -> Solution:
    """The plan of the context's graph as it is, all steps in their order."""
    context = context.stepped()
    clock, options = context.clock, context.options
    with clock.phase("candidates", "listing layouts", 0.3), no_search_for_cycles():
        layouts = candidates(context.graph, context.mesh)
    with clock.phase("formulate", "pricing layouts", 0.35), no_search_for_cycles():
        instance = instance_of(context, layouts)
    with clock.phase("solve", "solving the baselines", 0.4):
        rows, starts = solve_baselines(context, instance) if options.baselines else ({}, [])
    with clock.phase("solve", "solving", 0.55):
        answer = solve_instance(context, instance, starts)
    if answer.choice is None:
        if answer.status is not Status.INFEASIBLE:
            answer.in_passing()  # after Ctrl-C without any plan
        raise infeasible(context, instance, answer)
    if options.objective == "overlapped":
        return _overlapped(context, instance, answer, rows, starts)
    answer = align_batches(instance.formulated, instance.problem, answer, options.gap)
    with clock.phase("describe", "writing the plan", 0.95), no_search_for_cycles():
        solution = describe(instance.formulated, answer, options, rows, context.assumptions)
    if not answer.interrupted:
        assert answer.choice is not None
        solution = _with_advice(context, instance, answer, answer.choice, solution)
    return replace(solution, seconds=clock.seconds())


def _overlapped(
    context: Context, instance: Instance, serial: Answer, rows: Mapping[str, dict], starts: Sequence[tuple[int, ...]]
) -> Solution:
    """The plan of the shortest time line. Prices of pins and offers of padding are differences of costs, those of the serial answer."""
    clock, options = context.clock, context.options
    with clock.phase("overlap", "solving for overlap", 0.6), no_search_for_cycles():
        shortest = overlapped(context, instance, serial, starts)
    with clock.phase("describe", "writing the plan", 0.95), no_search_for_cycles():
        solution = describe(instance.formulated, shortest.answer, options, rows, context.assumptions)
    solution = replace(solution, overlapped=shortest.to_dict(), status=shortest.status(options.gap).value)
    if not shortest.answer.interrupted:
        assert shortest.answer.choice is not None
        solution = _with_advice(context, instance, serial, shortest.answer.choice, solution)
    return replace(solution, seconds=clock.seconds())


def _with_advice(context: Context, instance: Instance, answer: Answer, choice: tuple[int, ...], solution: Solution) -> Solution:
    """The plan with what is known beside it: schemes for launchers, offers of padding, prices of pins. Ctrl-C leaves out the rest, and so
    does the time limit."""
    clock, options = context.clock, context.options
    if options.baselines or options.keep or options.price_pins:
        gap = f"within {solution.objective_gap:.2%} of the best" if solution.objective_gap < 1 else "with no useful bound"
        clock.say(f"{KNOWN} of {seconds(solution.objective_seconds)}{', overlapped' if solution.overlapped else ''}, {gap}", 0.95)
        if context.on_plan is not None:
            context.on_plan(replace(solution, seconds=clock.seconds()))
    try:
        if options.baselines:
            with clock.phase("describe", "pricing schemes of modules", 0.96), no_search_for_cycles():
                solution = replace(solution, modules=modules_of(context, instance, choice))
        if options.baselines and not options.recompute and not context.lacks_time_to_formulate():
            with clock.phase("padding", "pricing padded parameters", 0.97):
                offers = padding_offers(context, instance.formulated, answer.cost)
            solution = solution.noting(padding=offers) if offers else solution
        if options.keep or (options.price_pins and (options.pins or options.forbid)):
            with clock.phase("pins", "pricing the pins", 0.98):
                solution = solution.noting(pin_prices=pin_prices(context, instance, answer))
    except KeyboardInterrupt:  # the plan is known already
        pass
    return solution


def baseline_only(context: Context, name: str) -> Solution:
    """The plan of one baseline, its pins completed by the solver; the bound is that of the pinned problem."""
    context = context.stepped()
    clock, options = context.clock, context.options
    with clock.phase("candidates", "listing layouts", 0.3):
        layouts = candidates(context.graph, context.mesh)
    with clock.phase("formulate", "pricing layouts", 0.35):
        instance = instance_of(replace(context, shallow=None), layouts)
        baseline = scheme_called(instance.formulated.graph, instance.formulated.mesh, layouts, name)
        masks = masks_of(instance.formulated, baseline)
        scheme = Demanded(Demand("algo", value=name), masks)
        costs = tuple(map(np.maximum, instance.problem.node_costs, with_pins(instance.formulated, masks).node_costs))
        instance = replace(instance, problem=replace(instance.problem, node_costs=costs), scheme=scheme)
    with clock.phase("solve", f"completing {name}", 0.5):
        preference = instance.formulated.preference
        answer = solve(
            instance.problem, solver=options.solver, time_limit=context.seconds_left(), clock=clock.now, gap=options.gap,
            preference=preference,
        )  # fmt: skip
    if answer.choice is None:
        raise infeasible(context, instance, answer)
    assumptions = {**context.assumptions, "pinned_to": name, "matched": baseline.matched}
    solution = describe(instance.formulated, answer, options, {}, assumptions)
    return replace(solution, modules=modules_of(context, instance, answer.choice), seconds=clock.seconds())
