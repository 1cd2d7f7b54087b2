"""The search over variants: what is tried in which order, refusals, Ctrl-C, shares of time; and how far one has to follow `plan`."""

import sys
from dataclasses import replace
from importlib import import_module
from itertools import chain, repeat
from pathlib import Path

import pytest
from torch import nn

from autoshard.graph import forward_blocks
from autoshard.mesh import Mesh
from autoshard.planning.compiling import compilations
from autoshard.planning.options import Infeasible, NoAnswer, Options, Stopwatch
from autoshard.planning.overlapped import OverlappedPlan
from autoshard.planning.plan import plan
from autoshard.planning.question import ModelGraphs, Question
from autoshard.planning.recomputing import recomputations
from autoshard.planning.search import KINDS, search
from autoshard.planning.variants import Answered, Tried, Variant, is_short
from autoshard.solvers import Answer, Status
from models import mlp
from tests.helpers import Ticking, fast_mesh, tiny_graph

PACKAGE = Path(__file__).parent.parent / "autoshard"
module = import_module("autoshard.planning.search")


def asked(clock: Stopwatch | None = None, **options) -> Question:
    return Question(ModelGraphs(tiny_graph("mlp", True)), fast_mesh((2,)), Options(training=True, **options), clock or Stopwatch(None))


def noting(note: str, **more) -> Variant:
    return Variant(note, lambda part: part.map(lambda graph: graph, tried=[*part.assumptions.get("tried", []), note]), **more)


@pytest.fixture
def outcomes(monkeypatch):
    """By what was tried: the cost of the answer, or what is raised; in the order in which it is asked for."""
    known: dict = {}

    def answered(question: Question) -> Answered:
        tried = " ".join(question.assumptions["tried"])
        outcome = known.pop(tried)
        if isinstance(outcome, BaseException):
            raise outcome
        cost, interrupted = outcome if isinstance(outcome, tuple) else (outcome, False)
        return Answered(question, None, Answer(Status.FEASIBLE, (), cost, 0.0, "", interrupted=interrupted))

    monkeypatch.setattr(module, "answered", answered)
    return known


def tried_by(*kinds) -> str:
    return " ".join(search(asked(), kinds).question.assumptions["tried"])


def two(question, tried):
    yield noting("a")
    if tried[-1].has_no_plan:
        yield noting("b", is_last_resort=True)


def three(question, tried):
    for note in "xyz":
        yield noting(note)


def test_variants_of_a_kind_are_tried_under_each_of_those_before(outcomes):
    outcomes |= {"a x": Infeasible(""), "a y": Infeasible(""), "a z": Infeasible(""), "b x": 2.0, "b y": 1.0, "b z": 3.0}
    assert tried_by(two, three) == "b z" and not outcomes


@pytest.mark.parametrize(("second", "best"), [(2.0, "x"), (0.5, "y"), (Infeasible(""), "x")])
def test_a_variant_that_competes_is_the_answer_where_it_is_the_fastest(outcomes, second, best):
    outcomes |= {"x": 1.0, "y": second}
    assert tried_by(lambda question, tried: iter((noting("x"), noting("y", competes=True)))) == best and not outcomes


def test_where_the_last_variant_has_no_plan_the_cheapest_of_the_others_is_the_answer(outcomes):
    outcomes |= {"x": 2.0, "y": 1.0, "z": NoAnswer("no time")}
    assert tried_by(three) == "y" and not outcomes


def test_ctrl_c_in_a_kind_ends_the_kinds_before_it_too(outcomes):
    def both(question, tried):
        yield noting("a")
        yield noting("b")

    outcomes |= {"a x": 1.0, "a y": KeyboardInterrupt()}
    assert tried_by(both, three) == "a x" and not outcomes  # b is not tried


def test_ctrl_c_ends_the_search_with_the_cheapest_that_is_known(outcomes):
    outcomes |= {"x": 1.0, "y": (2.0, True)}
    assert tried_by(three) == "x" and not outcomes
    outcomes |= {"x": 1.0, "y": KeyboardInterrupt()}
    assert tried_by(three) == "x" and not outcomes
    outcomes |= {"x": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        tried_by(three)


@pytest.mark.parametrize(("error", "said"), [(Infeasible("too small", (1.0, 2.0)), "too small, b"), (NoAnswer("no time"), "no time")])
def test_the_refusal_of_a_last_resort_names_it_where_nothing_fits(outcomes, error, said):
    outcomes |= {"a": Infeasible("other"), "b": error}
    with pytest.raises(type(error), match=f"^{said}$") as caught:
        tried_by(two)
    assert caught.value.smallest_limit == error.smallest_limit


@pytest.mark.parametrize(("enough", "said"), [(1.5e6, "too small, b; a 1.500 MB is enough"), (3e6, "too small, b")])
def test_the_refusal_of_a_last_resort_says_what_is_enough_for_another_variant(outcomes, enough, said):
    outcomes |= {"a": Infeasible("other", (1e6, enough)), "b": Infeasible("too small", (2e6, 2e6))}
    with pytest.raises(Infeasible, match=f"^{said}$") as caught:
        tried_by(two)
    assert caught.value.smallest_limit == ((1e6, enough) if enough < 2e6 else (2e6, 2e6))


def test_a_variant_has_its_share_of_the_time_that_is_left(outcomes):
    limits = []

    def halves(question, tried):
        for share in (0.5, 1.0):
            yield Variant("", lambda part: limits.append(part.options.time_limit) or noting("t").transform(part), share)
            outcomes["t"] = 1.0

    outcomes["t"] = 1.0
    search(asked(Stopwatch(None, Ticking()), time_limit=100.0), (halves,))
    assert 50 <= limits[0] <= 52 and limits[1] == 100


def test_a_new_kind_is_one_function_and_its_place_in_the_list():
    """Here: the parameters of one layer pinned, which forbids the plan of least cost."""

    def pins(question, tried):
        yield Variant("pinned", lambda part: part.with_options(pins={"layers.0.up.weight": "R"}))

    free, pinned = (search(asked(baselines=False), (*KINDS, *more)) for more in ((), (pins,)))
    assert pinned.question.options.pins and not free.question.options.pins
    assert pinned.answer.cost >= free.answer.cost > 0


def calls_until_the_solver(module: nn.Module, inputs: tuple, mesh: Mesh) -> list[tuple[str, str]]:
    """The calls that planning makes with the model, the mesh or the question as an argument: (room, function)."""
    calls, ended = [], []

    def profile(frame, event, argument) -> None:
        code = frame.f_code
        if event != "call" or ended or not code.co_filename.startswith(str(PACKAGE)):
            return
        place = Path(code.co_filename).relative_to(PACKAGE).with_suffix("").parts
        ended.extend([True] if (*place, code.co_name) == ("solvers", "solve", "solve") else [])
        caller = Path(frame.f_back.f_code.co_filename)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        carried = [frame.f_locals[name] for name in names if isinstance(frame.f_locals.get(name), (nn.Module, ModelGraphs, Mesh, Question))]
        if carried and caller.parent.name == "planning":
            calls.append((place[0], code.co_qualname))

    sys.setprofile(profile)
    try:
        plan(module, inputs, mesh, training=True, baselines=False)
    finally:
        sys.setprofile(None)
    assert ended
    return calls


def test_the_model_and_the_mesh_can_be_followed_by_hand_to_the_solver():
    """docs/how.md has the walk; a property of the mesh or the question is no call one goes into."""
    calls = calls_until_the_solver(*mlp.tiny(layers=4), fast_mesh((2, 2)))
    calls = [(room, name) for room, name in calls if room != "mesh"]
    assert len(calls) <= 80 and len({room for room, _ in calls}) <= 8, calls
    assert [name for room, name in calls if room != "planning"][0] == "capture_deep"


def test_a_model_without_few_layers_is_mapped_without_them():
    graph = tiny_graph("mlp", True)
    both, one = ModelGraphs(graph, graph), ModelGraphs(graph)
    assert one.map(lambda g: replace(g)).few_layers is None
    assert both.map(lambda g: replace(g)).few_layers is not graph
    seen = iter((graph, None))
    assert both.map(lambda _: next(seen)).few_layers is None


def judged(question: Question, peak: float | None, refusal: Infeasible | None = None) -> Tried:
    answered = None if refusal else Answered(question, None, Answer(Status.FEASIBLE, (), 1.0, 0.0, "", peak=peak))
    return Tried(Variant(""), question, answered, refusal)


def test_memory_is_short_where_nothing_fits_or_a_plan_nearly_fills_it_and_there_is_time_left():
    def short(limit, peak=None, refusal=None, seconds=0.0) -> bool:
        question = asked(Stopwatch(None, chain((0.0,), repeat(seconds)).__next__), memory_limit=limit, time_limit=10.0)
        return is_short(question, judged(question, peak, refusal))

    assert [short(100.0, peak) for peak in (None, 90.0, 90.1)] == [False, False, True] and not short(None, 1e9)
    assert short(None, refusal=Infeasible("")) and not short(100.0, refusal=NoAnswer(""), seconds=10.0)
    assert short(100.0, refusal=NoAnswer(""))  # the search gave way to a variant that needs less
    assert short(100.0, 95.0, seconds=9.9) and not short(100.0, 95.0, seconds=10.0)


@pytest.mark.parametrize(
    ("options", "peak", "explains"),
    [({"compiled": False}, 1.0, [True]), ({"recompute": "auto"}, 95.0, [True]), ({"training": False}, 95.0, [True]),
     ({}, 1.0, [False]), ({}, 95.0, [False, True]), ({"memory_limit": None}, 95.0, [True])],
)  # fmt: skip
def test_a_compiled_step_computes_more_again_where_memory_is_short_and_the_last_variant_explains(options, peak, explains):
    question, tried, told = asked().with_options(**{"compiled": True, "memory_limit": 100.0, **options}), [judged(asked(), 1.0)], []
    for variant in compilations(question, tried):
        asks = variant.transform(question)
        is_compiled = question.options.compiled and question.options.training and question.options.recompute != "auto"
        assert ("computed_again" in asks.assumptions) == is_compiled
        told.append(asks.explains)
        tried.append(judged(asks, peak))
    assert told == explains


# -- saved values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "peak", "second", "all_blocks"),
    [
        (9.0, 0.95e9, 8.0, True),  # far above its bound, and memory is full: all blocks recomputed are faster,
        (9.0, 0.95e9, 10.5, False),  # slower,
        (9.0, 0.95e9, Infeasible("too little"), False),  # refused,
        (9.0, 0.95e9, KeyboardInterrupt(), False),  # interrupted
        (9.9, 0.95e9, None, False),  # near its bound, or there is room: they are not asked for
        (9.0, 0.85e9, None, False),
        (9.0, None, None, False),
    ],
)
def test_all_blocks_recomputed_compete_where_single_tensors_leave_much_open_and_memory_is_full(bound, peak, second, all_blocks):
    question = asked(memory_limit=1e9, recompute="auto")
    question = replace(question, model=ModelGraphs(tiny_graph("llama", True)))
    seen = []

    def solve(part):
        seen.append(part.options.recompute)
        outcome = 10.0 if len(seen) == 1 else second
        if isinstance(outcome, BaseException):
            raise outcome
        answer = Answer(Status.FEASIBLE, (), 1.0, 0.5, "", peak=peak)
        return Answered(part, None, answer, overlapped=OverlappedPlan(answer, outcome, min(bound, outcome), outcome))

    found = search(question, [recomputations], solve)
    blocks = len(forward_blocks(question.graph))
    assert seen == ["auto", blocks][: 1 if second is None else 2] and blocks == 2
    assert found.question.options.recompute == (blocks if all_blocks else "auto")
    assert found.plan.interrupted == isinstance(second, KeyboardInterrupt)
