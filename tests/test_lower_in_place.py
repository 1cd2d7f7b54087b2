"""Writes into buffers and inputs: in place where nothing reads the old rows afterwards, and never with another result."""

import copy

import pytest
import torch
from torch import fx

from autoshard.lower import write_in_place

aten = torch.ops.aten
LOADS = ("cache", "rows", "index")


def program(kind: str) -> tuple[fx.GraphModule, list[str]]:
    """Rows are written into a cache once, twice where the kind says so, and the cache is read at the place that it says."""
    graph = fx.Graph()
    cache, rows, index = map(graph.placeholder, LOADS)
    call = graph.call_function
    read = [call(aten.mul.Tensor, (cache, 2.0))] if kind == "read before" else []
    view = call(aten.t.default, (cache,)) if kind == "viewed before" else None
    new = call(aten.index_copy.default, (cache, 0, index, rows))
    if kind == "twice":
        new = call(aten.index_copy.default, (new, 0, index, call(aten.mul.Tensor, (rows, 3.0))))
    if kind == "read between":
        read = [call(aten.mul.Tensor, (new, 2.0))]
        new = call(aten.index_copy.default, (new, 0, index, call(aten.mul.Tensor, (rows, 3.0))))
    if kind in ("read after", "viewed before"):
        read = [call(aten.mul.Tensor, (cache if view is None else view, 2.0))]
    names = [*(f"output:{k}" for k in range(len(read))), "buffer:rows" if kind == "of another name" else "buffer:cache"]
    if kind == "returned, too":
        read, names = [new], ["output:0", *names]
    graph.output((*read, new))
    return fx.GraphModule({}, graph), names


@pytest.mark.parametrize(
    ("kind", "writes"),
    {
        "once": 1, "twice": 2, "read before": 1, "read between": 2,
        "read after": 0, "viewed before": 0, "returned, too": 0, "of another name": 0,
    }.items(),
)  # fmt: skip
def test_rows_are_written_in_place_where_nobody_reads_the_old_ones_afterwards(kind, writes):
    module, names = program(kind)
    cache, rows, index = torch.randn(4, 3), torch.randn(2, 3), torch.tensor([3, 1])
    expected = copy.deepcopy(module)(cache.clone(), rows, index)
    write_in_place(module, LOADS, names)
    assert sum(node.target is aten.index_copy_.default for node in module.graph.nodes) == writes
    results = module(cache, rows, index)
    assert all(map(torch.equal, results, expected)) and (results[-1] is cache) == (writes > 0)
