"""A RankProgram as this rank's fx graphs: plain ATen ops and functional collectives on local tensors, traced once.

    joint      the records of the program, one after the other, under make_fx on fake local tensors
    forward    loads, position            -> outputs, new buffers, saved
    backward   saved, tangents, position  -> gradients             saved: outputs of forward nodes that backward nodes read

The joint graph is split at the first record that reads a tangent, or behind which all ops belong to the backward pass, whichever comes
first. A rank's position (a 0-d integer per mesh axis) is an input of the graphs, so that the graphs of two ranks differ only in the
names of process groups.
"""

import copy
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx

from autoshard.capture import DROPOUT_BACKWARD, fake_grouped_mm
from autoshard.graph import Graph
from autoshard.lower.collectives import Groups
from autoshard.lower.flow import VIEWS, owners, size
from autoshard.lower.generator import drawing, is_random, torch_draws
from autoshard.lower.kernels.offload import with_waits
from autoshard.lower.program import LoadPlaceholder, RankProgram, Redistribute, ReturnResult, RunOp, Slot
from autoshard.lower.run import run_rank
from autoshard.torch_private import BoxedCodeGen, FakeTensorMode, OpOverload, c10d_functional

_c10d = c10d_functional
aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class RankGraphs:
    """The graphs of one rank's step, and the names of their placeholders and outputs, in order."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None  # None for a program without gradients
    loads: tuple[str, ...]  # parameters, buffers, inputs; the position follows
    outputs: tuple[str, ...]  # "output:0", "buffer:NAME"; the saved values follow
    tangents: tuple[str, ...]
    gradients: tuple[str, ...]  # "gradient:NAME"
    slots: dict[str, Slot]  # of loads, tangents and results
    parameters: frozenset[str] = frozenset()  # among the loads
    reach: dict[str, frozenset[str]] = field(default_factory=dict)  # of gradients: the tangents from which they are computed
    sums: tuple[str, ...] = ()  # parameters whose gradients the backward graph adds to its last inputs (runtime.microbatches)

    @cached_property  # asked at every step
    def is_random(self) -> bool:
        return any(is_random(one.graph) for one in self.passes.values())

    @property
    def passes(self) -> dict[str, fx.GraphModule]:
        """The forward pass, and the backward pass where there is one."""
        return {"forward": self.forward} | ({} if self.backward is None else {"backward": self.backward})

    def inference(self) -> fx.GraphModule:
        """The forward graph with nothing saved."""
        *nodes, output = self.forward.graph.nodes
        placeholders = [node for node in nodes if node.op == "placeholder"]
        inner = [node for node in nodes if node.op != "placeholder"]
        return subgraph(self.forward, placeholders, inner, output.args[0][: len(self.outputs)])


IN_PLACE = {aten.index_copy.default: aten.index_copy_.default, aten.index_put.default: aten.index_put_.default}


def write_in_place(graph_module: fx.GraphModule, loads: Sequence[str], outputs: Sequence[str]) -> None:
    """Makes the graph, whose order is final, write rows of the new value of a buffer or input into it, where nothing reads the old one
    afterwards and it isn't an output, too. The result is then the tensor that was given."""
    nodes = list(graph_module.graph.nodes)
    owner, results = owners(nodes), dict(zip(outputs, nodes[-1].args[0], strict=True))
    returned = {owner[node] for key, node in results.items() if not key.startswith("buffer:")}
    given, at = dict(zip(loads, nodes, strict=False)), {node: i for i, node in enumerate(nodes)}
    for key, node in results.items():
        writes: list[fx.Node] = []
        while key.startswith("buffer:") and node.target in IN_PLACE and node not in returned:
            if any(user is not node and (at[user] > at[node] or user.target in VIEWS) for user in node.args[0].users):
                break
            writes.append(node)
            node = node.args[0]
        for write in writes if node is given.get(key.removeprefix("buffer:")) else ():
            write.target = IN_PLACE[write.target]
    graph_module.recompile()


def trace(
    program: RankProgram, graph: Graph, groups: Groups, where: tuple[int, ...], device: str = "cpu", *, drops: bool = True
) -> RankGraphs:
    """The fx graphs of the rank at coordinate `where`. node.meta holds "record", an index into the program's records. drops: whether
    dropout drops anything.

    ValueError where a local shape isn't the planned one.
    """
    joint = _joint(program if drops else _dropping_nothing(program), groups, where, device)
    for node in joint.graph.nodes if not drops else ():
        if str(node.target) in MASKS:  # the mask, before it is divided by p
            given = node.args if len(node.args) > 1 else (*node.args, 0.5)  # a graph leaves the default out
            node.target, node.args, node.kwargs = aten.full_like.default, given[-2:], {}
        elif node.target is aten.native_dropout.default:
            node.args, node.kwargs = (node.args[0], node.args[1], False), {}
    return _split(joint, program, graph)


def _dropping_nothing(program: RankProgram) -> RankProgram:
    """The program whose backward pass divides no gradient by the share that dropout keeps."""
    records = list(program.records)
    for k, record in enumerate(records):
        if isinstance(record, RunOp) and (instead := UNDROPPED.get(record.target)):
            by_rank = tuple(arguments | instead for arguments in record.by_rank)
            records[k] = replace(record, arguments=record.arguments | instead, by_rank=by_rank)
    return replace(program, records=tuple(records))


def rewritten(
    program: RankProgram, groups: Groups, where: tuple[int, ...], device: str = "cpu", ruled: Collection[str] = ()
) -> fx.GraphModule:
    """All records as one graph that runs by itself: local tensors of the program's loads in, a list of those of its results out.

    ruled: operators with a rule, whose results their inputs alone decide. ValueError where a local shape isn't the planned one, or an op
    draws random numbers, which need a generator that ranks share, or may draw some.
    """
    joint = _joint(program, groups, where, device)
    for drawn in (node.target for node in drawing(joint.graph)):
        if torch_draws(drawn):
            words = f"the graph draws random numbers ({drawn}), for which ranks need one state; run its module with autoshard.parallelize"
            raise ValueError(words)
        if str(drawn) not in ruled:
            words = f"{drawn} has no rule, so it may draw random numbers, for which ranks need one state; "
            raise ValueError(f"{words}give it a rule (autoshard.register_rule), or run the module with autoshard.parallelize")
    for axis, node in enumerate(joint.graph.find_nodes(op="placeholder")[len(program.loads) :]):
        if node.users:
            joint.register_buffer(f"position_{axis}", torch.tensor(where[axis], device=device))
            with joint.graph.inserting_before(node):
                constant = joint.graph.get_attr(f"position_{axis}")
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
        joint.graph.erase_node(node)
    _as_run(joint.graph)
    without_idle(joint)
    return joint


def _joint(program: RankProgram, groups: Groups, where: tuple[int, ...], device: str) -> fx.GraphModule:
    _check_reshapes(program)
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
        results = run_rank(program, values, groups, flat[len(names) :], where, done=_Marks(program, proxies.tracer))
        return [results[key] for key in keys]

    with mode, fake_grouped_mm():
        joint = make_fx(step)(*fakes, *position)
    _check_writes(joint.graph)
    return joint


def _check_writes(graph: fx.Graph) -> None:
    """AssertionError where nodes read a tensor, or a view of it, after an op has written into it, and not the op's result: they could be
    moved in front of it."""
    views: dict[fx.Node, fx.Node] = {}  # of a tensor: the node that made it
    written: set[fx.Node] = set()
    for node in graph.nodes:
        stale = [source.name for source in node.all_input_nodes if views.get(source, source) in written]
        assert not stale, f"{node.name} reads {stale[0]}, which a kernel has changed in place"
        is_write = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        if is_write:
            written.add(views.get(node.args[0], node.args[0]))  # type: ignore[arg-type,call-overload]
        elif node.target in VIEWS or node.target is operator.getitem:
            views[node] = views.get(node.all_input_nodes[0], node.all_input_nodes[0])


RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.view_copy.default", "aten.reshape.default")


def _check_reshapes(program: RankProgram) -> None:
    """ValueError where uneven shards don't have the elements of the shards to which they would be reshaped. Planning never chooses such
    layouts, but a call with other shapes than the planned ones may have them."""
    for record in program.records:
        if isinstance(record, RunOp) and record.by_rank and record.target in RESHAPES and record.outputs[0] is not None:
            for rank in range(program.mesh.num_devices):
                shapes = (record.inputs[0].shape_on(rank), record.outputs[0].shape_on(rank))
                if math.prod(shapes[0]) != math.prod(shapes[1]):
                    raise ValueError(f"op {record.name} would reshape the uneven shard {shapes[0]} of rank {rank} to {shapes[1]}")


def without_idle(graph_module: fx.GraphModule) -> None:
    """Takes out, in place, what only ranks with smaller shards need of redistributions: pads of nothing, slices of everything, and copies
    of these. What the model does stays."""
    for node in graph_module.graph.nodes:
        if not node.meta.get("redistributes") or node.target not in (aten.constant_pad_nd.default, aten.slice.Tensor):
            continue
        source = node.args[0]
        if node.meta["val"].shape == source.meta["val"].shape:
            for copied in [user for user in node.users if user.meta.get("redistributes") and user.target is aten.clone.default]:
                if source.meta["val"].is_contiguous():
                    copied.replace_all_uses_with(source)
                    graph_module.graph.erase_node(copied)
            node.replace_all_uses_with(source)
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def are_alike(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether both have the same operators in the same order that read the same nodes: sizes may differ."""
    numbered = [{node: k for k, node in enumerate(graph.nodes)} for graph in (one, other)]
    did = [[(n.op, n.op == "placeholder" or n.target, [at[x] for x in n.all_input_nodes]) for n in at] for at in numbered]
    return did[0] == did[1]


UNDROPPED: dict[str, dict[str, Any]] = {  # arguments of the backward pass of what drops nothing
    "aten.native_dropout_backward.default": {"scale": 1.0}, str(DROPOUT_BACKWARD): {"dropout_p": 0.0},
}  # fmt: skip
MASKS = ("aten.bernoulli_.float", "aten.bernoulli.p", "autoshard.aten_bernoulli_p.default")


class _Marks:
    """Writes into every new node's meta the index of its record, and into those that compute what the program names its slot."""

    def __init__(self, program: RankProgram, tracer: Any):
        self.records, self.tracer, self.graph = program.records, tracer, tracer.graph
        self.last = next(iter(reversed(self.graph.nodes)))

    def __call__(self, i: int, held: Mapping[str, torch.Tensor]) -> None:
        record = self.records[i]
        computed = record.outputs if isinstance(record, (Redistribute, RunOp)) else ()
        for slot in (record.slot,) if isinstance(record, LoadPlaceholder) else computed:
            if slot is not None and (known := get_proxy_slot(held[slot.name], self.tracer, None)) is not None:
                known.proxy.node.meta.setdefault("slot", slot)
        for node in reversed(self.graph.nodes):
            if node is self.last:
                break
            node.meta |= {"record": i, "redistributes": isinstance(record, Redistribute)}
        self.last = next(iter(reversed(self.graph.nodes)))


def first_of_backward(program: RankProgram, graph: Graph) -> int:
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
    has_gradients = any(record.key.startswith("gradient:") for record in program.results)
    return min(begin, behind) if has_gradients else end


def _split(joint: fx.GraphModule, program: RankProgram, graph: Graph) -> RankGraphs:
    """The joint graph, split into forward and backward before the first record of the backward pass."""
    *nodes, output = joint.graph.nodes
    placeholders = [node for node in nodes if node.op == "placeholder"]
    kinds = {record.name: graph.ops[graph.index[record.name]].kind for record in program.loads}
    loads, position = dict(zip(kinds, placeholders, strict=False)), placeholders[len(kinds) :]
    results = dict(zip((record.key for record in program.results), output.args[0], strict=True))
    tangents = [name for name, kind in kinds.items() if kind == "tangent"]
    inputs = [name for name, kind in kinds.items() if kind != "tangent"]
    gradients = [key for key in results if key.startswith("gradient:")]
    outputs = [key for key in results if not key.startswith("gradient:")]
    first = first_of_backward(program, graph)
    early = [n for n in nodes if n.op != "placeholder" and n.meta.get("record", -1) < first]
    late = [n for n in nodes if n.op != "placeholder" and n.meta.get("record", -1) >= first]
    there = {*(loads[name] for name in inputs), *early}
    read = {source for node in late for source in node.all_input_nodes} | {results[key] for key in gradients}
    saved = [node for node in nodes if node in there and node in read] if gradients else []
    lost = [key for key in outputs if results[key] not in there]
    if lost:
        raise ValueError(f"{lost[0]} is computed in the backward pass; a program must return its outputs before its gradients")
    owner = owners(nodes)
    for node in saved:
        if owner[node].op == "call_function":  # otherwise it is a parameter, buffer or input, or a view of one
            node.meta["kept"] = (owner[node].name, size(owner[node]))
    forward = subgraph(joint, [loads[name] for name in inputs] + position, early, [results[key] for key in outputs] + saved)
    given = saved + [loads[name] for name in tangents] + position
    backward = subgraph(joint, given, late, [results[key] for key in gradients]) if gradients else None
    backward = backward and with_waits(backward)
    slots = {r.name: r.slot for r in program.loads} | {r.key: r.slot for r in program.results}
    parameters = frozenset(name for name in inputs if kinds[name] == "parameter")
    reach: list[frozenset[str]] = []
    for op in graph.ops:
        reach.append(frozenset([op.name] * (op.kind == "tangent")).union(*(reach[i] for i, _ in op.inputs)))
    of = {f"gradient:{r.name}": reach[r.value[0]] for r in graph.results if r.kind == "gradient" and r.value is not None}
    return RankGraphs(forward, backward, tuple(inputs), tuple(outputs), tuple(tangents), tuple(gradients), slots, parameters, of)


def subgraph(root: fx.GraphModule, placeholders: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """Some nodes as a new graph, without those that no other node reads."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for k, node in enumerate(placeholders):
        copies[node] = graph.placeholder(f"in_{k}")
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph)


Boxed = Callable[[list], Sequence[Any]]  # it empties the list, so that tensors can be freed before it ends


def boxed(graph_module: fx.GraphModule) -> Boxed:
    """The graph as a function of one list, which it empties."""
    module = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    _as_run(module.graph)
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    return module.forward


def _as_run(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # real kernels may return other strides than the fake ones (mse_loss_backward)
    spare_gloo(graph)


def compiled(graph_module: fx.GraphModule) -> Boxed:
    """The same, compiled by inductor, with the nodes in the graph's order."""
    from autoshard.torch_private import compile_fx  # here: the import takes seconds, and eager runs don't need it

    own = copy.deepcopy(graph_module)  # inductor keeps the module that it compiles
    spare_gloo(own.graph)
    for node in own.graph.find_nodes(op="call_function", target=_c10d.all_gather_into_tensor_out.default):
        for wait in node.users:  # at once: inductor doesn't know that what such a gather reads must not be written until then
            node.append(wait)
    placeholders = own.graph.find_nodes(op="placeholder")
    with own.graph.inserting_before(next(iter(own.graph.nodes))):
        arguments = own.graph.placeholder("arguments")
    arguments.meta["steal_arg"] = True  # the mark of dynamo for a list that the compiled function empties
    for k, node in enumerate(placeholders):
        with own.graph.inserting_before(node):
            node.replace_all_uses_with(own.graph.call_function(operator.getitem, (arguments, k)))
        own.graph.erase_node(node)
    own.recompile()
    inputs = [node.meta["val"] for node in placeholders]
    own_order = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    with torch.no_grad():
        return compile_fx(own, [inputs], config_patches={**own_order, "fallback_random": True})


def spare_gloo(graph: fx.Graph) -> None:
    """Every all-gather of CPU tensors writes into a tensor that is allocated for it.

    torch 2.13 runs all_gather_into_tensor as gloo's coalesced all-gather, and two of those that run at the same time in one group
    corrupt the heap: without this, the slow test that runs four at a time (tests/test_parallelize.py) loses a rank within seconds.
    """
    for node in graph.find_nodes(op="call_function", target=_c10d.all_gather_into_tensor.default):
        output = node.meta["val"]
        if output.device.type != "cpu":
            continue
        with graph.inserting_before(node):
            out = graph.call_function(aten.empty.memory_format, (tuple(output.shape),), {"dtype": output.dtype, "device": output.device})
            filled = graph.call_function(_c10d.all_gather_into_tensor_out.default, node.args, {"out": out})
        out.meta, filled.meta = {"val": output}, dict(node.meta)
        node.replace_all_uses_with(filled)
        graph.erase_node(node)
