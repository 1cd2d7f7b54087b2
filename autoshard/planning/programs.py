"""Several programs on one set of weights, planned together: training and rollout, prefill and decode, one shape or many.

best      each program alone, with all options of `plan`: what it is compared with, and where the search starts      (`_alone`)
join      one Problem: the programs side by side, parameters shared or joined by the seconds of their copies          (formulate.join)
          and the same of models with few layers, whose answer extends to all of them                                 (`_few_layers`)
solve     the best choice of all programs together, with its proof                                                    (solving)
describe  a Solution per program, the copies, and what sharing costs each program                                     (`_described`)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from autoshard.capture import in_turn
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, Joined, ParameterCopy, Piece, join
from autoshard.layout import text
from autoshard.mesh import Mesh
from autoshard.options import having, options_of
from autoshard.planning.advice import with_modules
from autoshard.planning.batches import align_batches, with_choice
from autoshard.planning.describe import described
from autoshard.planning.few_layers import Correspondence, FewLayers
from autoshard.planning.instance import Instance
from autoshard.planning.options import Infeasible, Options, Progress, Stopwatch, checked_options
from autoshard.planning.question import ask, check_effects, part_of, with_number_of_microbatches
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.planning.refusal import reworded
from autoshard.planning.search import best_choice
from autoshard.planning.solving import solve_or_refuse
from autoshard.planning.variants import Answered
from autoshard.problem import evaluate, usage_profile
from autoshard.routes import Transfers
from autoshard.solution import ProgramsSolution, Solution
from autoshard.solvers import Answer, Status

SHARE = 0.25  # of the time left: at most for one program alone


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
    """`autoshard.plan` of several programs by name; two that train a parameter share its layout. memory_limit is the bytes per device at
    the fullest moment of any program, with what the others leave there."""
    shared = _checked(programs, mesh, options)
    clock = Stopwatch(progress)
    pieces: dict[str, Piece] = {}
    alone: dict[str, Answered] = {}
    for k, (name, program) in enumerate(programs.items()):
        part = part_of(clock, f"{{}}, program {name}", 0.7 * k / len(programs), 0.7 / len(programs))
        for piece, solved in _alone(name, program, mesh, _switches_of(switches, name, programs), shared, part):
            pieces[piece.name], alone[piece.name] = piece, solved
    with clock.phase("formulate", "joining the programs", 0.7), no_search_for_cycles():
        joined = join(list(pieces.values()), mesh, shared.memory_limit)
        few_layers = _few_layers(joined, pieces, alone) if shared.solver == "auto" else None
        together = Instance(cast(Formulation, joined), joined.problem, few_layers)
    with clock.phase("solve", "solving all programs together", 0.75):
        question = replace(next(iter(alone.values())).question, options=shared, clock=clock)  # of all: only its limits are read
        try:
            answer = solve_or_refuse(question, together, _starts(joined, pieces, alone))
        except Infeasible as error:
            raise reworded(error, f"the programs {', '.join(programs)} together: {error}") from None
        answer = _aligned(joined, pieces, answer, shared.gap)
    return replace(_described(joined, pieces, alone, answer), seconds=clock.seconds())


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
    given = set(options).union(*(program.options for program in programs.values()))
    if alone := [(key, why) for key, option in options_of(Options).items() if key in given and (why := option.not_in.get("plan_programs"))]:
        raise ValueError("{} is no option of several programs: {}".format(*alone[0]))
    if "training" in options:
        raise ValueError("training is a matter of each program: give it to Program(training=True)")
    for name, program in programs.items():
        if wrong := [key for key in program.options if key in (*having(Options, "of_all"), "training")]:
            raise ValueError(f"{wrong[0]} is among the options of program {name!r}; give it to plan_programs, or Program(training=True)")
        if {**options, **program.options}.get("recompute") == "auto":
            raise ValueError(f"recompute is 'auto' for program {name!r}; expected a number of blocks or 'all': plan it alone to see which")
    if (idle := [key for key in having(Options, "of_training") if key in options]) and not any(p.training for p in programs.values()):
        raise ValueError(f"{idle[0]} has no effect on forward passes; add training=True to the Program that trains, or leave it out")
    return checked_options(Options, {**options, "objective": "serial"})


def _switches_of(switches: float | None | Mapping[str, float | None], name: str, programs: Mapping[str, Program]) -> float | None:
    if isinstance(switches, Mapping):
        if unknown := [key for key in switches if key not in programs]:
            raise ValueError(f"switches names {unknown[0]!r}; the programs are {', '.join(programs)}")
        switches = switches.get(name, 1.0)
    if switches is not None and (isinstance(switches, bool) or not isinstance(switches, (int, float)) or not 0 <= switches < math.inf):
        raise ValueError(f"switches is {switches!r} for program {name!r}; expected how often per unit, 0 or more, or None to share all")
    return switches


# -- each program alone --------------------------------------------------------------------------------------------------------------


def _alone(
    name: str, program: Program, cluster: Mesh, switches: float | None, shared: Options, clock: Stopwatch
) -> Iterator[tuple[Piece, Answered]]:
    """Each shape of a program, and the best plan of it alone."""
    mesh, devices = _part(name, program, cluster)
    without = () if program.training else having(Options, "of_training")  # options given to all are for those that train
    common = {key: value for key, value in vars(shared).items() if key not in without}
    options: Options = checked_options(Options, {**common, **program.options, "training": program.training, "baselines": False})
    for shape, inputs, weight in program.variants(name):
        question = ask(program.model, inputs, mesh, options, clock)
        check_effects(question)
        solved = best_choice(with_recomputed_blocks(with_number_of_microbatches(question)), share=SHARE)
        one = solved.instance
        yield Piece(shape, one.formulated, one.problem, weight, name, switches, devices, program.keeps_state, one.layers), solved


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
    return Mesh(tuple(axes or [replace(mesh.axes[-1], name="axis0", size=1)]), mesh.device)


# -- all together ---------------------------------------------------------------------------------------------------------------------


def _starts(joined: Joined, pieces: Mapping[str, Piece], alone: Mapping[str, Answered]) -> list[tuple[int, ...]]:
    """The best plans of the programs side by side; and for each program that with its parameters' layouts in all of them."""
    starts = [best := joined.joined_choice({name: one.choice for name, one in alone.items()})]
    for name, piece in pieces.items():
        start, owned = list(best), piece.owned()
        for other in pieces.values():
            for parameter, i in other.owned().items():
                if parameter in owned and other.layouts(i) == piece.layouts(owned[parameter]):
                    start[joined.nodes[other.name][i]] = alone[name].choice[owned[parameter]]
        starts.append(tuple(start))
    return starts


def _few_layers(joined: Joined, pieces: Mapping[str, Piece], alone: Mapping[str, Answered]) -> FewLayers | None:
    """The same programs with few layers, joined, and how their answer extends to all layers; None where a program has no such."""
    few = {name: one.instance.few_layers for name, one in alone.items() if one.instance.few_layers is not None}
    if len(few) < len(alone):
        return None
    known = ((pieces[name], one.formulated, one.layers or ()) for name, one in few.items())
    again = join([replace(piece, formulated=f, problem=f.problem, homes=layers) for piece, f, layers in known], joined.cluster, None)
    nodes, edges = [-1] * len(joined.problem.node_costs), [-1] * len(joined.problem.edges)
    for name, one in few.items():
        for v, w in zip(joined.nodes[name], one.correspondence.nodes, strict=True):
            nodes[v] = again.nodes[name][w] if nodes[v] < 0 else nodes[v]
        for e, other in enumerate(one.correspondence.edges):
            edges[joined.edges[name] + e] = again.edges[name] + other
    copies = {(copy.node, copy.other): copy.edge for copy in again.copies}
    for copy in joined.copies:
        edges[copy.edge] = copies.get((nodes[copy.node], nodes[copy.other]), -1)
    if min(edges, default=0) < 0:
        return None
    return FewLayers(cast(Formulation, again), Correspondence(tuple(nodes), tuple(edges)), again.homes)


def _aligned(joined: Joined, pieces: Mapping[str, Piece], answer: Answer, gap: float) -> Answer:
    """The answer with one layout for all inputs of a batch, program by program, where that costs no more and fits."""
    for name, piece in pieces.items():
        assert answer.choice is not None
        own = joined.choice_of(name, answer.choice)
        cost = evaluate(piece.problem, own).cost
        aligned = align_batches(piece.formulated, piece.problem, replace(answer, choice=own, cost=cost, bound=cost), 0.0)
        choice = list(answer.choice)
        for v, i in zip(joined.nodes[name], aligned.choice or (), strict=True):
            choice[v] = int(i)
        evaluation = evaluate(joined.problem, choice)
        if evaluation.fits and evaluation.cost <= max(answer.cost, answer.bound * (1 + gap)):
            answer = with_choice(answer, choice, evaluation)
    return answer


# -- the plan by name -----------------------------------------------------------------------------------------------------------------


def _described(joined: Joined, pieces: Mapping[str, Piece], alone: Mapping[str, Answered], answer: Answer) -> ProgramsSolution:
    assert answer.choice is not None
    every, answers = tuple(range(joined.cluster.num_devices)), {name: one.answer for name, one in alone.items()}
    return ProgramsSolution(
        programs={name: _solution(one, joined.choice_of(name, answer.choice)) for name, one in alone.items()},
        weights={name: piece.weight for name, piece in pieces.items()},
        families={name: piece.family for name, piece in pieces.items()},
        home=joined.home.name,
        mesh=joined.cluster,
        cost=answer.cost,
        bound=min(answer.bound, answer.cost),
        status=answer.status.value,
        solver=answer.solver,
        peak_bytes=float(answer.peak or 0.0),
        switches={piece.family: piece.switches for piece in pieces.values()},
        devices={name: list(piece.devices) for name, piece in pieces.items() if piece.devices != every},
        best={
            name: {"cost_seconds": one.cost, "bound_seconds": min(one.bound, one.cost), "peak_bytes": float(one.peak or 0.0)}
            for name, one in answers.items()
        },
        peaks=_peaks(joined, answer.choice),
        keeps_state=list(dict.fromkeys(piece.family for piece in pieces.values() if piece.keeps_state)),
        copies=tuple(_copies(joined, answer.choice)),
    )


def _solution(alone: Answered, choice: tuple[int, ...]) -> Solution:
    """The plan of one program as it is in the plan of all; its bound is that of the program alone."""
    answer = with_choice(alone.answer, choice, evaluate(alone.instance.problem, choice))
    is_best = answer.cost <= answer.bound * (1 + max(alone.question.options.gap, 1e-9))
    together = replace(alone, answer=replace(answer, status=Status.OPTIMAL if is_best else Status.FEASIBLE))
    return with_modules(together, described(together))


def _peaks(joined: Joined, choice: Sequence[int]) -> dict[str, float]:
    """The fullest moment of each program, with what the others leave in memory."""
    times, held = usage_profile(joined.problem, choice)
    begins = sorted((begin, name) for name, begin in joined.begins.items())
    peaks = {}
    for (begin, name), (end, _) in zip(begins, [*begins[1:], (math.inf, "")], strict=True):
        during = held[(times >= begin) & (times < end)]
        peaks[name] = float(during.max()) if len(during) else 0.0
    return {piece.name: peaks[piece.name] for piece in joined.ordered}


def _copies(joined: Joined, choice: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The parameters that a family holds in another layout than home, or on other devices."""
    firsts = {piece.family: piece for piece in reversed(joined.ordered)}
    moves = {family: Transfers(joined.cluster, joined.home.where, piece.where) for family, piece in firsts.items()}
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
