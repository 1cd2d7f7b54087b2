"""The pass with rewrite=True: this rank's graph computes what the given graph does, with the collectives of the plan in it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import autoshard
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
