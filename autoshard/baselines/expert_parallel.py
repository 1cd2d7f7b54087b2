"""Expert parallelism with FSDP as pins: the batch and the experts are sharded over the same axes.

    tokens        the batch over all axes that divide it, as in fsdp
    experts       dim 0 over as many of these axes as divide them, the fastest first; all_to_all over these
    parameters    experts keep their shards of dim 0 and are sharded further over the other axes, gathered at each use; others as in fsdp
"""

import math
from collections.abc import Mapping

from autoshard.baselines.setting import Baseline, Setting
from autoshard.graph import KEPT, Graph, Op
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.strategies import Candidate, is_experts


def expert_parallel(s: Setting) -> Baseline | None:
    """None where the graph has no experts (captured as one op) or the batch isn't sharded."""
    graph, mesh, options = s.graph, s.mesh, s.candidates.of
    of_experts = [i for i, op in enumerate(graph.ops) if is_experts(op)]
    sharding, words = s.data_parallel
    choices = {i: _most_sent(graph.ops[i], options[i], tuple(sharding), mesh) for i in of_experts}
    over = {i: _expert_axes(graph.ops[i], options[i][k]) for i, k in choices.items()}
    if not of_experts or not all(over.values()):
        return None
    fixed: dict[int, Layout] = dict(s.shards)
    for i, readers in _parameters(graph, of_experts).items():
        if i in fixed:
            fixed[i] = s.most_sharded(_with_experts_over(options[i], over[readers[0]]))
    by_name = {graph.ops[i].name: layout for i, layout in fixed.items()}
    for i, op in enumerate(graph.ops):
        if op.kind == KEPT:
            fixed[i] = by_name[op.name.removesuffix(f".{KEPT}")]
    fixed = s.with_casts(fixed)
    pins = s.pins(s.by_batch, fixed, frozenset(_carried(s, set(of_experts)) - set(fixed)), choices=choices)
    axes = sorted(set().union(*over.values()))
    words = f"{words}; experts sharded over {', '.join(mesh.axes[k].name for k in axes)}, tokens sent by all_to_all"
    return Baseline("expert_parallel", pins, words)


def _tokens_and_experts(op: Op, candidate: Candidate) -> tuple[Layout, Layout]:
    first = int("backward" in op.target)
    return candidate.inputs[first], candidate.inputs[first + 3]


def _expert_axes(op: Op, candidate: Candidate) -> tuple[int, ...]:
    return tuple(k for k, p in enumerate(_tokens_and_experts(op, candidate)[1]) if p.is_shard(0))


def _most_sent(op: Op, options: tuple[Candidate, ...], axes: tuple[int, ...], mesh: Mesh) -> int:
    """The candidate with tokens sharded over `axes` and the experts over as many devices of these as possible, the last axes first."""

    def order(k: int) -> tuple:
        tokens, experts = _tokens_and_experts(op, options[k])
        right = all(p.is_shard(0) == (axis in axes) and (axis in axes or p.is_replicate()) for axis, p in enumerate(tokens))
        over = [axis for axis in _expert_axes(op, options[k]) if axis in axes]
        right = right and all(p.is_replicate() for axis, p in enumerate(experts) if axis not in over)
        return right, math.prod(mesh.shape[axis] for axis in over), tuple(reversed([axis in over for axis in axes])), -k

    return max(range(len(options)), key=order)


def _with_experts_over(options: tuple[Candidate, ...], axes: tuple[int, ...]) -> tuple[Candidate, ...]:
    """The layouts of a parameter whose dim 0 is sharded over exactly these axes."""
    return tuple(c for c in options if all(p.is_shard(0) == (k in axes) for k, p in enumerate(c.outputs[0] or ())))


def _parameters(graph: Graph, of_experts: list[int]) -> Mapping[int, list[int]]:
    """By parameter the experts that read it, through views and casts."""
    readers: dict[int, list[int]] = {}
    for i in of_experts:
        first = int("backward" in graph.ops[i].target) + 3
        for value in graph.ops[i].inputs[first:]:
            readers.setdefault(graph.origin(value), []).append(i)
    return readers


def _carried(s: Setting, of_experts: set[int]) -> set[int]:
    """Ops that keep the layout of their only input: views of parameters, and of gradients of experts."""
    carried = set(s.views)
    for i, op in enumerate(s.graph.ops):
        if len(op.inputs) == 1 and not op.is_placeholder:
            a, k = op.inputs[0]
            follows = a in carried and op.backward and (op.alias is not None or op.kind != "compute")
            if follows or (a in of_experts and k >= 2):
                carried.add(i)
    return carried
