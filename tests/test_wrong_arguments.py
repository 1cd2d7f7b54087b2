"""Arguments of public functions that are of another kind, or options of a wrong type: one sentence that says what was expected."""

import math

import pytest

import autoshard
from autoshard import Cluster, Mesh, Program
from autoshard.api.kinds import KINDS, checked_kinds
from autoshard.cli import main
from models import mlp
from tests.helpers_refusals import assert_refused

MESH = Mesh.from_bandwidths((2,))
MODEL, INPUTS = mlp.tiny()
NO_PLAN = ["plan.json", None, 3, MESH]
FUNCTIONS = {
    "solution": [
        lambda wrong: autoshard.verify(MODEL, INPUTS, wrong),
        lambda wrong: autoshard.check(MODEL, INPUTS, wrong),
        lambda wrong: autoshard.explain(MODEL, INPUTS, wrong, "layers.0.up.weight"),
        lambda wrong: autoshard.export(wrong, "json"),
        lambda wrong: autoshard.kept_layouts(wrong),
        lambda wrong: autoshard.device_mesh(wrong),
        lambda wrong: autoshard.parallelize(MODEL, wrong, None),
    ],
    "path": [
        lambda wrong: autoshard.load(wrong if wrong != "plan.json" else 1.5),
        lambda wrong: autoshard.load(wrong if wrong != "plan.json" else []),
        lambda wrong: autoshard.load(wrong if wrong != "plan.json" else b""),
    ],
}
CASES = [(key, k, wrong) for key, functions in FUNCTIONS.items() for k in range(len(functions)) for wrong in NO_PLAN]


@pytest.mark.parametrize(("key", "k", "wrong"), CASES)
def test_an_argument_of_another_kind_is_named(key, k, wrong):
    assert_refused(f"^{key} is .*; expected ", FUNCTIONS[key][k], wrong)


def test_what_is_of_the_right_kind_comes_through():  # else any refusal would do above
    def show(model, name="w", *, path=None):
        return model, name, path

    assert checked_kinds(show)(MODEL, path=None) == (MODEL, "w", None) and "model" in KINDS
    assert_refused("^name is None; expected the name of a parameter", checked_kinds(show), MODEL, None)


@pytest.mark.parametrize(
    "options",
    [
        {"training": "no"}, {"baselines": 1}, {"recompute": 1.5}, {"recompute": math.nan}, {"gap": math.inf}, {"accepted": 5},
        {"pins": {1: "R"}},
        {"solver": None}, {"expert_imbalance": "x"}, {"objective": None}, {"traning": True}, {"expert_imbalance": 2.0},
        {"training": True, "recompute": 99},
    ],
)  # fmt: skip
def test_an_option_of_plan_that_can_not_be_is_refused(options):
    with pytest.raises(ValueError, match=rf"{next(reversed(options))}.*(; expected |; did you mean |; leave it out)"):
        autoshard.plan(MODEL, INPUTS, MESH, **options)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Program(MODEL, shapes=5),
        lambda: Program(MODEL, shapes=[INPUTS]),
        lambda: Program(MODEL, INPUTS, devices=3),
        lambda: Program(MODEL, INPUTS, options=["recompute"]),
        lambda: Program(MODEL, INPUTS, training="yes"),
        lambda: autoshard.plan({}, MESH),
        lambda: autoshard.plan({"a": MODEL}, MESH),
        lambda: autoshard.api.plan_meshes(MODEL, INPUTS, MESH),
        lambda: autoshard.plan(MODEL, INPUTS, Cluster.of(2), microbatches=4),
        lambda: autoshard.plan(MODEL, INPUTS, Cluster.of(2), stages=3),
        lambda: autoshard.backend((2,)),
        lambda: autoshard.backend(MESH, memory_limit="80GB"),
    ],
)
def test_programs_meshes_pipelines_and_backends_say_what_they_expect(made):
    assert_refused("; expected ", made)


def test_options_that_would_be_ignored_are_refused():
    assert_refused("training is a matter of each program", autoshard.plan, {"a": Program(MODEL, INPUTS)}, MESH, training=True)
    assert_refused("training is True, and the backend is for inference", autoshard.backend, MESH, training=True)
    with pytest.raises(ValueError, match="pin on '\\[': no tensor of the model matches; it has layers.0.up.weight"):
        autoshard.plan(MODEL, INPUTS, MESH, pins={"[": "R"})


def test_a_plan_says_that_blocks_were_chosen_to_be_recomputed(capsys):
    words = ["plan", "models/mlp.py:tiny", "--mesh", "2", "--train", "--recompute", "auto", "--no-baselines"]
    assert main([*words, "--tie-blocks"]) == 0
    out, err = capsys.readouterr()
    assert "--recompute auto chooses blocks, not single tensors, beside --tie-blocks" in err
    assert "recompute_by blocks" in " ".join(out.split())
    assert main(words) == 0 and "single tensors" not in " ".join(capsys.readouterr())
