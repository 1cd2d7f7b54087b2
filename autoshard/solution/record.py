"""The plan as a value: layouts by name, their cost, what is proven about it, and under which assumptions.

    gap = (cost - bound) / |cost|

Everything in it is text and numbers, so it can be read by people, compared line by line and loaded without running anybody's code.
Layouts are written as `layout.text` writes them: "S(0),R". An unknown number is inf in the fields of the record and None inside the
free-form dicts (files can't hold inf); records get this form when they are created, so a saved plan and the loaded one are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from autoshard.graph import Chosen, Graph, Offload, SequenceOrder, Value, readers_of
from autoshard.layout import parse
from autoshard.mesh import Mesh, check_shape
from autoshard.precision import Precision
from autoshard.solution.dynamic import Coverage, DynamicShapes
from autoshard.solution.interval import interval, price_errors
from autoshard.solution.plan import Fact, ModelPlan, provided

ROUNDING = 1e-9  # relative: costs and bounds this near are equal, as for the solvers


@dataclass(frozen=True)
class Placed:
    """The layouts of one op, as text."""

    inputs: tuple[str, ...]  # layouts that the tensor inputs have when the op runs
    outputs: tuple[str | None, ...]  # None where the output is no tensor
    hubs: tuple[str | None, ...] = ()  # per output: the layout in which several users read it, None without a hub

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "hubs", tuple(self.hubs) or (None,) * len(self.outputs))

    def to_dict(self) -> dict:
        """Plain lists; the key "hubs" only where there are hubs."""
        hubs = {"hubs": list(self.hubs)} if any(self.hubs) else {}
        return {"inputs": list(self.inputs), "outputs": list(self.outputs), **hubs}


@dataclass(frozen=True)
class Solution(ModelPlan):
    """A plan for one graph on one mesh, with its certificate. Costs are in seconds, sizes in bytes per device."""

    layouts: dict[str, Placed]  # by op name, in graph order; parameters, buffers and inputs are ops of their qualified names
    results: dict[str, str]  # "output:0", "gradient:h.0.attn.weight" -> layout
    mesh: Mesh
    cost: float  # seconds of all tasks one after the other; inf where it is unknown
    bound: float  # seconds; no plan costs less
    status: str  # "optimal" (within the gap asked for, under its objective), "feasible", or "unjudged" for layouts without a certificate
    solver: str
    peak_bytes: float  # inf where it is unknown
    training: bool
    baselines: dict[str, dict] = field(default_factory=dict)  # name -> cost_seconds, peak_bytes, status, matched
    replicated_ops: tuple[dict, ...] = ()  # ops without rules: target, count, seconds, bytes
    parameters: dict[str, dict] = field(default_factory=dict)  # name -> layout, shape, dtype, local_bytes
    breakdown: dict = field(default_factory=dict)  # seconds: compute by class, communication by collective and axis, blocks
    counts: dict = field(default_factory=dict)  # nodes, choices, edges, distinct_signatures
    fingerprint: dict[str, str] = field(default_factory=dict)  # hashes: graph, structure, mesh, prices, options
    assumptions: dict = field(default_factory=dict)  # prices and options in words
    prices: dict = field(default_factory=dict)  # their errors, relative: {"device": e, "links": {axis: {collective: e}}}
    peak: dict = field(default_factory=dict)  # the moment of peak_bytes and what they consist of: op, module, parts {kind: bytes}, largest
    overlapped: dict = field(default_factory=dict)  # seconds, bound_seconds, serial_plan_seconds: of time lines
    modules: dict = field(default_factory=dict)  # by axis name, for launchers that know modules only: styles, dropped, seconds
    seconds: dict = field(default_factory=dict)  # {"cpu": {capture, candidates, formulate, solve, total}, "wall": ...}

    def __post_init__(self) -> None:
        free = ("results", "baselines", "parameters", "breakdown", "counts", "fingerprint", "assumptions", "prices")
        for name in (*free, "peak", "overlapped", "modules", "seconds"):
            object.__setattr__(self, name, plain(getattr(self, name), name))
        object.__setattr__(self, "replicated_ops", tuple(plain(list(self.replicated_ops), "replicated_ops")))
        object.__setattr__(self, "layouts", dict(self.layouts))
        for name in _UNKNOWN:
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def parts(self) -> Mapping[tuple[str, int], Solution]:
        return {("", 0): self}

    @property
    def objective(self) -> str:
        """What planning made small: "serial", the cost, or "overlapped", the seconds of the simulated time line."""
        return "overlapped" if self.overlapped else "serial"

    @property
    def step_seconds(self) -> float | None:
        """Of the simulated time line, in which collectives run beside kernels; None where it was not simulated."""
        return self.overlapped.get("seconds", self.breakdown.get("step_seconds"))

    @property
    def objective_seconds(self) -> float:
        """The seconds that the objective counts."""
        return float(self.overlapped["seconds"]) if self.overlapped else self.cost

    @property
    def objective_bound(self) -> float:
        """Seconds; under the objective no plan takes less."""
        return float(self.overlapped["bound_seconds"]) if self.overlapped else self.bound

    @property
    def objective_gap(self) -> float:
        """How far the seconds of the objective may be above the least of any plan, relative."""
        if not self.overlapped:
            return self.gap
        seconds, bound = self.objective_seconds, self.objective_bound
        return (seconds - bound) / seconds if seconds > bound else 0.0

    @property
    def verdict(self) -> str:
        """The status with "optimal" for plans proven best alone; "proven" where the gap that was asked for is above 0."""
        return "proven" if self.status == "optimal" and self.objective_gap > ROUNDING else self.status

    @property
    def inputs(self) -> dict[str, tuple[int, ...] | None]:
        """The planned global shapes of the model's inputs, by name; None where the plan doesn't have them."""
        noted = self.assumptions.get("inputs")
        if isinstance(noted, dict):
            return {name: tuple(shape) for name, shape in noted.items() if isinstance(shape, list) and name in self.layouts}
        return {name: None for name in self.layouts if name.startswith("input_")}

    # Facts about the plan that files keep among its assumptions. Here they have types; nobody else reads them by key.
    memory_limit = Fact[float | None]("Bytes per device that the plan had to fit in; None without a limit.")  # type: ignore[assignment]
    optimizer = Fact[str | float]("The optimizer's name, or its bytes of state per parameter.", nothing="adamw")
    precision = Fact[Precision | None](
        "In which dtypes the plan computes, reduces gradients and returns; None: in those of the model.", Precision.of
    )
    master_weights = Fact[bool]("Whether the optimizer's float32 copies of the parameters were counted.", bool)
    recompute = Fact[int]("How many of the repeated blocks are recomputed in the backward pass.", int, nothing=0)
    computed_again = Fact[list[str]]("The ops that a compiled step runs again in the backward pass, of its own accord.", list, nothing=())
    saved = Fact[dict[str, dict[str, list[str]]]](
        "Of a plan that chose per tensor, by module and operator: how the backward pass gets the values of its calls, kept, recomputed, "
        "offloaded.", dict, nothing=(),
    )  # fmt: skip
    compiled = Fact[bool]("Whether kernels are those of a compiled program.", bool)
    microbatches = Fact[int]("How many microbatches a step has: its inputs are of one, cost and bound are of the step.", int, nothing=1)
    accumulation_dtype = Fact[str | None]("The dtype of the sums of gradients over microbatches; None where it is that of the gradients.")
    sequence_order = Fact[SequenceOrder | None](
        "The head-tail order in which the plan computes the sequence; None for the natural order.",
        lambda noted: SequenceOrder.from_dict(noted) if isinstance(noted, Mapping) else None,
    )
    chunked_loss = Fact[int]("Of how many tokens of a rank the logits of a cross entropy exist at a time; 0: of all.", int, nothing=0)
    hidden_values = Fact[int](
        "Into how many equal parts the hidden values of experts, kept between forward and backward, can be divided; 0: none are kept.", int,
        nothing=0,
    )  # fmt: skip
    dynamic_shapes = Fact[DynamicShapes | None](
        "The ranges of sizes that the plan is for; None where it is for one shape. ValueError where a file has something else there.",
        lambda noted: None if noted is None else DynamicShapes.from_dict(noted),
    )
    pinned_scheme = Fact[str | None](
        "The baseline whose layouts the plan was pinned to, `fsdp`; None where all layouts were planned.", key="pinned_to"
    )
    matched = Fact[str | None]("Which parameters the rules of `pinned_scheme` applied to, in words.")
    ignored = Fact[str | None]("What in the model's forward the plan ignores, in words; None where it ignores nothing.")
    padding = Fact[tuple[dict, ...]]("What padding a parameter would save: parameter, dim, from, to, saves_seconds.", tuple, nothing=())
    pin_prices = Fact[tuple[dict, ...] | None](
        "What each pin costs: kind, name, layout, costs_seconds, proven; None where nobody asked.",
        lambda rows: None if rows is None else tuple(rows),
    )

    @property
    def chosen(self) -> Chosen:
        """Which ops run again in the backward pass, and which values wait in the host's memory, of a plan that chose per tensor."""
        offloaded = self.assumptions.get("offloaded") or {}
        return Chosen(
            frozenset(self.assumptions.get("recomputed") or ()),
            {name: Offload(str(row["before"]), float(row["exposed"])) for name, row in offloaded.items()},
        )

    def covers(self, **sizes: int) -> Coverage:
        """What a plan with `dynamic_shapes` says of a shape, by the sizes of its dims: true where its layouts divide it.

        ValueError where the plan is for one shape, or has other dims. The seconds and the bound between planned points are estimated.
        """
        if (dynamic := self.dynamic_shapes) is None:
            raise ValueError("the plan is for one shape; plan with dynamic_shapes for ranges of sizes")
        return dynamic.covers(sizes)

    def _run_layouts(self) -> list:
        return [{name: placed.to_dict() for name, placed in self.layouts.items()}, self.results]

    def noted(self, *keys: str) -> dict[str, Any]:
        """Those of these assumptions that the plan has, by key: options of another plan, for example."""
        return {key: value for key, value in self.assumptions.items() if key in keys}

    @property
    def interval(self) -> tuple[float, float] | None:
        """Least and most seconds that the errors of the prices allow for what the objective counts (solution.interval)."""
        return interval(self.objective_seconds, self.breakdown, self.prices or price_errors(self.mesh, self.objective))

    def _repr_html_(self) -> str:
        """The view in a notebook: cost and proof, the usual plans, layouts."""
        return provided("notebook")(self)

    def to_dict(self) -> dict:
        """Plain dicts, lists, strings and finite numbers; `from_dict` is the inverse."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "overlapped" or self.overlapped}
        data["layouts"] = {name: placed.to_dict() for name, placed in self.layouts.items()}
        data["replicated_ops"] = list(self.replicated_ops)
        data["mesh"] = plain(self.mesh.to_dict(), "mesh")
        for name in _UNKNOWN:
            data[name] = data[name] if math.isfinite(data[name]) else None
        return {**{key: data.pop(key) for key in _HEAD}, **data}

    @staticmethod
    def from_dict(data: dict) -> Solution:
        """The inverse of `to_dict`, for data that follows the schema of files (`load` checks it); ValueError where its mesh, layouts, cost
        and bound don't belong together."""
        mesh = Mesh.from_dict(data["mesh"])
        check_shape(mesh.shape)
        Precision.of(data["assumptions"].get("precision"))  # ValueError where it is none
        numbers = {name: math.inf if data[name] is None else float(data[name]) for name in _UNKNOWN}
        check_bound(numbers["cost"], numbers["bound"])
        layouts = {name: Placed(**row) for name, row in data["layouts"].items()}
        written = [(f"op {name!r}", one) for name, of in layouts.items() for one in (*of.inputs, *of.outputs, *of.hubs) if one is not None]
        written += [(f"result {name!r}", one) for name, one in data["results"].items()]
        written += [(f"parameter {name!r}", row["layout"]) for name, row in data["parameters"].items()]
        for what, layout in written:
            if (count := len(parsed(layout))) != len(mesh.axes):
                raise ValueError(f"{what} has layout {layout!r} of {count} placements, the mesh has {len(mesh.axes)} axes")
        return Solution(**{**data, **numbers, "mesh": mesh, "layouts": layouts, "replicated_ops": tuple(data["replicated_ops"])})


_HEAD = ("status", "solver", "training", "cost", "bound", "peak_bytes", "counts", "mesh")  # first in a file, as readers look for them
_UNKNOWN = ("cost", "bound", "peak_bytes")  # inf where they are unknown, which files write as null


def noted_choice(chosen: Chosen, graph: Graph) -> dict[str, Any]:
    """The inverse of `Solution.chosen` and `Solution.saved`, as assumptions; empty where everything is kept. graph: without the copies."""
    noted: dict[str, Any] = {"recomputed": sorted(chosen.recomputed)} if chosen.recomputed else {}
    if chosen.offloaded:
        noted["offloaded"] = {name: {"before": one.before, "exposed": one.exposed} for name, one in chosen.offloaded.items()}
    return noted | {"saved": _ways(chosen, graph)} if noted else {}


def _ways(chosen: Chosen, graph: Graph) -> dict[str, dict[str, list[str]]]:
    ways: dict[str, dict[str, set[str]]] = {}
    for i, op in enumerate(graph.ops):
        values = [(i, k) for k in range(len(op.outputs))]
        on_host = any(f"{op.name}.{k}" in chosen.offloaded for _, k in values)
        way = "offloaded" if on_host else "recomputed" if op.name in chosen.recomputed else "kept"
        is_restored = way != "kept" or any(_is_restored(graph, chosen, value) for value in values)
        if is_restored and op.alias is None and not (op.is_placeholder or op.backward):
            ways.setdefault(op.module, {}).setdefault(op.target, set()).add(way)
    return {module: {target: sorted(of) for target, of in targets.items()} for module, targets in ways.items()}


def _is_restored(graph: Graph, chosen: Chosen, value: Value) -> bool:
    """Whether the backward pass reads a forward value or a view of it, or what runs again in it does."""
    again = any(graph.ops[j].name in chosen.recomputed for j, _ in readers_of(graph, value))
    return again or any(readers_of(graph, value, backward=True))


def check_bound(cost: float, bound: float) -> None:
    """ValueError where a plan costs less than no plan can."""
    if bound > cost + ROUNDING * abs(cost):
        raise ValueError(f"its bound {bound:g} is above its cost {cost:g}, so one of them is wrong")


parsed = lru_cache(maxsize=4096)(parse)  # a plan has thousands of layouts and a few dozen different ones


def plain(value: object, where: str) -> Any:
    """`value` in JSON's types: tuples become lists, numpy's numbers Python's, inf and nan None; ValueError on other types."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{k}]") for k, item in enumerate(value)]
    if isinstance(value, Integral):  # numpy's too
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise ValueError(f"{where} holds a {type(value).__name__}; a plan holds dicts, lists, strings and numbers only")
