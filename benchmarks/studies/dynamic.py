"""The study of one plan for ranges of batch and sequence."""

from __future__ import annotations

import random
import time
from statistics import median

from torch.export import Dim

from autoshard import Mesh, api
from autoshard.capture import capture
from autoshard.graph import Range, SizedGraph
from autoshard.planning import Options, Question, Stopwatch, choice_of, formulate_for
from autoshard.planning.question import ModelGraphs
from autoshard.planning.search import best_choice
from autoshard.problem import evaluate
from autoshard.solution import Solution
from autoshard.strategies import candidates
from benchmarks.studies import Row, Study
from models import gpt2, llama

BATCHES, SEQUENCES = (1, 2, 4, 8, 16, 32, 64), (128, 256, 512, 1024, 2048, 4096, 8192)
POINTS = 30  # drawn from all combinations
GAP = 1e-3  # of the best plan of a point


def dynamic(case: tuple, given) -> Row:
    """One plan for batch 1 to 64 and sequence 128 to 8,192 beside the best plan of each of 30 shapes drawn from powers of two.

    GPT-2 124M (with 8,192 positions, float32) and Llama-3 8B (bfloat16) on 8 H100 of one node, serial seconds; Llama's training without a
    memory limit. A batch that the plan's layouts don't divide is padded, and the plan's seconds are those of the padded batch; the best
    plan beside it is that of the batch as it is. median, worst: of the plan's seconds relative to the best plan's; unpadded: shapes that
    need no padding, and their median; estimate: how far the seconds that `covers` says are from the plan's, in the median.
    """
    library, training = case
    began = time.process_time()
    built = {"gpt2": gpt2_at, "llama": llama_at}[library]
    batch, sequence = Dim("batch", min=1, max=BATCHES[-1]), Dim("sequence", min=SEQUENCES[0], max=SEQUENCES[-1])
    mesh, options = Mesh.from_bandwidths((8,)), {"training": training, "objective": "serial", "gap": GAP, "baselines": False}
    shapes = ({0: batch, 1: sequence},) * (1 + training)
    plan = api.plan(*built(8, 1024, training, given.layers), mesh, dynamic_shapes=shapes, criterion=given.criterion, **options)
    planned = time.process_time() - began
    ranges = {"batch": Range(1, 64), "sequence": Range(SEQUENCES[0], SEQUENCES[-1])}
    sized = SizedGraph.of(ranges, lambda at: capture(*built(at["batch"], at["sequence"], training, given.layers), training=training))
    grid = [{"batch": b, "sequence": s} for b in BATCHES for s in SEQUENCES]
    ratios, unpadded, errors = [], [], []
    for at in random.Random(0).sample(grid, POINTS):
        coverage = plan.covers(**at)
        question = Question(ModelGraphs(sized.at(at)), mesh, Options(**options), Stopwatch(None))
        best, seconds = best_choice(question).answer.cost, seconds_at(plan, sized, coverage.padded)
        ratios.append(seconds / best)
        unpadded += [ratios[-1]] if coverage else []
        errors.append(abs(coverage.seconds / seconds - 1))
    found = {"median": median(ratios), "worst": max(ratios), "unpadded": len(unpadded), "unpadded_median": median(unpadded or [0.0])}
    found |= {"estimate": median(errors), "ratio_planned": plan.dynamic_shapes.ratio, "bound_planned": plan.dynamic_shapes.bound_ratio}
    return {**found, "plan_cpu_seconds": planned}


def seconds_at(plan: Solution, sized: SizedGraph, sizes: dict[str, int]) -> float:
    """The plan's layouts priced at a shape."""
    graph = sized.at(sizes)
    formulated = formulate_for(graph, candidates(graph, plan.mesh), plan.mesh, Options(training=plan.training))
    return evaluate(formulated.problem, choice_of(formulated, plan)).cost


def gpt2_at(batch: int, sequence: int, loss: bool, layers: int):
    sizes = {"layers": layers or 12, "heads": 12, "width": 768, "positions": 8192, "vocab": 50257}
    return gpt2.build(**sizes, batch=batch, seq=sequence, loss=loss, dtype="float32")


def llama_at(batch: int, sequence: int, loss: bool, layers: int):
    return llama.llama3_8b(batch=batch, seq=sequence, loss=loss, layers=layers or 32)


def cases(given) -> dict[str, tuple]:
    steps = {"forward": False, "training": True}
    return {f"{name} {step}": (name, steps[step]) for name in ("gpt2", "llama") for step in steps}


def judged(row: Row, case: tuple, given) -> Row:
    """The limit: 5 % in the median."""
    return {**row, "ok": row["median"] <= 1.05}


DYNAMIC = Study(
    cases=cases, measure=dynamic, judged=judged,
    options={
        "--layers": {"type": int, "default": 0, "help": "of each model, instead of its own number"},
        "--criterion": {"default": Options.criterion, "help": "median, average or worst"},
    },
)  # fmt: skip
