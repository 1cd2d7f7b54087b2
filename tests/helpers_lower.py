"""Graphs of one op, layouts for them, and values for captured graphs."""

import itertools
import random
from dataclasses import replace

import torch

from autoshard.layout import all_layouts, has_partial, is_legal, parse, replicated, text
from autoshard.lower import Redistribute, SimulatedRanks, assemble, verify_program
from autoshard.lower.literals import UNINITIALISED
from autoshard.mesh import Mesh
from autoshard.solution import Placed
from tests import helpers


def mesh_of(*shape):
    return Mesh.from_bandwidths(shape)


def one_op(target, *args, **kwargs):
    """(graph, values): the op on the tensors among its arguments, which become the inputs x0, x1, ...; its outputs are results."""
    graph, tensors, _ = helpers.one_op(target, *args, **kwargs)
    return graph, {f"x{k}": x for k, x in enumerate(tensors)}


def laid(graph, inputs, outputs):
    """Layouts for a graph of one op: its inputs arrive as they are taken."""
    layouts = {op.name: Placed((), (written,)) for op, written in zip(graph.ops, inputs)}
    return {**layouts, "op": Placed(tuple(inputs), tuple(outputs))}


def crossed(rows, mesh, graph):
    """All combinations over the mesh axes of one-axis rows "S0 R -> P" (inputs -> outputs), as (inputs, outputs) of layout texts."""
    tensors = [op.outputs[0] for op in graph.ops[:-1]] + [t for t in graph.ops[-1].outputs]
    sides = [tuple(side.split() for side in row.split("->")) for row in rows]
    for combination in itertools.product(sides, repeat=len(mesh.axes)):
        columns = list(zip(*[ins + outs for ins, outs in combination]))
        written = [text(parse(",".join(column))) for column in columns]
        num_inputs = len(combination[0][0])
        if all(is_legal(t.shape, parse(w), mesh) for t, w in zip(tensors, written) if t is not None):
            yield written[:num_inputs], written[num_inputs:]


def check_op(graph, values, mesh, inputs, outputs):
    """Verify one op in one way to lie."""
    if graph.ops[-1].target in UNINITIALISED:  # nothing to compare but shapes
        graph = replace(graph, results=())
    found = verify_program(graph, laid(graph, inputs, outputs), {}, mesh, values)
    assert found.ok, (graph.ops[-1].target, inputs, outputs, found)


def random_layouts(graph, mesh, seed, candidates, *, hubs=True):
    """(layouts, results) drawn from the candidates of each op, hubs anywhere; a sum is only asked for where the producer has one."""
    rng = random.Random(seed)
    at, layouts = {}, {}
    for i, op in enumerate(graph.ops):
        possible = [c for c in candidates.of[i] if all(_reachable(at[v], layout) for v, layout in zip(op.inputs, c.inputs))]
        chosen, waiting = rng.choice(possible), []
        for k, layout in enumerate(chosen.outputs):
            hub = None
            if layout is not None and hubs and len(graph.users.get((i, k), ())) > 1:
                hub = rng.choice([*all_layouts(op.outputs[k].shape, mesh), layout])
            at[i, k] = hub or layout
            waiting.append(None if hub is None else text(hub))
        outputs = tuple(None if layout is None else text(layout) for layout in chosen.outputs)
        layouts[op.name] = Placed(tuple(map(text, chosen.inputs)), outputs, tuple(waiting))
    whole = text(replicated(len(mesh.axes)))
    results = {f"{r.kind}:{r.name}": layouts[r.name].outputs[0] if r.kind == "gradient" else whole for r in graph.results}
    return layouts, results


def _reachable(given, taken):
    return all(not has_partial((p,)) or p == q for p, q in zip(taken, given))


def values_of(graph, *, seed=0, words=2):
    """Random values for every placeholder; norms near 1, integers below `words`, tangents 1."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for op in graph.ops:
        if op.is_placeholder:
            t = op.outputs[0]
            dtype = getattr(torch, t.dtype)
            if op.kind == "tangent":
                values[op.name] = torch.ones(t.shape, dtype=dtype)
            elif dtype.is_floating_point:
                centre = 1.0 if "norm" in op.name or "ln_" in op.name else 0.0
                values[op.name] = (centre + 0.1 * torch.randn(t.shape, generator=generator)).to(dtype)
            else:
                values[op.name] = torch.randint(0, words, t.shape, generator=generator).to(dtype)
    return values


def with_placed(layouts, name, **changes):
    return {**layouts, name: replace(layouts[name], **changes)}


@torch.no_grad()
def run_simulated(program, values):
    """All ranks in this process: global placeholders in, global results out ("kind:name" -> tensor)."""
    simulated = SimulatedRanks(program.mesh)
    for record in program.records:
        simulated.do(record, values)
    return {r.key: assemble(simulated.results[r.key], r.slot.layout, program.mesh) for r in program.results}


def bytes_sent(program):
    """By collective the bytes that a rank sends in each step of the routes of a program."""
    sent = {}
    for step in (step for record in program.records if isinstance(record, Redistribute) for step in record.steps):
        sent.setdefault(step.collective, []).append(step.bytes)
    return sent
