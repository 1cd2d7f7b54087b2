"""Buckets: small collectives of the same kind over the same group are joined into one.

    members i of one bucket:  same kind, reduction, group, dtype and depth;  max ready < min need;  bytes together below a limit;
                              no member depends on another, not even through other buckets
    x = [flat x_0 | flat x_1 | ...]  ->  one collective  ->  y = [flat y_0 | flat y_1 | ...]

Tensors with a first dim of n ranks (all_gather's output, reduce_scatter's input, both of all_to_all) are joined along the rest:
(n, m_0 + m_1 ...). Let r = max ready and d = min need (flow.py). A bucket adds these live bytes, and is made only where they stay within
the limit:

    x_i   from its own ready to r + 1     y_i   from d to its own need         all x_i once more behind r     all x_i and y_i once more at d
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from autoshard.cost import bucket_limit
from autoshard.lower import STARTS, WAIT, Flow, Pace, drawing, largest_buffer, owners, size

aten = torch.ops.aten


@dataclass(eq=False)
class Bucket:
    """ready, need: of all members together. bits: the members; before: the starts that must come before them (both as Flow.before).
    held: the live bytes that it adds, as (first anchor, end, bytes)."""

    ready: int
    need: int
    bytes: int
    members: list[fx.Node]
    bits: int
    before: int
    held: list[tuple[int, int, int]]


def bucket(graph_module: fx.GraphModule, pace: Pace, limit: float, *others: fx.GraphModule) -> int:
    """Joins collectives in place where that is possible; returns by how many there are fewer. limit: of live bytes (see `overlap.room`).
    others: graphs like this one (lower.are_alike), in which the same are joined."""
    at = {node: k for k, node in enumerate(graph_module.graph.nodes)}
    chosen = [[at[start] for start in members] for members in _choose(graph_module.graph, Flow.of(graph_module.graph), pace, limit)]
    for one in (graph_module, *others) if chosen else ():
        graph = one.graph
        nodes = list(graph.nodes)
        for members in chosen:
            _join(graph, [nodes[k] for k in members])
        _sort(graph)
        graph.eliminate_dead_code()
        graph.lint()
        one.recompile()
    return sum(len(members) - 1 for members in chosen)


def _choose(graph: fx.Graph, flow: Flow, pace: Pace, limit: float) -> list[list[fx.Node]]:
    *nodes, _ = graph.nodes
    live = flow.live(graph)
    before, bit = flow.before(), {start: 1 << k for k, start in enumerate(flow.starts)}
    owner = owners(nodes)
    last: dict[tuple, Bucket] = {}
    buckets: list[Bucket] = []
    for start in flow.starts:
        axis, bytes_of = pace.axis(start), largest_buffer(start)
        cap = bucket_limit(pace.mesh.axes[axis])
        if [user.target for user in start.users] != [WAIT] or bytes_of >= cap:
            continue
        options = tuple(tuple(arg) if isinstance(arg, (list, tuple)) else arg for arg in start.args[1:])
        key = (start.target, options, start.args[0].meta["val"].dtype, flow.depth[start])  # type: ignore[union-attr]
        new = Bucket(flow.ready[start], flow.need[start], bytes_of, [start], bit[start], before[start], [])
        previous = last.get(key)
        both = None if previous is None else _union(previous, new, cap, buckets)
        if previous is not None and both is not None:
            both.held = _held(both, flow, owner)
            joined = _added(live, [*((first, end, -count) for first, end, count in previous.held), *both.held])
            if all(max(joined[first:end], default=0) <= limit for first, end, _ in both.held):
                buckets[buckets.index(previous)] = last[key] = both
                live = joined
                continue
        last[key] = new
        buckets.append(new)
    return [b.members for b in buckets if len(b.members) > 1]


def _union(a: Bucket, b: Bucket, cap: float, buckets: Sequence[Bucket]) -> Bucket | None:
    """Both as one bucket; None where one depends on the other, or they are needed too early or too large."""
    ready, need = max(a.ready, b.ready), min(a.need, b.need)
    if ready >= need or a.bytes + b.bytes > cap or _closed(a.before, buckets) & b.bits or _closed(b.before, buckets) & a.bits:
        return None
    return Bucket(ready, need, a.bytes + b.bytes, [*a.members, *b.members], a.bits | b.bits, a.before | b.before, [])


def _held(both: Bucket, flow: Flow, owner: dict[fx.Node, fx.Node]) -> list[tuple[int, int, int]]:
    """The live bytes that a bucket adds."""
    held, inputs, outputs = [], 0, 0
    for start in both.members:
        source = start.all_input_nodes[0]
        if owner[source].op != "placeholder":
            held.append((flow.ready[start] + 1, both.ready + 2, size(source)))
        held.append((both.need, flow.need[start], size(start)))
        inputs, outputs = inputs + size(source), outputs + size(start)
    held += [(both.ready + 1, both.ready + 2, inputs), (both.need, both.need + 1, inputs + outputs)]
    return _merged(held)


def _merged(held: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same bytes as intervals that do not overlap."""
    change: dict[int, int] = {}
    for first, end, count in held:
        if first < end:
            change[first] = change.get(first, 0) + count
            change[end] = change.get(end, 0) - count
    merged, now = [], 0
    for first, end in pairwise(sorted(change)):
        now += change[first]
        if now:
            merged.append((first, end, now))
    return merged


def _added(live: Sequence[int], held: Sequence[tuple[int, int, int]]) -> list[int]:
    live = list(live)
    for first, end, count in held:
        live[first:end] = [now + count for now in live[first:end]]
    return live


def _closed(before: int, buckets: Sequence[Bucket]) -> int:
    """The closure of `before`: with one member of a bucket all its members come before, and so do their predecessors."""
    while True:
        more = before
        for b in buckets:
            if b.bits & more:
                more |= b.bits | b.before
        if more == before:
            return before
        before = more


def _join(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """One collective in place of several, where the last of them stood; what reads it earlier is moved behind it by `_sort`."""
    first, group = members[0], members[0].args[1:]
    kind, inputs = STARTS[first.target], [start.args[0] for start in members]  # type: ignore[index]
    n = 1 if kind in ("all_reduce", "all_gather") else inputs[0].meta["val"].shape[0]  # type: ignore[union-attr]
    with graph.inserting_before(members[-1]):
        flat = [_node(graph, aten.reshape.default, (x, [n, -1]), start) for x, start in zip(inputs, members, strict=True)]
        joined = _node(graph, first.target, (_node(graph, aten.cat.default, (flat, 1), first), *group), first)
        joined.meta["members"] = [start.meta.get("record") for start in members]
        done, offset = _node(graph, WAIT, (joined,), first), 0
        for start, x in zip(members, flat, strict=True):
            (wait,) = start.users
            length = x.meta["val"].shape[1]
            y = _node(graph, aten.slice.Tensor, (done, 1, offset, offset + length), start)
            if kind not in ("all_reduce", "reduce_scatter") and not _is_copied(wait):  # a slice of a single row is contiguous
                y = _node(graph, aten.clone.default, (y,), start, memory_format=torch.contiguous_format)
            wait.replace_all_uses_with(_node(graph, aten.view.default, (y, list(wait.meta["val"].shape)), start))
            offset += length
    for start in members:
        graph.erase_node(next(iter(start.users)))
        graph.erase_node(start)


def _is_copied(node: fx.Node) -> bool:
    """Whether its only use is a copy with another order of dims, which needs no contiguous source."""
    users = list(node.users)
    while len(users) == 1 and users[0].target in (aten.permute.default, aten.transpose.int):
        users = list(users[0].users)
        if len(users) == 1 and users[0].target is aten.clone.default:
            return True
    return False


def _node(graph: fx.Graph, target: object, args: tuple, source: fx.Node, **kwargs: object) -> fx.Node:
    """A node with its fake output, computed from its inputs', and the record of the node that it stems from."""
    node = graph.create_node("call_function", target, args, kwargs)  # type: ignore[arg-type]
    args, kwargs = fx.map_arg(node.args, lambda x: x.meta["val"]), fx.map_arg(node.kwargs, lambda x: x.meta["val"])
    with source.meta["val"].fake_mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    node.meta["record"] = source.meta.get("record")
    return node


def _sort(graph: fx.Graph) -> None:
    """Keeps the nodes in their order, but that a node waits for what it reads, and one that draws random numbers for the last that did."""
    drawn_before = {node: (last,) for last, node in pairwise(drawing(graph))}
    order: dict[fx.Node, None] = {}
    waiting: dict[fx.Node, list[fx.Node]] = {}
    pending = list(reversed(graph.nodes))
    while pending:
        node = pending.pop()
        if missing := [source for source in (*node.all_input_nodes, *drawn_before.get(node, ())) if source not in order]:
            waiting.setdefault(missing[0], []).append(node)
        else:
            order[node] = None
            pending += reversed(waiting.pop(node, []))
    assert not waiting, "joined collectives wait for each other"
    reorder(graph, list(order))


def with_inputs(node: fx.Node, placed: Container[fx.Node]) -> Iterator[fx.Node]:
    """The node and all that it reads which is not placed yet, inputs first; the caller places each of them at once."""
    stack = [node]
    while stack:
        top = stack[-1]
        waiting = [source for source in top.all_input_nodes if source not in placed]
        if top in placed or not waiting:
            stack.pop()
            if top not in placed:
                yield top
        else:
            stack.extend(reversed(waiting))


def reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    previous = graph._root
    for node in order:
        if previous.next is not node:
            previous.append(node)
        previous = node
