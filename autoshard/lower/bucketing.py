"""Small collectives of the same kind over the same group become one.

    members i of one bucket:  same kind, reduction, group, type and depth;  max ready < min need;  bytes together below a limit;
                              no member comes before another, not even by way of other buckets
    x = [flat x_0 | flat x_1 | ...]  ->  one collective  ->  y = [flat y_0 | flat y_1 | ...]

Kinds that carry a first dim of n parts (all_gather's result, reduce_scatter, all_to_all) are joined along the rest: (n, m_0 + m_1 ...).
With r = max ready and d = min need a bucket holds, beside what is alive anyway, only where the limit of live bytes allows it,

    x_i   from its own ready to r         y_i   from d to its own need         all x_i once more at r         all x_i and y_i once more at d
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from autoshard.cost import bucket_limit
from autoshard.lower.flow import STARTS, WAIT, Flow, Pace, largest_buffer, live_bytes, owners, size

aten = torch.ops.aten


@dataclass(eq=False)
class Bucket:
    """ready, need: of all members together. bits: who they are; before: who comes before them (Flow.before). held: (first, end, bytes)
    by number of anchors, what it adds to the live bytes."""

    ready: int
    need: int
    bytes: int
    members: list[fx.Node]
    bits: int
    before: int
    held: list[tuple[int, int, int]]


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
    owner = owners(nodes)
    last: dict[tuple, Bucket] = {}
    buckets: list[Bucket] = []
    for start in flow.starts:
        axis, bytes_of = pace.axis(start), largest_buffer(start)
        cap = bucket_limit(pace.mesh.axes[axis])
        if [user.target for user in start.users] != [WAIT] or bytes_of >= cap:
            continue
        options = tuple(arg for arg in start.args[1:] if not isinstance(arg, (list, tuple)))
        key = (start.target, options, start.args[0].meta["val"].dtype, flow.depth[start])  # type: ignore[union-attr]
        new = Bucket(flow.ready[start], flow.need[start], bytes_of, [start], bit[start], before[start], [])
        found = last.get(key)
        both = None if found is None else _together(found, new, cap, buckets)
        if found is not None and both is not None:
            both.held = _held(both, flow, owner)
            _add(live, found.held, -1)
            _add(live, both.held, 1)
            if all(max(live[first:end], default=0) <= limit for first, end, _ in both.held):
                buckets[buckets.index(found)] = last[key] = both
                continue
            _add(live, both.held, -1)
            _add(live, found.held, 1)
        last[key] = new
        buckets.append(new)
    return [b.members for b in buckets if len(b.members) > 1]


def _together(a: Bucket, b: Bucket, cap: float, buckets: Sequence[Bucket]) -> Bucket | None:
    """Both as one, where neither comes before the other; None where they can't be."""
    ready, need = max(a.ready, b.ready), min(a.need, b.need)
    if ready >= need or a.bytes + b.bytes > cap or _closed(a.before, buckets) & b.bits or _closed(b.before, buckets) & a.bits:
        return None
    return Bucket(ready, need, a.bytes + b.bytes, [*a.members, *b.members], a.bits | b.bits, a.before | b.before, [])


def _held(both: Bucket, flow: Flow, owner: dict[fx.Node, fx.Node]) -> list[tuple[int, int, int]]:
    """What a bucket adds to the live bytes."""
    held, given, got = [], 0, 0
    for start in both.members:
        source = start.all_input_nodes[0]
        if owner[source].op != "placeholder":
            held.append((flow.ready[start] + 1, both.ready, size(source)))
        held.append((both.need, flow.need[start], size(start)))
        given, got = given + size(source), got + size(start)
    held += [(max(both.ready, 0), max(both.ready, 0) + 1, given), (both.need, both.need + 1, given + got)]
    return _merged(held)


def _merged(held: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same as intervals that do not overlap."""
    change: dict[int, int] = {}
    for first, end, count in held:
        if first < end:
            change[first] = change.get(first, 0) + count
            change[end] = change.get(end, 0) - count
    found, now = [], 0
    for first, end in pairwise(sorted(change)):
        now += change[first]
        if now:
            found.append((first, end, now))
    return found


def _add(live: list[int], held: Sequence[tuple[int, int, int]], sign: int) -> None:
    for first, end, count in held:
        live[first:end] = [now + sign * count for now in live[first:end]]


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
