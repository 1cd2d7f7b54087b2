"""Cross entropy in chunks of tokens for a whole model: whether a plan needs it.

    "auto"      where no plan fits with all logits of a loss at once, and they are many: more than a chunk's tokens for each device, whose
                logits take more than LARGE of the memory limit
    "always"    in every loss that can be chunked
    "never"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.graph import ROWS, chunked_loss, losses_of
from autoshard.planning.context import Context
from autoshard.planning.options import Infeasible, NoAnswer
from autoshard.solution import Solution

LARGE = 0.02


def planned_in_chunks(context: Context, plan: Callable[[Context], Solution]) -> Solution:
    """The plan with its losses in chunks or not, as the options ask for. ValueError where "always" finds no loss that can be chunked."""
    wanted = context.options.chunked_loss
    if wanted == "always" and not losses_of(context.graph):
        raise ValueError(
            "chunked_loss is 'always', but the model has no training loss that can be chunked: a cross entropy, without class weights, "
            "of a matmul whose result nothing else reads or returns; leave the option out"
        )
    if wanted == "always":
        return plan(_chunked(context))
    if wanted == "never" or not _has_many_logits(context):
        return plan(context)
    try:
        return plan(replace(context, explains=False))
    except NoAnswer:
        raise
    except Infeasible:
        return plan(_chunked(context))


def _chunked(context: Context) -> Context:
    shallow = None if context.shallow is None else chunked_loss(context.shallow, ROWS)
    assumptions = {**context.assumptions, "chunked_loss": ROWS}
    return replace(context, graph=chunked_loss(context.graph, ROWS), shallow=shallow, assumptions=assumptions)


def _has_many_logits(context: Context) -> bool:
    limit, devices = context.options.memory_limit, context.mesh.num_devices
    if limit is None or not context.options.training:
        return False
    logits = [context.graph.tensor((loss.softmax, 0)) for loss in losses_of(context.graph)]
    return any(one.shape[0] > ROWS * devices and one.bytes / devices > LARGE * limit for one in logits)
