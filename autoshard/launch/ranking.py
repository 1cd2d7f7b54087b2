"""The launches of a space, priced and sorted by expected speed: tokens/s times the chance to fit."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .launch_prices import LaunchPrices, Site, prices_of, seconds_by_kind
from .launch_space import illegal_by_rule, launches, structures
from .model_sizes import ModelSizes
from .runs import Launch, TrainingRuns

CHUNK = 50_000  # launches that are priced at once: their columns fit in a core's cache and memory


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
        p = self.prices
        columns = {
            **self.columns.degrees(), "seconds": p.seconds, "tokens_per_second_per_device": p.tokens_per_second, "mfu": p.mfu,
            "memory_bytes": p.bytes, "chance_to_fit": p.chance, "fits": p.fits, "tight": p.fits & (p.bytes > self.site.usable),
        }  # fmt: skip
        return [dict(zip(columns, row)) for row in zip(*(column[:count].tolist() for column in columns.values()))]

    def seconds_by_kind(self, i: int) -> dict[str, float]:
        """Of the step of row i, the largest first: they add up to its seconds."""
        return seconds_by_kind(self.launch(i), self.sizes, self.site, self.launcher)

    def first(self, wanted: np.ndarray) -> int | None:
        """The best of the launches for which `wanted` is true."""
        rows = np.flatnonzero(wanted)
        return int(rows[0]) if len(rows) else None


def ranking(fixed: Launch, sizes: ModelSizes, site: Site, launcher: str, executor: Executor | None = None) -> Ranking:
    """Every legal launch with the devices, sequence, global batch, precision and flags of `fixed`, best first.

    executor: prices chunks of launches with its map (processes, or a Dask or Ray cluster); without one they are priced here. The order
    doesn't depend on it. ValueError where no launch is legal.
    """
    splits = structures(fixed, launcher)
    columns = launches(splits, sizes, launcher)
    if not len(columns):
        count = ", ".join(f"{rule} {n}" for rule, n in illegal_by_rule(splits, sizes, launcher).items())
        raise ValueError(
            f"no launch of {launcher} on {fixed.devices} devices is legal for this model; splits of the devices by rule: {count}"
        )
    chunks = [columns[np.arange(start, min(start + CHUNK, len(columns)))] for start in range(0, len(columns), CHUNK)]
    price = partial(prices_of, sizes=sizes, site=site, launcher=launcher)
    parts = map(price, chunks) if executor is None else executor.map(price, chunks)
    priced = LaunchPrices(*(np.concatenate(columns) for columns in zip(*parts)))
    order = np.lexsort((np.arange(len(columns)), -np.round(priced.tokens_per_second, 9), -np.round(priced.expected, 9), ~priced.fits))
    prices = LaunchPrices(*(column[order] for column in priced))
    return Ranking(launcher, sizes, site, columns[order], prices, illegal_by_rule(splits, sizes, launcher), len(splits))
