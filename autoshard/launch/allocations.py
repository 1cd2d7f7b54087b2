"""What torch's caching allocator reserves on one device beyond what is allocated at most: the allocations of two steps in the order of the
captured program, by the rules of cost/caching_allocator.py. The second step finds the first one's segments, and the optimizer's states.

A result is freed after its last reader; what the backward reads, and the input of a block, with the block's backward. With autocast 16-bit
copies of a block's weights are alive until its backward; of a block that is computed again until the loss, and again beside its backward.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cache, lru_cache

import numpy as np

from autoshard.cost import CachingAllocator

from .block_memory import OWN_INPUT, grows, is_written, kept_tasks, tensor_bytes
from .block_time import KEEPS, PART
from .captured_block import BlockTask, Sizes, tasks_of
from .runs import TrainingRuns

STEPS, MOST_BLOCKS = 2, 48  # simulated
OF_MODEL = ("layers", "width", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tied", "gated", "qk_norm", "seq")


def excess(runs: TrainingRuns, how: np.ndarray, compiled_loss: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Reserved relative to allocated bytes, less 1; between microbatches of powers of two interpolated, so that looking for the largest one
    takes ten simulations. how: as `kernel_seconds` groups ops; chunks: of the loss."""
    columns = np.broadcast_arrays(runs.recompute, how, compiled_loss, chunks, runs.zero >= 3)
    values = []
    for i, (*model, microbatch) in enumerate(zip(*(getattr(runs, name).tolist() for name in (*OF_MODEL, "microbatch")))):
        low = 2 ** math.floor(math.log2(microbatch))
        kind = (tuple(model), *(column[i].item() for column in columns))
        less, more = (_excess(*kind, n) for n in (low, 2 * low if microbatch > low else low))
        values.append(less + math.log2(microbatch / low) * (more - less))
    return np.array(values)


@lru_cache(maxsize=4096)
def _excess(model: tuple, recompute: str, how: str, compiled_loss: bool, chunks: float, autocast: bool, microbatch: int) -> float:
    given = {**dict(zip(OF_MODEL, model)), "microbatch": microbatch, "tensor": 1.0, "context": 1.0}
    runs = TrainingRuns({name: np.array([value]) for name, value in given.items()})
    allocator = _Steps(runs, recompute, how, compiled_loss, chunks, autocast).run()
    return allocator.peak_reserved / allocator.peak_allocated - 1


class _Steps:
    def __init__(self, runs: TrainingRuns, recompute: str, how: str, compiled_loss: bool, chunks: float, autocast: bool):
        self.sizes, self.how, self.autocast, self.compiled_loss = Sizes(runs), how, autocast, compiled_loss
        tasks = tasks_of(str(runs.family[0]), "megatron", how)
        self.forward, self.backward, blocks = tasks["forward block"], tasks["backward block"], int(min(runs.layers[0], MOST_BLOCKS))
        self.again = [recompute in KEEPS and (recompute not in PART or i % 2 == 0) for i in range(blocks)]
        self.kept = kept_tasks(self.forward, how) - {OWN_INPUT}
        some = KEEPS[recompute](self.forward) if recompute in KEEPS else lambda i, task: i in self.kept
        self.some = {i for i, task in enumerate(self.forward) if some(i, task)}
        self.tied, self.table, self.logits = runs.tied[0] > 0, runs.table_parameters[0], runs.tokens[0] * runs.vocab[0] / chunks
        self.hidden = 2 * runs.tokens[0] * runs.width[0]
        self._bytes = cache(lambda tensor: float(tensor_bytes(tensor, self.sizes)[0]))
        self.weights = [self._bytes(task.inputs[-1]) / 2 for task in self.forward if task.kind == "matmul"]
        self.allocator, self.gradients, self.number = CachingAllocator(), list[int](), 0

    def get(self, bytes: float) -> int:
        self.number += 1
        self.allocator.allocate(self.number, max(int(bytes), 1))
        return self.number

    def free(self, names: Iterable[int]) -> None:
        for name in names:
            self.allocator.free(name)

    def casts(self) -> list[int]:
        return [self.get(2 * n) for n in self.weights if self.autocast]

    def run(self) -> CachingAllocator:
        parameters = [self.table, *len(self.again) * self.weights, *([] if self.tied else [self.table])]
        for n in parameters:
            self.get((4 if self.autocast else 2) * n)
        for step in range(STEPS):
            self.free(self.gradients)
            self.gradients = []
            self._step()
            for n in parameters if step == 0 else ():
                for _ in range(2 if self.autocast else 3):
                    self.get(4 * n)
        return self.allocator

    def _step(self) -> None:
        x, until_loss, held = self.get(self.hidden), list[int](), list[tuple[list[int], int]]()
        for again in self.again:
            casts = self.casts()
            kept, result = self._tasks(self.forward, self.some if again else self.kept)
            until_loss += casts if again else []
            held.append((kept + (casts if not again else []), x))
            x = result
        gradient = self._loss(until_loss)
        self.free([x])
        for again, (kept, x) in zip(reversed(self.again), reversed(held)):
            if again:
                more, result = self._tasks(self.forward, self.kept - self.some)
                kept = [*kept, *more, result, *self.casts()]
            _, result = self._tasks(self.backward, ())
            self.free([*kept, x, gradient])
            gradient = result
        self._gradient(self.table)
        self.free([gradient])

    def _loss(self, until_loss: Sequence[int]) -> int:
        """Norm, head and loss, forward and backward; the gradient of the last block's result."""
        norm, head, logits = self.get(self.hidden), self.get(2 * self.table * self.autocast), self.get(2 * self.logits)
        if self.compiled_loss:
            narrow = self.get(2 * self.logits)
            self.free([logits, *until_loss])
        else:  # in float32: logits, their softmax; the gradient of the loss, and that of the softmax
            wide, softmax = self.get(4 * self.logits), self.get(4 * self.logits)
            self.free([logits, wide, *until_loss])
            of_loss, of_softmax = self.get(4 * self.logits), self.get(4 * self.logits)
            self.free([of_loss, softmax])
            narrow = self.get(2 * self.logits)
            self.free([of_softmax])
        self._gradient(0.0 if self.tied else self.table)
        gradient = self.get(self.hidden)
        self.free([narrow, head, norm])
        return gradient

    def _gradient(self, parameters: float) -> None:
        """Of a weight, in 16 bits; with autocast cast to float32, else added to a buffer that is there."""
        narrow = self.get(2 * parameters)
        self.gradients += [self.get(4 * parameters)] if self.autocast else []
        self.free([narrow])

    def _tasks(self, tasks: Sequence[BlockTask], keep: Collection[int]) -> tuple[list[int], int]:
        """Names of what is kept, and of the last result."""
        written = [task.kind != "collective" and is_written(task, self.how) for task in tasks]
        sources: list[set[int]] = []  # what a kernel reads, through what none writes
        for task in tasks:
            sources.append({k for j in task.after for k in ({j} if written[j] else sources[j])})
        kernels = [i for i, is_one in enumerate(written) if is_one]
        last, names = {j: i for i in kernels for j in sources[i]}, dict[int, list[int]]()
        for i in kernels:
            outputs = [tensor for tensor in tasks[i].outputs if tensor is not None]
            if tasks[i].kind == "matmul" and not grows(tasks[i]):
                self._gradient(self._bytes(outputs[0]) / 2)
                continue
            names[i] = [self.get(self._bytes(tensor)) for tensor in outputs]
            for j in [j for j in names if j not in keep and j != kernels[-1] and last.get(j, j) <= i]:
                self.free(names.pop(j))
        (result, *_), kept = names.pop(kernels[-1]), [name for of in names.values() for name in of]
        return kept, result
