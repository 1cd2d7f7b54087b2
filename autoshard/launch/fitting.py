"""`fits`: will a launch fit, with odds; where and when it needs its bytes; its largest microbatch; what makes it fit, at which price.

    yes     fits with a chance of 90 % or more, within 92 % of the device's memory        (SURE, peak_memory.USABLE)
    tight   more likely than not
    no      less likely, or illegal

The chance is that of the launcher's kept runs to need no more than the memory, by how far off their predicted bytes were.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from autoshard.cost import host_bandwidth
from autoshard.devices import DEVICES

from .best_changes import in_words
from .launch_prices import LaunchPrices, Site, by_kind, differences, launch_memory, prices_of
from .legality import DIVIDE_EXPERTS, RECOMPUTED, legal, why_illegal
from .peak_memory import Memory
from .runs import Launch, LaunchConfig, TrainingRuns

SURE = 0.9
MOST_SEQUENCES = 512  # of a microbatch that is looked at
CHUNKS = 8  # torchtitan's ChunkedCELoss, Liger's fused linear cross entropy
CHUNKED, OFFLOADED = f"the loss in {CHUNKS} chunks", "the optimizer's state in the host's memory"
# what launchers can switch on that is no field of a launch: columns of TrainingRuns
SWITCHES = dict.fromkeys(("torchtitan", "accelerate"), {CHUNKED: ("loss_chunks", CHUNKS)})
TOGETHER = 3  # changes at once, where one is not enough
Move = tuple[str, Mapping[str, Any], Mapping[str, int]]  # what, fields of a launch, columns


@dataclass(frozen=True)
class Remedy:
    """A change after which a launch fits."""

    what: str
    to: Launch
    price: float  # seconds per step; less than none where it is faster
    chance: float
    bytes: float
    why: Mapping[str, float]  # bytes by kind, how many more (fewer: negative) than now

    def to_dict(self) -> dict[str, Any]:
        record = {"change": self.what, "price_seconds": self.price, "chance_to_fit": self.chance, "device_bytes": self.bytes}
        return {**record, "why_bytes": dict(self.why)}


@dataclass(frozen=True, eq=False)
class Fitting:
    """What `fits` says of a launch. Without reasons it is legal, and has memory and prices."""

    described: LaunchConfig
    launcher: str
    site: Site
    reasons: tuple[str, ...]
    memory: Memory | None = None
    prices: LaunchPrices | None = None
    largest_microbatch: int | None = None  # sequences; None: not even one fits
    remedies: tuple[Remedy, ...] = ()

    @property
    def chance(self) -> float:
        return 0.0 if self.prices is None else float(self.prices.chance[0])

    @property
    def verdict(self) -> str:
        """yes, tight or no."""
        if self.prices is None or self.chance < 0.5:
            return "no"
        return "yes" if _surely(self.prices, self.site)[0] else "tight"

    def stages(self) -> list[dict[str, Any]]:
        """Each kind of stage when it needs most: first, inner (the largest of those between) and last, or all."""
        rows, peaks = list[dict[str, Any]](), () if self.memory is None else self.memory.peaks
        names = [*dict.fromkeys(peak.stage for peak in peaks if peak.exists[0])]
        for name in names:
            memory: Any = replace(self.memory, peaks=tuple(peak for peak in peaks if peak.stage == name))  # type: ignore[type-var]
            peak, stage = memory.fullest(), name if len(names) > 1 else "all"
            figures = {f"{name}_bytes": float(getattr(memory, name)[0]) for name in ("allocated", "reserved", "device")}
            kinds = {kind: memory.bias * float(bytes[0]) for kind, bytes in peak.kinds.items()}
            rows.append({"stage": stage, "moment": peak.moment, **figures, "bytes_by_kind": kinds})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """As `autoshard fits --json` prints it."""
        stages = self.stages()
        fullest = max(stages, key=lambda stage: stage["device_bytes"], default=None)
        return {
            "ok": self.verdict != "no", "verdict": self.verdict, "chance_to_fit": self.chance,
            **self.described.to_dict(self.launcher), "reasons": list(self.reasons),
            "device_memory_bytes": self.site.memory, "usable_bytes": self.site.usable, "bias": self.site.memory_bias,
            "fullest": fullest, "stages": stages, "largest_microbatch": self.largest_microbatch,
            "seconds": None if self.prices is None else float(self.prices.seconds[0]),
            "changes": [remedy.to_dict() for remedy in self.remedies],
        }  # fmt: skip


def will_fit(described: LaunchConfig, launcher: str, site: Site) -> Fitting:
    """Whether a launch fits, and what makes it fit where it does not surely. ValueError for a device without constants, and for float32."""
    launch, sizes = described.launch, described.sizes
    reasons = why_illegal(launch, sizes, launcher)
    if reasons:
        return Fitting(described, launcher, site, reasons)
    runs = TrainingRuns.of([launch])
    memory, prices = launch_memory(runs, sizes, site, launcher), prices_of(runs, sizes, site, launcher)
    largest = _largest_microbatch(described, launcher, site)
    remedies = () if _surely(prices, site)[0] else _remedies(described, launcher, site, float(prices.seconds[0]))
    return Fitting(described, launcher, site, (), memory, prices, largest, remedies)


def _surely(prices: LaunchPrices, site: Site) -> np.ndarray:
    return (prices.chance >= SURE) & (prices.bytes <= site.usable)


def _largest_microbatch(described: LaunchConfig, launcher: str, site: Site) -> int | None:
    """Of those that surely fit, with as many sequences per step as there are, or more where these don't divide or leave stages idle."""
    launch = described.launch
    rounds, least = max(launch.global_batch // launch.data, 1), min(launch.microbatches, launch.pipeline)
    sizes = range(1, MOST_SEQUENCES + 1)
    batches = [replace(launch, microbatch=n, global_batch=launch.data * n * max(rounds // n, least)) for n in sizes]
    fits = _surely(prices_of(TrainingRuns.of(batches), described.sizes, site, launcher), site)
    return int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else None


def _remedies(described: LaunchConfig, launcher: str, site: Site, seconds: float, count: int = 3) -> tuple[Remedy, ...]:
    """The cheapest changes after which the launch surely fits: of one thing, or of two or three where fewer are not enough."""
    launch, sizes = described.launch, described.sizes
    moves = list(_moves(launch, launcher, host_bandwidth(DEVICES[site.device]) is not None))
    for together in range(1, TOGETHER + 1):
        joined = [one for some in combinations(moves, together) if (one := _joined(some)) is not None]
        to = [replace(launch, **fields) for _, fields, _ in joined]
        chunks = np.array([switches.get("loss_chunks", launch.loss_chunks) for _, _, switches in joined])
        runs = TrainingRuns.of(to).with_columns(loss_chunks=chunks)
        allowed = np.flatnonzero(legal(runs, sizes, launcher)) if joined else np.zeros(0, int)
        if not len(allowed):
            return ()
        prices = prices_of(runs[allowed], sizes, site, launcher)
        good = sorted(np.flatnonzero(_surely(prices, site)), key=lambda i: (round(float(prices.seconds[i]), 9), i))[:count]
        if good:
            before = by_kind(TrainingRuns.of([launch]), sizes, site, launcher)[1]
            remedies = []
            for i, k in zip(good, allowed[good].tolist()):
                why = differences(before, by_kind(runs[k : k + 1], sizes, site, launcher)[1])
                figures = float(prices.seconds[i]) - seconds, float(prices.chance[i]), float(prices.bytes[i])
                switched = [what for what in joined[k][0].split("; ") if what == CHUNKED]
                remedies.append(Remedy(", ".join(filter(None, [in_words(launch, to[k]), *switched])), to[k], *figures, why))
            return tuple(remedies)
    return ()


def _moves(launch: Launch, launcher: str, offloads: bool) -> Iterator[Move]:
    """Changes of one thing that lower the peak; the sequences per step stay as many. offloads: whether copies to the host have a price."""
    for kind in RECOMPUTED[launcher]:
        if kind != launch.recompute:
            yield kind, {"recompute": kind}, {}
    for n in range(1, launch.microbatch):
        if launch.microbatch % n == 0:
            yield f"microbatch {n}", {"microbatch": n}, {}
    if launch.data > 1:
        zeros = {"megatron": (1,), "nanotron": (1,), "deepspeed": (1, 2, 3)}.get(launcher, (2, 3))
        for zero in zeros:
            if zero > launch.zero or (zero == launch.zero and launch.shard < launch.data):
                yield f"zero {zero}", {"zero": zero, "shard": launch.data}, {}
    for name in ("tensor", "pipeline", "context"):
        fields = {name: getattr(launch, name) * 2, "data": launch.data // 2, "shard": max(min(launch.shard, launch.data // 2), 1)}
        if name == "context" and launcher == "deepspeed":
            fields["alltoall"] = fields[name]
        if launch.data % 2 == 0:
            if name == "tensor":
                divided = launcher in DIVIDE_EXPERTS and launch.expert_tensor == launch.tensor
                of_experts = launch.expert_tensor * (1 + divided)
                fields |= {"sequence_parallel": launcher not in ("accelerate", "deepspeed"), "expert_tensor": of_experts}
            yield name, fields, {}
    if not launch.gather8:
        yield "8-bit gather", {"gather8": True}, {}
    if launcher in ("megatron", "deepspeed") and offloads and not launch.offload:
        yield OFFLOADED, {"offload": True}, {}
    for what, (column, value) in SWITCHES.get(launcher, {}).items():
        yield what, {}, {column: value}


def _joined(moves: tuple[Move, ...]) -> Move | None:
    """Several moves as one; None where two change the same."""
    names = [name for _, fields, columns in moves for name in (*fields, *columns)]
    if len(names) > len(set(names)):
        return None
    fields = {name: value for _, fields, _ in moves for name, value in fields.items()}
    return "; ".join(what for what, _, _ in moves), fields, {name: value for _, _, columns in moves for name, value in columns.items()}
