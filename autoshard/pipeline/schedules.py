"""Pipeline schedules as data: for each device the ordered list of the units that it runs.

    p devices, m microbatches, c chunks per device; part v = 0 .. p c - 1 of the model is on device v mod p, as chunk v div p
    unit      F forward, B backward, W the backward of the weights where it is a separate unit (`zb_h1`), of one microbatch and chunk
    F(v, i)   waits for F(v - 1, i) and its transfer
    B(v, i)   waits for F(v, i), and for B(v + 1, i) and its transfer
    W(v, i)   comes after B(v, i) in the list of its device

A device runs its list in order, one unit at a time; transfers overlap with the units (schedule_times.py).
An activation is held from the start of its F to the end of the last unit of its microbatch and chunk; between B and W what W reads is.
With equal parts, t_F + t_B per device (t_W is included in t_B), and transfers of 0 seconds:

    schedule            seconds                                                     most activations of chunks that device d holds
    sequential          p m (t_F + t_B)                                             1
    gpipe               (m + p - 1) (t_F + t_B)                                     m
    1f1b                (m + p - 1) (t_F + t_B)                                     min(m, p - d)
    interleaved_1f1b    (max(m, p) + (min(m, p) - 1)/c) (t_F + t_B)                 min(c m, 2 (p - 1 - d) + (c - 1) g + 1)
                                                                                    g = ceil(m / max(1, m div p)), p where p divides m
    zb_h1               m (t_F + t_B) + (p - 1) (t_F + t_B - 2 t_W)                 min(m, p)
                          + max(0, p - m) t_W    where t_W <= t_F, t_B - t_W

The bubble is 1 - m (t_F + t_B) / seconds: (p - 1)/(m + p - 1) for gpipe and 1f1b.

Sources: GPipe, Huang et al. 2019; 1F1B, PipeDream-Flush, Narayanan et al. 2021a; interleaved, Narayanan et al. 2021b (Megatron-LM); zb_h1,
Qi et al., "Zero bubble pipeline parallelism" 2024, whose W of microbatch i runs after B of microbatch i + d.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

PerPart = float | Sequence[float]  # one number for all parts of the model, or one per part


class Unit(NamedTuple):
    """One execution of one part of the model: kind F, B or W."""

    kind: str
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Schedule:
    """The units of every device, in order. Device d runs those of parts d, d + devices, d + 2 devices, ..."""

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
    def units(self) -> tuple[tuple[tuple[str, int, int], ...], ...]:
        """Per device its units as (kind, part of the model, microbatch)."""
        return tuple(tuple((u.kind, u.chunk * self.devices + d, u.microbatch) for u in units) for d, units in enumerate(self.order))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are separate units."""
        return any(unit.kind == "W" for unit in self.order[0])

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per device the most activations (of one microbatch and chunk) held at the same time."""
        return tuple(int(peak) for peak in self.peak_bytes(1.0))

    def peak_bytes(self, activation_bytes: PerPart, fixed_bytes: PerPart = 0.0, kept_bytes: PerPart | None = None) -> tuple[float, ...]:
        """Per device the most bytes held. Per part, of one microbatch: activation_bytes from F to B, kept_bytes from B to W (default the
        same); fixed_bytes are held all the time."""
        held, fixed = per_part(activation_bytes, self.parts, "activation_bytes"), per_part(fixed_bytes, self.parts, "fixed_bytes")
        kept = held if kept_bytes is None else per_part(kept_bytes, self.parts, "kept_bytes")
        peaks = []
        for d, units in enumerate(self.units):
            changes = ({"F": held[v], "B": kept[v] * self.splits_backward - held[v], "W": -kept[v]}[kind] for kind, v, _ in units)
            peaks.append(max(accumulate(changes, initial=math.fsum(fixed[d :: self.devices]))))
        return tuple(peaks)


def per_part(value: PerPart, count: int, name: str) -> list[float]:
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

    A round has p microbatches. Where p does not divide m, the first rounds have more: a round of fewer than p would deadlock.
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
