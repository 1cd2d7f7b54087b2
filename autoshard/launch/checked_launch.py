"""`check_launch`: whether a launcher's configuration can start, how fast it will be and why, and which changes gain most."""

from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from autoshard.devices import DEVICES, link_of

from .best_changes import Change, best_changes
from .configurations import settings_of
from .launch_prices import LaunchPrices, Site, by_kind, interval, limits, prices_of
from .legality import legal, why_illegal
from .published import nearest
from .ranking import Ranking, ranking
from .runs import LaunchConfig, TrainingRuns

MICROBATCHES = (1, 2, 4, 8, 16, 32)  # sequences, that are compared
RATES = ("tokens_per_second_per_device", "mfu")  # that have an interval
FIGURES = {  # of a record: columns of LaunchPrices
    "chance_to_fit": "chance", "seconds": "seconds", "memory_bytes": "bytes", "tokens_per_second_per_device": "tokens_per_second",
    "mfu": "mfu",
}  # fmt: skip
LINKS = {0.5: "half as fast", 2.0: "twice as fast"}


@dataclass(frozen=True, eq=False)
class CheckedLaunch:
    """What is known of a configuration. Without reasons it is legal, and `prices` are its own."""

    described: LaunchConfig
    launcher: str
    site: Site
    reasons: tuple[str, ...]
    prices: LaunchPrices | None
    changes: tuple[Change, ...] = ()
    ranked: Ranking | None = None  # the launches that it was compared with

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
        sizes, to = self.described.sizes, self.changes[0].to
        return replace(self.described, launch=to, sizes=sizes.with_padded_vocab(sizes.multiple, to.tensor))

    def to_dict(self) -> dict[str, Any]:
        """As `autoshard check --json` prints it of a launcher's configuration."""
        launch, sizes, site, p = self.described.launch, self.described.sizes, self.site, self.prices
        low, high = interval(self.launcher)
        seconds, bytes = (None, None) if p is None else by_kind(TrainingRuns.of([launch]), sizes, site, self.launcher)
        figures = {name: None if p is None else float(getattr(p, column)[0]) for name, column in FIGURES.items()}
        between = {f"{name}_interval": (rate := figures[name]) and [rate * low, rate * high] for name in RATES}
        return {
            "ok": self.ok, **self.described.to_dict(self.launcher), "legal": not self.reasons, "reasons": list(self.reasons),
            "fits": self.fits, "usable_bytes": site.usable, "changes": [change.to_dict(low, high) for change in self.changes],
            **figures, **between, "seconds_by_kind": seconds, "bytes_by_kind": bytes, "limits": seconds and limits(seconds),
            "mfu_of": site.mfu_of, "device": site.device, "device_memory_bytes": site.memory, "sensitivity": self.sensitivity(),
            "settings": settings_of(self.launcher, self.described), "published": nearest(launch, sizes, site.device).to_dict(),
            "frontier": [] if self.ranked is None else self.ranked.rows_at(self.ranked.frontier()),
        }  # fmt: skip

    def sensitivity(self) -> list[dict[str, Any]]:
        """What a step would take with other links, and with other microbatches at the same global batch; those that are legal."""
        launch, site, p = self.described.launch, self.site, self.prices
        if p is None:
            return []
        inside = site.inside or link_of(DEVICES[site.device])
        cases = []
        for factor, said in LINKS.items():
            if launch.devices > site.per_node:
                cases.append((f"network {said}", launch, replace(site, network=factor * site.network)))
            if min(launch.devices, site.per_node) > 1:
                cases.append((f"links inside a node {said}", launch, replace(site, inside=factor * inside)))
        cases += [(f"microbatch {n}", replace(launch, microbatch=n), site) for n in MICROBATCHES if n != launch.microbatch]
        rows = []
        for what, to, where in cases:
            run = TrainingRuns.of([to])
            if legal(run, self.described.sizes, self.launcher)[0]:
                q = prices_of(run, self.described.sizes, where, self.launcher)
                figures = {"seconds": q.seconds, "memory_bytes": q.bytes, "chance_to_fit": q.chance}
                row = {name: float(column[0]) for name, column in figures.items()}
                rows.append({"what": what, **row, "change": row["seconds"] / float(p.seconds[0]) - 1})
        return rows


def check_launch(
    described: LaunchConfig, launcher: str, site: Site, *, executor: Executor | None = None, ranked: Ranking | None = None,
    changes: bool = True,
) -> CheckedLaunch:  # fmt: skip
    """Whether a configuration is legal for its model and fits, its predicted rates, and the three changes that would gain most.

    ranked: the launches to compare it with, where they are known. changes: False leaves them out.
    """
    launch, sizes = described.launch, described.sizes
    reasons = why_illegal(launch, sizes, launcher)
    prices = None if reasons else prices_of(TrainingRuns.of([launch]), sizes, site, launcher)
    if ranked is None and changes:
        try:
            ranked = ranking(launch, sizes, site, launcher, executor, fitting=True)
        except ValueError:  # none is legal, but for the described one
            ranked = None
    best = best_changes(launch, prices, ranked) if ranked is not None and changes else ()
    return CheckedLaunch(described, launcher, site, reasons, prices, tuple(best), ranked)
