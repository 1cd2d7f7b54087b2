"""The time line of a schedule: when its units run, and when the transfers between devices run.

Transfers overlap with the units. Those from one device to another share a link and run one after the other, in the order in which their
data is ready. Data parallel pipelines (chains) can share the link as well. If s of them sending at once take t, each has the link for
(t - latency) / s, and its data arrives a latency later. A transfer begins when its data is ready. For schedules in RECEIVES_IN_TURN it
also waits until the receiver has reached the unit that reads it: torch 2.13's Schedule1F1B and ScheduleGPipe (and Megatron's 1F1B) post a
receive when its unit is next, and gloo and NCCL send to a posted receive only. Torch's runtime of lists of units, under which pipelines of
`parallelize` run and torch's interleaved and zero-bubble schedules, posts each receive by itself, earlier (`posted_after`). There

    nccl   what a pair of devices sends to and fro runs one after the other: one stream per pair (ProcessGroupNCCL, getKeySendRecv)
    gloo   the word that a receive is posted follows the data that its device is sending to the same one: on a link of 20 Mbit/s, 16
           transfers of 26 ms there and back took 0.42 s and not 0.29 (benchmarks/cluster/pipeline.py)

The order in which transfers take a link, or a pair of devices, depends on when they are ready and received. So this is no list of tasks for
`simulate.run_tasks`, in which every stream has its order beforehand.
"""

import heapq
import math
from dataclasses import dataclass

from autoshard.pipeline.schedules import PerPart, Schedule, per_part

RECEIVES_IN_TURN = ("sequential", "gpipe", "1f1b")


@dataclass(frozen=True)
class Span:
    """A unit of part `part`, or (kind "finish") the work of a device after its last unit; in seconds from the step's start."""

    device: int
    kind: str  # F, B, W, finish; of a transfer from `device` to `to`, the kind of the unit that reads it
    microbatch: int
    part: int
    start: float
    end: float
    to: int = -1


@dataclass(frozen=True)
class ScheduleRun:
    """The time line of a schedule. Bytes and seconds per device."""

    schedule: Schedule
    seconds: float
    busy: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    spans: tuple[Span, ...]  # in the order of their ends
    sends: tuple[Span, ...]

    @property
    def bubble(self) -> float:
        """The idle share of all devices' time."""
        total = self.seconds * len(self.busy)
        return max(0.0, 1.0 - math.fsum(self.busy) / total) if total else 0.0


def run(
    schedule: Schedule,
    *,
    forward: PerPart,
    backward: PerPart,
    weight: PerPart | None = None,
    transfer: PerPart = 0.0,
    transfer_back: PerPart | None = None,
    finish: PerPart = 0.0,
    activation_bytes: PerPart = 0.0,
    fixed_bytes: PerPart = 0.0,
    kept_bytes: PerPart | None = None,
    latency: PerPart = 0.0,
    chains: int = 1,
    in_turn: bool | None = None,
    backend: str = "nccl",
) -> ScheduleRun:
    """The time line of one step.

    Per part of the model and microbatch, one number for all or a sequence of schedule.parts: forward, backward: seconds; weight: the
    seconds of backward that compute weight gradients (default half), a separate unit in schedules that split it; transfer:
    seconds of the transfer of part v's output to part v + 1 (transfer_back: of the gradient from part v + 1 to v, default the same).
    finish: seconds per device after its last unit (gradient reduction, optimizer). activation_bytes, kept_bytes, fixed_bytes: as in
    `Schedule.peak_bytes`. latency: of `transfer`, the seconds in which the link is free for others.
    chains: data parallel pipelines that share the links; `transfer` is then the seconds of all of them at once, and the time line is that
    of the chain that ends last. in_turn: whether a transfer waits until its receiver's unit is next; by default that of the schedule's
    name. backend: nccl or gloo, which differ where it is not. ValueError for a schedule that deadlocks.
    """
    n, p = schedule.parts, schedule.devices
    F, both = per_part(forward, n, "forward"), per_part(backward, n, "backward")  # both: of activations and of weights
    W = [b / 2 for b in both] if weight is None else per_part(weight, n, "weight")
    send = per_part(transfer, n, "transfer")
    send_back = send if transfer_back is None else per_part(transfer_back, n, "transfer_back")
    last = per_part(finish, p, "finish")
    if schedule.splits_backward:
        if any(w > b for w, b in zip(W, both)):
            raise ValueError("weight is larger than backward in some part; expected the seconds of its weight gradients alone")
        B = [b - w for b, w in zip(both, W)]
    else:
        B = both
    late = per_part(latency, n, "latency")
    transfers = {("F", v + 1): (send[v], min(late[v], send[v])) for v in range(n - 1)}
    transfers |= {("B", v): (send_back[v], min(late[v], send_back[v])) for v in range(n - 1)}
    waits = schedule.name in RECEIVES_IN_TURN if in_turn is None else in_turn
    spans, sends = _Clock(schedule, {"F": F, "B": B, "W": W}, transfers, chains, "in turn" if waits else backend).run()
    ends = [0.0] * p
    for span in spans:
        ends[span.device] = max(ends[span.device], span.end)
    busy = [schedule.microbatches * math.fsum(F[d::p] + both[d::p]) for d in range(p)]
    finishing = [Span(d, "finish", -1, d, ends[d], ends[d] + last[d]) for d in range(p) if last[d]]
    return ScheduleRun(
        schedule,
        max((e + f for e, f in zip(ends, last)), default=0.0),
        tuple(b + f for b, f in zip(busy, last)),
        schedule.peak_bytes(activation_bytes, fixed_bytes, kept_bytes),
        (*spans, *finishing),
        tuple(sends),
    )


def posted_after(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """By kind, part and microbatch of a unit that reads a transfer: how many units its device has run when it posts the receive.

    Torch's rule (_add_send_recv): devices in turn take their next unit if all that it reads is there or posted; the receive of what
    it sends is then the next entry of the receiver's list.
    """
    p, n = schedule.devices, schedule.parts
    at, posted = [0] * p, {("F", 0, i): 0 for i in range(schedule.microbatches)}
    done: set[tuple[str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for d, units in enumerate(schedule.units):
            if at[d] == len(units):
                continue
            kind, v, i = units[at[d]]
            reads = ("F", v, i) if kind == "B" and v == n - 1 else (kind, v, i)
            if kind == "W" or reads in (done if reads[0] != kind else posted):
                at[d], moved = at[d] + 1, True
                done.add((kind, v, i))
                to = v + 1 if kind == "F" else v - 1
                if kind != "W" and 0 <= to < n:
                    posted[kind, to, i] = at[to % p]
    return posted


Message = tuple[int, str, int, int]  # chain, kind, part and microbatch of the unit that waits for it


class _Clock:
    """Event by event. Device d of chain c has the number c p + d.

    transfers: by kind and part of the unit that reads it, its seconds, and of these the latency. receives: in turn, nccl or gloo.
    A transfer begins once it is offered (its data is ready) and posted (its sender knows that it is received).
    """

    def __init__(self, schedule: Schedule, seconds: dict[str, list[float]], transfers: dict[tuple[str, int], tuple[float, float]],
                 chains: int, receives: str):  # fmt: skip
        self.schedule, self.seconds, self.transfers, self.chains, self.receives = schedule, seconds, transfers, chains, receives
        self.p = p = schedule.devices
        self.order = schedule.units
        self.at, self.free, self.busy = [0] * (p * chains), [0.0] * (p * chains), [False] * (p * chains)
        self.arrived: dict[Message, float] = {(c, "F", 0, i): 0.0 for c in range(chains) for i in range(schedule.microbatches)}
        self.offered: dict[Message, float] = {}
        self.posted: dict[Message, float] = {}
        self.posts: dict[tuple[int, int], list[tuple[str, int, int]]] = {}  # by device and the number of units that it has run
        if receives == "in turn":
            self.posts = {(d, k): [unit] for d, units in enumerate(self.order) for k, unit in enumerate(units)}
        else:
            for unit, count in posted_after(schedule).items():
                self.posts.setdefault((unit[1] % p, count), []).append(unit)
        self.link_free: dict[tuple[int, int], float] = {}  # by sender and receiver, shared by all chains
        self.pair_free: dict[tuple[int, int, int], float] = {}  # by chain and both devices: of nccl
        self.running: list[tuple[float, int, float]] = []  # (end, device, start)
        self.spans: list[list[Span]] = [[] for _ in range(chains)]
        self.sends: list[list[Span]] = [[] for _ in range(chains)]

    def run(self) -> tuple[list[Span], list[Span]]:
        """Units in the order of their ends, ties by device, and transfers; of the chain that ends last."""
        for x in range(len(self.at)):
            self._post(x, 0.0)
            self._begin(x)
        while self.running:
            self._finish(*heapq.heappop(self.running))
        for d, units in enumerate(self.order):
            if self.at[d] < len(units):
                kind, i, chunk = self.schedule.order[d][self.at[d]]
                raise ValueError(f"schedule {self.schedule.name}: device {d} waits for ever to run {kind} of microbatch {i}, chunk {chunk}")
        last = max(range(self.chains), key=lambda c: max((span.end for span in self.spans[c]), default=0.0))
        return self.spans[last], self.sends[last]

    def _begin(self, x: int) -> None:
        c, d = divmod(x, self.p)
        if self.busy[x] or self.at[x] == len(self.order[d]):
            return
        kind, v, i = self.order[d][self.at[x]]
        ready = self.free[x] if kind == "W" else self.arrived.get((c, kind, v, i))
        if ready is not None:
            start = max(self.free[x], ready)
            self.busy[x] = True
            heapq.heappush(self.running, (start + self.seconds[kind][v], x, start))

    def _finish(self, end: float, x: int, start: float) -> None:
        c, d = divmod(x, self.p)
        kind, v, i = self.order[d][self.at[x]]
        self.spans[c].append(Span(d, kind, i, v, start, end))
        self.at[x] += 1
        self.free[x], self.busy[x] = end, False
        if kind == "F" and v + 1 == self.schedule.parts:
            self.arrived[c, "B", v, i] = end  # the loss is in the last part
        elif kind == "F" or (kind == "B" and v > 0):
            self._offer((c, kind, v + 1 if kind == "F" else v - 1, i), d, end)
        self._post(x, end)
        self._begin(x)

    def _offer(self, message: Message, sender: int, end: float) -> None:
        c, kind, to, _ = message
        receiver = to % self.p
        if receiver == sender or not self.transfers[kind, to][0]:
            self.arrived[message] = end
        else:
            self.offered[message] = end
            if message in self.posted:
                self._carry(message)
        if receiver != sender:
            self._begin(c * self.p + receiver)

    def _post(self, x: int, now: float) -> None:
        """The receives that a device posts after the units that it has run."""
        c, d = divmod(x, self.p)
        for kind, v, i in self.posts.get((d, self.at[x]), ()):
            message, sender = (c, kind, v, i), (v - 1 if kind == "F" else v + 1) % self.p
            self.posted[message] = max(now, self.link_free.get((d, sender), 0.0)) if self.receives == "gloo" else now
            if message in self.offered:
                self._carry(message)

    def _carry(self, message: Message) -> None:
        c, kind, to, i = message
        v, (seconds, late) = to - 1 if kind == "F" else to + 1, self.transfers[kind, to]
        link = v % self.p, to % self.p
        pair = (c, min(link), max(link))
        start = max(self.offered.pop(message), self.posted[message], self.link_free.get(link, 0.0), self.pair_free.get(pair, 0.0))
        self.link_free[link] = start + (seconds - late) / self.chains
        self.arrived[message] = self.link_free[link] + late
        if self.receives == "nccl":
            self.pair_free[pair] = self.arrived[message]
        self.sends[c].append(Span(link[0], kind, i, v, start, self.arrived[message], link[1]))
