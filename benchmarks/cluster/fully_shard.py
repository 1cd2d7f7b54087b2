"""torch's own FSDP2 on an emulated cluster of two nodes with one gloo rank each: its exposed communication, predicted and measured.

    sudo .venv/bin/python benchmarks/cluster/fully_shard.py FOLDER [--speeds 50,200] [--models mlp,gpt2,llama] [--json]

Every block and the model around them is a group of `fully_shard`. Two ways to run it:

    as it comes    over gloo every collective blocks: a group is gathered when its turn comes
    ahead          gathers as handles, and `set_modules_to_forward_prefetch`: in both passes the next group is gathered beside a group's
                   kernels; reductions still block

predicted   the kernels of the captured step of a rank's half of the batch, as they are priced with the rates that this cluster measured;
            one gather of a group's bytes before each pass of a block, and before the first of the root, one reduction of each group
measured    seconds of a step less those of the same step of a module that no rank shares, in turns

Needs root and iproute2, and leaves no namespace behind.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from network import Network, why_not  # noqa: E402
from plans import MODELS, SLOW, plans  # noqa: E402
from ranks import Ranks  # noqa: E402
from run import Steps, asked, measured_mesh, parser_of, say, single  # noqa: E402

from autoshard.capture import capture_deep  # noqa: E402
from autoshard.cost import collective_seconds  # noqa: E402
from autoshard.graph import Graph  # noqa: E402
from autoshard.mesh import Mesh  # noqa: E402
from autoshard.simulate.engine import run_tasks  # noqa: E402
from autoshard.simulate.timeline import timeline_of_solution  # noqa: E402

WAYS = ("as it comes", "ahead")
STEPS, ROUNDS = 3, 5
ROOT = ""  # the group of what is in no block
KERNELS, GATHERS, REDUCTIONS = 0, 1, 2  # streams; the latter two use the link


@dataclass(frozen=True)
class Run:
    """A task as `run_tasks` reads it."""

    seconds: float
    stream: int
    after: tuple[int, ...]


def group_of(path: str) -> str:
    """`layers.0.up.weight` -> `layers.0`, or the root."""
    numbered = re.match(r".*?\.\d+(?=\.|$)", path)
    return numbered[0] if numbered else ROOT


def half_of(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model with a rank's half of its batch."""
    module, inputs = MODELS[name]()
    return module, tuple(torch.empty(len(x) // 2, *x.shape[1:], dtype=x.dtype, device=x.device) for x in inputs)


def passes(graph: Graph, mesh: Mesh) -> tuple[list[tuple[str, bool, float]], dict[str, int]]:
    """The kernels of a step of one rank: (group, backward, seconds) of each stretch in one group, in order; and bytes by group."""
    (alone,) = [one for one in plans(graph, single(mesh), time_limit=5.0) if one.name == "data_parallel"]
    program = timeline_of_solution(graph, alone.solution, single(mesh), overlap=False).program
    passes = [task for task in program.tasks if task.phase != "update"]
    rows = [(group_of(graph.ops[task.op].module), task.phase == "backward", task.seconds) for task in passes]
    stretches = [(*key, sum(seconds for *_, seconds in some)) for key, some in groupby(rows, key=lambda row: row[:2])]
    sizes: dict[str, int] = {}
    for name, i in graph.parameters.items():
        if name not in dict(graph.tied):
            sizes[group_of(name)] = sizes.get(group_of(name), 0) + graph.ops[i].output.bytes
    return stretches, sizes


def exposed(stretches: list[tuple[str, bool, float]], sizes: dict[str, int], mesh: Mesh, ahead: bool) -> float:
    """Seconds by which a step is longer than its kernels."""
    tasks: list[Run] = []
    gathered: dict[tuple[str, bool], int] = {}

    def add(seconds: float, stream: int, *after: int) -> int:
        tasks.append(Run(seconds, stream, tuple(sorted(after))))
        return len(tasks) - 1

    def of(collective: str, group: str) -> float:
        return float(collective_seconds(collective, mesh.axes[SLOW], float(sizes.get(group, 0))))

    turns = [(group, backward) for group, backward, _ in stretches]
    blocks = list(dict.fromkeys(turn for turn in turns if turn[0] != ROOT))
    ends = {turn: len(turns) - 1 - turns[::-1].index(turn) for turn in blocks}
    last = add(of("all_gather", ROOT), GATHERS)
    for k, (group, backward, seconds) in enumerate(stretches):
        turn = group, backward
        if group != ROOT and turn not in gathered:
            gathered[turn] = add(of("all_gather", group), GATHERS, last)
        waits = {last, gathered.get(turn, last)}
        place = blocks.index(turn) + 1 if group != ROOT else 0
        if ahead and (group != ROOT or k == 0) and place < len(blocks) and blocks[place] not in gathered:
            if blocks[place][1] == backward:  # the first of the backward pass is the last of the forward: when its turn comes
                gathered[blocks[place]] = add(of("all_gather", blocks[place][0]), GATHERS, *waits)
        last = add(seconds, KERNELS, *waits)
        if backward and ends.get(turn) == k:
            last = add(of("reduce_scatter", group), REDUCTIONS, last)
    add(of("reduce_scatter", ROOT), REDUCTIONS, last)
    times = run_tasks(tasks, (-1, SLOW, SLOW))
    return max(times.end) - sum(seconds for *_, seconds in stretches)


def measured(ranks: Ranks, name: str) -> dict[str, float]:
    """Median seconds of a step in each way, and of one that nothing is shared in (`alone`), taken in turns."""
    found: dict[str, list[float]] = {way: [] for way in ("alone", *WAYS)}
    for way in found:
        ranks.do("fully_shard", model=name, way=way, timeout=600)
    for _ in range(ROUNDS):
        for way, seconds in found.items():
            seconds += ranks.do("steps", count=STEPS, key=f"{name} {way}", timeout=600)["seconds"]
    return {way: statistics.median(seconds) for way, seconds in found.items()}


def main() -> int:
    parser = parser_of(__doc__, speeds="50,200", models=MODELS)
    options, names, speeds = asked(parser, MODELS)
    options.folder.mkdir(parents=True, exist_ok=True)
    if why := why_not():
        say(f"benchmarks/cluster: {why}")
        return 2
    graphs = {}
    for name in names:
        module, inputs = half_of(name)
        graphs[name] = capture_deep(module, inputs, training=True)[0]
    rows = []
    with Network() as network:
        ranks = Ranks(network, 1, options.folder, own_cores=True)
        for speed in speeds:
            say(f"measuring collectives at {speed:g} Mbit/s")
            network.limit(speed * 1e6 / 8)
            mesh = measured_mesh(ranks, options.calibrate, options.largest)
            mesh = Steps(mesh, ranks, options.folder, "program").mesh
            for name in names:
                stretches, sizes = passes(graphs[name], mesh)
                seconds = measured(ranks, name)
                for way in WAYS:
                    row = {
                        "model": name, "megabits": speed, "way": way, "measured_seconds": seconds[way], "alone_seconds": seconds["alone"],
                        "kernel_seconds": sum(one for *_, one in stretches), "measured_exposed": seconds[way] - seconds["alone"],
                        "predicted_exposed": exposed(stretches, sizes, mesh, way == "ahead"),
                    }  # fmt: skip
                    rows.append(row)
                    say(
                        f"{name} at {speed:g} Mbit/s, {way}: exposed {row['predicted_exposed']:.3f} s predicted, "
                        f"{row['measured_exposed']:.3f} s measured ({row['predicted_exposed'] / row['measured_exposed'] - 1:+.0%})"
                    )
        ranks.stop()
    errors = [abs(row["predicted_exposed"] / row["measured_exposed"] - 1) for row in rows]
    record = {"rows": rows, "median_error": statistics.median(errors), "largest_error": max(errors)}
    words = f"exposed communication: median error {record['median_error']:.1%}, largest {record['largest_error']:.1%}"
    print(json.dumps(record) if options.json else words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
