"""Several programs on one set of weights, planned together: training and rollout, prefill and decode, one shape or many.

best      each program alone, with all options of `plan`: what it is compared with, and where the search starts      (`_alone`)
join      one Problem: the programs side by side, parameters shared or joined by the seconds of their copies          (formulate.join)
few       the same of models with few layers; its answer extends to all of them                                       (`_joined_shallow`)
solve     the best choice of all programs together, with its proof                                                    (`_solved`)
describe  a Solution per program, the copies, and what sharing costs each program                                     (`_described`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from autoshard.capture import capture_deep, in_turn
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Joined, ParameterCopy, Piece, join
from autoshard.layout import text
from autoshard.mesh import Mesh
from autoshard.planning.batches import align_batches
from autoshard.planning.certify import describe
from autoshard.planning.conflicts import Conflict
from autoshard.planning.context import Context, Instance, instance_of
from autoshard.planning.microbatches import with_number_of_microbatches
from autoshard.planning.module_schemes import modules_of
from autoshard.planning.options import Infeasible, NoAnswer, Options, Progress, Stopwatch, checked_options
from autoshard.planning.recomputing import as_asked
from autoshard.planning.refusal import infeasible, patience, why_nothing_fits
from autoshard.planning.shallow import Correspondence, Shallow
from autoshard.planning.solving import solve_instance
from autoshard.problem import evaluate, usage_profile
from autoshard.routes import Transfers
from autoshard.solution import ProgramsSolution, Solution
from autoshard.solvers import Answer, Status, solve
from autoshard.strategies import candidates

SHARE = 0.25  # of the time left: at most for one program alone
OF_ALL = ("memory_limit", "time_limit", "gap", "accepted", "solver")  # options of all programs together
NOT_HERE = {  # options of plan
    "tie_blocks": "its bound would not be that of all programs",
    "baselines": "a program is compared with the best plan of it alone",
    "price_pins": "plan the program alone to price its pins",
    "keep": "pin the layouts instead",
    "skip_fully_replicated": "forbid the layout R instead",
}


@dataclass(frozen=True, eq=False)
class Program:
    """One of several programs on one set of weights. `inputs`, or `shapes`: several inputs, each with how frequent it is."""

    model: torch.nn.Module  # parameters of the same name are one parameter in all programs
    inputs: Any = None  # as for `plan`
    training: bool = False
    weight: float = 1.0  # how often it runs per unit
    shapes: Sequence[tuple[Any, float]] = ()  # (inputs, frequency)
    devices: Sequence[int] | None = None  # numbers of devices of the mesh, where the program runs on part of them
    mesh: Mesh | None = None  # of those devices; by default that of the axes along which they differ
    keeps_state: bool = False  # its own buffers (a key-value cache) stay in memory while other programs run
    options: Mapping[str, Any] = field(default_factory=dict)  # of `plan`, for this program: recompute, precision, pins, ...

    def __post_init__(self) -> None:
        if not isinstance(self.model, torch.nn.Module):
            raise ValueError(f"a program's model is {type(self.model).__name__}; expected a torch.nn.Module")
        if not _is_positive(self.weight):
            raise ValueError(f"a program's weight is {self.weight!r}; expected a number above 0, how often it runs per unit")
        if not isinstance(self.shapes, (list, tuple)) or not all(isinstance(one, (list, tuple)) and len(one) == 2 for one in self.shapes):
            raise ValueError("a program's shapes hold something else; expected pairs of inputs and frequency, [((tokens,), 0.5)]")
        if self.devices is not None and not isinstance(self.devices, Sequence):
            raise ValueError(f"a program's devices are {self.devices!r}; expected numbers of devices, for example range(4)")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"a program's options are a {type(self.options).__name__}; expected a dict, for example {{'recompute': 4}}")
        if not isinstance(self.training, bool):
            raise ValueError(f"a program's training is {self.training!r}; expected True or False")
        if (self.inputs is None) != bool(self.shapes):
            raise ValueError("a program has either inputs or shapes; give one of them, for example Program(model, (tokens,))")
        if wrong := [frequency for _, frequency in self.shapes if not _is_positive(frequency)]:
            raise ValueError(f"the frequency of a shape is {wrong[0]!r}; expected a number above 0")

    def variants(self, name: str) -> Iterator[tuple[str, Any, float]]:
        """(name, inputs, weight) of each shape; the weights add up to the program's."""
        if not self.shapes:
            yield name, self.inputs, self.weight
        total = sum(frequency for _, frequency in self.shapes)
        for k, (inputs, frequency) in enumerate(self.shapes):
            yield f"{name}[{k}]", inputs, self.weight * frequency / total


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


@in_turn
def plan_programs(
    programs: Mapping[str, Program],
    mesh: Mesh,
    *,
    switches: float | None | Mapping[str, float | None] = 1.0,
    progress: Progress | None = None,
    **options: Any,
) -> ProgramsSolution:
    """The plan of several programs on one set of weights that costs least per unit, with its proof.

    programs: by name, each with its `weight`, how often it runs per unit. A parameter has one layout for all programs, or one per program
    and is copied at each switch, whichever is cheaper; two programs that train a parameter share its layout. switches: how often per unit
    the copies of a program are made anew, a number or one by program's name; 0: once, they stay in memory; None: everything is shared.
    options: of `plan`; memory_limit is the bytes per device at the fullest moment of any program, with what the others leave there.
    ValueError on bad input, `Infeasible` where no plan fits.

        plan = plan_programs({"train": Program(m, batch, training=True), "generate": Program(m, (token,), weight=500)}, mesh)
    """
    shared = _checked(programs, mesh, options)
    clock = Stopwatch(progress)
    alone = [
        one for k, (name, program) in enumerate(programs.items())
        for one in _alone(name, program, mesh, _switches_of(switches, name, programs), shared, clock, k / len(programs))
    ]  # fmt: skip
    with clock.phase("formulate", "joining the programs", 0.7), no_search_for_cycles():
        joined = join([one.piece for one in alone], mesh, shared.memory_limit)
    with clock.phase("solve", "solving all programs together", 0.75):
        answer = _solved(joined, alone, shared, clock)
    if answer.choice is None:
        raise _refused(joined, answer, shared, programs)
    with clock.phase("describe", "writing the plan", 0.95), no_search_for_cycles():
        answer = _aligned(joined, alone, answer, shared.gap)
        solution = _described(joined, alone, answer, mesh)
    return replace(solution, seconds=clock.seconds())


def _checked(programs: Mapping[str, Program], mesh: Mesh, options: Mapping[str, Any]) -> Options:
    """The options of all programs. ValueError where they, the programs or the mesh are something else."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {type(mesh).__name__}; expected an autoshard.Mesh, for example Mesh.from_bandwidths((2, 4))")
    if not isinstance(programs, Mapping) or not programs or not all(isinstance(p, Program) for p in programs.values()):
        several = programs.values() if isinstance(programs, Mapping) else [programs]
        other: Any = next((one for one in several if not isinstance(one, Program)), None)
        said = "empty" if other is None else f"no dict of Programs, but has a {type(other).__name__}"
        raise ValueError(f"programs is {said}; expected Programs by name, for example {{'train': Program(model, inputs)}}")
    if wrong := [name for name in programs if not isinstance(name, str) or not name.isidentifier()]:
        raise ValueError(f"a program is called {wrong[0]!r}; expected a name of letters, digits and underscores")
    for one in (options, *(p.options for p in programs.values())):
        for key in one:
            if key in NOT_HERE:
                raise ValueError(f"{key} is no option of several programs: {NOT_HERE[key]}")
    if "training" in options:
        raise ValueError("training is a matter of each program: give it to Program(training=True)")
    for name, program in programs.items():
        if wrong := [key for key in program.options if key in (*OF_ALL, "training")]:
            raise ValueError(f"{wrong[0]} is among the options of program {name!r}; give it to plan_programs, or Program(training=True)")
        if {**options, **program.options}.get("recompute") == "auto":
            raise ValueError(f"recompute is 'auto' for program {name!r}; expected a number of blocks or 'all': plan it alone to see which")
    return checked_options(Options, options)


def _switches_of(switches: float | None | Mapping[str, float | None], name: str, programs: Mapping[str, Program]) -> float | None:
    if isinstance(switches, Mapping):
        if unknown := [key for key in switches if key not in programs]:
            raise ValueError(f"switches names {unknown[0]!r}; the programs are {', '.join(programs)}")
        switches = switches.get(name, 1.0)
    if switches is not None and (isinstance(switches, bool) or not isinstance(switches, (int, float)) or not 0 <= switches < math.inf):
        raise ValueError(f"switches is {switches!r} for program {name!r}; expected how often per unit, 0 or more, or None to share all")
    return switches


# -- each program alone --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Alone:
    """A program by itself, and the best plan of it."""

    context: Context
    instance: Instance
    piece: Piece
    answer: Answer


def _alone(
    name: str, program: Program, cluster: Mesh, switches: float | None, shared: Options, clock: Stopwatch, fraction: float
) -> Iterator[_Alone]:
    mesh, devices = _part(name, program, cluster)
    given = {key: getattr(shared, key) for key in Options.__dataclass_fields__}
    options: Options = checked_options(Options, {**given, **program.options, "training": program.training, "baselines": False})
    for variant, inputs, weight in program.variants(name):
        with clock.phase("capture", f"capturing {variant}", 0.7 * fraction), no_search_for_cycles():
            graph, depth = capture_deep(
                program.model, inputs, training=program.training, precision=options.precision, witness=options.witness
            )
        context = Context(graph, mesh, options, clock, depth.noted, depth.shallow)
        context = as_asked(with_number_of_microbatches(context)).stepped()
        with clock.phase("formulate", f"pricing layouts of {variant}", 0.7 * fraction), no_search_for_cycles():
            instance = instance_of(context, candidates(context.graph, mesh))
        with clock.phase("solve", f"solving {variant} alone", 0.7 * fraction):
            answer = solve_instance(context.within(SHARE), instance, ())
        if answer.choice is None:
            if answer.status is not Status.INFEASIBLE:
                answer.in_passing()
            raise infeasible(context, instance, answer)
        piece = Piece(
            variant, instance.formulated, instance.problem, weight, name, switches, devices, program.keeps_state, instance.homes
        )  # fmt: skip
        yield _Alone(context, instance, piece, answer)


def _part(name: str, program: Program, cluster: Mesh) -> tuple[Mesh, tuple[int, ...]]:
    """The mesh of a program and the numbers of its devices."""
    every = tuple(range(cluster.num_devices))
    if program.devices is None:
        if program.mesh is not None and program.mesh != cluster:
            raise ValueError(f"program {name!r} has a mesh of its own; say which of the {len(every)} devices it is, as devices=range(4)")
        return cluster, every
    devices = tuple(program.devices)
    if not devices or len(set(devices)) < len(devices) or not set(devices) <= set(every):
        raise ValueError(f"program {name!r} runs on devices {devices[:9]}; expected different numbers from 0 to {len(every) - 1}")
    mesh = sub_mesh(cluster, devices) if program.mesh is None else program.mesh
    if mesh.num_devices != len(devices):
        raise ValueError(f"program {name!r} runs on {len(devices)} devices, its mesh has {mesh.num_devices}; expected as many")
    return mesh, devices


def sub_mesh(mesh: Mesh, devices: Sequence[int]) -> Mesh:
    """Some devices as a mesh of the axes along which they differ. ValueError where they are no block of the mesh, row-major."""
    where = np.array(np.unravel_index(devices, mesh.shape))
    sizes = [len(set(row)) for row in where.tolist()]
    corner = where.min(axis=1)
    block = np.stack(np.meshgrid(*(c + np.arange(n) for c, n in zip(corner, sizes, strict=True)), indexing="ij")).reshape(len(sizes), -1)
    if block.shape != where.shape or (block != where).any():
        raise ValueError(f"devices {list(devices)[:9]} are no block of the mesh {mesh.shape} in order; give the program a mesh of its own")
    axes = [replace(axis, size=n) for axis, n in zip(mesh.axes, sizes, strict=True) if n > 1]
    one = [replace(mesh.axes[-1], name="axis0", size=1)]
    return Mesh(tuple(axes or one), mesh.device)


# -- all together ---------------------------------------------------------------------------------------------------------------------


def _solved(joined: Joined, alone: Sequence[_Alone], options: Options, clock: Stopwatch) -> Answer:
    left = max(options.time_limit - clock.elapsed, 0.1)
    limits: dict[str, Any] = {"time_limit": left, "gap": options.gap, "preference": joined.preference, "homes": joined.homes}
    limits |= {"clock": clock.now, "patience": patience(options, left), "accepted": options.accepted, "starts": _starts(joined, alone)}
    shallow = _joined_shallow(joined, alone) if options.solver == "auto" else None
    if shallow is not None:
        return shallow.solve(joined.problem, **limits)
    return solve(joined.problem, solver=options.solver, **limits)


def _starts(joined: Joined, alone: Sequence[_Alone]) -> list[tuple[int, ...]]:
    """The best plans of the programs side by side; and for each program that with its parameters' layouts in all of them."""
    best = joined.joined_choice({one.piece.name: one.answer.choice or () for one in alone})
    starts = [best]
    for one in alone:
        start = list(best)
        wanted = {name: one.answer.choice[i] for name, i in one.piece.owned().items()}  # type: ignore[index]
        for other in alone:
            for name, i in other.piece.owned().items():
                if name in wanted and other.piece.layouts(i) == one.piece.layouts(one.piece.owned()[name]):
                    start[joined.nodes[other.piece.name][i]] = wanted[name]
        starts.append(tuple(start))
    return starts


def _joined_shallow(joined: Joined, alone: Sequence[_Alone]) -> Shallow | None:
    """The same programs with few layers, joined, and how their answer extends to all layers; None where a program has no such."""
    if any(one.instance.shallow is None for one in alone):
        return None
    few = [one.instance.shallow for one in alone]
    pieces = [
        replace(one.piece, formulated=s.formulated, problem=s.formulated.problem, homes=s.homes or ())  # type: ignore[union-attr, arg-type]
        for one, s in zip(alone, few, strict=True)
    ]
    small = join(pieces, joined.cluster, None)
    nodes = [-1] * len(joined.problem.node_costs)
    edges = [-1] * len(joined.problem.edges)
    for one, s in zip(alone, few, strict=True):
        assert s is not None
        name = one.piece.name
        for v, w in zip(joined.nodes[name], s.correspondence.nodes, strict=True):
            nodes[v] = small.nodes[name][w] if nodes[v] < 0 else nodes[v]
        for e, f in enumerate(s.correspondence.edges):
            edges[joined.edges[name] + e] = small.edges[name] + f
    known = {(copy.node, copy.other): copy.edge for copy in small.copies}
    for copy in joined.copies:
        edges[copy.edge] = known.get((nodes[copy.node], nodes[copy.other]), -1)
    if min(edges, default=0) < 0:
        return None
    return Shallow(small, Correspondence(tuple(nodes), tuple(edges)), small.homes)


def _refused(joined: Joined, answer: Answer, options: Options, programs: Mapping[str, Program]) -> Infeasible:
    sentence = why_nothing_fits(joined.problem, answer, options, Conflict((), False))
    why = answer.infeasibility
    smallest = None if why is None or math.isinf(why.smallest_limit[0]) else why.smallest_limit
    kind = Infeasible if answer.status is Status.INFEASIBLE else NoAnswer
    return kind(f"the programs {', '.join(programs)} together: {sentence}", smallest)


def _aligned(joined: Joined, alone: Sequence[_Alone], answer: Answer, gap: float) -> Answer:
    """The answer with one layout for all inputs of a batch, program by program, where that costs no more and fits."""
    for one in alone:
        assert answer.choice is not None
        own = joined.choice_of(one.piece.name, answer.choice)
        cost = evaluate(one.piece.problem, own)
        aligned = align_batches(one.piece.formulated, one.piece.problem, replace(answer, choice=own, cost=cost.cost, bound=cost.cost), 0.0)
        choice = list(answer.choice)
        for v, i in zip(joined.nodes[one.piece.name], aligned.choice or (), strict=True):
            choice[v] = int(i)
        evaluation = evaluate(joined.problem, choice)
        if evaluation.fits and evaluation.cost <= max(answer.cost, answer.bound * (1 + gap)):
            bound = min(answer.bound, evaluation.cost)
            answer = replace(answer, choice=tuple(choice), cost=evaluation.cost, bound=bound, peak=evaluation.peak)
    return answer


# -- the plan by name -----------------------------------------------------------------------------------------------------------------


def _described(joined: Joined, alone: Sequence[_Alone], answer: Answer, cluster: Mesh) -> ProgramsSolution:
    assert answer.choice is not None
    every, named = tuple(range(cluster.num_devices)), {one.piece.name: one for one in alone}
    return ProgramsSolution(
        programs={name: _solution(one, joined.choice_of(name, answer.choice)) for name, one in named.items()},
        weights={name: one.piece.weight for name, one in named.items()},
        families={name: one.piece.family for name, one in named.items()},
        home=joined.home.name,
        mesh=cluster,
        cost=answer.cost,
        bound=min(answer.bound, answer.cost),
        status=answer.status.value,
        solver=answer.solver,
        peak_bytes=float(answer.peak or 0.0),
        switches={one.piece.family: one.piece.switches for one in alone},
        devices={name: list(one.piece.devices) for name, one in named.items() if one.piece.devices != every},
        best={name: _best(one.answer) for name, one in named.items()},
        peaks=_peaks(joined, answer.choice),
        keeps_state=list(dict.fromkeys(one.piece.family for one in alone if one.piece.keeps_state)),
        copies=tuple(_copies(joined, answer.choice, cluster)),
    )


def _best(answer: Answer) -> dict[str, float]:
    return {"cost_seconds": answer.cost, "bound_seconds": min(answer.bound, answer.cost), "peak_bytes": float(answer.peak or 0.0)}


def _solution(one: _Alone, choice: tuple[int, ...]) -> Solution:
    """The plan of one program as it is in the plan of all; its bound is that of the program alone."""
    judged = evaluate(one.instance.problem, choice)
    bound = min(one.answer.bound, judged.cost)
    status = Status.OPTIMAL if judged.cost <= bound * (1 + max(one.context.options.gap, 1e-9)) else Status.FEASIBLE
    answer = replace(one.answer, status=status, choice=choice, cost=judged.cost, bound=bound, peak=judged.peak)
    solution = describe(one.instance.formulated, answer, one.context.options, {}, one.context.assumptions)
    return replace(solution, modules=modules_of(one.context, one.instance, choice))


def _peaks(joined: Joined, choice: Sequence[int]) -> dict[str, float]:
    """The fullest moment of each program, with what the others leave in memory."""
    times, held = usage_profile(joined.problem, choice)
    begins = sorted((begin, name) for name, begin in joined.begins.items())
    peaks = {}
    for (begin, name), (end, _) in zip(begins, [*begins[1:], (math.inf, "")], strict=True):
        during = held[(times >= begin) & (times < end)]
        peaks[name] = float(during.max()) if len(during) else 0.0
    return {piece.name: peaks[piece.name] for piece in joined.ordered}


def _copies(joined: Joined, choice: Sequence[int], cluster: Mesh) -> Iterator[dict[str, Any]]:
    """The parameters that a family holds in another layout than home, or on other devices."""
    firsts = {piece.family: piece for piece in reversed(joined.ordered)}
    moves = {family: Transfers(cluster, joined.home.where, piece.where) for family, piece in firsts.items()}
    for copy in joined.copies:
        i, j = choice[copy.node], choice[copy.other]
        if copy.differ[i, j]:
            piece = firsts[copy.family]
            source, target = joined.home.layouts(copy.source)[i], piece.layouts(copy.target)[j]
            yield {
                "parameter": copy.name, "family": copy.family, "from": text(source), "to": text(target),
                "seconds": float(copy.seconds[i, j]), "bytes": _sent(joined, copy, moves[copy.family], source, target),
            }  # fmt: skip


def _sent(joined: Joined, copy: ParameterCopy, transfers: Transfers, source: Any, target: Any) -> float:
    """Bytes that all devices together send to make a copy."""
    tensor = joined.home.tensor(copy.source)
    if transfers.same_mesh:
        route = joined.home.formulated.routes.route(tensor.shape, tensor.itemsize, source, target)
        assert route is not None
        return sum(step.bytes for step in route.steps) * joined.home.formulated.mesh.num_devices
    return transfers.transfer(tensor.shape, tensor.itemsize, source, target).bytes
