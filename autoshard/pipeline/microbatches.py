"""The division of a batch of example inputs into microbatches."""

from typing import Any

import torch

from autoshard.torch_private import pytree


def batch_of(example_inputs: Any) -> int:
    """The length of dim 0 of the first tensor."""
    for leaf in pytree.tree_leaves(example_inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ValueError("the example inputs hold no tensor with a dim, so there is no batch to split into microbatches")


def microbatch(example_inputs: Any, count: int, data: int = 1) -> Any:
    """The inputs of one of `count` microbatches: the first part of every tensor whose dim 0 is the batch.

    data: ranks that divide a microbatch further. ValueError where the batch doesn't divide by both.
    """
    if count == data == 1:
        return example_inputs
    batch = batch_of(example_inputs)
    if batch % (count * data):
        fitting = [str(k) for k in range(1, batch + 1) if batch % (k * data) == 0][:12]
        ranks = f" for {data} data-parallel ranks" if data > 1 else ""
        numbers = f"one of {', '.join(fitting)}, or another batch" if fitting else "another batch"
        parts = f"{count} equal microbatches" if count > 1 else "equal parts"
        raise ValueError(f"a batch of {batch} has no {parts}{ranks}; take {numbers}")

    def part(leaf: Any) -> Any:
        is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[: batch // count] if is_batch else leaf

    return pytree.tree_map(part, example_inputs)
