"""Training steps of long sequences: the plan beside context parallelism as baselines, what causal rings cost, and a published run.

    python benchmarks/long_context.py [--only NAME ...] [--json]

plan       Llama-3 8B, 131,072 tokens, batch 1, 8x8 H100 of 80 GB, every block recomputed: the plan, each baseline, and the plan without
           attention over a sharded sequence (all of its layouts forbidden)
million    the same model with 1,048,576 tokens on 64x8: CPU seconds of planning
rings      two layers of it on one axis of 8 or 64 ranks, 1,048,576 tokens, a ring: simulated steps of causal attention in head-tail order
           and in the natural order beside half of the step without a mask
published  torchtitan's Llama-3.1 8B with context parallelism on 8 H100 (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md:
           float8, full recomputation), beside what gathered keys and a ring are predicted to take: a check of prices, nothing is fitted

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
    from autoshard.planning.context import Context
    from autoshard.planning.options import Options, Stopwatch
    from autoshard.planning.plan import baseline_only
    from autoshard.simulate.timeline import timeline_of_solution

    solution = baseline_only(Context(graph, mesh, Options(training=True), Stopwatch(None)), "context_parallel_ring")
    return timeline_of_solution(graph, solution).seconds


PUBLISHED = {(65536, 2): 2540, (131072, 4): 1071, (262144, 8): 548}  # (tokens, context parallel degree): tokens/s per GPU
NOT_MODELLED = "float8 matmuls (predicted: bfloat16), parameters sharded over the data parallel ranks too, the host's launches"


def published() -> dict:
    """Each context parallel group by itself, with one sequence."""
    from autoshard.capture import capture_deep
    from autoshard.graph import in_order
    from autoshard.planning.context import Context
    from autoshard.planning.options import Options, Stopwatch
    from autoshard.planning.ordering import order_for
    from autoshard.planning.plan import baseline_only
    from autoshard.planning.recomputing import as_asked
    from models import llama

    found = {}
    for (tokens, degree), measured in PUBLISHED.items():
        (graph, _), mesh = capture_deep(*llama.llama3_8b(batch=1, seq=tokens), training=True), mesh_of((degree,))
        context = Context(in_order(graph, order_for(graph, mesh)), mesh, Options(training=True, recompute="all"), Stopwatch(None))
        costs = {mode: baseline_only(as_asked(context), f"context_parallel_{mode}").cost for mode in ("gather", "ring")}
        rates = {mode: tokens / degree / seconds for mode, seconds in costs.items()}
        found[f"{tokens} tokens over {degree}"] = {"published": measured, **rates}
    return found


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
        print("  " + ", ".join(f"{key} {free.get(key)}" for key in ("queries", "keys", "head_tail", "cpu_seconds")))
    elif name == "rings":
        for ranks, steps in found.items():
            half = steps["without a mask"] / 2
            words = (f"{kind} {seconds:.3f} s ({seconds / half:.2f} halves)" for kind, seconds in steps.items())
            print(f"  {ranks:>3} ranks: " + ", ".join(words))
    elif name == "published":
        for case, rates in found.items():
            print(f"  {case:24} tokens/s per GPU: " + ", ".join(f"{kind} {rate:.0f}" for kind, rate in rates.items()))
        print(f"  not modelled: {NOT_MODELLED}")
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
