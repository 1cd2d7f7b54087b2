"""What a compiled step computes again in its backward pass of its own accord (strategies/partitioning.py), as torch.compile does.

Pointwise results are computed again in any case: their kernels read most of what they need anyway. Norms whose results matmuls read are
kept; where no such plan fits, or where its peak shows that the memory limit binds, plans that compute them again are looked for too, and
the faster plan is the answer. With recompute="auto" each tensor is chosen on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from autoshard.graph import recompute_ops
from autoshard.planning.question import Question
from autoshard.planning.variants import Tried, Variant, is_short
from autoshard.strategies import computed_again


def compilations(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
    """Of a compiled step norms kept, and where memory is short computed again, too."""
    if question.options.recompute == "auto":
        yield Variant("each value as it is chosen")
        return
    yield Variant("norms kept", as_compiled)
    if as_compiled(question) is not question and is_short(question, tried[-1]):
        yield Variant("norms computed again", partial(as_compiled, norms=True), competes=True)


def as_compiled(question: Question, norms: bool = False) -> Question:
    """The question about the step as it is compiled; the same where it isn't."""
    if not (question.options.compiled and question.options.training):
        return question
    graph, names = question.graph, computed_again(question.graph, norms)
    again = {id(graph): names} if (few := question.model.few_layers) is None else {id(graph): names, id(few): computed_again(few, norms)}
    return question.map(lambda one: recompute_ops(one, again[id(one)]), computed_again=sorted(names))
