"""Pipelines on an emulated cluster of two nodes that share no core: planned and measured seconds per step, over gloo.

    sudo .venv/bin/python benchmarks/cluster/pipeline.py FOLDER [--speeds 20,50] [--models mlp,llama] [--microbatches 4,8]
                                                                [--schedule 1f1b] [--json]

`autoshard.pipeline` plans two stages, one per node, with the prices measured at that link speed; its seconds are the prediction.
`autoshard.parallelize` runs that pipeline: forward and backward of all microbatches, then AdamW. What the interpreter takes for a kernel
and torch's runtime for a unit is that of a tiny MLP and a tiny Llama whose microbatches become more. Where a rank dies, as gloo's sometimes
do, all are started again.
Needs root and iproute2, and leaves no namespace behind.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import numpy as np  # noqa: E402
from network import NODES, Network, why_not  # noqa: E402
from plans import PIPELINED, SLOW, TINY_PIPELINES  # noqa: E402
from ranks import Ranks  # noqa: E402
from run import asked, measured_mesh, parser_of, say  # noqa: E402
from scipy.optimize import nnls  # noqa: E402

import autoshard  # noqa: E402
from autoshard.mesh import Mesh  # noqa: E402
from autoshard.pipeline.pipeline_record import Pipeline  # noqa: E402
from autoshard.pipeline.submeshes import Kind  # noqa: E402

STEPS = 9
ROUNDS = 3  # times that a cell is predicted and measured
FEW, MANY = 4, 16  # microbatches of the tiny model
ATTEMPTS = 3
LAUNCH = 100e-6  # seconds: any at which the predictions are affine in it
SIZES = [4 ** k * 1024 for k in range(6)]  # bytes of measured transfers: 1 KiB to 1 MiB
T = TypeVar("T")


class Crew:
    """Ranks that are started again where one of them dies."""

    def __init__(self, network: Network, per_node: int, folder: Path):
        self.network, self.per_node, self.folder = network, per_node, folder
        self.ranks = Ranks(network, per_node, folder, own_cores=True)

    def run(self, work: Callable[[Ranks], T]) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return work(self.ranks)
            except OSError as error:
                self.ranks.kill()
                if attempt == ATTEMPTS:
                    raise
                say(f"{error}; attempt {attempt + 1} of {ATTEMPTS}")
                self.ranks = Ranks(self.network, self.per_node, self.folder, own_cores=True)
        raise AssertionError("the last attempt returns or raises")


def with_transfers(mesh: Mesh, ranks: Ranks) -> Mesh:
    """The price of what goes one way between the nodes, as it is measured. An all_gather, by which it is priced otherwise, sends both ways:
    over gloo it takes this or twice this, as the word that a receive is posted is before or behind the data."""
    seconds = tuple(float(t) for t in np.maximum.accumulate(ranks.do("transfers", sizes=SIZES)["seconds"]))
    sizes = tuple(float(NODES * size) for size in SIZES)  # of the all_gather that sends as much
    measured = {"sizes": sizes, "seconds": seconds, "tail": (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])}
    slow = mesh.axes[SLOW]
    curves = tuple(replace(one, **measured) if one.collective == "all_gather" else one for one in slow.curves)
    return replace(mesh, axes=tuple(replace(axis, curves=curves) if axis is slow else axis for axis in mesh.axes))


def planned(build: Callable, mesh: Mesh, microbatches: int, schedule: str, per_unit: float) -> Pipeline:
    """Two stages, one per node."""
    cluster = autoshard.Cluster((Kind(NODES, mesh.shape[1], measured=mesh),))
    options = {"microbatches": (microbatches,), "schedules": (schedule,), "stages": NODES, "grid": False, "unit_seconds": per_unit}
    return autoshard.pipeline(*build(loss=True), cluster, **options)


def measured(ranks: Ranks, name: str, plan: Pipeline, folder: Path) -> float:
    """Seconds of a step."""
    path = folder / "pipeline.pkl"
    path.write_bytes(pickle.dumps(plan))
    ranks.do("pipeline", plan=str(path), model=name, timeout=300)
    return statistics.median(ranks.do("steps", count=STEPS, timeout=600)["seconds"])


def beyond(crew: Crew, name: str, mesh: Mesh, schedule: str) -> float:
    """The measured seconds of MANY microbatches of a tiny model less those of FEW."""
    plans = [planned(TINY_PIPELINES[name], mesh, microbatches, schedule, 0.0) for microbatches in (MANY, FEW)]
    many, few = (crew.run(lambda ranks, plan=plan: measured(ranks, name, plan, crew.folder)) for plan in plans)
    return many - few


def calibrated(crew: Crew, mesh: Mesh, schedule: str) -> tuple[Mesh, float]:
    """The mesh with l, the seconds in which the interpreter launches a kernel, and u, what the runtime takes for a unit beside kernels:
    those with which the predicted differences of two tiny models, affine in l, and in u with 2 (MANY - FEW), are the measured ones."""

    def predicted(name: str, launch: float) -> float:
        priced = replace(mesh, device=replace(mesh.device, launch=launch))
        many, few = (planned(TINY_PIPELINES[name], priced, microbatches, schedule, 0.0).seconds for microbatches in (MANY, FEW))
        return many - few

    names = list(TINY_PIPELINES)
    at_zero = np.array([predicted(name, 0.0) for name in names])
    slope = (np.array([predicted(name, LAUNCH) for name in names]) - at_zero) / LAUNCH
    found = np.array([beyond(crew, name, mesh, schedule) for name in names]) - at_zero
    launch, unit = nnls(np.stack([slope, np.full(len(names), 2.0 * (MANY - FEW))], axis=1), found)[0]
    return replace(mesh, device=replace(mesh.device, launch=float(launch))), float(unit)


def predicted_and_measured(
    crew: Crew, name: str, mesh: Mesh, microbatches: int, schedule: str
) -> tuple[float, float, float, float]:
    """l, u, and seconds per step, predicted and measured. What the interpreter and the runtime take is measured just before."""
    mesh, per_unit = calibrated(crew, mesh, schedule)
    plan = planned(PIPELINED[name], mesh, microbatches, schedule, per_unit)
    return mesh.device.launch, per_unit, plan.seconds, crew.run(lambda ranks: measured(ranks, name, plan, crew.folder))


def cell(crew: Crew, name: str, mesh: Mesh, megabits: float, microbatches: int, schedule: str) -> dict:
    """A row. Its error is the median of the rounds': what others do on the machine changes a round's two figures alike."""
    rounds = [predicted_and_measured(crew, name, mesh, microbatches, schedule) for _ in range(ROUNDS)]
    launch, per_unit, predicted, seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
    errors = [plan / measurement - 1 for *_, plan, measurement in rounds]
    row = {"model": name, "megabits": megabits, "microbatches": microbatches, "schedule": schedule}
    row |= {"launch_seconds": launch, "unit_seconds": per_unit}
    row |= {"predicted_seconds": predicted, "measured_seconds": seconds, "error": statistics.median(errors), "errors": errors}
    figures = f"{1e6 * launch:.0f} us per kernel, {1e3 * per_unit:.2f} ms per unit, predicted {predicted:.3f} s, measured {seconds:.3f} s"
    say(f"{name} at {megabits:g} Mbit/s, K={microbatches}: {figures}, {row['error']:+.1%} ({min(errors):+.1%} to {max(errors):+.1%})")
    return row


def main() -> int:
    parser = parser_of(__doc__, speeds="20,50", models=PIPELINED)
    parser.add_argument("--microbatches", default="4,8")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe", "interleaved_1f1b", "zb_h1"), default="1f1b")
    cores = len(os.sched_getaffinity(0))
    most = max(1, min(2, cores // NODES))
    parser.add_argument("--per-node", type=int, default=most, help=f"ranks of a node, default {most}: no two share a core, and at most 2")
    options, names, speeds = asked(parser, PIPELINED)
    if why := why_not():
        say(f"benchmarks/cluster: {why}")
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with Network() as network:
        crew = Crew(network, options.per_node, options.folder)
        for speed in speeds:
            say(f"measuring collectives at {speed:g} Mbit/s")
            network.limit(speed * 1e6 / 8)
            mesh = crew.run(lambda ranks: with_transfers(measured_mesh(ranks, options.calibrate, options.largest), ranks))
            for name, k in itertools.product(names, options.microbatches.split(",")):
                rows.append(cell(crew, name, mesh, speed, int(k), options.schedule))
        crew.ranks.stop()
    errors = [abs(row["error"]) for row in rows]
    found = {"rows": rows, "median_error": statistics.median(errors), "largest_error": max(errors)}
    print(json.dumps(found) if options.json else f"median error {found['median_error']:.1%}, largest {found['largest_error']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
