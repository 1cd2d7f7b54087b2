"""Questions to a plan of several programs: check, explain, exports and its page, as a user asks them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard import Mesh, Program
from autoshard.api import html_report
from autoshard.cli import main
from autoshard.explain.staleness import _mesh_of
from autoshard.planning import sub_mesh
from autoshard.report.programs import SECTIONS
from models import mlp
from tests.helpers_refusals import assert_refused, refusals
from tests.helpers_report import HOSTILE, Elements

MESH = Mesh.from_bandwidths((4,))


@cache
def planned(devices=None):
    module, batch = mlp.tiny()
    programs = {"train": Program(module, batch, training=True), "use": Program(module, batch, weight=2.0, devices=devices)}
    return autoshard.plan(programs, MESH, memory_limit=80e9)


def models(rows=None):
    module, batch = mlp.tiny()
    batch = batch if rows is None else tuple(torch.empty(rows, *x.shape[1:], device="meta") for x in batch)
    return {"train": (module, batch), "use": (module, batch)}


def check_all(models, plan, **options):
    module_of, inputs_of = ({name: pair[k] for name, pair in models.items()} for k in (0, 1))
    return autoshard.check(module_of, inputs_of, plan, **options)


# -- check ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [None, (0, 1)])
@pytest.mark.parametrize("solve", [True, False])
def test_a_plan_is_good_for_what_it_was_made_for(devices, solve):
    plan = planned(devices)
    checked = check_all(models(), plan, solve=solve, within=0.002)
    assert checked.ok, checked.reasons
    assert checked.cost == pytest.approx(plan.cost, rel=1e-9) and checked.peak_bytes == pytest.approx(plan.peak_bytes, rel=1e-12)


def test_programs_are_judged_at_todays_prices_on_the_devices_that_they_were_planned_for():
    plan, today = planned((0, 1)), Mesh.from_bandwidths((4,), device="a100")
    assert _mesh_of("train", plan, today) == today and _mesh_of("use", plan, today) == sub_mesh(today, (0, 1))
    apart = replace(plan, programs={**plan.programs, "use": sharded("use")})  # on a mesh of its own
    assert _mesh_of("use", apart, today) == sharded("use").mesh


@cache
def sharded(name):
    """A program with all weights sharded, which the best plan has not."""
    module, batch = mlp.tiny()
    return autoshard.plan(module, batch, MESH, training=name == "train", pins={"*.weight": "S(0)"}, baselines=False)


def test_a_plan_that_is_good_no_more_says_which_program_and_why():
    plan = planned()
    assert any(line.startswith("train: ") for line in check_all(models(rows=32), plan).reasons)
    full = {name: one.noting(memory_limit=0.5 * plan.peak_bytes) for name, one in plan.programs.items()}
    assert any("over the limit" in line for line in check_all(models(), replace(plan, programs=full)).reasons)
    apart = replace(plan, switches={"use": None}, programs={**plan.programs, "use": sharded("use")})
    assert any("other layouts of the parameters" in line for line in check_all(models(), apart).reasons)
    worse = {name: replace(sharded(name), assumptions=one.assumptions) for name, one in plan.programs.items()}
    checked = check_all(models(), replace(plan, programs=worse))
    assert any("more than a plan that there is now" in line for line in checked.reasons), checked
    assert_refused("no model for program 'use'", check_all, {"train": models()["train"]}, plan)


# -- verify ---------------------------------------------------------------------------------------------------------------------------


def verify_all(plan, **options):
    module_of, inputs_of = ({name: pair[k] for name, pair in models().items()} for k in (0, 1))
    return autoshard.verify(module_of, inputs_of, plan, **options)


@pytest.mark.parametrize("devices", [None, (0, 1)])
def test_every_program_is_verified_and_a_planted_fault_is_seen_in_each(devices):
    plan = planned(devices)
    answer = verify_all(plan)
    assert answer["ok"] and {name: one["ranks"] for name, one in answer["programs"].items()} == {
        name: plan[name].mesh.num_devices for name in plan
    }  # fmt: skip
    wrong = verify_all(plan, plant_fault=True)
    assert not wrong["ok"] and not any(one["ok"] for one in wrong["programs"].values())
    drawn = verify_all(plan, random=1)
    assert drawn["ok"] and all(len(one["plans"]) == 2 for one in drawn["programs"].values())


def test_one_module_and_the_inputs_of_a_family_serve_all_its_programs():
    module, batch = mlp.tiny()
    assert autoshard.verify(module, {"train": batch, "use": batch}, planned())["ok"]
    with pytest.raises(ValueError, match="no example inputs for program 'use'; expected one for each of train, use"):
        autoshard.verify(module, {"train": batch}, planned())


def test_all_programs_are_marked_in_their_file(tmp_path):
    plan, path = planned(), tmp_path / "both.json"
    plan.save(path)
    verify_all(plan, plant_fault=True, mark=path)
    assert autoshard.load(path).unverified == ("train", "use") == plan.unverified
    verify_all(plan, mark=path)
    assert autoshard.load(path).unverified == () and autoshard.load(path)["use"].verified.ranks == 4


# -- the page -------------------------------------------------------------------------------------------------------------------------


def test_the_page_has_what_sharing_costs_and_both_layouts_of_a_copy():
    plan = planned((0, 1))
    page = html_report(plan)
    seen = Elements(page)
    assert not seen.crossed and page == html_report(plan) and len(page) < 100_000
    assert [a.get("id") for tag, a in seen.tags if tag == "section"] == list(SECTIONS)
    for row in plan.rows():
        assert row["name"] in seen.text
    copy = plan.copies[0]
    assert copy["from"] in seen.text and copy["to"] in seen.text and "None: all programs" not in seen.text
    assert not planned().copies and "None: all programs" in html_report(planned())


def test_names_on_the_page_are_text():
    plan = planned()
    first = next(iter(plan["train"].parameters.values()))
    odd = replace(plan["train"], parameters={HOSTILE: first})
    assert HOSTILE not in html_report(replace(plan, programs={**plan.programs, "train": odd}))


def test_a_time_line_is_of_one_program():
    assert_refused("pass one of them: train, use", html_report, planned(), *models()["train"])


# -- words ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    """The model, which returns two programs, and the file of their plan."""
    folder = tmp_path_factory.mktemp("programs")
    source, plan = folder / "rl.py", str(folder / "rl.json")
    source.write_text(
        "from autoshard import Program\nfrom models import mlp\n\n\ndef programs():\n    module, batch = mlp.tiny()\n"
        "    return {'train': Program(module, batch, training=True), 'use': Program(module, batch)}\n"
    )
    assert main(["plan", f"{source}:programs", "--mesh", "2", "--out", plan, "--quiet"]) == 0
    return f"{source}:programs", plan


def test_options_of_training_are_of_the_programs_that_train(files, capsys):
    asked = ["--mesh", "1x2", "--optimizer", "sgd", "--json", "--quiet"]
    assert main(["plan", files[0], *asked]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "optimal"
    refused = ((files[0], "--train", "training is a matter of each program"), (f"{files[0]}#use", "--tf32", "add --train, or leave it out"))
    for model, more, sentence in refused:
        assert main(["plan", model, *asked, more]) == 2 and sentence in capsys.readouterr().err
    module, batch = mlp.tiny()
    with pytest.raises(ValueError, match="optimizer has no effect on forward passes; add training=True to the Program that trains"):
        autoshard.plan({"use": Program(module, batch)}, MESH, optimizer="sgd")


def test_every_verb_answers_for_the_file_or_for_one_program(files, tmp_path, capsys):
    (model, plan), page = files, str(tmp_path / "r.html")
    for words in (
        ["show", plan, "--html", page], ["show", f"{plan}#use", "--no-model", "--html", page],
        ["explain", plan], ["explain", f"{plan}#use"],
        ["check", plan, "--trust"], ["check", plan, model], ["check", f"{plan}#use", "--trust"], ["check", f"{plan}#use", model],
        ["verify", plan, "--trust"], ["verify", plan, model], ["verify", f"{plan}#use", "--trust"],
        *([verb, f"{plan}#use", model] for verb in ("verify", "certify", "simulate")), ["simulate", f"{plan}#use", f"{model}#use"],
        ["export", f"{plan}#use", "--format", "tp_plan"], ["export", f"{plan}#train", "--format", "vllm"],
    ):  # fmt: skip
        assert main([*words, "--json", "--quiet"]) == 0, words
        assert json.loads(capsys.readouterr().out)
    named = ["show", plan, "--html", page, "--model", model]
    for words in (named, ["explain", plan, "0.weight"], ["export", plan], ["check", plan], ["verify", plan], ["certify", plan, model]):
        assert main(words) == 2
        assert f"{plan}#train" in capsys.readouterr().err
    assert main(["simulate", model]) == 2 and f"returned programs train, use; name one of them, as {model}#train" in capsys.readouterr().err
    for verb in ("check", "verify"):
        assert main([verb, plan, f"{model}#use"]) == 2 and f"give {model}, or {plan}#use and" in capsys.readouterr().err


def test_check_of_one_program_that_is_worse_than_alone_says_with_which_others_it_was_planned(files, tmp_path, capsys):
    (model, plan), worse = files, str(tmp_path / "worse.json")
    whole = autoshard.load(plan)
    pinned = autoshard.plan(*mlp.tiny(), whole.mesh, objective="serial", pins={"layers.0.up.weight": "S(1)"}, baselines=False)
    replace(whole, programs={**whole.programs, "use": pinned.noting(pins={})}).save(worse)
    assert main(["check", f"{worse}#use", model, "--within", "0", "--quiet"]) == 1
    shown = capsys.readouterr()
    assert "more than a plan that there is now" in " ".join(shown.out.split()) and not shown.err
    assert main(["check", f"{worse}#use", model, "--within", "0"]) == 1
    assert f"use shares its weights with other programs; `autoshard check {worse}` compares" in capsys.readouterr().err


def test_the_verb_verify_says_no_for_any_program_and_marks_all_or_one(files, tmp_path, capsys):
    model, plan = files[0], str(tmp_path / "marked.json")
    autoshard.load(files[1]).save(plan)
    assert main(["verify", plan, model, "--plant-fault", "--mark", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "program train" in out and "program use" in out and out.count("NOT OK, on 2 simulated ranks") == 2
    assert autoshard.load(plan).unverified == ("train", "use")
    assert main(["verify", f"{plan}#use", "--trust", "--mark", "--quiet"]) == 0 and autoshard.load(plan).unverified == ("train",)
    assert main(["verify", plan, model, "--mark", "--quiet"]) == 0 and autoshard.load(plan).unverified == ()
    capsys.readouterr()
    assert main(["verify", plan, "models/mlp.py:tiny"]) == 2 and "has no program 'train'; it has none" in capsys.readouterr().err


def test_the_verb_check_says_which_program_is_good_no_more(files, tmp_path, capsys):
    source = tmp_path / "rl.py"
    planned_source = Path(files[0].rpartition(":")[0]).read_text()
    source.write_text(planned_source.replace("'use': Program(module", "'use': Program(mlp.tiny(layers=3)[0]"))
    assert main(["check", files[1], f"{source}:programs", "--json"]) == 1
    reasons = json.loads(capsys.readouterr().out)["reasons"]
    assert reasons and all(line.startswith("use: ") for line in reasons)


def with_part(**part):
    return lambda: autoshard.plan({"use": Program(*mlp.tiny(), **part)}, MESH)


test_the_devices_of_a_program_are_some_of_the_clusters = refusals(
    (with_part(mesh=Mesh.from_bandwidths((2,))), "'use' has a mesh of its own; say which of the 4 devices it is, as devices=range"),
    (with_part(devices=()), r"'use' runs on devices \(\); expected different numbers from 0 to 3"),
    (with_part(devices=(0, 0)), r"'use' runs on devices \(0, 0\); expected different numbers from 0 to 3"),
    (with_part(devices=(3, 4)), r"'use' runs on devices \(3, 4\); expected different numbers from 0 to 3"),
    (with_part(devices=(0, 1), mesh=MESH), "'use' runs on 2 devices, its mesh has 4; expected as many"),
)


def test_a_program_may_name_the_clusters_own_mesh():
    (plain, named), devices = (with_part(**part)() for part in ({}, {"mesh": MESH})), range(1, 3)
    assert named.cost == plain.cost
    assert with_part(devices=devices, mesh=Mesh.from_bandwidths((2,)))().cost == with_part(devices=devices)().cost
