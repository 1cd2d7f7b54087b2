"""The study of long sequences."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

from autoshard import Mesh, api
from autoshard.capture import capture, capture_deep
from autoshard.graph import Graph, in_order
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.ordering import order_for
from autoshard.planning.plan import baseline_only
from autoshard.planning.question import ModelGraphs, Question
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.simulate.timeline import timeline_of_solution
from benchmarks.published import predicted_seconds, runs_of, tokens_per_second
from benchmarks.studies import Row, Study
from models import llama

MILLION = 1_048_576
SEQUENCE_LAYOUTS = [",".join(pair) for pair in product(("R", "S(1)", "S(2)"), repeat=2) if "S(2)" in pair]
WITHOUT = {"baselines": False, "sequence_order": "natural", "forbid": {"attention*": SEQUENCE_LAYOUTS}}

# (tokens of a sequence, context parallel degree): published tokens/s per GPU
TORCHTITAN = {
    "8B": {(65536, 2): 2540, (131072, 4): 1071, (262144, 8): 548},
    "405B": {(65536, 2): 47, (131072, 4): 31, (262144, 8): 16},
}
LAUNCHES = {
    "8B": {"L": 32, "h": 4096, "ffn": 14336, "heads": 32, "tp": 1, "sp": 0, "pp": 1, "asynctp": 0, "gpus": 8, "ga": 1},
    "405B": {"L": 126, "h": 16384, "ffn": 53248, "heads": 128, "tp": 8, "sp": 1, "pp": 8, "asynctp": 1, "gpus": 512, "ga": 8},
}
COMMON = {
    "src": "torchtitan", "kv": 8, "head_dim": 128, "vocab": 128256, "tied": 0, "gated": 1, "pos": 0, "mbs": 1, "zero": 3, "vp": 1,
    "rc": "full", "prec": "fp8", "gather8": 1, "fused": 1, "gpu": "h100_500w", "gpn": 8, "link_per_gpu": 50e9, "gpu_mem": 96e9,
}  # fmt: skip
NOT_MODELLED = """\
  gather, ring: bfloat16 matmuls (published: float8), one context parallel group by itself (published: parameters gathered from the data
    parallel ranks too), kernels as captured (published: compiled). The device's constants are fitted to other runs and to these.
  launch: no order of the sequence, that is equal work for all ranks; 405B: no exposed part of a pipeline stage's transfers of context.
  Attention alone, at 548 tokens/s, runs at 169 TFLOP/s per GPU (4.5 times its causal forward), at 32,768 tokens without context parallelism
    at about 290; hops can't be the reason: keys and values of a layer take 3 ms, its attention 200 ms. That rate falls by a third
    between 2 and 4 ranks, less than a causal ring in the natural order would lose (7/4), and what torch's ring of that time did with
    blocks beyond the second isn't published."""


def long_context(case: tuple, given) -> Row:
    """Training steps of long sequences: the plan beside context parallelism as baselines, what causal rings cost, and a published run.

        plan       Llama-3 8B, 131,072 tokens, batch 1, 8x8 H100 of 80 GB, every block recomputed: the plan, each baseline, and the plan
                   without attention over a sharded sequence (all of its layouts forbidden)
        million    the same model with 1,048,576 tokens on 64x8: CPU seconds of planning
        rings      two layers of it on one axis of 8 or 64 ranks, 1,048,576 tokens, a ring: simulated steps of causal attention in head-tail
                   order and in the natural order beside half of the step without a mask
        published  torchtitan's Llama-3.1 8B on 8 H100 and 405B on 512 with context parallelism (pytorch/torchtitan,
                   benchmarks/llama3_h100_202412_torchtitan.md: float8, full recomputation), beside what gathered keys and a ring are
                   predicted to take, and what the launch with its degrees is: a check of prices

    Seconds of planning are CPU seconds after the imports.
    """
    measure, *what = case
    return {"plans": measure(*what)}


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return Mesh.from_bandwidths(shape, intra_node_bandwidth=300e9, inter_node_bandwidth=400e9, devices_per_node=8)


def plans(tokens: int, shape: tuple[int, ...], asked: dict[str, dict]) -> dict[str, Row]:
    """Plans by name, with options of their own, and the baselines of each: seconds, bytes, how the first attention is sharded."""
    rows: dict[str, Row] = {}
    for name, options in asked.items():
        model, inputs = llama.llama3_8b(batch=1, seq=tokens)
        began = time.process_time()
        try:
            found = api.plan(model, inputs, mesh_of(shape), training=True, memory_limit=80e9, recompute="all", gap=0.01, **options)
        except api.Infeasible as error:
            rows[name] = {"status": error.status, "message": str(error), "cpu_seconds": time.process_time() - began}
            continue
        queries, keys = found.layouts["attention"].inputs[:2]
        rows[name] = {"status": found.status, "cost_seconds": found.cost, "bound_seconds": found.bound, "peak_bytes": found.peak_bytes}
        rows[name] |= {"head_tail": found.sequence_order is not None, "queries": queries, "keys": keys}
        rows[name]["cpu_seconds"] = time.process_time() - began
        rows |= {key: {what: row[what] for what in ("cost_seconds", "peak_bytes")} for key, row in found.baselines.items()}
    return rows


def rings(ranks: int) -> dict[str, Row]:
    """Simulated seconds of a step of two layers, by kind of attention."""
    graph = capture(*llama.llama3_8b(batch=1, seq=MILLION, layers=2), training=True)
    mesh = mesh_of((ranks // 8, 8) if ranks > 8 else (8,))
    kinds = {"without a mask": unmasked(graph), "natural order": graph, "head-tail order": in_order(graph, order_for(graph, mesh))}
    steps = {name: ring_step(one, mesh) for name, one in kinds.items()}
    return {name: {"seconds": step, "halves": step / (steps["without a mask"] / 2)} for name, step in steps.items()}


def unmasked(graph: Graph) -> Graph:
    """The graph with attention to all keys."""

    def changed(op):
        args, kwargs = op.literals
        return replace(op, literals=(tuple(False if item is True else item for item in args), kwargs))

    return replace(graph, ops=tuple(changed(op) if op.target.startswith("autoshard.attention") else op for op in graph.ops))


def ring_step(graph: Graph, mesh: Mesh) -> float:
    solution = baseline_only(Question(ModelGraphs(graph), mesh, Options(training=True), Stopwatch(None)), "context_parallel_ring")
    return timeline_of_solution(graph, solution).seconds


def published(model: str, tokens: int, degree: int) -> dict[str, Row]:
    """tokens/s per GPU: published; of the launch as it is; and of a context parallel group by itself with one sequence."""
    rates = {"published": TORCHTITAN[model][tokens, degree], **launched(LAUNCHES[model], tokens, degree)}
    rates |= group(tokens, degree) if model == "8B" else {}
    return {name: {"tokens/s_per_GPU": rate} for name, rate in rates.items()}


def group(tokens: int, degree: int) -> dict[str, float]:
    """Plans of the baselines on the devices of these runs."""
    mesh = Mesh.from_bandwidths((degree,), device="h100_500w")
    graph, _ = capture_deep(*llama.llama3_8b(batch=1, seq=tokens), training=True)
    rates = {}
    for name, mode, ordered in (("gather", "gather", True), ("ring", "ring", True), ("ring, natural order", "ring", False)):
        one = in_order(graph, order_for(graph, mesh)) if ordered else graph
        context = with_recomputed_blocks(Question(ModelGraphs(one), mesh, Options(training=True, recompute="all"), Stopwatch(None)))
        rates[name] = tokens / degree / baseline_only(context, f"context_parallel_{mode}").cost
    return rates


def launched(model: dict, tokens: int, degree: int) -> dict[str, float]:
    """The launch itself, by its degrees, in float8; constants of the device as published and as fitted."""
    data = model["gpus"] // (model["tp"] * model["pp"] * degree)
    runs = runs_of([{**COMMON, **model, "seq": tokens, "cp": degree, "dp": data, "shard": data * degree}])
    rates = {fitted: float(tokens_per_second(runs, predicted_seconds(runs, fitted=fitted))[0]) for fitted in (False, True)}
    return {"launch": rates[False], "launch, fitted constants": rates[True]}


def cases(given) -> dict[str, tuple]:
    runs = [(model, tokens, degree) for model, rates in TORCHTITAN.items() for tokens, degree in rates]
    return {
        "plan": (plans, 131072, (8, 8), {"the plan": {}, "no sharded sequence": WITHOUT}),
        "million": (plans, MILLION, (64, 8), {"the plan": {"baselines": False}}),
        **{f"rings, {ranks} ranks": (rings, ranks) for ranks in (8, 64)},
        **{f"published {model}, {tokens} over {degree}": (published, model, tokens, degree) for model, tokens, degree in runs},
    }


LONG_CONTEXT = Study(cases=cases, measure=long_context, notes={"published": NOT_MODELLED})
