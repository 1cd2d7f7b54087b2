"""Pipelines on an emulated cluster of two nodes that share no core: planned and measured seconds per step, over gloo.

    sudo .venv/bin/python benchmarks/cluster/pipeline.py FOLDER [--speeds 20,50] [--models mlp,llama] [--microbatches 4,8]
                                                                [--schedule 1f1b] [--json]

`autoshard.plan` plans two stages, one per node, with the prices measured at that link speed; its seconds are the prediction.
`autoshard.parallelize` runs that pipeline: forward and backward of all microbatches, then AdamW. What the interpreter takes for a kernel
and torch's runtime for a unit is that of a tiny MLP and a tiny Llama whose microbatches become more; how much longer kernels take within
a step than alone, with their data in caches, is that of a middle-sized MLP and Llama. All take turns with the cell. Where a rank dies, as
gloo's sometimes do, all are started again.
Needs root and iproute2, and leaves no namespace behind.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import numpy as np  # noqa: E402
from network import NODES, Network, why_not  # noqa: E402
from plans import MIDDLE_PIPELINES, PIPELINED, SLOW, TINY_PIPELINES  # noqa: E402
from ranks import Ranks  # noqa: E402
from run import asked, changed, measured_mesh, parser_of, say  # noqa: E402
from scipy.optimize import nnls  # noqa: E402

import autoshard  # noqa: E402
from autoshard.mesh import Mesh  # noqa: E402
from autoshard.pipeline.submeshes import Kind  # noqa: E402
from autoshard.solution import Pipeline  # noqa: E402

STEPS, ROUNDS = 3, 5  # of each pipeline in its turn, and turns
FEW, MANY = 4, 16  # microbatches of the tiny models; the middle ones have few
ATTEMPTS = 3
LAUNCH = 100e-6  # seconds: any at which the predictions are affine in it
SIZES = [4 ** k * 1024 for k in range(6)]  # bytes of measured transfers: 1 KiB to 1 MiB
T = TypeVar("T")
Job = tuple[str, Pipeline]  # a model's name, its plan


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
    return autoshard.plan(*build(loss=True), cluster, **options)


def measured(ranks: Ranks, jobs: Mapping[str, Job], folder: Path) -> dict[str, float]:
    """The median seconds of a step of each pipeline. They take turns: what others do on the machine reaches all of them alike."""
    path = folder / "pipeline.pkl"
    for key, (name, plan) in jobs.items():
        path.write_bytes(pickle.dumps(plan))
        ranks.do("pipeline", plan=str(path), model=name, key=key, timeout=300)
    seconds: dict[str, list[float]] = {key: [] for key in jobs}
    for _ in range(ROUNDS):
        for key in jobs:
            seconds[key] += ranks.do("steps", count=STEPS, key=key, timeout=600)["seconds"]
    return {key: statistics.median(each) for key, each in seconds.items()}


class Calibration:
    """What the interpreter, torch's runtime and kernels take within a step, from pipelines that are none of the cells.

    l, u   seconds in which the interpreter launches a kernel, and what the runtime takes for a unit beside kernels: those with which the
           predicted differences between MANY and FEW microbatches of the tiny models, affine in l, and in u with 2 (MANY - FEW), are the
           measured ones
    r      how many times its roofline a kernel takes: the one with which the seconds of the middle models, as good as affine in r, are
           nearest to the measured ones
    """

    def __init__(self, mesh: Mesh, schedule: str):
        self.mesh, self.schedule = mesh, schedule
        at_zero = {(name, k): self.plan(build, k, 0.0) for name, build in TINY_PIPELINES.items() for k in (FEW, MANY)}
        self.jobs: dict[str, Job] = {f"{name} {k}": (name, plan) for (name, k), plan in at_zero.items()}
        self.jobs |= {name: (name, self.plan(build, FEW, mesh.device.launch)) for name, build in MIDDLE_PIPELINES.items()}
        later = {(name, k): self.plan(TINY_PIPELINES[name], k, LAUNCH) for name, k in at_zero}
        self.at_zero = np.array([at_zero[name, MANY].seconds - at_zero[name, FEW].seconds for name in TINY_PIPELINES])
        self.at_launch = np.array([later[name, MANY].seconds - later[name, FEW].seconds for name in TINY_PIPELINES])

    def plan(self, build: Callable, microbatches: int, launch: float, per_unit: float = 0.0, ratio: float = 1.0) -> Pipeline:
        return planned(build, changed(self.mesh, launch, ratio), microbatches, self.schedule, per_unit)

    def fitted(self, seconds: Mapping[str, float]) -> tuple[float, float, float]:
        """l, u, r. seconds: of a step of each of `jobs`."""
        beyond = np.array([seconds[f"{name} {MANY}"] - seconds[f"{name} {FEW}"] for name in TINY_PIPELINES]) - self.at_zero
        slopes = np.stack([(self.at_launch - self.at_zero) / LAUNCH, np.full(len(beyond), 2.0 * (MANY - FEW))], axis=1)
        launch, per_unit = (float(x) for x in nnls(slopes, beyond)[0])

        def middle(ratio: float) -> np.ndarray:
            return np.array([self.plan(build, FEW, launch, per_unit, ratio).seconds for build in MIDDLE_PIPELINES.values()])

        once = middle(1.0)
        slope = middle(2.0) - once
        return launch, per_unit, 1.0 + float((np.array([seconds[name] for name in MIDDLE_PIPELINES]) - once) @ slope / (slope @ slope))


def cell(crew: Crew, name: str, calibration: Calibration, megabits: float, microbatches: int) -> dict:
    """A row."""
    build = PIPELINED[name]
    plan = calibration.plan(build, microbatches, calibration.mesh.device.launch)
    for _ in range(ATTEMPTS):
        jobs = {**calibration.jobs, "cell": (name, plan)}
        seconds = crew.run(lambda ranks, jobs=jobs: measured(ranks, jobs, crew.folder))
        launch, per_unit, ratio = calibration.fitted(seconds)
        predicted = calibration.plan(build, microbatches, launch, per_unit, ratio)
        if cuts(predicted) == cuts(plan):
            break
        plan = predicted  # with what was measured other stages are the best: these are run
    else:
        raise RuntimeError(f"{name}, K={microbatches}: {ATTEMPTS} times other stages were the best after they had run")
    error = predicted.seconds / seconds["cell"] - 1
    row = {"model": name, "megabits": megabits, "microbatches": microbatches, "schedule": calibration.schedule}
    row |= {"launch_seconds": launch, "unit_seconds": per_unit, "kernel_ratio": ratio}
    row |= {"predicted_seconds": predicted.seconds, "measured_seconds": seconds["cell"], "error": error}
    taken = f"{1e6 * launch:.0f} us and {ratio:.2f} rooflines per kernel, {1e3 * per_unit:.2f} ms per unit"
    figures = f"predicted {predicted.seconds:.3f} s, measured {seconds['cell']:.3f} s, {error:+.1%}"
    say(f"{name} at {megabits:g} Mbit/s, K={microbatches}: {taken}, {figures}")
    return row


def cuts(plan: Pipeline) -> list[int]:
    return [stage.last for stage in plan.stages]


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
            calibration = Calibration(mesh, options.schedule)
            for name, k in itertools.product(names, options.microbatches.split(",")):
                rows.append(cell(crew, name, calibration, speed, int(k)))
        crew.ranks.stop()
    errors = [abs(row["error"]) for row in rows]
    found = {"rows": rows, "median_error": statistics.median(errors), "largest_error": max(errors)}
    print(json.dumps(found) if options.json else f"median error {found['median_error']:.1%}, largest {found['largest_error']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
