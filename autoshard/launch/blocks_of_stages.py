"""How the blocks of a run are distributed over its pipeline stages, and stages over devices: `split` of a launch.

    ""         as many on each stage; where they don't divide, as "ends"
    "ends"     the token table and the head count as one block each, a further prediction as two (a block and the head again), and the first
               stages have one more of what is left over
    "4,4,3"    of each stage, in the order of the model, as a configuration lists them
    balanced   in order, each stage up to the block with which the running cost of blocks and head reaches its share of the total
               (nanotron, build_model): cost of a block 4 * queries * h + 3 * h * ffn, of the head V * h

Device d of p has the stages d, d + p, d + 2 p ...; by V-shaped schedules d and 2 p - 1 - d.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .runs import V_SHAPED, Launch, TrainingRuns, distinct

ENDS = "ends"


@dataclass(frozen=True)
class Stages:
    """Blocks per device of each run, all its stages together. There may be none."""

    first: np.ndarray  # where the table is
    last: np.ndarray  # where the head is
    largest: np.ndarray  # on any device without the head (the only one where there is one)


def spread(layers: int, stages: int, first: int = 1, last: int = 1) -> list[int]:
    """Blocks of each stage, where table and head count as `first` and `last` blocks."""
    least, over = divmod(layers + first + last, stages)
    counts = [least + (stage < over) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    for stage, neighbor in [*pairwise(range(stages)), *pairwise(range(stages - 1, -1, -1))]:  # ends of more blocks than a stage
        counts[neighbor] += min(counts[stage], 0)
        counts[stage] = max(counts[stage], 0)
    return counts


def listed(split: str) -> list[int]:
    """Blocks of each stage of a split that lists them; else none."""
    return [] if split in ("", ENDS) else [int(count) for count in split.split(",")]


def counts_of(launch: Launch, layers: int, mtp: int = 0) -> list[int]:
    """Blocks of each stage of a launch, in the order of the model. ValueError where there are more stages than blocks, table and head."""
    stages = launch.pipeline * launch.virtual
    if not launch.split and layers % stages == 0:
        return [layers // stages] * stages
    if stages > layers + 2:
        raise ValueError(f"{layers} layers, token table and head can't be {stages} stages; expected {layers + 2} at most")
    return listed(launch.split) or spread(layers, stages, 1, 1 + 2 * mtp)


def split_of(counts: Sequence[int], layers: int, pipeline: int, mtp: int = 0) -> str:
    """Of stages with so many blocks: one that lists them, unless one of the others says the same."""
    if len(counts) % pipeline:
        return ",".join(map(str, counts))
    if list(counts) == spread(layers, len(counts), 1, 1 + 2 * mtp):
        return ENDS if len(counts) > 1 else ""
    return "" if set(counts) == {layers / len(counts)} else ",".join(map(str, counts))


def stages(runs: TrainingRuns, balanced: np.ndarray) -> Stages:
    """balanced: True for the runs whose launcher splits by cost; one entry for all runs, or one for each."""
    block, further = 4 * runs.queries * runs.width + 3 * runs.width * runs.ffn, runs.predictions - 1  # blocks in front of the head
    folded = runs.among("schedule", V_SHAPED)
    of_run = (runs.layers - further, further, runs.pipeline, runs.virtual, folded, runs.split, block, runs.table_parameters, balanced)
    columns = [np.broadcast_to(column, len(runs)) for column in of_run]
    firsts, of = distinct(columns)  # runs of one model have few kinds of stages
    counts = []
    for layers, mtp, devices, virtual, folded, split, cost, head, by_cost in zip(*(column[firsts].tolist() for column in columns)):
        n, p = int(layers), int(devices)
        counts.append(_balanced(n, p, cost, head) if by_cost else _even(n, int(mtp), p, int(virtual), folded, split))
    first, last, largest = np.array(counts, dtype=float).reshape(-1, 3).T[:, of]
    one = (runs.pipeline == 1) * further
    return Stages(first + one, last + further, largest + one)


def _even(layers: int, mtp: int, devices: int, virtual: int, folded: bool, split: str) -> tuple[int, int, int]:
    number = devices * (virtual if devices > 1 else 1)
    even = [layers // number] * number if not split and layers % number == 0 else []
    counts = listed(split) or even or spread(layers, number, 1, 1 + 2 * mtp)
    sums = [0] * devices
    for stage, count in enumerate(counts):
        turn, place = divmod(stage, devices)
        sums[devices - 1 - place if folded and turn % 2 else place] += count
    of_head = 0 if folded else devices - 1
    return sums[0], sums[of_head], max((n for d, n in enumerate(sums) if d != of_head), default=layers)


def _balanced(layers: int, devices: int, block: float, head: float) -> tuple[int, int, int]:
    costs = np.cumsum([0.0, *[block] * layers, 0.0, head])
    stage, counts, of_head = 0, [0] * devices, 0
    for i, cost in enumerate(costs):
        counts[stage] += 1 <= i <= layers
        of_head = stage
        # nanotron asks for more than its share; where a block meets it exactly (its 16-layer model), measured steps are of stages that end
        if i and stage < devices - 1 and cost >= costs[-1] * (stage + 1) / devices:
            stage += 1
    return counts[0], counts[of_head], max((n for s, n in enumerate(counts) if s != of_head), default=layers)
