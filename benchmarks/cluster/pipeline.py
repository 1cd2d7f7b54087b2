"""Two-stage pipelines on an emulated cluster of two nodes with two gloo ranks each: simulated and measured seconds per step.

    sudo .venv/bin/python benchmarks/cluster/pipeline.py FOLDER [--speeds 20,50] [--models mlp,llama] [--microbatches 4,8] [--json]

A stage per node, the microbatch split over the node's two ranks (data parallel). torch.distributed.pipelining runs the schedule on
modules that it cuts itself, where autoshard cuts: the gradients are added over a node's ranks at the end of the step, then AdamW.
Predicted: `simulate_grid` with the prices measured at that link speed; activations and their gradients cross the link, which all ranks
of a node share. What torch's runtime takes per microbatch beside kernels is that of a tiny MLP whose microbatches become more.
Needs root and iproute2, and leaves no namespace behind.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from network import Network, why_not  # noqa: E402
from plans import PIPELINED, SLOW, TINY, TINY_PIPELINE, graph_of  # noqa: E402
from ranks import Ranks  # noqa: E402
from run import PER_NODE, asked, measured_mesh, parser_of, say, with_launch  # noqa: E402

from autoshard.api import simulate_grid  # noqa: E402
from autoshard.capture import capture_deep  # noqa: E402
from autoshard.mesh import Axis, Mesh  # noqa: E402
from autoshard.pipeline.grid import divided  # noqa: E402
from autoshard.pipeline.layers import layers_of  # noqa: E402
from autoshard.pipeline.microbatches import microbatch  # noqa: E402
from autoshard.simulate.degrees import Parallel  # noqa: E402

STAGES = 2
STEPS = 7
FEW, MANY = 4, 16  # microbatches of the tiny model


def where_cut(build, microbatches: int) -> str:
    """The module of the first forward op of the second stage: where the simulator cuts the model, and torch should."""
    module, inputs = build(loss=True)
    graph, _ = capture_deep(module, microbatch(inputs, microbatches, PER_NODE), training=True)
    part_of = divided(layers_of(graph), STAGES)
    path = next(op.module for op, part in zip(graph.ops, part_of) if part == 1 and not op.is_placeholder)
    return ".".join(path.split(".")[:2])  # a block, not a module within it


def unit_seconds(ranks: Ranks, mesh: Mesh, schedule: str) -> float:
    """What the runtime takes for a forward or a backward of one microbatch: more microbatches of a tiny model, and their prediction."""
    few, many = (
        (measured(ranks, "tiny", k, schedule), predicted(TINY_PIPELINE, mesh, k, schedule, 0.0)) for k in (FEW, MANY)
    )
    return max(0.0, ((statistics.median(many[0]) - statistics.median(few[0])) - (many[1] - few[1])) / (2 * (MANY - FEW)))


def measured(ranks: Ranks, name: str, microbatches: int, schedule: str) -> list[float]:
    """Seconds of some steps."""
    cut = where_cut(PIPELINED.get(name, TINY_PIPELINE), microbatches)
    ranks.do("pipeline", model=name, cut=cut, microbatches=microbatches, schedule=schedule, timeout=300)
    return ranks.do("steps", count=STEPS, timeout=600)["seconds"]


def predicted(build, mesh: Mesh, microbatches: int, schedule: str, per_unit: float) -> float:
    module, inputs = build(loss=True)
    shape = Parallel(PER_NODE, 1, STAGES, microbatches)
    one = Axis("tensor", 1, mesh.axes[1].bandwidth, mesh.axes[1].latency)
    whole = Mesh((*mesh.axes, one), mesh.device)
    return simulate_grid(module, inputs, [shape], lambda _: whole, schedule=schedule, unit_seconds=per_unit)[0].seconds


def cell(ranks: Ranks, name: str, mesh: Mesh, megabits: float, microbatches: int, schedule: str, per_unit: float) -> dict:
    expected = predicted(PIPELINED[name], mesh, microbatches, schedule, per_unit)
    seconds = measured(ranks, name, microbatches, schedule)
    row = {"model": name, "megabits": megabits, "microbatches": microbatches, "schedule": schedule, "predicted_seconds": expected}
    row |= {"measured_seconds": statistics.median(seconds), "all_measured_seconds": seconds}
    row["error"] = expected / row["measured_seconds"] - 1
    say(f"{name} at {megabits:g} Mbit/s, K={microbatches}: predicted {expected:.3f} s, measured {row['measured_seconds']:.3f} s")
    return row


def main() -> int:
    parser = parser_of(__doc__, speeds="20,50", models=PIPELINED)
    parser.add_argument("--microbatches", default="4,8")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    options, names, speeds = asked(parser, PIPELINED)
    if why := why_not():
        say(f"benchmarks/cluster: {why}")
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with Network() as network:
        ranks = Ranks(network, PER_NODE, options.folder)
        for speed in speeds:
            say(f"measuring collectives at {speed:g} Mbit/s")
            network.limit(speed * 1e6 / 8)
            mesh = measured_mesh(ranks, options.calibrate, options.largest)
            mesh = with_launch(mesh, graph_of(TINY), lambda _: ranks.do("eager")["seconds"])  # no program of ours: torch's own modules
            assert mesh.axes[SLOW].size == STAGES
            per_unit = unit_seconds(ranks, mesh, options.schedule)
            say(f"torch's runtime takes {1e3 * per_unit:.2f} ms per forward or backward of a microbatch")
            for name in names:
                rows += [cell(ranks, name, mesh, speed, int(k), options.schedule, per_unit) for k in options.microbatches.split(",")]
        ranks.stop()
    errors = [abs(row["error"]) for row in rows]
    found = {"rows": rows, "median_error": statistics.median(errors), "largest_error": max(errors)}
    print(json.dumps(found) if options.json else f"median error {found['median_error']:.1%}, largest {found['largest_error']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
