"""From dimension classes to pins: every op is pinned to the candidate that shards the wanted classes.

    admissible(c)  every S(d) of candidate c is on a wanted class; an input layout is Partial only where its producer's output layout is
                   the same and nothing else reads it
    best(c)        = (sum over axes of the highest priority, fewest inputs that are resharded, first)

Ops are visited in the order of the graph, so the output layouts of their producers are known. Partial sums pass through views and
additions up to the op that needs them replicated or sharded. If several ops read a partial sum, it is reduced once for all of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.graph import Graph, Value
from autoshard.layout import Layout
from autoshard.strategies import REPLICATED, Candidates, code

Code = tuple[int, ...]  # a layout as numbers: strategies.code of every placement
Priorities = tuple[tuple[int, ...], ...]  # per axis, per dim: with which it is to be sharded, 0 not at all; () of private values
Source = tuple[Code, bool]  # the output layout of an input's producer, and whether it has no other reader
SECOND, STAYS_PARTIAL, FIRST = 1, 2, 3  # priorities: of a sequence, of sums that are reduced later, of batch and tensor parallel classes


@dataclass(frozen=True)
class Pin:
    """Which candidates of one op are allowed: those with these layouts; None stands for any."""

    outputs: tuple[Layout | None, ...] | None = None
    inputs: tuple[Layout | None, ...] | None = None


def allowed(pins: Mapping[str, Pin], graph: Graph, candidates: Candidates) -> dict[int, np.ndarray]:
    """For every pinned op, by index, which of its candidates match; computed once for ops that share candidates and pin."""
    masks: dict[tuple[int, int], np.ndarray] = {}
    by_op = {}
    for name, pin in pins.items():
        i = graph.index[name]
        key = (id(pin), id(candidates.of[i]))
        if key not in masks:
            masks[key] = _matching(pin, candidates, i)
        by_op[i] = masks[key]
    return by_op


def _matching(pin: Pin, candidates: Candidates, i: int) -> np.ndarray:
    """Which candidates of an op have the pin's layouts, compared as numbers: torch's placements would take most of the time."""
    inputs, outputs = candidates.coded(i)
    match = np.ones(len(outputs), dtype=bool)
    for layouts, coded in ((pin.inputs, inputs), (pin.outputs, outputs)):
        if layouts is not None:
            match &= len(layouts) == coded.shape[1]
            for k, layout in enumerate(layouts[: coded.shape[1]]):
                if layout is not None:
                    match &= len(layout) == coded.shape[2] and (coded[:, k] == [code(p) for p in layout]).all(axis=1)
    return match


def settle(
    graph: Graph, candidates: Candidates, wanted: Callable[[Value], Priorities], fixed: Mapping[int, Layout], carried: frozenset[int],
    choices: Mapping[int, int] | None = None,
) -> dict[str, Pin]:  # fmt: skip
    """A pin for every op. fixed: ops whose output layout is known; carried: ops that keep the layout of their only input; choices: ops
    whose candidate is known, with its number."""
    readers = Counter([*(value for op in graph.ops for value in op.inputs), *(result.value for result in graph.results)])
    produced: dict[Value, Code] = {}
    best: dict[tuple, int] = {}
    pins: dict[str, Pin] = {}
    shared: dict[tuple[int, int], tuple[Pin, list[Code]]] = {}
    for i, op in enumerate(graph.ops):
        options = candidates.of[i]
        inputs, outputs = candidates.coded(i)
        if choices and i in choices:
            chosen = choices[i]
        elif i in fixed:
            chosen = next(j for j, c in enumerate(options) if c.outputs[0] == fixed[i])
        else:
            sources = tuple((produced[v], readers[v] == 1) for v in op.inputs)
            priorities = tuple(map(wanted, op.inputs)), tuple(() if t is None else wanted((i, k)) for k, t in enumerate(op.outputs))
            key = (id(options), sources, priorities, i in carried)
            if key not in best:
                best[key] = _best(inputs, outputs, (*priorities[0], *priorities[1]), sources, i in carried)
            chosen = best[key]
        if (id(options), chosen) not in shared:
            pin = Pin(options[chosen].outputs, options[chosen].inputs)
            shared[id(options), chosen] = pin, [tuple(row) for row in outputs[chosen].tolist()]
        pins[op.name], codes = shared[id(options), chosen]
        for k, tensor in enumerate(op.outputs):
            if tensor is not None:
                produced[i, k] = codes[k]
    return pins


def _best(inputs: np.ndarray, outputs: np.ndarray, priorities: Sequence[Priorities], sources: tuple[Source, ...], carried: bool) -> int:
    """The first of the best admissible candidates: of the highest sum of priorities, then of the fewest inputs that are resharded; the
    fully replicated one is always admissible."""
    if carried and len(same := np.flatnonzero((inputs[:, 0] == sources[0][0]).all(axis=1))):
        return int(same[0])
    admissible, resharded = np.ones(len(outputs), dtype=bool), np.zeros(len(outputs), dtype=np.int64)
    for k, (source, alone) in enumerate(sources):
        partial = inputs[:, k] < REPLICATED
        other = (inputs[:, k] != source) | (partial & (not alone))
        admissible &= ~(other & (partial if priorities[k] else True)).any(axis=1)
        resharded += other.sum(axis=1)
    shape = (len(outputs), outputs.shape[2])
    reached, partial = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=bool)
    for placed, rows in zip([*inputs.swapaxes(0, 1), *outputs.swapaxes(0, 1)], priorities, strict=True):
        if not rows:  # an output that is no tensor, or a private value
            continue
        for a, of_dim in enumerate(rows):
            of_axis = np.array([*of_dim, STAYS_PARTIAL])[np.where(placed[:, a] >= 0, placed[:, a], -1)]
            admissible &= of_axis != 0
            reached[:, a] = np.maximum(reached[:, a], np.where(placed[:, a] >= 0, of_axis, 0))
        partial &= placed < REPLICATED
    priority = np.where(partial, STAYS_PARTIAL, reached).sum(axis=1)
    scores = np.where(admissible, priority * (1 + resharded.max()) - resharded, np.iinfo(np.int64).min)
    return int(scores.argmax())
