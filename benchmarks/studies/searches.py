"""Studies of plans that are searched for together: of stages, tables, and programs on one set of weights."""

from __future__ import annotations

import resource
import runpy
import time

import torch

import autoshard
from autoshard import Cluster, Mesh, Program, Table
from autoshard.cli.model import load_model
from autoshard.mesh import parse_shape
from benchmarks.studies import Row, Study
from models import llama

# -- stages ----------------------------------------------------------------------------------------------------------------------------

STAGED = {
    "gpt2": ("gpt2.py:small", {"batch": 64, "seq": 1024, "vocab": 50304}),
    "llama3_70b": ("llama.py:llama3_70b", {}),
    "llama3_405b": ("llama.py:llama3_405b", {}),
    "unet": ("unet.py:base", {}),
}


def pipeline(case: tuple, given) -> Row:
    """Pipelines: the plan compared with equal stages and the data x tensor x pipeline grid, and the seconds of the search.

    Nodes of eight H100, two of them or as --devices says; CPU seconds by phase are in the JSON. No seconds for a way: none of its
    configurations fits, or could be the best.
    """
    path, settings = case
    module, inputs = load_model(f"{given.data}/{path}", settings)
    cpu, wall = time.process_time(), time.monotonic()
    best = autoshard.plan(module, inputs, Cluster.of(given.devices))
    row = {"devices": given.devices, "cpu_seconds": time.process_time() - cpu, "wall_seconds": time.monotonic() - wall}
    row |= {"bound_seconds": best.bound, "stages": len(best.stages), "microbatches": best.microbatches, "schedule": best.schedule}
    row |= {"peak_bytes": best.peak_bytes, "configurations": len(best.configurations), "seconds_spent": best.seconds_spent}
    plans = {f"best, {best.way}": {"step_seconds": best.seconds}}
    for way in ("planned", "equal", "grid"):
        fitting = [one["seconds"] for one in best.configurations if one["way"] == way and one["fits"]]
        plans[way] = {"step_seconds": min(fitting, default=None)}
    return {**row, "plans": plans}


PIPELINE = Study(
    cases=lambda given: STAGED, measure=pipeline, alone=False, options={"--devices": {"type": int, "default": 16}},
)  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------------------------------------------


def dlrm(shape: str, given) -> Row:
    """DLRM and its tables planned as one (together), against the two planned apart: the dense part has all the memory, the tables get what
    it leaves. Memory is so small that the tables nearly fill the devices."""
    model, mesh = runpy.run_path(f"{given.data}/dlrm.py"), Mesh.from_bandwidths(parse_shape(shape))
    tables = [Table(**record) for record in model["criteo_tables"](rows=given.rows)]
    hbm = given.room * sum(table.bytes + table.state_bytes for table in tables) / mesh.num_devices
    module, inputs = model["criteo_dense"](batch=given.batch)
    began = time.process_time()
    found = autoshard.plan_with_tables(module, inputs, "pooled", tables, mesh, hbm=hbm, host_memory=1e12)
    row = {"hbm_bytes": hbm, "cpu_seconds": time.process_time() - began, **found.to_dict()}
    return {**row, "plans": {name: row.pop(name) or {"fits": False} for name in ("together", "apart")}}


DLRM = Study(
    cases=lambda given: {shape: shape for shape in given.meshes.split(",")}, measure=dlrm, alone=False,
    options={
        "--meshes": {"default": "8,2x4,2x8"}, "--rows": {"type": int, "default": 20_000_000},
        "--batch": {"type": int, "default": 8192, "help": "examples of all devices"},
        "--room": {"type": float, "default": 1.1, "help": "memory of all devices, in times of what the tables weigh"},
    },
)  # fmt: skip


# -- programs --------------------------------------------------------------------------------------------------------------------------

NAMES = ("prefill", "decode", "train")


def programs_cases(given) -> dict:
    """By name: weights, memory."""
    memory = None if given.memory == "none" else float(given.memory)
    if not given.ends:
        return {given.weights: (tuple(map(float, given.weights.split(","))), memory)}
    limits = {"no limit" if limit is None else f"{limit / 1e9:g} GB": limit for limit in (memory, None)}
    return {
        f"{name} favoured, {said}": (tuple(1e6 if other == name else 1.0 for other in NAMES), limit)
        for said, limit in limits.items()
        for name in NAMES
    }


def programs(case: tuple, given) -> Row:
    """Llama-3 8B as three programs on one set of weights: prefill, decode and training on 8 devices, and what sharing costs each of them.

    Prefill is 1 x 8192 tokens, decode one token for each of 64 sequences with 8192 in the cache, training 8 x 8192 with every block
    recomputed. --ends: everything is shared, and each program in turn runs a million times as often as the others, with the memory limit
    and without it. A loss is against the best plan of the program alone on empty devices, under the same limit. The least is what the bound
    proves: no plan in which the others are no slower has a smaller loss.
    """
    weights, memory = case
    began = cpu_seconds() if given.ends else 0.0
    model, prompt = llama.llama3_8b(batch=1, layers=given.layers, loss=False)
    _, batch = llama.llama3_8b(batch=8, layers=1)
    token = (torch.empty(64, 1, dtype=torch.int64, device="meta"), torch.empty(1, dtype=torch.int64, device="meta"))
    asked = {
        "prefill": Program(model, prompt, weight=weights[0]),
        "decode": Program(llama.with_cache(model, 64, 8192), token, weight=weights[1]),
        "train": Program(model, batch, training=True, weight=weights[2], options={"recompute": "all"}),
    }
    switches = None if given.switches == "none" or given.ends else float(given.switches)
    options = {"switches": switches, "memory_limit": memory, "gap": 0.001, "accepted": (0.01, 20.0)}
    plan = autoshard.plan(asked, Mesh.from_bandwidths((8,)), **options)
    row = {"cost_seconds": plan.cost, "gap": plan.gap, "peak_bytes": plan.peak_bytes, "status": plan.status}
    row |= {"cpu_seconds": cpu_seconds() - began, "most_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    row["plans"] = {one.pop("name"): {**one, "least_loss": least_loss(plan, name)} for name, one in zip(plan, map(dict, plan.rows()))}
    return {**row, "phases": plan.seconds["cpu"]}


def least_loss(plan, name: str) -> float:
    """The smallest loss of a program in any plan of all of them whose other programs are no slower than here."""
    others = sum(plan.weights[other] * plan[other].cost for other in plan if other != name)
    return max((plan.bound - others) / plan.weights[name] / plan.best[name]["cost_seconds"] - 1, 0.0)


def cpu_seconds() -> float:
    """Of this process, from its start."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


PROGRAMS = Study(
    cases=programs_cases, measure=programs, alone=False,
    options={
        "--weights": {"default": "20,2000,1", "help": "how often prefill, decode and training run per unit"},
        "--layers": {"type": int, "default": 32}, "--memory": {"default": "80e9", "help": "bytes of a device; none: no limit"},
        "--switches": {"default": "1", "help": "per unit; none: everything is shared"},
        "--ends": {"action": "store_true", "help": "each program in turn favoured, with the limit and without it"},
    },
)  # fmt: skip
