"""Builders for tests: one op as a graph, small graphs by hand, tiny models, and references that go by definition."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.capture import capture, capture_module
from autoshard.graph import Const, Graph, Op, Ref, Result
from autoshard.graph import Tensor as Described
from autoshard.layout import Layout
from autoshard.lower.literals import overload
from autoshard.lower.program import run_record, slot_of
from autoshard.lower.run import SimulatedRanks
from autoshard.mesh import Mesh
from autoshard.strategies import Candidate
from models import bert, gpt2, llama, mlp

# two layers of the first two, one of the others, of which a capture takes longest
TINY = {"mlp": mlp.tiny, "gpt2": gpt2.tiny, "llama": partial(llama.tiny, layers=1), "bert": partial(bert.tiny, layers=1)}


@cache
def tiny_graph(name: str, training: bool, **sizes: int) -> Graph:
    module, example_inputs = TINY[name](**sizes)
    return capture(module, example_inputs, training=training)


def given_graphs(name: str) -> dict:
    """A tiny model as (graph, example inputs or None, the module) in every form that a user may bring."""
    module, inputs = TINY[name]()
    exported = torch.export.export(module, inputs, strict=False)
    names = list(dict(module.named_parameters()))

    def flat(*values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=False)), values[len(names) :])

    found = {
        "exported": (exported, None, module),
        "module": (exported.module(), inputs, module),
        "aten": (make_fx(flat)(*(p.detach() for p in module.parameters()), *inputs), None, module),
        "joint": (capture_module(module, inputs, training=True).fx_graph, None, module),
    }
    return found | ({"symbolic_trace": (torch.fx.symbolic_trace(module), inputs, module)} if name == "mlp" else {})


def fast_mesh(shape: tuple[int, ...], **prices) -> Mesh:
    """Links fast enough that tiny models are cut."""
    prices = {"intra_node_bandwidth": 1e14, "inter_node_bandwidth": 1e14, "intra_node_latency": 1e-9, "inter_node_latency": 1e-9} | prices
    return Mesh.from_bandwidths(shape, device=prices.pop("device", "cpu"), **prices)


def described(x: Tensor) -> Described:
    return Described(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def one_op(target: str, *args, **kwargs) -> tuple[Graph, list[Tensor], tuple]:
    """A graph of one op on the tensors among its arguments; those tensors; what the op makes of them."""
    tensors: list[Tensor] = []

    def literal(item):
        if isinstance(item, Tensor):
            tensors.append(item)
            return Ref(len(tensors) - 1)
        if isinstance(item, (list, tuple)):
            return tuple(literal(part) for part in item)
        return Const("dtype", str(item).removeprefix("torch.")) if isinstance(item, torch.dtype) else item

    literals = (literal(args), tuple((key, literal(item)) for key, item in sorted(kwargs.items())))
    result = overload(target)(*args, **kwargs)
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    ops = [Op(f"x{k}", "input", (), ((), ()), (described(x),), "input") for k, x in enumerate(tensors)]
    inputs = tuple((k, 0) for k in range(len(tensors)))
    made = tuple(described(y) if isinstance(y, Tensor) else None for y in outputs)
    ops.append(Op("op", target, inputs, literals, made))
    results = tuple(Result("output", str(k), (len(tensors), k)) for k, y in enumerate(made) if y is not None)
    return Graph(tuple(ops), results), tensors, outputs


# -- layouts by definition -------------------------------------------------------------------------------------------------------


def split(whole: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    """What each rank holds, axis after axis: S chunks, R copies, P addends that are all different from 0."""
    parts = [whole]
    for placement, axis in zip(layout, mesh.axes, strict=True):
        parts = [made for part in parts for made in _split_once(part, placement, axis.size, generator)]
    return [part.contiguous() for part in parts]


def _split_once(part: Tensor, placement, n: int, generator: torch.Generator) -> Sequence[Tensor]:
    if placement.is_shard():
        chunks = part.chunk(n, placement.dim)
        assert len(chunks) == n
        return chunks
    if placement.is_replicate():
        return [part] * n
    assert placement.reduce_op == "sum"
    if part.dtype == torch.bool:  # a sum of truth values is "or"
        masks = torch.randint(0, 2, (n, *part.shape), generator=generator).bool()
        masks[0] |= ~masks.any(0)
        return list(masks & part)
    shape = (n - 1, *part.shape)
    if part.dtype.is_floating_point or part.dtype.is_complex:
        addends = torch.randn(shape, generator=generator).to(part.dtype)
    else:
        addends = torch.randint(-5, 5, shape, generator=generator).to(part.dtype)
    return [*addends, part - addends.sum(0, dtype=part.dtype)]


def joined(parts: list[Tensor], layout: Layout, mesh: Mesh) -> tuple[Tensor, float]:
    """The whole that the parts stand for, and by how much replicas differ."""
    apart = 0.0
    for placement, axis in reversed(list(zip(layout, mesh.axes, strict=True))):
        groups = [parts[k : k + axis.size] for k in range(0, len(parts), axis.size)]
        if placement.is_shard():
            parts = [torch.cat(group, placement.dim) for group in groups]
        elif placement.is_replicate():
            apart = max([apart, *(difference(group[0], part) for group in groups for part in group)])
            parts = [group[0] for group in groups]
        else:
            reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[placement.reduce_op]
            either = [torch.stack(group).any(0) if group[0].dtype == torch.bool else None for group in groups]
            parts = [reduce(torch.stack(group), 0) if or_ is None else or_ for group, or_ in zip(groups, either, strict=True)]
    return parts[0], apart


def difference(a: Tensor, b: Tensor) -> float:
    """max |a - b| over max |b| or 1, inf where shapes or types differ or only one is finite."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
    a, b = a.double(), b.double()
    a, b = torch.where(a == b, 0.0, a), torch.where(a == b, 0.0, b)  # equal infinities
    if a.isnan().equal(b.isnan()) and not a.numel() - int(a.isnan().sum()):
        return 0.0
    found = float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
    return found if np.isfinite(found) else float("inf")


def candidate_error(graph: Graph, tensors: list[Tensor], outputs: tuple, candidate: Candidate, mesh: Mesh, seed: int = 0) -> float:
    """Run the last op of a `one_op` graph on every rank as the candidate says; how far the ranks' outputs are from the whole ones."""
    generator = torch.Generator().manual_seed(seed)
    i, op = len(tensors), graph.ops[-1]

    ins = tuple(slot_of(f"in{k}", (k, 0), described(x), candidate.inputs[k], mesh) for k, x in enumerate(tensors))
    outs = tuple(None if t is None else slot_of(f"out{k}", (i, k), t, candidate.outputs[k], mesh) for k, t in enumerate(op.outputs))
    world = SimulatedRanks(mesh)
    for given, x in zip(ins, tensors, strict=True):
        world.held[given.name] = split(x, given.layout, mesh, generator)
    made = world.run(run_record(graph, i, ins, outs, mesh))
    worst = 0.0
    for k, expected in enumerate(outs):
        if expected is not None:
            parts = [rank[k] for rank in made]
            if any(tuple(part.shape) != expected.shape_on(r) for r, part in enumerate(parts)):
                return float("inf")
            whole, apart = joined(parts, expected.layout, mesh)
            worst = max(worst, apart, difference(whole, outputs[k]))
    return worst


def random_inputs(example_inputs, bound: int = 2, seed: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(x.shape, generator=generator) if x.is_floating_point() else torch.randint(0, bound, x.shape, generator=generator)
        for x in example_inputs
    )


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


class Ticking:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now
