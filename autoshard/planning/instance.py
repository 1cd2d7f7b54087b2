"""The question in numbers: the formulation of the graph, and the problem that obeys the pins. Created once, and no step changes it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, Joined, Training, formulate, with_pins
from autoshard.graph import Graph, repeated_blocks
from autoshard.mesh import Mesh
from autoshard.planning.demands import Demanded, allowed_by_pins
from autoshard.planning.few_layers import FewLayers, correspondence
from autoshard.planning.options import Options
from autoshard.planning.question import Question
from autoshard.problem import Problem
from autoshard.solvers import Answer
from autoshard.strategies import Candidates, candidates, fused

SMALL = 8  # ops: a smaller block is no part of its own


@dataclass(frozen=True, eq=False)
class Instance:
    """A question in numbers."""

    formulated: Formulation  # of several programs: Joined, which the search reads in the same way
    problem: Problem  # without the choices that pins, kept and forbidden layouts exclude
    few_layers: FewLayers | None = None  # the same model with few layers, and how its answers extend to this one
    scheme: Demanded | None = None  # a baseline that the plan has to follow
    completed: dict[tuple, Answer] = field(default_factory=dict, init=False)  # proven answers of baselines: several have the same pins

    @cached_property
    def layers(self) -> Sequence[int]:
        """The layer of every node, for the solvers."""
        return self.formulated.homes if isinstance(self.formulated, Joined) else layers_of_nodes(self.formulated)


def instance_of(question: Question) -> Instance:
    """The problem that the solvers get. ValueError where a pin names no tensor, or a layout that is not possible."""
    options, clock = question.options, question.clock
    with clock.phase("candidates", "listing layouts", 0.3), no_search_for_cycles():
        layouts = candidates(question.graph, question.mesh)
    with clock.phase("formulate", "pricing layouts", 0.35), no_search_for_cycles():
        formulated = formulate_for(question.graph, layouts, question.mesh, options)
        few_layers = question.model.few_layers if options.solver == "auto" else None
        problem = with_pins(formulated, allowed_by_pins(formulated, options))
        return Instance(formulated, problem, extended_from(few_layers, formulated, options))


def extended_from(few_layers: Graph | None, formulated: Formulation, options: Options) -> FewLayers | None:
    """The problem of the same model with few layers, and how it extends to this one; None where some op has no corresponding op."""
    if few_layers is None:
        return None
    few = formulate_for(few_layers, candidates(few_layers, formulated.mesh), formulated.mesh, options)
    try:
        return FewLayers(few, correspondence(formulated, few), layers_of_nodes(few))
    except ValueError:  # this is no error: the deep problem is solved without the few layers
        return None


def formulate_for(graph: Graph, layouts: Candidates, mesh: Mesh, options: Options) -> Formulation:
    """The graph's problem with the optimizer and the memory limit of the options, before any pins."""
    training = Training(options.optimizer, options.master_weights, options.microbatches) if graph.trains else None
    return formulate(fused(graph) if options.compiled else graph, layouts, mesh, training=training, memory_limit=options.memory_limit)


def layers_of_nodes(formulated: Formulation) -> list[int]:
    """For each node the number of its layer, from the bottom of the model to its top; the solvers divide a problem by these numbers.

    An op's layer is its instance of a repeated block; 0 for ops that repeat nothing, and for those of blocks of few ops. Another node's is
    that of the op on its first edge: a hub's is that of the op whose value it is.
    """
    places = repeated_blocks(formulated.graph).places
    sizes = Counter((place.block, place.instance) for place in places if place is not None)
    numbers = {key: k for k, key in enumerate(sorted(key for key, size in sizes.items() if size >= SMALL), start=1)}
    layers = [0 if place is None else numbers.get((place.block, place.instance), 0) for place in places]
    layers += [-1] * (len(formulated.problem.node_costs) - len(layers))
    for e in formulated.problem.edges:
        if layers[e.b] < 0 <= layers[e.a]:
            layers[e.b] = layers[e.a]
        elif layers[e.a] < 0 <= layers[e.b]:
            layers[e.a] = layers[e.b]
    return [max(layer, 0) for layer in layers]
