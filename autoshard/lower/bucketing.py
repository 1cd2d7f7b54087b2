"""Small collectives of the same kind over the same group become one.

    members i of one bucket:  same kind, reduction, group, type and depth;  max ready < min need;  bytes together below a limit;
                              no member comes before another, not even by way of other buckets
    x = [flat x_0 | flat x_1 | ...]  ->  one collective  ->  y = [flat y_0 | flat y_1 | ...]

Kinds that carry a first dim of n parts (all_gather's result, reduce_scatter, all_to_all) are joined along the rest: (n, m_0 + m_1 ...).
A gather that is joined to an earlier one holds its result longer: only where the limit of live bytes allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.lower.flow import STARTS, WAIT, Flow, Pace, bucket_limit, largest_buffer, live_bytes, size

aten = torch.ops.aten


@dataclass(eq=False)
class Bucket:
    """ready, need: of all members together. bits: who they are; before: who comes before them (Flow.before)."""

    ready: int
    need: int
    bytes: int
    members: list[fx.Node]
    bits: int
    before: int


def bucket(graph_module: fx.GraphModule, pace: Pace, limit: float) -> int:
    """Joins what may be joined, in place; returns how many collectives went. limit: of live bytes (see `overlap.room`)."""
    graph = graph_module.graph
    flow = Flow.of(graph)
    gone = 0
    for members in _choose(graph, flow, pace, limit):
        _join(graph, members)
        gone += len(members) - 1
    if gone:
        _sort(graph)
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return gone


def _choose(graph: fx.Graph, flow: Flow, pace: Pace, limit: float) -> list[list[fx.Node]]:
    *nodes, output = graph.nodes
    live = [now for node, now in zip(nodes, live_bytes(nodes, output), strict=True) if node in flow.at]
    before, bit = flow.before(), {start: 1 << k for k, start in enumerate(flow.starts)}
    last: dict[tuple, Bucket] = {}
    buckets: list[Bucket] = []
    for start in flow.starts:
        axis, held = pace.axis(start), largest_buffer(start)
        cap = bucket_limit(pace.mesh, axis)
        if [user.target for user in start.users] != [WAIT] or held >= cap:
            continue
        options = tuple(arg for arg in start.args[1:] if not isinstance(arg, (list, tuple)))
        key = (start.target, options, start.args[0].meta["val"].dtype, flow.depth[start])  # type: ignore[union-attr]
        new = Bucket(flow.ready[start], flow.need[start], held, [start], bit[start], before[start])
        found = last.get(key)
        if found is not None and _fits(found, new, cap, buckets, live, limit):
            early, late = sorted((found.need, new.need))
            live[early:late] = [now + size(start) for now in live[early:late]]
            found.ready, found.need, found.bytes = max(found.ready, new.ready), early, found.bytes + held
            found.members.append(start)
            found.bits, found.before = found.bits | new.bits, found.before | new.before
        else:
            last[key] = new
            buckets.append(new)
    return [b.members for b in buckets if len(b.members) > 1]


def _fits(found: Bucket, new: Bucket, cap: float, buckets: Sequence[Bucket], live: Sequence[int], limit: float) -> bool:
    if max(found.ready, new.ready) >= min(found.need, new.need) or found.bytes + new.bytes > cap:
        return False
    early, late = sorted((found.need, new.need))
    if any(now + size(new.members[0]) > limit for now in live[early:late]):
        return False
    return not (_closed(found.before, buckets) & new.bits or _closed(new.before, buckets) & found.bits)


def _closed(before: int, buckets: Sequence[Bucket]) -> int:
    """With one member of a bucket all of them come before, and what comes before those."""
    while True:
        more = before
        for b in buckets:
            if b.bits & more:
                more |= b.bits | b.before
        if more == before:
            return before
        before = more


def _join(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """One collective in place of several; its nodes stand at the end of the graph until `_sort`."""
    first, group = members[0], members[0].args[1:]
    kind, given = STARTS[first.target], [start.args[0] for start in members]  # type: ignore[index]
    n = 1 if kind in ("all_reduce", "all_gather") else given[0].meta["val"].shape[0]  # type: ignore[union-attr]
    with graph.inserting_before(next(reversed(graph.nodes))):
        flat = [_node(graph, aten.reshape.default, (x, [n, -1]), start) for x, start in zip(given, members, strict=True)]
        together = _node(graph, first.target, (_node(graph, aten.cat.default, (flat, 1), first), *group), first)
        together.meta["members"] = [start.meta.get("record") for start in members]
        done, offset = _node(graph, WAIT, (together,), first), 0
        for start, part in zip(members, flat, strict=True):
            (wait,) = start.users
            length = part.meta["val"].shape[1]
            cut = _node(graph, aten.slice.Tensor, (done, 1, offset, offset + length), start)
            if kind not in ("all_reduce", "reduce_scatter"):  # of one row a slice is contiguous as it is
                cut = _node(graph, aten.clone.default, (cut,), start, memory_format=torch.contiguous_format)
            wait.replace_all_uses_with(_node(graph, aten.view.default, (cut, list(wait.meta["val"].shape)), start))
            offset += length
    for start in members:
        graph.erase_node(next(iter(start.users)))
        graph.erase_node(start)


def _node(graph: fx.Graph, target: object, args: tuple, like: fx.Node, **kwargs: object) -> fx.Node:
    node = graph.create_node("call_function", target, args, kwargs)  # type: ignore[arg-type]
    return _describe(node, like)


def _describe(node: fx.Node, like: fx.Node) -> fx.Node:
    """What the node gives, from what its inputs are."""
    args, kwargs = fx.map_arg(node.args, lambda x: x.meta["val"]), fx.map_arg(node.kwargs, lambda x: x.meta["val"])
    with like.meta["val"].fake_mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    node.meta["record"] = like.meta.get("record")
    return node


def _sort(graph: fx.Graph) -> None:
    """Nodes behind what they read, else in the order they have."""
    placed: set[fx.Node] = set()
    order: list[fx.Node] = []
    limit = sum(len(node.all_input_nodes) + 1 for node in graph.nodes)  # a longer way is a circle
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [source for source in top.all_input_nodes if source not in placed]
            if top in placed or not waiting:
                stack.pop()
                if top not in placed:
                    placed.add(top)
                    order.append(top)
            else:
                stack.extend(reversed(waiting))
                if len(stack) > limit:
                    raise AssertionError("joined collectives wait for each other")
    reorder(graph, order)


def reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """The graph's nodes in another order."""
    previous = graph._root
    for node in order:
        if previous.next is not node:
            previous.append(node)
        previous = node
