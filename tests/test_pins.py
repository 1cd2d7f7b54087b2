"""Pins, forbidden and kept layouts: which tensors they mean, what they leave, what they cost; and the same on the command line."""

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import capture
from autoshard.formulate import Formulation, with_pins
from autoshard.layout import R, S, text
from autoshard.planning.demands import allowed_by_pins, demanded
from autoshard.planning.instance import formulate_for
from autoshard.planning.keeping import edited_layouts, kept_layouts, packed
from autoshard.planning.options import Options, checked_options
from autoshard.planning.plan import plan
from autoshard.solution import Solution
from autoshard.solvers import solve
from autoshard.strategies import candidates
from models import mlp
from tests.helpers import fast_mesh
from tests.helpers_models import Model, refusal
from tests.helpers_refusals import assert_refused
from tests.test_cli import TINY as TINY_FILE
from tests.test_cli import check_refused, run

MESH = fast_mesh((2, 2))


@cache
def formulated_of() -> Formulation:
    graph = capture(*mlp.tiny(), training=True)
    return formulate_for(graph, candidates(graph, MESH), MESH, Options(training=True))


def governed(**options) -> dict[str, set[str]]:
    """Per tensor that is not free, the layouts that are left to it."""
    formulated = formulated_of()
    found = {}
    for node, keep in allowed_by_pins(formulated, checked_options(Options, options)).items():
        layouts = [c.outputs[0] for c, kept in zip(formulated.candidates.of[node], keep, strict=True) if kept]
        found[formulated.graph.ops[node].name] = {text(layout) for layout in layouts}
    return found


@cache
def planned() -> Solution:
    return plan_mlp()


def plan_mlp(**options) -> Solution:
    return plan(*mlp.tiny(), MESH, training=True, baselines=False, objective="serial", **options)


# -- which tensors a pin means ------------------------------------------------------------------------------------------------------------

UP = {f"layers.{k}.up.weight" for k in range(2)}
WEIGHTS = UP | {f"layers.{k}.down.weight" for k in range(2)}


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"layers.*.up.weight": "R,S(0)"}, dict.fromkeys(UP, "R,S(0)")),
        ({"*weight": "R,S(0)"}, dict.fromkeys(WEIGHTS, "R,S(0)")),  # * goes across dots
        ({"layers.[01].up.weight": "R,S(0)"}, dict.fromkeys(UP, "R,S(0)")),
        ({"layers.?.up.weight": "R, S0"}, dict.fromkeys(UP, "R,S(0)")),
        ({"layers.0.up.weight": "R,R", "*.weight": "R,S(0)"}, {**dict.fromkeys(WEIGHTS, "R,S(0)"), "layers.0.up.weight": "R,R"}),
        ({"*.weight": "R,S(0)", "layers.0.up.weight": "R,R"}, {**dict.fromkeys(WEIGHTS, "R,S(0)"), "layers.0.up.weight": "R,R"}),
        ({"*.weight": "R,S(0)", "*.up.weight": "R,R"}, {**dict.fromkeys(WEIGHTS, "R,S(0)"), **dict.fromkeys(UP, "R,R")}),  # the later one
        ({"*.up.weight": "R,R", "*.weight": "R,S(0)"}, dict.fromkeys(WEIGHTS, "R,S(0)")),
        ({"input_?": "S(0),R"}, {"input_0": "S(0),R", "input_1": "S(0),R"}),
        ({"gelu*": "R,R"}, dict.fromkeys(["gelu", "gelu_1", "gelu_backward", "gelu_backward_1"], "R,R")),  # ops: no stored tensor matches
        ({"layers.0.up.weight": (R, S(0))}, {"layers.0.up.weight": "R,S(0)"}),
    ],
)
def test_a_pin_governs_what_it_means(pins, expected):
    assert governed(pins=pins) == {name: {layout} for name, layout in expected.items()}


def test_a_star_in_a_layout_stands_for_any_placement():
    left = governed(pins={"layers.0.up.weight": "*,S(0)", "layers.1.up.weight": "*,*"})
    assert left["layers.0.up.weight"] == {"R,S(0)", "S(0),S(0)", "S(1),S(0)"}
    free = formulated_of()
    node = free.graph.index["layers.1.up.weight"]
    assert left["layers.1.up.weight"] == {text(c.outputs[0]) for c in free.candidates.of[node]}


def test_a_star_frees_a_tensor_from_a_glob():
    freed = plan_mlp(pins={"*.weight": "R,R", "layers.1.down.weight": "*,*"})
    assert {freed.parameters[name]["layout"] for name in WEIGHTS - {"layers.1.down.weight"}} == {"R,R"}
    assert freed.cost <= plan_mlp(pins={"*.weight": "R,R"}).cost


def tied():
    model = Model(lambda m, tokens: m.head(m.wte(tokens)).square().mean(), wte=nn.Embedding(16, 8), head=nn.Linear(8, 16, bias=False))
    model.head.weight = model.wte.weight
    return model


def test_both_names_of_a_tied_parameter_are_governed_by_the_exact_one():
    graph = capture(tied(), (torch.zeros(4, 4, dtype=torch.int64),), training=True)
    formulated = formulate_for(graph, candidates(graph, fast_mesh((2,))), fast_mesh((2,)), Options(training=True))
    for pins in ({"head.weight": "S(0)", "*.weight": "R"}, {"*.weight": "R", "wte.weight": "S(0)"}):
        (found,) = [one for one in demanded(formulated, Options(pins=pins)) if one.allowed]
        assert (found.demand.name, found.demand.value) in {("head.weight", "S(0)"), ("wte.weight", "S(0)")}


# -- forbidden layouts --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forbid", "left"),
    [
        ({"layers.0.up.bias": "S(0),R"}, {"layers.0.up.bias": {"R,R", "R,S(0)", "S(0),S(0)"}}),
        ({"layers.0.up.bias": ["S(0),*", "R,R"]}, {"layers.0.up.bias": {"R,S(0)"}}),
        ({"layers.0.up.bias": (R, R)}, {"layers.0.up.bias": {"S(0),R", "R,S(0)", "S(0),S(0)"}}),
        ({"layers.0.up.bias": ((R, R), "S(0),R")}, {"layers.0.up.bias": {"R,S(0)", "S(0),S(0)"}}),
        ({"*.up.bias": "*,R", "layers.0.*": "S(0),*"}, {"layers.0.up.bias": {"R,S(0)"}, "layers.1.up.bias": {"R,S(0)", "S(0),S(0)"}}),
    ],
)
def test_what_is_forbidden_is_left_out_and_all_of_it_holds(forbid, left):
    found = governed(forbid=forbid)
    assert {name: found[name] for name in left} == left


def test_a_forbidden_layout_is_not_planned_and_costs_time():
    free = planned()
    name = "layers.0.up.weight"
    other = plan_mlp(forbid={name: free.parameters[name]["layout"]})
    assert other.parameters[name]["layout"] != free.parameters[name]["layout"] and other.cost >= free.cost
    assert other.assumptions["forbid"] == {name: [free.parameters[name]["layout"]]}


# -- sentences ----------------------------------------------------------------------------------------------------------------------------

BAD = [
    (dict(pins={"layers.*.wieght": "R,R"}), "pin on 'layers.*.wieght': no tensor of the model matches; near are layers."),
    (dict(pins={"*.weight": "R"}), "pin on '*.weight' (layers.0.up.weight): layout R has 1 placements, the mesh 2x2 has 2 axes"),
    (dict(pins={"*.weight": "*,*,R"}), "pin on '*.weight' (layers.0.up.weight): layout *,*,R has 3 placements, the mesh 2x2 has 2 axes"),
    (dict(pins={"*.bias": "R,S(1)"}), "pin on '*.bias' (layers.0.up.bias): layout R,S(1) shards dim 1, the tensor has 1 dims"),
    (dict(pins={"*.bias": "*,P"}), "pin on '*.bias' (layers.0.up.bias): layout *,P is no output layout of parameter; possible are "),
    (dict(pins={"*.bias": "*,Q"}), "layout 'Q' has 'Q'; expected R, S(dim) or P per mesh axis"),
    (dict(forbid={"*.bais": "R,R"}), "forbid on '*.bais': no tensor of the model matches; near are "),
    (dict(forbid={"layers.0.up.bais": "R,R"}), "forbid on 'layers.0.up.bais': the model has no such tensor; near are layers.0.up.bias"),
    (dict(forbid={"*.bias": "R"}), "forbid on '*.bias': nothing is forbidden by it, layout R has 1 placements, the mesh 2x2 has 2 axes"),
    (dict(forbid={"*.bias": "P,*"}), "forbid on '*.bias': nothing is forbidden by it, layout P,* is no output layout of parameter; "),
    (dict(forbid={"*.bias": 3}), "forbid on '*.bias': 3 is no layout"),
    (dict(forbid=["*.bias"]), "forbid is a list; expected a dict"),
    (dict(keep={"*.bias": "R,R"}), "keep on '*.bias': the model has no such tensor"),
    (dict(keep="x.json"), "keep is a str; expected a dict"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD, ids=[str(o) for o, _ in BAD])
def test_a_bad_pin_is_one_sentence(options, sentence):
    assert refusal(lambda: allowed_by_pins(formulated_of(), checked_options(Options, options))).startswith(sentence)


# -- layouts kept from a plan --------------------------------------------------------------------------------------------------------------


def as_data(solution: Solution) -> dict:
    """What the file of a plan holds."""
    return json.loads(json.dumps(solution.to_dict()))


def edit(solution: Solution, **layouts: str) -> Solution:
    """As a hand would edit the file: in the table of parameters only."""
    data = as_data(solution)
    for name, layout in layouts.items():
        data["parameters"][name]["layout"] = layout
    return Solution.from_dict(data)


def test_an_edited_plan_holds_as_edited_and_the_rest_is_best():
    free, name = planned(), "layers.0.down.weight"
    assert edited_layouts(free) == {}
    edited = edit(free, **{name: "R,R"})
    assert edited_layouts(edited) == {name: [free.parameters[name]["layout"], "R,R"]}
    again = plan_mlp(keep=kept_layouts(edited))
    assert {n: row["layout"] for n, row in again.parameters.items()} == {n: row["layout"] for n, row in edited.parameters.items()}
    (price,) = again.pin_prices
    assert price["name"] == "8 layouts" and price["proven"] and price["costs_seconds"] == pytest.approx(again.cost - free.cost, rel=1e-9)
    assert again.cost > free.cost


def test_a_plan_kept_as_it_is_costs_nothing():
    again = plan_mlp(keep=kept_layouts(planned()))
    assert again.cost == pytest.approx(planned().cost, rel=1e-9)
    assert again.pin_prices[0]["costs_seconds"] <= 1e-9 * again.cost


def test_free_and_pins_come_before_what_is_kept():
    edited = edit(planned(), **dict.fromkeys(WEIGHTS, "R,R"))
    assert not set(kept_layouts(edited, free=["layers.1.*"])) & {name for name in edited.parameters if ".1." in name}
    found = governed(keep=kept_layouts(edited, free=["layers.1.*"]), pins={"layers.0.up.*": "R,S(0)"})
    assert found["layers.0.up.weight"] == {"R,S(0)"} and found["layers.0.down.weight"] == {"R,R"}
    assert "layers.1.up.weight" not in found


def edit_rows(solution: Solution, **rows: dict) -> Solution:
    """As a hand would edit the file: in the table of all ops."""
    data = as_data(solution)
    for name, columns in rows.items():
        data["layouts"][name].update(columns)
    return Solution.from_dict(data)


@pytest.mark.parametrize(
    ("rows", "keep"),
    [
        ({"input_0": {"outputs": ["R,R"]}}, {"input_0": "R,R"}),
        ({"gelu": {"outputs": ["R,S(0)"]}}, {"gelu": "R,S(0)"}),
        ({"gelu": {"outputs": ["R,S(0)"]}, "input_1": {"outputs": ["S(0),R"]}}, {"gelu": "R,S(0)", "input_1": "S(0),R"}),
        ({"add": {"inputs": ["R,R", "R,R"], "outputs": ["R,R"]}}, {"add": "R,R;R,R -> R,R"}),
        ({"addmm": {"inputs": ["S(0),R", "S(1),R", "R,S(0)"], "outputs": ["S(1),P"]}}, None),  # P of the second axis needs a cut of k
        ({"layers.0.up.weight": {"outputs": ["R,R"]}}, {"layers.0.up.weight": "R,R"}),  # a parameter, in the other table
    ],
)
def test_an_op_edited_in_the_file_holds_as_edited(rows, keep):
    edited = edit_rows(planned(), **rows)
    if keep is None:
        sentence = r"^keep on 'addmm': aten.addmm.default can't have the layouts S\(0\),R;.* -> S\(1\),P; "
        assert_refused(sentence, plan_mlp, keep=kept_layouts(edited))
        return
    before = kept_layouts(planned())
    assert kept_layouts(edited) == before | keep
    assert {name: now for name, (_, now) in edited_layouts(edited).items()} == keep
    assert all(had == planned().layouts[name].outputs[0] or "->" in had for name, (had, _) in edited_layouts(edited).items())
    again = plan_mlp(keep=kept_layouts(edited))
    for name, columns in rows.items():
        assert list(again.layouts[name].outputs) == columns["outputs"]
        assert list(again.layouts[name].inputs) == columns.get("inputs", list(again.layouts[name].inputs))
    assert {name: row["layout"] for name, row in again.parameters.items()} == {n: kept_layouts(edited)[n] for n in planned().parameters}
    assert again.cost >= planned().cost
    assert edited_layouts(again) == {}


def test_every_edit_is_seen_and_nothing_else():
    """Of each op in turn, all that it could give: the table says exactly what was edited, and what stood there before."""
    formulated, plan_ = formulated_of(), planned()
    for i, op in enumerate(formulated.graph.ops):
        for other in dict.fromkeys(text(c.outputs[0]) for c in formulated.candidates.of[i]):
            had = plan_.layouts[op.name].outputs[0]
            found = edited_layouts(edit_rows(plan_, **{op.name: {"outputs": [other]}}))
            assert found == ({} if other == had else {op.name: [had, other]})


def test_free_globs_release_edited_ops_too():
    edited = edit_rows(planned(), gelu={"outputs": ["R,S(0)"]}, gelu_1={"outputs": ["R,S(0)"]}, input_0={"outputs": ["R,R"]})
    assert kept_layouts(edited, free=["gelu*"]) == kept_layouts(planned()) | {"input_0": "R,R"}
    assert kept_layouts(edited, free=["gelu", "*.weight", "*.bias"]) == {"gelu_1": "R,S(0)", "input_0": "R,R"}
    assert_refused("^free 'gelu.': no parameter of the plan matches", kept_layouts, planned(), free=["gelu*"])  # none was edited


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda d: d["layouts"]["gelu"].update(hubs=["S(1),R"]), "the edit of the hubs of gelu can't be kept; "),
        (lambda d: d["results"].update({"output:0": "P,P"}), "the edit of result output:0 can't be kept; "),
        (lambda d: d["layouts"].pop("gelu"), "the plan has 57 layouts and 9 results, it was planned with 58 and 9; "),
        (lambda d: d["fingerprint"].update(layouts="0:nonsense"), "the plan's packed layouts can't be read "),
        (lambda d: d["fingerprint"].update(layouts=""), "the plan's packed layouts can't be read "),
        (
            lambda d: (
                d["layouts"]["layers.0.up.bias"].update(outputs=["R,R"]),
                d["parameters"]["layers.0.up.bias"].update(layout="R,S(0)"),
            ),
            "layers.0.up.bias has layout R,S(0) in parameters, but R,R in layouts; give both the same",
        ),
    ],
)
def test_what_cannot_be_kept_is_one_sentence(spoil, sentence):
    data = as_data(planned())
    spoil(data)
    assert refusal(kept_layouts, Solution.from_dict(data)).startswith(sentence)


def test_a_plan_from_before_layouts_were_packed_is_edited_in_parameters():
    data = as_data(edit(planned(), **{"layers.0.up.weight": "R,R"}))
    del data["fingerprint"]["layouts"]
    old = Solution.from_dict(data)
    had = planned().parameters["layers.0.up.weight"]["layout"]
    assert edited_layouts(old) == {"layers.0.up.weight": [had, "R,R"]} and kept_layouts(old)["layers.0.up.weight"] == "R,R"


def test_packed_layouts_take_little_room():
    layers = {f"{k}.{name}": row for k in range(30) for name, row in planned().layouts.items()}
    assert len(packed(layers, planned().results)) < len(layers)  # a letter per op; a row of the file has 60


def test_a_tensor_of_two_names_is_kept_once_and_edited_in_both():
    rows = {"a": {"layout": "R,R"}, "b": {"layout": "R,R", "tied_to": "a"}, "c": {"layout": "R,S(0)"}}

    def kept(rows, **more):
        return kept_layouts(replace(planned(), parameters=rows), **more)

    assert kept(rows) == {"a": "R,R", "c": "R,S(0)"} and kept(rows, free=["a"]) == {"b": "R,R", "c": "R,S(0)"}
    apart = rows | {"b": {"layout": "R,S(0)", "tied_to": "a"}}
    assert_refused("^b has layout R,S.0., but a, the same tensor, has R,R; give both the same$", kept, apart)
    assert_refused("^the plan to keep has no parameters; expected one that `autoshard plan --out` wrote$", kept, {})
    assert_refused("^free 'd': no parameter of the plan matches; it has a, b, c$", kept, rows, free=["d"])


# -- prices -------------------------------------------------------------------------------------------------------------------------------


def test_the_price_of_a_pin_is_that_of_a_cold_solve_without_it():
    pins = {"*.up.weight": "R,R", "layers.0.down.weight": "S(0),S(0)"}
    forbid = {"layers.1.down.weight": ["R,S(0)", "S(0),R"]}
    limit = 1.02 * plan_mlp(pins=pins, forbid=forbid).peak_bytes
    said: list[str] = []
    solution = plan_mlp(pins=pins, forbid=forbid, price_pins=True, memory_limit=limit, progress=lambda what, fraction: said.append(what))
    assert [what for what in said if "pins: " in what] == [f"pricing the pins: {k} of 4" for k in (1, 2, 3, 4)]
    rows = {(row["kind"], row["name"], row["layout"]): row for row in solution.pin_prices}
    forbidden = [("forbid", "layers.1.down.weight", "R,S(0)"), ("forbid", "layers.1.down.weight", "S(0),R")]
    assert list(rows) == [("pin", name, layout) for name, layout in pins.items()] + forbidden
    formulated = formulated_of()
    for (kind, name, layout), row in rows.items():
        if kind == "pin":
            options = Options(pins={n: pinned for n, pinned in pins.items() if n != name}, forbid=forbid)
        else:
            options = Options(pins=pins, forbid={name: [other for other in forbid[name] if other != layout]})
        problem = replace(with_pins(formulated, allowed_by_pins(formulated, options)), usage_limit=limit)
        assert row["proven"] and row["costs_seconds"] == pytest.approx(solution.cost - solve(problem).cost, abs=2e-9 * solution.cost)
    assert max(row["costs_seconds"] for row in rows.values()) > 1e-3 * solution.cost


def test_nothing_is_priced_unless_asked_for():
    assert plan_mlp(pins={"*.up.weight": "R,R"}).pin_prices is None
    assert plan_mlp(price_pins=True).pin_prices is None


def test_a_plan_without_kept_or_forbidden_layouts_is_noted_as_before():
    """Plans from before these options exist in files: what they say of their options must still read as the same."""
    assert not {"keep", "forbid", "price_pins"} & set(planned().assumptions)
    assert planned().fingerprint == plan_mlp(price_pins=True).fingerprint
    assert planned().fingerprint["options"] != plan_mlp(forbid={"*.bias": "R,R"}).fingerprint["options"]


def test_pins_given_as_placements_can_be_saved(tmp_path):
    solution = plan_mlp(pins={"layers.0.up.weight": (R, S(0))}, forbid={"layers.0.up.bias": [(R, R)]})
    solution.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").assumptions["pins"] == {"layers.0.up.weight": "R,S(0)"}


def test_masks_are_those_of_a_plain_comparison():
    formulated = formulated_of()
    for layout in ("R,S(0)", "S(1),R", "R,R"):
        kept = allowed_by_pins(formulated, Options(pins={"layers.*.up.weight": layout}))
        assert len(kept) == 2
        for node, keep in kept.items():
            assert keep.tolist() == [text(c.outputs[0]) == layout for c in formulated.candidates.of[node]] and np.sum(keep) >= 1


# -- the command line ---------------------------------------------------------------------------------------------------------------------

SMALL = (TINY_FILE, "--set", "layers=1", "--no-baselines", "--quiet")


def plan_json(capsys, *words: str) -> dict:
    code, out, _ = run(capsys, "plan", *SMALL, *words, "--objective", "serial", "--json")
    assert code == 0
    return json.loads(out)


def test_the_words_forbid_and_price(capsys):
    words = ("--mesh", "2x2", "--pin", "layers.*.up.weight=R,*", "--forbid", "*.bias=R,R", "--forbid", "*.bias=S(0),S(0)", "--price-pins")
    found = plan_json(capsys, *words)
    assert found["parameters"]["layers.0.up.weight"].startswith("R,") and found["parameters"]["layers.0.up.bias"] in ("S(0),R", "R,S(0)")
    assert [(row["kind"], row["name"], row["layout"]) for row in found["pins"]] == [
        ("pin", "layers.*.up.weight", "R,*"), ("forbid", "*.bias", "R,R"), ("forbid", "*.bias", "S(0),S(0)"),
    ]  # fmt: skip
    assert all(math.isfinite(row["costs_seconds"]) and row["costs_seconds"] >= 0 for row in found["pins"])
    assert "pins" not in plan_json(capsys, *words[:-1])


def test_the_table_of_prices(capsys):
    _, out, _ = run(capsys, "plan", *SMALL, "--mesh", "2", "--pin", "*.weight=R", "--price-pins")
    assert "What each pin costs" in out and "*.weight" in out
    assert max(map(len, out.splitlines())) <= 100


def test_an_edited_file_is_kept_with_its_mesh_and_options(capsys, tmp_path):
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    first = plan_json(capsys, "--mesh", "2x2", "--train", "--memory", "1GB", "--optimizer", "sgd", "--out", str(path))
    data = json.loads(path.read_text())
    data["parts"][0]["parameters"]["layers.0.up.weight"]["layout"] = "S(1),R"
    path.write_text(json.dumps(data))
    code, out, err = run(capsys, "plan", *SMALL[:-1], "--keep", str(path), "--objective", "serial", "--json", "--out", str(again))
    found = json.loads(out)
    edit_said = f"1 of them edited: layers.0.up.weight {first['parameters']['layers.0.up.weight']} -> S(1),R"
    assert code == 0 and f"keeping 4 layouts of {path}, {edit_said}" in err
    assert found["parameters"] == {**first["parameters"], "layers.0.up.weight": "S(1),R"}
    assert found["training"] and found["mesh"] == first["mesh"]
    assert (found["assumptions"]["memory_limit"], found["assumptions"]["optimizer"]) == (1e9, "sgd")
    assert [row["kind"] for row in found["pins"]] == ["keep"]
    more = found["cost_seconds"] - first["cost_seconds"]
    assert found["pins"][0]["costs_seconds"] == pytest.approx(more, abs=2e-9 * found["cost_seconds"])
    assert plan_json(capsys, "--keep", str(path), "--free", "*")["cost_seconds"] == pytest.approx(first["cost_seconds"], rel=1e-9)
    assert json.loads(run(capsys, "show", str(again), "--json")[1]) == found


def test_an_edited_input_and_op_are_kept_on_the_command_line(capsys, tmp_path):
    path = tmp_path / "plan.json"
    first = plan_json(capsys, "--mesh", "2x2", "--train", "--out", str(path))
    data = json.loads(path.read_text())
    had = data["parts"][0]["layouts"]["gelu"]["outputs"][0]
    data["parts"][0]["layouts"]["gelu"]["outputs"] = ["R,S(0)"]
    path.write_text(json.dumps(data))
    words = ["--keep", str(path), "--objective", "serial", "--json", "--out", str(tmp_path / "again.json")]
    code, out, err = run(capsys, "plan", *SMALL[:-1], *words)
    assert code == 0 and f"keeping 5 layouts of {path}, 1 of them edited: gelu {had} -> R,S(0)" in err
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["parts"][0]["layouts"]["gelu"]["outputs"] == ["R,S(0)"]
    assert json.loads(out)["cost_seconds"] > first["cost_seconds"]
    results = data["parts"][0]["results"]
    results["output:0"] = "R,R" if results["output:0"] != "R,R" else "S(0),R"
    path.write_text(json.dumps(data))
    check_refused(capsys, ("plan", *SMALL, "--keep", str(path)), "the edit of result output:0 can't be kept; take it back")


def test_a_conflict_on_the_command_line(capsys):
    words = ("--mesh", "2", "--pin", "*.up.weight=R", "--forbid", "*.up.weight=R", "--pin", "*.bias=R", "--json")
    code, out, err = run(capsys, "plan", *SMALL, *words)
    found = json.loads(out)
    assert (code, found["status"], found["minimal"], found["smallest_limit_bytes"]) == (1, "infeasible", True, None)
    assert [one["text"] for one in found["conflict"]] == ["pin *.up.weight=R", "forbid *.up.weight=R"]
    assert found["conflict"][0] == {"kind": "pin", "name": "*.up.weight", "value": "R", "text": "pin *.up.weight=R"}
    assert err == f"autoshard: {found['message']}\n"


BAD_WORDS = [
    (("--mesh", "2x2", "--forbid", "w"), "--forbid 'w' is not NAME=LAYOUT; write for example --forbid 'wte.weight=R,S(0)'"),
    (("--mesh", "2x2", "--forbid", "*.wieght=R,R"), "forbid on '*.wieght': no tensor of the model matches"),
    (("--mesh", "2x2", "--free", "*"), "--free * says which layouts of a plan not to keep; give the plan too, as --keep plan.json"),
    (("--keep", "nothing.json"), "there is no file nothing.json; expected a plan's file"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD_WORDS, ids=[" ".join(words) for words, _ in BAD_WORDS])
def test_bad_words_are_refused_in_one_sentence(capsys, words, sentence):
    check_refused(capsys, ("plan", *SMALL, *words), sentence)


def test_a_plan_of_another_mesh_or_model_is_not_kept(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    plan_json(capsys, "--mesh", "2x2", "--out", path)
    sentence = f"the mesh is 4, but {path} shards tensors over 2x2; leave the mesh out"
    check_refused(capsys, ("plan", *SMALL, "--keep", path, "--mesh", "4"), sentence)
    check_refused(capsys, ("plan", *SMALL, "--keep", path, "--free", "h.*"), "free 'h.*': no parameter of the plan matches")
    other = (TINY_FILE.replace("mlp.py", "gpt2.py"), "--set", "layers=1", "--no-baselines", "--quiet")
    check_refused(capsys, ("plan", *other, "--keep", path), "keep on 'layers.0.up.weight': the model has no such tensor")
