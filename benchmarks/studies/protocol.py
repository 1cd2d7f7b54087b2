"""The study of the package's own prices through the protocol of cost models."""

from __future__ import annotations

import time
from statistics import median

import autoshard
from benchmarks.studies import Row, Study
from models import bert, gpt2, mlp

MOST = 1.03  # of the seconds without the protocol, in the median of the cases


def protocol(case: tuple, given) -> Row:
    """Plans with `cost_model=DefaultCosts()` beside plans without a cost model: the same plan and cost, and CPU seconds.

    Both are planned in turn, `--times` times, the first of a round last in the next, after one of each that loads what all need.
    times: the median over rounds of the seconds through the protocol relative to those without it.
    """
    build, training, options = case
    links = autoshard.Mesh.from_bandwidths((2, 4))
    meshes = [links, autoshard.Mesh(links.axes, links.device, cost_model=autoshard.DefaultCosts())]
    model, inputs = build(loss=training, **options)
    ratios, same = [], True
    for k in range(given.times + 1):
        seconds, plans = [0.0, 0.0], [None, None]
        for which in (0, 1) if k % 2 else (1, 0):
            began = time.process_time()
            plans[which] = autoshard.plan(model, inputs, meshes[which], training=training, objective="serial", baselines=False, gap=1e-3)
            seconds[which] = time.process_time() - began
        usual, own = plans
        same &= (usual.cost, usual.bound, usual.layouts, usual.results) == (own.cost, own.bound, own.layouts, own.results)
        ratios += [seconds[1] / seconds[0]] if k else []
    return {"times": median(ratios), "least": min(ratios), "most": max(ratios), "cpu_seconds": seconds[0], "same": same, "ok": same}


def totals(rows: list[Row]) -> Row:
    times = median(row["times"] for row in rows)
    return {"median_times": times, "ok": times <= MOST and all(row["same"] for row in rows)}


CASES = {
    "mlp training": (mlp.mlp, True, {}), "gpt2 training": (gpt2.small, True, {"batch": 64, "layers": 4}),
    "gpt2 forward": (gpt2.small, False, {"batch": 64}), "bert training": (bert.base, True, {"batch": 64, "layers": 4}),
}  # fmt: skip
PROTOCOL = Study(
    cases=lambda given: CASES, measure=protocol, totals=totals,
    options={"--times": {"type": int, "default": 7, "help": "rounds"}},
)  # fmt: skip
