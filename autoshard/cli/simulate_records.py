"""The records of `autoshard simulate --json`, for configurations of a model, for a plan, and for a published simulator's MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

OF_THE_BEST = ("seconds", "peak_bytes", "schedule", "microbatches", "bubble", "exposed_communication_seconds")


def record_of_model(simulations: Sequence[Any]) -> dict:
    """The record of all simulations, the best first."""
    best, stages = simulations[0], []
    for d in range(best.parallel.pipeline):
        mine = best.parts[d :: best.parallel.pipeline]
        stages.append(
            {
                "mesh": list(best.mesh.shape),
                "forward_seconds": math.fsum(part.forward for part in mine),
                "backward_seconds": math.fsum(part.backward for part in mine),
                "finish_seconds": math.fsum(part.finish for part in mine),
                "peak_bytes": best.peak_bytes if best.run is None else best.run.peak_bytes[d],
                "send_bytes": math.fsum(part.send for part in mine),
            }
        )
    rows = [one.to_dict() for one in simulations]
    top = {key: rows[0][key] for key in OF_THE_BEST}
    overlap = best.timeline is None or best.timeline.program.overlap
    return {**top, **_sure(best.mesh.device, best.seconds, overlap=overlap), "stages": stages, "configurations": rows}


def record_of_plan(solution: Any, timeline: Any, *, measured: bool) -> dict:
    """A plan's time line as a record. measured: under other prices than the plan's own; `cost_seconds` is then the cost under those."""
    row = {
        "seconds": timeline.seconds,
        "peak_bytes": timeline.peak_bytes,
        "schedule": "sequential",
        "microbatches": solution.microbatches,
        "bubble": 0.0,
        "exposed_communication_seconds": timeline.exposed_communication_seconds,
    }
    program = timeline.program
    return {
        **row,
        **_sure(program.formulation.mesh.device, timeline.seconds, overlap=program.overlap),
        "cost_seconds": _cost(timeline.program) if measured else solution.cost,
        "plan_peak_bytes": solution.peak_bytes,
        "compute_seconds": timeline.compute_seconds,
        "communication_seconds": timeline.communication_seconds,
        "critical_seconds": timeline.critical_seconds,
        "stages": [{"mesh": list(solution.mesh.shape), "seconds": timeline.seconds, "peak_bytes": timeline.peak_bytes}],
        "configurations": [row],
    }


def _sure(device: Any, seconds: float, *, overlap: bool = True) -> dict:
    """The constants of the device's kernels, and between which seconds 80 % of published steps were; None where that is not known."""
    kernels = device.kernels
    steps = None if kernels is None else kernels.overlapped if overlap else kernels.serial
    interval = None if steps is None else [seconds * steps.low, seconds * steps.high]
    tested = None if steps is None else {"devices": steps.devices, "runs": steps.runs, "error": steps.error}
    return {"interval_seconds": interval, "prices": None if kernels is None else kernels.source, "tested": tested}


def _cost(program: Any) -> float:
    """Seconds of all tasks one after the other, under the prices that the program was made with."""
    from autoshard.problem import evaluate  # here: numpy, which --help shouldn't wait for

    return float(evaluate(program.formulation.problem, program.choice).cost)


def record_of_mlp(target: str, constants: str, keywords: dict, configurations: Sequence[tuple[int, ...]]) -> dict:
    """The record of a published simulator's MLP under its rules."""
    from autoshard.simulate import Parallel, distir

    if target != "mlp":
        raise ValueError(f"{target} under {constants}; those rules know their MLP alone: give mlp, with --set layers, width and batch")
    moved = str(keywords.pop("moved", "everything"))
    known = {"layers": 64, "width": 8192, "batch": 8192}
    if unknown := [key for key in keywords if key not in known]:
        raise ValueError(f"mlp takes no {unknown[0]!r}; it takes layers, width, batch and moved, so correct the --set")
    sizes = {key: keywords.get(key, value) for key, value in known.items()}
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in sizes.values()):
        raise ValueError(f"mlp of {sizes}; expected whole numbers of 1 or more")
    rows = []
    for d, h, p, k in configurations:
        taken = distir.step_seconds(distir.MLP(**sizes), Parallel(d, h, p, k), distir.CONSTANTS[constants], moved=moved)
        shape = {"data": d, "tensor": h, "pipeline": p, "microbatches": k, "devices": d * h * p}
        rows.append({**shape, "seconds": taken, "samples_per_second": sizes["batch"] / taken})
    rows.sort(key=lambda row: row["seconds"])
    unknown_here = dict.fromkeys(("peak_bytes", "bubble", "exposed_communication_seconds"))
    rows = [{**row, **unknown_here, "schedule": "1f1b"} for row in rows]
    top = {key: rows[0][key] for key in OF_THE_BEST}
    return {**top, "constants": constants, "stages": [], "configurations": rows}
