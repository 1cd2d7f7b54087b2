"""`check_launch`: whether a launcher's configuration can start, how fast it will be, and which changes gain most."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from .best_changes import Change, best_changes
from .launch_prices import LaunchPrices, Site, interval, limits, prices_of, seconds_by_kind
from .legality import why_illegal
from .ranking import ranking
from .runs import LaunchConfig, TrainingRuns


@dataclass(frozen=True, eq=False)
class CheckedLaunch:
    """What `check --launcher` says of a configuration. Without reasons it is legal, and `prices` are its own."""

    described: LaunchConfig
    launcher: str
    site: Site
    reasons: tuple[str, ...]
    prices: LaunchPrices | None
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool | None:
        return None if self.prices is None else bool(self.prices.fits[0])

    @property
    def ok(self) -> bool:
        return bool(self.fits)

    def better(self) -> LaunchConfig:
        """The configuration with the change that gains most. ValueError where there is none."""
        if not self.changes:
            raise ValueError("no change that fits gains anything; leave --out out")
        return replace(self.described, launch=self.changes[0].to)

    def to_dict(self) -> dict[str, Any]:
        """As `autoshard check --launcher --json` prints it."""
        launch, p = self.described.launch, self.prices
        low, high = interval(self.launcher)
        record: dict[str, Any] = {
            "ok": self.ok, "launcher": self.launcher, "devices": launch.devices, "global_batch": launch.global_batch, "seq": launch.seq,
            "configuration": {key: column[0].item() for key, column in TrainingRuns.of([launch]).degrees().items()},
            "precision": launch.precision, "parameters": self.described.sizes.parameters, "legal": not self.reasons,
            "reasons": list(self.reasons), "fits": self.fits, "usable_bytes": self.site.usable,
            "chance_to_fit": None if self.prices is None else float(self.prices.chance[0]),
            "changes": [change.to_dict(low, high) for change in self.changes],
        }  # fmt: skip
        keys = ("seconds", "memory_bytes", "tokens_per_second_per_device", "mfu")
        values = (None,) * 4 if p is None else (p.seconds[0], p.bytes[0], p.tokens_per_second[0], p.mfu[0])
        record |= {key: None if value is None else float(value) for key, value in zip(keys, values)}
        apart = None if p is None else seconds_by_kind(launch, self.described.sizes, self.site, self.launcher)
        record |= {"seconds_by_kind": apart, "limits": apart and limits(apart), "mfu_of": self.site.mfu_of}
        for key in keys[2:]:
            record[f"{key}_interval"] = None if p is None else [record[key] * low, record[key] * high]
        return record


def check_launch(described: LaunchConfig, launcher: str, site: Site, *, executor: Executor | None = None) -> CheckedLaunch:
    """Whether a configuration is legal for its model and fits, its predicted rates, and the three changes that would gain most."""
    launch, sizes = described.launch, described.sizes
    reasons = why_illegal(launch, sizes, launcher)
    prices = None if reasons else prices_of(TrainingRuns.of([launch]), sizes, site, launcher)
    ranked = ranking(launch, sizes, site, launcher, executor, fitting=True)
    return CheckedLaunch(described, launcher, site, reasons, prices, tuple(best_changes(launch, prices, ranked)))
