"""How many seconds would padding a parameter save? The same step is planned again with a dim that the number of devices divides.

A dim of size n that p devices don't divide costs as if it were ceil(n / p) p where it can be sharded unevenly, and is replicated where it
can't (a view merges it, or it has fewer indices than there are devices). The offer is the difference of two plans, both evaluated alike:

    saves = cost(graph) - cost(graph with n -> ceil(n / p) p in every dim that is sharded together with the parameter's)

Where the padded graph has no candidate that the graph lacks, nothing is saved, and nothing is solved: with the same layouts no shard
of the graph is larger than that of the padded graph.
"""

import math
from collections import Counter
from dataclasses import replace

from autoshard.baselines import dim_classes, number_slots
from autoshard.formulate import Formulation, with_pins
from autoshard.graph import Graph
from autoshard.planning.baselining import BASELINE_SECONDS
from autoshard.planning.demands import allowed_by_pins
from autoshard.planning.instance import formulate_for
from autoshard.planning.question import Question
from autoshard.solvers import solve
from autoshard.strategies import Candidates, candidates

MOST = 1.5  # a dim that grows by more is not worth an offer
LEAST_SHARE = 0.01  # of the bytes of all parameters: what the parameters with the dim must have
LEAST_SAVING = 1e-3  # of the cost; less counts as nothing
TRIED = 2  # dims, those of the most bytes
GAP = 1e-4  # relative, of the plan of a padded model


def padding_offers(question: Question, formulated: Formulation, cost: float) -> list[dict]:
    """[{parameter, dim, from, to, saves_seconds}], the largest saving first; empty where the devices divide all dims. A saving may be 0.

    cost: of the plan without padding.
    """
    graph, p = formulated.graph, formulated.mesh.num_devices
    sizes = [t.shape for t in (graph.tensor((i, 0)) for i in graph.parameters.values())]
    if not any(_is_worth_padding(n, p) for shape in sizes for n in shape):
        return []
    offers = []
    for (name, dim, n), slots in _dims(formulated)[:TRIED]:
        larger = _with_sizes(graph, slots, _padded(n, p))
        if any(_pattern(graph, i) != _pattern(larger, i) for i in range(len(graph.ops))):
            continue  # the padded dim meets one that stays: a view merges it, or it is added to a dim of another class
        possible = candidates(larger, formulated.mesh)
        if question.lacks_time_to_formulate():
            break
        gains = any(len(a) != len(b) for a, b in zip(possible.of, formulated.candidates.of, strict=True))
        padded = _best_cost(question, larger, possible) if gains else cost
        if padded is not None:
            saves = cost - padded if cost - padded > LEAST_SAVING * cost else 0.0
            offers.append({"parameter": name, "dim": dim, "from": n, "to": _padded(n, p), "saves_seconds": saves})
    return sorted(offers, key=lambda offer: -offer["saves_seconds"])


def _best_cost(question: Question, graph: Graph, layouts: Candidates) -> float | None:
    """Seconds of the best plan of a graph; None where none was found."""
    options = question.options
    formulated = formulate_for(graph, layouts, question.mesh, options)
    pinned = with_pins(formulated, allowed_by_pins(formulated, options))
    answer = solve(
        pinned, solver=options.solver, time_limit=min(BASELINE_SECONDS, question.seconds_left()), clock=question.clock.now, gap=GAP
    ).in_passing()
    return answer.cost if answer.choice is not None else None


def _padded(n: int, p: int) -> int:
    return -(-n // p) * p


def _is_worth_padding(n: int, p: int) -> bool:
    return n < _padded(n, p) <= MOST * n


def _dims(formulated: Formulation) -> list[tuple[tuple[str, int, int], set[tuple[int, int, int]]]]:
    """((parameter, dim, size), all (op, output, dim) that are sharded together with it) by bytes of parameters, most first."""
    graph, p = formulated.graph, formulated.mesh.num_devices
    numbered = number_slots(graph, formulated.candidates)
    classes = dim_classes(numbered)
    members: dict[int, set[tuple[int, int, int]]] = {}
    for (i, k), start in numbered.first.items():
        for d in range(len(graph.tensor((i, k)).shape)):
            members.setdefault(classes.roots[start + d], set()).add((i, k, d))
    held = Counter[int]()
    named: dict[int, tuple[str, int, int]] = {}
    second = dict(graph.tied)
    total = sum(graph.tensor((i, 0)).bytes for name, i in graph.parameters.items() if name not in second)
    for name, i in graph.parameters.items():
        tensor = graph.tensor((i, 0))
        for d, n in enumerate(tensor.shape):
            root = classes.of((i, 0), d)
            shapes = [graph.tensor((j, k)).shape for j, k, _ in members[root]]
            is_unmerged = all(shape[e] == n for shape, (_, _, e) in zip(shapes, members[root], strict=True))  # by no view
            is_kernel = d > 1 and all(shape == tensor.shape for shape in shapes)  # of a convolution: no activation has it
            if name not in second and is_unmerged and not is_kernel and _is_worth_padding(n, p):
                held[root] += tensor.bytes
                named.setdefault(root, (name, d, n))
    worth = sorted((root for root in held if held[root] >= LEAST_SHARE * total), key=lambda root: (-held[root], named[root]))
    return [(named[root], members[root]) for root in worth]


def _with_sizes(graph: Graph, slots: set[tuple[int, int, int]], size: int) -> Graph:
    """The graph with another size of some dims. It can be priced but not run, because literals of ops keep the old size."""
    of_op: dict[int, set[tuple[int, int]]] = {}
    for i, k, d in slots:
        of_op.setdefault(i, set()).add((k, d))
    ops = list(graph.ops)
    for i, some in of_op.items():
        outputs = tuple(
            None if t is None else replace(t, shape=tuple(size if (k, d) in some else n for d, n in enumerate(t.shape)))
            for k, t in enumerate(ops[i].outputs)
        )
        ops[i] = replace(ops[i], outputs=outputs)
    return replace(graph, ops=tuple(ops))


def _pattern(graph: Graph, i: int) -> bool:
    """Of an op with one input whether it keeps the number of elements, as views do; of several whether they broadcast to its output."""
    op, inputs = graph.ops[i], [t.shape for t in graph.input_tensors(i)]
    if not inputs or op.outputs[0] is None:
        return False
    out = op.outputs[0].shape
    if len(inputs) == 1:
        return math.prod(inputs[0]) == math.prod(out)
    padded = [(1,) * (len(out) - len(shape)) + shape for shape in inputs]
    return all(len(shape) == len(out) for shape in padded) and tuple(map(_broadcast, *padded)) == out


def _broadcast(*sizes: int) -> int:
    """The size to which these sizes broadcast; -1 where they don't."""
    return max(sizes) if {*sizes} <= {1, max(sizes)} else -1
