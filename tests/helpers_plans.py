"""Questions about a captured graph, and the plans of one scheme."""

from typing import Any

from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.plan import baseline_only
from autoshard.planning.question import ModelGraphs, Question
from autoshard.solution import Solution


def asked(graph: Graph, mesh: Mesh, **options: Any) -> Question:
    """With all its layers, and without a limit of time."""
    return Question(ModelGraphs(graph), mesh, Options(**options), Stopwatch(None))


def scheme_plan(graph: Graph, mesh: Mesh, scheme: str, **options: Any) -> Solution:
    return baseline_only(asked(graph, mesh, **options), scheme)
