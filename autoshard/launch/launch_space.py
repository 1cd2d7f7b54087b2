"""All launches with which a launcher could train a model on given devices: the space that `ranking` searches.

    degrees      every split of the devices into data, tensor, context and pipeline parallel ones; shards of the data parallel ranks
    stages       1F1B with one stage per device; interleaved with 2 or 4. GPipe takes as long as 1F1B and more memory, so it is left out
    the rest     microbatches of 1, 2, 4 ... sequences, kinds of recomputation, degrees of expert parallelism

First the degrees with their stages are listed and checked (`structures`), then each legal one is crossed with the rest (`launches`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .legality import broken_rules, legal
from .model_sizes import ModelSizes
from .runs import Launch, TrainingRuns

RECOMPUTED = {
    "torchtitan": ("none", "selective_op", "selective_layer", "full"), "megatron": ("none", "attn", "full"), "accelerate": ("none", "full"),
    "nanotron": ("none", "full"),
}  # fmt: skip
STAGES = {"torchtitan": (("Interleaved1F1B", 2), ("Interleaved1F1B", 4)), "megatron": (("Interleaved1F1B", 2), ("Interleaved1F1B", 4))}
LARGEST_MICROBATCH = 64  # sequences


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if not number % n]


def structures(fixed: Launch, launcher: str) -> TrainingRuns:
    """Every split of `fixed.devices`, with shards and stages, whether legal or not; microbatches of one sequence, no experts."""
    return TrainingRuns.of(list(_structures(fixed, launcher)))


def _structures(fixed: Launch, launcher: str) -> Iterator[Launch]:
    for tensor in divisors(fixed.devices):
        for context in divisors(fixed.devices // tensor):
            for pipeline in [1] if launcher == "accelerate" else divisors(fixed.devices // tensor // context):
                data = fixed.devices // tensor // context // pipeline
                one = replace(
                    fixed, tensor=tensor, context=context, pipeline=pipeline, data=data,
                    sequence_parallel=tensor > 1 and launcher != "accelerate", microbatch=1, expert=1,
                    expert_tensor=tensor, async_tensor=fixed.async_tensor and tensor > 1,
                )  # fmt: skip
                stages = (("1F1B", 1), *(STAGES.get(launcher, ()) if pipeline > 1 else ()))
                for shard, zero in _states(one, launcher):
                    for schedule, virtual in stages:
                        yield replace(one, shard=shard, zero=zero, schedule=schedule, virtual=virtual)


def _states(one: Launch, launcher: str) -> list[tuple[int, int]]:
    """(shard, zero): how states can be sharded over the data parallel ranks."""
    ranks = one.data * one.context
    if launcher in ("megatron", "nanotron"):
        return [(1, 0), *([(one.data, 1)] if ranks > 1 else [])]
    kinds = (2, 3) if launcher == "accelerate" or one.pipeline > 1 else (3,)
    sharded = [(shard, zero) for shard in divisors(one.data) for zero in kinds if shard * one.context > 1]
    return [(1, 0), *sharded] if one.context == 1 or ranks == 1 else sharded


def launches(structures: TrainingRuns, sizes: ModelSizes, launcher: str) -> TrainingRuns:
    """The legal structures crossed with microbatches, recomputation and expert parallelism; those that are legal."""
    kept = structures[legal(structures, sizes, launcher)]
    most = int(kept.global_batch.max(initial=1))
    sizes_of = [2**k for k in range(int(np.log2(min(LARGEST_MICROBATCH, most))) + 1)]
    experts = [n for n in divisors(sizes.experts) if n <= kept.devices.max(initial=1)] if sizes.experts else [1]
    if launcher in ("accelerate", "nanotron"):
        experts = [1]
    parts = []
    for expert in experts:
        for microbatch in sizes_of:
            part = kept.with_columns(
                microbatch=np.full(len(kept), microbatch), expert=np.full(len(kept), expert),
                expert_tensor=np.ones(len(kept), int) if expert > 1 else kept.expert_tensor,
            )  # fmt: skip
            part = part[legal(part, sizes, launcher)]
            parts += [part.with_columns(recompute=np.full(len(part), kind)) for kind in RECOMPUTED[launcher]]
    return TrainingRuns.joined(parts)


def illegal_by_rule(structures: TrainingRuns, sizes: ModelSizes, launcher: str) -> dict[str, int]:
    """How many structures each rule forbids, most first; a structure counts for the first rule that it breaks."""
    broken, rules = broken_rules(structures, sizes, launcher)
    first = np.where(broken.any(0), broken.argmax(0), -1)
    return dict(Counter(rules[i].name for i in first if i >= 0).most_common())
