"""A step of several microbatches on one rank: what is fetched once, what is added up, what is reduced once.

    fetch     w -> w.kept                       when the first microbatch begins                        (`OpenStep.parameter`)
    add       w.accumulated += gradient of w    in the backward graph of every microbatch               (`with_sums`)
    reduce    w.accumulated -> w.grad           after the backward graph of the last one, one by one    (`OpenStep.reduced`)

A call outside of `model.microbatches(...)` is a step of one microbatch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.graph import ACCUMULATED, KEPT, Graph
from autoshard.layout import parse
from autoshard.lower import ADD, RankGraphs, Redistribute, Slot, check, redistribution, run_route, slot_of
from autoshard.routes import Routes
from autoshard.runtime.distribute import Where, local, versions
from autoshard.solution import Solution


@dataclass(frozen=True)
class StepMoves:
    """The moves that a step has once, by parameter, and who carries them out."""

    fetches: Mapping[str, Redistribute]  # from the parameter's layout to that of its kept copy, where these differ
    sums: Mapping[str, Slot]
    reductions: Mapping[str, Redistribute]  # from the layout of the sum of gradients to that of the parameter
    where: Where

    def run(self, move: Redistribute, x: Tensor) -> Tensor:
        rank = self.where.rank
        moved = self.where.groups.drive(run_route(move.steps, rank, x, move.global_shape))
        check(move.target, moved, f"the route to {move.target.name}", rank.number)
        return moved


def step_moves(solution: Solution, graph: Graph, where: Where) -> StepMoves:
    """The moves of a plan with microbatches. graph: that of the plan, with kept copies and sums."""
    mesh, routes = solution.mesh, Routes(solution.mesh)

    def slot(name: str, i: int, layout: str | None) -> Slot:
        assert layout is not None
        return slot_of(name, (i, 0), graph.tensor((i, 0)), parse(layout), mesh)

    fetches, sums, reductions = {}, {}, {}
    for i, op in enumerate(graph.ops):
        written = solution.layouts[op.name].outputs[0] if op.kind in (KEPT, ACCUMULATED) else None
        if op.kind == KEPT:
            name = op.name.removesuffix(f".{KEPT}")
            if solution.layouts[name].outputs[0] != written:
                source = slot(name, i, solution.layouts[name].outputs[0])
                fetches[name] = redistribution(source, slot(op.name, i, written), graph.tensor((i, 0)), routes)
        elif op.kind == ACCUMULATED:
            name = op.name.removesuffix(f".{ACCUMULATED}")
            sums[name] = slot(op.name, i, written)
            target = slot(f"gradient:{name}", i, solution.results[f"gradient:{name}"])
            reductions[name] = redistribution(sums[name], target, graph.tensor((i, 0)), routes)
    return StepMoves(fetches, sums, reductions, where)


@dataclass(eq=False)
class OpenStep:
    """A step that has begun: its kept copies and sums so far."""

    number: int = 1  # of microbatches
    index: int = 0  # of the one that runs
    kept: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)  # of the parameters when they were fetched
    sums: dict[str, Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)  # the gradients of outputs that were differentiated
    complete: bool = False  # the gradients are reduced

    @property
    def is_last(self) -> bool:
        return self.index == self.number - 1

    def parameter(self, moves: StepMoves, name: str, x: Tensor) -> Tensor:
        """The local tensor in the layout that the graphs read: of a parameter its kept copy."""
        if name not in moves.fetches:
            return local(x)
        if name not in self.kept:
            with torch.no_grad():
                self.kept[name], self.versions[name] = moves.run(moves.fetches[name], local(x).detach()), versions(x)
        if self.versions[name] != versions(x):
            raise RuntimeError(f"{name} was changed between two microbatches of a step; call optimizer.step() after the last one")
        return self.kept[name]

    def summed(self, moves: StepMoves, names: tuple[str, ...]) -> list[Tensor]:
        """The sums of these parameters' gradients so far."""
        for name in names:
            if name not in self.sums:
                self.sums[name] = moves.where.zeros(moves.sums[name])
        return [self.sums[name] for name in names]

    @torch.no_grad()
    def reduced(self, moves: StepMoves, dtype_of: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
        """The gradients in their parameters' layouts; the sums and copies are freed."""
        self.kept.clear()
        gradients = {}
        for name in sorted(self.sums, key=list(moves.sums).index):
            gradients[name] = moves.run(moves.reductions[name], self.sums.pop(name)).to(dtype_of(name))
        self.complete = True
        return gradients


@dataclass(eq=False)
class Microbatches:
    """The microbatches of a step, to be iterated once: the inputs of each as DTensors. len() is their number."""

    number: int
    inputs: Callable[[int], Any]  # of microbatch k
    opened: Callable[[OpenStep | None], None]  # told the step that has begun; None when it has ended

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[Any]:
        step = OpenStep(self.number)
        self.opened(step)
        try:
            for step.index in range(self.number):
                yield self.inputs(step.index)
        finally:
            self.opened(None)
        if step.sums and not step.complete:
            raise RuntimeError("the last microbatch had no backward(), so that the other gradients were not reduced; call it for all")


def with_sums(graphs: RankGraphs, dtype: str | None) -> RankGraphs:
    """The graphs with a backward pass that adds gradients of parameters to sums: more inputs, after the others, named `sums`.

    Every gradient is added when it is computed and reduced. dtype: of the sums, by default that of the gradients.
    """
    if graphs.backward is None:
        return graphs
    root = graphs.backward
    graph = root.graph
    *nodes, output = graph.nodes
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results, names = list(output.args[0]), list[str]()
    body = next((node for node in nodes if node.op != "placeholder"), output)
    for k, key in enumerate(graphs.gradients):
        name, gradient = key.removeprefix("gradient:"), results[k]
        if name not in graphs.parameters:
            continue
        value = gradient.meta["val"]
        with graph.inserting_before(body):
            total = graph.placeholder(f"sum_{len(placeholders) + len(names)}")
            with value.fake_mode:
                of = value.dtype if dtype is None else getattr(torch, dtype)
                total.meta["val"] = torch.empty(value.shape, dtype=of, device=value.device)
        with graph.inserting_before(body if gradient.op == "placeholder" else gradient.next):
            results[k] = graph.call_function(ADD, (total, gradient))
            results[k].meta = {"val": total.meta["val"], "record": gradient.meta.get("record")}
        names.append(name)
    output.args = (results,)
    graph.lint()
    return replace(graphs, backward=fx.GraphModule(root, graph), sums=tuple(names))
