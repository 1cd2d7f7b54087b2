"""The report of a plan as one HTML page, with a simulated time line where the model is known."""

from collections.abc import Mapping
from typing import Any

import torch

from autoshard.api.simulating import simulate
from autoshard.planning import Progress, Stopwatch
from autoshard.report import html
from autoshard.solution import AnyPlan, ProgramsSolution, Solution


def html_report(
    solution: AnyPlan,
    model: torch.nn.Module | None = None,
    example_inputs: Any = None,
    *,
    frontier: Mapping | None = None,
    no_model: str = html.NO_MODEL,
    progress: Progress | None = None,
) -> str:
    """A plan as one HTML page that stands alone: no network, no library. Of several programs: what sharing costs each of them. Of a
    pipeline: its stages over time.

    model, example_inputs: what the plan is for, built on the meta device; without them there is no time line, no memory over time and
    no ops, and no_model (the end of a sentence) says why. frontier: memory against seconds, as `Frontier.to_dict` and files have
    it. ValueError where the plan is of another model, or the frontier is none.
    """
    if isinstance(solution, ProgramsSolution) and (model is not None or frontier is not None):
        raise ValueError(f"the plan is of several programs; for a time line or a frontier pass one of them: {', '.join(solution)}")
    if not isinstance(solution, Solution):
        return html.html_report(solution)
    report = Stopwatch(progress).say
    timeline = None if model is None else simulate(model, example_inputs, solution, progress=lambda message, f: report(message, 0.8 * f))
    report("writing the page", 0.9)
    return html.html_report(solution, timeline, frontier, no_model=no_model)
