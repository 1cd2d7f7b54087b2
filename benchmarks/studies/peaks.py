"""The peak of a plan's own program, as torch counts it: one rank under MemTracker, on fake tensors; and the study that compares it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import Cluster, Mesh, api
from autoshard.capture import capture
from autoshard.cli.model import load_model
from autoshard.cost import optimizer_state_bytes
from autoshard.graph import Graph
from autoshard.lower.collectives import Groups
from autoshard.lower.kernels import offload  # noqa: F401  (defines the operators)
from autoshard.lower.program import lower
from autoshard.lower.run import run_rank
from autoshard.lower.unsharded import materialized
from autoshard.mesh import Device
from autoshard.runtime.distribute import local
from autoshard.simulate import timeline_of_solution
from autoshard.solution import Pipeline, Solution, replay
from benchmarks.studies import Row, Study
from tests.helpers_models import Held
from tests.helpers_ranks import results

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


def on_one_rank(case: tuple, given) -> list[Row]:
    """The plans of a model without and with a limit."""
    (file, settings), shape = case
    module, example_inputs = load_model(f"{given.data}/{file}", settings)
    captured = capture(module, example_inputs, training=True)
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
        measured = measured_peak(replay(solution, captured).checked(), solution)
        ratio, fits = solution.peak_bytes / measured, limit is None or measured <= limit
        row: Row = {"limit_bytes": limit, "status": solution.status, "predicted_bytes": solution.peak_bytes, "measured_bytes": measured}
        row |= {"ratio": ratio, "fits": fits, "cpu_seconds": time.process_time() - began, "ok": abs(ratio - 1) <= TOLERANCE and fits}
        rows.append(row)
    return rows


# -- on ranks ----------------------------------------------------------------------------------------------------------------------

MLP = ("mlp.py:mlp", {"batch": 1024})
GPT2 = ("gpt2.py:build", {
    "layers": 4, "heads": 4, "width": 128, "positions": 128, "vocab": 512, "batch": 32, "seq": 128, "loss": True, "dtype": "float32",
})  # fmt: skip
LLAMA = ("llama.py:build", {
    "layers": 4, "heads": 4, "kv_heads": 2, "width": 128, "hidden": 384, "vocab": 512, "batch": 32, "seq": 128, "loss": True,
    "dtype": "float32",
})  # fmt: skip
FEWER = {model[0]: (model[0], {**model[1], "batch": model[1]["batch"] // 4}) for model in (MLP, GPT2, LLAMA)}  # of one microbatch
DEEP = (GPT2[0], {**GPT2[1], "layers": 8})  # each stage keeps far more than it sends, which gloo holds to the end of the step
FOUR, SQUARE = (4,), (2, 2)
AUTO = {"recompute": "auto", "share": 0.7}
RANKS: dict[str, tuple] = {  # model, mesh or a pipeline's schedule, options; share: of the peak of the plan without a limit
    "mlp 4": (MLP, FOUR, {}), "mlp 2x2": (MLP, SQUARE, {}), "mlp 2x2, limit": (MLP, SQUARE, {"share": 0.85}),
    "mlp 4, recompute all": (MLP, FOUR, {"recompute": "all"}), "mlp 2x2, recompute auto": (MLP, SQUARE, AUTO),
    "gpt2 4": (GPT2, FOUR, {}), "gpt2 2x2": (GPT2, SQUARE, {}), "gpt2 2x2, limit": (GPT2, SQUARE, {"share": 0.95}),
    "gpt2 4, recompute all": (GPT2, FOUR, {"recompute": "all"}), "gpt2 2x2, recompute auto": (GPT2, SQUARE, AUTO),
    "llama 4": (LLAMA, FOUR, {}), "llama 2x2, limit": (LLAMA, SQUARE, {"share": 0.95}), "llama 4, recompute auto": (LLAMA, FOUR, AUTO),
    **{
        f"{model[0].partition('.')[0]} 2x2, 4 microbatches": (FEWER[model[0]], SQUARE, {"microbatches": 4}) for model in (MLP, GPT2, LLAMA)
    },
    **{f"gpt2 pipeline, {schedule}": (DEEP, schedule, {}) for schedule in ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b")},
}  # fmt: skip
SMALL = Device("small", flops=1e12, flops32=1e12, memory_bandwidth=1e11, memory=8e9, host_bandwidth=5e9)
ON_RANKS = 0.02


def drawn(model: torch.nn.Module, inputs: tuple, times: int) -> tuple[torch.nn.Module, tuple]:
    """The model with weights, and the inputs of so many microbatches."""
    torch.manual_seed(0)
    model = materialized(model, 0)
    shapes = [(times * x.shape[0], *x.shape[1:]) for x in inputs]
    return model, tuple(torch.randn(s) if x.is_floating_point() else torch.randint(0, 64, s) for s, x in zip(shapes, inputs))


def held_on_rank(rank: int, model: torch.nn.Module, inputs: tuple, planned: Any, times: int) -> tuple[int, int]:
    """Bytes that this rank holds at most in forward and backward of a step, by the helper of the tests and by MemTracker: what is there
    throughout, and what is allocated on top."""
    shape = (dist.get_world_size(),) if isinstance(planned, Pipeline) else planned.mesh.shape
    examples = inputs if isinstance(planned, Pipeline) else None
    module = api.parallelize(model, planned, init_device_mesh("cpu", shape), example_inputs=examples)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)

    def passes(before_each: Callable[[], Any] = lambda: None) -> None:
        if isinstance(planned, Pipeline):
            module.step(*inputs)
            return
        for given in module.microbatches(inputs) if times > 1 else [held]:
            before_each()
            loss = module(*given)
            loss.backward()

    held = module.shard_inputs(inputs) if times == 1 and not isinstance(planned, Pipeline) else ()
    passes()
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    there = [local(x) for x in (*module.parameters(), *module.buffers(), *states, *held)]
    peaks = []
    for _ in range(3):  # gloo's threads release some buffers late
        optimizer.zero_grad()
        with Held() as counted:
            passes()
        peaks.append(counted.peak)
    optimizer.zero_grad()
    tracker, batch = MemTracker(), () if held else [x for x in inputs if x.dim()]
    tracker.track_external(*there, *batch)
    with tracker:
        passes(tracker.reset_mod_stats)
    tracked = max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    return sum(x.nbytes for x in there) + min(peaks), tracked - sum(x.nbytes for x in batch)  # the caller's, of which ranks take shards


def on_ranks(case: tuple, given: Any) -> Row:
    (file, settings), mesh, options = case
    model, inputs = load_model(f"{given.data}/{file}", settings)
    began, times = time.process_time(), options.get("microbatches", 1)
    row: Row = {}
    if isinstance(mesh, str):
        cluster = Cluster.of(4, devices_per_node=2, device=SMALL, intra_node_bandwidth=5e9, inter_node_bandwidth=5e8)
        planned = api.plan(model, inputs, cluster, microbatches=(4,), schedules=(mesh,), stages=2, grid=False)
    else:
        on = Mesh.from_bandwidths(mesh, device=SMALL, intra_node_bandwidth=5e9, inter_node_bandwidth=5e8)
        options = {"training": True, "baselines": False, "gap": 0.01, "time_limit": 30, **options}
        if (share := options.pop("share", None)) is not None:
            options["memory_limit"] = share * api.plan(model, inputs, on, **{**options, "recompute": 0}).peak_bytes
        planned = api.plan(model, inputs, on, **options)
        graph = replay(planned, capture(model, inputs, training=True)).checked()
        row = {"limit_bytes": options.get("memory_limit"), "timeline_bytes": timeline_of_solution(graph, planned).peak_bytes}
        if times == 1:
            row["tracked_bytes"] = measured_peak_on_device(graph, planned)
        row |= {"recomputed": len(planned.chosen.recomputed), "offloaded": len(planned.chosen.offloaded)}
    of_ranks = results(4, held_on_rank, *drawn(model, inputs, times), planned, times)
    row = {"predicted_bytes": planned.peak_bytes, "held_bytes": max(held for held, _ in of_ranks), "all": of_ranks, **row}
    row.setdefault("tracked_bytes", max(tracked for _, tracked in of_ranks))
    errors = {key: row[f"{key}_bytes"] / planned.peak_bytes - 1 for key in ("tracked", "held")}
    row |= {f"{key}_error": error for key, error in errors.items()}
    return {**row, "cpu_seconds": time.process_time() - began, "ok": all(abs(error) <= ON_RANKS for error in errors.values())}


def memory(case: tuple, given) -> Row | list[Row]:
    """Predicted peak memory against the peak of the plan's own program: one rank under torch's MemTracker, on fake tensors.

    Each model is planned for training with AdamW on 8 and on 2x4 devices; once without a memory limit, once with 85 % of the peak of the
    first plan (or 2 % more than the smallest limit that works, where that is more). The program of rank 0 (`lower`) then runs forward and
    backward with its real collectives' shapes, nothing computed; parameters, inputs and the optimizer's states are there throughout,
    gradients stay once they are complete. A row fails when prediction and measurement are more than 10 % apart, or when a plan under a
    limit exceeds it.

    The cases `ranks` train on 4 gloo ranks. held: the bytes of live tensors at most in forward and backward, on the rank that holds most,
    with what is there throughout; tracked: MemTracker's, of the program of rank 0, and of the run itself (the fullest rank) for pipelines
    and microbatches; timeline: of the time line with overlap. A row fails when held or tracked is more than 2 % from the prediction.
    The models are small: overlapping may take half a megabyte more, which is below 2 % from 25 MB on.
    """
    return on_one_rank(case, given) if len(case) == 2 else on_ranks(case, given)


MEMORY = Study(
    cases=lambda given: {
        **{f"{name} {'x'.join(map(str, mesh))}": (model, mesh) for name, model in MODELS.items() for mesh in ((8,), (2, 4))},
        **{f"ranks, {name}": case for name, case in RANKS.items()},
    },
    measure=memory, totals=lambda rows: {"plans": len(rows), "wrong": sum(not row["ok"] for row in rows), "tolerance": TOLERANCE},
    alone=False,
)  # fmt: skip
