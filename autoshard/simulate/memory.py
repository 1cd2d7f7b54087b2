"""Bytes over time of a time line, by kind (formulate.usages.KINDS): what each usage of the problem holds, and from when to when.

    value      from the begin of its op, or of the move into its hub or parameter, to the end of the last op, or move, that reads it
    heir       a view that counts for a storage, or a hub in the same layout: from the end of what counted for it before
    copy       from the begin of its move to the end of its reader
    buffers    of a move between two values, while it runs; both of these count for themselves. In the problem they can't at each of its
               times: there they are part of what the move holds

Without overlap everything runs in the order of the problem's times, which decide alone: the peak is the plan's.
"""

import numpy as np

from autoshard.graph import ACCUMULATED, KEPT
from autoshard.layout import local_numel
from autoshard.problem import Usage
from autoshard.routes import buffer_table
from autoshard.simulate.engine import Times
from autoshard.simulate.tasks import COMPUTE, TaskProgram

Row = tuple[float, int, float, int]  # seconds of the begin and the problem's time of it, the same of the end
Counting = tuple[str, int, int]  # what counts for a storage: ("node", its number, the op's output), or ("edge", its number, 0) of a copy


def memory_over_time(program: TaskProgram, times: Times, seconds: float) -> dict[str, np.ndarray]:
    """`seconds` at which memory changes, and from there on the bytes held of each kind and in `total`. seconds: of the step."""
    held, rows = _Held(program, times, seconds), []
    usages = program.formulation.problem_as_run(program.choice).usages  # as the plan's peak is counted
    for usage, kind, output in zip(usages, program.formulation.held, _outputs(program), strict=True):
        if amount := usage.held(program.choice):
            if kind == "temporaries" and usage.edge is not None and program.overlap and held.is_between(usage.edge):
                rows += [(*row, some, kind) for row, some in held.while_moved(usage) if some]
            else:
                rows += [(*row, amount, kind) for row in held.while_read(usage, output, is_value=kind != "temporaries")]
    return _profile(rows, by_order=not program.overlap)


class _Held:
    """When the usages of a problem are held in the time line of a plan."""

    def __init__(self, program: TaskProgram, times: Times, seconds: float):
        self.program, self.times, self.formulation = program, times, program.formulation
        self.spans = [*program.earlier, (program.of_op, program.of_link)]
        self.ends = _ends(program, times, seconds)
        self.n, self.links, ops = len(program.graph.ops), self.formulation.tensor_edges, program.graph.ops
        self.targets = {*self.formulation.hubs.values(), *(i for i, op in enumerate(ops) if op.is_placeholder)}
        self.source: dict[int, int] = {}  # of a hub, or a view: the link of its value, or of its base
        for k, link in enumerate(self.links):
            view = ops[link.b] if link.b < self.n and ops[link.b].is_view else None
            if link.b >= self.n and link.b in self.targets or view is not None and view.inputs[view.alias or 0] == link.value:
                self.source[link.b] = k
        usages = [(u, kind) for u, kind in zip(self.formulation.problem.usages, self.formulation.held) if u.held(program.choice)]
        self.counted = {u.ends[0] for u, kind in usages if u.edge is None and kind != "temporaries"}
        self.heirs: dict[Counting, Counting] = {}
        for node in self.counted & set(self.source):
            self.heirs[self._before(node)] = ("node", node, 0)
        copied = {u.edge for u, kind in usages if kind == "resharded_copies"}
        self.into: dict[int, list[int]] = {}
        self.out_of: dict[Counting, list[int]] = {}
        for k, link in enumerate(self.links):
            if self._is_moved(k):
                self.out_of.setdefault(self._last(link.a, link.value[1]), []).append(k)
                if link.b in self.targets and k not in copied:
                    self.into.setdefault(link.b, []).append(k)

    def _is_moved(self, k: int) -> bool:
        first, stop = self.program.of_link[k]
        return first < stop

    def _before(self, node: int) -> Counting:
        """What counts for the storage of a view, or of a hub, before it does."""
        k = self.source[node]
        return ("edge", k, 0) if self._is_moved(k) else self._counting(self.links[k].a, self.links[k].value[1])

    def _counting(self, node: int, output: int) -> Counting:
        is_counted_before = node in self.source and node not in self.counted
        return self._before(node) if is_counted_before else ("node", node, output if node < self.n else 0)

    def _last(self, node: int, output: int) -> Counting:
        """What counts for the storage of a node's value in the end."""
        counting = self._counting(node, output)
        while counting in self.heirs:
            counting = self.heirs[counting]
        return counting

    def is_between(self, edge: int) -> bool:
        """Whether both ends of a move are values that count for themselves; a copy into a hub counts, too."""
        return self.links[edge].b in self.targets and self._is_moved(edge)

    def while_moved(self, usage: Usage) -> list[tuple[Row, float]]:
        """What a move holds besides its source and its target, and the bytes: buffers of each step, and what it leaves for the next."""
        edge, rows = usage.edge or 0, []
        route = self.formulation.route(self.links[edge], self.program.choice)
        assert route is not None
        tensor, last = self.links[edge].tensor, len(route.steps) - 1
        for k, _, start, end in _held_in(usage, self.n, len(self.spans)):
            first, stop = self.spans[k][1][edge]
            for j, step in enumerate(route.steps):
                arrives = local_numel(tensor.shape, step.after, self.formulation.mesh) * tensor.itemsize
                needed = buffer_table(self.formulation.routes, tensor.shape, tensor.itemsize, [step.before], [step.after])[0, 0]
                at, then = (min(first + n, stop - 1) for n in (j, j + 1))  # of a bucket the last step alone has a task
                rows.append(((self.times.begin[at], start, self.times.end[at], end), float(needed - arrives)))
                rows.append(((self.times.begin[at], start, self.times.end[then], end), float(arrives) * (j < last)))
        return rows

    def while_read(self, usage: Usage, output: int, *, is_value: bool) -> list[Row]:
        """is_value: it may begin and end with a move."""
        edge, node, n = usage.edge, usage.ends[0], self.n
        fetched = edge is not None and 0 < usage.start < n and self.program.graph.ops[usage.start].kind == KEPT  # while a copy is fetched
        into = [edge] if edge is not None else self.into.get(node, []) if is_value else []
        out_of = self.out_of.get(("node", node, output) if edge is None else ("edge", edge, 0), []) if is_value else []
        rows = []
        for first, last, start, end in _held_in(usage, n, 1 if fetched else len(self.spans)):
            (of_op, of_link), later = self.spans[first], self.spans[last][1]
            moves = [(a if edge is not None else b - 1, b - 1) for a, b in (of_link[k] for k in into) if a < b]
            runs = of_op[node] if edge is None and usage.start == node < n else (0, 0)
            if start == 0 or usage.start == 0 and usage.end >= n:
                since = 0.0
            elif runs[0] < runs[1]:
                since = self.times.begin[runs[0]]
            else:
                since = min((self.times.begin[a] for a, _ in moves), default=self.ends[start - 1])
            until = [self.times.end[runs[1] - 1] if runs[0] < runs[1] and usage.end == node + 1 else self.ends[end - 1]]
            until += [self.times.end[b] for _, b in moves if edge is not None]
            until += [self.times.end[a] for a, b in (later[k] for k in out_of) if a < b]
            rows.append((min(since, max(until)), start, max(until), end))
        return rows


def _outputs(program: TaskProgram) -> list[int]:
    """Of each usage the output of its op that it is of: an op with several has one usage for each that is held, in their order."""
    formulation, left = program.formulation, {}
    for i, op in enumerate(program.graph.ops):
        held = (op.fused and op.fused.held) or [True] * len(op.outputs)
        left[i] = [k for k, tensor in enumerate(op.outputs) if tensor is not None and held[k]]
    outputs = []
    for usage, kind in zip(formulation.problem.usages, formulation.held, strict=True):
        is_output = kind == "activations" and usage.edge is None and usage.start == usage.ends[0] < len(left)
        outputs.append(left[usage.ends[0]].pop(0) if is_output else 0)
    return outputs


def _held_in(usage: Usage, n: int, m: int) -> list[tuple[int, int, int, int]]:
    """When bytes are held in a step of m microbatches of n ops: (first microbatch, last, start, end), times counted through the step."""
    if usage.start == 0 and usage.end >= n:  # throughout
        return [(0, m - 1, 0, usage.end + (m - 1) * n)]
    if usage.start >= n:  # after the last microbatch
        return [(m - 1, m - 1, usage.start + (m - 1) * n, usage.end + (m - 1) * n)]
    last = [min(usage.end, n)] * (m - 1) + [usage.end]
    return [(k, k, usage.start + k * n, end + k * n) for k, end in enumerate(last)]


def _ends(program: TaskProgram, times: Times, seconds: float) -> list[float]:
    """The end of each op in each microbatch; of a view, and of a cast that ran before its turn, when its inputs are there and the compute
    stream gets to it. Then of the reductions of the sums of gradients, and one more entry for the end of the step."""
    ends: list[float] = []
    reached, seen, edges, ops = 0.0, 0, program.formulation.tensor_edges, program.graph.ops
    into: dict[int, list[int]] = {}  # views and hubs: the links of their inputs
    for k, link in enumerate(edges):
        if link.b >= len(ops) or ops[link.b].is_view:
            into.setdefault(link.b, []).append(k)
    for of_op, of_link in (*program.earlier, (program.of_op, program.of_link)):
        before = len(ends)
        for i, (op, (first, stop)) in enumerate(zip(ops, of_op)):
            if op.is_placeholder:
                first = stop = seen
            while seen < first and op.kind != ACCUMULATED:  # a sum may come long after the op before it
                if program.tasks[seen].stream == COMPUTE or not program.overlap:
                    reached = max(reached, times.end[seen])
                seen += 1
            runs_now = first < stop and not (stop <= seen and program.tasks[first].stream == COMPUTE)
            moves = [of_link[k] for j in into.get(i, ()) for k in (j, *(into.get(edges[j].a, ()) if edges[j].a >= len(ops) else ()))]
            there = [ends[before + j] for j, _ in op.inputs] + [times.end[b - 1] for a, b in moves if a < b]
            ends.append(times.end[stop - 1] if runs_now else max([reached, *there]))
    for k, link in enumerate(program.formulation.tensor_edges):  # in the order of formulate.usages
        if link.a < len(program.graph.ops) and program.graph.ops[link.a].kind == ACCUMULATED:
            first, stop = program.of_link[k]
            ends.append(times.end[stop - 1] if first < stop else max(ends))
    return [*ends, seconds]


def _profile(rows: list[tuple[float, int, float, int, float, str]], by_order: bool) -> dict[str, np.ndarray]:
    """Bytes by kind over time. At equal seconds (or by_order alone) the order of the ops decides, and memory is freed first."""
    events = [(begin, order, 1, amount, kind) for begin, order, _, _, amount, kind in rows]
    events += [(end, order, 0, -amount, kind) for _, _, end, order, amount, kind in rows]
    events.sort(key=(lambda event: event[1:3]) if by_order else (lambda event: event[:3]))
    kinds = sorted({kind for *_, kind in rows})
    number = {kind: n for n, kind in enumerate(kinds)}
    deltas = np.zeros((len(kinds), len(events)))
    deltas[[number[event[4]] for event in events], np.arange(len(events))] = [event[3] for event in events]
    curves = np.cumsum(deltas, axis=1)
    seconds = np.maximum.accumulate(np.array([event[0] for event in events], dtype=float))
    return {"seconds": seconds, "total": curves.sum(axis=0), **dict(zip(kinds, curves))}
