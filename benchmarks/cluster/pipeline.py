"""Pipelines on an emulated cluster of two nodes with two gloo ranks each: planned and measured seconds per step.

    sudo .venv/bin/python benchmarks/cluster/pipeline.py FOLDER [--speeds 20,50] [--models mlp,llama] [--microbatches 4,8]
                                                                [--schedule 1f1b] [--json]

`autoshard.pipeline` plans two stages, one per node, with the prices measured at that link speed; its seconds are the prediction.
`autoshard.parallelize` runs that pipeline: forward and backward of all microbatches, then AdamW. What torch's runtime takes per unit
beside kernels is that of a tiny MLP whose microbatches become more. Where a rank dies, as gloo's sometimes do, all are started again.
Needs root and iproute2, and leaves no namespace behind.
"""

from __future__ import annotations

import itertools
import json
import pickle
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from network import NODES, Network, why_not  # noqa: E402
from plans import PIPELINED, TINY, TINY_PIPELINE, graph_of  # noqa: E402
from ranks import Ranks  # noqa: E402
from run import PER_NODE, asked, measured_mesh, parser_of, say, with_launch  # noqa: E402

import autoshard  # noqa: E402
from autoshard.mesh import Mesh  # noqa: E402
from autoshard.pipeline.pipeline_record import Pipeline  # noqa: E402
from autoshard.pipeline.submeshes import Kind  # noqa: E402

STEPS = 9
ROUNDS = 5  # times that a cell is predicted and measured
FEW, MANY = 4, 16  # microbatches of the tiny model
ATTEMPTS = 3
T = TypeVar("T")


class Crew:
    """Ranks that are started again where one of them dies."""

    def __init__(self, network: Network, folder: Path):
        self.network, self.folder = network, folder
        self.ranks = Ranks(network, PER_NODE, folder)

    def run(self, work: Callable[[Ranks], T]) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return work(self.ranks)
            except OSError as error:
                self.ranks.kill()
                if attempt == ATTEMPTS:
                    raise
                say(f"{error}; attempt {attempt + 1} of {ATTEMPTS}")
                self.ranks = Ranks(self.network, PER_NODE, self.folder)
        raise AssertionError("the last attempt returns or raises")


def planned(build: Callable, mesh: Mesh, microbatches: int, schedule: str, per_unit: float) -> Pipeline:
    """Two stages, one per node."""
    cluster = autoshard.Cluster((Kind(NODES, PER_NODE, measured=mesh),))
    options = {"microbatches": (microbatches,), "schedules": (schedule,), "stages": NODES, "grid": False, "unit_seconds": per_unit}
    return autoshard.pipeline(*build(loss=True), cluster, **options)


def measured(ranks: Ranks, name: str, plan: Pipeline, folder: Path) -> float:
    """Seconds of a step."""
    path = folder / "pipeline.pkl"
    path.write_bytes(pickle.dumps(plan))
    ranks.do("pipeline", plan=str(path), model=name, timeout=300)
    return statistics.median(ranks.do("steps", count=STEPS, timeout=600)["seconds"])


def unit_seconds(crew: Crew, mesh: Mesh, schedule: str) -> float:
    """What the runtime takes for a forward or a backward of one microbatch: more microbatches of a tiny model, and their prediction."""
    plans = [planned(TINY_PIPELINE, mesh, microbatches, schedule, 0.0) for microbatches in (FEW, MANY)]
    beyond = [crew.run(lambda ranks, plan=plan: measured(ranks, "tiny", plan, crew.folder)) - plan.seconds for plan in plans]
    return max(0.0, (beyond[1] - beyond[0]) / (2 * (MANY - FEW)))


def predicted_and_measured(crew: Crew, name: str, mesh: Mesh, microbatches: int, schedule: str) -> tuple[float, float, float]:
    """Seconds per unit of the runtime, and seconds per step. What the interpreter and the runtime take is measured just before."""
    mesh = with_launch(mesh, graph_of(TINY), lambda _: crew.run(lambda ranks: ranks.do("eager")["seconds"]))
    per_unit = unit_seconds(crew, mesh, schedule)
    plan = planned(PIPELINED[name], mesh, microbatches, schedule, per_unit)
    return per_unit, plan.seconds, crew.run(lambda ranks: measured(ranks, name, plan, crew.folder))


def cell(crew: Crew, name: str, mesh: Mesh, megabits: float, microbatches: int, schedule: str) -> dict:
    """A row. Its error is the median of the rounds': what others do on the machine changes a round's two figures alike."""
    rounds = [predicted_and_measured(crew, name, mesh, microbatches, schedule) for _ in range(ROUNDS)]
    per_unit, predicted, seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
    errors = [plan / measurement - 1 for _, plan, measurement in rounds]
    row = {"model": name, "megabits": megabits, "microbatches": microbatches, "schedule": schedule, "unit_seconds": per_unit}
    row |= {"predicted_seconds": predicted, "measured_seconds": seconds, "error": statistics.median(errors), "errors": errors}
    figures = f"{1e3 * per_unit:.2f} ms per unit of the runtime, predicted {predicted:.3f} s, measured {seconds:.3f} s"
    say(f"{name} at {megabits:g} Mbit/s, K={microbatches}: {figures}, {row['error']:+.1%} ({min(errors):+.1%} to {max(errors):+.1%})")
    return row


def main() -> int:
    parser = parser_of(__doc__, speeds="20,50", models=PIPELINED)
    parser.add_argument("--microbatches", default="4,8")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe", "interleaved_1f1b", "zb_h1"), default="1f1b")
    options, names, speeds = asked(parser, PIPELINED)
    if why := why_not():
        say(f"benchmarks/cluster: {why}")
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with Network() as network:
        crew = Crew(network, options.folder)
        for speed in speeds:
            say(f"measuring collectives at {speed:g} Mbit/s")
            network.limit(speed * 1e6 / 8)
            mesh = crew.run(lambda ranks: measured_mesh(ranks, options.calibrate, options.largest))
            for name, k in itertools.product(names, options.microbatches.split(",")):
                rows.append(cell(crew, name, mesh, speed, int(k), options.schedule))
        crew.ranks.stop()
    errors = [abs(row["error"]) for row in rows]
    found = {"rows": rows, "median_error": statistics.median(errors), "largest_error": max(errors)}
    print(json.dumps(found) if options.json else f"median error {found['median_error']:.1%}, largest {found['largest_error']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
