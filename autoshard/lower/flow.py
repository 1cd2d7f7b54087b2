"""Collectives in a rank's fx graph: which nodes start and wait for them, and how far each node may be moved.

Some nodes are anchors, which stay in program order. The others are lazy:

    start     a functional collective                      prep      a cheap node, or a cast of a view, that only starts and preps read
    wait      wait_tensor of a start                       follower  a cheap node that reads a wait or a follower
    view      a view of placeholders only

Anchors are numbered; -1 stands for the placeholders. For a lazy node

    ready = the last anchor that it depends on             need = the first anchor that depends on it
    depth = the number of starts on the longest path from there to it, itself included
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import getitem

import torch
from torch import fx

from autoshard.cost import ring_seconds
from autoshard.lower.collectives import Groups
from autoshard.lower.kernels.offload import AWAIT, OFFLOAD, RELOAD
from autoshard.mesh import Mesh
from autoshard.torch_private import c10d_functional

_c10d = c10d_functional
aten = torch.ops.aten

STARTS = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_to_all_single.default: "all_to_all",
}
WAIT = _c10d.wait_tensor.default
CAST = aten._to_copy.default
ADD = aten.add_.Tensor  # into a sum of gradients (runtime.microbatches), which no other node reads
CHEAP = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.movedim.int, aten.clone.default, aten.slice.Tensor, aten.cat.default,
    ADD, aten.div.Tensor, aten.select.int, aten.alias.default, aten.detach.default, aten.expand.default, aten.constant_pad_nd.default,
    aten.index_select.default,
}  # fmt: skip
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default, aten.expand.default,
    aten.split.Tensor, aten.unbind.int, aten.split_with_sizes.default,
}  # fmt: skip


@dataclass(eq=False)
class Flow:
    """The anchors of a graph in order, and the range in which each lazy node may stand."""

    anchors: list[fx.Node]
    at: dict[fx.Node, int]  # number of an anchor
    ready: dict[fx.Node, int]
    need: dict[fx.Node, int]
    depth: dict[fx.Node, int]
    starts: list[fx.Node]
    lazy: list[fx.Node]  # in order
    unhurried: set[fx.Node]  # starts that read placeholders only, and can come early, or whose result is only returned, at most cast

    @staticmethod
    def of(graph: fx.Graph) -> "Flow":
        *nodes, output = graph.nodes
        lazy = _lazy(nodes)
        anchors = [node for node in nodes if node.op != "placeholder" and node not in lazy]
        at = {node: i for i, node in enumerate(anchors)}
        ready: dict[fx.Node, int] = {}
        depth: dict[fx.Node, int] = {}
        for node in nodes:
            if node in at:
                ready[node], depth[node] = at[node], 0
                continue
            inputs = node.all_input_nodes
            ready[node] = max((ready[source] for source in inputs), default=-1)
            depth[node] = max((depth[source] for source in inputs), default=0) + (node.target in STARTS)
        need: dict[fx.Node, int] = {}
        for node in reversed(nodes):
            users = [at[user] if user in at else len(anchors) if user is output else need[user] for user in node.users]
            need[node] = min(users, default=len(anchors))
        returned = {output}
        for node in reversed(nodes):
            if returned.issuperset(node.users) and (node in lazy or node.target is CAST):
                returned.add(node)
        starts = [n for n in nodes if n.target in STARTS]
        unhurried = {start for start in starts if ready[start] < 0 or start in returned}
        return Flow(anchors, at, ready, need, depth, starts, [n for n in nodes if n in lazy], unhurried)

    def live(self, graph: fx.Graph) -> list[int]:
        """The most live bytes from one anchor to the next, which is included: a number per anchor."""
        *nodes, output = graph.nodes
        most = [0]
        for node, now in zip(nodes, live_bytes(nodes, output), strict=True):
            most[-1] = max(most[-1], now)
            if node in self.at:
                most.append(0)
        return most[:-1]

    def before(self) -> dict[fx.Node, int]:
        """For each start the starts that must come before it, as bits (bit k: starts[k]): those that it reads through lazy nodes, and
        those on which an anchor at or before its `ready` depends."""
        bit = {start: 1 << k for k, start in enumerate(self.starts)}
        needed_by = [0] * (len(self.anchors) + 2)  # starts with need <= i
        for start in self.starts:
            needed_by[self.need[start] + 1] |= bit[start]
        for i in range(1, len(needed_by)):
            needed_by[i] |= needed_by[i - 1]
        read: dict[fx.Node, int] = {}
        for node in self.lazy:
            read[node] = 0
            for source in node.all_input_nodes:
                read[node] |= read.get(source, 0) | bit.get(source, 0)
        return {start: read[start] | needed_by[self.ready[start] + 1] for start in self.starts}


def _lazy(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    lazy = {node for node in nodes if node.target in STARTS or node.target is WAIT}
    views = {node for node in nodes if node.op == "placeholder"}  # and the placeholders
    for node in nodes:
        if node.target in VIEWS and views.issuperset(node.all_input_nodes):
            views.add(node)
            lazy.add(node)
        if node.target in CHEAP and any(source in lazy for source in node.all_input_nodes):
            lazy.add(node)
    for node in reversed(nodes):
        is_prep = all(user.target in STARTS or (user in lazy and "prep" in user.meta) for user in node.users)
        is_cheap = node.target in CHEAP or (node.target is CAST and views.issuperset(node.all_input_nodes))  # a parameter
        if is_cheap and node.users and is_prep:
            lazy.add(node)
            node.meta["prep"] = True
    return lazy


def size(node: fx.Node) -> int:
    """Bytes of a node's outputs."""
    values = node.meta.get("val")
    leaves = values if isinstance(values, (tuple, list)) else [values]
    return sum(v.numel() * v.element_size() for v in leaves if isinstance(v, torch.Tensor))


def largest_buffer(node: fx.Node) -> int:
    """Of a start: the larger of a rank's input and output, in bytes."""
    return max(size(node), *(size(source) for source in node.all_input_nodes))


@dataclass(frozen=True, eq=False)
class Pace:
    """Estimated seconds of nodes on this mesh, which decide their order. A plan's cost comes from the room `cost`, not from here."""

    mesh: Mesh
    groups: Groups

    def axis(self, node: fx.Node) -> int:
        return self.groups.axis(str(node.args[-1]))

    def collective(self, node: fx.Node) -> float:
        axis = self.mesh.axes[self.axis(node)]
        return ring_seconds(STARTS[node.target], axis, largest_buffer(node))  # type: ignore[index]

    def compute(self, node: fx.Node) -> float:
        if node.target in VIEWS or node.op != "call_function":
            return 0.0
        device, moved = self.mesh.device, size(node) + sum(size(source) for source in node.all_input_nodes)
        flops = 0.0
        if node.target in MATMULS:
            left = node.all_input_nodes[MATMULS[node.target]].meta["val"]  # type: ignore[index]
            flops = 2.0 * size(node) / left.element_size() * left.shape[-1]
        return max(flops / device.flops_for(4), moved / device.memory_bandwidth) + device.launch


MATMULS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


def owners(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory it uses: views, waits and sums allocate none, and several placeholders may share one memory."""
    owner: dict[fx.Node, fx.Node] = {}
    kept: dict[str, fx.Node] = {}
    for node in nodes:
        shares = node.target in VIEWS or node.target in (WAIT, AWAIT, getitem, ADD)
        owner[node] = owner.get(node.all_input_nodes[0], node) if shares and node.all_input_nodes else node
        if _is_kept(node):
            owner[node] = kept.setdefault(node.meta["kept"][0], node)
    return owner


def _is_kept(node: fx.Node) -> bool:
    return node.op == "placeholder" and "kept" in node.meta


def _is_on_host(node: fx.Node) -> bool:
    return node.target is OFFLOAD or (node.op == "placeholder" and bool(node.users) and all(user.target is RELOAD for user in node.users))


class LiveBytes:
    """Live bytes as nodes run one after another, without views and what waits in the host's memory. The graph's outputs stay alive.

    Only those placeholders count that an earlier pass has computed: node.meta["kept"] is (name of the memory, bytes), which is free
    after their last reader. What a collective reads is held until it has been waited for.
    """

    def __init__(self, nodes: Sequence[fx.Node], output: fx.Node) -> None:
        self.owner, self.now = owners(nodes), 0
        self.readers = Counter(chain.from_iterable(map(self.used, nodes)))
        self.readers.update(map(self.owner.__getitem__, output.all_input_nodes))

    def used(self, node: fx.Node) -> list[fx.Node]:
        """Whose memory it needs, its own first."""
        begun = node.args[0].all_input_nodes if node.target is WAIT else []  # type: ignore[union-attr]
        return [self.owner[one] for one in (node, *node.all_input_nodes, *begun)]

    def held(self, node: fx.Node) -> int:
        """Bytes that this node adds."""
        if self.owner[node] is not node or _is_on_host(node):
            return 0
        return node.meta["kept"][1] if _is_kept(node) else size(node) if node.op == "call_function" else 0

    def run(self, node: fx.Node) -> int:
        """Live bytes while it runs; `now` are those after it."""
        self.now += self.held(node)
        during = self.now
        for owner in self.used(node):
            self.readers[owner] -= 1
            self.now -= 0 if self.readers[owner] else self.held(owner)
        return during

    def ahead(self, nodes: Sequence[fx.Node]) -> int:
        """Live bytes at most if these nodes were to run next."""
        now = self.now
        most = max(map(self.run, nodes), default=now)
        self.now = now
        self.readers.update(chain.from_iterable(map(self.used, nodes)))
        return most


def live_bytes(nodes: Sequence[fx.Node], output: fx.Node) -> list[int]:
    """Live bytes while each node runs."""
    return list(map(LiveBytes(nodes, output).run, nodes))
