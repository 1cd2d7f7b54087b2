"""The kernels of a block of launches are those of the captured graph under its pinned scheme: matmul and attention FLOPs, and the
collectives of the tensor parallel axis with their bytes. A block is the difference of a model with three blocks and one with two."""

import json
from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest

from autoshard.baselines import baselines
from autoshard.capture.module import capture
from autoshard.cost import op_flops
from autoshard.graph import Graph
from autoshard.launch.captured_block import Sizes, tasks_of
from autoshard.launch.runs import TrainingRuns
from autoshard.layout import local_shape, text
from autoshard.mesh import Mesh
from autoshard.strategies import candidates
from benchmarks import captured_blocks
from benchmarks.published import TABLE, runs_of
from models import llama
from tests.test_training_runs import RECIPE

WIDTH, HIDDEN, HEADS, KEYS, SEQ, BATCH, ITEMSIZE = 64, 128, 8, 4, 32, 2, 2
MATMULS = ("aten.mm.default", "aten.linear.default", "aten.bmm.default", "aten.addmm.default")


def recipe(tensor: int, sequence_parallel: bool) -> TrainingRuns:
    sizes = {"L": 1, "h": WIDTH, "ffn": HIDDEN, "heads": HEADS, "kv": KEYS, "head_dim": WIDTH // HEADS, "vocab": 64, "tied": 0}
    batch = {"seq": SEQ, "mbs": BATCH, "ga": 1, "dp": 1, "shard": 1, "zero": 0, "tp": tensor, "sp": int(sequence_parallel)}
    row = RECIPE | {"src": "other"} | sizes | batch
    assert set(row) == set(TABLE.values())
    return runs_of([row])


@cache
def graph_of(layers: int) -> Graph:
    module, inputs = llama.build(
        layers=layers, heads=HEADS, kv_heads=KEYS, width=WIDTH, hidden=HIDDEN, vocab=64, batch=BATCH, seq=SEQ, loss=True, dtype="bfloat16"
    )
    return capture(module, inputs, training=True)


@cache
def pins_of(layers: int, tensor: int) -> dict:
    graph, mesh = graph_of(layers), Mesh.from_bandwidths((tensor,))
    return {b.name: b.pins for b in baselines(graph, mesh, candidates(graph, mesh))}


@cache
def counted(layers: int, tensor: int, scheme: str) -> Counter:
    """FLOPs by kind and direction, and (direction, collective, bytes): count of the tensor parallel axis' collectives."""
    graph, mesh, pins = graph_of(layers), Mesh.from_bandwidths((tensor,)), pins_of(layers, tensor)[scheme]
    total: Counter = Counter()
    moved = set()
    for op in graph.ops:
        if op.is_placeholder:
            continue
        pin, direction = pins[op.name], "backward" if op.backward else "forward"
        kind = "matmul" if op.target in MATMULS else "attention" if "attention" in op.target else ""
        if kind:
            ins = [(local_shape(graph.tensor(v).shape, pin.inputs[a], mesh), graph.tensor(v).dtype) for a, v in enumerate(op.inputs)]
            outs = [o and (local_shape(o.shape, pin.outputs[k], mesh), o.dtype) for k, o in enumerate(op.outputs)]
            total[kind, direction] += op_flops(op.target, ins, outs)
        for a, (producer, k) in enumerate(op.inputs):
            source = graph.ops[producer]
            before, after = text(pins[source.name].outputs[k])[0], text(pin.inputs[a])[0]
            if before + after in ("PS", "SR", "PR") and (producer, k, after) not in moved and graph.tensor((producer, k)).shape:
                moved.add((producer, k, after))  # one collective serves all readers
                bytes = int(np.prod(graph.tensor((producer, k)).shape)) * ITEMSIZE
                total[direction, before + after, bytes] += 1
    return total


def block(tensor: int, scheme: str) -> Counter:
    three, two = counted(3, tensor, scheme), counted(2, tensor, scheme)
    return Counter({key: three[key] - two[key] for key in three | two if three[key] != two[key]})


def of_launches(tensor: int, scheme: str) -> Counter:
    """As `counted`, of a block as launches are priced, at these sizes."""
    sizes, total = Sizes(recipe(tensor, scheme == "megatron_sp")), Counter()
    for direction in ("forward", "backward"):
        for task in tasks_of("llama", scheme)[f"{direction} block"]:
            if task.kind == "collective":
                total[direction, task.collective, int(sizes.of(task.bytes)[0])] += 1
            elif task.kind in ("matmul", "attention"):
                flops = op_flops(task.target, sizes.described(task.inputs), sizes.described(task.outputs))
                total[task.kind, direction] += int(np.ravel(flops)[0])
    return total


@pytest.mark.parametrize("scheme", ["megatron", "megatron_sp"])
@pytest.mark.parametrize("tensor", [2, *(pytest.param(t, marks=pytest.mark.slow) for t in (1, 4))])
def test_a_block_of_launches_has_the_kernels_of_the_captured_graph(tensor, scheme):
    block_of_graph, of = block(tensor, scheme), of_launches(tensor, scheme)
    kinds = [(kind, direction) for kind in ("matmul", "attention") for direction in ("forward", "backward")]
    assert {kind: of[kind] for kind in kinds} == {kind: block_of_graph[kind] for kind in kinds}


def test_a_block_has_the_collectives_of_the_captured_graph():
    residual, names = BATCH * SEQ * WIDTH * ITEMSIZE, {"PR": "all_reduce", "PS": "reduce_scatter", "SR": "all_gather"}
    for scheme, expected in (("megatron", ["PR"]), ("megatron_sp", ["PS", "SR"])):
        found = {key: n for key, n in block(2, scheme).items() if key[0] in ("forward", "backward")}
        assert found == {(direction, kind, residual): 2 for direction in ("forward", "backward") for kind in expected}
        of = {key: n for key, n in of_launches(2, scheme).items() if key[1] not in ("forward", "backward")}
        assert of == {(direction, names[kind], bytes): n for (direction, kind, bytes), n in found.items()}


def test_a_norm_of_a_library_is_one_kernel_and_backward_two_with_the_sum_of_its_weight():
    """The sum of the two gradients of a norm's input is in it, though autograd adds it outside of all modules."""
    launches = {}
    for family, direction in product(("llama", "qwen3"), ("forward", "backward")):
        fused = [task.fused["library"] for task in tasks_of(family, "megatron")[f"{direction} block"] if task.fused]
        launches[family, direction] = sum(one.launches for one in fused)
    more = [launches["qwen3", direction] - launches["llama", direction] for direction in ("forward", "backward")]
    assert more == [2, 5]  # of queries and keys; one copies a transposed gradient


@pytest.mark.parametrize("family", ["qwen3", "gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_kept_blocks_are_what_is_captured_now(family):
    """As benchmarks/captured_blocks.py finds them: run it with --write where models, schemes or fusion have changed."""
    model, inputs = captured_blocks.models()[family]
    for scheme, rows in captured_blocks.captured(model, inputs).items():
        kept = json.loads((captured_blocks.OUT / f"{family}_{scheme}.json").read_text())
        assert rows == kept
