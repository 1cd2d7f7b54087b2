"""autosharding_pass: every kind of graph on every kind of mesh, every option, and reading a plan instead of solving."""

import math
import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autoshard.api import PassOptions, autosharding_pass, passes
from autoshard.layout import P, text
from autoshard.mesh import Device
from autoshard.planning.options import Infeasible
from autoshard.solution import Solution
from autoshard.strategies import Row
from autoshard.strategies.rows import RULES
from tests.helpers import TINY, given_graphs
from tests.helpers_models import Model, refusal
from tests.helpers_refusals import assert_refused

SLOW_DEVICE = Device("slow", 1e7, 1e7, 1e9, 1e12, launch=0.0)  # beside its compute, links are fast: tiny models are cut
FAST = dict(intra_node_bandwidth=1e14, inter_node_bandwidth=1e14, device=SLOW_DEVICE)
QUIET = dict(ilp_solution_file=None)
MESHES = [(8,), (1, 8), (2, 4), (2, 2, 2)]
KINDS = ["symbolic_trace", "exported", "module", "aten", "joint"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


every_form = cache(given_graphs)  # a graph of its own per call site would cost seconds; annotations are overwritten


def given(name: str, kind: str):
    return every_form(name)[kind]


def run(name: str = "mlp", kind: str = "symbolic_trace", **options):
    graph, example_inputs, _ = given(name, kind)
    options = {"mesh_shape": (2, 4), "objective": "serial", "example_inputs": example_inputs, **FAST, **QUIET, **options}
    return autosharding_pass(graph, **options)


@cache
def planned_once(**options) -> tuple[dict, bytes]:
    """The plan of the joint graph and its file: for tests that plan the same and read no annotation."""
    info = run(kind="joint", **options, ilp_solution_file="once.pkl")[1]
    return info, Path("once.pkl").read_bytes()


def write_plan(path) -> Solution:
    """The file of the plan of the joint graph, as the pass writes it."""
    info, content = planned_once()
    Path(path).write_bytes(content)
    return info["solution"]


def check_spec(spec: DTensorSpec, shape: tuple[int, ...], dtype: torch.dtype, mesh_shape: tuple[int, ...]) -> None:
    """A placement per mesh axis, each cut even, the tensor's own shape and type."""
    assert tuple(spec.device_mesh.shape) == mesh_shape and len(spec.placements) == len(mesh_shape)
    assert (tuple(spec.tensor_meta.shape), spec.tensor_meta.dtype) == (shape, dtype)
    for d, size in enumerate(shape):
        assert size % math.prod(n for n, p in zip(mesh_shape, spec.placements, strict=True) if p.is_shard(d)) == 0
    assert all(not p.is_shard() or p.dim < len(shape) for p in spec.placements)


def tensors_by_running(graph, example_inputs) -> dict[fx.Node, list]:
    """The tensors of every node but the output, by its metadata or by running it on the meta device."""
    seen: dict[fx.Node, list] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            seen[n] = pytree.tree_leaves(result)
            return result

    nodes = [n for n in graph.graph.nodes if n.op != "output"]
    if all("val" in n.meta for n in nodes):
        return {n: pytree.tree_leaves(n.meta["val"]) for n in nodes}
    Watch(graph).run(*example_inputs)
    return {n: seen[n] for n in nodes}


GIVEN = [("mlp", kind, mesh_shape) for kind in KINDS for mesh_shape in MESHES]
LONGER = [(name, kind, mesh_shape) for name in ("gpt2", "llama") for kind in ("exported", "joint") for mesh_shape in MESHES]


@pytest.mark.parametrize(("name", "kind", "mesh_shape"), [*GIVEN, *(pytest.param(*row, marks=pytest.mark.slow) for row in LONGER)])
def test_every_tensor_node_carries_a_legal_spec_and_every_parameter_is_in_the_map(name, kind, mesh_shape):
    graph, example_inputs, module = given(name, kind)
    for node in graph.graph.nodes:
        node.meta.pop("autoshard", None)
    annotated, info = run(name, kind, mesh_shape=mesh_shape)
    assert annotated is graph
    for node, tensors in tensors_by_running(graph, example_inputs).items():
        assert isinstance(node.meta.get("autoshard", ()), (DTensorSpec, tuple)), node
        specs = pytree.tree_leaves(node.meta.get("autoshard"), is_leaf=lambda leaf: leaf is None)
        if any(isinstance(t, torch.Tensor) for t in tensors):
            assert len(specs) == len(tensors), node
            for spec, tensor in zip(specs, tensors, strict=True):
                if isinstance(tensor, torch.Tensor):
                    check_spec(spec, tuple(tensor.shape), tensor.dtype, mesh_shape)
        else:
            assert "autoshard" not in node.meta
    assert info["objective"] == "serial" and 0 < info["bound_seconds"] <= info["cost_seconds"]
    written = [w for placed in info["solution"].layouts.values() for w in placed.outputs if w]
    assert sum("S(" in w for w in written) > len(written) / 3  # a plan that cuts; parameters may stay whole
    if kind != "aten":  # there the parameters came as plain inputs
        entries = {f"{m}.{a}": spec for m, row in info["tensor_sharding_map"].items() for a, spec in row["sharding"].items()}
        assert set(entries) == set(dict(module.named_parameters()))
        for n, p in module.named_parameters():
            check_spec(entries[n], tuple(p.shape), p.dtype, mesh_shape)
            assert info["solution"].parameters[n]["layout"] == info["solution"].layouts[n].outputs[0]


def test_keys_and_values_repeated_for_their_queries_are_laid_out_as_these():
    """No plan has the nodes that repeat them, but the given graph has."""
    graph, _, _ = given("llama", "exported")
    run("llama", "exported", mesh_shape=(2, 4), algo="megatron")
    repeats = [node for node in graph.graph.nodes if node.op == "call_function" and str(node.target) == "aten.expand.default"]
    found = []
    for node in (node for node in repeats if len(node.meta["val"].shape) == 5):
        (added,), (view,) = (node.args[0],), node.users
        keys, heads = added.args[0].meta["autoshard"], view.meta["autoshard"]
        assert keys.placements == heads.placements and tuple(heads.shape) == tuple(view.meta["val"].shape)
        assert node.meta["autoshard"].placements == tuple(Shard(p.dim + (p.dim > 1)) if p.is_shard() else p for p in keys.placements)
        found += keys.placements
    assert Shard(0) in found and Shard(1) in found  # batch and heads


def test_a_module_is_captured_and_its_graph_comes_back():
    module, inputs = TINY["mlp"]()
    for training in (True, False):
        graph, info = autosharding_pass(module, mesh_shape=(2, 4), example_inputs=inputs, training=training, **FAST, **QUIET)
        assert any("autoshard" in node.meta for node in graph.graph.nodes)
        assert info["solution"].training == training and info["objective"] == "overlapped"  # the default
        certificate = {"status", "objective", "cost_seconds", "bound_seconds", "gap"}
        assert {"autosharding_time", "tensor_sharding_map", "solution", "ops_of", "nodes_of", *certificate} == set(info)


def test_a_specs_placement_is_the_solutions():
    graph, info = run(kind="joint")
    for node in graph.graph.nodes:
        spec = node.meta.get("autoshard")
        placed = info["solution"].layouts.get(node.name)
        if isinstance(spec, DTensorSpec) and placed is not None:
            assert text(tuple(spec.placements)) == placed.outputs[0]


# -- options ---------------------------------------------------------------------------------------------------------------------

BAD = [
    (dict(mesh_shape=(0, 4)), "mesh shape is (0, 4)"),
    (dict(mesh_shap=(2, 4)), "unknown option 'mesh_shap'; did you mean 'mesh_shape'?"),
    (dict(inter_bandwidth=1e9), "unknown option 'inter_bandwidth'; did you mean 'inter_node_bandwidth'?"),
    (dict(mip_gap=1), "unknown option 'mip_gap'; did you mean 'mip_rel_gap'?"),
    (dict(preload=True), "unknown option 'preload'; did you mean 'preload_solution'?"),
    (dict(algo="megatronn"), "algo is 'megatronn'; expected one of alpa, data_parallel, fsdp, megatron, megatron_sp"),
    (dict(communications_backend="mpi"), "communications_backend is 'mpi'; expected one of nccl, gloo"),
    (dict(mip_rel_gap=-1), "mip_rel_gap is -1; expected a percentage of 0 or more"),
    (dict(mip_rel_gap="1"), "mip_rel_gap is '1'; expected a percentage of 0 or more"),
    (dict(run_checks="no"), "run_checks is 'no'; expected True or False"),
    (dict(tf32="no"), "tf32 is 'no'; expected True or False"),
    (dict(ilp_solution_file=5), "ilp_solution_file is 5; expected the name of a file"),
    (dict(preload_solution=True, ilp_solution_file=None), "preload_solution needs ilp_solution_file, the file to read"),
    (dict(preload_solution=True, ilp_solution_file="nowhere.pkl"), "there is no file nowhere.pkl"),
    (dict(inter_node_bandwidth=0), "inter_node_bandwidth is 0;"),
    (dict(time_limit=-1), "time_limit is -1;"),
    (dict(training=True), "training=True needs an nn.Module"),
    (dict(pins={"nothing": "R,R"}), "pin on 'nothing': the model has no such tensor"),
    (dict(pins=("a", "b")), "pins is a tuple"),
    (dict(forbid={"nothing": "R,R"}), "forbid on 'nothing': the model has no such tensor"),
    (dict(forbid={"layers.0.up.weight": "R"}), "forbid on 'layers.0.up.weight': nothing is forbidden by it, layout R has 1 placements"),
    (dict(forbid=("a", "b")), "forbid is a tuple"),
    (dict(devices_per_node=0), "devices_per_node is 0;"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD, ids=[str(o) for o, _ in BAD])
def test_a_bad_option_is_one_sentence(options, sentence):
    assert refusal(run, **options).startswith(sentence)


def test_a_call_without_a_mesh_a_graph_or_inputs_is_one_sentence():
    no_mesh = r"mesh_shape is missing; give the sizes of the mesh, slowest axis first, for example mesh_shape=\(2, 4\)"
    assert_refused(f"^{no_mesh}$", autosharding_pass, given("mlp", "joint")[0])
    no_graph = "graph is int; expected a torch.fx.GraphModule, a torch.export.ExportedProgram or an nn.Module"
    assert_refused(f"^{no_graph}$", autosharding_pass, 3, mesh_shape=(2, 4))
    assert_refused("^an nn.Module needs example_inputs", autosharding_pass, nn.Linear(8, 8), mesh_shape=(2, 4))


def test_the_published_options_have_their_published_defaults():
    published = {
        "algo": "alpa", "communications_backend": "nccl", "skip_fully_replicated": False, "time_limit": 10000, "mip_rel_gap": 0,
        "run_checks": False, "preload_solution": False, "ilp_solution_file": "ilp_solution.pkl", "skip_forward": False,
    }  # fmt: skip
    options = PassOptions(mesh_shape=(2, 4))
    assert {name: getattr(options, name) for name in published} == published


@pytest.mark.parametrize("name", ["nowhere/plan.json", "."])
def test_a_file_that_can_not_be_written_is_an_error_before_the_search(name, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "plan_graph", None)
    with pytest.raises(OSError, match="make it first|give the name of a file to write"):
        run(ilp_solution_file=str(tmp_path / name))


def test_skip_forward_leaves_out_the_map():
    assert "tensor_sharding_map" not in run(skip_forward=True)[1]
    assert "tensor_sharding_map" in run()[1]


def test_the_gap_is_a_percentage():
    assert PassOptions(mesh_shape=(2,), mip_rel_gap=5).planning().gap == 0.05


def test_skip_fully_replicated_cuts_every_op_that_can_be_cut():
    slow = dict(intra_node_bandwidth=1e6, inter_node_bandwidth=1e6, device="h100", objective="serial")  # so slow that all is replicated
    free, cut = (run(kind="joint", skip_fully_replicated=skip, **slow)[1]["solution"] for skip in (False, True))

    def whole(solution):
        ops = [p for n, p in solution.layouts.items() if p.inputs]
        return sum({*p.inputs, *(w for w in p.outputs if w)} == {"R,R"} for p in ops)

    assert whole(free) > 5 * max(whole(cut), 1) and cut.cost > free.cost


@pytest.mark.parametrize("algo", ["data_parallel", "fsdp", "megatron", "megatron_sp"])
def test_a_baseline_can_be_asked_for(algo):
    best = planned_once()[0]
    solution = planned_once(algo=algo)[0]["solution"]
    assert solution.pinned_scheme == solution.assumptions["algo"] == algo
    assert solution.cost >= best["cost_seconds"] * (1 - 1e-9)
    assert best["solution"].baselines[algo]["cost_seconds"] == pytest.approx(solution.cost, rel=1e-9)
    if algo == "data_parallel":
        assert {row["layout"] for row in solution.parameters.values()} == {"R,R"}


def test_gloo_is_priced_differently():
    gloo, nccl = planned_once(communications_backend="gloo", algo="fsdp"), planned_once(algo="fsdp")
    assert gloo[0]["cost_seconds"] > nccl[0]["cost_seconds"]


def test_checks_pass_on_a_right_plan_and_stop_a_wrong_row(monkeypatch):
    run(kind="joint", run_checks=True, mesh_shape=(2, 2))
    monkeypatch.setitem(RULES, "aten.gelu.default", lambda op, inputs: [Row((P(),), (P(),))])  # gelu of a sum is no sum of gelus
    matmul = next(n.name for n in given("mlp", "joint")[0].graph.nodes if "addmm" in n.name)
    with pytest.raises(ValueError, match="^run_checks: the plan does not compute what the graph computes: the output of gelu is"):
        run(kind="joint", run_checks=True, mesh_shape=(2,), pins={matmul: "P", "gelu": "P"})


@pytest.mark.parametrize("exported", [False, True])
def test_checks_run_with_the_values_that_the_graph_and_its_examples_have(exported):
    """Random ones are no offsets of bags: these begin with 0."""
    bags = Model(lambda m, x, offsets: m.bag(x, offsets), bag=nn.EmbeddingBag(8, 4, mode="sum").eval())
    inputs = (torch.tensor([1, 7, 2, 5]), torch.tensor([0, 3]))
    given = torch.export.export(bags, inputs) if exported else bags
    info = autosharding_pass(given, mesh_shape=(2,), example_inputs=None if exported else inputs, run_checks=True, objective="serial")[1]
    assert info["status"] == "optimal"


def test_pins_and_limits_reach_the_planner():
    weight = "layers.0.up.weight"
    assert run(kind="joint", pins={weight: "R,S(1)"})[1]["solution"].layouts[weight].outputs == ("R,S(1)",)
    with pytest.raises(Infeasible):
        run(kind="joint", memory_limit=100.0, mesh_shape=(2,), time_limit=20.0)


def test_forbidden_layouts_reach_the_planner():
    free = planned_once()[0]["solution"]
    weights = [name for name, row in free.parameters.items() if len(row["shape"]) == 2]
    had = {name: free.layouts[name].outputs[0] for name in weights}
    all_of_them = run(kind="joint", forbid={"*.weight": list(dict.fromkeys(had.values()))})[1]["solution"]
    assert not {all_of_them.layouts[name].outputs[0] for name in weights} & set(had.values())
    assert all_of_them.objective_seconds >= free.objective_bound * (1 - 1e-9)
    with pytest.raises(Infeasible, match="no plan exists under forbid layers.0.up.weight=R,R and algo=data_parallel"):
        run(kind="joint", algo="data_parallel", forbid={"layers.0.up.weight": "R,R"})


# -- reading a plan instead of solving ---------------------------------------------------------------------------------------------

AGAIN = """
import sys
sys.path.insert(0, ROOT)
from importlib import import_module
plan, planning, solving = map(import_module, ("autoshard.planning.plan", "autoshard.planning.solving", "autoshard.solvers.solve"))
from autoshard.layout import text
from torch.utils import _pytree as pytree
from tests.helpers import TINY, given_graphs
def forbidden(*args, **kwargs): raise AssertionError("solved")
plan.solve = planning.solve = solving.solve = forbidden
from autoshard.api import autosharding_pass
graph, inputs, module = given_graphs("mlp")["exported"]
graph, info = autosharding_pass(graph, mesh_shape=(2, 4), preload_solution=True, ilp_solution_file=FILE)
for n in graph.graph.nodes:
    for spec in pytree.tree_leaves(n.meta.get("autoshard", ())): print(n.name, text(spec.placements))
print("status", info["status"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["plan.pkl", "plan.json"])
def test_a_saved_plan_annotates_alike_in_a_new_process_without_solving(file, tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    graph, info = run(kind="exported", ilp_solution_file=str(tmp_path / file))
    script = AGAIN.replace("ROOT", repr(root)).replace("FILE", repr(str(tmp_path / file)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    here = [
        f"{n.name} {text(spec.placements)}" for n in graph.graph.nodes for spec in pytree.tree_leaves(n.meta.get("autoshard", ()))
    ]
    assert done.stdout.splitlines() == [*here, "status optimal"]
    assert len(here) > 15 and any("S(" in line for line in here)


def test_nothing_is_solved_or_written_when_a_plan_is_preloaded(tmp_path, monkeypatch):
    file = tmp_path / "ilp_solution.pkl"
    solved = write_plan(file)
    written = file.read_bytes()
    monkeypatch.setattr(passes, "plan_graph", None)  # calling it would raise
    _, info = run(kind="joint", preload_solution=True, ilp_solution_file=str(file))
    assert info["solution"] == solved and info["autosharding_time"] == 0
    assert file.read_bytes() == written


def test_the_plan_of_another_graph_or_mesh_is_refused():
    write_plan("plan.pkl")
    read = dict(preload_solution=True, ilp_solution_file="plan.pkl")
    assert_refused("^plan.pkl does not fit this graph: .*; plan again without preload_solution$", run, kind="exported", **read)
    other_mesh = "^plan.pkl does not fit this graph: planned for mesh 2x4, but this mesh is 4x2; plan again without preload_solution$"
    assert_refused(other_mesh, run, kind="joint", mesh_shape=(4, 2), **read)


@pytest.mark.parametrize(
    "options, said",
    [(dict(device="a100"), "prices"), (dict(inter_node_bandwidth=1e9), "prices"), (dict(algo="fsdp"), "algorithm"), (dict(), None)],
)
def test_a_preloaded_plan_is_not_judged_by_a_certificate_for_something_else(options, said, caplog):
    write_plan("plan.pkl")
    _, info = run(kind="joint", preload_solution=True, ilp_solution_file="plan.pkl", **options)
    if said is None:
        assert info["status"] != "unjudged" and info["bound_seconds"] > 0 and "planned for other" not in caplog.text
    else:
        assert (info["status"], info["cost_seconds"], info["bound_seconds"]) == ("unjudged", float("inf"), 0.0)
        assert f"plan.pkl was planned for other {said}" in caplog.text


def test_a_preloaded_plan_of_other_shapes_or_dtypes_is_not_judged_and_one_beyond_memory_is_refused(caplog):
    def graph(width, dtype):
        net = nn.Sequential(nn.Linear(width, 4 * width, dtype=dtype), nn.GELU())
        return fx.symbolic_trace(net), (torch.empty(64, width, device="meta", dtype=dtype),)

    def asked(width, dtype=torch.float32, **more):
        module, inputs = graph(width, dtype)
        return autosharding_pass(module, mesh_shape=(2, 2), example_inputs=inputs, ilp_solution_file="plan.pkl", **more)[1]

    peak = asked(64)["solution"].peak_bytes
    assert asked(64, preload_solution=True)["status"] == "optimal"
    for other in ((128,), (64, torch.bfloat16)):
        caplog.clear()
        assert asked(*other, preload_solution=True)["status"] == "unjudged"
        assert "plan.pkl was planned for other shapes, dtypes or constants: its layouts" in caplog.text
    with pytest.raises(ValueError, match="^plan.pkl takes .* bytes per device, more than memory_limit=.*; plan again without preload"):
        asked(64, preload_solution=True, memory_limit=peak / 2)


def test_the_output_node_says_in_which_layouts_results_are_returned():
    """A gradient that its op gives as Partial is returned reduced."""
    block = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    parameters, x = dict(block.named_parameters()), torch.randn(4096, 512)

    def step(x, *given):
        y = torch.func.functional_call(block, dict(zip(parameters, given)), (x,)).pow(2).mean()
        return (y.detach(), *torch.autograd.grad(y, given))

    joint = make_fx(step, tracing_mode="fake")(x, *(p.detach().requires_grad_() for p in parameters.values()))
    graph, info = autosharding_pass(joint, mesh_shape=(2, 4), objective="serial", ilp_solution_file=None)
    node = next(node for node in graph.graph.nodes if node.op == "output")
    returned = [text(spec.placements) for spec in pytree.tree_leaves(node.meta["autoshard"])]
    assert returned == list(info["solution"].results.values()) and len(returned) == 7
    given = [text(source.meta["autoshard"].placements) for source in pytree.tree_leaves(node.args)]
    assert returned != given and any("P" in layout for layout in given) and not any("P" in layout for layout in returned)


def test_one_folder_with_and_without_forbid_gives_each_its_own_answer(tmp_path):
    """A plan is read where it is asked for, and only if it obeys: never the one that was made without `forbid`."""
    weight = "layers.0.up.weight"
    free = write_plan("ilp_solution.pkl")
    had = free.layouts[weight].outputs[0]
    read = dict(kind="joint", preload_solution=True, ilp_solution_file="ilp_solution.pkl")
    assert run(**read)[1]["solution"] == free  # the control: without forbid what lies there is right
    assert run(**read, pins={weight: had})[1]["solution"] == free
    sentence = f"ilp_solution.pkl does not obey forbid {weight}={had}; plan again without preload_solution"
    assert refusal(run, **read, forbid={weight: had}) == sentence
    other = run(kind="joint", ilp_solution_file="ilp_solution.pkl", forbid={weight: had})[1]["solution"]
    assert other.layouts[weight].outputs[0] != had and os.listdir(tmp_path) == ["ilp_solution.pkl"]
    assert run(**read, forbid={weight: had})[1]["solution"] == other
    with pytest.raises(ValueError, match="^ilp_solution.pkl does not obey pin .*; plan again without preload_solution$"):
        run(**read, pins={weight: had})
    with pytest.raises(ValueError, match="forbid on 'nothing': the model has no such tensor"):
        run(**read, forbid={"nothing": "R,R"})


class Runs:
    def __reduce__(self):
        return (os.system, ("touch pwned",))


def test_a_malicious_file_is_refused_and_not_run():
    with open("evil.pkl", "wb") as file:
        pickle.dump({"x": Runs()}, file)
    with pytest.raises(ValueError, match="evil.pkl wants to use .*system, which a plan never needs; it was not run"):
        run(preload_solution=True, ilp_solution_file="evil.pkl")
    assert not os.path.exists("pwned")


def test_a_plan_is_written_where_it_is_said_and_nowhere_else(tmp_path):
    graph, example_inputs, _ = given("mlp", "symbolic_trace")
    autosharding_pass(graph, mesh_shape=(2,), example_inputs=example_inputs, **FAST)
    assert os.listdir(tmp_path) == []
    autosharding_pass(graph, mesh_shape=(2,), example_inputs=example_inputs, **{**FAST, "ilp_solution_file": "ilp_solution.pkl"})
    assert os.listdir(tmp_path) == ["ilp_solution.pkl"]
