"""Activation checkpointing by blocks: the graph in which the first k of a model's repeated blocks are recomputed in the backward pass."""

from __future__ import annotations

from autoshard.graph.blocks import repeated_blocks
from autoshard.graph.recompute import recompute
from autoshard.graph.records import Graph


def checkpointed(graph: Graph, k: int) -> Graph:
    """The graph with its first k repeated blocks recomputed; k counts from the bottom of the model."""
    return recompute(graph, forward_blocks(graph)[:k]) if k else graph


def forward_blocks(graph: Graph) -> list[list[int]]:
    """Forward ops of each instance of the repeated block that has the most ops in all."""
    blocks: dict[int, dict[int, list[int]]] = {}
    for i, place in enumerate(repeated_blocks(graph).places):
        if place is not None and not graph.ops[i].is_placeholder and not graph.ops[i].backward:
            blocks.setdefault(place.block, {}).setdefault(place.instance, []).append(i)
    instances = max(blocks.values(), key=lambda by_instance: sum(map(len, by_instance.values())), default={})
    size = max(map(len, instances.values()), default=0)  # an op that repeats once more after the last block (a norm) is no instance
    return [instances[k] for k in sorted(instances) if len(instances[k]) == size]
