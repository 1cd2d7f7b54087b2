"""What a compiled step computes again in its backward pass of its own accord (strategies/partitioning.py).

Values that fused kernels alone read are computed again in any case: that is free, their kernels do it on their way. What a matmul reads is
kept; where no such plan fits, or where its peak shows that the memory limit binds, plans that compute that again, too, are looked for, as
torch.compile does always, and the faster plan is the answer. With recompute="auto" each tensor is chosen on its own.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from autoshard.graph import recompute_ops
from autoshard.planning.question import Question
from autoshard.planning.variants import Tried, Variant, is_short
from autoshard.strategies import Keeping, computed_again


def compilations(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
    """What matmuls read kept, and where memory is short computed again."""
    options = question.options
    if options.recompute == "auto" or not (options.compiled and options.training):
        yield Variant("as it is")
        return
    yield Variant("what matmuls read kept", lambda part: as_compiled(part.with_fallback()))
    if is_short(question, tried[-1]):
        yield Variant("all pointwise values computed again", partial(as_compiled, keeping=""), competes=True)


def as_compiled(question: Question, keeping: Keeping = "matmuls") -> Question:
    """The question about the step as it is compiled; the same where it isn't."""
    if not (question.options.compiled and question.options.training):
        return question
    graph, few = question.graph, question.model.few_layers
    again = {id(one): computed_again(one, keeping) for one in (graph, few) if one is not None}
    return question.map(lambda one: recompute_ops(one, again[id(one)]), computed_again=sorted(again[id(graph)]))
