"""The graphs of one pipeline stage on one rank: forward, backward, and the backward pass in two halves.

    forward    loads, position                           -> outputs, saved
    backward   saved, tangents, position, sums           -> gradients sent on, sums with this microbatch's gradients added
    inputs     saved, tangents, position                 -> gradients sent on, kept          the ancestors of what is sent on
    weights    kept, sums                                -> sums                             the other nodes, which read `kept`

Zero-bubble schedules run the halves apart; the others run `backward`.
"""

from dataclasses import dataclass
from operator import getitem
from typing import Any

from autoshard.graph import reached
from autoshard.lower import Boxed, Pace, RankGraphs, boxed, subgraph, trace, without_idle, write_in_place
from autoshard.runtime.distribute import Where
from autoshard.runtime.microbatches import with_sums
from autoshard.runtime.overlap import scheduled
from autoshard.runtime.stages import LoweredStage
from autoshard.solution import SENT


@dataclass(frozen=True, eq=False)
class Halves:
    """The backward pass in two halves, and the numbers of the outputs of each among the gradients."""

    inputs: Boxed
    weights: Boxed
    sent: tuple[int, ...]
    rest: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StageGraphs:
    """The passes of a stage as functions that empty their argument, and what their arguments and results are."""

    of: RankGraphs
    forward: Boxed
    inference: Boxed  # without dropout
    backward: Boxed  # in a stage that has nothing to train, these do nothing
    halves: Halves | None


def stage_graphs(stage: LoweredStage, where: Where, spare_bytes: float, *, halved: bool) -> StageGraphs:
    """The graphs of a rank of the stage's mesh. halved: with the backward pass in two halves.

    spare_bytes: by which overlapping collectives with compute may raise the peak. ValueError where a local shape isn't the planned one.
    """
    arguments = (stage.program, stage.graph, where.groups, where.coordinate, where.device.type)
    traced = trace(*arguments)
    plain = trace(*arguments, drops=False) if traced.is_random else traced
    graphs, inference = with_sums(traced, None), plain.inference()
    if stage.program.is_even:  # else ranks would choose different orders, as their shards differ in size
        scheduled([*graphs.passes.values(), inference], Pace(stage.mesh, where.groups), spare_bytes, where.second_group)
    for one in () if stage.program.is_even else (*graphs.passes.values(), inference):
        without_idle(one)
    backward = _nothing if graphs.backward is None else boxed(graphs.backward)
    halves = _halves(graphs) if halved else None
    write_in_place(inference, graphs.loads, graphs.outputs)
    return StageGraphs(graphs, boxed(graphs.forward), boxed(inference), backward, halves)


def _nothing(arguments: list[Any]) -> list[Any]:
    return []


def _halves(graphs: RankGraphs) -> Halves:
    if graphs.backward is None:
        return Halves(_nothing, _nothing, (), ())
    *nodes, output = graphs.backward.graph.nodes
    results = output.args[0]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    sums = placeholders[len(placeholders) - len(graphs.sums) :]
    given = placeholders[: len(placeholders) - len(graphs.sums)]
    sent = tuple(k for k, key in enumerate(graphs.gradients) if key.startswith(f"gradient:{SENT}"))
    rest = tuple(k for k in range(len(results)) if k not in sent)
    first = set(reached([results[k] for k in sent], lambda node: node.all_input_nodes))
    inner = [node for node in nodes if node.op != "placeholder"]
    first |= {node for node in inner if node.target is getitem and node.args[0] in first}  # else all outputs of that op would be kept
    early, late = [n for n in inner if n in first], [n for n in inner if n not in first]
    there = {*given, *early}
    read = {source for node in late for source in node.all_input_nodes} | {results[k] for k in rest}
    kept = [node for node in nodes if node in there and node in read]
    inputs = subgraph(graphs.backward, given, early, [*(results[k] for k in sent), *kept])
    weights = subgraph(graphs.backward, [*kept, *sums], late, [results[k] for k in rest])
    return Halves(boxed(inputs), boxed(weights), sent, rest)
