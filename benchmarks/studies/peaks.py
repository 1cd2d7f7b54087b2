"""The peak of a plan's own program, as torch counts it: one rank under MemTracker, on fake tensors; and the study that compares it."""

from __future__ import annotations

import time

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import Mesh, api
from autoshard.capture import capture
from autoshard.cli.model import load_model
from autoshard.cost import optimizer_state_bytes
from autoshard.graph import Graph
from autoshard.lower.collectives import Groups
from autoshard.lower.kernels import offload  # noqa: F401  (defines the operators)
from autoshard.lower.program import lower
from autoshard.lower.run import run_rank
from autoshard.solution import Solution
from benchmarks.studies import Row, Study

MODELS: dict[str, tuple[str, dict]] = {  # small enough to be quick, large enough for activations and parameters to matter
    "mlp": ("mlp.py:mlp", {"batch": 8192}),
    "gpt2": ("gpt2.py:small", {"layers": 4, "batch": 64, "seq": 1024, "vocab": 50304}),
    "llama": ("llama.py:llama3_8b", {"layers": 3}),
    "bert": ("bert.py:base", {"layers": 4, "vocab": 30528}),
    "moe": ("moe.py:moe", {}),
    "unet": ("unet.py:base", {}),
    "resnet": ("resnet.py:resnet18", {}),
}
TOLERANCE, TIGHT = 0.10, 0.85


def measured_peak(graph: Graph, solution: Solution, *, optimizer: str = "adamw") -> int:
    """Bytes that one rank holds at most while it runs the plan's program."""
    program = lower(graph, solution.layouts, solution.results, solution.mesh)
    mesh = solution.mesh
    groups = Groups(tuple(f"fake_{k}" for k in range(len(mesh.shape))), tuple(mesh.shape))
    second = {name for name, _ in graph.tied}
    trained = {r.name for r in graph.results if r.kind == "gradient" and r.value is not None} & set(graph.parameters)
    with FakeTensorMode():
        loads = [load for load in program.loads if load.name not in second]
        values = {load.name: torch.empty(load.slot.shape, dtype=getattr(torch, load.slot.dtype)) for load in loads}
        kept = [int(optimizer_state_bytes(values[name].numel(), optimizer)) for name in sorted(trained)]
        states = [torch.empty(size, dtype=torch.uint8) for size in kept]
        values |= {name: values[held] for name, held in graph.tied}
        coordinate = tuple(torch.zeros((), dtype=torch.int64) for _ in mesh.shape)
        tracker = MemTracker()
        tracker.track_external(*values.values(), *states)
        with tracker:
            run_rank(program, values, groups, coordinate, (0,) * len(mesh.shape))  # the first rank's parts are the fullest
        peak = tracker.get_tracker_snapshot("peak")
    return max(snapshot["Total"] for device, snapshot in peak.items() if device.type != "meta")


def measured_peak_on_device(graph: Graph, solution: Solution, optimizer: str = "adamw") -> int:
    """The same on the rank's device; what waits in the host's memory does not count.

    graph: as it runs, with what the plan recomputes and offloads.
    """
    with OnHost():
        return measured_peak(graph, solution, optimizer=optimizer)


class OnHost(TorchDispatchMode):
    """The host's memory is the meta device, so that MemTracker tells it from the device, which is the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        target = {torch.ops.autoshard.offload.default: "meta", torch.ops.autoshard.reload.default: "cpu"}.get(func)
        if target is None:
            return func(*args, **(kwargs or {}))
        return torch.empty(args[0].shape, dtype=args[0].dtype, device=target)


def memory(case: tuple, given) -> list[Row]:
    """Predicted peak memory against the peak of the plan's own program: one rank under torch's MemTracker, on fake tensors.

    Each model is planned for training with AdamW on 8 and on 2x4 devices; once without a memory limit, once with 85 % of the peak of the
    first plan (or 2 % more than the smallest limit that works, where that is more). The program of rank 0 (`lower`) then runs forward and
    backward with its real collectives' shapes, nothing computed; parameters, inputs and the optimizer's states are there throughout,
    gradients stay once they are complete. A row fails when prediction and measurement are more than 10 % apart, or when a plan under a
    limit exceeds it.
    """
    (file, settings), shape = case
    module, example_inputs = load_model(f"{given.data}/{file}", settings)
    graph = capture(module, example_inputs, training=True)
    rows: list[Row] = []
    for share in (None, TIGHT):
        began = time.process_time()
        limit = None if share is None else share * rows[0]["predicted_bytes"]
        options = {"training": True, "baselines": False, "gap": 0.001 if limit is None else 0.01, "time_limit": 60}
        try:
            solution = api.plan(module, example_inputs, Mesh.from_bandwidths(shape), memory_limit=limit, **options)
        except api.Infeasible as error:  # then the smallest limit that is said to work, and a little
            assert error.smallest_limit is not None
            limit = 1.02 * error.smallest_limit[1]
            solution = api.plan(module, example_inputs, Mesh.from_bandwidths(shape), memory_limit=limit, **options)
        measured = measured_peak(graph, solution)
        ratio, fits = solution.peak_bytes / measured, limit is None or measured <= limit
        row: Row = {"limit_bytes": limit, "status": solution.status, "predicted_bytes": solution.peak_bytes, "measured_bytes": measured}
        row |= {"ratio": ratio, "fits": fits, "cpu_seconds": time.process_time() - began, "ok": abs(ratio - 1) <= TOLERANCE and fits}
        rows.append(row)
    return rows


MEMORY = Study(
    cases=lambda given: {f"{name} {'x'.join(map(str, mesh))}": (model, mesh) for name, model in MODELS.items() for mesh in ((8,), (2, 4))},
    measure=memory, totals=lambda rows: {"plans": len(rows), "wrong": sum(not row["ok"] for row in rows), "tolerance": TOLERANCE},
    alone=False,
)  # fmt: skip
