"""Whether a model computes in eval mode what it computes in training mode without dropout, so that one program serves both modes.

Dropout is native_dropout, attention with dropout, and x * m where m is drawn by bernoulli and divided by a number; without it, such a
product is x. All other ops must be the same, on the same values.
"""

from collections.abc import Hashable

from autoshard.graph.records import Graph, Op, Ref, Value

DRAWN = "a mask, a multiple of it, or what it is written into"
SAME = ("aten.alias.default", "aten.detach.default", "aten.clone.default")
OF_MASK = (*SAME, "aten.div.Scalar", "aten.div.Tensor", "aten.view.default", "aten.expand.default")
DROPS = ("aten.native_dropout.default", "aten.bernoulli.p", "autoshard.dropout_attention.default")
WITH_DROPOUT = {"autoshard.dropout_attention.default": 3, "autoshard.dropout_attention_backward.default": 7}  # place of dropout_p


def is_without_dropout(evaluation: Graph, training: Graph) -> bool:
    """Whether the results of `evaluation`, which drops nothing, are those of `training` without its dropout."""
    numbers: dict[Hashable, int] = {}
    drops = any(op.target in DROPS for op in evaluation.ops)
    return not drops and _Terms(numbers).results(evaluation) == _Terms(numbers).results(training)


class _Terms:
    """Of each value of a graph a number: equal values have equal numbers. numbers: by what is computed, for several graphs."""

    def __init__(self, numbers: dict[Hashable, int]):
        self.numbers = numbers
        self.of: dict[Value, object] = {}

    def results(self, graph: Graph) -> dict[tuple[str, str], object]:
        for i, op in enumerate(graph.ops):
            inputs = [self.of[value] for value in op.inputs]
            for k, term in enumerate(self._outputs(op, inputs)):
                self.of[i, k] = term
        return {(r.kind, r.name): None if r.value is None else self.of[r.value] for r in graph.results}

    def _outputs(self, op: Op, inputs: list) -> list:
        if op.is_placeholder:
            return [self._number(op.kind, op.name)]
        if op.target == "aten.native_dropout.default":
            return [inputs[0], DRAWN]
        if op.target == "aten.native_dropout_backward.default" or op.target in SAME:
            return [inputs[0]]
        if op.target == "aten.bernoulli.p" or (op.target in OF_MASK and inputs[0] == DRAWN):
            return [DRAWN]
        if op.target == "aten.mul.Tensor" and DRAWN in inputs:
            return [next((term for term in inputs if term != DRAWN), DRAWN)]
        terms = self._call(op, inputs)
        outputs = [self._number(terms, k) for k in range(len(op.outputs))]
        return [*outputs[:2], DRAWN] if op.target == "autoshard.dropout_attention.default" else outputs

    def _call(self, op: Op, inputs: list) -> int:
        """The op's function on its arguments; of attention without dropout_p, the mask that was drawn, and what is left out by default."""
        args, kwargs = op.literals
        target = op.target.replace("autoshard.dropout_", "autoshard.")
        if target.startswith("autoshard.attention"):
            place = WITH_DROPOUT.get(op.target, len(args))
            args = [x for k, x in enumerate(args) if k != place and not (isinstance(x, Ref) and inputs[x.index] == DRAWN)]
            while args[-1] in (None, False):
                args.pop()
            args = tuple(args)
        return self._number(target, _read(args, inputs), _read(kwargs, inputs))

    def _number(self, *what: Hashable) -> int:
        return self.numbers.setdefault(what, len(self.numbers))


def _read(item: object, inputs: list) -> Hashable:
    """Literals with the numbers of what they refer to."""
    if isinstance(item, tuple):
        return tuple(_read(part, inputs) for part in item)
    return ("value", inputs[item.index]) if isinstance(item, Ref) else repr(item)
