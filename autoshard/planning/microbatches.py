"""How many microbatches a step has, where the examples of a step are given."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autoshard.graph import Graph
from autoshard.planning.context import Context


def with_number_of_microbatches(context: Context) -> Context:
    """The context with `microbatches` in place of `global_batch`; ValueError where the batch of the inputs doesn't divide that."""
    options = context.options
    if options.global_batch is None:
        return context
    batch, m = batch_of(context.graph), options.microbatches
    if batch is None or options.global_batch % batch:
        raise ValueError(f"global_batch is {options.global_batch}, the example inputs' batch is {batch}; expected a multiple of that")
    if m not in (1, options.global_batch // batch):
        raise ValueError(f"global_batch {options.global_batch} is {options.global_batch // batch} batches of {batch}, not {m}; give one")
    return replace(context, options=replace(options, microbatches=options.global_batch // batch, global_batch=None))


def batch_of(graph: Graph) -> int | None:
    """The first dim that most inputs have, the larger among equals; None where no input has dims."""
    sizes = Counter(op.output.shape[0] for op in graph.ops if op.kind == "input" and op.output.shape)
    return max(sizes, key=lambda size: (sizes[size], size), default=None)
