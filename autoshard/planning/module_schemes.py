"""The part of a plan that can be run by launchers that shard modules (torch's parallel styles, fully_shard), and what that part costs.

    styles   {weight: column | row | column_gathered | vocabulary | features | inside}, over one mesh axis; other weights are replicated
    dropped  [{"weights", "why", "plan"}]: weights that the plan shards on that axis and the launchers can't
    seconds, peak_bytes  of a step under these styles: other axes shard the batch; parameters are replicated there, or sharded (fully_shard)
    recomputed           modules of the blocks that the backward pass computes again
    gathered_again       whether parameters are gathered for the backward pass again

The entry of NO_AXIS has no styles: all axes shard the batch, parameters are as in data_parallel or a stage of ZeRO (baselines/schemes.py).

A group of weights (baselines/uses.py) is sharded where the plan shards it in more than half of the layers. Equal layers get equal styles,
because a launcher's plan says `layers.*`. The styles are worked out while planning, because a saved plan no longer has the graph.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.baselines import ZERO, Group, Use, Uses, baselines, from_parameters, launched, parameter_uses
from autoshard.formulate import Formulation
from autoshard.graph import Graph, forward_blocks, grouped, recomputed_names
from autoshard.layout import text
from autoshard.planning.baselining import scheme_price
from autoshard.planning.instance import Instance
from autoshard.planning.question import Question

Choice = Sequence[int]
NO_AXIS = ""  # the entry of schemes that shard the batch alone


def modules_of(question: Question, instance: Instance, choice: Choice) -> dict[str, dict]:
    """For every mesh axis that shards a weight where it is used, and the last axis: styles, dropped, seconds, peak_bytes."""
    formulated = instance.formulated
    graph, mesh = formulated.graph, formulated.mesh
    axes = [k for k, axis in enumerate(mesh.axes) if axis.size > 1]
    uses_by_size: dict[int, Uses] = {}
    priced: dict[tuple, Any] = {}
    rows = {}
    for k in axes:
        size = mesh.axes[k].size
        if size not in uses_by_size:
            slots = next(iter(uses_by_size.values())).slots if uses_by_size else None
            uses_by_size[size] = parameter_uses(graph, formulated.candidates, size, slots)
        uses = uses_by_size[size]
        modes = {use: _mode(formulated, choice, use, k) for use in uses.uses}
        if any(modes.values()) or k == axes[-1]:
            rows[mesh.axes[k].name] = _on_axis(question, instance, choice, k, uses, modes, priced)
    return {**rows, NO_AXIS: _on_no_axis(question, instance, choice)} if axes else rows


def _on_no_axis(question: Question, instance: Instance, choice: Choice) -> dict[str, Any]:
    """What launchers can do that shard the batch over all axes: replicate parameters, or shard them as a stage of ZeRO."""
    graph, mesh, candidates = instance.formulated.graph, instance.formulated.mesh, instance.formulated.candidates
    schemes = baselines(graph, mesh, candidates, ("data_parallel", *ZERO))
    prices = {scheme.name: scheme_price(question, instance, scheme) for scheme in schemes}
    facts = {"gathered_again": _gathered_again(instance.formulated, choice), "recomputed": _recomputed(graph)}
    return {"styles": {}, "dropped": [], **_priced(prices), **facts}


def _priced(prices: Mapping[str, tuple[float, float] | None]) -> dict[str, dict[str, float]]:
    known = {name: price for name, price in prices.items() if price is not None}
    seconds = {name: seconds for name, (seconds, _) in known.items()}
    return {"seconds": seconds, "peak_bytes": {name: peak for name, (_, peak) in known.items()}}


def _gathered_again(formulated: Formulation, choice: Choice) -> bool:
    """Whether most bytes of the sharded parameters with several readers are gathered for every reader, not once for all of them."""
    graph, views, sum_of = formulated.graph, from_parameters(formulated.graph), 0
    for i in graph.parameters.values():
        value, stored = (i, 0), formulated.candidate(i, choice).outputs[0]
        while len(users := graph.users.get(value, ())) == 1 and (j := users[0][0]) in views and len(graph.ops[j].inputs) == 1:
            value = (j, 0)
        if stored is None or len(users) < 2 or all(p.is_replicate() for p in stored):
            continue
        shared = formulated.candidate(value[0], choice).outputs[0]
        if value in formulated.hubs:
            shared = formulated.hub_layouts[value][choice[formulated.hubs[value]]]
        sharded = shared is not None and any(p.is_shard() for p in shared)
        sum_of += graph.ops[i].output.bytes * (1 if sharded else -1)
    return sum_of > 0


def _recomputed(graph: Graph) -> list[str]:
    """The modules of the repeated blocks of which ops run again."""
    again = recomputed_names(graph)
    names = []
    for block in forward_blocks(graph):
        counted = Counter(layer_of(graph.ops[i].module) for i in block if graph.ops[i].name in again)
        names += [name for name, _ in counted.most_common(1) if name]  # a block may end with an op of the next layer
    return names


def layer_of(module: str) -> str:
    """`model.layers.3.mlp.up_proj` -> `model.layers.3`; empty outside of repeated modules."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", module)
    return match[0] if match else ""


def _on_axis(
    question: Question, instance: Instance, choice: Choice, axis: int, uses: Uses, modes: dict[Use, str], priced: dict[tuple, Any]
) -> dict[str, Any]:
    """priced: prices so far; on an axis with another's size and link, inner or outer, the launcher runs the same at the first's price."""
    formulated = instance.formulated
    graph = formulated.graph
    tied = {name for pair in graph.tied for name in pair}
    chosen = _chosen_groups(uses.groups, modes)
    styles = {use.parameter: "column" for g in chosen for use in g.columns} | {use.parameter: "row" for g in chosen for use in g.rows}
    styles |= dict.fromkeys((name for g in chosen for name in g.inside), "inside")
    lone, counted = [], Counter(use.parameter for use in uses.uses)
    for use in uses.uses:
        if use.parameter in styles or not modes[use] or use.parameter in tied or counted[use.parameter] > 1 or not use.is_of_module(graph):
            continue
        if use.kind == "embedding":
            styles[use.parameter] = "features" if modes[use] == "column" else "vocabulary"
            lone.append((use, use.kept if modes[use] == "column" else use.contracted))
        elif modes[use] == "column" and use.kept == 0 and not any(use in (*g.columns, *g.rows) for g in chosen):
            styles[use.parameter] = "column_gathered"
            lone.append((use, use.kept))
    styles = _equal_in_all_layers(styles, uses)
    lone = [(use, dim) for use, dim in lone if use.parameter in styles]
    roots = [g.root for g in chosen]
    kind = (replace(formulated.mesh.axes[axis], name=""), *sorted(styles.items()))
    if kind not in priced:
        prices = {}
        for name, fully_shard in (("modules", False), ("fully_shard", True)):
            if not fully_shard or len([a for a in formulated.mesh.axes if a.size > 1]) > 1:
                scheme = launched(graph, formulated.mesh, formulated.candidates, axis, uses, roots, lone, fully_shard=fully_shard)
                prices[name] = scheme_price(question, instance, scheme)
        priced[kind] = _priced(prices)
    return {"styles": styles, "dropped": _dropped(formulated, choice, axis, uses, modes, styles), **priced[kind]}


def _mode(formulated: Formulation, choice: Choice, use: Use, axis: int) -> str:
    """How the plan computes with a weight on an axis: column, row, or "" where it is replicated there."""
    position, kept, contracted = use.w
    layout = formulated.candidate(use.index, choice).inputs[position]
    placement, rank = layout[axis], len(formulated.graph.input_tensors(use.index)[position].shape)
    if not placement.is_shard():
        return ""
    return {kept % rank: "column", contracted % rank: "row"}.get(placement.dim, "")  # type: ignore[attr-defined]


def generic(name: str) -> str:
    """`layers.3.mlp.up_proj` -> `layers.*.mlp.up_proj`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def _chosen_groups(groups: Sequence[Group], modes: dict[Use, str]) -> list[Group]:
    """Groups that can be sharded in all layers and that the plan shards in most of them."""
    by_kind: dict[tuple, list[Group]] = {}
    for group in groups:
        kind = tuple(sorted((generic(use.parameter), role) for role in ("columns", "rows") for use in getattr(group, role)))
        by_kind.setdefault(kind, []).append(group)
    chosen = []
    for members in by_kind.values():
        sharded = [g for g in members if all(modes[u] == "column" for u in g.columns) and all(modes[u] == "row" for u in g.rows)]
        linear = all(u.kept == 0 for g in members for u in (*g.columns, *g.rows))  # nn.Linear; [in, out] is a Conv1D
        if linear and not any(g.why for g in members) and 2 * len(sharded) > len(members):
            chosen += members
    return chosen


def _equal_in_all_layers(styles: dict[str, str], uses: Uses) -> dict[str, str]:
    """Without the weights whose corresponding weights in other layers have another style."""
    by_name: dict[str, set] = {}
    for use in uses.uses:
        by_name.setdefault(generic(use.parameter), set()).add(styles.get(use.parameter))
    return {name: style for name, style in styles.items() if len(by_name.get(generic(name), ())) <= 1}


def _dropped(
    formulated: Formulation, choice: Choice, axis: int, uses: Uses, modes: dict[Use, str], styles: dict[str, str]
) -> list[dict[str, Any]]:
    """Weights that are sharded on the axis in the plan but not in the export, and why; corresponding weights of all layers in one row."""
    graph = formulated.graph
    tied = {name for pair in graph.tied for name in pair}
    of_name = grouped((use.parameter, use) for use in uses.uses)
    why_not = {use.parameter: g.why for g in uses.groups for use in (*g.columns, *g.rows) if g.why}
    rows: dict[tuple, dict[str, Any]] = {}
    for name, i in graph.parameters.items():
        layout = formulated.candidate(i, choice).outputs[0]
        of = of_name.get(name, [])
        if layout is None or name in styles or not (layout[axis].is_shard() or any(modes[u] for u in of)):
            continue
        if of and name in uses.fused:
            why = "it holds several projections side by side, which equal shards would mix: its rows would have to be permuted head by head"
        elif not any(modes[u] for u in of):
            weight = name.rpartition(".")[0] + ".weight"
            if len(graph.ops[i].output.shape) < 2 and (weight in styles or any(modes[u] for u in of_name.get(weight, ()))):
                continue  # a bias follows its weight
            why = "stored sharded but used replicated: fully_shard does that, tensor parallel styles don't"
        elif name in tied or len(of) > 1:
            why = "it is used in two places, whose styles would shard it differently"
        elif of[0].kind == "linear" and of[0].kept != 0:
            why = "its module is no nn.Linear: the weight is [in, out]"
        else:
            why = why_not.get(name) or "the weights that it would have to be sharded together with are not all sharded by the plan"
            why = generic(why)
        row = rows.setdefault((generic(name), why, text(layout)), {"weights": generic(name), "why": why, "plan": text(layout), "count": 0})
        row["count"] += 1
    return list(rows.values())
