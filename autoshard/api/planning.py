"""`plan`: one program, several on one set of weights, one on the best of several meshes, or stages on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from autoshard.mesh import Mesh
from autoshard.planning import Program, plan_meshes, plan_programs
from autoshard.planning import plan as plan_one
from autoshard.solution import Pipeline, Plan, ProgramsSolution, Solution

if TYPE_CHECKING:
    from autoshard.pipeline import Cluster


@overload
def plan(model: nn.Module, example_inputs: Any, mesh: Mesh | Sequence[Mesh], **options: Any) -> Solution: ...
@overload
def plan(model: nn.Module, example_inputs: Any, mesh: Cluster, **options: Any) -> Pipeline: ...
@overload
def plan(model: Mapping[str, Program], example_inputs: Mesh, **options: Any) -> ProgramsSolution: ...
def plan(model: Any, example_inputs: Any, mesh: Any = None, **options: Any) -> Plan:
    """The fastest layout of every tensor of `model` on `mesh` that fits in memory, with its proof.

    model, example_inputs: a module and the inputs of its forward (a tuple, or a dict of keyword arguments); the meta device
    costs no memory. options: the fields of `Options` (training, optimizer, memory_limit in bytes per device, pins, forbid, keep,
    price_pins, solver, time_limit in seconds, gap, baselines, recompute, tie_blocks); and progress: called with (what is being done,
    fraction done), assumptions: more facts to note in the plan, on_plan: called with the plan before what is beside it is worked out
    (schemes of modules, padding, prices of pins). Threads plan in turn. ValueError on bad input; `Infeasible` when nothing fits, with
    the demands that conflict.

    time_limit is for all of planning: the search ends then, and what is worked out beside the plan. Capture and pricing can't be
    shortened; where they take longer, the answer is the first plan that is found within three seconds more.

        solution = plan(module, (tokens, targets), Mesh.from_bandwidths((2, 4)), training=True, memory_limit=80e9)
        solution = plan(module, inputs, [Mesh.from_bandwidths(shape) for shape in mesh_shapes(16)])       # the best of several meshes
        programs = plan({"train": Program(module, batch, training=True), "generate": Program(module, (token,), weight=500)}, mesh)
        pipeline = plan(module, (tokens, targets), Cluster.of(16), memory_limit=80e9)                     # stages on a cluster

    Of several programs by name, `weight` is how often each runs per unit. A parameter has one layout for all of them, or one per
    program and is copied at each switch, whichever is cheaper. `switches`: how often per unit the copies of a program are made
    anew, a number or one by program's name; 0: once, they stay in memory; None: everything is shared.

    dynamic_shapes: ranges of sizes, as for torch.export: ({0: Dim("batch", min=1, max=64)},). The plan is of the example inputs' shape,
    and of all plans with one layout per tensor the best over the ranges, by the sum of all seconds. criterion: "median", "average" or
    "worst" of the seconds at some sizes, relative to the best plan there. `plan.covers(batch=4)` says what it is at a shape.

    On a `Cluster` the options are the fields of `PipelineOptions` (stages, microbatches, schedules, ...), and example_inputs those of
    the full batch, which is dim 0 of the first tensor and of all others of that length. `executor`: a concurrent.futures.Executor
    (processes, Dask, Ray) in which stages are planned; the answer doesn't depend on it.
    """
    if isinstance(model, Mapping) or isinstance(example_inputs, Mesh):
        return plan_programs(model, example_inputs if mesh is None else mesh, **options)
    if isinstance(mesh, (list, tuple)) and all(isinstance(one, Mesh) for one in mesh):
        return plan_meshes(model, example_inputs, mesh, **options).best
    if not isinstance(mesh, Mesh):
        from autoshard.pipeline import Cluster, pipeline  # here: a plan without stages needs no room for them

        if isinstance(mesh, Cluster):
            return pipeline(model, example_inputs, mesh, **options)
    return plan_one(model, example_inputs, mesh, **options)
