"""Pipeline schedules as data: for each device the ordered list of what it runs, and the time line that follows.

    p devices, m microbatches, c chunks per device; part v = 0 .. p c - 1 of the model lies on device v mod p, as chunk v div p
    unit      F forward, B backward, W the backward of the weights where it runs on its own (`zb_h1`), of one microbatch and chunk
    F(v, i)   waits for F(v - 1, i) and its transfer
    B(v, i)   waits for F(v, i), and for B(v + 1, i) and its transfer
    W(v, i)   comes after B(v, i) in the list of its device

A device runs its list in order, one unit at a time. Transfers run beside the units; those from one device to another share
that link and go one after the other, first made, first sent. Data parallel pipelines beside each other share it in the same way:
what s of them send at once takes t, so each in turn has the link for (t - latency) / s, and its data is there a latency later.
A transfer begins when it is made or, for schedules in RECEIVES_IN_TURN, not before its receiver has nothing else to run first.
An activation is held from the start of its F to the end of the last unit of its microbatch and chunk.
With equal parts, t_F + t_B per device (t_W a part of t_B), transfers for nothing:

    schedule            seconds                                                     activations of chunks that device d holds at most
    sequential          p m (t_F + t_B)                                             1
    gpipe               (m + p - 1) (t_F + t_B)                                     m
    1f1b                (m + p - 1) (t_F + t_B)                                     min(m, p - d)
    interleaved_1f1b    (max(m, p) + (min(m, p) - 1)/c) (t_F + t_B)                 min(c m, 2 (p - 1 - d) + (c - 1) g + 1)
                                                                                    g = ceil(m / max(1, m div p)), p where p divides m
    zb_h1               m (t_F + t_B) + (p - 1) (t_F + t_B - 2 t_W)                 min(m, p)
                          + max(0, p - m) t_W    where t_W <= t_F, t_B - t_W

The bubble is 1 - m (t_F + t_B) / seconds: (p - 1)/(m + p - 1) for gpipe and 1f1b.

Sources: GPipe, Huang et al. 2019; 1F1B, PipeDream-Flush, Narayanan et al. 2021a; interleaved, Narayanan et al. 2021b (Megatron-LM); zb_h1,
Qi et al., "Zero bubble pipeline parallelism" 2024, whose W of microbatch i runs after B of microbatch i + d. Receives: torch 2.13's
Schedule1F1B and ScheduleGPipe (and Megatron's 1F1B) post a receive when its unit comes next, and gloo and NCCL send to a posted
receive only; torch's interleaved and zero-bubble schedules post theirs when the sender's unit is in the list.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

PerPart = float | Sequence[float]  # one number for all, or one per part of the model
RECEIVES_IN_TURN = ("sequential", "gpipe", "1f1b")


class Unit(NamedTuple):
    """One run of one part: kind F, B or W."""

    kind: str
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Schedule:
    """Who runs what, in which order. The units of device d are those of parts d, d + devices, d + 2 devices, ..."""

    name: str
    microbatches: int
    chunks: int  # parts of the model per device
    order: tuple[tuple[Unit, ...], ...]  # per device

    @property
    def devices(self) -> int:
        return len(self.order)

    @property
    def parts(self) -> int:
        return self.devices * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients run on their own."""
        return any(unit.kind == "W" for unit in self.order[0])

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per device the most activations (of one microbatch and chunk) held at the same time."""
        return tuple(int(peak) for peak in self.peak_bytes(1.0))

    def peak_bytes(self, activation_bytes: PerPart, fixed_bytes: PerPart = 0.0) -> tuple[float, ...]:
        """Per device the most bytes held. activation_bytes, fixed_bytes: per part, of one microbatch; fixed is held all the time."""
        held, fixed = _per_part(activation_bytes, self.parts, "activation_bytes"), _per_part(fixed_bytes, self.parts, "fixed_bytes")
        last = "W" if self.splits_backward else "B"
        peaks = []
        for d, units in enumerate(self.order):
            now = peak = math.fsum(fixed[d :: self.devices])
            for unit in units:
                if unit.kind == "F":
                    now += held[unit.chunk * self.devices + d]
                    peak = max(peak, now)
                elif unit.kind == last:
                    now -= held[unit.chunk * self.devices + d]
            peaks.append(peak)
        return tuple(peaks)


@dataclass(frozen=True)
class Span:
    """A unit of part `part`, or (kind "finish") what a device does after its last unit; in seconds from the step's start."""

    device: int
    kind: str  # F, B, W, finish; send where `device` sends to `to`
    microbatch: int
    part: int
    start: float
    end: float
    to: int = -1


@dataclass(frozen=True)
class Run:
    """The time line of a schedule. Bytes and seconds per device."""

    schedule: Schedule
    seconds: float
    busy: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    spans: tuple[Span, ...]  # in the order of their ends
    sends: tuple[Span, ...]

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they run nothing."""
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
    latency: PerPart = 0.0,
    chains: int = 1,
) -> Run:
    """The time line of one step.

    Per part of the model and microbatch, one number for all or a sequence of schedule.parts: forward, backward: seconds; weight: the
    seconds of backward that make weight gradients (default half), which run on their own in schedules that split it; transfer:
    seconds of part v's output on its way to part v + 1 (transfer_back: of the gradient from part v + 1 to v, default the same).
    finish: seconds per device after its last unit (gradient reduction, optimizer). activation_bytes: what F leaves for B;
    fixed_bytes: parameters, their gradients and optimizer state. latency: of `transfer`, the seconds in which the link is free for others.
    chains: pipelines beside each other that share the links, `transfer` being the seconds of all of theirs at once; the time line is of
    the one that ends last. ValueError for a schedule that waits for itself.
    """
    n, p = schedule.parts, schedule.devices
    F, whole = _per_part(forward, n, "forward"), _per_part(backward, n, "backward")
    W = [b / 2 for b in whole] if weight is None else _per_part(weight, n, "weight")
    there = _per_part(transfer, n, "transfer")
    back = there if transfer_back is None else _per_part(transfer_back, n, "transfer_back")
    last = _per_part(finish, p, "finish")
    if schedule.splits_backward:
        if any(w > b for w, b in zip(W, whole)):
            raise ValueError("weight is larger than backward in some part; expected the seconds of its weight gradients alone")
        B = [b - w for b, w in zip(whole, W)]
    else:
        B = whole
    spans, sends = _Clock(schedule, {"F": F, "B": B, "W": W}, there, back, _per_part(latency, n, "latency"), chains).run()
    ends = [0.0] * p
    for span in spans:
        ends[span.device] = max(ends[span.device], span.end)
    busy = [schedule.microbatches * math.fsum(F[d::p] + whole[d::p]) for d in range(p)]
    finishing = [Span(d, "finish", -1, d, ends[d], ends[d] + last[d]) for d in range(p) if last[d]]
    return Run(
        schedule,
        max((e + f for e, f in zip(ends, last)), default=0.0),
        tuple(b + f for b, f in zip(busy, last)),
        schedule.peak_bytes(activation_bytes, fixed_bytes),
        (*spans, *finishing),
        tuple(sends),
    )


Message = tuple[int, str, int, int]  # chain, kind, part and microbatch of the unit that waits for it


class _Clock:
    """Event by event. Device d of chain c has the number c p + d; there, back: `transfer` and `transfer_back` of `run`."""

    def __init__(self, schedule: Schedule, seconds: dict[str, list[float]], there: list[float], back: list[float],
                 latency: list[float], chains: int):  # fmt: skip
        self.schedule, self.seconds, self.there, self.back, self.latency, self.chains = schedule, seconds, there, back, latency, chains
        self.p, self.n = schedule.devices, schedule.parts
        self.order = schedule.order * chains
        self.at, self.free, self.busy = [0] * len(self.order), [0.0] * len(self.order), [False] * len(self.order)
        self.arrived: dict[Message, float] = {(c, "F", 0, i): 0.0 for c in range(chains) for i in range(schedule.microbatches)}
        self.offered: dict[Message, tuple[float, float]] = {}  # when it was made, seconds of its transfer
        self.link_free: dict[tuple[int, int], float] = {}
        self.running: list[tuple[float, int, float]] = []  # (end, device, start)
        self.spans: list[list[Span]] = [[] for _ in range(chains)]
        self.sends: list[list[Span]] = [[] for _ in range(chains)]

    def run(self) -> tuple[list[Span], list[Span]]:
        """Units in the order of their ends, ties by device, and transfers; of the chain that ends last."""
        for x in range(len(self.order)):
            self._begin(x)
        while self.running:
            self._finish(*heapq.heappop(self.running))
        self._refuse_who_waits()
        last = max(range(self.chains), key=lambda c: max((span.end for span in self.spans[c]), default=0.0))
        return self.spans[last], self.sends[last]

    def _next(self, x: int) -> tuple[str, int, int, int, int]:
        """Kind and microbatch of the unit that a device runs next or runs, its part of the model, chain and device."""
        kind, i, chunk = self.order[x][self.at[x]]
        c, d = divmod(x, self.p)
        return kind, i, chunk * self.p + d, c, d

    def _begin(self, x: int) -> None:
        if self.at[x] == len(self.order[x]) or self.busy[x]:
            return
        kind, i, v, c, _ = self._next(x)
        if (c, kind, v, i) in self.offered:
            self._carry((c, kind, v, i), self.free[x])
        ready = self.free[x] if kind == "W" else self.arrived.get((c, kind, v, i))
        if ready is not None:
            start = max(self.free[x], ready)
            self.busy[x] = True
            heapq.heappush(self.running, (start + self.seconds[kind][v], x, start))

    def _finish(self, end: float, x: int, start: float) -> None:
        kind, i, v, c, d = self._next(x)
        self.spans[c].append(Span(d, kind, i, v, start, end))
        self.at[x] += 1
        self.free[x], self.busy[x] = end, False
        if kind == "F" and v + 1 < self.n:
            self._send((c, "F", v + 1, i), v, end, self.there[v])
        elif kind == "F":
            self.arrived[c, "B", v, i] = end  # the loss is in the last part
        elif kind == "B" and v > 0:
            self._send((c, "B", v - 1, i), v, end, self.back[v - 1])
        self._begin(x)

    def _send(self, message: Message, v: int, end: float, took: float) -> None:
        c, _, to, _ = message
        a, b = v % self.p, to % self.p
        if a == b or not took:
            self.arrived[message] = end
        else:
            self.offered[message] = (end, took)
            if self.schedule.name not in RECEIVES_IN_TURN:
                self._carry(message, 0.0)
        if b != a:
            self._begin(c * self.p + b)

    def _carry(self, message: Message, received: float) -> None:
        """The transfer, begun where its receiver waits since `received`."""
        made, took = self.offered.pop(message)
        c, kind, to, i = message
        v = to - 1 if kind == "F" else to + 1
        link, late = (v % self.p, to % self.p), min(self.latency[min(v, to)], took)
        start = max(made, received, self.link_free.get(link, 0.0))
        self.link_free[link] = start + (took - late) / self.chains
        self.arrived[message] = self.link_free[link] + late
        self.sends[c].append(Span(link[0], kind, i, v, start, self.arrived[message], link[1]))

    def _refuse_who_waits(self) -> None:
        for d in range(self.p):
            if self.at[d] < len(self.order[d]):
                kind, i, chunk = self.order[d][self.at[d]]
                raise ValueError(f"schedule {self.schedule.name}: device {d} waits for ever to run {kind} of microbatch {i}, chunk {chunk}")


def _per_part(value: PerPart, count: int, name: str) -> list[float]:
    values = [float(value)] * count if isinstance(value, (int, float)) else [float(x) for x in value]
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers; expected {count}, one per part, or one number for all")
    if any(not 0 <= x < math.inf for x in values):
        raise ValueError(f"{name} holds {next(x for x in values if not 0 <= x < math.inf)}; expected numbers of 0 or more")
    return values


# -- the orders -------------------------------------------------------------------------------------------------------------


def _alternate(forwards: list[Unit], backwards: list[Unit], warmup: int) -> list[Unit]:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    warmup = min(warmup, len(forwards))
    units = forwards[:warmup]
    for f, b in zip(forwards[warmup:], backwards):
        units += [f, b]
    return units + backwards[len(forwards) - warmup :]


def _1f1b(d: int, p: int, m: int) -> list[Unit]:
    return _alternate([Unit("F", i) for i in range(m)], [Unit("B", i) for i in range(m)], p - 1 - d)


def _zb_h1(d: int, p: int, m: int) -> list[Unit]:
    """1F1B with W(i - d) after B(i), the last d after all: every device then holds as many activations as the first."""
    units: list[Unit] = []
    for unit in _1f1b(d, p, m):
        units.append(unit)
        if unit.kind == "B" and unit.microbatch >= d:
            units.append(Unit("W", unit.microbatch - d))
    return units + [Unit("W", i) for i in range(max(0, m - d), m)]


def _interleaved(d: int, p: int, m: int, chunks: int) -> list[Unit]:
    """Rounds of microbatches go through chunk 0, then through chunk 1, ...; backwards from the last chunk.

    A round has p microbatches; where p does not divide m the rest is dealt to the first rounds, as one below p would wait for itself.
    """
    count = max(1, m // p)
    firsts = [k * (m // count) + min(k, m % count) for k in range(count + 1)]
    rounds = [range(a, b) for a, b in pairwise(firsts)]
    forwards = [Unit("F", i, c) for some in rounds for c in range(chunks) for i in some]
    backwards = [Unit("B", i, c) for some in rounds for c in reversed(range(chunks)) for i in some]
    return _alternate(forwards, backwards, 2 * (p - 1 - d) + (chunks - 1) * len(rounds[0]))


SCHEDULES: dict[str, Callable[[int, int, int], list[Unit]]] = {
    "sequential": lambda d, p, m: [Unit(kind, i) for i in range(m) for kind in "FB"],
    "gpipe": lambda d, p, m: [Unit(kind, i) for kind in "FB" for i in range(m)],
    "1f1b": _1f1b,
    "zb_h1": _zb_h1,
    "interleaved_1f1b": lambda d, p, m: _interleaved(d, p, m, 2),
}


@lru_cache(maxsize=256)
def schedule_of(name: str, devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule by name (one of SCHEDULES). chunks: parts of the model per device, for interleaved_1f1b alone (1 means 2 there).

    schedule_of("1f1b", 4, 8).order[3][:4] is F0 B0 F1 B1. ValueError on an unknown name or numbers that can't be.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(SCHEDULES)}")
    for what, value in (("devices", devices), ("microbatches", microbatches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"a schedule of {value!r} {what}; expected a whole number of 1 or more")
    if name == "interleaved_1f1b":
        chunks = max(chunks, 2)
        order = [_interleaved(d, devices, microbatches, chunks) for d in range(devices)]
    elif chunks != 1:
        raise ValueError(f"schedule {name} has one chunk per device, found {chunks}; use interleaved_1f1b")
    else:
        order = [SCHEDULES[name](d, devices, microbatches) for d in range(devices)]
    return Schedule(name, microbatches, chunks, tuple(tuple(units) for units in order))
