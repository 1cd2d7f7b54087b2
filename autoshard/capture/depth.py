"""Capture a deep model from a few of its layers: the Graph of few layers is tiled to the full depth.

    container   a ModuleList or Sequential of n layers whose fingerprints f_i = f_{i+p} for i >= h: head h, period p  `containers`
    shrunk      the module with k = h + q p + (n - h) mod p of them, q = 3, then 4, then 5 periods                   `shrunk`
    few layers  G(k) = tile(capture(k + p), -1), or capture(k) where there is one
    proof       tile(G(k), 1) == capture(k + p), node for node, all containers at once, and, where G(k) wasn't captured, the eager
                programs of k and of k + p layers differ by a period
    deep        tile(G(k), (n - k) / p)
    witness     the eager program of all n layers, on fake tensors, is that of k layers with the same periods repeated: this test
                detects an `if i >= 6` in the model's code, which no capture of few layers can                      `witness.py`

If one of these fails, or the model isn't deep enough for it to pay, all layers are captured, and `Depth.reason` says why.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autoshard.capture.fx_graphs import capture_fx
from autoshard.capture.inputs import ignored, stored_dtypes
from autoshard.capture.module import capture_without_casts
from autoshard.capture.nested_tensors import OF_MODULES, copied, unsupported_kind
from autoshard.capture.witness import EagerProgram, eager_program, grown
from autoshard.graph import Graph, Op, leaves, mixed, tile
from autoshard.precision import Precision
from autoshard.torch_private import OpOverload

# 3 suffice for GPT-2, Llama, BERT, Mixtral; 4 for training DeepSeek-V3, whose first layers differ (with such a head 4 are tried first);
# 5 for T5's decoder, whose sums of gradients make the top layers special
PERIODS = (3, 4, 5)
OBJECT = " is"  # the end of the names of facts that are identities
SHALLOW = 8  # periods: the innermost of them have the costs that they have in a deeper model


@dataclass(frozen=True)
class Container:
    """A ModuleList or Sequential whose layers repeat."""

    name: str
    layers: int  # how many it has
    head: int  # how many layers at its beginning are different
    period: int  # after how many layers it repeats
    numbered: bool = False  # its layers may know which one they are, by an attribute or a hook that is another in each

    def depth(self, periods: int) -> int:
        """The number of layers with that many periods; at most as many as the container has."""
        return min(self.layers, self.head + periods * self.period + (self.layers - self.head) % self.period)


@dataclass(frozen=True)
class Depth:
    """How `capture_deep` obtained its graph."""

    containers: tuple[Container, ...]
    captured: tuple[int, ...]  # the number of layers in each capture, that of the full model included
    tiled: bool
    reason: str = ""  # why all layers of the model were captured
    shallow: Graph | None = None  # the same with SHALLOW periods, where the graph is deeper than that: a plan can start from its
    ignored: str = ""  # what the model asks for that a plan does not do
    periods: int = 0  # of the capture that was tiled; 0 where all layers were captured
    few_layers: Graph | None = None  # the capture that was tiled

    @property
    def noted(self) -> dict[str, str]:
        """The notes of a plan about its capture."""
        return {"capture": self.reason} | ({"ignored": self.ignored} if self.ignored else {})


def graphs_of(model: Any, example_inputs: Any, *, training: bool, precision: Precision | None = None) -> Iterator[Graph]:
    """The graph of a module as `plan` captures it; before it, of a graph that was captured already, as `autosharding_pass` reads it."""
    calls = [node.target for node in model.graph.nodes if node.op.startswith("call_")] if isinstance(model, fx.GraphModule) else []
    if isinstance(model, ExportedProgram) or (calls and (not training or all(isinstance(c, OpOverload) or c is getitem for c in calls))):
        yield capture_fx(model, example_inputs).graph
    if not isinstance(model, ExportedProgram):
        yield capture_deep(model, example_inputs, training=training, precision=precision)[0]


def capture_deep(
    module: nn.Module,
    example_inputs: Any,
    *,
    training: bool,
    precision: Precision | None = None,
    spared: int = 8,
    tested: Depth | None = None,
) -> tuple[Graph, Depth]:
    """The graph of `capture(module, ...)`, tiled from a capture of few layers where that pays and is tested, and how it was obtained.

    precision: as for `capture`. spared: tile if so many layers of the model need no capture then (the tests of a tiling take as long as
    some layers do).
    tested: how the same module was captured with inputs of another batch size. Where the few layers are the same ops here, in other
    sizes, neither the tiling nor the witness is tested again.
    """
    graph, depth = _FewLayers(module, example_inputs, training, precision, tested).extended(spared)
    if precision is None:
        return graph, depth
    stored = stored_dtypes(module, example_inputs)
    shallow = None if depth.shallow is None else mixed(depth.shallow, precision, stored)[0]
    return mixed(graph, precision, stored)[0], replace(depth, shallow=shallow)


class _FewLayers:
    """The captures of few layers of a module, in the dtypes in which the model computes."""

    def __init__(self, module: nn.Module, example_inputs: Any, training: bool, precision: Precision | None, tested: Depth | None):
        self.module, self.inputs, self.training, self.precision, self.tested = module, example_inputs, training, precision, tested
        self.repeating = containers(module)
        self.all = {c.name: c.layers for c in self.repeating}
        self.graphs: dict[int, Graph] = {}  # captured, by periods
        self.derived: dict[int, Graph] = {}  # from the capture of one period more
        self.tilings: dict[int, Graph] = {}  # of all layers, by periods
        self.programs: dict[int | None, EagerProgram] = {}
        self.captured: list[int] = []  # layers
        self.notes: set[str] = set()

    def extended(self, spared: int) -> tuple[Graph, Depth]:
        """The graph of all layers and how it was obtained, as `capture_deep` says."""
        if not self.repeating:
            return self.all_layers(_why_no_container(self.module))
        layers = sum(self.all.values())
        reasons: list[str] = []
        after_head = self.training and any(c.head for c in self.repeating) and layers >= spared + self.needed(PERIODS[1])
        first = [self.tested.periods] if self.tested is not None and self.tested.tiled else []
        for periods in dict.fromkeys((*first, *PERIODS[after_head:])):
            if layers < spared + self.needed(periods):
                reasons.append(f"a capture of {self.needed(periods)} layers for a model that has {layers} doesn't pay")
                break
            try:
                self.prepare(periods)
            except ValueError as error:
                return self.all_layers(f"few of its layers can't be captured, or run eagerly: {error}")
            if reason := self.why_untileable(periods):
                reasons.append(f"from {periods} periods: {reason}")
                continue
            if reason := self.why_wrong(periods):
                return self.all_layers(reason)
            return self.deep(periods)
        return self.all_layers("; ".join(reasons))

    def prepare(self, periods: int) -> None:
        """Captures what `periods` are tested with: a period more, which also runs, or no more than them if a tiling of them was tested."""
        if self.tested is not None and periods == self.tested.periods:
            self.capture(periods)
            if self._was_tested(periods):
                return
        self.capture(periods + 1)
        self._program(periods + 1)

    def capture(self, periods: int) -> Graph:
        if periods not in self.graphs:
            depths = self._depths(periods)
            self.captured.append(sum(depths.values()))
            module = shrunk(self.module, depths)
            captured = capture_without_casts(module, self.inputs, training=self.training, precision=self.precision)
            self.graphs[periods] = captured.graph
            self.notes.add(ignored(captured.fx_graph))
        return self.graphs[periods]

    def at(self, periods: int) -> Graph:
        """The graph of so many periods: captured, or the captured one of a period more without it."""
        if periods in self.graphs:
            return self.graphs[periods]
        if periods not in self.derived:
            self.derived[periods] = self._tiled(self.graphs[periods + 1], periods + 1, self._depths(periods))
        return self.derived[periods]

    def needed(self, periods: int) -> int:
        """How many layers have yet to be captured to test so many periods."""
        return sum(self._depths(periods + 1).values()) if periods + 1 not in self.graphs else 0

    def why_untileable(self, periods: int) -> str:
        """Why one period more is not the capture of one more; "" if it is, or if the same ops were tested in other sizes."""
        try:
            self._global(periods)
            if self._was_tested(periods):
                return ""
            reason = difference(self._tiled(self.at(periods), periods, self._depths(periods + 1)), self.capture(periods + 1))
            if not reason and periods not in self.graphs:
                short, longer = self._program(periods), self._program(periods + 1)
                reason = grown(short, longer, longer, {1}, of="a period more")
            return reason
        except ValueError as error:
            return str(error)

    def _program(self, periods: int | None) -> EagerProgram:
        """The eager program of so many periods; None: of all layers."""
        if periods not in self.programs:
            module = self.module if periods is None else shrunk(self.module, self._depths(periods))
            alike = alike_layers(module, self.repeating)
            self.programs[periods] = eager_program(module, self.inputs, training=self.training, precision=self.precision, alike=alike)
        return self.programs[periods]

    def why_wrong(self, periods: int) -> str:
        """Why the tiled graph is not that of the module, by its parameters and by its eager program; "" if it is."""
        reason = _misnamed(self._global(periods), self.module)
        if reason or self._was_tested(periods):
            return reason
        try:
            short, longer, deep = (self._program(q) for q in (periods, periods + 1, None))
            if reason := grown(short, longer, deep, self._times(periods)):
                # a period more shows where the layers begin to repeat if the first ones are partly as the others
                reason = grown(longer, self._program(periods + 2), deep, self._times(periods + 1))
        except ValueError as error:
            return f"all of its layers don't run eagerly: {error}"
        return reason

    def _times(self, periods: int) -> set[int]:
        """How many periods the containers have beyond these."""
        return {(c.layers - c.depth(periods)) // c.period for c in self.repeating}

    def deep(self, periods: int) -> tuple[Graph, Depth]:
        """The graph tiled to all layers."""
        depths = self._depths(SHALLOW)
        shallow = None if depths == self.all else self._tiled(self.at(periods), periods, depths)
        depth = Depth(
            self.repeating, tuple(self.captured), True, shallow=shallow, ignored=max(self.notes), periods=periods,
            few_layers=self.at(periods),
        )  # fmt: skip
        return self._global(periods), depth

    def all_layers(self, reason: str) -> tuple[Graph, Depth]:
        """The capture of all layers."""
        full = capture_without_casts(self.module, self.inputs, training=self.training, precision=self.precision)
        layers = (*self.captured, sum(self.all.values())) if self.repeating else ()
        return full.graph, Depth(self.repeating, layers, False, reason, ignored=ignored(full.fx_graph))

    def _was_tested(self, periods: int) -> bool:
        same = self.tested is not None and periods == self.tested.periods and periods in self.graphs
        return same and same_but_for_sizes(self.at(periods), self.tested.few_layers)  # type: ignore[union-attr]

    def _depths(self, periods: int) -> dict[str, int]:
        return {c.name: c.depth(periods) for c in self.repeating}

    def _global(self, periods: int) -> Graph:
        """Tiled to all layers."""
        if periods not in self.tilings:
            self.tilings[periods] = self._tiled(self.at(periods), periods, self.all)
        return self.tilings[periods]

    def _tiled(self, graph: Graph, periods: int, depths: Mapping[str, int]) -> Graph:
        """The graph of `periods` periods, tiled until each container has as many layers as `depths` says: at least one period less."""
        for c in self.repeating:
            graph = tile(graph, (depths[c.name] - c.depth(periods)) // c.period, container=c.name, period=c.period)
        return graph


def difference(graph: Graph, other: Graph) -> str:
    """The first difference between two graphs, in words; "" if they are equal."""
    if graph == other:
        return ""
    for op, another in zip(graph.ops, other.ops):
        if op != another:
            return f"{_text(op)} is {_text(another)}"
    if len(graph.ops) != len(other.ops):
        return f"{len(graph.ops)} ops are {len(other.ops)}"
    pairs = [(a, b) for a, b in zip(graph.results, other.results) if a != b]
    return f"result {pairs[0][0]} is {pairs[0][1]}" if pairs else "the number of results or the tied parameters differ"


def same_but_for_sizes(graph: Graph, other: Graph | None) -> bool:
    """Whether two graphs have the same ops and results, where the sizes of tensors, and of literals, may differ."""
    if other is None:
        return False
    forms, others = ([(op.name, op.target, op.inputs, op.kind, *_form(op)) for op in g.ops] for g in (graph, other))
    return forms == others and graph.results == other.results and graph.tied == other.tied


def _form(op: Op) -> tuple:
    """Dtypes of the outputs, which of their sizes are 1, and the literals without their numbers."""
    outputs = tuple(t and (t.dtype, tuple(n == 1 for n in t.shape)) for t in op.outputs)
    return outputs, tuple(type(leaf) if type(leaf) in (int, float) else leaf for leaf in leaves(op.literals))


def _text(op: Op) -> str:
    return f"{op.name} = {op.target} of {op.inputs}, {op.literals}"


def _misnamed(graph: Graph, module: nn.Module) -> str:
    """A parameter of the tiled graph that the module doesn't have, or has with another shape; "" if there is none."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    for name, i in graph.parameters.items():
        tensor = graph.ops[i].outputs[0]
        if tensor is None or shapes.get(name) != tensor.shape:
            return f"the deeper graph would have a parameter {name} of shape {tensor and tensor.shape}; the model's has {shapes.get(name)}"
    return ""


def containers(module: nn.Module) -> tuple[Container, ...]:
    """The outermost containers with more layers than the first two captures would have, in the order of the modules."""
    outermost: list[Container] = []
    for name, part in module.named_modules():
        if any(name.startswith(c.name + ".") for c in outermost) or not isinstance(part, (nn.ModuleList, nn.Sequential)):
            continue
        container = _container(name, part, _held_outside(module, name))
        if container is not None and container.depth(PERIODS[0] + 1) < container.layers:
            outermost.append(container)
    return tuple(outermost)


def _held_outside(module: nn.Module, container: str) -> set[int]:
    """The ids of the parameters that modules outside of a container hold."""
    named = module.named_parameters(remove_duplicate=False)
    return {id(parameter) for name, parameter in named if not name.startswith(f"{container}.")}


def _container(name: str, part: nn.Module, outside: set[int]) -> Container | None:
    """The container with the head and period that need the fewest layers; None if it doesn't repeat for three periods. outside: ids of
    parameters that others hold."""
    layers = list(part.children())
    if not name or len(layers) != len(part._modules) or len({id(layer) for layer in layers}) < len(layers):
        return None  # a layer that is in it twice is shared; the root's children have no common name
    prints, numbered = _fingerprints(layers, outside)
    n = len(layers)
    best: Container | None = None
    for period in range(1, n // 3 + 1):
        head = n - period
        while head > 0 and prints[head - 1] == prints[head - 1 + period]:
            head -= 1
        candidate = Container(name, n, head, period, numbered)
        if n - head >= 3 * period and (best is None or candidate.depth(3) < best.depth(3)):
            best = candidate
    return best


def _fingerprints(layers: list[nn.Module], outside: set[int]) -> tuple[list[frozenset], bool]:
    """Per layer its properties, equal for equal layers: types, plain attributes and shapes of all its modules, without its number; and
    which of its parameters some other layers hold, or modules outside, as far from it as these are. And whether anything was left out
    that is another in each."""
    facts = [dict(_facts(layer)) for layer in layers]
    holders: dict[int, list[int]] = {}
    for i, layer in enumerate(layers):
        for parameter in layer.parameters():
            holders.setdefault(id(parameter), []).append(i)
    for i, layer in enumerate(layers):
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            held = holders[id(parameter)]
            if len(held) < len(layers) and (len(held) > 1 or id(parameter) in outside):
                facts[i][f"{name}: held by"] = (tuple(k - i for k in held), id(parameter) in outside)
    numbered = {key for key in facts[0] if all(fact.get(key) == ("int", i) for i, fact in enumerate(facts))} if len(layers) > 1 else set()
    numbered |= {key for fact in facts for key, value in fact.items() if key.endswith(OBJECT) and value != facts[0].get(key)}
    return [frozenset((key, value) for key, value in fact.items() if key not in numbered) for fact in facts], bool(numbered)


def _facts(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in layer.named_modules(remove_duplicate=False):
        yield f"{name}:", f"{type(part).__module__}.{type(part).__qualname__}"
        for key, value in vars(part).items():
            if isinstance(value, (bool, int, float, str, torch.Tensor)) or value is None:
                yield f"{name}:{key}", _fact(value)
            elif isinstance(value, (tuple, list)) and all(isinstance(v, (bool, int, float, str)) or v is None for v in value):
                yield f"{name}:{key}", tuple(_fact(v) for v in value)
            elif key not in OF_MODULES or (value and "forward" in key):
                yield f"{name}:{key}{OBJECT}", id(value)
                if callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__qualname__"):
                    yield f"{name}:{key}", value.__qualname__
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield f"{name}:{key}", _fact(tensor)


def _fact(value: Any) -> tuple:
    if isinstance(value, torch.Tensor):
        if unsupported := unsupported_kind(value):
            return ("tensor", unsupported)
        return ("tensor", tuple(value.shape), tuple(value.stride()), str(value.dtype), value.requires_grad)
    return (type(value).__name__, value)


def alike_layers(module: nn.Module, repeating: Sequence[Container]) -> dict[str, str]:
    """By the name of each layer that can't know which one it is, a name of those that do the same."""
    numbers = [(c, i, key) for c in repeating if not c.numbered for i, key in enumerate(module.get_submodule(c.name)._modules)]
    return {f"{c.name}.{key}": f"{c.name} {(i - c.head) % c.period}" for c, i, key in numbers if i >= c.head}


def _why_no_container(module: nn.Module) -> str:
    for name, part in module.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part._modules) > len({id(layer) for layer in part._modules.values()}):
            return f"the layers of {name} are one shared layer: its gradient is a sum over all of them"
    longest = max((len(p._modules) for p in module.modules() if isinstance(p, (nn.ModuleList, nn.Sequential))), default=0)
    return f"no ModuleList or Sequential has more layers than {PERIODS[0] + 1} repetitions of equal ones take (the longest has {longest})"


class Dropped(nn.Module):
    """Replaces a dropped layer and raises when called: an alias of the layer would silently lead to the graph of another model."""

    def __init__(self, layer: str):
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{self.layer} is used outside of its container; it was left out to capture fewer layers")


def shrunk(module: nn.Module, depths: Mapping[str, int]) -> nn.Module:
    """A copy of the module with only the first depths[name] layers of each container; it shares the tensors of those layers.

    ValueError if another part of the module holds one of the dropped layers; where a plain attribute does, its call raises.
    """
    dropped: dict[int, Any] = {}
    for name, depth in depths.items():
        for key, layer in list(module.get_submodule(name)._modules.items())[depth:]:
            dropped[id(layer)] = Dropped(f"{name}.{key}")
    few_layers = copied(module, lambda tensor: tensor, dropped)
    for name, depth in depths.items():
        container = few_layers.get_submodule(name)
        container._modules = dict(list(container._modules.items())[:depth])
    for part in few_layers.modules():
        if isinstance(part, Dropped):
            part()
    return few_layers
