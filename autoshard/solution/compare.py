"""The differences between a plan and a model, mesh or version to which it is to be applied, in words; and between two plans, as pairs.

`misfits` are reasons why the plan can't be applied at all. `differences` adds what has changed since the plan was made: the plan still
runs, but its cost and its proof are those of the time at which it was made. `changes` compares two plans of one model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from autoshard.graph import Graph
from autoshard.layout import why_illegal
from autoshard.mesh import Mesh, shape_text
from autoshard.solution.interval import parts
from autoshard.solution.record import ROUNDING, Placed, Solution, parsed, plain

FEW = 3  # names listed before "and 12 more"
# assumptions that the comparison of mesh and graph covers better, or that change no layout
NOT_COMPARED = ("axes", "device", "dynamic_shapes", "inputs", "model", "set", "solver")


def differences(
    solution: Solution,
    graph: Graph,
    mesh: Mesh,
    *,
    fingerprint: Mapping[str, str] | None = None,
    assumptions: Mapping | None = None,
) -> tuple[str, ...]:
    """All differences, misfits first; empty where a new plan would be the same.

    fingerprint, assumptions: those of a plan that would be made now, to compare prices, options and versions.
    """
    reasons = [*misfits(solution, graph, mesh), *_sizes(solution, graph), *_links(solution.mesh, mesh)]
    if assumptions is not None:
        both = solution.assumptions, plain(dict(assumptions), "assumptions")
        reasons += _changes("", *({key: value for key, value in noted.items() if key not in NOT_COMPARED} for noted in both))
    changed = {key for key, value in (fingerprint or {}).items() if key in solution.fingerprint and solution.fingerprint[key] != value}
    reasons += [_HASHES[key] for key in ("prices", "options") if key in changed and not reasons]
    if "structure" in changed and not reasons:
        reasons.append("the model's ops are wired or parameterised differently from when this was planned")
    elif "graph" in changed and not reasons:
        reasons.append("the model's sizes, dtypes or constants differ from when this was planned")
    return tuple(reasons)


_HASHES = {
    "prices": "the prices (links, device, cost model) differ from when this was planned",
    "options": "the options of planning differ from when this was planned",
}


def misfits(solution: Solution, graph: Graph, mesh: Mesh) -> tuple[str, ...]:
    """Why the plan can't be applied to this graph on this mesh; empty where it can."""
    if solution.mesh.shape != mesh.shape:
        return (f"planned for mesh {_by(solution.mesh.shape)}, but this mesh is {_by(mesh.shape)}",)
    reasons = []
    missing = [op.name for op in graph.ops if op.name not in solution.layouts]
    extra = [name for name in solution.layouts if name not in graph.index]
    if missing:
        reasons.append(f"{_count(missing, 'op')} of the model have no layout in the plan: {_names(missing)}")
    if extra:
        fewer = "" if missing else "; a model with fewer layers is another one: make its widths and batch smaller instead"
        reasons.append(f"{_count(extra, 'op')} of the plan are not in the model: {_names(extra)}{fewer}")
    return (*reasons, *_illegal(solution, graph, mesh))


def _illegal(solution: Solution, graph: Graph, mesh: Mesh) -> list[str]:
    """Ops whose number of tensors differs, and layouts that the tensors' shapes don't allow."""
    reasons = {
        op.name: _why_misfit(graph, i, solution.layouts[op.name], mesh) for i, op in enumerate(graph.ops) if op.name in solution.layouts
    }
    bad = [name for name, reason in reasons.items() if reason]
    if not bad:
        return []
    rest = f"; nor do {_count(bad[1:], 'other op')} fit: {_names(bad[1:])}" if len(bad) > 1 else ""
    return [f"{bad[0]}: {reasons[bad[0]]}{rest}"]


def _why_misfit(graph: Graph, i: int, placed: Placed, mesh: Mesh) -> str | None:
    op = graph.ops[i]
    now, planned = (len(op.inputs), len(op.outputs)), (len(placed.inputs), len(placed.outputs))
    if now != planned:
        return f"has {now[0]} inputs and {now[1]} outputs, planned were {planned[0]} and {planned[1]}"
    if any(tensor and not written for tensor, written in zip(op.outputs, placed.outputs)):
        return "the plan has no layout for an output that is a tensor"
    pairs = [*zip(graph.input_tensors(i), placed.inputs), *zip(op.outputs, placed.outputs), *zip(op.outputs, placed.hubs)]
    reasons = (why_illegal(tensor.shape, parsed(written), mesh) for tensor, written in pairs if tensor and written)
    return next(filter(None, reasons), None)


def _sizes(solution: Solution, graph: Graph) -> list[str]:
    changed = []
    for name, i in graph.parameters.items():
        tensor, planned = graph.ops[i].outputs[0], solution.parameters.get(name, {}).get("shape")
        if tensor is not None and planned is not None and tuple(planned) != tensor.shape:
            changed.append(f"{name} is {_by(tensor.shape)}, planned was {_by(planned)}")
    return [f"{_count(changed, 'parameter')} of another size: {_names(changed, '; ')}"] if changed else []


def _links(planned: Mesh, now: Mesh) -> list[str]:
    pairs = [(f"mesh axis {old.name}: ", vars(old), vars(new)) for old, new in zip(planned.axes, now.axes)]
    pairs.append(("device: ", vars(planned.device), vars(now.device)))
    return [line for what, old, new in pairs for line in _changes(what, old, new)] if planned.shape == now.shape else []


def _changes(what: str, old: Mapping, new: Mapping) -> list[str]:
    keys = [*old, *(key for key in new if key not in old)]
    return [f"{what}{key}: {_show(old.get(key))} when planned, {_show(new.get(key))} now" for key in keys if old.get(key) != new.get(key)]


def _names(names: Iterable[str], joint: str = ", ") -> str:
    names = list(names)
    return joint.join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _count(items: list, noun: str) -> str:
    return f"{len(items)} {noun}{'s' if len(items) != 1 else ''}"


def _by(sizes: Iterable[int]) -> str:
    return shape_text(sizes) or "a scalar"


def _show(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "not given" if value is None else str(value)


# -- two plans -----------------------------------------------------------------------------------------------------------------------


def changes(a: Solution, b: Solution) -> dict[str, Any]:
    """Pairs [a's, b's]; a layout, op or assumption that one of them lacks is None there.

    cost_seconds, bound_seconds, peak_bytes, mesh, status: always. parameters {name: pair}, results {name: pair}, assumptions
    {key: pair}, seconds {part: pair}: those that differ. ops {name: pair of output layouts}: the same for all other ops.
    same: no layout differs, and the costs are equal.
    """
    layouts = [{name: row.get("layout") for name, row in s.parameters.items()} for s in (a, b)]
    outputs = [{name: ", ".join(o or "-" for o in placed.outputs) for name, placed in s.layouts.items()} for s in (a, b)]
    pairs: dict[str, Any] = {
        "status": [a.verdict, b.verdict],
        "cost_seconds": [a.cost, b.cost],
        "bound_seconds": [a.bound, b.bound],
        "peak_bytes": [a.peak_bytes, b.peak_bytes],
        "mesh": [_by(s.mesh.shape) for s in (a, b)],
        "parameters": _differing(*layouts),
        "ops": {name: pair for name, pair in _differing(*outputs).items() if name not in layouts[0] and name not in layouts[1]},
        "results": _differing(a.results, b.results),
        "assumptions": _differing(a.assumptions, b.assumptions),
        "seconds": _differing(*({row["what"]: row["seconds"] for row in parts(s.breakdown, {})} for s in (a, b))),
    }
    equal = a.cost == b.cost or abs(a.cost - b.cost) <= ROUNDING * abs(a.cost)
    same_layouts = not (pairs["parameters"] or pairs["ops"] or pairs["results"]) and a.mesh.shape == b.mesh.shape
    return {"same": same_layouts and equal, **pairs}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list]:
    names = dict.fromkeys([*a, *b])
    return {name: [a.get(name), b.get(name)] for name in names if a.get(name) != b.get(name)}
