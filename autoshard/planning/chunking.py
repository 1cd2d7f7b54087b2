"""Cross entropy in chunks of tokens for a whole model: whether a plan needs it.

"auto"      where no plan fits with all logits of a loss at once, and they are many: more than a chunk's tokens for each device, whose
            logits take more than LARGE of the memory limit
"always"    in every loss that can be chunked
"never"
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.graph import ROWS, chunked_loss, losses_of
from autoshard.planning.question import Question
from autoshard.planning.variants import Tried, Variant

LARGE = 0.02


def chunks(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
    """All logits of a loss at once, or some at a time, as the options ask for. ValueError where "always" finds no loss to be chunked."""
    wanted = question.options.chunked_loss
    if wanted == "always" and not losses_of(question.graph):
        raise ValueError(
            "chunked_loss is 'always', but the model has no training loss that can be chunked: a cross entropy, without class weights, "
            "of a matmul whose result nothing else reads or returns; leave the option out"
        )
    if wanted != "always":
        may_chunk = wanted == "auto" and _has_many_logits(question)
        yield Variant("all logits at once", lambda part: replace(part, explains=part.explains and not may_chunk))
        if not (may_chunk and tried[-1].has_no_plan):
            return
    yield Variant("logits in chunks", lambda part: part.map(lambda graph: chunked_loss(graph, ROWS), chunked_loss=ROWS))


def _has_many_logits(question: Question) -> bool:
    limit, devices = question.options.memory_limit, question.mesh.num_devices
    if limit is None or not question.options.training:
        return False
    logits = [question.graph.tensor((loss.softmax, 0)) for loss in losses_of(question.graph)]
    return any(one.shape[0] > ROWS * devices and one.bytes / devices > LARGE * limit for one in logits)
