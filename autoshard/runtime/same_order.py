"""Ranks compare the collectives of the graphs that they are about to run: in another order they would wait for each other forever."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autoshard.lower import STARTS, Issued
from autoshard.runtime.agreement import rank_lost
from autoshard.torch_private import pytree


def of_graph(graph: fx.Graph, names: Sequence[str]) -> list[Issued]:
    """The collectives of a rank's graph in their order. names: of the process groups of the mesh axes."""
    collectives = []
    for node in graph.nodes:
        if node.op != "call_function" or not (used := _groups_of(node, names)):
            continue
        source = next((x.meta["val"] for x in node.all_input_nodes), torch.empty(0))
        reduce_op = str(node.args[1]) if "reduce" in STARTS.get(node.target, "") else ""
        records = tuple(node.meta.get("members", (node.meta.get("record"),)))
        collectives.append(Issued(records, str(node.target), used, tuple(source.shape), str(source.dtype), reduce_op))
    return collectives


def _groups_of(node: fx.Node, names: Sequence[str]) -> tuple[int, ...]:
    """The mesh axes whose groups a node is given."""
    given = {x for x in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(x, str)}
    return tuple(k for k, name in enumerate(names) if name in given)


def compare(own: Mapping[str, tuple[tuple[int, ...], Sequence[Issued]]], group: dist.ProcessGroup | None = None) -> None:
    """ValueError on every rank where two ranks are about to issue other collectives along an axis that they share.

    own: by the name of a pass, this rank's coordinate on the pass's mesh and its collectives. Every rank of the group calls this.
    """
    digests = {}
    for which, (where, sequence) in own.items():
        for axis in range(len(where)):
            along = repr([one for one in sequence if axis in one.axes])
            digests[which, axis, where] = hashlib.sha256(along.encode()).digest()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with rank_lost("comparing the order of collectives"):
        dist.all_gather_object(gathered, digests, group=group)
    first: dict[tuple, tuple[tuple[int, ...], bytes]] = {}
    for (which, axis, where), digest in (row for of_rank in gathered for row in of_rank.items()):
        other, expected = first.setdefault((which, axis, where[:axis], where[axis + 1 :]), (where, digest))
        if digest != expected:
            raise ValueError(
                f"the ranks at {other} and {where} of the mesh would issue other collectives along axis {axis} in the {which}, and wait "
                "for each other forever; plan with other layouts (pins), and report this: ranks of a group must have one order"
            )
