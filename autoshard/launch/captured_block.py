"""Seconds of a block and of the ends of a transformer for many launches at once, from the kernels of captured graphs.

`captured/FAMILY_SCHEME.json`, and FAMILY_SCHEME_compiled.json and _recomputed.json for a compiled step, hold what
benchmarks/captured_blocks.py found in the graph of a model under a scheme's layouts: kernels and collectives in order, what each waits
for, and dims as products of letters:

    b microbatch   s tokens of a sequence on one device   h width   g heads per key head   k key heads   d width of a head
    f width of the MLP   v vocabulary   /t  divided by the tensor parallel devices

Kernels cost what they cost in a plan (`cost.busy_seconds`); collectives wait for kernels, and kernels for collectives, as on a time line.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.cost import Columns, busy_seconds
from autoshard.devices import SLOWED
from autoshard.graph import Fused
from autoshard.reading import text_of

from .runs import TrainingRuns

FILES = Path(__file__).with_name("captured")
OWN_FILES = (
    "compiled",  # by a compiler that computes values again in the backward pass
    "recomputed",  # which is of blocks that are recomputed, so all that runs again is in it
)
GROUPED = (
    *OWN_FILES,
    "fused",  # by a compiler that computes nothing again
    "library", "norms",  # by libraries of fused norms, rotary positions and activations; of these but activations
)  # fmt: skip
KINDS = ("matmul", "attention", "elementwise", "collective")
OF_KIND = {"mm": "matmul", "addmm": "matmul", "attention": "attention", "attention_backward": "attention"}
Dims = tuple[float, tuple[str, ...], int]  # a factor, letters, and how often t divides


@dataclass(frozen=True)
class BlockTask:
    """A kernel, or a collective."""

    kind: str  # one of KINDS
    after: tuple[int, ...]  # tasks of its part
    inputs: tuple[tuple[tuple[Dims, ...], str], ...] = ()
    outputs: tuple[tuple[tuple[Dims, ...], str] | None, ...] = ()
    target: str = ""
    share: float = 1.0
    fused: Mapping[str, Fused] | None = None  # by GROUPED
    kept: bool = False  # the backward reads it
    passes: int = 0  # that it makes over its first input in float32 besides, where that is sharded; one in a compiled program
    collective: str = ""
    bytes: Dims = (0.0, (), 0)


@cache
def tasks_of(family: str, scheme: str, how: str = "") -> Mapping[str, tuple[BlockTask, ...]]:
    """Of "forward block", "backward block", "forward ends", "backward ends". how: one of GROUPED; a compiled backward runs more ops."""
    own_file = f"_{how}" if how in OWN_FILES else ""
    parts: dict[str, list[BlockTask]] = {}
    places: list[int] = []  # of the rows in their parts
    for row in json.loads(text_of(FILES / f"{family}_{scheme}{own_file}.json", "measurements")):
        part = parts.setdefault(row["part"], [])
        after = tuple(places[j] for j in row["after"])
        places.append(len(part))
        if "collective" in row:
            part.append(BlockTask("collective", after, collective=row["collective"], bytes=_dims(row["bytes"])))
            continue
        fused = {kind: Fused(tuple(r), tuple(w), n, *map(tuple, held)) for kind in GROUPED if kind in row for r, w, n, *held in [row[kind]]}
        kind = OF_KIND.get(row["op"].split(".")[1], "elementwise")
        of = _tensors(row["in"]), _tensors(row["out"]), row["op"], row["share"], fused or None, row["kept"], row.get("passes", 0)
        part.append(BlockTask(kind, after, *of))
    return {name: tuple(part) for name, part in parts.items()}


def _tensors(texts: list[str | None]) -> tuple:
    split = [None if text is None else text.split(": ") for text in texts]
    return tuple(None if one is None else (tuple(_dims(d) for d in one[0].split(", ") if d), one[1]) for one in split)


def _dims(text: str) -> Dims:
    letters = tuple(re.findall(r"[bshgkdfv]", text))
    factor = re.match(r"[\d/]+", text)
    parts = [float(n) for n in factor[0].strip("/").split("/")] if factor else [1.0]
    return parts[0] / math.prod(parts[1:]), letters, text.count("/t") - text.count("*t")


class Sizes:
    """The letters of runs, and what dims are of them."""

    def __init__(self, runs: TrainingRuns):
        self.tensor, self.context = runs.tensor, runs.context
        self.letters = {
            "b": runs.microbatch, "s": runs.seq / runs.context, "h": runs.width, "g": runs.heads / runs.kv_heads, "k": runs.kv_heads,
            "d": runs.head_dim, "f": runs.ffn, "v": runs.vocab,
        }  # fmt: skip
        self.known: dict[Dims, np.ndarray] = {}

    def of(self, dims: Dims) -> np.ndarray:
        if dims not in self.known:
            factor, letters, shards = dims
            value = factor * np.ones(len(self.tensor))
            for letter in letters:
                value = value * self.letters[letter]
            if shards > 0 and "k" in letters and "g" not in letters:  # a key head is replicated rather than divided
                value = value / np.minimum(self.tensor, self.letters["k"])
            elif shards:
                value = value / self.tensor**shards
            self.known[dims] = value
        return self.known[dims]

    def described(self, tensors: tuple) -> list[Any]:
        return [None if one is None else (tuple(self.of(d) for d in one[0]), one[1]) for one in tensors]


def kernel_seconds(task: BlockTask, sizes: Sizes, device: Any, grouped: str) -> np.ndarray:
    """Of one kernel. device: as cost.busy_seconds reads it. grouped: one of GROUPED, or "" where every op is a kernel."""
    inputs, outputs = sizes.described(task.inputs), sizes.described(task.outputs)
    if task.kind == "matmul" and {"b", "s"} & {letter for one in task.inputs[:1] for letter in one[0][-1][1]}:  # a weight's gradient
        inputs[0] = Columns(inputs[0][0]), inputs[0][1]
    if task.kind == "attention":  # once for the keys of each device that has a part of the sequence, half of them on average, as in a ring
        return sizes.context * busy_seconds(task.target, inputs, outputs, device, task.share)
    is_compiled = grouped in (*OWN_FILES, "fused")
    seconds = busy_seconds(task.target, inputs, outputs, device, task.share, (task.fused or {}).get(grouped), is_compiled)
    passes = min(task.passes, 1) if is_compiled else task.passes
    if passes:
        seconds = seconds + np.where(sizes.tensor > 1, passes * 4 * reduce(np.multiply, inputs[0][0]) / device.memory_rate, 0.0)
    return seconds


def is_launched(task: BlockTask, grouped: str) -> bool:
    """Whether a kernel begins with it."""
    return task.kind != "collective" and (task.fused is None or grouped not in task.fused or task.fused[grouped].launches)


def again(tasks: tuple[BlockTask, ...], kept: Callable[[int, BlockTask], bool]) -> tuple[BlockTask, ...]:
    """What of a block's forward runs once more in front of its backward: what the backward reads, and what that is computed from, less
    what `kept` keeps; of the block's input nothing."""
    wanted = {i for i, task in enumerate(tasks) if task.kept and not kept(i, task)}
    for i in reversed(range(len(tasks))):
        if i in wanted:
            wanted |= {j for j in tasks[i].after if not kept(j, tasks[j])}
    at = {i: n for n, i in enumerate(sorted(wanted))}
    return tuple(replace(tasks[i], after=tuple(at[j] for j in tasks[i].after if j in at)) for i in sorted(wanted))


def end_of(tasks: tuple[BlockTask, ...], seconds: Callable[[BlockTask], np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """When the last of some tasks ends, and their seconds by kind."""
    each = [seconds(task) for task in tasks]
    by_kind = {kind: sum((s for s, task in zip(each, tasks) if task.kind == kind), np.zeros(1)) for kind in KINDS}
    ends: list[Any] = []
    free: dict[bool, Any] = {}  # by stream: kernels, collectives
    for task, s in zip(tasks, each):
        stream = task.kind == "collective"
        ends.append(reduce(np.maximum, (ends[j] for j in task.after), free.get(stream, 0.0)) + s)
        free[stream] = ends[-1]
    end: Any = reduce(np.maximum, free.values(), 0.0)
    return end + SLOWED * (sum(by_kind.values()) - end), by_kind  # one of both runs at any time; what exceeds the end ran beside
