"""Bytes that a block keeps for its backward and holds while it runs, from the tensors of its captured program (captured_block.py).

    kept        tensors that the backward reads; one that no kernel writes is computed again from those that are written (`kept_tasks`)
    largest     of tensors that are alive at once, each from the task that writes it to its last reader (`largest_live`)
"""

import math
from collections.abc import Sequence

import numpy as np

from .captured_block import OWN_FILES, BlockTask, Dims, Sizes

ITEMSIZE = {"bfloat16": 2.0, "float32": 4.0, "int64": 8.0}
INPUT: Dims = (2.0, ("b", "s", "h"), 0)  # bytes of a block's input
OWN_INPUT = -1  # in place of a task


def input_bytes(tasks: Sequence[BlockTask], sizes: Sizes) -> np.ndarray:
    """Of a block's input, which sequence parallelism shards."""
    sharded = any(task.collective == "reduce_scatter" for task in tasks)
    return sizes.of(INPUT) / (sizes.tensor if sharded else 1.0)


def result_bytes(task: BlockTask, sizes: Sizes) -> np.ndarray:
    """Of what a task computes."""
    if task.kind == "collective":
        return sizes.of(task.bytes) / (sizes.tensor if task.collective == "reduce_scatter" else 1.0)
    return sum((tensor_bytes(tensor, sizes) for tensor in filter(None, task.outputs)), np.zeros(1))


def tensor_bytes(tensor: tuple, sizes: Sizes) -> np.ndarray:
    return math.prod((sizes.of(dims) for dims in tensor[0]), start=np.array(ITEMSIZE[tensor[1]]))


def kept_bytes(
    tasks: Sequence[BlockTask], sizes: Sizes, how: str, regathers: np.ndarray, of_inputs: np.ndarray
) -> np.ndarray:
    """What a block keeps for its backward. how: as `kernel_seconds` groups ops. regathers: 1 where the gathered inputs of matmuls are
    gathered again; else they are kept in place of the shards. of_inputs: share of the bytes of elementwise results that only matmuls read,
    0.5 where those are kept in 8 bits."""
    kept = kept_tasks(tasks, how)
    inputs = {j for task in tasks if task.kind == "matmul" or task.collective == "all_gather" for j in task.after}
    total = input_bytes(tasks, sizes) if OWN_INPUT in kept else np.zeros(1)
    for i in sorted(kept - {OWN_INPUT}):
        total = total + result_bytes(tasks[i], sizes) * (of_inputs if i in inputs and tasks[i].kind == "elementwise" else 1.0)
    for task in tasks:
        if task.collective == "all_gather":
            shards = sum((result_bytes(tasks[j], sizes) for j in task.after if j in kept), np.zeros(1))
            total = total + np.where((regathers > 0) | (sizes.tensor == 1), 0.0, sizes.of(task.bytes) - shards)
    return total


def kept_tasks(tasks: Sequence[BlockTask], how: str) -> set[int]:
    """The tasks whose results a block keeps for its backward, among them OWN_INPUT where it keeps its input, as every compiled block does.
    What no kernel writes is computed again from what is written."""
    kept = {OWN_INPUT} if how == "compiled" else set()
    for i, task in enumerate(tasks):
        if task.kept:
            kept |= _sources(tasks, i, how) if how != "compiled" and task.kind == "elementwise" and not is_written(task, how) else {i}
    return kept


def is_written(task: BlockTask, how: str) -> bool:
    """Whether what the task computes is in memory: a kernel, or a collective, writes it, or what it is computed from again is not there.
    Kernels of libraries write what compiled ones do: what they read and their result are kept, nothing between (flash-attn's and
    Transformer Engine's norms, swiglu)."""
    if task.fused is None or how not in task.fused:
        return True
    fused = task.fused[how if how in OWN_FILES else "fused"]
    return any((*fused.writes, *fused.held))


def largest_live(tasks: Sequence[BlockTask], sizes: Sizes, how: str) -> np.ndarray:
    """The most bytes alive at once of tensors that grow with the tokens: gradients of parameters don't."""
    last = {j: i for i, task in enumerate(tasks) for j in task.after}
    held = {i: result_bytes(task, sizes) for i, task in enumerate(tasks) if grows(task) and is_written(task, how)}
    live = largest = np.zeros(1)
    for i, task in enumerate(tasks):
        live = live + held.get(i, 0.0)
        largest = np.maximum(largest, live)
        live = live - sum(held[j] for j in task.after if last[j] == i and j in held)
    return largest


def grows(task: BlockTask) -> bool:
    """Whether a task's results grow with the tokens."""
    dims = [task.bytes] if task.kind == "collective" else [dim for tensor in filter(None, task.outputs) for dim in tensor[0]]
    return any("s" in letters for _, letters, _ in dims)


def _sources(tasks: Sequence[BlockTask], i: int, how: str) -> set[int]:
    """The written tensors of which an elementwise op is a function, through those that aren't."""
    read = [tensor for tensor in tasks[i].inputs if any("b" in letters for _, letters, _ in tensor[0])]
    sources = {OWN_INPUT} if len(read) > len(tasks[i].after) else set()
    for j in tasks[i].after:
        sources |= _sources(tasks, j, how) if tasks[j].kind == "elementwise" and not is_written(tasks[j], how) else {j}
    return sources
