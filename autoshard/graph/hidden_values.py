"""A graph whose experts keep their hidden values between forward and backward, and which computes what it computed before.

    forward     x, ids, weights, parameters -> y                          -> y, hidden
    backward    grad, x, ids, weights, parameters                         grad, x, ids, weights, parameters, hidden -> the same gradients

hidden [T k / E, E, F] has F numbers for each of the T k pairs of a token and one of its experts: its size does not depend on the routing.
Which pairs a rank has there only its own program knows: the value is private, and no route may change its layout. Experts whose number
times that of devices doesn't divide that of the pairs, or whose backward isn't the only one, stay as they are.
"""

from dataclasses import replace

from autoshard.graph.records import Graph, Op, Ref, Tensor, Value, grouped
from autoshard.graph.selective import OFFLOADED, RELOADED, SELECTED

KEEPING = {f"autoshard.{name}.default": f"autoshard.{name}_with_hidden.default" for name in ("experts", "biased_experts")}
READING = {old.replace(".default", "_backward.default"): new.replace(".default", "_backward.default") for old, new in KEEPING.items()}


def with_hidden_values(graph: Graph, parts: int) -> Graph:
    """The graph in which all such experts keep them; the same graph where there are none. parts: of equal size, into which hidden[0] can be
    divided: as many as there are devices, so that all shards of tokens remain possible."""
    pairs = _pairs(graph, parts)
    if not pairs:
        return graph
    ops = list(graph.ops)
    for i, j in pairs:
        ops[i], ops[j] = _keeping(graph, i), _reading(graph.ops[j], (i, 1))
    return replace(graph, ops=tuple(ops))


def private_values(graph: Graph) -> frozenset[Value]:
    """The values whose rows only the program of a rank knows, and what brings them back."""
    private: set[Value] = set()
    for i, op in enumerate(graph.ops):
        if op.target in KEEPING.values():
            private.add((i, 1))
        elif op.kind in (SELECTED, OFFLOADED, RELOADED) and op.inputs[0] in private:
            private.add((i, 0))
    return frozenset(private)


def _pairs(graph: Graph, parts: int) -> list[tuple[int, int]]:
    """Each forward of experts with its only backward."""
    ops = list(enumerate(graph.ops))
    forward = grouped((_key(graph, op.inputs, op), i) for i, op in ops if op.target in KEEPING and not op.backward)
    backward = grouped((_key(graph, op.inputs[1:], op), i) for i, op in ops if op.target in READING)
    both = [(forward[key][0], backward[key][0]) for key in forward if len(forward[key]) == len(backward.get(key, ())) == 1]
    sizes = ((graph.tensor(graph.ops[i].inputs[1]).numel, graph.tensor(graph.ops[i].inputs[3]).shape[0]) for i, _ in both)
    return [pair for pair, (pairs, experts) in zip(both, sizes) if pairs % (experts * parts) == 0]


def _key(graph: Graph, operands: tuple[Value, ...], op: Op) -> object:
    """Equal for a forward and its backward: tokens, parameters (which the backward may cast again) and the activation."""
    return operands[:3], tuple(map(graph.origin, operands[3:])), op.literals[0][-1]


def _keeping(graph: Graph, i: int) -> Op:
    op = graph.ops[i]
    x, ids, _, up = map(graph.tensor, op.inputs[:4])
    hidden = Tensor((ids.numel // up.shape[0], up.shape[0], up.shape[2]), x.dtype)
    return replace(op, target=KEEPING[op.target], outputs=(*op.outputs, hidden))


def _reading(op: Op, hidden: Value) -> Op:
    (*operands, activation), named = op.literals
    literals = ((*operands, Ref(len(op.inputs)), activation), named)
    return replace(op, target=READING[op.target], inputs=(*op.inputs, hidden), literals=literals)
