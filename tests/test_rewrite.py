"""The pass with rewrite=True: this rank's graph computes what the given graph does, with the collectives of the plan in it."""

import importlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import autoshard
from autoshard.exports import spmd_type
from autoshard.layout import parse
from models import gpt2, mlp
from tests.helpers_models import Model, said
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused

LINKS = {"intra_node_bandwidth": 1e14, "inter_node_bandwidth": 1e14, "device": "cpu"}


def run(rank: int, module: nn.Module, inputs: tuple, shape: tuple, training: bool, options: dict, by_inductor: bool = False) -> tuple:
    """The largest error of outputs and gradients, the collectives of the graph, and how far off it is with one of them left out."""
    if training:
        given, options = module, {"training": True, "example_inputs": inputs, **options}
    else:
        given = torch.export.export(module, inputs, strict=False)
    graph, info = autoshard.autosharding_pass(given, mesh_shape=shape, **LINKS, **options, rewrite=True)
    solution, device_mesh = info["solution"], init_device_mesh("cpu", shape)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers()), **{f"input_{k}": x for k, x in enumerate(inputs)}}

    def local(name: str) -> torch.Tensor:
        layout = parse(solution.layouts[name].outputs[0])
        return distribute_tensor(held.get(name, torch.ones(())).detach(), device_mesh, layout).to_local()

    expected = module(*inputs)
    wanted = {"output:0": expected}
    if training:
        module.zero_grad()
        expected.backward()
        wanted |= {f"gradient:{name}": p.grad for name, p in module.named_parameters()}

    def error(function) -> float:
        with torch.no_grad():
            outputs = dict(zip(info["rank_outputs"], function(*map(local, info["rank_inputs"])), strict=True))
        full = {key: DTensor.from_local(outputs[key], device_mesh, parse(solution.results[key])).full_tensor() for key in wanted}
        return max(float((full[key] - one).abs().max() / one.abs().max()) for key, one in wanted.items())

    found = error(torch.compile(graph) if by_inductor else graph)
    reduces = [node for node in graph.graph.nodes if node.target is torch.ops._c10d_functional.all_reduce.default]
    for node in reduces:  # planted: partial sums stay partial sums
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()
    return found, len(reduces), error(graph) if reduces else None


CASES = [
    pytest.param(mlp, True, (2,), {"pins": {"input_0": "S(0)", "layers.0.up.weight": "R"}}, False),
    pytest.param(gpt2, False, (2, 2), {"forbid": {"*.weight": "R,R"}}, False, marks=pytest.mark.slow),
    pytest.param(gpt2, False, (2, 2), {"forbid": {"*.weight": "R,R"}}, True, marks=pytest.mark.slow),
    pytest.param(gpt2, True, (2, 2), {}, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("library", "training", "shape", "options", "by_inductor"), CASES)
def test_the_graph_of_a_rank_computes_what_the_given_graph_does(library, training, shape, options, by_inductor):
    module, inputs = library.tiny(loss=training) if library is gpt2 else library.tiny()
    module, generator = module.to_empty(device="cpu"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.2, generator=generator)
    inputs = tuple(
        torch.randint(0, 128, x.shape, generator=generator) if x.dtype == torch.int64 else torch.randn(x.shape, generator=generator)
        for x in inputs
    )
    for error, reduces, planted in results(2 * len(shape), run, module, inputs, shape, training, options, by_inductor):
        assert error < 1e-4 and (not reduces or planted > 1e-2)
        assert reduces or not training


def refused(rank: int) -> tuple[str, str]:
    noisy, inputs = Model(lambda self, x: self.a(x) * torch.rand_like(x), a=nn.Linear(8, 8)), (torch.zeros(8, 8),)
    graph = torch.export.export(noisy, inputs)
    return tuple(said(autoshard.autosharding_pass, graph, mesh_shape=shape, rewrite=True, **LINKS) for shape in ((2,), (4,)))


def test_what_no_rank_can_run_is_refused():
    graph = torch.export.export(nn.Linear(8, 8), (torch.zeros(8, 8),))
    assert_refused("no processes to run on", autoshard.autosharding_pass, graph, mesh_shape=(2,), rewrite=True, **LINKS)
    for random, number in results(2, refused):
        assert "the graph draws random numbers" in random and "2 ranks run, but the plan is for 4" in number


@torch.library.custom_op("tests_rewrite::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def of_a_library(rank: int) -> tuple[str, bool]:
    graph = torch.export.export(Model(lambda self, x: doubled(x)), (torch.zeros(8, 8),))
    without = said(autoshard.autosharding_pass, graph, mesh_shape=(2,), rewrite=True, **LINKS)
    autoshard.register_rule("tests_rewrite.doubled.default", "S(0) -> S(0)")
    own, info = autoshard.autosharding_pass(graph, mesh_shape=(2,), rewrite=True, pins={"input_0": "S(0)"}, **LINKS)
    rows = torch.arange(32.0).reshape(4, 8) + 32 * rank
    return without, own(rows)[0].equal(2 * rows)


def test_an_operator_of_a_library_runs_in_a_graph_of_a_rank_once_it_has_a_rule():
    for without, right in results(2, of_a_library):
        assert without.startswith("tests_rewrite.doubled.default has no rule, so it may draw random numbers") and right


# -- types of spmd_types, where it is installed --------------------------------------------------------------------------------------

LAYOUTS = ["R,R", "S(0),R", "R,S(1)", "S(1),S(1)", "S(0),S(1)", "P,S(0)", "P,P", "R,P(max)"]


@pytest.mark.parametrize("written", LAYOUTS)
def test_types_of_spmd_types_are_those_of_the_layouts(written):
    spmd = pytest.importorskip("spmd_types")
    layout, axes = parse(written), ("a", "b")
    found = spmd_type(layout, axes, 2)
    assert (found is None) == ("max" in written)
    if found is not None:  # back again by the package's own conversion
        dims = {axis: dim for dim, of in enumerate(found.partition_spec) for axis in (of if isinstance(of, tuple) else (of,)) if axis}
        types = [spmd.S(dims[axis]) if axis in dims else found.local_type[axis] for axis in axes]
        assert tuple(map(spmd.spmd_type_to_dtensor_placement, types)) == tuple(layout)


class Checked(torch.fx.Interpreter):
    """Runs a rank's graph under the package's checker, and compares what it infers with the types on the nodes. Collectives, and
    what is inside of a redistribution, have types that are stated; its rules for sums know torch's functions, not ATen's operators."""

    def __init__(self, graph: torch.fx.GraphModule, spmd):
        super().__init__(graph)
        self.spmd, self.agreed, self.other = spmd, 0, []

    def run_node(self, n: torch.fx.Node):
        stated, spmd = n.meta.get("spmd_type"), self.spmd
        read = [spmd.get_local_type(x) for x in self.map_nodes_to_values(n.all_input_nodes, n) if isinstance(x, torch.Tensor)]
        is_stated = stated is None or n.op != "call_function" or "c10d" in str(n.target)
        if not is_stated and all(of and spmd.P not in of.values() for of in read):
            found = super().run_node(n)
            if not isinstance(found, torch.Tensor):
                return found
            inferred = {str(axis): kind for axis, kind in spmd.get_local_type(found).items()}
            wanted = {str(spmd.normalize_axis(axis)): kind for axis, kind in stated.local_type.items()}
            # a product over a sharded dim is a sum to be made, which a local program doesn't know
            same = all(kind is wanted[axis] or (kind, wanted[axis]) == (spmd.V, spmd.P) for axis, kind in inferred.items())
            self.agreed += same
            self.other += [] if same else [n.name]
            if inferred == wanted:
                return found
        with spmd.no_typecheck():
            found = super().run_node(n)
            if stated is None or not isinstance(found, torch.Tensor):
                return found
            found = found.clone()  # without the type that it had
        return spmd.assert_type(found, stated)


def check_types(rank: int, module: nn.Module, inputs: tuple, training: bool) -> tuple[int, int, list, list]:
    """How many nodes have types, how many of these the checker infers, those that it contradicts, and those of a graph with wrong ones."""
    spmd, checker = importlib.import_module("spmd_types"), importlib.import_module("spmd_types.checker")
    options = {"training": True, "example_inputs": inputs} if training else {}
    given = module if training else torch.export.export(module, inputs, strict=False)
    forbid = {"*.weight": "R,R"}
    graph, info = autoshard.autosharding_pass(given, mesh_shape=(2, 2), rewrite=True, forbid=forbid, **LINKS, **options)
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=info["solution"].mesh.axis_names)
    values = [torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in graph.graph.find_nodes(op="placeholder")]
    checked = Checked(graph, spmd)
    with torch.no_grad(), spmd.set_current_mesh(device_mesh), checker.typecheck(local=True):
        checked.run(*values)
        typed = [node for node in graph.graph.nodes if "spmd_type" in node.meta]
        other = spmd.SpmdType(dict.fromkeys(info["solution"].mesh.axis_names, spmd.V))
        for node in graph.graph.find_nodes(op="placeholder"):  # planted: all ranks hold something else
            node.meta["spmd_type"] = other
        planted = Checked(graph, spmd)
        planted.run(*values)
    return len(typed), checked.agreed, checked.other, planted.other


@pytest.mark.parametrize(("library", "training"), [(mlp, True), pytest.param(gpt2, False, marks=pytest.mark.slow)])
def test_the_checker_of_spmd_types_agrees_with_the_types_on_the_nodes(library, training):
    pytest.importorskip("spmd_types")
    module, inputs = library.tiny(loss=training)
    module = gpt2.initialised(module)
    inputs = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in inputs)
    for typed, agreed, other, planted in results(4, check_types, module, inputs, training):
        assert typed > 40 and agreed > 10 and other == [] and planted
