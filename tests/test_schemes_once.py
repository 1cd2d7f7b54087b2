"""Baselines whose pins are equal are completed once; the answer is that of a search of its own."""

from dataclasses import replace

from autoshard.baselines import baselines
from autoshard.mesh import Mesh
from autoshard.planning import baselining
from autoshard.planning.instance import instance_of
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.question import ModelGraphs, Question
from tests.helpers import tiny_graph


def test_equal_pins_are_completed_once_for_each_gap(monkeypatch):
    searches = []
    solve = baselining.solve
    monkeypatch.setattr(baselining, "solve", lambda *given, **options: searches.append(options["gap"]) or solve(*given, **options))
    graph, mesh = tiny_graph("mlp", True), Mesh.from_bandwidths((2, 2))
    context = Question(ModelGraphs(graph), mesh, Options(), Stopwatch(None))
    instance = instance_of(context)
    schemes = baselines(graph, mesh, instance.formulated.candidates)
    for scheme in (schemes[0], replace(schemes[0], name="another"), schemes[1]):
        known = baselining.scheme_price(context, instance, scheme)
        assert known == baselining.scheme_price(context, replace(instance), scheme)  # which knows no answers
    assert len(searches) == 2 + 3
    baselining.scheme_price(context, instance, schemes[0], gap=0.01)
    assert searches[-1] == 0.01 and len(searches) == 6
