"""Pins, forbidden layouts and questions by the names of the graph that was given: nodes, module paths, source lines, globs of them."""

import inspect
from functools import cache

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard.api import autosharding_pass
from autoshard.layout import text
from models import mlp
from tests.helpers_models import refusal
from tests.test_passes import FAST


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(mlp.Block(32, 64) for _ in range(2))
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        low, high = x.chunk(2, -1)
        y = torch.cat([high, low], -1) * 2.0
        return self.head(y).relu()


LINES, FIRST = inspect.getsourcelines(Net.forward)
LINE = f"test_pass_names.py:{FIRST + 4}"  # the line of the cat
assert "torch.cat" in LINES[4]


@cache
def graphs():
    module, x = Net(), torch.randn(16, 32)
    exported = torch.export.export(module, (x,), strict=False)
    traced = make_fx(lambda *args: torch.func.functional_call(module, dict(zip(dict(module.named_parameters()), args)), args[-1:]))
    return {
        "exported": (exported, None), "decomposed": (exported.run_decompositions(), None),
        "symbolic_trace": (fx.symbolic_trace(module), (x,)),
        "make_fx": (traced(*(p.detach() for p in module.parameters()), x), None),
    }  # fmt: skip


def run(form, **options):
    graph, inputs = graphs()[form]
    annotated, info = autosharding_pass(
        graph, mesh_shape=(2, 2), example_inputs=inputs, ilp_solution_file=None, objective="serial", **FAST, **options
    )
    return {n.name: n.meta["autoshard_node"] for n in annotated.graph.nodes if "autoshard_node" in n.meta}, info


def computed(form):
    """A few nodes of each kind of op, and some of their layouts."""
    names = [n.name for n in graphs()[form][0].graph.nodes if n.op.startswith("call_")]
    return [n for n in names if n.startswith(("linear", "addmm", "gelu", "layers_", "cat", "mul", "relu", "add", "t_"))][:6]


NODES = [(form, n) for form in ("exported", "decomposed", "symbolic_trace", "make_fx") for n in range(5)]


@pytest.mark.parametrize("form, n", [pytest.param(*one, marks=[] if one[1] == 0 else pytest.mark.slow) for one in NODES])
@pytest.mark.parametrize("layout", ["S(0),R", "*,S(1)"])
def test_a_pin_on_a_node_is_the_layout_of_what_the_node_computes(form, n, layout):
    name = computed(form)[n]
    nodes, _ = run(form, pins={name: layout})
    wanted = layout.split(",")
    had = text(tuple(nodes[name].output.placements)).split(",")
    assert all(w in ("*", h) for w, h in zip(wanted, had)), (name, had)


MEANT = [
    ("exported", "cat*", "cat"), ("exported", "gelu*", "gelu_1"), ("exported", "head", "linear_4"), ("exported", "layers.0.up", "linear"),
    ("exported", "layers.?.up", "linear_2"), ("exported", LINE, "mul"), ("decomposed", "gelu*", "gelu"), ("decomposed", LINE, "mul"),
    ("decomposed", "layers.1.down", "addmm_3"), ("decomposed", "head", "addmm_4"), ("symbolic_trace", "gelu*", "gelu_1"),
    ("symbolic_trace", "layers.1.up", "layers_1_up"), ("symbolic_trace", "head", "head"), ("make_fx", "gelu*", "gelu"),
]  # fmt: skip


@pytest.mark.parametrize(
    "form, name, node", [pytest.param(*row, marks=[] if k % 3 == 0 else pytest.mark.slow) for k, row in enumerate(MEANT)]
)
def test_globs_module_paths_and_source_lines_mean_results(form, name, node):
    free, _ = run(form)
    had = text(tuple(free[node].output.placements))
    nodes, _ = run(form, forbid={name: had})
    assert text(tuple(nodes[node].output.placements)) != had


def test_one_result_of_several_is_pinned_by_the_node_that_takes_it():
    graph, _ = graphs()["exported"]
    items = [n.name for n in graph.graph.nodes if n.name.startswith("getitem")]
    nodes, _ = run("exported", pins={items[1]: "S(0),R"})
    assert text(tuple(nodes[items[1]].output.placements)) == "S(0),R"


WRONG = {
    "liner_1": "near are linear_1", "gelu_7": "near are gelu_1, gelu", "layers.0.upp": "near are layers.0.up",
    "input_9": "near are input_0",
    "test_pass_names.py:1": "near are test_pass_names.py", "heed": "near are head",
    "liner_*": "near are linear", "gelo*": "near are gelu",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_names_the_nearest(name):
    sentence = refusal(run, "exported", pins={name: "R,R"})
    what = "no tensor of the model matches" if "*" in name else "the model has no such tensor"
    assert sentence.startswith(f"pin on {name!r}: {what}; {WRONG[name]}"), sentence


def test_explain_check_and_the_problem_take_the_graph_and_its_names():
    graph, _ = graphs()["exported"]
    nodes, info = run("exported")
    plan = info["solution"]
    explained = autoshard.explain(graph, None, plan, "linear_1", most=1)
    assert explained.name == info["ops_of"]["linear_1"][-1] and explained.layout == text(tuple(nodes["linear_1"].output.placements))
    assert autoshard.explain(graph, None, plan, LINE, most=0).kind in ("block", "op")
    assert autoshard.check(graph, None, plan).ok
    choices = nodes["linear_1"].alternatives()
    assert sum(one.planned for one in choices) == len(nodes["linear_1"].ops) and len(choices) > 5
    assert len(autoshard.problem_of(graph, None, plan).names) == plan.counts["nodes"]
