"""The sentence that says why there is no plan: conflicting demands, the smallest memory limit that works, or too short a time limit."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.formulate import Formulation
from autoshard.options import TIME_LIMIT
from autoshard.planning.conflicts import CONFLICT_SECONDS, Conflict, find_conflict
from autoshard.planning.instance import Instance
from autoshard.planning.options import Infeasible, NoAnswer, Options, bytes_text
from autoshard.planning.question import Question
from autoshard.problem import Problem
from autoshard.solvers import Answer, Infeasibility, Status

PATIENCE = 120.0  # seconds of search for a first plan, where no time limit is set
FIRST_SECONDS = 3.0  # of search for a first plan, at most the time limit, where capture and pricing leave less
ENDED = 0.9  # of the time: a search that ended before had nothing left to try
FEW = 6  # demands that the sentence names


def infeasible(question: Question, instance: Instance, answer: Answer) -> Infeasible:
    """The exception for an answer without a choice. It names the demands that conflict, where it is proven that no plan exists."""
    conflict = Conflict((), False)
    with question.clock.phase("refuse", "looking for what conflicts", 0.9):
        is_proven = answer.status is Status.INFEASIBLE and not question.is_over
        if question.explains and is_proven and isinstance(instance.formulated, Formulation):
            conflict = find_conflict(question, instance, seconds=min(question.seconds_left(), CONFLICT_SECONDS), now=question.clock.now)
    kind = Infeasible if answer.status is Status.INFEASIBLE else NoAnswer
    said = _why_nothing_fits(question, instance.problem, answer, conflict)
    return kind(said, smallest_limit(answer), conflict.demands, conflict.minimal)


def smallest_limit(answer: Answer) -> tuple[float, float] | None:
    """The smallest memory limit that works, as `Infeasible` has it; None where it isn't known, or none works."""
    why = answer.infeasibility
    return None if why is None or math.isinf(why.smallest_limit[0]) else why.smallest_limit


def reworded(error: Infeasible, message: str, smallest: tuple[float, float] | None = None) -> Infeasible:
    """The same refusal in other words, and with another smallest limit that works where it is given."""
    return type(error)(message, smallest or error.smallest_limit, error.conflict, error.minimal)


def of_last_resort(error: Infeasible, note: str, others: Mapping[str, Infeasible]) -> Infeasible:
    """The refusal of the last variant with its note, and with what another works in that was tried before: the note of it, its refusal."""
    said, smallest = f"{error}, {note}", error.smallest_limit
    for other, refusal in others.items():
        less = refusal.smallest_limit
        if less is not None and (smallest is None or less[1] < smallest[1]):
            said, smallest = f"{said}; {other} {bytes_text(less[1], up=True)} is enough", less
    return reworded(error, said, smallest)


def searched_seconds(options: Options) -> float:
    """Seconds of search for a first plan: the time limit that was set, else PATIENCE."""
    return min(options.time_limit, PATIENCE) if options.time_limit == TIME_LIMIT else options.time_limit


def patience(question: Question, left: float) -> float:
    """Seconds until a search without any plan ends. left: seconds, of the time limit."""
    options, share = question.options, 0.5 if question.has_fallback else 1.0
    return max(share * min(searched_seconds(options), left), min(FIRST_SECONDS, options.time_limit))


def _why_nothing_fits(question: Question, problem: Problem, answer: Answer, conflict: Conflict) -> str:
    """One sentence: what can't be met together; for a memory limit also the smallest one that works, and the tensors that hold most."""
    options, took = question.options, answer.seconds.get("total", math.inf)
    seconds = searched_seconds(options)
    longer = "raise the time limit" if seconds == options.time_limit else f"set a time limit above {seconds:g} s"
    why, blamed = answer.infeasibility, [d for d in conflict.demands if d.kind == "memory_limit"]
    if answer.status is not Status.INFEASIBLE and options.memory_limit is None:
        return f"no answer within {seconds:g} s: no plan was found, there may be one; {longer}"
    dear = next((name for name, costs in zip(problem.names, problem.node_costs) if not np.isfinite(costs).any()), None)
    if dear is not None and not (options.pins or options.forbid or options.keep):
        return f"every layout of {dear} costs inf: a registered price, a rule or the cost model forbids it"
    if options.memory_limit is None or (why is not None and math.isinf(why.smallest_limit[0])) or (conflict.demands and not blamed):
        return _forbidding(conflict)
    limit = bytes_text(options.memory_limit)
    if answer.status is not Status.INFEASIBLE:
        if not question.is_over and took < ENDED * patience(question, question.seconds_left() + took):  # more time is no advice
            return f"the search found no plan within {limit} per device, there may be one; raise the memory limit"
        said = f"no answer within {seconds:g} s: no plan within {limit} per device was found, there may be one"
        return f"{said}; raise the memory limit or {longer.removeprefix('raise ')}"
    if why is None:
        return f"no plan fits in {limit} per device; raise the memory limit"
    others = [d for d in conflict.demands if d.kind != "memory_limit"]
    return f"no plan fits in {limit} per device; {_smallest(problem, why)}" + (f"; {_against(others, conflict)}" if others else "")


def _smallest(problem: Problem, why: Infeasibility) -> str:
    low, high = why.smallest_limit
    if math.isinf(high):
        return f"the smallest limit that works is above {bytes_text(low)}"
    smallest = (
        f"the smallest limit that works is {bytes_text(high, up=True)}"
        if high - low <= 1e-3 * high
        else f"the smallest limit that works is between {bytes_text(low)} and {bytes_text(high, up=True)}"
    )
    holders = ", ".join(f"{problem.names[node]} {bytes_text(held)}" for node, held in why.nodes[:3])
    return smallest + (f" (largest there: {holders})" if holders else "")


def _against(others: Sequence, conflict: Conflict) -> str:
    """Which other demands could be taken away instead of raising the limit."""
    if conflict.minimal and [d.kind for d in others] == ["recompute"]:
        return f"with {others[0]} the limit is too small, with recompute=all there is a plan"
    one_of = "without it" if len(others) == 1 else "without any one of them"
    there_is = f"{one_of} there is a plan" if conflict.minimal else "take some of it away"
    return f"with {_listed(others)} the limit is too small, {there_is}"


def _forbidding(conflict: Conflict) -> str:
    if not conflict.demands:
        return "no plan exists under these pins: they forbid each other; take one away"
    if len(conflict.demands) == 1:
        return f"no plan exists under {conflict.demands[0]}; take it away"
    return f"no plan exists under {_listed(conflict.demands)}: they forbid each other; take one away"


def _listed(demands: Sequence) -> str:
    words = [str(d) for d in demands[:FEW]]
    if len(demands) > FEW:
        return f"{', '.join(words)} and {len(demands) - FEW} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
