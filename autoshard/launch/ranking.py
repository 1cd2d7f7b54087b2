"""The launches of a space, priced and sorted by expected speed: tokens/s times the chance to fit."""

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .launch_prices import LaunchPrices, Only, Site, by_kind, interval, priced_launches
from .launch_space import illegal_by_rule, launches, structures
from .legality import why_illegal
from .model_sizes import ModelSizes
from .runs import Launch, TrainingRuns, distinct

ALIKE = 0.005  # relative: launches that differ in which ranks share the same work are one row where their rates differ by less
SIMPLE = 0.02  # of the rate of the fastest: what a simpler launch may cost
GROUPED = 20_000  # launches, the best, that rows are made of


@dataclass(frozen=True, eq=False)
class Ranking:
    """Legal launches in order, with their prices; and how many splits of the devices were illegal, by rule."""

    launcher: str
    sizes: ModelSizes
    site: Site
    columns: TrainingRuns
    prices: LaunchPrices
    illegal: Mapping[str, int]
    splits: int

    def __len__(self) -> int:
        return len(self.columns)

    def launch(self, i: int) -> Launch:
        return self.columns.launch(i)

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """The first launches, as `degrees --json` prints them."""
        return self.rows_at(slice(count))

    def rows_at(self, which: slice | list[int]) -> list[dict[str, Any]]:
        p, (low, high) = LaunchPrices(*(column[which] for column in self.prices)), interval(self.launcher)
        columns = {
            **self.columns[which].degrees(self.sizes.experts > 0), "seconds": p.seconds,
            "tokens_per_second_per_device": p.tokens_per_second, "mfu": p.mfu, "memory_bytes": p.bytes,
            "chance_to_fit": p.chance, "fits": p.fits, "tight": p.fits & (p.bytes > self.site.usable),
            "tokens_per_second_per_device_interval": np.outer(p.tokens_per_second, (low, high)),
        }  # fmt: skip
        return [dict(zip(columns, row)) for row in zip(*(column.tolist() for column in columns.values()))]

    @property
    def simplest(self) -> int:
        """The launch with the fewest kinds of parallelism, schedules and recomputation, of those as fast as the first within SIMPLE."""
        c, p = self.columns, self.prices
        near = (p.fits == p.fits[0]) & (p.expected >= (1 - SIMPLE) * p.expected[0]) & ((p.expected > 0) | (p.bytes == p.bytes[0]))
        rows = np.flatnonzero(near)
        c = c[rows]
        used = [c.tensor > 1, c.context > 1, c.pipeline > 1, c.expert > 1, c.virtual > 1, c.recompute != "none"]
        return int(rows[np.sum([*used, (c.shard > 1) & (c.shard < c.data)], axis=0).argmin()])

    def grouped(self, count: int) -> list[tuple[int, int]]:
        """`count` rows of a table, and how many launches each stands for. Launches with the same work per device, which differ in whether
        data or context parallel ranks share it and over how many of them states are sharded, are one row, that with the fewest context
        parallel ranks. The first row is `simplest`, the others are in order."""
        few, simplest = np.arange(min(len(self), GROUPED)), self.simplest
        c, rates = self.columns[few], self.prices.expected[few].tolist()
        same = (c.pipeline, c.passes, c.virtual, c.schedule, c.tensor, c.alltoall > 1, c.expert, c.expert_tensor, c.zero, c.gather8,
                c.recompute, c.async_expert, c.microbatch / c.context, self.prices.fits[few])  # fmt: skip
        groups: dict[int, list[list[int]]] = {}
        for row, kind in enumerate(distinct(same)[1].tolist()):
            known = groups.setdefault(kind, [])
            if known and rates[row] >= (1 - ALIKE) * rates[known[-1][0]]:
                known[-1].append(row)
            else:
                known.append([row])
        context, split, shard, deepep = (column.tolist() for column in (c.context, c.split, c.shard, c.deepep))
        rows = []
        for group in sorted(group for known in groups.values() for group in known):
            rows.append((min(group, key=lambda row: (context[row], deepep[row], split[row], -shard[row])), len(group), simplest in group))
        first = next(((simplest, n) for _, n, has in rows if has), (simplest, 1))
        return [first, *((row, n) for row, n, has in rows if not has)][:count]

    def by_kind(self, i: int) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds and bytes of row i, as `launch_prices.by_kind`."""
        return by_kind(self.columns[i : i + 1], self.sizes, self.site, self.launcher)

    def frontier(self, count: int = 12) -> list[int]:
        """Launches that fit and are faster than every one with less memory, the least memory first; `count` of them at most. Those that
        are not half as fast as the fastest are left out."""
        rows: list[int] = []
        rates, fits = self.prices.tokens_per_second, self.prices.fits
        few = np.flatnonzero(fits & (2 * rates > np.max(rates, where=fits, initial=0.0)))
        few = few[np.lexsort((-rates[few], self.prices.bytes[few]))]
        before = np.maximum.accumulate(np.append(0.0, rates[few]))[:-1]
        for row in few[rates[few] > before].tolist():
            if not rows or rates[row] > (1 + ALIKE) * rates[rows[-1]]:
                rows.append(row)
        return [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int))]

    def first(self, wanted: np.ndarray) -> int | None:
        """The best of the launches for which `wanted` is true."""
        rows = np.flatnonzero(wanted)
        return int(rows[0]) if len(rows) else None


def ranking(
    fixed: Launch, sizes: ModelSizes, site: Site, launcher: str, executor: Executor | None = None, only: Only | None = None,
    fitting: bool = False,
) -> Ranking:  # fmt: skip
    """Every legal launch with the devices, sequence, global batch, precision and flags of `fixed`, best first.

    only: {"tp": (1, 2)}. fitting: without those that don't fit, but for one where none does.
    executor: prices chunks of launches with its map (processes, or a Dask or Ray cluster); without one they are priced here. The order
    doesn't depend on it. ValueError where no launch is legal.
    """
    splits = structures(fixed, launcher, sizes.layers)
    illegal = illegal_by_rule(splits, sizes, launcher)
    of_part = partial(priced_launches, sizes=sizes, site=site, launcher=launcher, fitted=True, only=only or {}, fitting=fitting)
    parts = [*(map if executor is None else executor.map)(of_part, launches(splits, sizes, launcher, fixed.gather8, fixed.passes))]
    if not parts:
        count = ", ".join(f"{rule} {n}" for rule, n in illegal.items())
        raise ValueError(
            f"no launch of {launcher} on {fixed.devices} devices is legal for this model; splits of the devices by rule: {count}; "
            f"the first one: {why_illegal(splits.launch(0), sizes, launcher)[0]}"
        )
    if not (kept := [part for part in parts if part]):
        asked = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in (only or {}).items())
        raise ValueError(f"no legal launch of {launcher} on {fixed.devices} devices has {asked}; expected other values, or fewer")
    columns, priced = TrainingRuns.joined(part for part, _ in kept), LaunchPrices(*map(np.concatenate, zip(*(part for _, part in kept))))
    speed = np.where(priced.expected > 0, -np.round(priced.tokens_per_second, 9), priced.bytes)  # without a chance, those that need least
    order = np.lexsort((speed, -np.round(priced.expected, 9), ~priced.fits))
    if fitting:
        order = order[: priced.fits.sum()] if priced.fits.any() else np.zeros(1, int)
    return Ranking(launcher, sizes, site, columns[order], LaunchPrices(*(column[order] for column in priced)), illegal, len(splits))
