"""Published training runs, and the nearest of them to a launch: how fast it was, and how fast it is predicted to be.

published.json is what benchmarks/published_launches.py wrote: a model, a launch, where it ran, its source, and tokens/s of one device.
"""

import json
from dataclasses import dataclass
from functools import cache
from math import log2
from pathlib import Path
from typing import Any

from autoshard.devices import DEVICES
from autoshard.reading import text_of

from .launch_prices import Site, prices_of
from .model_sizes import ModelSizes
from .runs import Launch, TrainingRuns

FILE = Path(__file__).with_name("published.json")
DEGREES = ("tensor", "context", "expert", "pipeline")


@dataclass(frozen=True)
class PublishedRun:
    """One run, as its source has it."""

    name: str  # of the model
    source: str
    stack: str  # of cost/devices/stacks.json
    device: str
    per_node: int
    rate: float  # tokens/s of one device
    launch: Launch
    sizes: ModelSizes

    def distance(self, launch: Launch, sizes: ModelSizes, device: str) -> float:
        """In doublings, of which those of the model count most: sizes, devices, sequence, degrees; and what else differs."""

        def apart(a: float, b: float) -> float:
            return abs(log2(a / b))

        model = 3 * apart(self.sizes.parameters, sizes.parameters) + 3 * (bool(self.sizes.experts) != bool(sizes.experts))
        where = 2 * apart(DEVICES[self.device].flops, DEVICES[device].flops) + (self.device != device) / 2
        how = 0.5 * (apart(self.launch.devices, launch.devices) + apart(self.launch.seq, launch.seq))
        degrees = 0.25 * sum(apart(getattr(self.launch, name), getattr(launch, name)) for name in DEGREES)
        return model + where + how + degrees + (self.launch.precision != launch.precision)

    def to_dict(self) -> dict[str, Any]:
        site, runs = Site(self.device, self.per_node), TrainingRuns.of([self.launch])
        return {
            "model": self.name, "source": self.source, "stack": self.stack, "device": self.device, "devices": self.launch.devices,
            "precision": self.launch.precision, "seq": self.launch.seq, "global_batch": self.launch.global_batch,
            "configuration": runs.degrees_of(0), "tokens_per_second_per_device": self.rate,
            "predicted": float(prices_of(runs, self.sizes, site, self.stack).tokens_per_second[0]),
        }  # fmt: skip


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    runs = []
    for row in json.loads(text_of(FILE, "measurements")):
        sizes, launch = row.pop("model"), row.pop("launch")
        model = ModelSizes(**{**sizes, "latent": tuple(sizes.get("latent", ()))})
        runs.append(PublishedRun(**row, launch=Launch(**launch), sizes=model))
    return tuple(runs)


def nearest(launch: Launch, sizes: ModelSizes, device: str) -> PublishedRun:
    """The published run that says most about a launch on such devices."""
    return min(published_runs(), key=lambda run: run.distance(launch, sizes, device))
