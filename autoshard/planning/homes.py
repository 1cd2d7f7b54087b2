"""The layer of every node of a problem: the parts in which the solvers take it (solvers/parts.py).

    home(op)     its instance of a repeated block; 0 for ops that repeat nothing, and for those of blocks of few ops
    home(other)  that of the op on the node's first edge: a hub's is that of the op whose value it is
"""

from __future__ import annotations

from collections import Counter

from autoshard.formulate import Formulation
from autoshard.graph import repeated_blocks

FEW = 8  # ops: a smaller block is no part of its own


def homes(formulated: Formulation) -> list[int]:
    """A number per node of the problem, from the bottom of the model to its top; 0 for what belongs to no layer."""
    places = repeated_blocks(formulated.graph).places
    sizes = Counter((place.block, place.instance) for place in places if place is not None)
    numbers = {key: k for k, key in enumerate(sorted(key for key, size in sizes.items() if size >= FEW), start=1)}
    layers = [0 if place is None else numbers.get((place.block, place.instance), 0) for place in places]
    layers += [-1] * (len(formulated.problem.node_costs) - len(layers))
    for e in formulated.problem.edges:
        if layers[e.b] < 0 <= layers[e.a]:
            layers[e.b] = layers[e.a]
        elif layers[e.a] < 0 <= layers[e.b]:
            layers[e.a] = layers[e.b]
    return [max(layer, 0) for layer in layers]
