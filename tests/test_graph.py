"""Lifetimes and storage against a run on real tensors that notes who reads what, and hashes that see every field."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from autoshard.capture import capture
from autoshard.graph import ITEMSIZE, Const, Graph, Op, Ref, Result, Tensor, Value, leaves, replace_refs
from tests.helpers import TINY, overload, tiny_graph

F32 = "float32"


def tensor(*shape, dtype=F32) -> Tensor:
    return Tensor(shape, dtype)


def placeholder(name: str, kind: str, *shape) -> Op:
    return Op(name, kind, (), ((), ()), (tensor(*shape),), kind)


def compute(name: str, target: str, inputs, args, *outputs, alias=None) -> Op:
    return Op(name, target, tuple(inputs), (tuple(args), ()), outputs, alias=alias)


def graph(*ops: Op, **results: int) -> Graph:
    """Results by "kind_name": the op whose first output they are."""
    return Graph(ops, tuple(Result(*key.split("_"), (i, 0)) for key, i in results.items()))


R0, R1 = Ref(0), Ref(1)

CHAIN = graph(  # x @ w, gelu, sum
    placeholder("w", "parameter", 4, 4),
    placeholder("x", "input", 8, 4),
    compute("mm", "aten.mm.default", [(1, 0), (0, 0)], (R0, R1), tensor(8, 4)),
    compute("gelu", "aten.gelu.default", [(2, 0)], (R0,), tensor(8, 4)),
    compute("sum", "aten.sum.default", [(3, 0)], (R0,), tensor()),
    output_0=4,
)
VIEWS = graph(  # a view of a view is read last; the split's second half too
    placeholder("x", "input", 8, 4),
    compute("exp", "aten.exp.default", [(0, 0)], (R0,), tensor(8, 4)),
    compute("t", "aten.t.default", [(1, 0)], (R0,), tensor(4, 8), alias=0),
    compute("split", "aten.split.Tensor", [(2, 0)], (R0, 2), tensor(2, 8), tensor(2, 8), alias=0),
    compute("neg", "aten.neg.default", [(3, 0)], (R0,), tensor(2, 8)),
    compute("sin", "aten.sin.default", [(1, 0)], (R0,), tensor(8, 4)),
    compute("mul", "aten.mul.Tensor", [(3, 1), (4, 0)], (R0, R1), tensor(2, 8)),
    compute("cos", "aten.cos.default", [(5, 0)], (R0,), tensor(8, 4)),
    output_0=6,
    output_1=7,
)
UNUSED = graph(
    placeholder("x", "input", 4, 4),
    compute("max", "aten.max.dim", [(0, 0)], (R0, 1), tensor(4), tensor(4, dtype="int64")),
    compute("exp", "aten.exp.default", [(0, 0)], (R0,), tensor(4, 4)),
    compute("neg", "aten.neg.default", [(1, 0)], (R0,), tensor(4)),
    output_0=3,
)
RETURNED_VIEW = graph(
    placeholder("x", "input", 4, 4),
    compute("exp", "aten.exp.default", [(0, 0)], (R0,), tensor(4, 4)),
    compute("view", "aten.view.default", [(1, 0)], (R0, (16,)), tensor(16), alias=0),
    compute("sin", "aten.sin.default", [(0, 0)], (R0,), tensor(4, 4)),
    output_0=2,
    gradient_w=3,
)
BOTH = graph(  # a buffer's new value that the program returns as well
    placeholder("count", "buffer", 4),
    compute("add", "aten.add.Tensor", [(0, 0)], (R0, 1), tensor(4)),
    compute("exp", "aten.exp.default", [(0, 0)], (R0,), tensor(4)),
    output_0=1,
    buffer_count=1,
    output_1=2,
)
GRAPHS = {"chain": CHAIN, "views": VIEWS, "unused": UNUSED, "returned view": RETURNED_VIEW, "both": BOTH}
TINY_GRAPHS = {f"{name} {'training' if training else 'inference'}": (name, training) for name in TINY for training in (True, False)}


def graph_of(name: str) -> Graph:
    return GRAPHS[name] if name in GRAPHS else tiny_graph(*TINY_GRAPHS[name])


def by_running(graph: Graph) -> tuple[dict[Value, int], dict[Value, Value]]:
    """(last time that the bytes of a value are needed through it or what is a view of it, first value with the same storage)."""
    held: dict[Value, torch.Tensor] = {}
    first: dict[int, Value] = {}
    needed: dict[Value, int] = {}
    base: dict[Value, Value] = {}
    for i, op in enumerate(graph.ops):
        inputs = [held[v] for v in op.inputs]
        for value in op.inputs:
            needed[value] = i
        if op.is_placeholder:
            outputs = (torch.zeros(op.outputs[0].shape, dtype=getattr(torch, op.outputs[0].dtype)),)
        else:
            args, kwargs = replace_refs(op.literals, tuple(inputs))
            result = overload(op.target)(*args, **dict(kwargs))
            outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for k, y in enumerate(outputs):
            held[i, k] = y
            base[i, k] = first.setdefault(y.untyped_storage().data_ptr(), (i, k))
    for result in graph.results:
        end = len(graph.ops) if result.kind == "output" else result.value[0]
        needed[result.value] = max(needed.get(result.value, 0), end)
    return needed, base


@pytest.mark.parametrize("name", GRAPHS)
def test_storage_is_whose_memory_it_is(name):
    graph = GRAPHS[name]
    _, base = by_running(graph)
    assert {value: graph.storage(value) for value in base} == base


@pytest.mark.parametrize("name", GRAPHS)
def test_a_tensor_is_kept_until_its_memory_was_read_last(name):
    graph = GRAPHS[name]
    needed, base = by_running(graph)
    for owner in set(base.values()):
        ends = [needed[v] for v in base if base[v] == owner and v in needed]
        assert graph.last_use.get(owner) == max(ends, default=None), owner


@pytest.mark.parametrize("name", [*GRAPHS, *TINY_GRAPHS])
def test_users_are_those_who_read(name):
    graph = graph_of(name)
    expected: dict[Value, list] = {}
    for i, op in enumerate(graph.ops):
        for a, value in enumerate(op.inputs):
            expected.setdefault(value, []).append((i, a))
    assert graph.users == {value: tuple(pairs) for value, pairs in expected.items()}


@pytest.mark.parametrize("name", TINY_GRAPHS)
def test_captured_graphs_are_sound(name):
    graph = graph_of(name)
    kinds = [op.is_placeholder for op in graph.ops]
    assert kinds == sorted(kinds, reverse=True)  # placeholders first
    assert len(graph.index) == len(graph.ops)  # names are unique
    for i, op in enumerate(graph.ops):
        assert all(source < i and graph.ops[source].outputs[k] is not None for source, k in op.inputs)
        refs = [item.index for item in leaves(op.literals) if isinstance(item, Ref)]
        assert refs == list(range(len(op.inputs)))  # each input once, in the order of the arguments
    made = {(i, k) for i, op in enumerate(graph.ops) for k in range(len(op.outputs))}
    assert {r.value for r in graph.results if r.value is not None} <= made


# -- hashes ----------------------------------------------------------------------------------------------------------------------

CHANGES = {
    "name": lambda op: replace(op, name="other"),
    "target": lambda op: replace(op, target="aten.matmul.default"),
    "inputs": lambda op: replace(op, inputs=op.inputs[::-1]),
    "literals": lambda op: replace(op, literals=((R0, R1, 1.0), ())),
    "keyword": lambda op: replace(op, literals=((R0, R1), (("dtype", Const("dtype", "float64")),))),
    "shape": lambda op: replace(op, outputs=(tensor(4, 8),)),
    "dtype": lambda op: replace(op, outputs=(tensor(8, 4, dtype="float64"),)),
    "kind": lambda op: replace(op, kind="buffer"),
    "alias": lambda op: replace(op, alias=0),
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_fingerprint_sees_every_field(field):
    ops = list(CHAIN.ops)
    ops[2] = CHANGES[field](ops[2])
    assert replace(CHAIN, ops=tuple(ops)).fingerprint() != CHAIN.fingerprint()


def test_the_fingerprint_sees_results_and_ties():
    assert replace(CHAIN, results=(Result("output", "0", (3, 0)),)).fingerprint() != CHAIN.fingerprint()
    assert replace(CHAIN, tied=(("head", "w"),)).fingerprint() != CHAIN.fingerprint()
    assert replace(CHAIN).fingerprint() == CHAIN.fingerprint()


def test_the_structure_is_the_same_at_other_sizes_and_another_where_the_wiring_is():
    wide = replace(CHAIN, ops=tuple(replace(op, outputs=tuple(tensor(*(2 * n for n in t.shape)) for t in op.outputs)) for op in CHAIN.ops))
    assert wide.structure() == CHAIN.structure() and wide.fingerprint() != CHAIN.fingerprint()
    ops = list(CHAIN.ops)
    for field in ("name", "target", "inputs", "kind", "alias"):
        changed = (*ops[:2], CHANGES[field](ops[2]), *ops[3:])
        assert replace(CHAIN, ops=changed).structure() != CHAIN.structure()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_at_another_batch_has_the_same_structure(name):
    graphs = [capture(*TINY[name](batch=batch), training=True) for batch in (4, 8)]
    assert graphs[0].structure() == graphs[1].structure()
    assert graphs[0].fingerprint() != graphs[1].fingerprint()


SCRIPT = """
from autoshard.graph import *
from dataclasses import replace
t = Tensor((8, 4), "float32")
ops = (Op("x", "input", (), ((), ()), (t,), "input"),
       Op("f", "aten.full.default", ((0, 0),), ((Ref(0), (8, 4), 0.1), (("dtype", Const("dtype", "float32")),)), (t, None), alias=0))
g = Graph(ops, (Result("output", "0", (1, 0)),), (("a", "b"),))
print(g.fingerprint(), g.structure(), hash("seed"))
"""


def test_fingerprints_are_the_same_under_every_hash_seed():
    lines = [
        subprocess.run([sys.executable, "-c", SCRIPT], env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, text=True, check=True)
        for seed in ("0", "1")
    ]
    one, two = (line.stdout.split() for line in lines)
    assert one[:2] == two[:2] and one[2] != two[2]


# -- small parts -----------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_torch():
    assert ITEMSIZE == {name: getattr(torch, name).itemsize for name in ITEMSIZE}
    assert [tensor(2, 3).bytes, tensor().bytes, tensor(0, 4).bytes, tensor(3, dtype="bool").bytes] == [24, 4, 0, 3]


def test_refs_are_replaced_and_the_rest_stays():
    literals = ((Ref(1), (Ref(0), 3)), (("dim", -1),))
    assert replace_refs(literals, ("a", "b")) == (("b", ("a", 3)), (("dim", -1),))
    assert list(leaves(literals)) == [Ref(1), Ref(0), 3, "dim", -1]


def test_equal_ops_have_equal_signatures_whatever_their_names():
    ops = (*CHAIN.ops, replace(CHAIN.ops[3], name="again", module="h.1", backward=True))
    graph = replace(CHAIN, ops=ops)
    assert graph.signature(3) == graph.signature(5) != graph.signature(2)


def test_a_module_s_path_means_the_last_value_that_its_forward_computes():
    first = replace(compute("a", "aten.exp.default", [(0, 0)], (R0,), tensor(4)), module="block.act")
    last = replace(compute("b", "aten.exp.default", [(1, 0)], (R0,), tensor(4)), module="block.norm")
    back = replace(compute("c", "aten.exp.default", [(2, 0)], (R0,), tensor(4)), module="block.norm", backward=True)
    source = Op("x", "input", (), (), (tensor(4),), "input")
    *_, paths = Graph((source, first, last, back), ()).names
    assert paths == {"block": ((2, 0),), "block.act": ((1, 0),), "block.norm": ((2, 0),)}
