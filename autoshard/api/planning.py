"""The order of things: a model and a mesh in, a Solution out.

graph, _  = capture_deep(model, example_inputs)                   what is computed (few layers are captured, then tiled)
found     = candidates(graph, mesh)                               what layouts each op may take
formulated = formulate(graph, found, mesh)                        what each choice costs, in numbers
answer    = solve(formulated.problem)                             the best choice, with a proof
solution  = describe(formulated, answer)                          layouts by name again
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from autoshard.api.checkpointing import cheapest, checkpointed, forward_blocks
from autoshard.api.describe import breakdown, layouts_of, parameters_of, replicated_ops, results_of
from autoshard.baselines import Baseline, allowed, baselines
from autoshard.capture import capture_deep
from autoshard.cost import OPTIMIZERS
from autoshard.formulate import Formulation, Training, formulate, with_pins
from autoshard.graph import Graph
from autoshard.layout import parse, text, why_illegal
from autoshard.mesh import Mesh
from autoshard.problem import Problem, evaluate
from autoshard.solution import VERSION, Solution
from autoshard.solvers import Answer, Status, solve
from autoshard.strategies import Candidates, candidates

Progress = Callable[[str, float], None]  # (what is being done, fraction of the whole)


class Infeasible(ValueError):
    """No plan fits what was asked; the message says what would."""

    def __init__(self, message: str, smallest_limit: tuple[float, float] | None = None):
        super().__init__(message)
        self.smallest_limit = smallest_limit  # bytes per device: nothing fits below the first, something fits at the second


@dataclass(frozen=True)
class Options:
    """What a plan is made under, beside the model and the mesh."""

    training: bool = False
    optimizer: str = "adamw"
    memory_limit: float | None = None  # bytes per device
    pins: Mapping[str, str] = field(default_factory=dict)  # layout by parameter, buffer, input or op name
    solver: str = "auto"
    time_limit: float = 10000.0  # seconds, for the whole plan
    gap: float = 0.0  # relative
    baselines: bool = True
    skip_fully_replicated: bool = False
    recompute: int | str = 0  # repeated blocks to recompute in the backward pass: a number, "all" or "auto"
    witness: bool = False  # check a capture of few layers against an eager run of all of them

    def __post_init__(self) -> None:
        if self.recompute not in ("all", "auto") and (isinstance(self.recompute, (bool, str)) or not self.recompute >= 0):
            raise ValueError(f"recompute is {self.recompute!r}; expected a number of blocks, 'all' or 'auto'")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}; known are {', '.join(OPTIMIZERS)}")
        if not (_is_number(self.time_limit) and self.time_limit > 0):
            raise ValueError(f"time_limit is {self.time_limit!r}; expected a number above 0, in seconds")
        if not (_is_number(self.gap) and self.gap >= 0):
            raise ValueError(f"gap is {self.gap!r}; expected a number of 0 or more")
        if not isinstance(self.pins, Mapping):
            raise ValueError(f"pins is a {type(self.pins).__name__}; expected a dict, for example {{'wte.weight': 'S(0),R'}}")
        if self.memory_limit is not None and not (_is_number(self.memory_limit) and self.memory_limit > 0):
            raise ValueError(f"memory_limit is {self.memory_limit!r}; expected a positive number of bytes per device, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Stopwatch:
    """CPU and wall seconds by phase, and the progress that the user sees."""

    def __init__(self, progress: Progress | None):
        self.progress = progress
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.began = time.monotonic()

    @contextmanager
    def phase(self, name: str, message: str, fraction: float):
        if self.progress:
            self.progress(message, fraction)
        cpu, wall = time.process_time(), time.monotonic()
        yield
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu
        self.wall[name] = self.wall.get(name, 0.0) + time.monotonic() - wall

    def seconds(self) -> dict[str, dict[str, float]]:
        return {"cpu": {**self.cpu, "total": sum(self.cpu.values())}, "wall": {**self.wall, "total": sum(self.wall.values())}}


def plan(
    model: torch.nn.Module,
    example_inputs: Any,
    mesh: Mesh,
    *,
    progress: Progress | None = None,
    assumptions: Mapping | None = None,
    **options: Any,
) -> Solution:
    """The fastest layout of every tensor of `model` on `mesh` that fits in memory, with its proof.

    model, example_inputs: a module and what its forward takes (a tuple, or a dict of keyword arguments); the meta device
    costs no memory. options: the fields of `Options` (training, optimizer, memory_limit in bytes per device, pins, solver,
    time_limit in seconds, gap, baselines). progress: called with (what is being done, fraction done). assumptions: more
    facts to note in the solution. ValueError on bad input, `Infeasible` when nothing fits.

        solution = plan(module, (tokens, targets), Mesh.from_bandwidths((2, 4)), training=True, memory_limit=80e9)
    """
    checked = checked_options(Options, options)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {type(mesh).__name__}; expected an autoshard.Mesh, for example Mesh.from_bandwidths((2, 4))")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    watch = Stopwatch(progress)
    with watch.phase("capture", "capturing the model", 0.0):
        graph, depth = capture_deep(model, example_inputs, training=checked.training, witness=checked.witness)
    noted = {**(assumptions or {}), "capture": depth.reason}
    if checked.recompute and checked.training:
        return plan_recomputed(graph, mesh, checked, watch, noted)
    return plan_graph(graph, mesh, replace(checked, recompute=0), watch, noted)


def plan_recomputed(graph: Graph, mesh: Mesh, options: Options, watch: Stopwatch, assumptions: Mapping) -> Solution:
    """The plan with as many blocks recomputed as asked for; with "auto" the cheapest of those that fit."""
    num_blocks = len(forward_blocks(graph))
    refused: dict[int, Infeasible] = {}

    def planned(k: int) -> Solution | None:
        try:
            return plan_graph(checkpointed(graph, k), mesh, replace(options, recompute=k), watch, assumptions)
        except Infeasible as error:
            refused[k] = error
            return None

    if options.recompute != "auto":
        wanted = num_blocks if options.recompute == "all" else min(int(options.recompute), num_blocks)
        return plan_graph(checkpointed(graph, wanted), mesh, replace(options, recompute=wanted), watch, assumptions)
    best = cheapest(num_blocks, planned)
    if best is None:
        error = refused[num_blocks]
        raise Infeasible(f"{error}, with all {num_blocks} blocks recomputed", error.smallest_limit)
    return replace(best, seconds=watch.seconds())


def checked_options(kind: type, given: Mapping[str, Any]) -> Any:
    """The options as a record; an unknown name is an error that says which one was meant."""
    known = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"))
    return kind(**given)


def plan_graph(graph: Graph, mesh: Mesh, options: Options, watch: Stopwatch, assumptions: Mapping) -> Solution:
    with watch.phase("candidates", "listing layouts", 0.3):
        found = candidates(graph, mesh)
    with watch.phase("formulate", "pricing layouts", 0.35):
        formulated = formulate_for(graph, found, mesh, options)
        problem = with_pins(formulated, allowed_by_pins(formulated, options))
    judged: dict[str, dict] = {}
    with watch.phase("solve", "solving the baselines", 0.4):
        starts = solve_baselines(formulated, problem, options, watch, judged) if options.baselines else []
    with watch.phase("solve", "solving", 0.55):
        answer = solve(
            problem,
            solver=options.solver,
            time_limit=max(options.time_limit - (time.monotonic() - watch.began), 0.1),
            gap=options.gap,
            starts=starts,
            preference=formulated.preference,
            progress=_solver_progress(watch),
        )
    if answer.choice is None:
        raise infeasible(formulated, problem, answer, options)
    with watch.phase("describe", "writing the plan", 0.95):
        solution = describe(formulated, answer, options, judged, assumptions)
    return replace(solution, seconds=watch.seconds())


def formulate_for(graph: Graph, found: Candidates, mesh: Mesh, options: Options) -> Formulation:
    training = Training(options.optimizer) if any(r.kind == "gradient" for r in graph.results) else None
    return formulate(graph, found, mesh, training=training, memory_limit=options.memory_limit)


def _solver_progress(watch: Stopwatch) -> Callable[[float, float], None] | None:
    if watch.progress is None:
        return None
    report = watch.progress

    def show(cost: float, bound: float) -> None:
        gap = (cost - bound) / cost if cost and math.isfinite(cost) and math.isfinite(bound) else math.inf
        report(f"solving: best {cost * 1e3:.3f} ms, proven within {gap:.2%}" if math.isfinite(gap) else "solving", 0.6)

    return show


def allowed_by_pins(formulated: Formulation, options: Options) -> dict[int, np.ndarray]:
    """Which choices the user's pins leave, by node; ValueError on an unknown name or a layout that can't be."""
    graph, mesh = formulated.graph, formulated.mesh
    tied = dict(graph.tied)
    kept: dict[int, np.ndarray] = {}
    for name, written in options.pins.items():
        known = tied.get(name, name)
        if known not in graph.index:
            near = difflib.get_close_matches(name, [*graph.index, *tied], n=3, cutoff=0.5)
            raise ValueError(f"pin on {name!r}: the model has no such tensor" + (f"; near are {', '.join(near)}" if near else ""))
        if not isinstance(written, (str, tuple)):
            raise ValueError(f"pin on {name!r}: {written!r} is no layout; expected R, S(dim) per mesh axis, for example 'S(0),R'")
        i = graph.index[known]
        layout = written if isinstance(written, tuple) else parse(written)
        reason = why_illegal(graph.tensor((i, 0)).shape, layout, mesh)
        keep = np.array([c.outputs[0] == layout for c in formulated.candidates.of[i]])
        if reason is None and not keep.any():
            given = ", ".join(dict.fromkeys(text(c.outputs[0]) for c in formulated.candidates.of[i] if c.outputs[0] is not None))
            reason = f"layout {text(layout)} is not one that {graph.ops[i].target} can give; possible are {given}"
        if reason is not None:
            raise ValueError(f"pin on {name!r}: {reason}")
        kept[i] = keep & kept.get(i, np.ones(len(keep), dtype=bool))
    if options.skip_fully_replicated:
        _drop_replicated(formulated, kept)
    return kept


def _drop_replicated(formulated: Formulation, kept: dict[int, np.ndarray]) -> None:
    """No op fully replicated where it has another candidate (an op that can't be cut stays)."""
    for i, op in enumerate(formulated.graph.ops):
        if op.is_placeholder or i in kept:
            continue
        layouts = [[layout for layout in (*c.inputs, *c.outputs) if layout is not None] for c in formulated.candidates.of[i]]
        cut = np.array([any(not p.is_replicate() for layout in of for p in layout) for of in layouts])
        if cut.any():
            kept[i] = cut


BASELINE_SECONDS = 30.0  # at most, each


def solve_baselines(
    formulated: Formulation, problem: Problem, options: Options, watch: Stopwatch, judged: dict[str, dict]
) -> list[tuple[int, ...]]:
    """Completes each baseline's pins with the solver; returns those that obey the limit and the pins, as starts."""
    starts = []
    unlimited = replace(formulated.problem, usage_limit=None)
    for baseline in baselines(formulated.graph, formulated.mesh, formulated.candidates):
        left = options.time_limit - (time.monotonic() - watch.began)
        if left <= 0:
            judged[baseline.name] = {"cost_seconds": None, "peak_bytes": None, "status": "unknown", "matched": baseline.matched}
            continue
        pinned = replace(unlimited, node_costs=_pinned(formulated, baseline).node_costs)
        answer = solve(pinned, time_limit=min(BASELINE_SECONDS, left / 8))
        judged[baseline.name] = {
            "cost_seconds": answer.cost if answer.choice is not None else None,
            "peak_bytes": answer.peak,
            "status": answer.status.value,
            "matched": baseline.matched,
        }
        if answer.choice is not None:
            seen = evaluate(problem, answer.choice)
            judged[baseline.name]["fits"] = options.memory_limit is None or (answer.peak or 0.0) <= options.memory_limit
            if seen.fits and math.isfinite(seen.cost):
                starts.append(answer.choice)
    return starts


def baseline_only(graph: Graph, mesh: Mesh, options: Options, watch: Stopwatch, assumptions: Mapping, name: str) -> Solution:
    """The plan of one baseline, its pins completed by the solver; the bound is that of the pinned problem."""
    with watch.phase("candidates", "listing layouts", 0.3):
        found = candidates(graph, mesh)
    with watch.phase("formulate", "pricing layouts", 0.35):
        formulated = formulate_for(graph, found, mesh, options)
        chosen = next(b for b in baselines(graph, mesh, found) if b.name == name)
        limit = options.memory_limit
        problem = replace(with_pins(formulated, allowed_by_pins(formulated, options)), usage_limit=limit)
        pinned = replace(problem, node_costs=tuple(map(np.maximum, problem.node_costs, _pinned(formulated, chosen).node_costs)))
    with watch.phase("solve", f"completing {name}", 0.5):
        answer = solve(pinned, solver=options.solver, time_limit=options.time_limit, gap=options.gap, preference=formulated.preference)
    if answer.choice is None:
        raise infeasible(formulated, pinned, answer, options)
    solution = describe(formulated, answer, options, {}, {**assumptions, "pinned_to": name, "matched": chosen.matched})
    return replace(solution, seconds=watch.seconds())


def _pinned(formulated: Formulation, baseline: Baseline) -> Problem:
    return with_pins(formulated, allowed(baseline.pins, formulated.graph, formulated.candidates))


def infeasible(formulated: Formulation, problem: Problem, answer: Answer, options: Options) -> Infeasible:
    why = answer.infeasibility
    return Infeasible(why_nothing_fits(formulated, problem, answer, options), None if why is None else why.smallest_limit)


def _size(size: float, *, up: bool = False) -> str:
    """Bytes to read, to a thousandth of the unit; `up`: never less than they are."""
    unit, name = (1e9, "GB") if size >= 1e8 else (1e6, "MB") if size >= 1e5 else (1e3, "kB")
    return f"{math.ceil(size / unit * 1e3) / 1e3 if up else size / unit:.3f} {name}"


def why_nothing_fits(formulated: Formulation, problem: Problem, answer: Answer, options: Options) -> str:
    """One sentence: the limit, the smallest one that would do, and what holds the bytes."""
    if options.memory_limit is None or not math.isfinite(np.sum([np.min(c) for c in problem.node_costs])):
        return "no plan exists under these pins: they forbid each other; take one away"
    limit = _size(options.memory_limit)
    if answer.status is not Status.INFEASIBLE:
        return f"no plan within {limit} per device was found in {options.time_limit:g} s; raise the memory limit or the time limit"
    why = answer.infeasibility
    if why is None:
        return f"no plan fits in {limit} per device; raise the memory limit"
    low, high = why.smallest_limit
    smallest = (
        f"the smallest limit that works is {_size(high, up=True)}"
        if high - low <= 1e-3 * high
        else f"the smallest limit that works is between {_size(low)} and {_size(high, up=True)}"
    )
    holders = ", ".join(f"{problem.names[node]} {_size(held)}" for node, held in why.nodes[:3])
    return f"no plan fits in {limit} per device; {smallest}" + (f" (largest there: {holders})" if holders else "")


def describe(formulated: Formulation, answer: Answer, options: Options, judged: Mapping[str, dict], assumptions: Mapping) -> Solution:
    """The answer by name: layouts, certificate, baselines, what was not understood, and what it was made under."""
    assert answer.choice is not None
    graph, mesh, problem, choice = formulated.graph, formulated.mesh, formulated.problem, answer.choice
    noted = {
        **{key: value for key, value in asdict(options).items() if key not in ("time_limit", "baselines")},
        "torch_version": torch.__version__.split("+")[0],
        "autoshard_version": VERSION,
        "axes": [
            {"name": a.name, "size": a.size, "bandwidth": a.bandwidth, "latency": a.latency, "shared_by": a.shared_by} for a in mesh.axes
        ],
        "device": mesh.device.name,
        **assumptions,
    }
    return Solution(
        layouts=layouts_of(formulated, choice),
        results=results_of(formulated, choice),
        mesh=mesh,
        cost=answer.cost,
        bound=min(answer.bound, answer.cost),
        status=answer.status.value,
        solver=answer.solver,
        peak_bytes=float(answer.peak or 0.0),
        training=any(r.kind == "gradient" for r in graph.results),
        baselines=dict(judged),
        replicated_ops=replicated_ops(formulated, choice),
        parameters=parameters_of(formulated, choice),
        breakdown=breakdown(formulated, choice),
        counts={
            "nodes": len(problem.node_costs),
            "choices": sum(len(c) for c in problem.node_costs),
            "edges": len(problem.edges),
            "distinct_signatures": formulated.candidates.num_signatures,
        },
        fingerprint=fingerprint(graph, mesh, options),
        assumptions=noted,
    )


def fingerprint(graph: Graph, mesh: Mesh, options: Options) -> dict[str, str]:
    """Hashes of what a plan depends on; equal on every machine."""
    prices = mesh.to_dict()
    chosen = {key: value for key, value in asdict(options).items() if key not in ("time_limit", "baselines", "solver")}
    return {
        "graph": graph.fingerprint(),
        "structure": graph.structure(),
        "mesh": _hash(list(mesh.shape)),
        "prices": _hash(prices),
        "options": _hash({**chosen, "pins": dict(options.pins)}),
    }


def _hash(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
