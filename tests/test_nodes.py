"""What a plan says about the nodes of a graph that was given: specs of results and operands, redistributions and seconds.

The reference runs every node of the given graph on one device. The other side runs the nodes one by one on simulated ranks, with each
tensor in the layout of the annotation and moved by the annotated steps only, and compares what every node computes and reads.
"""

import itertools
import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autoshard.api import autosharding_pass
from autoshard.capture import capture_module
from autoshard.layout import is_even, parse, text
from autoshard.lower.program import Redistribute, run_record, slot_of
from autoshard.lower.run import SimulatedRanks
from autoshard.lower.sharding import local_tensors
from autoshard.torch_private import DTensorSpec, dynamo_config, dynamo_graph_capture_for_export
from models import bert, dlrm, gpt2, llama, mlp, moe, resnet, unet
from tests.helpers import difference, joined
from tests.test_passes import FAST


class Pieces(nn.Module):
    """Nodes with several results, views, writes in place, and a tensor that is read twice by one node."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, x):
        a, b = self.mix(self.norm(x)).chunk(2, -1)
        c, d = torch.split(a * a, [4, 12], dim=1)
        e = torch.cat([c, d], 1)
        e = e.mul_(2.0).transpose(0, 1).contiguous()
        best, _ = torch.topk(b, 4, dim=-1)
        return e.sum(0) + best.mean(), F.relu(b + 1.0, inplace=True)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(32, 4, batch_first=True), nn.RMSNorm(32)

    def forward(self, x):
        y, _ = self.attend(x, x, x, need_weights=False)
        return self.norm(x + y).square().mean()


MODELS = {
    "mlp": mlp.tiny, "gpt2": gpt2.tiny, "llama": llama.tiny, "bert": bert.tiny, "dlrm": dlrm.tiny, "moe": moe.tiny, "resnet": resnet.tiny,
    "unet": unet.tiny, "pieces": lambda: (Pieces(), (torch.empty(8, 16, 16),)), "encoder": lambda: (Encoder(), (torch.empty(8, 16, 32),)),
}  # fmt: skip


@cache
def filled(name: str) -> tuple[nn.Module, tuple]:
    module, inputs = MODELS[name]()
    module, generator = module.to_empty(device="cpu").eval(), torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(values(tensor, generator))
    return module, tuple(values(x, generator) for x in inputs)


def values(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Small ones; of one dim positive, as variances are."""
    shape = tuple(map(int, x.shape))
    if not x.is_floating_point():
        return torch.randint(0, 2, shape, generator=generator).to(x.dtype)
    drawn = 0.1 * torch.randn(shape, generator=generator).to(x.dtype)
    return drawn.abs() + 0.01 if len(shape) == 1 else drawn


def exported(module, inputs):
    return torch.export.export(module, inputs, strict=False)


def flat(module, inputs):
    names = list(dict(module.named_parameters()))

    def run(*values):
        return torch.func.functional_call(module, dict(zip(names, values)), values[len(names) :])

    return make_fx(run)(*(p.detach() for p in module.parameters()), *inputs)


def traced_by_dynamo(module, inputs):
    """With sizes as numbers, whatever sizes of the module dynamo saw before in this process."""
    with dynamo_config.patch(automatic_dynamic_shapes=False):
        return dynamo_graph_capture_for_export(module)(*inputs)


FORMS = {
    "exported": exported,
    "decomposed": lambda module, inputs: exported(module, inputs).run_decompositions(),
    "make_fx": flat,
    "dynamo": traced_by_dynamo,
    "joint": lambda module, inputs: capture_module(module, inputs, training=True).fx_graph,
    "symbolic_trace": lambda module, inputs: fx.symbolic_trace(module),
}
TRACED = ("mlp", "resnet")  # by torch.fx.symbolic_trace
UNTRAINED = {"pieces": "two results of which one is no scalar"}
CASES = [(n, f) for n in MODELS for f in FORMS if f != "symbolic_trace" or n in TRACED]
QUICK = [("mlp", "symbolic_trace"), ("gpt2", "dynamo")]


@cache
def annotated(name: str, form: str):
    module, inputs = filled(name)
    graph = FORMS[form](module, inputs)
    inputs = inputs if form == "symbolic_trace" else None
    return autosharding_pass(graph, mesh_shape=(2, 2), example_inputs=inputs, ilp_solution_file=None, **FAST)


class Unsharded(fx.Interpreter):
    """Every node on one device."""

    def __init__(self, module):
        super().__init__(module)
        self.seen: dict[str, object] = {}

    def run_node(self, n):
        result = super().run_node(n)
        self.seen[n.name] = pytree.tree_map_only(torch.Tensor, torch.clone, result)  # a later node may write into it
        return result


def reference(graph, name: str) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    module, inputs = filled(name)
    given = []
    waiting = list(inputs)
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            continue
        if isinstance(graph, ExportedProgram) and (held := _held(graph, node.name)) is not None:
            given.append(held)
            continue
        x = node.meta.get("val")
        given.append(values(x, generator) if isinstance(x, torch.Tensor) else waiting.pop(0))
    interpreter = Unsharded(graph.graph_module if isinstance(graph, ExportedProgram) else graph)
    with torch.no_grad():
        interpreter.run(*given, enable_io_processing=False)
    return interpreter.seen


def _held(program: ExportedProgram, placeholder: str):
    signature = program.graph_signature
    name = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.get(placeholder)
    if name is not None:
        return {**program.state_dict, **program.constants}[name]
    constant = signature.inputs_to_lifted_tensor_constants.get(placeholder)
    return None if constant is None else program.constants[constant]


class Sharded:
    """The nodes one by one on the ranks of a mesh; `worst` is how far a result or an operand is from the reference."""

    def __init__(self, graph, info, module):
        self.nodes = [n.meta["autoshard_node"] for n in graph.graph.nodes if "autoshard_node" in n.meta]
        self.plan, self.graph, self.mesh = info["solution"], self.nodes[0]._costs.graph, info["solution"].mesh
        self.world, self.module, self.worst = SimulatedRanks(self.mesh), module, 0.0
        self.held: dict[tuple, list] = {}  # as computed, then as they wait for readers
        self.waiting: dict[tuple, list] = {}
        self.compared = 0

    def moved(self, locals_, one, value):
        tensor = self.graph.tensor(value)
        slots = [slot_of(name, value, tensor, parse(layout), self.mesh) for name, layout in (("a", one.source), ("b", one.target))]
        self.world.held["a"] = locals_
        even = all(is_even(tensor.shape, layout, self.mesh) for step in one.steps for layout in (step.before, step.after))
        return self.world.redistribute(Redistribute(*slots, one.steps, None if even else tensor.shape)) if one.steps else locals_

    def compare(self, locals_, spec, expected, what):
        whole, apart = joined(list(locals_), tuple(spec.placements), self.mesh)
        wrong = max(apart, difference(whole, expected.to(whole.dtype)))
        assert wrong < 2e-4, (what, text(tuple(spec.placements)), wrong)
        self.compared += 1

    def run(self, expected):
        for node in self.nodes:
            for i, name in zip(node._numbers, node.ops, strict=True):
                self.op(node, i, name, expected)
            for (k, value), spec in zip(enumerate(pytree.tree_leaves(node.values, is_leaf=_is_named)), _specs(node.output)):
                if value is not None and node.name != "output" and self.graph.index[value[0]] in _numbers(self.held):
                    whole = pytree.tree_leaves(expected[node.name])[k]
                    self.compare(self.held[self.graph.index[value[0]], value[1]], spec, whole, node.name)

    def op(self, node, i, name, expected):
        op = self.graph.ops[i]
        outputs = self.plan.layouts[name].outputs
        if op.is_placeholder:
            own = pytree.tree_leaves(node.values, is_leaf=_is_named) == [(name, 0)]
            whole = expected[node.name] if own else self.module.state_dict()[name]
            results = [local_tensors(whole, parse(outputs[0]), self.mesh)]
        else:
            slots = []
            for a, value in enumerate(op.inputs):
                one = node.redistributions["input", i, a]
                locals_ = self.moved(self.waiting[value], one, value)
                slots.append(slot_of(f"in{a}", value, self.graph.tensor(value), parse(one.target), self.mesh))
                self.world.held[f"in{a}"] = locals_
                for operand in (x for x in node.operands if (name, a) in x.reads and x.name in expected):
                    if isinstance(expected[operand.name], torch.Tensor) and tuple(operand.spec.shape) == self.graph.tensor(value).shape:
                        if (name, a) == operand.reads[0]:
                            assert text(tuple(operand.spec.placements)) == one.target
                            self.compare(locals_, operand.spec, expected[operand.name], (node.name, operand.name))
            outs = tuple(
                None if t is None else slot_of(f"out{k}", (i, k), t, parse(outputs[k]), self.mesh) for k, t in enumerate(op.outputs)
            )
            results = list(zip(*self.world.run(run_record(self.graph, i, tuple(slots), outs, self.mesh))))
        for k, locals_ in enumerate(results):
            self.held[i, k] = self.waiting[i, k] = list(locals_)
            if ("shared", i, k) in node.redistributions:
                self.waiting[i, k] = self.moved(list(locals_), node.redistributions["shared", i, k], (i, k))


def _numbers(held):
    return {i for i, _ in held}


def _is_named(leaf):
    return leaf is None or (isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], str))


def _specs(output):
    return pytree.tree_leaves(output, is_leaf=lambda leaf: leaf is None or isinstance(leaf, DTensorSpec))


TRAINED = [(name, form) for name, form in CASES if form != "joint" or name not in UNTRAINED]
PARAMETERS = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in TRAINED]


@pytest.mark.parametrize(("name", "form"), PARAMETERS)
def test_nodes_run_one_by_one_as_annotated_compute_what_the_graph_computes(name, form):
    graph, info = annotated(name, form)
    sharded = Sharded(graph, info, filled(name)[0])
    with torch.no_grad():
        sharded.run(reference(graph, name))
    assert sharded.compared > len(sharded.nodes)  # results and operands


@pytest.mark.parametrize(("name", "form"), PARAMETERS)
def test_every_tensor_node_has_specs_and_their_costs_add_up_to_the_plans(name, form):
    graph, info = annotated(name, form)
    nodes = [n for n in graph.graph.nodes if "autoshard_node" in n.meta]
    seconds = [s for n in nodes for s in (n.meta["autoshard_node"].seconds, n.meta["autoshard_node"].redistribution_seconds)]
    assert math.fsum(seconds) == pytest.approx(info["solution"].cost, rel=1e-12)
    for node in nodes:
        tensors = [source for source in _arguments(node) if isinstance(source.meta.get("autoshard"), DTensorSpec)]
        named = [operand.name for operand in node.meta["autoshard_node"].operands]
        assert named[: len(tensors)] == [source.name for source in tensors], node
    of = info["ops_of"]
    assert sorted(itertools.chain(*of.values())) == sorted(op for op in info["nodes_of"]) and set(info["nodes_of"].values()) <= set(of)
    assert set(info["nodes_of"]) == {op.name for op in nodes[0].meta["autoshard_node"]._costs.graph.ops}


def _arguments(node):
    found = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found
