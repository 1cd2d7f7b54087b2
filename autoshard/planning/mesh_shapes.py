"""Which shape of mesh is best? Every arrangement of the devices in one to three axes is planned, each with its own proof.

    N devices, n per node, N / n nodes
    shape = (factors of N / n) + (factors of n), ordered, each 2 or more: an axis is inside a node or between nodes

The flat mesh (N,) is tried as well, although its one axis crosses the nodes' boundaries: plain FSDP uses it. One device is planned beside
them, to show the speedup. The meshes must describe one cluster: give all of them the same number of devices per node.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from autoshard.capture import in_turn
from autoshard.mesh import DEVICES_PER_NODE, MOST_DEVICES, Mesh, of_one_node, shape_text
from autoshard.options import refuse_elsewhere
from autoshard.planning.advice import ADVICE
from autoshard.planning.describe import described
from autoshard.planning.options import Infeasible, Options, Progress, Stopwatch, checked_options
from autoshard.planning.question import Question, ask, check_effects, part_of, with_number_of_microbatches
from autoshard.planning.search import KINDS, trials
from autoshard.planning.variants import Tried, Variant
from autoshard.solution import Solution

MOST_AXES = 3
EQUAL = 1e-9  # relative: among plans this near in cost the first mesh wins


def mesh_shapes(devices: int, devices_per_node: int = DEVICES_PER_NODE) -> list[tuple[int, ...]]:
    """The shapes to compare, fewest axes first, one device last. ValueError where the devices don't fill the nodes.

    Fewer devices than a node has are one node.

        mesh_shapes(16) == [(16,), (2, 8), (2, 2, 4), (2, 4, 2), (1,)]
    """
    for name, value in (("devices", devices), ("devices_per_node", devices_per_node)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a positive whole number")
    if devices > MOST_DEVICES:
        raise ValueError(f"devices is {devices}; expected {MOST_DEVICES} at most: make the cluster smaller")
    per_node = of_one_node(devices, devices_per_node)
    pairs = product(_ordered(devices // per_node, MOST_AXES), _ordered(per_node, MOST_AXES))
    shapes = [outer + inner for outer, inner in pairs if 1 <= len(outer + inner) <= MOST_AXES]
    return sorted({(devices,), *shapes} - {(1,)}, key=lambda shape: (len(shape), shape)) + [(1,)]


def _ordered(n: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorizations of n into at most so many factors of 2 or more; () of 1."""
    if n == 1:
        yield ()
    for first in range(2, n + 1 if most else 2):
        if n % first == 0:
            yield from ((first, *rest) for rest in _ordered(n // first, most - 1))


@dataclass(frozen=True)
class MeshPlan:
    """The plan on one mesh, or why there is none."""

    mesh: Mesh
    solution: Solution | None
    message: str  # why there is no plan; empty where there is one
    refusal: Infeasible | None
    cpu: float  # seconds of planning, without the capture, which all meshes share
    wall: float

    @property
    def name(self) -> str:
        return shape_text(self.mesh.shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; None where there is no plan. status: the plan's, infeasible, or skipped (the pins' layouts have other axes)."""
        plan, limit = self.solution, None if self.refusal is None else self.refusal.smallest_limit
        return {
            "mesh": self.name,
            "devices": self.mesh.num_devices,
            "status": plan.status if plan else "infeasible" if self.refusal else "skipped",
            "cost_seconds": plan.objective_seconds if plan else None,
            "bound_seconds": plan.objective_bound if plan else None,
            "gap": plan.objective_gap if plan else None,
            "peak_bytes": plan.peak_bytes if plan else None,
            "smallest_limit_bytes": None if limit is None else list(limit),
            "message": self.message or None,
            "cpu_seconds": self.cpu,
            "wall_seconds": self.wall,
        }


@dataclass(frozen=True)
class MeshPlans:
    """The plans of all meshes, in the order given, and the best of them."""

    plans: tuple[MeshPlan, ...]
    best: Solution

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row per mesh; `best` marks the best one."""
        return [{**plan.to_dict(), "best": plan.solution is self.best} for plan in self.plans]


@in_turn
def plan_meshes(
    model: torch.nn.Module,
    example_inputs: Any,
    meshes: Sequence[Mesh],
    *,
    progress: Progress | None = None,
    assumptions: Mapping | None = None,
    on_plan: Callable[[Solution], None] | None = None,
    **options: Any,
) -> MeshPlans:
    """`plan` on each of the meshes; the model is captured once, and they share the time limit.

    The other arguments are those of `plan`; on_plan: called with every plan that is better than those of the meshes before. With pins, kept
    or forbidden layouts only meshes with as many axes as these are planned, and no single device. ValueError on bad input, `Infeasible`
    where nothing fits on any mesh.

        meshes = [Mesh.from_bandwidths(shape, devices_per_node=8) for shape in mesh_shapes(16)]
        best = plan_meshes(module, (tokens, targets), meshes, training=True, memory_limit=80e9).best
    """
    refuse_elsewhere(Options, "plan_meshes", options)
    checked: Options = checked_options(Options, options)
    if not isinstance(meshes, Sequence) or not meshes or not all(isinstance(mesh, Mesh) for mesh in meshes):
        raise ValueError(
            "meshes holds no mesh, or something else; expected a list of autoshard.Mesh, for example of the shapes that mesh_shapes returns"
        )
    axes = _axes_of_layouts(checked)
    chosen = [mesh for mesh in meshes if axes is None or (len(mesh.axes) == axes and mesh.num_devices > 1)]
    if not chosen:
        raise ValueError(f"the layouts of pins have {axes} placements, but no mesh has {axes} axes; pin for one mesh, on that mesh")
    question = ask(model, example_inputs, chosen[0], checked, Stopwatch(progress), assumptions)
    check_effects(question)

    def on_each_mesh(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
        for k, mesh in enumerate(chosen):
            note, count = f"mesh {shape_text(mesh.shape)}, {k + 1} of {len(chosen)}", len(chosen)
            clock = part_of(question.clock, f"{note}: {{}}", k / count, 1 / count)
            clock.cpu, clock.wall = {}, {}  # of this mesh alone
            yield Variant(note, partial(replace, mesh=mesh, clock=clock), share=1 / (count - k))

    skipped = f"the layouts of pins have {axes} placements"
    plans = [MeshPlan(mesh, None, skipped, None, 0.0, 0.0) for mesh in meshes]
    numbers = [k for k, mesh in enumerate(meshes) if mesh in chosen]
    for k, one in zip(numbers, trials(with_number_of_microbatches(question), (on_each_mesh, *KINDS), [])):
        best = min((plan.solution.objective_seconds for plan in plans if plan.solution is not None), default=math.inf)
        plans[k] = _mesh_plan(one, best, on_plan)
    return MeshPlans(tuple(plans), _best(plans))


def _mesh_plan(one: Tried, best: float, on_plan: Callable[[Solution], None] | None) -> MeshPlan:
    """best: seconds of the plans on other meshes; `on_plan` is called with a better one only."""
    solution = None
    if one.answered is not None:
        question = one.answered.question
        better = None if on_plan is None else lambda plan: on_plan(plan) if plan.objective_seconds < best * (1 - EQUAL) else None
        solution = described(replace(one.answered, question=replace(question, on_plan=better)), ADVICE)
    elif one.refusal is None:
        raise KeyboardInterrupt
    seconds = one.question.clock.seconds()
    return MeshPlan(one.question.mesh, solution, str(one.refusal or ""), one.refusal, seconds["cpu"]["total"], seconds["wall"]["total"])


def _axes_of_layouts(options: Options) -> int | None:
    """How many placements the layouts of pins, kept and forbidden layouts have; None without any."""
    written = [*options.pins.values(), *options.keep.values(), *(one for several in options.forbid.values() for one in several)]
    counts = sorted({layout.count(",") + 1 for layout in written if isinstance(layout, str)})
    if len(counts) > 1:
        raise ValueError(f"layouts of pins have {' and '.join(map(str, counts))} placements; give all as many, one per mesh axis")
    return counts[0] if counts else None


def _best(plans: Sequence[MeshPlan]) -> Solution:
    """The cheapest; the first of those that cost the same."""
    best: Solution | None = None
    for plan in plans:
        if plan.solution is not None and (best is None or plan.solution.objective_seconds < best.objective_seconds * (1 - EQUAL)):
            best = plan.solution
    if best is None:
        refused = [(plan.refusal, plan.name) for plan in plans if plan.refusal is not None]
        nearest, name = min(refused, key=lambda pair: (pair[0].smallest_limit or (math.inf, math.inf))[1])
        message = f"no plan on any of {len(refused)} meshes; nearest is {name}: {nearest}"
        raise Infeasible(message, nearest.smallest_limit, nearest.conflict, nearest.minimal)
    return best
