"""All launches with which a launcher could train a model on given devices: the space that `ranking` searches.

    degrees      every split of the devices into data, tensor, context and pipeline parallel ones; shards of the data parallel ranks
    stages       1F1B with one stage per device; interleaved; torchtitan's that split backward passes. Layers as many on each stage, or by a
                 layout (blocks_of_stages). GPipe takes as long as 1F1B and more memory, so it is left out
    passes       one of a step; with torch's pipelines also as many as leave 16 to 32 sequences for each device of one
    the rest     microbatches of 1, 2, 4 ... sequences, kinds of recomputation, degrees of expert parallelism; Megatron's experts on the
                 tensor parallel ranks or not, and with their traffic beside compute or not

First the degrees with their stages are listed and checked (`structures`), then each legal one is crossed with the rest (`launches`).
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from .blocks_of_stages import ENDS, spread
from .legality import COMPILE_LOSSES, DIVIDE_EXPERTS, RECOMPUTED, TORCH, broken_rules, legal
from .model_sizes import ModelSizes
from .runs import FIELDS, Launch, TrainingRuns

STAGES = {  # schedule, stages per device, split; of pipelines
    "torchtitan": [*((name, n, ENDS) for name, n in (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2)))],
    "megatron": [*(("1F1B" if n == 1 else "Interleaved1F1B", n, split) for n in (1, 2, 4) for split in ("", ENDS)),
                 *(("Interleaved1F1B", n, "") for n in (3, 6, 8, 12))],
    "nanotron": [("1F1B", 1, "")], "automodel": [("1F1B", 1, ""), *(("Interleaved1F1B", n, "") for n in (2, 4))],
}  # fmt: skip
LARGEST_MICROBATCH = 64  # sequences
FOR_EACH = 16  # device of a pipeline: as many sequences, or a few more, in a pass, where a step has several
COPIES, FEWEST_SHARDS = (4, 16, 64), 8  # of ZeRO-1's states, that Megatron may have
CHUNK = 100_000  # launches that are priced at once: as many columns fit in a cache
MOST = 3 * 10**6  # launches; of more, those are left out that shard states over some of the data parallel ranks


@cache
def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if not number % n]
    return small + [number // n for n in reversed(small) if n * n != number]


def structures(fixed: Launch, launcher: str, layers: int = 0) -> TrainingRuns:
    """Every split of `fixed.devices`, with shards and stages, whether legal or not; microbatches of one sequence, no experts. layers: of
    the model, which Automodel spreads over stages that do not divide them."""
    names = ("tensor", "context", "pipeline", "data", "shard", "zero", "schedule", "virtual", "split")
    varied: dict[str, Any] = {name: np.array(column) for name, column in zip(names, zip(*_structures(fixed.devices, launcher)))}
    tensor, deepep = varied["tensor"], fixed.deepep and launcher != "megatron"
    varied["expert_tensor"] = tensor if launcher in DIVIDE_EXPERTS else 1
    if launcher == "automodel":
        varied["split"] = np.array([_spread(layers, stages) for stages in (varied["pipeline"] * varied["virtual"]).tolist()])
    varied["sequence_parallel"] = (tensor > 1) & (launcher not in ("accelerate", "deepspeed"))
    varied |= {"alltoall": varied["context"] if launcher == "deepspeed" else 1, "async_tensor": (tensor > 1) & fixed.async_tensor}
    varied["compiled_loss"] = fixed.compiled_loss and launcher in COMPILE_LOSSES
    plain = replace(fixed, microbatch=1, expert=1, passes=1, group=1, gather8=False, async_expert=False, deepep=deepep)
    return TrainingRuns({name: np.broadcast_to(varied.get(name, getattr(plain, name)), len(tensor)) for name in FIELDS})


@cache
def _spread(layers: int, stages: int) -> str:
    """The split of layers that do not divide, where `layers_per_stage` can say so many stages."""
    each = -(-layers // stages)
    return ",".join(map(str, spread(layers, stages, 0, 0))) if layers % stages and -(-layers // each) == stages else ""


def _structures(devices: int, launcher: str) -> Iterator[tuple]:
    for tensor in divisors(devices):
        for context in divisors(devices // tensor):
            for pipeline in [1] if launcher in ("accelerate", "deepspeed") else divisors(devices // tensor // context):
                data = devices // tensor // context // pipeline
                for states in _states(data, context, pipeline, launcher):
                    for stages in STAGES[launcher] if pipeline > 1 else [("1F1B", 1, "")]:
                        yield tensor, context, pipeline, data, *states, *stages


def _states(data: int, context: int, pipeline: int, launcher: str) -> list[tuple[int, int]]:
    """(shard, zero): how states can be sharded over the data parallel ranks."""
    ranks = data * context
    if launcher in ("megatron", "nanotron"):
        copies = [n for n in COPIES if launcher == "megatron" and data % n == 0 and data // n >= FEWEST_SHARDS]
        return [(1, 0), *([(data, 1)] if ranks > 1 else []), *((data // n, 1) for n in copies)]
    if launcher == "deepspeed":
        return [(1, 0), *([(data, zero) for zero in (1, 2, 3)] if ranks > 1 else [])]
    kinds = (2, 3) if launcher == "accelerate" or pipeline > 1 else (3,)
    sharded = [(shard, zero) for shard in divisors(data) for zero in kinds if shard * context > 1]
    return [(1, 0), *sharded] if context == 1 or ranks == 1 else sharded


def _with_passes(kept: TrainingRuns, passes: int) -> Iterator[TrainingRuns]:
    """Those with one pass, and pipelines with so many or several: torch's hold what comes and goes of every microbatch of a pass."""
    sequences = kept.global_batch // kept.data
    several = np.gcd(sequences, 2 ** np.log2(np.maximum(sequences // (FOR_EACH * kept.pipeline), 1)).astype(int))
    yield kept
    for of_step, before in ((several, 1), (np.full(len(kept), passes), several)):
        yield kept.with_columns(passes=of_step)[(kept.pipeline > 1) & (of_step > 1) & (of_step != before) & (sequences % of_step == 0)]


def launches(
    structures: TrainingRuns, sizes: ModelSizes, launcher: str, only8: bool = False, passes: int = 1
) -> Iterator[TrainingRuns]:  # fmt: skip
    """The legal structures crossed with microbatches, recomputation and expert parallelism; those that are legal, in parts of about CHUNK
    launches, none of them empty. only8: without gathers in 16 bits where those in 8 are legal. passes: of a step, to be tried besides."""
    kept = structures[legal(structures, sizes, launcher)]
    kept = kept.with_columns(vocab=sizes.vocab_of(kept.tensor))
    if launcher in TORCH:
        kept = TrainingRuns.joined(_with_passes(kept, passes))
    if launcher == "megatron" and not sizes.latent:
        exchanging = kept[kept.context > 1]
        exchanging = exchanging.with_columns(alltoall=exchanging.context)
        kept = TrainingRuns.joined([kept, exchanging[legal(exchanging, sizes, launcher)]])
    most = min(LARGEST_MICROBATCH, int(kept.global_batch.max(initial=1)))
    sizes_of = [2**k for k in range(most.bit_length())]
    divided = sizes.experts and launcher not in ("accelerate", "nanotron", "deepspeed")
    experts = [n for n in divisors(sizes.experts) if n <= kept.devices.max(initial=1)] if divided else [1]
    kinds = [*dict.fromkeys([*(kind for kind in RECOMPUTED[launcher] if sizes.latent or "mla" not in kind), *kept.recompute[:1].tolist()])]
    if len(kept) * len(experts) * len(sizes_of) * len(kinds) > MOST:
        kept = kept[(kept.shard == 1) | (kept.shard == kept.data)]
    mixtures, kept = [], kept.with_columns(structure=np.arange(len(kept)))
    for expert in experts:
        mixed = kept.with_columns(expert=expert)
        of_experts = [mixed] if expert == 1 else [mixed.with_columns(expert_tensor=1)]
        if sizes.experts and launcher == "megatron":
            of_experts = [mixed, mixed[kept.tensor > 1].with_columns(expert_tensor=1)]
            for switch in ("async_expert", "deepep") if expert > 1 else ():
                of_experts += [one.with_columns(**{switch: True}) for one in of_experts]
        mixtures += of_experts
    ways = TrainingRuns.joined(mixtures)
    in8 = ways.with_columns(gather8=True)
    allowed = legal(in8, sizes, launcher)
    ways = TrainingRuns.joined([ways[~allowed] if only8 else ways, in8[allowed]])
    parts: list[TrainingRuns] = []
    for microbatch, kind, start in product(sizes_of, kinds, range(0, len(ways), CHUNK)):  # launches with the same blocks are neighbors
        part = ways[start : start + CHUNK].with_columns(microbatch=microbatch, recompute=kind)
        parts.append(part[legal(part, sizes, launcher)])
        if sum(map(len, parts)) >= CHUNK:
            yield TrainingRuns.joined(parts)
            parts = []
    if any(map(len, parts)):
        yield TrainingRuns.joined(parts)


def illegal_by_rule(structures: TrainingRuns, sizes: ModelSizes, launcher: str) -> dict[str, int]:
    """How many structures each rule forbids, most first; a structure counts for the first rule that it breaks."""
    broken, rules = broken_rules(structures, sizes, launcher)
    first = np.where(broken.any(0), broken.argmax(0), -1)
    return dict(Counter(rules[i].name for i in first if i >= 0).most_common())
