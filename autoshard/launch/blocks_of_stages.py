"""How the blocks of a run are distributed over its pipeline stages.

even       ceil(L / p) blocks on each stage; where p does not divide L, a stage counts the table and the head as one block each
balanced   in order, each stage up to the block with which the running cost of blocks and head reaches its share of the total
           (nanotron, build_model): cost of a block 4 * queries * h + 3 * h * ffn, of the head V * h
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .runs import TrainingRuns


@dataclass(frozen=True)
class Stages:
    """Blocks per stage of each run. A stage can be empty."""

    first: np.ndarray  # on the stage with the table
    last: np.ndarray  # on the stage with the head
    largest: np.ndarray  # on any stage without the head (the only stage where there is one)


def stages(runs: TrainingRuns, balanced: np.ndarray) -> Stages:
    """balanced: True for the runs whose launcher splits by cost; one entry for all runs, or one for each."""
    block = 4 * runs.queries * runs.width + 3 * runs.width * runs.ffn
    columns = (runs.layers, runs.pipeline, block, runs.table_parameters, balanced)
    rows = list(zip(*(np.broadcast_to(column, len(runs)).tolist() for column in columns), strict=True))
    counts = {row: _counts(int(row[0]), int(row[1]), *row[2:]) for row in set(rows)}  # runs of one model have few kinds of stages
    return Stages(*np.array([counts[row] for row in rows], dtype=float).reshape(-1, 3).T)


def _counts(layers: int, stages: int, block: float, head: float, balanced: bool) -> tuple[int, int, int]:
    if stages == 1:
        return layers, layers, layers
    if not balanced:
        if layers % stages == 0:
            return layers // stages, layers // stages, layers // stages
        per_stage = -(-(layers + 2) // stages)
        return per_stage - 1, per_stage - 1, per_stage
    costs = np.cumsum([0.0, *[block] * layers, 0.0, head])
    stage, counts, of_head = 0, [0] * stages, 0
    for i, cost in enumerate(costs):
        counts[stage] += 1 <= i <= layers
        of_head = stage
        # nanotron asks for more than its share; where a block meets it exactly (its 16-layer model), measured steps are of stages that end
        if i and stage < stages - 1 and cost >= costs[-1] * (stage + 1) / stages:
            stage += 1
    others = [n for s, n in enumerate(counts) if s != of_head]
    return counts[0], counts[of_head], max(others)
