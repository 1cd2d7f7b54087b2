"""Training steps of long sequences: the plan beside context parallelism as baselines, what causal rings cost, and a published run.

    python benchmarks/long_context.py [--only NAME ...] [--json]

plan       Llama-3 8B, 131,072 tokens, batch 1, 8x8 H100 of 80 GB, every block recomputed: the plan, each baseline, and the plan without
           attention over a sharded sequence (all of its layouts forbidden)
million    the same model with 1,048,576 tokens on 64x8: CPU seconds of planning
rings      two layers of it on one axis of 8 or 64 ranks, 1,048,576 tokens, a ring: simulated steps of causal attention in head-tail order
           and in the natural order beside half of the step without a mask
published  torchtitan's Llama-3.1 8B on 8 H100 and 405B on 512 with context parallelism (pytorch/torchtitan,
           benchmarks/llama3_h100_202412_torchtitan.md: float8, full recomputation), beside what gathered keys and a ring are predicted to
           take, and what the launch with its degrees is: a check of prices

Every case runs in a process of its own on one core; seconds of planning are CPU seconds after the imports.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")]

from benchmarks.own_process import in_own_process

MILLION = 1_048_576
SEQUENCE_LAYOUTS = [",".join(pair) for pair in product(("R", "S(1)", "S(2)"), repeat=2) if "S(2)" in pair]


def mesh_of(shape: tuple[int, ...]):
    from autoshard.mesh import Mesh

    return Mesh.from_bandwidths(shape, intra_node_bandwidth=300e9, inter_node_bandwidth=400e9, devices_per_node=8)


def planned(tokens: int, shape: tuple[int, ...], **options) -> dict:
    """One plan: seconds of the step, bytes, how the first attention is sharded, CPU seconds."""
    from autoshard import api
    from models import llama

    model, inputs = llama.llama3_8b(batch=1, seq=tokens)
    began = time.process_time()
    try:
        solution = api.plan(model, inputs, mesh_of(shape), training=True, memory_limit=80e9, recompute="all", gap=0.01, **options)
    except api.Infeasible as error:
        return {"status": error.status, "message": str(error), "cpu_seconds": time.process_time() - began}
    attention = solution.layouts["attention"]
    return {
        "status": solution.status,
        "cost_seconds": solution.cost,
        "bound_seconds": solution.bound,
        "peak_bytes": solution.peak_bytes,
        "head_tail": solution.sequence_order is not None,
        "queries": attention.inputs[0],
        "keys": attention.inputs[1],
        "baselines": {name: {key: row[key] for key in ("cost_seconds", "peak_bytes")} for name, row in solution.baselines.items()},
        "cpu_seconds": time.process_time() - began,
    }


def plan() -> dict:
    free = planned(131072, (8, 8))
    without = planned(131072, (8, 8), baselines=False, sequence_order="natural", forbid={"attention*": SEQUENCE_LAYOUTS})
    return {"plan": free, "without": without}


def million() -> dict:
    return planned(MILLION, (64, 8), baselines=False)


def rings() -> dict:
    """Simulated seconds of a step of two layers, by ranks and kind of attention."""
    from autoshard.capture import capture
    from autoshard.graph import in_order
    from autoshard.planning.ordering import order_for
    from models import llama

    graph = capture(*llama.llama3_8b(batch=1, seq=MILLION, layers=2), training=True)
    found = {}
    for ranks in (8, 64):
        mesh = mesh_of((ranks // 8, 8) if ranks > 8 else (8,))
        ordered = in_order(graph, order_for(graph, mesh))
        steps = {"without a mask": unmasked(graph), "natural order": graph, "head-tail order": ordered}
        found[str(ranks)] = {name: ring_step(one, mesh) for name, one in steps.items()}
    return found


def unmasked(graph):
    """The graph with attention to all keys."""

    def changed(op):
        args, kwargs = op.literals
        return replace(op, literals=(tuple(False if item is True else item for item in args), kwargs))

    return replace(graph, ops=tuple(changed(op) if op.target.startswith("autoshard.attention") else op for op in graph.ops))


def ring_step(graph, mesh) -> float:
    from autoshard.planning.options import Options, Stopwatch
    from autoshard.planning.plan import baseline_only
    from autoshard.planning.question import ModelGraphs, Question
    from autoshard.simulate.timeline import timeline_of_solution

    solution = baseline_only(Question(ModelGraphs(graph), mesh, Options(training=True), Stopwatch(None)), "context_parallel_ring")
    return timeline_of_solution(graph, solution).seconds


# (tokens of a sequence, context parallel degree): published tokens/s per GPU, and what differs from LLAMA_8B
TORCHTITAN_8B = {(65536, 2): 2540, (131072, 4): 1071, (262144, 8): 548}
TORCHTITAN_405B = {(65536, 2): 47, (131072, 4): 31, (262144, 8): 16}
LLAMA_8B = {"L": 32, "h": 4096, "ffn": 14336, "heads": 32, "tp": 1, "sp": 0, "pp": 1, "asynctp": 0, "gpus": 8, "ga": 1}
LLAMA_405B = {"L": 126, "h": 16384, "ffn": 53248, "heads": 128, "tp": 8, "sp": 1, "pp": 8, "asynctp": 1, "gpus": 512, "ga": 8}
COMMON = {
    "src": "torchtitan", "kv": 8, "head_dim": 128, "vocab": 128256, "tied": 0, "gated": 1, "pos": 0, "mbs": 1, "zero": 3, "vp": 1,
    "rc": "full", "prec": "fp8", "rowwise": 0, "mx": 0, "fused": 1, "gpu": "h100_500w", "gpn": 8, "link_per_gpu": 50e9, "gpu_mem": 96e9,
}  # fmt: skip
NOT_MODELLED = """\
  gather, ring: bfloat16 matmuls (published: float8), one context parallel group by itself (published: parameters gathered from the data
    parallel ranks too), kernels as captured (published: compiled). The device's constants are fitted to other runs and to these.
  launch: no order of the sequence, that is equal work for all ranks; 405B: no exposed part of a pipeline stage's transfers of context.
  Attention alone, at 548 tokens/s, runs at 169 TFLOP/s per GPU (4.5 times its causal forward), at 32,768 tokens without context parallelism
    at about 290; hops can't be the reason: keys and values of a layer take 3 ms, its attention 200 ms. That rate falls by a third
    between 2 and 4 ranks, less than a causal ring in the natural order would lose (7/4), and what torch's ring of that time did with
    blocks beyond the second isn't published."""


def published() -> dict:
    """tokens/s per GPU of each run: published; of a context parallel group by itself with one sequence; of the launch as it is."""
    found = {}
    for (tokens, degree), measured in TORCHTITAN_8B.items():
        row = {"published": measured, **launched(LLAMA_8B, tokens, degree), **group(tokens, degree)}
        found[f"8B, {tokens} tokens over {degree}"] = row
    for (tokens, degree), measured in TORCHTITAN_405B.items():
        found[f"405B, {tokens} tokens over {degree}"] = {"published": measured, **launched(LLAMA_405B, tokens, degree)}
    return found


def group(tokens: int, degree: int) -> dict:
    """Plans of the baselines on the devices of these runs."""
    from autoshard.capture import capture_deep
    from autoshard.graph import in_order
    from autoshard.mesh import Mesh
    from autoshard.planning.options import Options, Stopwatch
    from autoshard.planning.ordering import order_for
    from autoshard.planning.plan import baseline_only
    from autoshard.planning.question import ModelGraphs, Question
    from autoshard.planning.recomputing import with_recomputed_blocks
    from models import llama

    mesh = Mesh.from_bandwidths((degree,), device="h100_500w")
    graph, _ = capture_deep(*llama.llama3_8b(batch=1, seq=tokens), training=True)
    rates = {}
    for name, mode, ordered in (("gather", "gather", True), ("ring", "ring", True), ("ring, natural order", "ring", False)):
        one = in_order(graph, order_for(graph, mesh)) if ordered else graph
        context = with_recomputed_blocks(Question(ModelGraphs(one), mesh, Options(training=True, recompute="all"), Stopwatch(None)))
        rates[name] = tokens / degree / baseline_only(context, f"context_parallel_{mode}").cost
    return rates


def launched(model: dict, tokens: int, degree: int) -> dict:
    """The launch itself, by its degrees, in float8; constants of the device as published and as fitted."""
    from benchmarks.published import predicted_seconds, runs_of, tokens_per_second

    data = model["gpus"] // (model["tp"] * model["pp"] * degree)
    runs = runs_of([{**COMMON, **model, "seq": tokens, "cp": degree, "dp": data, "shard": data * degree}])
    rates = {fitted: float(tokens_per_second(runs, predicted_seconds(runs, fitted=fitted))[0]) for fitted in (False, True)}
    return {"launch": rates[False], "launch, fitted constants": rates[True]}


CASES = {"plan": plan, "million": million, "rings": rings, "published": published}


def shown(name: str, found: dict) -> None:
    print(f"\n{name}")
    if name == "plan":
        free, without = found["plan"], found["without"]
        rows = {"the plan": free, **free.get("baselines", {}), "without a sharded sequence": without}
        for row, values in rows.items():
            cost = values.get("cost_seconds")
            step = f"{cost * 1e3:9.1f} ms" if cost else f"{values.get('status', 'no plan'):>12}"
            print(f"  {row:28} {step}  {(values.get('peak_bytes') or 0) / 1e9:7.1f} GB")
        for row, values in (("the plan", free), ("without", without)):
            print(f"  {row}: " + ", ".join(f"{key} {values.get(key)}" for key in ("queries", "keys", "head_tail", "cpu_seconds")))
    elif name == "rings":
        for ranks, steps in found.items():
            half = steps["without a mask"] / 2
            words = (f"{kind} {seconds:.3f} s ({seconds / half:.2f} halves)" for kind, seconds in steps.items())
            print(f"  {ranks:>3} ranks: " + ", ".join(words))
    elif name == "published":
        for case, rates in found.items():
            print(f"  {case:28} tokens/s per GPU: " + ", ".join(f"{kind} {rate:.0f}" for kind, rate in rates.items()))
        print(NOT_MODELLED)
    else:
        print("  " + ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.order:
        print(json.dumps(CASES[json.loads(arguments.order)["case"]]()))
        return
    found = {}
    for name in arguments.only:
        found[name] = in_own_process(__file__, {"case": name})
        if not arguments.json:
            shown(name, found[name])
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
