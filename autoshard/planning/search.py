"""The search over variants of a question: one loop, which divides the time, drops refusals and ends with Ctrl-C.

To add a kind of variant, write its function in a file of its own (variants.py) and name it in KINDS.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autoshard.cycles import no_search_for_cycles
from autoshard.planning.baselining import solve_baselines
from autoshard.planning.batches import align_batches
from autoshard.planning.compiling import compilations
from autoshard.planning.describe import described
from autoshard.planning.instance import instance_of
from autoshard.planning.options import Infeasible, NoAnswer
from autoshard.planning.ordering import orders
from autoshard.planning.overlapped import GAP, overlapped
from autoshard.planning.question import Question
from autoshard.planning.recomputing import blocks_recomputed, chunks, hidden_values, recomputations
from autoshard.planning.refusal import of_last_resort
from autoshard.planning.selecting import answered_per_tensor
from autoshard.planning.solving import solve_or_refuse
from autoshard.planning.variants import FULL, Answered, Kind, Tried
from autoshard.planning.warm_starts import start_from
from autoshard.solvers import TIME_LIMIT

Solve = Callable[[Question], Answered]
# the variants of a kind are tried under each of those before it
KINDS: tuple[Kind, ...] = (orders, chunks, hidden_values, recomputations, compilations)
SHARE = 0.5  # of a time limit, for the plan of the sum of all seconds, where the shortest time line is wanted


def search(question: Question, kinds: Sequence[Kind] = KINDS, solve: Solve | None = None) -> Answered:
    """The answer to the question in the best variant of every kind; its bound is that of this variant. solve: what answers a variant.

    Of a kind the last variant that it yields is the answer; where that one competes with those before, has no plan, or Ctrl-C ends the
    search, the cheapest of all. `Infeasible` where none of them has a plan, KeyboardInterrupt where none is known yet.
    """
    if not kinds:
        return (solve or answered)(question)
    tried: list[Tried] = []
    for one in trials(question, kinds, tried, solve):
        if one.is_interrupted:
            return _best(tried).as_interrupted()
    return _best(tried)


def trials(
    question: Question, kinds: Sequence[Kind], tried: list[Tried], solve: Solve | None = None
) -> Iterator[Tried]:  # fmt: skip
    """What becomes of each variant of the first kind, in the best variants of the others; all that became of them are in `tried`."""
    for variant in kinds[0](question, tried):
        part = variant.transform(question.within(variant.share))
        try:
            tried.append(Tried(variant, part, search(part, kinds[1:], solve)))
        except Infeasible as error:
            named = variant.is_last_resort and not isinstance(error, NoAnswer)
            others = {one.variant.note: one.refusal for one in tried if one.refusal is not None}
            tried.append(Tried(variant, part, refusal=of_last_resort(error, variant.note, others) if named else error))
        except KeyboardInterrupt:
            tried.append(Tried(variant, part))
        yield tried[-1]


def _best(tried: Sequence[Tried]) -> Answered:
    last, known = tried[-1], [one.answered for one in tried if one.answered is not None]
    if last.answered is not None and not last.is_interrupted and not last.variant.competes:
        return last.answered
    if known:
        return min(known, key=lambda one: one.seconds)
    if last.refusal is not None:
        raise last.refusal
    raise KeyboardInterrupt


def answered(question: Question) -> Answered:
    """The fastest plan of the question's graph, or with recompute="auto" of those that get each saved value in some way; in the shortest
    time line for the objective "overlapped". `Infeasible` where nothing fits."""
    if question.options.objective == "overlapped" and question.mesh.cost_model is not None:
        raise ValueError("a time line needs seconds that no cost_model states, of joined collectives; plan with objective='serial'")
    best = _of_all_seconds(question)
    if question.options.objective == "overlapped":
        if question.on_plan is not None:  # that of the sum of all seconds, until the search for the shortest time line has ended
            question.on_plan(described(best))
        with question.clock.phase("overlap", "solving for overlap", 0.6), no_search_for_cycles():
            return replace(best, overlapped=overlapped(best.question, best.instance, best.answer, best.starts))
    if question.options.recompute == "auto":
        return best
    formulated, problem = best.instance.formulated, best.instance.problem
    return replace(best, answer=align_batches(formulated, problem, best.answer, question.options.gap))


def _of_all_seconds(question: Question) -> Answered:
    """The best plan of tasks one after the other. For the shortest time line it is a begin: proven to GAP, or to the gap that is accepted
    after some time, and in a share of a time limit."""
    options = question.options
    is_auto = options.recompute == "auto"
    plan_of = answered_per_tensor if is_auto else best_choice
    if options.objective != "overlapped":
        return plan_of(question)
    gap = max(options.gap, options.accepted[0], GAP if question.mesh.num_devices > 1 else 0.0)  # of one device its bound is the last word
    roughly, has_limit = question.with_options(gap=gap), options.time_limit != TIME_LIMIT
    try:
        best = plan_of(roughly.within(SHARE) if has_limit else roughly)
    except Infeasible as error:
        if question.has_fallback or not (has_limit and isinstance(error, NoAnswer)):
            raise
        best = plan_of(roughly)
    is_free = options.memory_limit is None or (best.answer.peak or math.inf) <= FULL * options.memory_limit
    if is_auto and is_free and best.recomputes:
        best = _with_all_kept(roughly, best)
    return replace(best, question=best.question.with_options(time_limit=options.time_limit, gap=options.gap))


def _with_all_kept(question: Question, best: Answered) -> Answered:
    """What a plan recomputes where memory is free replaces traffic, which the time line hides: so the plan without, where that fits."""
    try:
        return best_choice(blocks_recomputed(question.with_options(recompute=0)))
    except Infeasible:
        return best


def best_choice(question: Question, *, share: float = 1.0) -> Answered:
    """The best choice for the question's graph, of tasks one after the other. share: of the time left, for the search."""
    question = question.stepped()
    clock, instance = question.clock, instance_of(question)
    with clock.phase("solve", "solving the baselines", 0.4):
        rows, starts = solve_baselines(question, instance) if question.options.baselines else ({}, [])
        starts += [start for plan in question.known if (start := start_from(instance.formulated, plan)) is not None]
    with clock.phase("solve", "solving", 0.55):
        answer = solve_or_refuse(question, instance, starts, share=share)
    return Answered(question, instance, answer, rows, starts)
