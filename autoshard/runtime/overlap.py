"""Collectives are started early and waited for late, so that they run while the rank computes.

Anchors (flow.py) keep their order. A lazy node is placed as late as its users allow, with two exceptions:

    start                          it is placed as soon as its input is computed; a start that only fetches parameters is placed when its
                                   link is idle and the live bytes up to its need stay within `limit`
    wait that another start reads  it is placed as soon as the collective has ended by the estimate (flow.Pace)

What no kernel waits for soon, gathers of parameters and reductions of gradients, has a second process group on axes with other
collectives, so that those don't queue behind it; it starts where none of them is running by the estimate, and lets the next go first
where it may (cost.Gaps).

So gathers of parameters are prefetched one after another, and reductions of gradients run until the end of the pass. Where the buffers
of running reductions would exceed `limit`, the rank waits for the oldest. The time line comes from the same estimates. Where shards differ
in size from rank to rank, all ranks take the order of the first one, whose shards are the largest.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

from torch import fx

from autoshard.cost import Gaps
from autoshard.lower import ADD, STARTS, VIEWS, WAIT, Flow, LiveBytes, Pace, largest_buffer, live_bytes, size
from autoshard.mesh import Mesh
from autoshard.runtime.bucketing import bucket, reorder, with_inputs


@dataclass(frozen=True)
class Overlapped:
    """One collective on the time line. Seconds are estimates, from the start of the pass."""

    collective: str
    axis: int
    bytes: int  # largest buffer of a rank
    joined: int  # how many collectives of the program were joined into it
    what: str  # the node that reads its result
    start: float
    end: float
    wait: float  # when the rank starts to wait for it

    @property
    def hidden(self) -> float:
        """Seconds that overlap with compute."""
        return max(0.0, min(self.end, self.wait) - self.start)


def room(graphs: Iterable[fx.Graph], spare: float) -> float:
    """The limit of live bytes for a new order: the largest peak of the step's passes as they are, plus `spare`."""
    peaks = []
    for graph in graphs:
        *nodes, output = graph.nodes
        peaks.append(max(live_bytes(nodes, output), default=0))
    return max(peaks) + spare


def scheduled(
    passes: Sequence[fx.GraphModule],
    pace: Pace,
    spare: float,
    second_group: Callable[[int], str] | None = None,
    reference: Sequence[fx.GraphModule] = (),
) -> list[tuple[Overlapped, ...]]:
    """Buckets and reorders the passes of a step in place. spare: bytes by which the step's peak may grow. second_group: the name of a
    second process group of an axis; None: there is one per axis. reference: the same passes of the rank whose order all take, where
    shards differ in size from rank to rank."""
    ranks = (reference, passes) if reference else (passes,)  # the first decides
    for one in (one for of_rank in ranks for one in of_rank):  # on no rank a collective that nothing reads, as their graphs are alike
        one.graph.eliminate_dead_code(lambda node: node.target not in (WAIT, *STARTS) and node.is_impure())
    if second_group is not None:
        pace, *_ = [_in_background(of_rank, pace, second_group) for of_rank in ranks]
    limit = room([one.graph for one in ranks[0]], spare)
    for one, *others in zip(*ranks, strict=True):
        bucket(one, pace, limit, *others)
    return [overlap(one, pace, limit, *others) for one, *others in zip(*ranks, strict=True)]


def _in_background(passes: Sequence[fx.GraphModule], pace: Pace, second_group: Callable[[int], str]) -> Pace:
    flows = [Flow.of(one.graph) for one in passes]
    hurried = {pace.axis(start) for flow in flows for start in flow.starts if start not in flow.unhurried}
    moved = [start for flow in flows for start in flow.starts if start in flow.unhurried and pace.axis(start) in hurried]
    names = {axis: second_group(axis) for axis in sorted(set(map(pace.axis, moved)))}
    for start in moved:
        start.args = (*start.args[:-1], names[pace.axis(start)])
    return replace(pace, groups=replace(pace.groups, background={name: axis for axis, name in names.items()}))


def overlap(graph_module: fx.GraphModule, pace: Pace, limit: float, *others: fx.GraphModule) -> tuple[Overlapped, ...]:
    """Reorders the graph in place, and graphs like it in the same way, and returns its time line."""
    schedule = min(_schedules(graph_module.graph, pace, limit), key=lambda one: max(0.0, one.peak - limit))
    at = {node: k for k, node in enumerate(graph_module.graph.nodes)}
    order = [at[node] for node in (*schedule.order, schedule.output)]
    for one in (graph_module, *others):
        nodes = list(one.graph.nodes)
        reorder(one.graph, [nodes[k] for k in order])
        one.graph.lint()
        one.recompile()
    return schedule.timeline()


@dataclass(eq=False)
class _Schedule:
    graph: fx.Graph
    pace: Pace
    limit: float
    order: list[fx.Node] = field(default_factory=list)
    now: float = 0.0  # seconds of compute so far, waits included

    def __post_init__(self) -> None:
        *self.nodes, self.output = self.graph.nodes
        self.flow = Flow.of(self.graph)
        self.placed: set[fx.Node] = set()
        self.began: dict[fx.Node, float] = {}
        self.ends: dict[fx.Node, float] = {}
        self.waited: dict[fx.Node, float] = {}
        self.idle: dict[str, float] = {}  # when a process group becomes free
        self.memory = LiveBytes(self.nodes, self.output)  # of the new order
        self.live = live_bytes(self.nodes, self.output)  # at each node of the given order, with what begins early
        self.place = {node: k for k, node in enumerate(self.nodes)}
        self.first = [0, *(self.place[anchor] + 1 for anchor in self.flow.anchors)]  # the nodes that lead to an anchor begin there
        self.first.append(len(self.nodes) + 1)  # to the output, as if it were one
        by_need = sorted(self.flow.starts, key=self.flow.need.__getitem__)
        self.fetches = [s for s in by_need if self.flow.ready[s] < 0]
        self.kernels = [0.0, *accumulate(map(self.pace.compute, self.flow.anchors))]
        self.until = self._latest_ends()
        hurried = [start for start in by_need if start not in self.flow.unhurried]
        self.gaps = [  # per axis
            Gaps(sorted({self.flow.ready[start] + 1 for start in hurried if self.pace.axis(start) == axis}), self.kernels)
            for axis in range(len(self.pace.mesh.axes))
        ]
        self.ready_after: dict[int, list[fx.Node]] = {}
        for start in self.flow.starts:
            self.ready_after.setdefault(self.flow.ready[start], []).append(start)
        self.waiting: list[fx.Node] = []  # starts whose input only lacks a collective that has not ended
        self.running: dict[fx.Node, None] = {}  # collectives after the first anchor that began and were not waited for, oldest first
        self.at = 0  # the anchor that is placed next
        self.late = 0  # the nodes of the given order before this one are placed
        self.peak = 0  # bytes

    def run(self) -> Self:
        for node in self.nodes:
            if node.op == "placeholder":
                self._put(node)
        for anchor in self.flow.anchors:
            self._start_ready()
            self._fetch()
            self._free(anchor)
            for source in anchor.all_input_nodes:
                self._need(source)
            self._fetch()  # the anchor's waits may have freed a link
            self._put(anchor)
            self.at += 1
        self._start_ready()
        for node in self.output.all_input_nodes:
            self._need(node)
        return self

    def _start_ready(self) -> None:
        """Starts the collectives whose input is computed; those that read another collective, when that has ended."""
        still, ready = [], [*self.waiting, *(self.ready_after.get(self.at - 1, ()) if self.at else ())]
        if self.at < len(self.flow.anchors) and self.flow.anchors[self.at].target in VIEWS:  # what reads the view may be needed first
            self.waiting = ready
            return
        for start in sorted(ready, key=self.flow.need.__getitem__):
            before = self._unfinished(start)
            can = start not in self.placed and before is not None and before <= self.now and not self._is_kept_back(start)
            if can and self._fits(start):
                self._need(start)
            elif start not in self.placed:
                still.append(start)
        self.waiting = still

    def _unfinished(self, start: fx.Node) -> float | None:
        """When the collectives that this one reads have ended; None where one of them hasn't begun."""
        latest, stack, seen = 0.0, list(start.all_input_nodes), set()
        while stack:
            node = stack.pop()
            if node in self.placed or node in seen:
                continue
            seen.add(node)
            if node.target is WAIT:
                begun = node.args[0]
                if begun not in self.placed:
                    return None
                latest = max(latest, self.ends[begun])  # type: ignore[index]
                continue
            if node in self.flow.at:
                return None
            stack.extend(node.all_input_nodes)
        return latest

    def _latest_ends(self) -> dict[fx.Node, float]:
        """Of each fetch the seconds of kernels by which it has to end, for its reader and for what is behind it in its group."""
        until: dict[fx.Node, float] = {}
        behind: dict[str, float] = {}  # when the next has to begin
        for start in reversed(self.fetches):
            group, end = str(start.args[-1]), until.get(start, self.kernels[self.flow.need[start]])
            until[start] = min(end, behind.get(group, math.inf))
            behind[group] = begin = until[start] - self.pace.collective(start)
            read: set[fx.Node] = set()
            for node in with_inputs(start, read):
                read.add(node)
                if node.target in STARTS and node is not start:
                    until[node] = min(begin, until.get(node, begin))
        return until

    def _fetch(self) -> None:
        """Starts the next gathers of parameters whose links are idle and whose bytes fit until they are needed."""
        busy: set[str] = set()  # groups: what is behind in them is needed later
        self.fetches = [start for start in self.fetches if start not in self.placed]
        for start in self.fetches:
            if start in self.placed or str(start.args[-1]) in busy:
                continue
            before = self._unfinished(start)
            free = math.inf if before is None else max(self.idle.get(str(start.args[-1]), 0.0), before)  # its link, and what it reads
            if free > self.now or self._is_kept_back(start) or not self._fits(start):
                busy.add(str(start.args[-1]))
            else:
                self._need(start)

    def _fits(self, start: fx.Node) -> bool:
        """Whether the bytes of a start now instead of at its given place fit; they count from now on if they do."""
        sources = [node for node in start.all_input_nodes if node not in self.placed and node.target not in VIEWS]
        held, span = sum(map(size, (start, *sources))), slice(self.first[self.at], self.place[start])
        if span.start >= span.stop:  # it is not early
            self._free(start)
            return True
        fits = max(self.live[span]) + held <= self.limit and self.memory.ahead(self._missing(start)) <= self.limit
        if fits:
            self.live[span] = [now + held for now in self.live[span]]
        return fits

    def _is_kept_back(self, start: fx.Node) -> bool:
        """Whether it is in the background of a collective that runs, or of one that it lets go first."""
        groups, axis = self.pace.groups, self.pace.axis(start)
        if start.args[-1] not in groups.background or self.at == len(self.flow.anchors):
            return False
        if self.idle.get(groups.names[axis], 0.0) > self.now:
            return True
        left = self.kernels[self.at + 1] - self.kernels[self.at]
        return self.gaps[axis].stands_back(self.at, left, self.pace.collective(start), self.until.get(start, math.inf))

    def _free(self, node: fx.Node) -> None:
        """While a node, and what has to be placed before it, doesn't fit: waits for the oldest reductions, then places what is late."""
        while self.memory.ahead(self._missing(node)) > self.limit:
            if not self.running:
                late, self.late = self.late, self.first[self.at + 1] - 1
                for missing in self.nodes[late : self.late]:
                    self._need(missing)
                return
            start = next(iter(self.running))
            del self.running[start]
            for user in start.users:
                self._need(user)
                self._add_up(user)

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        """What has to be placed before a node, and the node, in order."""
        missing = []
        for one in with_inputs(node, self.placed):
            self.placed.add(one)
            missing.append(one)
        self.placed.difference_update(missing)
        return missing

    def _add_up(self, wait: fx.Node) -> None:
        """Adds what a collective has reduced to its sum, or reduces it further, where nothing else is missing: so its bytes are free."""
        stack = list(wait.users)
        while stack:
            node = stack.pop()
            if node.target is ADD or node.target in STARTS:
                if self.flow.ready[node] < self.at and node not in self.placed:
                    self._free(node)
                    self._need(node)
            elif node not in self.flow.at and node is not self.output:
                stack.extend(node.users)

    def _need(self, node: fx.Node) -> None:
        """Places a node, and before it everything that it reads."""
        for missing in with_inputs(node, self.placed):
            self._put(missing)

    def _put(self, node: fx.Node) -> None:
        self.placed.add(node)
        self.order.append(node)
        self.peak = max(self.peak, self.memory.run(node))
        if node.target in STARTS:
            group = str(node.args[-1])
            self.began[node] = max(self.now, self.idle.get(group, 0.0))
            self.ends[node] = self.idle[group] = self.began[node] + self.pace.collective(node)
            if self.flow.ready[node] >= 0:
                self.running[node] = None
        elif node.target is WAIT and node.args[0] in self.ends:
            start = node.args[0]
            self.waited[start] = self.now  # type: ignore[index]
            self.now = max(self.now, self.ends[start])  # type: ignore[index]
            self.running.pop(start, None)  # type: ignore[arg-type]
        else:
            self.now += self.pace.compute(node)

    def timeline(self) -> tuple[Overlapped, ...]:
        rows = []
        for start, began in self.began.items():
            reader = next((user for wait in start.users for user in wait.users), self.output)
            kind, axis, end = STARTS[start.target], self.pace.axis(start), self.ends[start]  # type: ignore[index]
            joined = len(start.meta.get("members", (0,)))
            rows.append(Overlapped(kind, axis, largest_buffer(start), joined, reader.name, began, end, self.waited.get(start, end)))
        return tuple(rows)


def _schedules(graph: fx.Graph, pace: Pace, limit: float) -> Iterator[_Schedule]:
    """The first whose order keeps the limit is the last; those before it leave too little to what begins early, for this is estimated."""
    for part in (1.0, 0.97, 0.94, 0.9, 0.8):
        yield (schedule := _Schedule(graph, pace, part * limit).run())
        if schedule.peak <= limit:
            return


def described(timelines: Mapping[str, Sequence[Overlapped]], mesh: Mesh) -> str:
    """The time line as text: a row per collective, in order of their starts, and how much of each pass is hidden."""
    lines = []
    for name, rows in timelines.items():
        total, hidden = sum(row.end - row.start for row in rows), sum(row.hidden for row in rows)
        share = f", {hidden / total:.0%} of {total * 1e3:.3f} ms beside compute" if total else ""
        lines.append(f"{name}: {len(rows)} collectives for {sum(row.joined for row in rows)} of the plan{share} (estimated)")
        for row in sorted(rows, key=lambda row: row.start):
            joined = f" x{row.joined}" if row.joined > 1 else ""
            lines.append(
                f"  {row.start * 1e3:9.3f} - {row.end * 1e3:9.3f} ms, waited for at {row.wait * 1e3:9.3f}: "
                f"{row.collective}{joined} {mesh.axes[row.axis].name}, {row.bytes / 1e3:.1f} kB, for {row.what}"
            )
    return "\n".join(lines)
