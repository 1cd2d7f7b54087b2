"""Chains: tasks that every time line runs one after the other, whatever layouts a plan chooses. Their seconds bound the step from below.

A chain leads from task to task in two ways:

    order        the kernels of a step run in the order of the graph
    dependency   an op begins when its inputs are there: after the op that computes an input, and the route of that input

so a collective whose result the next kernel reads is added to the seconds of the kernels, and one that waits is not. Which tasks a
chain has is fixed; the seconds of each depend on the plan. `longest_chain` is the longest of all chains under one plan, or under the mean
of several; under any other plan the same chain is a bound too. `critical_chain` is no bound: it is what the time line of one plan waits
for, the order of its streams included.

    begin_i = max(S, inputs_i)         kernel i; S: the end of the kernels before it; inputs_i: when its last input is there
    ready_i = begin_i + c_i            its outputs are there; S becomes the end of its kernel
    ready_e = ready_a + t_e            a value at the end of its route

An op that some choice gives no kernel (a view) waits for its inputs only. In a step of several microbatches the chain is that of
one microbatch, so many times, then the reductions of the sums, which begin when the last microbatch has ended.

Kernels of a seconds beside collectives of b take max(a, b) + s min(a, b), on several links that of each (simulate.engine), so what is
beside a chain lengthens it by s. L: links whose seconds beside it are counted, none, one or all, and |L - m| their number without m:

    weight of     a kernel    a collective of link m    a wait within an op
    in the chain  1           1 - s |L - m|             1 - s |L|
    beside it     s           s in L, else 0            0
    all kernels   1           s in L, else 0            1 - s |L|
    all of link l s           1 for l, else 0           0

What is beside a collective of another link, or a wait, may slow nothing: hence 1 - s there. A kernel that may run early, before others that
stand before it, is always beside the chain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.formulate import EARLY, Formulation, StreamSeconds
from autoshard.graph import ACCUMULATED, KEPT
from autoshard.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Chain:
    """How much of the seconds of each node and each edge count, per stream (formulate.streams)."""

    nodes: np.ndarray  # (nodes, streams)
    edges: np.ndarray  # (edges, streams)


def longest_chain(formulation: Formulation, streams: StreamSeconds, nodes: np.ndarray, edges: np.ndarray) -> Chain:
    """The longest chain at these seconds of each node and each edge, by stream: those of one plan, or a mean of several plans'."""
    chain = _Longest(formulation, streams, nodes, edges).chain()
    weighted = [Chain(beside + more * chain.nodes, beside + more * chain.edges) for beside, more in _weights(formulation, streams)]
    return max(weighted, key=lambda one: float((one.nodes * nodes).sum() + (one.edges * edges).sum()))


def critical_chain(timeline: Timeline, streams: StreamSeconds) -> Chain:
    """The critical path of a time line: per node, edge and stream the share of microbatches in which tasks of that stream are in it.
    Whatever shortens the step shortens some of these, or changes the order in which tasks run."""
    program, path, problem = timeline.program, set(timeline.critical_path), timeline.program.formulation.problem
    columns = [[0, EARLY, -1], *([k] for k in 2 * streams.of_axis), [], []]  # by the stream of a task; the host's two have none

    def shares(num: int, spans: Iterable[Sequence[tuple[int, int]]]) -> np.ndarray:
        of = np.zeros((num, streams.num))
        for k, spans_of_k in enumerate(zip(*spans)):
            ran = [range(*span) for span in spans_of_k if span[0] < span[1]]
            for tasks in ran:
                of[k, list({c for t in tasks if t in path for c in columns[program.tasks[t].stream]})] += 1 / len(ran)
        return of

    ops, links = zip(*program.earlier, (program.of_op, program.of_link))
    return Chain(shares(len(problem.node_costs), ops), shares(len(problem.edges), links))


def full_streams(formulation: Formulation, streams: StreamSeconds) -> list[Chain]:
    """All seconds of the kernels, and of each link, with what those of the other slow them by."""
    kernels, rows = np.zeros(streams.num), []
    kernels[[0, EARLY, -1]] = 1.0
    for beside, more in _weights(formulation, streams):
        rows.append(beside + more * kernels)
    for link in range(1, streams.num - 2):
        row = np.zeros(streams.num)
        row[[0, EARLY]], row[link] = formulation.mesh.device.beside, 1.0
        rows.append(row)
    problem = formulation.problem
    return [Chain(np.tile(row, (len(problem.node_costs), 1)), np.tile(row, (len(problem.edges), 1))) for row in rows]


def _weights(formulation: Formulation, streams: StreamSeconds) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each L: by stream the weights of what is beside a chain, and by how much more that in it counts."""
    s, links = formulation.mesh.device.beside, list(range(1, streams.num - 2))
    for counted in [[], *([link] for link in links), *[links] * (len(links) > 1)]:
        beside, more = np.zeros(streams.num), np.full(streams.num, 1.0 - s * len(counted))
        beside[[0, EARLY, *counted]], more[[0, EARLY]] = s, 1.0 - s
        yield beside, more


@dataclass(frozen=True, slots=True)
class _Link:
    """The last link of a chain, and the link before it."""

    end: float  # seconds from the start
    before: _Link | None = None
    node: int = -1
    edge: int = -1
    full: bool = False  # the node with its collectives, not its kernel alone


NEVER, BEGIN = _Link(-math.inf), _Link(0.0)


class _Longest:
    def __init__(self, formulation: Formulation, streams: StreamSeconds, nodes: np.ndarray, edges: np.ndarray):
        self.formulation, self.streams = formulation, streams
        self.kernel = (nodes[:, 0] + nodes[:, -1]).tolist()
        self.full, self.moved = (nodes.sum(axis=1) - nodes[:, EARLY]).tolist(), edges.sum(axis=1).tolist()
        self.always = {id(part): bool((part[:, 0] + part[:, -1] > 0).all()) for part in streams.nodes}  # a kernel under every choice
        self.into: dict[int, list[int]] = {}
        for k, e in enumerate(formulation.problem.edges):
            self.into.setdefault(e.b, []).append(k)
        self.of_op: dict[int, list[int]] = {}  # op -> its hubs
        for (i, _), node in formulation.hubs.items():
            self.of_op.setdefault(i, []).append(node)
        self.several = formulation.microbatches > 1
        self.ready: dict[int, _Link] = {}  # node -> when its value is there
        self.reduced: dict[int, _Link] = {}  # parameter -> when the sum of its gradients is reduced
        self.last = BEGIN  # of the kernels, in order

    def chain(self) -> Chain:
        ops = self.formulation.graph.ops
        for i, op in enumerate(ops):
            if op.is_placeholder or op.kind == KEPT:  # of several microbatches only the first waits for what is fetched
                self.ready[i] = NEVER if self.several else BEGIN
            else:
                self._run(i, op.kind == ACCUMULATED)
            for hub in self.of_op.get(i, ()):
                self.ready[hub] = self._inputs(hub)
        last = self._reductions() if self.several else self._outputs()
        return self._traced(max(last, self._updates(), key=lambda link: link.end))

    def _inputs(self, node: int) -> _Link:
        """When the last input of a node is there."""
        latest = NEVER
        for k in self.into.get(node, ()):
            start = self.ready.get(self.formulation.problem.edges[k].a, NEVER)
            if start.end + self.moved[k] > latest.end:
                latest = _Link(start.end + self.moved[k], start, edge=k)
        return latest

    def _run(self, i: int, waits: bool) -> None:
        """waits: the op may run at the end of its microbatch, so it has no place in the order of kernels."""
        inputs = self._inputs(i)
        in_order = not waits and self.always[id(self.streams.nodes[i])]
        begin = max(self.last, inputs, key=lambda link: link.end) if in_order else inputs
        self.ready[i] = _Link(begin.end + self.full[i], begin, node=i, full=True)
        if in_order:
            self.last = _Link(begin.end + self.kernel[i], begin, node=i)
        elif not waits and self.kernel[i]:
            self.last = _Link(self.last.end + self.kernel[i], self.last, node=i)

    def _reductions(self) -> _Link:
        """The sums of gradients, reduced one after the other."""
        ops, link = self.formulation.graph.ops, self.last
        for k, e in enumerate(self.formulation.problem.edges):
            if e.a < len(ops) and ops[e.a].kind == ACCUMULATED:
                link = _Link(link.end + self.moved[k], link, edge=k)
                self.reduced[e.b] = link
        return link

    def _outputs(self) -> _Link:
        """The last result that is no parameter's or buffer's."""
        first = len(self.formulation.graph.ops) + len(self.formulation.hubs)
        return max((self._inputs(node) for node in range(first, len(self.kernel))), key=lambda link: link.end, default=NEVER)

    def _updates(self) -> _Link:
        """The optimizer's steps, in the order of the parameters, each after its gradient."""
        for i, op in enumerate(self.formulation.graph.ops):
            if op.is_placeholder and self.full[i]:
                gradient = self.reduced.get(i, NEVER) if self.several else self._inputs(i)
                in_order = self.always[id(self.streams.nodes[i])]
                begin = max(self.last, gradient, key=lambda link: link.end) if in_order else self.last
                self.last = _Link(begin.end + self.full[i], begin, node=i, full=True)
        return self.last

    def _traced(self, link: _Link | None) -> Chain:
        assert link is not None
        nodes = np.zeros((len(self.kernel), self.streams.num))
        edges = np.zeros((len(self.moved), self.streams.num))
        while link is not None:
            if link.node >= 0:
                nodes[link.node, : EARLY if link.full else 1] = nodes[link.node, -1] = 1.0
            if link.edge >= 0:
                edges[link.edge] = 1.0
            link = link.before
        return Chain(nodes, edges)
