"""What a compiled training step allocates on this CPU, and what plans say: as planned, with every value kept, and with less memory.

    PYTHONPATH=. python benchmarks/compiled_memory.py [--json]

Llama of 6 layers in bfloat16 on one process; the bytes that torch's profiler counts between the begin of a step and its fullest moment.
"plan" are the activations and gradients of the plan's peak.
"""

from __future__ import annotations

import argparse
import json
import os
from unittest import mock

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard import Mesh
from models import llama

SIZES = {"layers": 6, "heads": 8, "kv_heads": 4, "width": 256, "hidden": 896, "vocab": 512, "batch": 8, "seq": 128}


def kept(graph: object, keeping: str) -> frozenset[str]:
    """In place of `computed_again`: nothing is."""
    return frozenset()


def allocated(plan: autoshard.Solution, module: torch.nn.Module, inputs: tuple) -> int:
    parallel = autoshard.parallelize(module, plan, dist.device_mesh.init_device_mesh("cpu", (1,)))
    parallel.compile()

    def step() -> None:
        parallel(*inputs).backward()
        for parameter in parallel.parameters():
            parameter.grad = None

    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    module, inputs = llama.build(loss=True, dtype="bfloat16", **SIZES)
    module = module.to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    inputs = tuple(torch.randint(0, SIZES["vocab"], x.shape) for x in inputs)
    mesh, rows = Mesh.from_bandwidths((1,), devices_per_node=1), {}
    options = {"training": True, "compiled": True, "objective": "serial"}
    every = autoshard.plan(module, inputs, mesh, **options)
    with mock.patch("autoshard.planning.compiling.computed_again", kept):
        plans = {"every value kept": autoshard.plan(module, inputs, mesh, **options), "as planned": every}
    plans["with less memory"] = autoshard.plan(module, inputs, mesh, **options, memory_limit=0.95 * every.peak_bytes)
    for name, plan in plans.items():
        parts = plan.peak["parts"]
        planned = parts.get("activations", 0.0) + parts.get("gradients", 0.0)
        rows[name] = {"plan": planned, "measured": allocated(plan, module, inputs)}
        if not arguments.json:
            print(f"{name:20} plan {planned / 1e6:6.1f} MB   measured {rows[name]['measured'] / 1e6:6.1f} MB", flush=True)
    if arguments.json:
        print(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
