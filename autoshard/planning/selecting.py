"""Recomputation and offloading per tensor, chosen together with the layouts (formulate.saved_values).

    question(context, e)     the problem of all alternatives, in which a share e of the transfers to and from the host costs
    answered                 its best answer; where more is offloaded than the forward's kernels hide, again with a larger share
    plan                     the graph of that answer, with the answer's layouts, judged as any other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, SavedValues, chosen_of, hidden_seconds, transfer_seconds_of, with_pins, with_saved_values
from autoshard.graph import OFFLOADED, RELOADED, Alternatives, Chosen, Graph, alternatives, selective
from autoshard.graph.recompute import SUFFIX
from autoshard.planning.context import Context, Instance, formulate_for, stepped
from autoshard.planning.demands import allowed_by_pins
from autoshard.planning.shallow import Shallow, completed, correspondence
from autoshard.problem import Evaluation, evaluate
from autoshard.strategies import candidates



@dataclass(frozen=True, eq=False)
class Question:
    """The problem of all alternatives of a context."""

    instance: Instance
    formulated: SavedValues


@dataclass(frozen=True, eq=False)
class Selected:
    """An answer as a graph with layouts: what it recomputes and offloads, and its choice in that graph's formulation."""

    chosen: Chosen
    formulated: Formulation
    choice: tuple[int, ...]
    judged: Evaluation


def question(context: Context, exposed: float | None) -> Question:
    """exposed: the share of transfers that costs; None: nothing is offloaded. ValueError where a pin names no tensor."""
    formulated, known = _formulated(context, context.graph)
    pinned = replace(formulated, problem=with_pins(formulated, allowed_by_pins(formulated, context.options)))
    saved = with_saved_values(pinned, known, context.graph, exposed=exposed)
    shallow = None
    if context.shallow is not None and context.options.solver == "auto":
        small, known_small = _formulated(context, context.shallow)
        try:
            corresponding = correspondence(formulated, small)
            shallow = Shallow(with_saved_values(small, known_small, context.shallow, exposed=exposed), corresponding)
        except ValueError:  # some op has no corresponding one: the deep problem is solved without the shallow one
            shallow = None
    return Question(Instance(saved, saved.problem, shallow), saved)


def _formulated(context: Context, graph: Graph) -> tuple[Formulation, Alternatives]:
    known = alternatives(graph)
    all_of_them = stepped(known.graph, context.options)
    with no_search_for_cycles():
        return formulate_for(all_of_them, candidates(all_of_them, context.mesh), context.mesh, context.options), known


def selected(context: Context, question: Question, choice: Sequence[int]) -> Selected:
    """The graph of an answer, with the answer's layouts."""
    saved = question.formulated
    offloads, hidden = transfer_seconds_of(saved, choice), hidden_seconds(saved)
    exposed = max(0.0, 1 - hidden / offloads) if offloads else 0.0
    chosen = chosen_of(saved, choice, exposed)
    graph = stepped(selective(context.graph, chosen), context.options)
    with no_search_for_cycles():
        formulated = formulate_for(graph, candidates(graph, context.mesh), context.mesh, context.options)
    full = _carried_over(saved, choice, formulated)
    return Selected(chosen, formulated, full, evaluate(formulated.problem, full))


def _carried_over(saved: SavedValues, choice: Sequence[int], formulated: Formulation) -> tuple[int, ...]:
    """The answer's layouts in the formulation of its own graph."""
    assert saved.alternatives is not None
    graph, index = formulated.graph, saved.graph.index
    select = {value: index[name] for name, value in saved.alternatives.selected.items()}
    known: dict[int, int] = {}

    def layout_of(node: int, layouts: Sequence) -> object:
        at = saved.layout_index(node, choice)
        return None if at is None else layouts[at]

    for i, op in enumerate(graph.ops):
        if op.kind in (OFFLOADED, RELOADED):
            value = saved.graph.ops[select[op.name.removesuffix(f".{op.kind}")]].inputs[0]
            held = saved.hub(value, choice) if value in saved.hubs else saved.candidate(value[0], choice).outputs[value[1]]
            known[i] = next(k for k, c in enumerate(formulated.candidates.of[i]) if c.outputs[0] == held)
        else:
            at = saved.layout_index(index[op.name], choice)
            assert at is not None, f"{op.name} runs in the graph of an answer in which it is absent"
            known[i] = at
    for (i, k), node in formulated.hubs.items():
        op = graph.ops[i]
        name = op.name.removesuffix(f".{RELOADED}") if op.kind == RELOADED else f"{op.name.removesuffix(SUFFIX)}.{k}"
        old = None if op.kind == RELOADED else saved.hubs.get((index[op.name], k))
        layout = layout_of(old, saved.hub_layouts[index[op.name], k]) if old is not None else None
        if layout is None and name in select and (op.backward or old is None):
            layout = layout_of(select[name], [c.outputs[0] for c in saved.candidates.of[select[name]]])
        if layout in formulated.hub_layouts[i, k]:
            known[node] = formulated.hub_layouts[i, k].index(layout)  # type: ignore[arg-type]
    for k, node in formulated.results.items():
        if node >= len(graph.ops):
            layout = saved.result(k, choice)
            known[node] = formulated.result_layouts[k].index(layout)
    return completed(formulated, known)
