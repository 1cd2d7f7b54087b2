"""The changes of one launch that would gain most: in one thing, in two things, and to the best of the space."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from .launch_prices import LaunchPrices, by_kind, differences
from .ranking import Ranking
from .runs import FIELDS, Launch, TrainingRuns

# one thing to change: the fields that may then differ
THINGS = {
    "microbatch": {"microbatch"},
    "recomputation": {"recompute"},
    "tensor parallelism": {"tensor", "sequence_parallel", "data", "shard", "zero", "gather8", "expert_tensor", "async_tensor"},
    "context parallelism": {"context", "alltoall", "data", "shard", "zero", "gather8"},
    "pipeline": {"pipeline", "schedule", "virtual", "split", "group", "passes", "data", "shard", "zero", "gather8"},
    "schedule": {"schedule", "virtual", "split", "group", "passes"},
    "expert parallelism": {"expert", "expert_tensor", "async_expert", "deepep"},
    "sharding of states": {"shard", "zero", "gather8"},
    "gather": {"gather8"},
}
WRITTEN = {
    "microbatch": "microbatch", "recompute": "recompute", "tensor": "tp", "context": "cp", "alltoall": "heads exchanged by",
    "pipeline": "pp", "schedule": "schedule", "virtual": "stages per device", "split": "layers of stages", "passes": "passes per step",
    "expert": "ep", "expert_tensor": "expert tp", "async_expert": "expert overlap", "deepep": "DeepEP", "data": "dp", "shard": "shard",
    "zero": "zero", "gather8": "8-bit gather", "offload": "optimizer on the host",
    "sequence_parallel": "sequence parallel", "async_tensor": "asynchronous tp", "group": "microbatches in turn",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One change of a launch, and what it would gain."""

    what: str
    to: Launch
    tokens_per_second: float
    gain: float  # of expected speed, relative; of a launch that doesn't fit: inf, since it doesn't run
    bytes: float
    chance: float  # to fit
    seconds: Mapping[str, float]  # of a step, by kind
    bytes_by_kind: Mapping[str, float]
    why: tuple[Mapping[str, float], Mapping[str, float]]  # seconds and bytes by kind, how many more (fewer: negative) than now

    def to_dict(self, low: float, high: float) -> dict[str, Any]:
        """low, high: factors of a rate between which it is expected."""
        rate = self.tokens_per_second
        return {
            "change": self.what, "tokens_per_second_per_device": rate, "tokens_per_second_per_device_interval": [rate * low, rate * high],
            "gain": self.gain, "memory_bytes": self.bytes, "seconds": sum(self.seconds.values()), "seconds_by_kind": dict(self.seconds),
            "bytes_by_kind": dict(self.bytes_by_kind), "chance_to_fit": self.chance,
            "why": dict(self.why[0]), "why_bytes": dict(self.why[1]),
        }  # fmt: skip


def best_changes(launch: Launch, now: LaunchPrices | None, ranked: Ranking, count: int = 3) -> list[Change]:
    """The `count` changes to launches that fit with the largest gain: of one thing each, of two things, and to the best launch of all.

    now: the price of `launch`, None where it is illegal. Changes that gain nothing are left out; where `launch` itself is illegal or does
    not fit, each change that fits gains.
    """
    rate = float(now.expected[0]) if now is not None and now.fits[0] else 0.0
    columns, prices = ranked.columns, ranked.prices
    differs = sum((columns.values[name] != getattr(launch, name)).astype(int) << i for i, name in enumerate(FIELDS))
    faster = prices.fits & (prices.expected > rate * (1 + 1e-6))

    def best(allowed: set[str]) -> int | None:
        others = sum(1 << i for i, name in enumerate(FIELDS) if name not in allowed)
        return ranked.first(faster & (differs & others == 0))

    one_thing = [best(fields) for fields in THINGS.values()]
    two_things = [best(a | b) for a, b in combinations(THINGS.values(), 2)]
    rows = {ranked.first(faster), min((row for row in two_things if row is not None), default=None), *one_thing} - {None}
    chosen = sorted(row for row in rows if row is not None)[:count]  # rows are in order of speed
    before = None if now is None else by_kind(TrainingRuns.of([launch]), ranked.sizes, ranked.site, ranked.launcher)
    return [_change(launch, ranked, i, rate, before) for i in chosen]


def _change(launch: Launch, ranked: Ranking, i: int, rate: float, before: tuple[Mapping[str, float], ...] | None) -> Change:
    to, prices, after = ranked.launch(i), ranked.prices, ranked.by_kind(i)
    columns = prices.tokens_per_second, prices.expected, prices.bytes, prices.chance
    speed, expected, bytes, chance = (column[i].item() for column in columns)
    why = ({}, {}) if before is None else (differences(before[0], after[0]), differences(before[1], after[1]))
    return Change(in_words(launch, to), to, speed, expected / rate - 1 if rate else np.inf, bytes, chance, *after, why)


def in_words(launch: Launch, to: Launch) -> str:
    """`tp 8 -> 4, dp 8 -> 16`."""
    names = [name for name in WRITTEN if getattr(launch, name) != getattr(to, name)]
    if launch.pipeline == to.pipeline == 1:
        names = [name for name in names if name not in ("schedule", "virtual")]
    if launch.expert == to.expert == 1:
        names = [name for name in names if name != "expert_tensor"]
    if 1 in (launch.tensor, to.tensor):
        names = [name for name in names if name not in ("sequence_parallel", "async_tensor")]
    return ", ".join(f"{WRITTEN[name]} {_word(getattr(launch, name))} -> {_word(getattr(to, name))}" for name in names)


def _word(value: Any) -> str:
    return {"": "even", "True": "yes", "False": "no"}.get(str(value), str(value))
