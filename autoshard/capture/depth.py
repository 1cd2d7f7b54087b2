"""Capture a deep model by capturing a few of its layers: the Graph is tiled to the full depth.

    container   a ModuleList or Sequential of n layers whose fingerprints f_i = f_{i+p} for i >= h: head h, period p  `containers`
    shrunk      the module with k = h + q p + (n - h) mod p of them, q = 3, then 4, then 5 periods                   `shrunk`
    proof       tile(capture(k), 1) == capture(k + p), node for node, all containers at once
    deep        tile(capture(k), (n - k) / p)
    witness     the eager program of all n layers, on fake tensors, is that of k layers with the same periods repeated: it sees
                an `if i >= 6` in the model's code, which no capture of few layers can                              `witness.py`

A model for which one of these fails, or that isn't deep enough for it to pay, is captured whole, and the record says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.held import copied, unsupported_kind
from autoshard.capture.inputs import ignored
from autoshard.capture.module import capture_module
from autoshard.capture.witness import eager_program, grown
from autoshard.graph import Graph, Op
from autoshard.graph.tile import tile

PERIODS = (3, 4, 5)  # 3 suffice for GPT-2, Llama, BERT, Mixtral; 5 for T5's decoder, whose sums of gradients make the top layers special
SHALLOW = 8  # periods: the innermost of them see nothing of the model's ends any more, as far as costs go


@dataclass(frozen=True)
class Container:
    """A ModuleList or Sequential whose layers repeat."""

    name: str
    layers: int  # how many it has
    head: int  # how many at its beginning are different
    period: int  # after how many layers it repeats

    def depth(self, periods: int) -> int:
        """The number of layers with that many periods; a container that has not so many keeps what it has."""
        return min(self.layers, self.head + periods * self.period + (self.layers - self.head) % self.period)


@dataclass(frozen=True)
class Depth:
    """How `capture_deep` came to its graph."""

    containers: tuple[Container, ...]
    captured: tuple[int, ...]  # the number of layers in each capture made, that of the whole model included
    tiled: bool
    reason: str = ""  # why the model was captured whole
    witnessed: bool = False
    shallow: Graph | None = None  # the same with SHALLOW periods, where the graph is deeper than that: a plan can start from its
    ignored: str = ""  # what the model asks for that a plan does not do

    @property
    def noted(self) -> dict[str, str]:
        """What a plan notes about its capture."""
        return {"capture": self.reason} | ({"ignored": self.ignored} if self.ignored else {})


def capture_deep(
    module: nn.Module, example_inputs: Any, *, training: bool, witness: bool = False, gain: float = 3.0
) -> tuple[Graph, Depth]:
    """`capture(module, ...)`, from a capture of few layers where that is proven to give the same and pays, and how it was done.

    witness: also run the whole model once, eagerly on fake tensors. gain: tile if the model has at least `gain` times the
    layers that have to be captured for it (capturing costs little per layer beside the same again as a start).
    """
    found = containers(module)
    captured: list[int] = []

    def whole(reason: str) -> tuple[Graph, Depth]:
        made = capture_module(module, example_inputs, training=training)
        layers = (*captured, sum(c.layers for c in found)) if found else ()
        return made.graph, Depth(found, layers, False, reason, ignored=ignored(made.given))

    def at(periods: int) -> Graph:
        if periods not in graphs:
            depths = {c.name: c.depth(periods) for c in found}
            captured.append(sum(depths.values()))
            made = capture_module(shrunk(module, depths), example_inputs, training=training)
            graphs[periods] = made.graph
            asked.add(ignored(made.given))
        return graphs[periods]

    if not found:
        return whole(_why_no_container(module))
    graphs: dict[int, Graph] = {}
    asked: set[str] = set()
    layers = sum(c.layers for c in found)
    reasons: list[str] = []
    for periods in PERIODS:
        needed = sum(c.depth(q) for c in found for q in (periods, periods + 1) if q not in graphs)
        if layers < gain * needed:
            reasons.append(f"captures of {needed} layers for a model that has {layers} don't pay")
            break
        try:
            small = at(periods)
        except ValueError as error:
            return whole(f"few of its layers can't be captured: {error}")
        try:
            predicted = _tiled(small, found, periods, {c.name: c.depth(periods + 1) for c in found})
            deep = _tiled(small, found, periods, {c.name: c.layers for c in found})
            reason = difference(predicted, at(periods + 1))
        except ValueError as error:
            reason = str(error)
        if reason:
            reasons.append(f"from {periods} periods: {reason}")
            continue
        reason = _misnamed(deep, module) or (_doubted(module, found, periods, example_inputs, training) if witness else "")
        if reason:
            return whole(reason)
        few = {c.name: c.depth(SHALLOW) for c in found}
        shallow = None if all(few[c.name] == c.layers for c in found) else _tiled(small, found, periods, few)
        return deep, Depth(found, tuple(captured), True, "", witness, shallow, max(asked))
    return whole("; ".join(reasons))


def _tiled(graph: Graph, found: tuple[Container, ...], periods: int, depths: Mapping[str, int]) -> Graph:
    for c in found:
        graph = tile(graph, (depths[c.name] - c.depth(periods)) // c.period, container=c.name, period=c.period)
    return graph


def difference(graph: Graph, other: Graph) -> str:
    """The first thing in which two graphs differ, in words; "" if they are equal."""
    if graph == other:
        return ""
    for op, another in zip(graph.ops, other.ops):
        if op != another:
            return f"{_said(op)} is {_said(another)}"
    if len(graph.ops) != len(other.ops):
        return f"{len(graph.ops)} ops are {len(other.ops)}"
    pairs = [(a, b) for a, b in zip(graph.results, other.results) if a != b]
    return f"result {pairs[0][0]} is {pairs[0][1]}" if pairs else "the number of results or the tied parameters differ"


def _said(op: Op) -> str:
    return f"{op.name} = {op.target} of {op.inputs}, {op.literals}"


def _misnamed(graph: Graph, module: nn.Module) -> str:
    """A parameter of the tiled graph that the module hasn't, or of another shape; "" if there is none."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    for name, i in graph.parameters.items():
        tensor = graph.ops[i].outputs[0]
        if tensor is None or shapes.get(name) != tensor.shape:
            return f"the deeper graph would have a parameter {name} of shape {tensor and tensor.shape}; the model's has {shapes.get(name)}"
    return ""


def _doubted(module: nn.Module, found: tuple[Container, ...], periods: int, example_inputs: Any, training: bool) -> str:
    """Why the eager program of the whole model is not that of few layers repeated; "" if it is."""
    few = [shrunk(module, {c.name: c.depth(q) for c in found}) for q in (periods, periods + 1)]
    try:
        short, longer, deep = (eager_program(part, example_inputs, training=training) for part in (*few, module))
    except ValueError as error:
        return f"there is no witness: {error}"
    return grown(short, longer, deep, {(c.layers - c.depth(periods)) // c.period for c in found})


# -- containers -----------------------------------------------------------------------------------------------------------------


def containers(module: nn.Module) -> tuple[Container, ...]:
    """The outermost containers with more layers than one would capture first, in the order of the modules."""
    found: list[Container] = []
    for name, part in module.named_modules():
        if any(name.startswith(c.name + ".") for c in found) or not isinstance(part, (nn.ModuleList, nn.Sequential)):
            continue
        container = _container(name, part)
        if container is not None and container.depth(PERIODS[0] + 1) < container.layers:
            found.append(container)
    return tuple(found)


def _container(name: str, part: nn.Module) -> Container | None:
    """Its head and period, the pair that needs the fewest layers; None if no three periods are equal."""
    layers = list(part.children())
    if not name or len(layers) != len(part._modules) or len({id(layer) for layer in layers}) < len(layers):
        return None  # a layer that stands in it twice is shared; the root's children have no common name
    prints = _fingerprints(layers)
    n = len(layers)
    best: Container | None = None
    for period in range(1, n // 3 + 1):
        head = n - period
        while head > 0 and prints[head - 1] == prints[head - 1 + period]:
            head -= 1
        candidate = Container(name, n, head, period)
        if n - head >= 3 * period and (best is None or candidate.depth(3) < best.depth(3)):
            best = candidate
    return best


def _fingerprints(layers: list[nn.Module]) -> list[frozenset]:
    """What tells the layers apart: types, plain attributes and shapes of all their parts; the layer's own number left out."""
    facts = [dict(_facts(layer)) for layer in layers]
    numbered = {key for key in facts[0] if all(fact.get(key) == ("int", i) for i, fact in enumerate(facts))} if len(layers) > 1 else set()
    return [frozenset((key, value) for key, value in fact.items() if key not in numbered) for fact in facts]


def _facts(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in layer.named_modules(remove_duplicate=False):
        yield f"{name}:", f"{type(part).__module__}.{type(part).__qualname__}"
        for key, value in vars(part).items():
            if isinstance(value, (bool, int, float, str, torch.Tensor)) or value is None:
                yield f"{name}:{key}", _fact(value)
            elif isinstance(value, (tuple, list)) and all(isinstance(v, (bool, int, float, str)) or v is None for v in value):
                yield f"{name}:{key}", tuple(_fact(v) for v in value)
            elif callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__qualname__"):
                yield f"{name}:{key}", value.__qualname__
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield f"{name}:{key}", _fact(tensor)


def _fact(value: Any) -> tuple:
    if isinstance(value, torch.Tensor):
        if unsupported := unsupported_kind(value):
            return ("tensor", unsupported)
        return ("tensor", tuple(value.shape), tuple(value.stride()), str(value.dtype), value.requires_grad)
    return (type(value).__name__, value)


def _why_no_container(module: nn.Module) -> str:
    for name, part in module.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part._modules) > len({id(layer) for layer in part._modules.values()}):
            return f"the layers of {name} are one shared layer: its gradient is a sum over all of them"
    longest = max((len(p._modules) for p in module.modules() if isinstance(p, (nn.ModuleList, nn.Sequential))), default=0)
    return f"no ModuleList or Sequential has more layers than {PERIODS[0] + 1} repetitions of equal ones take (the longest has {longest})"


# -- shrinking ------------------------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Stands wherever a dropped layer stood, and raises: an alias to it would silently give the graph of another model."""

    def __init__(self, layer: str):
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{self.layer} is used outside of its container; it was left out to capture fewer layers")


def shrunk(module: nn.Module, depths: Mapping[str, int]) -> nn.Module:
    """A copy of the module with only the first depths[name] layers of each container; it shares the tensors that are left.

    ValueError if another part of the module holds one of the dropped layers; where a plain attribute does, its call raises.
    """
    dropped: dict[int, Any] = {}
    for name, depth in depths.items():
        for key, layer in list(module.get_submodule(name)._modules.items())[depth:]:
            dropped[id(layer)] = Dropped(f"{name}.{key}")
    small = copied(module, lambda tensor: tensor, dropped)
    for name, depth in depths.items():
        container = small.get_submodule(name)
        container._modules = dict(list(container._modules.items())[:depth])
    for part in small.modules():
        if isinstance(part, Dropped):
            part()
    return small
