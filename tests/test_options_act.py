"""Nothing is ignored in silence: every option of every verb changes the answer, or is refused, or stands here with the reason why it can't.

A situation is a command line of a verb; each option is added to each with a value other than its default.
"""

import pytest

import autoshard
from autoshard.cli import combinations
from autoshard.mesh import Mesh
from models import mlp
from tests.helpers_command import run
from tests.helpers_options import OWN, SITUATIONS, TINY, VALUES, lines, outcomes, prepare, verbs

# (verb, option): why the same answer is right
UNSEEN = {
    ("*", "quiet"): "there is neither progress nor a note that it could leave out",
    ("*", "time_limit"): "the search ends before",
    ("*", "model"): "the plan is for this model",
    ("show", "exit_code"): "it is 0 where nothing differs",
    ("degrees", "ep"): "the model has no experts", ("degrees", "no_ep"): "the model has no experts",
    ("check", "any_graph"): "the graph is the planned one",
    ("simulate", "prefetch"): "nothing is gathered before it is used, where parameters are replicated",
    ("simulate", "no_join"): "one reduction has nothing to be joined with",
    ("simulate", "devices_per_node"): "one device is one node",
    ("simulate", "tf32"): "kernels of so small a model are ready before the next is launched",
    ("verify", "dtype"): "nothing of so small a model is sharded, so no sum has another order",
    ("verify", "seed"): "nothing of so small a model is sharded, so it is exact for all values",
    ("verify", "mark"): "the mark is in the plan's file",
    ("doctor", "batch"): "which operators a model has does not depend on sizes",
    ("doctor", "seq"): "which operators a model has does not depend on sizes",
    ("calibrate fit", "table"): "few curves are shown anyway",
    ("calibrate fit", "devices"): "the file says it",
    ("tables", "every"): "few tables are shown anyway",
    ("plan", "master_weights"): "parameters of float32 need no copy; a plan of one program has another fingerprint",
    ("plan", "tf32"): "matmuls of so small programs take the least time of a kernel; a plan of one program has another fingerprint",
    ("plan", "sequence_order"): "the natural order is what a short sequence has anyway",
}
NOT_RUN = {  # verb: why
    "demo": "its one option is the plan's file",
    "certify": "its options write files: test_certify",
    **dict.fromkeys(("cache ls", "cache show", "cache prune", "cache export"), "a cache is the pass's: test_pass_cache"),
    "calibrate measure": "it needs processes that torchrun starts: test_calibrate",
}
QUICK = [("show", "plan"), ("export", "map")]
ALL = [(verb, situation) for verb, several in SITUATIONS.items() for situation in several]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("options")


def ignored(verb, situation, folder):
    """The options that do nothing and for which no reason is given."""
    found = outcomes(verb, situation, folder)
    return [name for name, what in found.items() if what == "same" and ("*", name) not in UNSEEN and (verb, name) not in UNSEEN]


def test_every_option_has_a_value_and_every_verb_a_situation():
    assert set(SITUATIONS) | set(NOT_RUN) == set(verbs())
    for verb in SITUATIONS:
        for p in verbs()[verb]:
            tried = [lines(verb, situation) for situation in SITUATIONS[verb]]
            known = getattr(p, "is_flag", False) or p.name in VALUES or (verb, p.name) in OWN
            assert p.required and p.param_type_name == "argument" or (known and any(p.name in one for one in tried)), (verb, p.name)


def test_every_reason_is_that_of_an_option():
    options = {(verb, p.name) for verb, parameters in verbs().items() for p in parameters}
    assert all((verb, name) in options or (verb == "*" and any(name == other for _, other in options)) for verb, name in UNSEEN)


@pytest.mark.parametrize(("verb", "situation"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL])
def test_an_option_changes_the_answer_or_is_refused(verb, situation, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert ignored(verb, situation, folder) == []


def test_an_option_that_is_ignored_would_be_seen(folder, monkeypatch):
    """The control: without the rule."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(combinations, "RULES", [rule for rule in combinations.RULES if not rule.why.startswith("on a format")])
    assert "within" in ignored("export", "map", folder)


@pytest.mark.parametrize("scheme", ["auto", pytest.param("data_parallel", marks=pytest.mark.slow)])
def test_a_degree_that_shards_nothing_is_refused(scheme):
    code, out, err = run("simulate", TINY, "--scheme", scheme, "--tensor", "5", "--json")
    assert (code, out) == (2, "") and "tensor is 5, but nothing of the model can be sharded so" in err
    assert run("simulate", TINY, "--scheme", scheme, "--tensor", "2", "--json")[0] == 0


@pytest.mark.parametrize("verb", ["explain", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("simulate", "show"))])
@pytest.mark.parametrize("given", [["--set", "batch=32"], ["--set", "hidden=32"], ["--set", "dtype=bfloat16"]], ids=" ".join)
def test_sizes_that_a_plan_was_not_made_for_are_refused(verb, given, folder, monkeypatch):
    monkeypatch.chdir(folder)
    prepare(["tiny.json"], folder)
    more = {"explain": ["layers.0.up.weight"], "show": ["--html", "new.html"]}.get(verb, [])
    words = [verb, "tiny.json", *more, "--trust", "--json"]
    code, out, err = run(*words, *given)
    assert (code, out) == (2, "") and "tiny.json was planned for" in err and "--any-graph" in err
    assert run(*words, "--set", "batch=16")[0] == 0  # as it was planned


@pytest.mark.parametrize(
    "option", [{"optimizer": "sgd"}, {"master_weights": True}, {"recompute": 1}, {"accumulation_dtype": "float32"}], ids=str
)
def test_an_option_of_training_is_refused_for_a_forward_pass(option):
    module, inputs = mlp.tiny()
    with pytest.raises(ValueError, match=f"{next(iter(option))} is .*, which has no effect on a forward pass; add training=True"):
        autoshard.plan(module, inputs, Mesh.from_bandwidths((2,)), baselines=False, **option)
