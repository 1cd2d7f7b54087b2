"""The hidden values of experts in a training step: kept between forward and backward, or computed again.

Kept they save the first matmul of the backward and need memory. So plans keep them; where no such plan fits, or where its peak shows that
the memory limit binds, plans that compute them again are looked for too, and the faster plan is the answer. With recomputation they are not
kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from autoshard.graph import with_hidden_values
from autoshard.planning.question import Question
from autoshard.planning.variants import Tried, Variant, is_short


def hidden_values(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
    """Kept, and where memory is short computed again; only as the graph has them where it has none to keep, or something is recomputed."""
    limit, again = question.options.memory_limit, Variant("hidden values of experts computed again", competes=True)
    parts = question.mesh.num_devices
    if question.options.recompute == 0 and with_hidden_values(question.graph, parts) is not question.graph:
        explains = question.explains and limit is None
        yield Variant(
            "hidden values of experts kept",
            lambda part: replace(part, explains=explains).map(partial(with_hidden_values, parts=parts), hidden_values=parts),
        )
        if not is_short(question, tried[-1]):
            return
    yield again
