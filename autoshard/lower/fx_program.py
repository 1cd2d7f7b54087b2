"""A Program as this rank's own fx graphs: plain ATen ops and functional collectives on local tensors, traced once.

    joint      the records of the program, one after the other, under make_fx on fake local tensors
    forward    loads, position            -> outputs, new buffers, saved
    backward   saved, tangents, position  -> gradients             saved: what backward nodes read of forward ones

The cut lies at the first record that reads a tangent, or behind which all ops are of the backward pass. Where a rank is (a 0-d
integer per mesh axis) is an input of the graphs: those of two ranks differ in the names of process groups only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.graph import _BoxedCodeGen

from autoshard.graph import Graph
from autoshard.lower.collectives import Groups
from autoshard.lower.flow import owners, size
from autoshard.lower.program import Program, Redistribute, ReturnResult, RunOp, Slot
from autoshard.lower.run import run_rank

_c10d = torch.ops._c10d_functional
aten = torch.ops.aten
RANDOM = {
    aten.bernoulli.p, aten.rand.default, aten.rand_like.default, aten.randn.default, aten.randn_like.default, aten.native_dropout.default,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class RankGraphs:
    """One rank's step, and what goes in and out, in the order of the graphs' placeholders and outputs."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None  # None for a program without gradients
    loads: tuple[str, ...]  # parameters, buffers, inputs; the position follows
    outputs: tuple[str, ...]  # "output:0", "buffer:NAME"; the saved values follow
    num_saved: int
    tangents: tuple[str, ...]
    gradients: tuple[str, ...]  # "gradient:NAME"
    slots: dict[str, Slot]  # of loads, tangents and results

    @property
    def is_random(self) -> bool:
        return any(node.target in RANDOM for node in self.forward.graph.nodes)

    def inference(self) -> fx.GraphModule:
        """The forward graph with nothing saved."""
        *nodes, output = self.forward.graph.nodes
        placeholders = [node for node in nodes if node.op == "placeholder"]
        inner = [node for node in nodes if node.op != "placeholder"]
        return _copy(self.forward, placeholders, inner, output.args[0][: len(self.outputs)])


def trace(program: Program, graph: Graph, groups: Groups, where: tuple[int, ...], device: str = "cpu", *, drops: bool = True) -> RankGraphs:
    """The fx graphs of the rank at coordinate `where`. node.meta holds "record", an index into the program's records. drops: False
    leaves dropout out.

    ValueError where a local shape isn't the planned one.
    """
    names = [record.name for record in program.loads]
    keys = [record.key for record in program.results]
    rank = program.mesh.coordinates().index(where)
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty(r.slot.shape_on(rank), dtype=getattr(torch, r.slot.dtype), device=device) for r in program.loads]
        position = [torch.zeros((), dtype=torch.int64, device=device) for _ in program.mesh.axes]

    def step(*flat: torch.Tensor) -> list[torch.Tensor]:
        proxies = get_proxy_mode()
        assert proxies is not None
        values = dict(zip(names, flat, strict=False))
        results = run_rank(program, values, groups, flat[len(names) :], where, done=_Marks(proxies.tracer.graph))
        return [results[key] for key in keys]

    with mode:
        joint = make_fx(step)(*fakes, *position)
    if not drops:
        _keep_all(joint.graph)
    kinds = {name: graph.ops[graph.index[name]].kind for name in names}
    slots = {r.name: r.slot for r in program.loads} | {r.key: r.slot for r in program.results}
    return _split(joint, names, kinds, keys, first_of_backward(program, graph), slots)


def _keep_all(graph: fx.Graph) -> None:
    """Dropout that drops nothing."""
    for node in graph.nodes:
        if node.target is aten.bernoulli.p:  # the mask, before it is divided by p
            node.target, node.kwargs = aten.full_like.default, {}
        elif node.target is aten.native_dropout.default:
            node.args, node.kwargs = (node.args[0], node.args[1], False), {}


class _Marks:
    """Notes on every new node the record that it was made for."""

    def __init__(self, graph: fx.Graph):
        self.graph, self.last = graph, next(reversed(graph.nodes))

    def __call__(self, i: int) -> None:
        for node in reversed(self.graph.nodes):
            if node is self.last:
                break
            node.meta["record"] = i
        self.last = next(reversed(self.graph.nodes))


def first_of_backward(program: Program, graph: Graph) -> int:
    """The index of the record with which the backward pass begins; the number of records where there is none."""
    known: set[str] = {r.slot.name for r in program.loads if graph.ops[r.slot.value[0]].kind == "tangent"}
    end = len(program.records)
    begin, behind = end, end
    for i, record in enumerate(program.records):
        match record:
            case Redistribute(source=source, target=target):
                if source.name in known:
                    known.add(target.name)
                    begin = min(begin, i)
            case RunOp():
                if not graph.ops[record.op].backward:
                    behind = i + 1
                if any(slot.name in known for slot in record.inputs):
                    known.update(slot.name for slot in record.outputs if slot is not None)
                    begin = min(begin, i)
            case ReturnResult(key=key) if not key.startswith("gradient:"):
                behind = i + 1
    gives = any(isinstance(r, ReturnResult) and r.key.startswith("gradient:") for r in program.records)
    return min(begin, behind) if gives else end


def _split(
    joint: fx.GraphModule, names: Sequence[str], kinds: dict[str, str], keys: Sequence[str], first: int, slots: dict[str, Slot]
) -> RankGraphs:
    """The joint graph cut in two at a record."""
    *nodes, output = joint.graph.nodes
    given = [node for node in nodes if node.op == "placeholder"]
    loads, position = dict(zip(names, given, strict=False)), given[len(names) :]
    made = dict(zip(keys, output.args[0], strict=True))
    tangents = [name for name in names if kinds[name] == "tangent"]
    inputs = [name for name in names if kinds[name] != "tangent"]
    gradients = [key for key in keys if key.startswith("gradient:")]
    outputs = [key for key in keys if not key.startswith("gradient:")]
    early = [n for n in nodes if n.op != "placeholder" and n.meta.get("record", -1) < first]
    late = [n for n in nodes if n.op != "placeholder" and n.meta.get("record", -1) >= first]
    there = {*(loads[name] for name in inputs), *early}
    read = {source for node in late for source in node.all_input_nodes} | {made[key] for key in gradients}
    saved = [node for node in nodes if node in there and node in read] if gradients else []
    lost = [key for key in outputs if made[key] not in there]
    if lost:
        raise ValueError(f"{lost[0]} is made in the backward pass; a program must give its outputs before its gradients")
    owner = owners(nodes)
    for node in saved:
        if owner[node].op == "call_function":  # else it is a parameter, buffer or input, or a view of one
            node.meta["kept"] = (owner[node].name, size(owner[node]))
    forward = _copy(joint, [loads[name] for name in inputs] + position, early, [made[key] for key in outputs] + saved)
    backward = _copy(joint, saved + [loads[n] for n in tangents] + position, late, [made[k] for k in gradients]) if gradients else None
    return RankGraphs(forward, backward, tuple(inputs), tuple(outputs), len(saved), tuple(tangents), tuple(gradients), slots)


def _copy(root: fx.GraphModule, placeholders: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """Some nodes as a graph of their own; what of them nobody reads is left out."""
    graph = fx.Graph()
    now: dict[fx.Node, fx.Node] = {}
    for k, node in enumerate(placeholders):
        now[node] = graph.placeholder(f"in_{k}")
        now[node].meta = dict(node.meta)
    for node in nodes:
        now[node] = graph.node_copy(node, now.__getitem__)
    graph.output([now[node] for node in outputs])
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph)


# -- graphs as functions -------------------------------------------------------------------------------------------------------------

Boxed = Callable[[list], Sequence[Any]]  # empties the list, so that what it holds can be freed on the way


def boxed(graph_module: fx.GraphModule) -> Boxed:
    """A graph module that takes one list and empties it."""
    made = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    spare_gloo(made.graph)
    made.graph.set_codegen(_BoxedCodeGen())
    made.recompile()
    return made.forward


def compiled(graph_module: fx.GraphModule) -> Boxed:
    """The same through inductor, in the order that the graph has."""
    from torch._inductor.compile_fx import compile_fx  # here: it takes seconds to import, which eager runs need not pay

    inputs = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    own = copy.deepcopy(graph_module)  # inductor keeps what it is given
    spare_gloo(own.graph)
    own.recompile()
    with torch.no_grad():
        made = compile_fx(own, inputs, config_patches={"reorder_for_peak_memory": False, "fallback_random": True})
    return lambda given: made(*given)


def spare_gloo(graph: fx.Graph) -> None:
    """All gathers of CPU tensors write to a tensor that is made for them.

    torch 2.13 runs all_gather_into_tensor as gloo's coalesced one, and two of those under way in one group corrupt the heap: without
    this, the slow test that keeps four under way (tests/test_parallelize.py) loses a rank within seconds.
    """
    for node in graph.find_nodes(op="call_function", target=_c10d.all_gather_into_tensor.default):
        made = node.meta["val"]
        if made.device.type != "cpu":
            continue
        with graph.inserting_before(node):
            out = graph.call_function(aten.empty.memory_format, (tuple(made.shape),), {"dtype": made.dtype, "device": made.device})
            filled = graph.call_function(_c10d.all_gather_into_tensor_out.default, node.args, {"out": out})
        out.meta, filled.meta = {"val": made}, dict(node.meta)
        node.replace_all_uses_with(filled)
        graph.erase_node(node)
