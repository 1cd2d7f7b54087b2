"""Activation checkpointing as a rewriting of the graph: a block's inner activations are computed again before its backward.

Let B be a block, a set of forward ops:

    kept        a value that is produced outside B or that a forward op outside B reads, or that is drawn at random; it stays as it is
    saved       a value that is produced in B, isn't kept, and is read by a backward op
    recomputed  the ops of B that saved values depend on, back to kept values               (`_needed`)

A copy of every recomputed op is inserted before the first backward op that reads a saved value, and backward ops read the copies.
Nothing else has to change: the originals are freed after their last forward reader, and copies have candidates, costs and bytes
like all ops.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from autoshard.graph.blocks import repeated_blocks
from autoshard.graph.casts import with_shared_casts
from autoshard.graph.random import is_random
from autoshard.graph.records import Graph, Value, grouped, reached
from autoshard.graph.rewriting import Rewriting

SUFFIX = "_recomputed"


def recompute(graph: Graph, blocks: Sequence[Collection[int]]) -> Graph:
    """The graph in which each block (op indices of its forward ops) is recomputed."""
    before: dict[int, list[int]] = {}  # position: ops to copy in front of it
    for block in blocks:
        members = frozenset(i for i in block if not graph.ops[i].is_placeholder and not graph.ops[i].backward)
        saved = _saved(graph, members)
        copied = _needed(graph, members, saved)
        if not copied:
            continue
        at = min(i for value in saved for i, _ in graph.users[value] if graph.ops[i].backward)
        before.setdefault(at, []).extend(copied)
    return with_shared_casts(_with_copies(graph, before))


def checkpointed(graph: Graph, k: int) -> Graph:
    """The graph with its first k repeated blocks recomputed; k counts from the bottom of the model."""
    return recompute(graph, forward_blocks(graph)[:k]) if k else graph


def recompute_ops(graph: Graph, names: Collection[str]) -> Graph:
    """The graph in which forward ops of these names run again, each before the first backward op that reads it, or such a copy."""
    first: dict[int, int] = {}  # op: the backward op before which it runs again
    for i in sorted((graph.index[name] for name in names if name in graph.index), reverse=True):
        readers = {j for k in range(len(graph.ops[i].outputs)) for j, _ in graph.users.get((i, k), ())}
        times = [first.get(j, j if graph.ops[j].backward else len(graph.ops)) for j in readers]
        if (at := min(times, default=len(graph.ops))) < len(graph.ops):
            first[i] = at
    return with_shared_casts(_with_copies(graph, grouped((first[i], i) for i in sorted(first)))) if first else graph


def forward_blocks(graph: Graph) -> list[list[int]]:
    """Forward ops of each instance of the repeated block that has the most ops in all."""
    blocks: dict[int, dict[int, list[int]]] = {}
    for i, place in enumerate(repeated_blocks(graph).places):
        if place is not None and not graph.ops[i].is_placeholder and not graph.ops[i].backward:
            blocks.setdefault(place.block, {}).setdefault(place.instance, []).append(i)
    instances = max(blocks.values(), key=lambda by_instance: sum(map(len, by_instance.values())), default={})
    size = max(map(len, instances.values()), default=0)  # an op that repeats once more after the last block (a norm) is no instance
    return [instances[k] for k in sorted(instances) if len(instances[k]) == size]


def recomputed_names(graph: Graph) -> set[str]:
    """Names of the forward ops that run again in the backward pass."""
    return {op.name.removesuffix(SUFFIX) for op in graph.ops if op.backward and op.name.endswith(SUFFIX)}


def _is_kept(graph: Graph, members: frozenset[int], value: Value) -> bool:
    if value[0] not in members or is_random(graph.ops[value[0]]):
        return True
    return any(i not in members and not graph.ops[i].backward for i, _ in graph.users.get(value, ()))


def _saved(graph: Graph, members: frozenset[int]) -> set[Value]:
    values = [(i, k) for i in members for k in range(len(graph.ops[i].outputs))]
    read = [value for value in values if any(graph.ops[j].backward for j, _ in graph.users.get(value, ()))]
    return {value for value in read if value not in graph.returned and not _is_kept(graph, members, value)}


def _needed(graph: Graph, members: frozenset[int], saved: Iterable[Value]) -> list[int]:
    return sorted(reached((i for i, _ in saved), lambda i: [v[0] for v in graph.ops[i].inputs if not _is_kept(graph, members, v)]))


def _with_copies(graph: Graph, before: dict[int, list[int]]) -> Graph:
    """The graph with the copies inserted; backward ops after a copy read it instead of the original."""
    new, copied = Rewriting(graph), set[int]()
    for i, op in enumerate(graph.ops):
        copied.update(before.get(i, ()))
        for j in before.get(i, ()):
            original = graph.ops[j]
            inputs = tuple(new.read(value, late=value[0] in copied) for value in original.inputs)
            at, _ = new.add(replace(original, name=original.name + SUFFIX, inputs=inputs, backward=True))
            new.late |= {(j, k): (at, k) for k in range(len(original.outputs))}
        new.keep(i, late=op.backward)
    return new.graph()
