"""The order of things: a model and a mesh in, a Solution out.

graph, _  = capture_deep(model, example_inputs)                   what is computed (few layers are captured, then tiled)
found     = candidates(graph, mesh)                               what layouts each op may take
formulated = formulate(graph, found, mesh)                        what each choice costs, in numbers
answer    = solve(formulated.problem)                             the best choice, with a proof
solution  = describe(formulated, answer)                          layouts by name again
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from autoshard.baselines import allowed, baselines
from autoshard.capture import capture_deep, in_turn
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, Training, formulate, with_pins
from autoshard.graph import Graph, checkpointed, forward_blocks
from autoshard.mesh import Mesh
from autoshard.planning.baselining import BASELINE_SECONDS, scheme_price, solve_baselines
from autoshard.planning.batches import alike
from autoshard.planning.certify import describe
from autoshard.planning.conflicts import priced
from autoshard.planning.demands import Demanded
from autoshard.planning.demands import allowed_by_pins as allowed_by_pins
from autoshard.planning.module_schemes import modules_of
from autoshard.planning.options import Demand as Demand
from autoshard.planning.options import Infeasible as Infeasible
from autoshard.planning.options import Options as Options
from autoshard.planning.options import Progress as Progress
from autoshard.planning.options import Stopwatch as Stopwatch
from autoshard.planning.options import checked_options as checked_options
from autoshard.planning.padding import padding_offers
from autoshard.planning.recomputing import cheapest
from autoshard.planning.refusal import infeasible, searched_seconds
from autoshard.planning.shallow import Shallow, correspondence
from autoshard.planning.tying import solve_tied
from autoshard.problem import Problem
from autoshard.solution import Solution
from autoshard.solvers import Answer, Status, solve
from autoshard.strategies import Candidates, candidates


@in_turn
def plan(
    model: torch.nn.Module,
    example_inputs: Any,
    mesh: Mesh,
    *,
    progress: Progress | None = None,
    assumptions: Mapping | None = None,
    **options: Any,
) -> Solution:
    """The fastest layout of every tensor of `model` on `mesh` that fits in memory, with its proof.

    model, example_inputs: a module and what its forward takes (a tuple, or a dict of keyword arguments); the meta device
    costs no memory. options: the fields of `Options` (training, optimizer, memory_limit in bytes per device, pins, forbid, keep,
    price_pins, solver, time_limit in seconds, gap, baselines, recompute, tie_blocks). progress: called with (what is being done,
    fraction done). assumptions: more facts to note in the solution. Threads plan in turn. ValueError on bad input; `Infeasible` when
    nothing fits, with the demands that conflict.

        solution = plan(module, (tokens, targets), Mesh.from_bandwidths((2, 4)), training=True, memory_limit=80e9)
    """
    checked = checked_options(Options, options)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {type(mesh).__name__}; expected an autoshard.Mesh, for example Mesh.from_bandwidths((2, 4))")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    watch = Stopwatch(progress)
    with watch.phase("capture", "capturing the model", 0.0), no_search_for_cycles():
        graph, depth = capture_deep(model, example_inputs, training=checked.training, witness=checked.witness)
    noted = {**(assumptions or {}), **depth.noted}
    return plan_captured(graph, mesh, checked, watch, noted, depth.shallow)


def plan_captured(
    graph: Graph, mesh: Mesh, options: Options, watch: Stopwatch, assumptions: Mapping, shallow: Graph | None = None
) -> Solution:
    """The plan with as many blocks recomputed as asked for; with "auto" the cheapest of those that fit."""
    if not (options.recompute and options.training):
        thrifty = partial(_all_recomputed, graph) if options.training else None
        return plan_graph(graph, mesh, replace(options, recompute=0), watch, assumptions, shallow, thrifty=thrifty)
    num_blocks = len(forward_blocks(graph))
    auto = options.recompute == "auto"
    if auto:
        options = replace(options, gap=max(options.gap, RECOMPUTE_GAP))
    quick = replace(options, baselines=False, solver="prices" if options.solver == "auto" else options.solver)

    def of(k: int, options: Options = options) -> Solution:
        few = None if shallow is None else checkpointed(shallow, k) if k == 0 else None
        if shallow is not None and k == num_blocks:
            few = checkpointed(shallow, len(forward_blocks(shallow)))
        thrifty = partial(_all_recomputed, graph) if k < num_blocks and not auto else None
        chosen, explained = replace(options, recompute=k), k == num_blocks or not auto
        return plan_graph(checkpointed(graph, k), mesh, chosen, watch, assumptions, few, thrifty=thrifty, explained=explained)

    def planned(k: int) -> Solution | None:
        try:
            return of(k, quick)
        except Infeasible:
            return None

    if not auto:
        return of(num_blocks if options.recompute == "all" else min(int(options.recompute), num_blocks))
    best = cheapest(num_blocks, planned)
    try:
        return of(num_blocks if best is None else best)
    except Infeasible as error:
        said = f"{error}, with all {num_blocks} blocks recomputed"
        raise Infeasible(said, error.smallest_limit, error.conflict, error.minimal) from None


def _all_recomputed(graph: Graph) -> Graph | None:
    """None where the model has no repeated blocks."""
    blocks = len(forward_blocks(graph))
    return checkpointed(graph, blocks) if blocks else None


def plan_graph(
    graph: Graph,
    mesh: Mesh,
    options: Options,
    watch: Stopwatch,
    assumptions: Mapping,
    shallow: Graph | None = None,
    *,
    thrifty: Callable[[], Graph | None] | None = None,
    explained: bool = True,
) -> Solution:
    """The plan of a graph. shallow: the same model with fewer layers, whose plan then is where the search starts.

    thrifty: makes the graph with every block recomputed, to see whether that would fit where nothing does. explained: False where nobody
    will ask why nothing fits.
    """
    with watch.phase("candidates", "listing layouts", 0.3), no_search_for_cycles():
        found = candidates(graph, mesh)
    with watch.phase("formulate", "pricing layouts", 0.35), no_search_for_cycles():
        formulated = formulate_for(graph, found, mesh, options)
        problem = with_pins(formulated, allowed_by_pins(formulated, options))
        few = None if shallow is None or options.solver != "auto" else stretched(formulated, shallow, options)
    judged: dict[str, dict] = {}
    with watch.phase("solve", "solving the baselines", 0.4):
        starts = solve_baselines(formulated, problem, options, watch, judged, few) if options.baselines else []
    with watch.phase("solve", "solving", 0.55):
        answer = _solve(formulated, problem, options, watch, starts, few)
    if answer.choice is None:
        if answer.status is not Status.INFEASIBLE:
            answer.in_passing()  # nothing is known that could be the answer
        raise _refused(formulated, problem, answer, options, watch, thrifty=thrifty, explained=explained)
    answer = alike(formulated, problem, answer, options.gap)
    assert answer.choice is not None
    with watch.phase("describe", "writing the plan", 0.95), no_search_for_cycles():
        solution = describe(formulated, answer, options, judged, assumptions)
    if not answer.interrupted:
        try:
            for added in _beside(formulated, answer, options, watch, few):
                solution = added(solution)
        except KeyboardInterrupt:  # the plan is known, and this was only beside it
            pass
    return replace(solution, seconds=watch.seconds())


def _beside(
    formulated: Formulation, answer: Answer, options: Options, watch: Stopwatch, few: Shallow | None
) -> Iterator[Callable[[Solution], Solution]]:
    """What a plan tells beside itself: what is usual for its modules, whether padding pays, what pins cost. Each as what adds it."""
    mesh, choice = formulated.mesh, answer.choice
    assert choice is not None
    if options.baselines:
        with watch.phase("describe", "pricing schemes of modules", 0.96), no_search_for_cycles():
            modules = modules_of(formulated, choice, partial(scheme_price, formulated, few))
        yield lambda solution: replace(solution, modules=modules)
    if options.baselines and not options.recompute:
        with watch.phase("padding", "pricing padded parameters", 0.97):
            offers = padding_offers(formulated, answer.cost, lambda padded, found: _best(padded, found, mesh, options))
        if offers:
            yield lambda solution: replace(solution, assumptions={**solution.assumptions, "padding": offers})
    if options.keep or (options.price_pins and (options.pins or options.forbid)):
        with watch.phase("pins", "pricing the pins", 0.98):
            said = partial(_say, watch, "pricing the pins", 0.98)
            best = partial(_solve, options=options, watch=watch, starts=[choice], few=few)
            rows = priced(formulated, options, answer, lambda free: best(formulated, free).in_passing(), said)
        yield lambda solution: replace(solution, assumptions={**solution.assumptions, "pin_prices": rows})


def _refused(
    formulated: Formulation,
    problem: Problem,
    answer: Answer,
    options: Options,
    watch: Stopwatch,
    *,
    thrifty: Callable[[], Graph | None] | None = None,
    explained: bool = True,
    also: Sequence[Demanded] = (),
) -> Infeasible:
    spared = None if thrifty is None or options.memory_limit is None or not explained else thrifty()
    mesh = formulated.mesh
    again = None if spared is None else lambda: formulate_for(spared, candidates(spared, mesh), mesh, options)
    left = max(options.time_limit - (time.monotonic() - watch.began), 0.1)
    with watch.phase("refuse", "looking for what conflicts", 0.9):
        said = partial(_say, watch, "looking for what conflicts", 0.9)
        return infeasible(
            formulated, problem, answer, options, also=also, thrifty=again, explained=explained, seconds=left, tested=said
        )  # fmt: skip


def _say(watch: Stopwatch, what: str, fraction: float, which: object) -> None:
    if watch.progress is not None:
        watch.progress(f"{what}: {which}", fraction)


RECOMPUTE_GAP = 0.01  # relative: how well `auto` plans at least, the numbers of blocks that it compares and the one that it takes
PADDING_GAP = 1e-4  # relative, of the plan of a padded model


def _best(graph: Graph, found: Candidates, mesh: Mesh, options: Options) -> float | None:
    """The cost of the best plan of a graph, nothing else about it."""
    formulated = formulate_for(graph, found, mesh, options)
    answer = solve(
        with_pins(formulated, allowed_by_pins(formulated, options)), solver=options.solver, time_limit=BASELINE_SECONDS, gap=PADDING_GAP
    ).in_passing()
    return answer.cost if answer.choice is not None else None


def _solve(
    formulated: Formulation, problem: Problem, options: Options, watch: Stopwatch, starts: list[tuple[int, ...]], few: Shallow | None
) -> Answer:
    left = max(options.time_limit - (time.monotonic() - watch.began), 0.1)
    given: dict[str, Any] = {"time_limit": left, "gap": options.gap, "progress": _solver_progress(watch)}
    given["preference"] = formulated.preference
    if options.tie_blocks:
        return solve_tied(formulated, problem, solver=options.solver, **given)
    given["patience"] = searched_seconds(options)
    if few is not None:
        return few.solve(problem, starts=starts, **given)
    return solve(problem, solver=options.solver, starts=starts, **given)


def stretched(formulated: Formulation, shallow: Graph, options: Options) -> Shallow | None:
    """The problem of fewer layers and how it stretches to this one; None where something in it has no like."""
    small = formulate_for(shallow, candidates(shallow, formulated.mesh), formulated.mesh, options)
    try:
        return Shallow(small, correspondence(formulated, small))
    except ValueError:  # not an error: the deep problem is solved from scratch
        return None


def formulate_for(graph: Graph, found: Candidates, mesh: Mesh, options: Options) -> Formulation:
    training = Training(options.optimizer, options.master_weights) if any(r.kind == "gradient" for r in graph.results) else None
    return formulate(graph, found, mesh, training=training, memory_limit=options.memory_limit)


def _solver_progress(watch: Stopwatch) -> Callable[[float, float], None] | None:
    if watch.progress is None:
        return None
    report = watch.progress

    def show(cost: float, bound: float) -> None:
        gap = (cost - bound) / cost if cost and math.isfinite(cost) and math.isfinite(bound) else math.inf
        report(f"solving: best {cost * 1e3:.3f} ms, proven within {gap:.2%}" if math.isfinite(gap) else "solving", 0.6)

    return show


def baseline_only(graph: Graph, mesh: Mesh, options: Options, watch: Stopwatch, assumptions: Mapping, name: str) -> Solution:
    """The plan of one baseline, its pins completed by the solver; the bound is that of the pinned problem."""
    with watch.phase("candidates", "listing layouts", 0.3):
        found = candidates(graph, mesh)
    with watch.phase("formulate", "pricing layouts", 0.35):
        formulated = formulate_for(graph, found, mesh, options)
        chosen = next(b for b in baselines(graph, mesh, found) if b.name == name)
        problem = with_pins(formulated, allowed_by_pins(formulated, options))
        kept = {node: np.array(keep) for node, keep in allowed(chosen.pins, graph, found).items()}
        scheme = Demanded(Demand("algo", value=name), kept)
        pinned = replace(problem, node_costs=tuple(map(np.maximum, problem.node_costs, with_pins(formulated, scheme.allowed).node_costs)))
    with watch.phase("solve", f"completing {name}", 0.5):
        answer = solve(pinned, solver=options.solver, time_limit=options.time_limit, gap=options.gap, preference=formulated.preference)
    if answer.choice is None:
        raise _refused(formulated, pinned, answer, options, watch, also=[scheme])
    solution = describe(formulated, answer, options, {}, {**assumptions, "pinned_to": name, "matched": chosen.matched})
    modules = modules_of(formulated, answer.choice, partial(scheme_price, formulated, None))
    return replace(solution, modules=modules, seconds=watch.seconds())
