"""The cost of a plan for launchers that shard modules (parallelize_module, tp_plan): the layouts that such a launcher runs, as pins.

On mesh axis `axis`, the weights of a group and all values between them are sharded along the dims of the group's class. A weight
without a group is sharded, and the output of its op is gathered at once. Everything else is replicated. On the other axes the batch
is sharded; parameters are replicated there, or sharded too (fully_shard).
"""

from collections.abc import Sequence

from autoshard.baselines.pins import FIRST, Priorities
from autoshard.baselines.schemes import fully_sharded
from autoshard.baselines.setting import AxisSharding, Baseline, Setting
from autoshard.baselines.uses import Use, Uses, swaps
from autoshard.graph import Graph, Value
from autoshard.mesh import Mesh
from autoshard.strategies import Candidates


def launched(
    graph: Graph, mesh: Mesh, candidates: Candidates, axis: int, uses: Uses, roots: Sequence[int], lone: Sequence[tuple[Use, int]],
    *, fully_shard: bool,
) -> Baseline:  # fmt: skip
    """roots: classes of the sharded groups. lone: weights without a group, as (use, the parameter's sharded dim)."""
    setting = Setting(graph, mesh, candidates, uses.slots)
    sharding, words = setting.shard_batch([k for k in setting.axes if k != axis])
    sharding[axis] = AxisSharding(uses.classes, dict.fromkeys(roots, FIRST))
    of_classes, lone_dims = setting.wanted(sharding), dict(_lone_dims(graph, lone))

    def wanted(value: Value) -> Priorities:
        rows = of_classes(value)
        if value not in lone_dims:
            return rows
        return tuple(tuple(FIRST if k == axis and d == lone_dims[value] else p for d, p in enumerate(row)) for k, row in enumerate(rows))

    pins = setting.pins(wanted, {})
    if not fully_shard:
        return Baseline("modules", pins, words)
    fixed = fully_sharded(setting, pins, axis)
    views = frozenset(i for i in setting.views if graph.ops[i].kind == "compute")
    return Baseline("modules", setting.pins(wanted, fixed, views), f"{words}; parameters sharded over the other axes")


def _lone_dims(graph: Graph, lone: Sequence[tuple[Use, int]]) -> list[tuple[Value, int]]:
    """The values that are sharded because of a weight without a group (it, its views, the op's output), with the sharded dim."""
    dims = []
    for use, dim in lone:
        op, swapped = graph.ops[use.index], False
        dims.append((use.trail[0], dim))
        if dim == use.kept:
            dims.append(((use.index, 0), len(op.output.shape) - 1))
        for value in use.trail[1:]:
            rank = len(graph.tensor(value).shape)
            swapped ^= swaps(graph.ops[value[0]], rank)
            dims.append((value, rank - 1 - dim if swapped else dim))
    return dims
