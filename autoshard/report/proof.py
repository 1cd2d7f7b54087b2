"""What is proven about a plan, in words. "Optimal" is said only where no plan is better at all; a gap that was asked for is said as it is.

optimal     no plan is better; gap 0
proven      no plan is better by more than the gap that was asked for; a file says "optimal" with its gap
feasible    the gap is larger than that
unjudged    layouts without a cost
"""

import math
from collections.abc import Mapping

from autoshard.solution import ROUNDING, Solution
from autoshard.units import hundredths, seconds


def verdict(solution: Solution) -> str:
    """The status and the gap of the objective, which is named where it is not the serial one."""
    gap = solution.objective_gap
    shown = "no bound" if math.isinf(gap) else f"gap {gap if gap > ROUNDING else 0:.2g}"
    return f"{solution.verdict}, {shown}{' overlapped' if solution.overlapped else ''}"


def proof(solution: Solution) -> str:
    """A sentence."""
    if solution.status == "unjudged":
        return "layouts only: nothing is known about their cost"
    gap, said = solution.objective_gap, " with overlap" if solution.overlapped else ""
    if solution.overlapped and solution.status != "optimal":
        return f"the fastest with overlap that the search found; no plan is faster by more than {hundredths(gap)} % under these prices"
    return sentence(solution.status, gap, said)


def sentence(status: str, gap: float, said: str = "") -> str:
    """What a status and a relative gap say of all other plans."""
    if status != "optimal":
        return "the best found in the time given; a longer time limit may find a better one"
    return f"no plan is faster{said}{f' by more than {hundredths(gap)} %' if gap > ROUNDING else ''} under these prices"


def plan_card(solution: Solution) -> dict[str, str]:
    """The card of a page about one plan: its proof, and the bound where that is below the plan."""
    gap = solution.objective_gap
    bound = f"; the bound is {seconds(solution.objective_bound)}" if ROUNDING < gap < math.inf else ""
    return card(solution.status, gap, proof(solution) + bound)


def card(status: str, gap: float, words: str) -> dict[str, str]:
    """For a page: how far from the best a plan may be, in short and in a sentence, and a mood: good, open or none."""
    mood, short = "open", f"at most {hundredths(gap)}% from the best" if math.isfinite(gap) else "no bound"
    if status == "unjudged":
        mood, short = "none", "not judged"
    elif status == "optimal":
        mood, short = "good", f"within {hundredths(gap)}% of the best" if gap > ROUNDING else "proven best"
    return {"mood": mood, "short": short, "long": words + "."}


def overlapped_words(solution: Solution) -> str:
    """The bound on the time line, and the serial plan's beside it."""
    serial = float(solution.overlapped["serial_plan_seconds"])
    beside = f"the plan of least cost takes {seconds(serial)} overlapped"
    return f"no plan takes less than {seconds(solution.objective_bound)} overlapped; {beside}"


def usual_verdict(row: Mapping) -> str:
    """The status of a usual plan: its scheme leaves layouts open, and these are completed to a small gap."""
    status = str(row.get("status", ""))
    return "proven" if status == "optimal" else status
