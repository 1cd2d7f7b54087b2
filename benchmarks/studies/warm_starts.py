"""The study of passes that start from a cache's near plan."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import autoshard
from autoshard.solution import PlanCache
from benchmarks.studies import Row, Study
from models import bert, gpt2, llama

LINKS = {"mesh_shape": (2, 4), "intra_node_bandwidth": 300e9, "inter_node_bandwidth": 400e9}
SLOWER = {"inter_node_bandwidth": 100e9}
KNOWN = {  # what the cache has: a training step or a forward pass, of a batch and so many layers
    "gpt2 training": (gpt2.small, True, 512, 12), "gpt2 forward": (gpt2.small, False, 512, 12),
    "bert training": (bert.base, True, 256, 12), "llama training": (llama.llama3_8b, True, 16, 8),
}  # fmt: skip
NEAR = {"batch": (2, 0, {}), "link": (1, 0, SLOWER), "layer": (1, 1, {})}  # (times the batch, more layers, other prices)


def warm_starts(case: tuple, given) -> list[Row]:
    """Passes that start from a near plan of a cache, of another batch, of slower links, of a layer less, beside the same from nothing.

    CPU seconds of planning without capture, after two others that load and compile what all need. cost: of the plan that started
    warm relative to the other, under the objective.
    """
    build, training, batch, layers = case
    own, rows = {"training": training, "objective": given.objective}, []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plans")
        for known in (8, 16):
            _planned(gpt2.tiny, True, known, 2, own, Path(folder, "tiny"))
        _planned(*case, own, file)
        (known,) = PlanCache(str(file)).entries()
        for near, (times, more, prices) in NEAR.items():
            PlanCache(str(Path(folder, near))).put(known)
            asked = build, training, batch * times, layers + more, {**own, **prices}
            (warm_seconds, warm), (seconds, cold) = _planned(*asked, Path(folder, near)), _planned(*asked, None)
            assert warm["cache"] == "warm"
            figures = {"cpu_seconds": seconds, "warm_cpu_seconds": warm_seconds, "times": seconds / warm_seconds}
            figures |= {"cost": warm["cost_seconds"] / cold["cost_seconds"], "gap": cold["gap"], "warm_gap": warm["gap"]}
            rows.append({"near": near, **figures})
    return rows


def _planned(build, training: bool, batch: int, layers: int, options: dict, cache: Path | None) -> tuple[float, dict]:
    model, inputs = build(batch=batch, layers=layers, loss=training)
    began = time.process_time()
    _, info = autoshard.autosharding_pass(model, example_inputs=inputs, **{**LINKS, **options}, cache=cache and str(cache))
    return time.process_time() - began - info["solution"].seconds["cpu"]["capture"], info


def totals(rows: list[Row]) -> Row:
    """Three times as fast in the median; the same cost, or within a thousandth of what the search for the shortest time line finds."""
    times = median(row["times"] for row in rows)
    figures = {"median_times": times, "least_times": min(row["times"] for row in rows)}
    return {**figures, "ok": times >= 3 and max(row["cost"] for row in rows) < 1.001}


WARM_STARTS = Study(
    cases=lambda given: KNOWN, measure=warm_starts, totals=totals,
    options={"--objective": {"default": "overlapped", "help": "overlapped or serial"}},
)  # fmt: skip
