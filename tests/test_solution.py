import json
import math
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.graph import Graph, Op
from autoshard.mesh import Axis, Device, Mesh
from autoshard.solution import Pipeline, PipelineStage, Placed, Solution, differences, load, misfits, replay
from tests.helpers_refusals import assert_refused
from tests.helpers_solutions import MESH, linear_graph, linear_solution

SUFFIXES = (".json", ".pkl", ".dill", "")


# --- the record


@pytest.mark.parametrize(("cost", "bound", "gap"), [(2.0, 2.0, 0.0), (2.0, 1.0, 0.5), (math.inf, 0.0, math.inf), (0.0, 0.0, 0.0)])
def test_the_gap_is_relative_to_the_cost(cost, bound, gap):
    assert linear_solution(cost=cost, bound=bound).gap == gap


def test_numpy_numbers_tuples_and_infinities_become_plain_data():
    solution = linear_solution(counts={"nodes": np.int64(3)}, baselines={"fsdp": {"cost_seconds": math.inf, "peak_bytes": np.float32(2)}})
    assert solution.counts == {"nodes": 3} and type(solution.counts["nodes"]) is int
    assert solution.baselines == {"fsdp": {"cost_seconds": None, "peak_bytes": 2.0}}
    assert solution.parameters["w"]["shape"] == [8, 8]


def test_what_is_no_plain_data_is_refused_by_name():
    assert_refused(r"assumptions\['device'\] holds a Device", linear_solution, assumptions={"device": MESH.device})


def test_an_op_without_hubs_has_none_per_output():
    assert Placed(("R",), ("R", None)).hubs == (None, None)


def test_a_pipeline_knows_its_devices_its_groups_and_its_smallest_memory():
    stage = PipelineStage(
        0, 2, 0, (0, 1), "h100", (2,), 1.0, 2.0, 0.1, 0.2, 1e9, 2, False, {"w": "S(0)"}, {"mm": Placed(("R",), ("S(0)",))}, MESH
    )
    stages = stage, replace(stage, first=2, last=5, group=1, devices=(2, 5), layouts={}, prices=None)
    of_devices = Pipeline(12.0, 9.0, 1e9, 0.25, 0.5, "1f1b", 3, "grid", stages, ({"way": "grid"},), ({"devices": 2},), ({"seconds": 1.0},))
    kinds = [{"nodes": 2, "devices": 4, "memory": 8e10}, {"nodes": 1, "devices": 3, "memory": 4e10}, {"nodes": 1, "devices": 1}]
    for one, devices, limit in ((of_devices, 6, None), (replace(of_devices, assumptions={"cluster": kinds}), 12, 4e10)):
        assert (one.mesh.shape, one.memory_limit, one.num_groups, one.cost) == ((devices,), limit, 2, 12.0)
        again = Pipeline.from_dict(json.loads(json.dumps({**one.to_dict(), "unknown": 1})))
        assert again == one and [each.prices for each in again.stages] == [MESH, None] and again.stages[0].layouts["mm"].inputs == ("R",)
        short = one.to_dict(layouts=False)
        assert not any({"layouts", "prices"} & set(each) for each in short["stages"]) and Pipeline.from_dict(short).stages[1] == stages[1]


# --- files: round trips

letters = st.characters(codec="utf-8", exclude_characters="\0")  # a file with NUL is refused
names = st.text(letters, min_size=1, max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | numbers | st.text(letters, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
free = st.dictionaries(names.map("?".__add__), plain, max_size=3)  # no key that the schema knows: hypothesis draws words of our source


@st.composite
def solutions(draw) -> Solution:
    num_axes = draw(st.integers(1, 3))
    positive = st.floats(min_value=1e-9, max_value=1e15)
    axes = tuple(Axis(f"a{k}", draw(st.integers(1, 64)), draw(positive), draw(positive), draw(st.integers(1, 8))) for k in range(num_axes))
    mesh = Mesh(axes, Device(draw(names), *(draw(positive) for _ in range(5))))
    layout = st.lists(st.sampled_from(["R", "S(0)", "S(3)", "P", "P(avg)"]), min_size=num_axes, max_size=num_axes).map(",".join)
    placed = st.builds(
        lambda inputs, outputs: Placed(tuple(inputs), tuple(o for o, _ in outputs), tuple(h for _, h in outputs)),
        st.lists(layout, max_size=3),
        st.lists(st.tuples(st.none() | layout, st.none() | layout), max_size=2),
    )
    cost = draw(st.floats(min_value=0, allow_nan=False))
    return Solution(
        layouts=draw(st.dictionaries(names, placed, max_size=4)),
        results=draw(st.dictionaries(names, layout, max_size=2)),
        mesh=mesh,
        cost=cost,
        bound=cost * draw(st.floats(0, 1)) if cost < math.inf else 0.0,
        status=draw(st.sampled_from(["optimal", "feasible", "unjudged"])),
        solver=draw(names),
        peak_bytes=draw(st.floats(min_value=0, allow_nan=False)),
        training=draw(st.booleans()),
        baselines=draw(st.dictionaries(names, st.fixed_dictionaries({"cost_seconds": st.none() | numbers}), max_size=3)),
        replicated_ops=tuple(draw(st.lists(free, max_size=2))),
        parameters=draw(
            st.dictionaries(names, st.fixed_dictionaries({"layout": layout, "shape": st.lists(st.integers(1, 9))}), max_size=3)
        ),
        breakdown=draw(free),
        counts=draw(st.dictionaries(names, st.integers(0, 9), max_size=2)),
        fingerprint=draw(st.dictionaries(names, names, max_size=2)),
        assumptions=draw(free),
        seconds=draw(st.dictionaries(names, st.dictionaries(names, st.floats(0, 9), max_size=2), max_size=2)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@settings(max_examples=60)
@given(solution=solutions(), suffix=st.sampled_from(SUFFIXES))
def test_what_is_saved_is_what_is_loaded_in_the_same_order(folder, solution, suffix):
    path = folder / f"plan{suffix}"
    solution.save(path)
    loaded = load(path)
    assert loaded == solution
    assert list(loaded.layouts) == list(solution.layouts) and repr(loaded) == repr(solution)


def test_content_decides_not_the_suffix(tmp_path):
    linear_solution().save(tmp_path / "a.pkl")
    linear_solution().save(tmp_path / "b.json")
    os.rename(tmp_path / "a.pkl", tmp_path / "a.json")
    os.rename(tmp_path / "b.json", tmp_path / "b.pkl")
    assert load(tmp_path / "a.json") == load(tmp_path / "b.pkl") == linear_solution()


def test_json_has_one_op_per_line_and_changes_in_one_line(tmp_path):
    linear_solution().save(tmp_path / "a.json")
    other = {**linear_solution().layouts, "x": Placed((), ("R,R",))}
    linear_solution(layouts=other).save(tmp_path / "b.json")
    a, b = ((tmp_path / name).read_text().splitlines() for name in ("a.json", "b.json"))
    assert '        "x": {"inputs": [], "outputs": ["S(0),R"]},' in a
    assert len(a) == len(b) and sum(x != y for x, y in zip(a, b)) == 1


def test_a_pickle_holds_plain_data_that_needs_no_autoshard(tmp_path):
    linear_solution().save(tmp_path / "a.pkl")
    data = pickle.loads((tmp_path / "a.pkl").read_bytes())
    assert data["parts"][0]["layouts"]["x"] == {"inputs": [], "outputs": ["S(0),R"]}
    assert b"autoshard" not in (tmp_path / "a.pkl").read_bytes()


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    linear_solution().save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        linear_solution(cost=5.0).save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.json"]


def test_saving_into_nowhere_says_so(tmp_path):
    with pytest.raises(OSError, match="there is no folder .*nowhere.* make it first"):
        linear_solution().save(tmp_path / "nowhere" / "a.json")
    with pytest.raises(OSError, match="is a folder; give the name of a file"):
        linear_solution().save(tmp_path)


# --- against another model, mesh or version


def test_a_plan_does_not_differ_from_its_own_model():
    solution = linear_solution()
    now = {"fingerprint": solution.fingerprint, "assumptions": solution.assumptions}
    assert differences(solution, linear_graph(), MESH, **now) == ()


FEWER = "; a model with fewer layers is another one: make its widths and batch smaller instead"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mesh": Mesh.from_bandwidths((8,))}, "planned for mesh 2x4, but this mesh is 8"),
        ({"mesh": Mesh.from_bandwidths((2, 4), inter_node_bandwidth=1e9)}, "mesh axis axis0: bandwidth: 4e+11 when planned, 1e+09 now"),
        ({"mesh": Mesh.from_bandwidths((2, 4), device="a100")}, "device: name: h100 when planned, a100 now"),
        ({"graph": linear_graph(width=16)}, "1 parameter of another size: w is 16x16, planned was 8x8"),
        (
            {"graph": linear_graph(width=9)},
            "w: layout R,S(1) shards dim 1 of size 9 into 4 parts, which leaves some ranks without any; nor do 1 other op fit: mm",
        ),
        ({"graph": Graph(linear_graph().ops[:2], ())}, f"1 op of the plan are not in the model: mm{FEWER}"),
        ({"assumptions": {"optimizer": "sgd", "memory_limit": 8e10, "torch": "2.13.0"}}, "optimizer: adamw when planned, sgd now"),
        ({"assumptions": {"optimizer": "adamw", "memory_limit": 8e10, "torch": "2.15.0"}}, "torch: 2.13.0 when planned, 2.15.0 now"),
        ({"assumptions": {"optimizer": "adamw", "torch": "2.13.0"}}, "memory_limit: 8e+10 when planned, not given now"),
        ({"fingerprint": {"prices": "x"}}, "the prices (links, device, cost model) differ from when this was planned"),
        ({"fingerprint": {"graph": "x", "structure": "b"}}, "the model's sizes, dtypes or constants differ from when this was planned"),
        (
            {"fingerprint": {"graph": "x", "structure": "x"}},
            "the model's ops are wired or parameterised differently from when this was planned",
        ),
    ],
)
def test_each_difference_is_said(change, sentence):
    given_now = {"graph": linear_graph(), "mesh": MESH, **change}
    assert sentence in differences(linear_solution(), given_now.pop("graph"), given_now.pop("mesh"), **given_now)


def test_a_plan_without_a_layout_of_a_tensor_is_a_misfit():
    solution = linear_solution()
    layouts = {**solution.layouts, "mm": replace(solution.layouts["mm"], outputs=(None,))}
    (said,) = differences(replace(solution, layouts=layouts), linear_graph(), MESH)
    assert said == "mm: the plan has no layout for an output that is a tensor"


def test_missing_ops_are_counted_and_the_first_few_named():
    solution = linear_solution(layouts={"mm": linear_solution().layouts["mm"], **{f"h.{k}": Placed((), ("R,R",)) for k in range(5)}})
    assert misfits(solution, linear_graph(), MESH) == (
        "2 ops of the model have no layout in the plan: w, x",
        "5 ops of the plan are not in the model: h.0, h.1, h.2 and 2 more",
    )


def test_a_view_that_another_torch_calls_otherwise_is_the_planned_one():
    """As torch 2.13 and 2.15 trace GPT-2: views of matmuls are one operator or the other, and numbered apart."""

    def graph(*views: str) -> Graph:
        ops, square = [linear_graph().ops[0]], linear_graph().ops[0].outputs
        for k, name in enumerate(views):
            target = f"aten.{name.rpartition('_')[0] if name[-1].isdigit() else name}.default"
            ops.append(Op(name, target, ((k, 0),), ((), ()), square))
        return Graph(tuple(ops), ())

    names = ("view", "view_1", "view_2")
    then, now = graph(*names), graph("view", "_unsafe_view", "view_1")
    layouts = {name: Placed(("R,S(0)",), ("R,S(0)",)) for name in names}
    solution = linear_solution(layouts={"w": linear_solution().layouts["w"], **layouts})
    again = replay(solution, now)
    assert again.graph.fingerprint() == then.fingerprint() != now.fingerprint() and again.misfits == ()
    assert replay(solution, then).graph == then
    fewer, other = replay(solution, graph("view", "_unsafe_view")), replay(solution, graph("view", "_unsafe_view", "relu"))
    assert "_unsafe_view" in fewer.misfits[0] and "relu" in other.misfits[0]  # it is another model


def test_other_prices_are_no_misfit():
    assert misfits(linear_solution(), linear_graph(width=16), Mesh.from_bandwidths((2, 4), intra_node_bandwidth=1e9)) == ()


def test_an_op_with_another_number_of_tensors_is_a_misfit():
    layouts = {**linear_solution().layouts, "mm": Placed(("R,R",), ("R,R",))}
    (sentence,) = misfits(linear_solution(layouts=layouts), linear_graph(), MESH)
    assert sentence == "mm: has 2 inputs and 1 outputs, planned were 1 and 1"
