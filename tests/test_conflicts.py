"""Why there is no plan: the conflict is minimal, judged by brute force over all subsets of what was asked."""

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import pytest

from autoshard.api import plan
from autoshard.capture import capture
from autoshard.formulate import Formulation, with_pins
from autoshard.graph import checkpointed, forward_blocks
from autoshard.layout import text
from autoshard.planning.conflicts import find_conflict
from autoshard.planning.demands import allowed_by_pins
from autoshard.planning.instance import Instance, formulate_for
from autoshard.planning.options import Demand, Infeasible, Options, Stopwatch
from autoshard.planning.plan import baseline_only, plan_captured
from autoshard.planning.question import ModelGraphs, Question
from autoshard.planning.refusal import infeasible
from autoshard.planning.tying import tied, tied_groups
from autoshard.solvers import Answer, Status, solve
from autoshard.solvers.ilp import ILP
from autoshard.solvers.incumbent import Incumbent, Record
from autoshard.strategies import candidates
from models import gpt2, mlp
from tests.helpers import fast_mesh

MODELS = {
    "mlp forward 2": (lambda: mlp.tiny(layers=2), False, (2,)),
    "mlp training 2": (lambda: mlp.tiny(layers=2, batch=256), True, (2,)),  # more bytes in activations than in parameters
    "gpt2 training 2": (lambda: gpt2.tiny(layers=2), True, (2,)),
}


@dataclass(frozen=True)
class Asked:
    """A demand and the options that ask for it."""

    demand: Demand
    options: tuple[tuple[str, object], ...]


def pin(name: str, layout: str) -> Asked:
    return Asked(Demand("pin", name, layout), (("pins", ((name, layout),)),))


def keep(name: str, layout: str) -> Asked:
    return Asked(Demand("keep", name, layout), (("keep", ((name, layout),)),))


def forbid(name: str, layout: str) -> Asked:
    return Asked(Demand("forbid", name, layout), (("forbid", ((name, layout),)),))


def flag(name: str, value: object = True) -> Asked:
    return Asked(Demand(name, value=value), ((name, value),))


# -- the reference: HiGHS on the problem as it is, for every subset -------------------------------------------------------------------


@cache
def graph_of(model: str, recomputed: bool = False):
    build, training, _ = MODELS[model]
    graph = capture(*build(), training=training)
    return checkpointed(graph, len(forward_blocks(graph))) if recomputed else graph


@cache
def formulated_of(model: str, recomputed: bool = False) -> Formulation:
    _, training, shape = MODELS[model]
    graph = graph_of(model, recomputed)
    return formulate_for(graph, candidates(graph, fast_mesh(shape)), fast_mesh(shape), Options(training=training))


def options_of(model: str, asked) -> Options:
    found: dict = {"training": MODELS[model][1], "baselines": False}
    for one in asked:
        for key, value in one.options:
            if key == "forbid":
                for name, layout in value:
                    found.setdefault(key, {}).setdefault(name, []).append(layout)
            elif isinstance(value, tuple):
                found.setdefault(key, {}).update(value)
            else:
                found[key] = value
    return Options(**found)


@cache
def possible(model: str, asked: tuple[Asked, ...]) -> bool:
    """Whether some plan meets what is asked; without a word about recompute every block may be recomputed."""
    options = options_of(model, asked)
    graphs = [False] if not options.training or any(one.demand.kind == "recompute" for one in asked) else [False, True]
    return any(_has_plan(formulated_of(model, recomputed), options) for recomputed in graphs)


def _has_plan(formulated: Formulation, options: Options) -> bool:
    problem = replace(with_pins(formulated, allowed_by_pins(formulated, options)), usage_limit=options.memory_limit)
    if options.memory_limit is None:
        problem = replace(problem, usages=())
    if options.tie_blocks:
        problem = tied(problem, tied_groups(formulated))
    record = Record(problem, 1e9, 1e3, lambda: 0.0)  # the first answer is enough
    incumbent = Incumbent(problem, record)
    ILP().run(problem, incumbent)
    assert record.choice is not None or incumbent.bound == math.inf
    return record.choice is not None


def complaint(model: str, asked, conflict) -> str | None:
    """What is wrong with a conflict, found by looking at every subset of what was asked; None where it is minimal."""
    of = {one.demand: one for one in asked}
    if not set(conflict) <= set(of):
        return "it names what nobody asked for"
    smallest: list[set] = []
    for count in range(len(asked) + 1):
        for subset in combinations(asked, count):
            demands = {one.demand for one in subset}
            if not any(known <= demands for known in smallest) and not possible(model, subset):
                smallest.append(demands)
    if set(conflict) in smallest:
        return None
    return "it is more than need be" if any(known < set(conflict) for known in smallest) else "there is a plan that meets it"


# -- what is asked, by kind ---------------------------------------------------------------------------------------------------------------


def weights(model: str, block: int = 0) -> list[str]:
    """The two weights of a block's MLP: into it, and out of it."""
    return [name for name in graph_of(model).parameters if f".{block}." in name and name.endswith(MLP_WEIGHTS)]


MLP_WEIGHTS = ("up.weight", "down.weight", "c_fc.weight", "mlp.c_proj.weight")


def over_last(model: str, placement: str) -> str:
    """A layout that does something over the last axis only."""
    return ",".join(["R"] * (len(MODELS[model][2]) - 1) + [placement])


def recompute(model: str) -> list[Asked]:
    return [flag("recompute", 0)] if MODELS[model][1] else []


@cache
def least(model: str, asked: tuple[Asked, ...] = (), recomputed: bool = False) -> tuple[float, float]:
    """Bytes per device: nothing fits below the first, what is asked fits in the second."""
    formulated = formulated_of(model, recomputed)
    pinned = with_pins(formulated, allowed_by_pins(formulated, options_of(model, asked)))
    why = solve(replace(pinned, usage_limit=1.0)).infeasibility
    assert why is not None
    return why.smallest_limit


def too_little_memory(model: str) -> list[Asked]:
    """For any plan: no pin is to blame."""
    pins = [pin(name, over_last(model, "S(0)")) for name in (*weights(model), *weights(model, 1))]
    fewest = min(least(model, recomputed=recomputed)[0] for recomputed in (False, MODELS[model][1]))
    return [flag("memory_limit", 0.5 * fewest), *recompute(model), *pins]


def too_little_beside_whole_weights(share: float):
    def asked(model: str) -> list[Asked]:
        """Enough for a plan, and `share` of the way to what the pins take."""
        pins = tuple(pin(name, over_last(model, "R")) for name in (*weights(model), *weights(model, 1)))
        low, high = least(model)[1], least(model, pins)[0]
        assert low < high
        return [flag("memory_limit", math.floor(low + share * (high - low)) - 1.0), *recompute(model), *pins]

    asked.__name__ = f"weights are whole and memory is at {share}"
    return asked


def too_little_without_recomputing(model: str) -> list[Asked]:
    pins = [pin(name, over_last(model, "S(0)")) for name in weights(model)] + [forbid("*.bias", over_last(model, "S(0)"))]
    low, high = least(model, tuple(pins), recomputed=True)[1], least(model)[0]
    assert low < high
    return [flag("memory_limit", (low + high) / 2), *recompute(model), *pins]


def a_sum_of_what_is_none(model: str) -> list[Asked]:
    """An op passes sums on, and what it reads is pinned to be none: either alone would do."""
    graph, found = graph_of(model), formulated_of(model).candidates
    given = [{text(c.outputs[0]) for c in cs if c.outputs[0]} for cs in found.of]
    for b, op in enumerate(graph.ops):
        if len(op.inputs) == 1 and op.inputs[0][1] == 0 and "P" in given[b] and {"P", "S(0)"} <= given[a := op.inputs[0][0]]:
            pins = pin(op.name, "P"), pin(graph.ops[a].name, "S(0)")
            if all(possible(model, (one,)) for one in pins):
                others = [pin(name, "R") for name in weights(model)]
                return [*others, pins[0], flag("memory_limit", 1e9), pins[1], *recompute(model)]
    raise AssertionError("no op of the model passes a sum on")


def every_layout_forbidden(model: str) -> list[Asked]:
    name = weights(model)[0]
    all_of_it = [forbid(name, ",".join(["*"] * (len(MODELS[model][2]) - 1) + [p])) for p in ("S(0)", "R", "S(1)")]
    return [all_of_it[0], pin(weights(model, 1)[0], over_last(model, "R")), *all_of_it[1:], forbid("*.bias", over_last(model, "R"))]


def pinned_and_forbidden(model: str) -> list[Asked]:
    up, down = weights(model)
    layout, others = over_last(model, "S(1)"), [forbid("*.bias", over_last(model, "R")), flag("memory_limit", 1e9)]
    return [pin(down, layout), pin(up, layout), *others, forbid("*weight", layout)]


def blocks_tied_and_pinned_apart(model: str) -> list[Asked]:
    (up, down), (other_up, other_down) = weights(model), weights(model, 1)
    apart = [pin(up, over_last(model, "S(0)")), pin(down, over_last(model, "R")), pin(other_up, over_last(model, "S(1)"))]
    return [*apart, flag("tie_blocks"), pin(other_down, over_last(model, "R"))]


def nothing_whole_and_nothing_cut(model: str) -> list[Asked]:
    """An op that must be cut, and may not be."""
    axes, op = len(MODELS[model][2]), next(op for op in graph_of(model).ops if op.target == "aten.gelu.default")
    cuts = [f"S({dim})" for dim in range(len(op.output.shape))]
    patterns = [",".join("*" if k != axis else c for k in range(axes)) for axis in range(axes) for c in cuts]
    return [pin(weights(model)[1], over_last(model, "R")), *(forbid(op.name, p) for p in patterns), flag("skip_fully_replicated")]


def kept_and_forbidden(model: str) -> list[Asked]:
    up, down = weights(model)
    kept = [keep(up, over_last(model, "S(0)")), keep(down, over_last(model, "S(1)"))]
    other = pin(weights(model, 1)[0], over_last(model, "R"))
    return [*kept, forbid(down, over_last(model, "S(1)")), forbid(up, over_last(model, "R")), other]


ANYWHERE = [
    too_little_memory, every_layout_forbidden, pinned_and_forbidden, blocks_tied_and_pinned_apart, nothing_whole_and_nothing_cut,
    kept_and_forbidden, *map(too_little_beside_whole_weights, (0.25, 1.0)),
]  # fmt: skip
IN_TRAINING = [a_sum_of_what_is_none, too_little_without_recomputing]
ON_MLPS = [too_little_beside_whole_weights(0.6)]
CASES = [
    (model, kind)
    for model in MODELS
    for kind in [*ANYWHERE, *(IN_TRAINING if MODELS[model][1] else []), *(ON_MLPS if "mlp" in model else [])]
]


# -- what is checked ----------------------------------------------------------------------------------------------------------------------


def refused(model: str, asked) -> Infeasible:
    mesh = fast_mesh(MODELS[model][2])
    with pytest.raises(Infeasible) as caught:
        plan_captured(Question(ModelGraphs(graph_of(model)), mesh, options_of(model, asked), Stopwatch(None)))
    return caught.value


def question(model: str, options: Options, progress=None) -> tuple[Question, Instance]:
    formulated = formulated_of(model)
    return Question(ModelGraphs(graph_of(model)), formulated.mesh, options, Stopwatch(progress)), Instance(formulated, formulated.problem)


def case(model: str, kind):
    slow = not model.startswith("mlp forward") and (model, kind) != ("mlp training 2", too_little_without_recomputing)
    return pytest.param(model, kind, marks=[pytest.mark.slow] if slow else [], id=f"{model}-{kind.__name__}")


def test_there_are_thirty_cases():
    assert len(CASES) == len({(model, kind.__name__) for model, kind in CASES}) == 30


@pytest.mark.parametrize(("model", "kind"), [case(model, kind) for model, kind in CASES])
def test_a_conflict_is_minimal(model, kind):
    asked = kind(model)
    assert 3 <= len(asked) <= 6
    error = refused(model, asked)
    assert complaint(model, asked, error.conflict) is None and error.minimal
    assert all(str(demand) in str(error) for demand in error.conflict if demand.kind != "memory_limit")


# -- negative controls: the checker sees a conflict that is none, or too large -----------------------------------------------------------


@pytest.mark.parametrize("kind", [pinned_and_forbidden, nothing_whole_and_nothing_cut, too_little_beside_whole_weights(0.25)])
def test_a_padded_conflict_is_caught(kind):
    model = "mlp forward 2"
    asked = kind(model)
    conflict = refused(model, asked).conflict
    others = [one.demand for one in asked if one.demand not in conflict]
    assert others and complaint(model, asked, conflict) is None
    assert {complaint(model, asked, (*conflict, other)) for other in others} == {"it is more than need be"}
    assert {complaint(model, asked, [d for d in conflict if d != left]) for left in conflict} == {"there is a plan that meets it"}
    assert complaint(model, asked, (*conflict, Demand("pin", "gelu", "R,R"))) == "it names what nobody asked for"


# -- beside the cases ---------------------------------------------------------------------------------------------------------------------


def test_without_time_the_conflict_is_all_that_was_asked_and_says_so():
    model = "mlp forward 2"
    asked = pinned_and_forbidden(model)
    options = options_of(model, asked)
    found = find_conflict(*question(model, options), seconds=1e9, now=_late())
    assert not found.minimal and set(found.demands) == {one.demand for one in asked}
    assert complaint(model, asked, found.demands) == "it is more than need be"


def _late():
    """A clock that has passed every deadline when it is asked again."""
    times = iter([0.0])
    return lambda: next(times, math.inf)


def test_a_baseline_that_a_pin_forbids_is_named():
    graph, name = graph_of("mlp training 2"), "layers.0.up.weight"
    with pytest.raises(Infeasible) as caught:
        options = Options(training=True, pins={name: "S(0)"})
        baseline_only(Question(ModelGraphs(graph), fast_mesh((2,)), options, Stopwatch(None)), "data_parallel")
    assert caught.value.conflict == (Demand("pin", name, "S(0)"), Demand("algo", value="data_parallel"))


@pytest.mark.slow
def test_recomputing_is_no_part_of_a_conflict_that_it_does_not_solve():
    graph, mesh = graph_of("mlp training 2"), fast_mesh((2,))
    for recompute, words in (("auto", ", with all 2 blocks recomputed"), (0, "")):
        options = Options(training=True, baselines=False, recompute=recompute, memory_limit=1000.0)
        with pytest.raises(Infeasible) as caught:
            plan_captured(Question(ModelGraphs(graph), mesh, options, Stopwatch(None)))
        assert [d.kind for d in caught.value.conflict] == ["memory_limit"] and str(caught.value).endswith(words)


def test_a_model_without_blocks_has_none_to_recompute():
    with pytest.raises(Infeasible, match="with no repeated blocks that could be recomputed$"):
        plan(*mlp.tiny(layers=1), fast_mesh((2,)), training=True, recompute="blocks", memory_limit=1000.0, baselines=False)


def test_an_exact_pin_in_a_conflict_is_taken_away_by_stars():
    graph, mesh, name = graph_of("mlp training 2"), fast_mesh((2,)), "layers.0.up.weight"
    given = {"training": True, "baselines": False, "forbid": {name: ["S(0)", "R"]}}
    with pytest.raises(Infeasible) as caught:
        plan_captured(Question(ModelGraphs(graph), mesh, Options(pins={"*.weight": "R", name: "S(0)"}, **given), Stopwatch(None)))
    assert [str(d) for d in caught.value.conflict] == [f"pin {name}=S(0)", f"forbid {name}=S(0)"]
    freed = plan_captured(Question(ModelGraphs(graph), mesh, Options(pins={"*.weight": "R", name: "*"}, **given), Stopwatch(None)))
    assert freed.parameters[name]["layout"] == "S(1)" and freed.parameters["layers.1.up.weight"]["layout"] == "R"


def test_what_time_did_not_suffice_to_decide_is_no_conflict():
    answer = Answer(Status.UNKNOWN, None, math.inf, 0.0, "auto")
    for limit, sentence in ((1e6, "no answer within 7 s: no plan within 1.000 MB per device was found, there may be one; raise the "
                                  "memory limit or the time limit"),
                            (None, "no answer within 7 s: no plan was found, there may be one; raise the time limit")):  # fmt: skip
        options = Options(memory_limit=limit, time_limit=7.0, pins={"gelu": "R,R"})
        error = infeasible(*question("mlp forward 2", options), answer)
        assert str(error) == sentence and error.conflict == () and not error.minimal


def test_progress_counts_the_tests():
    model, said = "mlp forward 2", []
    options = options_of(model, pinned_and_forbidden(model))
    find_conflict(*question(model, options, lambda message, _: said.append(int(message.rpartition(" ")[2]))))
    assert said == list(range(1, len(said) + 1)) and 2 <= len(said) <= 2 * 2 * 3  # 2 |C| log2 of the 5 demands


def test_a_conflict_as_plain_data():
    error = refused("mlp forward 2", pinned_and_forbidden("mlp forward 2"))
    record = error.to_dict()
    assert json.loads(json.dumps(record)) == record and record["status"] == "infeasible" and record["message"] == str(error)
    assert [one["text"] for one in record["conflict"]] == [str(d) for d in error.conflict]
