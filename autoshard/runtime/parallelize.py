"""Runs a plan: makes a trainable module of a model, a plan and a device mesh.

graph   = replay(solution, capture(model, inputs))    the program of one call, captured when the module is first called
program = lower(graph, solution.layouts)              the program that every rank runs
graphs  = trace(program)                              this rank's forward and backward as fx graphs
module  = a copy of the model with DTensor parameters, whose forward and backward run those graphs
"""

import inspect
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture import (
    Captured,
    Returned,
    capture_module,
    constants,
    deep_enough,
    filled,
    input_names,
    inputs_at,
    listed,
    state_of,
)
from autoshard.cost import spare_bytes
from autoshard.graph import Graph, SizedGraph, Sizes, corners, is_without_dropout, middle, sizes_of
from autoshard.layout import Layout, parse, replicated, sharding_sizes, text
from autoshard.lower import Pace, RankGraphs, are_alike, constants_of, lower, trace, without_idle
from autoshard.mesh import Mesh, shape_text
from autoshard.runtime.agreement import (
    absent,
    agree,
    agreed,
    check_gpus,
    compare,
    gathered,
    grouped,
    join,
    limit_waiting,
    of_first_rank,
    of_graph,
    patiently,
    use_gpu,
)
from autoshard.runtime.call_inputs import CallInputs, Pads
from autoshard.runtime.distribute import Where, copy_with, on_meta
from autoshard.runtime.microbatches import step_moves, with_sums
from autoshard.runtime.module import ParallelModule, Runner, attach, parallel_class
from autoshard.runtime.overlap import scheduled
from autoshard.runtime.programs import parallelize_programs
from autoshard.runtime.traced_call import TracedCall
from autoshard.solution import DynamicShapes, ProgramsSolution, Solution, of_one_microbatch, replay
from autoshard.torch_private import pytree


def parallelize(
    model: nn.Module | Mapping[str, nn.Module],
    solution: Solution | ProgramsSolution,
    device_mesh: DeviceMesh,
    *,
    example_inputs: Any = None,
    from_first_rank: bool = True,
    pad: Mapping[str, float] | None = None,
    timeout: float = 50.0,
) -> nn.Module:
    """`autoshard.parallelize` of a plan without stages: its arguments, module and errors."""
    if isinstance(solution, ProgramsSolution):
        return parallelize_programs(
            model, solution, device_mesh, example_inputs=example_inputs, from_first_rank=from_first_rank, pad=pad or {},
            timeout=timeout, parallel_module=parallel_module,
        )  # fmt: skip
    if isinstance(model, Mapping) or (pad is not None and solution.dynamic_shapes is None):
        raise ValueError("the plan is of one program and one shape; give one model, and no values to pad with")

    where = Where.on(solution.mesh, device_mesh)

    def placed(name: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        return where.distributed(tensor, layout, from_first_rank=from_first_rank)

    sharded = parallel_module(model, solution, where, placed, timeout)
    if pad is not None:
        sharded._runner.inputs.pads = Pads(pad, solution.dynamic_shapes.padded)  # type: ignore[union-attr]
    if example_inputs is not None:
        sharded._runner.prepare(sharded, example_inputs)
    return sharded


def parallel_module(
    model: nn.Module,
    solution: Solution,
    where: Where,
    placed: Callable[[str, torch.Tensor, Layout], torch.Tensor],
    timeout: float,
) -> ParallelModule:
    """As `parallelize`, with parameters and buffers made by `placed(name, tensor, layout)`; the ranks of `where` call this."""
    agree(_complaint(model, solution, where), "comparing plan, model and mesh", where.group, solution.digest)
    if where.device.type == "cuda":
        check_gpus()
    limit_waiting(where.device_mesh, timeout)
    layouts = {name: parse(placed.outputs[0]) for name, placed in solution.layouts.items() if not placed.inputs and placed.outputs[0]}
    replicate = replicated(len(solution.mesh.axes))
    with deep_enough(model):
        sharded: Any = copy_with(model, lambda name, tensor: placed(name, tensor, layouts.get(name, replicate)))
        captured = on_meta(model)
    for name, parameter in captured.named_parameters(remove_duplicate=False):
        if f"gradient:{name}" in solution.results:  # also where the parameter is frozen now
            parameter.requires_grad_(True)
    names, signature = partial(input_names, captured), inspect.signature(type(model).forward)
    planned = {name: layouts[name] for name in solution.inputs if name in layouts}
    inputs = CallInputs(where, listed, filled, names, signature, planned, solution.inputs)
    frozen = frozenset(name for name, p in captured.named_parameters(remove_duplicate=False) if solution.training and not p.requires_grad)
    runner = Runner(inputs, _Builder(captured, solution, inputs, timeout), state_of, frozen, number=solution.microbatches)
    attach(sharded, parallel_class(type(model)), solution.digest, runner=runner)
    runner.watch(sharded)
    return sharded


class OnMesh(Protocol):
    """A plan, of one program or several, or a pipeline."""

    @property
    def mesh(self) -> Mesh:
        """All its devices."""

    @property
    def digest(self) -> str:
        """A hash of what ranks run of it."""


def device_mesh(solution: OnMesh, *, backend: str | None = None, timeout: float = 40.0) -> DeviceMesh:
    """The device mesh of a plan or a pipeline on the processes that torchrun (or another launcher) started; every rank calls this.

    backend: where torch sees GPUs, nccl for them and gloo for objects and asynchronous checkpoints; else gloo. A process group that exists
    already is used. With nccl each rank uses a GPU of its own. timeout: seconds within which all ranks must call; give more where they are
    started far apart. ValueError, the same on every rank, when their number isn't the plan's, or where there are more ranks than GPUs on
    a host, or where their plans differ; RankLost where one does not call.
    """
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    cuda = "nccl" in backend
    try:
        formed = join(backend, timeout)
    except ValueError as error:
        n = solution.mesh.num_devices
        raise ValueError(f"no processes to run on ({error}); start them with: torchrun --nproc-per-node {n} SCRIPT ...") from None
    lost = absent(timeout) if formed else None
    agree(_wrong_number(solution), "comparing the plans", plan=solution.digest, lost=lost)  # another mesh would make other groups
    if cuda:
        use_gpu()
    return grouped("cuda" if cuda else "cpu", solution.mesh.shape, solution.mesh.axis_names, timeout if formed else None)


def _wrong_number(solution: OnMesh, group: dist.ProcessGroup | None = None) -> str | None:
    n, mesh = solution.mesh.num_devices, shape_text(solution.mesh.shape)
    if dist.get_world_size(group) == n:
        return None
    return f"{dist.get_world_size(group)} ranks run, but the plan is for {n} on a mesh of {mesh}; start {n} ranks or plan for another mesh"


def _complaint(model: nn.Module, solution: Solution, where: Where) -> str | None:
    """Why the plan can't run on this model and mesh, as far as that is known before the first call; None where it can."""
    planned = shape_text(solution.mesh.shape)
    if (wrong := _wrong_number(solution, where.group)) is not None:
        return wrong
    if tuple(where.device_mesh.shape) != solution.mesh.shape:
        actual = shape_text(where.device_mesh.shape)
        return f"the device mesh is {actual}, but the plan is for a mesh of {planned}; make a mesh of that shape or plan again"
    held = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in solution.parameters if name not in held]
    extra = [name for name, p in held.items() if name not in solution.parameters and p.requires_grad and solution.training]
    if missing:
        return f"the solution is of another model: it has {missing[0]!r} and {len(missing) - 1} more that this model lacks; plan this model"
    if extra:
        return f"the solution is of another model: it lacks {extra[0]!r} and {len(extra) - 1} more of this model; plan this model"
    for name, row in solution.parameters.items():
        if tuple(row["shape"]) != tuple(held[name].shape):
            return f"parameter {name!r} has shape {tuple(held[name].shape)}, planned was {tuple(row['shape'])}; plan this model"
        if row["dtype"] != str(held[name].dtype).removeprefix("torch."):
            return f"parameter {name!r} is {held[name].dtype}, planned was {row['dtype']}; plan this model"
        layout = parse(row["layout"])
        is_uneven = any(n % math.prod(sharding_sizes(layout, solution.mesh, dim)) for dim, n in enumerate(row["shape"]))
        if is_uneven and row["dtype"].startswith("complex") and f"gradient:{name}" in solution.results:
            return (
                f"parameter {name!r} is complex and {row['layout']} makes shards of different sizes, of which torch's Adam updates a copy; "
                f"plan with pins={{{name!r}: {text(replicated(len(layout)))!r}}}, or another layout that divides it"
            )
    if hooked := [name for name, p in held.items() if p._backward_hooks or p._post_accumulate_grad_hooks]:  # type: ignore[attr-defined]
        return f"parameter {hooked[0]!r} has a hook, which the copy of the model would lose; register it on what parallelize returns"
    return None


@dataclass(frozen=True)
class _Captured:
    """The program of one kind of call, as the first rank captures it for all."""

    graph: Graph
    step: Graph  # with the kept copies and sums of a plan with microbatches; otherwise the same
    returned: Returned
    constants: dict[str, torch.Tensor]  # that the program reads beside parameters, buffers and inputs
    drops: bool = True  # False: it is a training mode's program, to be run without dropout


UNLIKE = "its eval mode is not its training mode without dropout, so that it is another program: plan both as programs (docs/programs.md)"


class _Builder:
    """Builds the graphs for one kind of call."""

    def __init__(self, model: nn.Module, solution: Solution, inputs: CallInputs, timeout: float):
        self.model, self.solution, self.inputs, self.where = model, solution, inputs, inputs.where
        self.modes = tuple(part.training for part in model.modules())  # parts of a plan's model may be in eval mode: frozen norms
        self.sized: dict[Any, tuple[SizedGraph, Captured, list[tuple]]] = {}  # by kind of call, of a plan for ranges of sizes
        self.patiently = partial(patiently, self.where.device_mesh, timeout, self.where.second.values())

    def __call__(self, inputs: Any, on_meta: Any, modes: Sequence[bool]) -> TracedCall:
        where = self.where
        with self.patiently(), torch.inference_mode(False):  # the graphs of a call in inference mode may train later
            on_meta = filled(inputs, on_meta)
            resized = self.inputs.resized(on_meta)
            captured = of_first_rank(lambda: self._shared(on_meta, modes, resized), "capturing the model", where.group)

            def in_words(error: Exception) -> str:
                return _too_odd(resized, str(error)) if resized else str(error)

            with torch.autocast(where.device.type, enabled=False):  # its casts are in the captured program
                step, reference = agreed(lambda: self._step(captured), "lowering the plan", where.group, in_words=in_words)
                if reference and all(gathered(_alike(step, reference), "comparing the ranks' programs", where.group)):
                    agreed(lambda: self._order(step, reference), "ordering the collectives", where.group)
                for one in step.present.values() if reference else ():
                    without_idle(one)
            passes = step.present.items()
            compare({which: (where.coordinate, of_graph(one.graph, where.groups)) for which, one in passes}, where.group)
        return step

    def _shared(self, inputs: Any, modes: Sequence[bool], resized: str) -> _Captured:
        """The program of the call. The first rank captures it for all ranks, because a capture takes seconds and ranks may share a machine.

        A plan is of a model in training mode or in eval mode, or of parts in either. Where a call's modes leave out all dropout, and differ
        in nothing else, it runs the planned program without dropout. ValueError where it doesn't fit the plan.
        """
        if len(modes) != len(self.modes):
            parts = f"the module has {len(modes)} parts and was made with {len(self.modes)}"
            raise ValueError(f"{parts}: add or remove parts of the model, and plan it, before it is parallelized")
        program, reasons, graph = self._captured(inputs, modes)
        for planned in dict.fromkeys([(True,) * len(modes), self.modes]) if reasons and not all(modes) else ():
            other, rest, with_dropout = self._captured(inputs, planned)
            if not rest and is_without_dropout(graph, with_dropout):
                program, reasons = replace(other, drops=False), ()
                break
            if not rest:
                reasons = (*reasons, UNLIKE)
        _check_shareable(program.returned)
        if reasons:
            raise ValueError(self._misfit("; ".join([*reasons, *self._other_dtypes(inputs)]), resized))
        return program

    def _misfit(self, reasons: str, resized: str) -> str:
        if resized:
            return _too_odd(resized, reasons)
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        if self.solution.training and (extra := sorted(name for name in trained if f"gradient:{name}" not in self.solution.results)):
            reasons += f"; {extra[0]} and {len(extra) - 1} more require a gradient that the plan does not have"
        if torch.is_autocast_enabled(self.where.device.type):
            reasons += "; this call is made under torch.autocast, so the plan must be, too"
        return f"the solution is of another model: {reasons}; plan this model"

    def _other_dtypes(self, inputs: Any) -> Iterator[str]:
        known = {p.dtype for p in self.model.parameters()}
        for name, x in self._named(inputs):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype not in known:
                yield f"{name} is {x.dtype}, which no parameter is: give it in the dtype in which it was planned"

    def _captured(self, inputs: Any, modes: Sequence[bool]) -> tuple[_Captured, tuple[str, ...], Graph]:
        """The program with the modules of the model in these modes, the reasons why the plan does not fit it, and the model's graph."""
        for part, mode in zip(self.model.modules(), modes, strict=True):
            part.training = mode
        with torch.enable_grad():  # also where the call itself is made without gradients
            captured = self._program(inputs, tuple(modes))
        assert captured.returned is not None, "a module was captured, not a graph"
        plan = replay(self.solution, captured.graph)
        graph, held = plan.microbatch or plan.graph, constants(captured.fx_graph)
        return _Captured(graph, plan.graph, captured.returned, constants_of(self.model, graph, held)), plan.misfits, captured.graph

    def _program(self, inputs: Any, modes: tuple[bool, ...]) -> Captured:
        """The program of a call, of a plan for ranges of sizes from captures at the ends of the ranges."""
        dynamic = self.solution.dynamic_shapes
        if dynamic is None or (at := self._sizes(dynamic, inputs)) is None:
            return self._capture(inputs)
        given = [
            (name, x.dtype, tuple(dim or n for dim, n in zip_longest(dynamic.inputs.get(name, ()), x.shape)))
            if isinstance(x, torch.Tensor) else (name, x) for name, x in self._named(inputs)
        ]  # fmt: skip
        device = self.where.device.type
        key = (modes, repr(given), state_of(inputs), torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        if key not in self.sized:
            programs: list[Captured] = []

            def captured(sizes: Sizes) -> Graph:
                programs.append(self._capture(inputs_at(self.model, inputs, dynamic.inputs, sizes)))
                return programs[-1].graph

            sized = SizedGraph.of(dynamic.ranges, captured)
            self.sized[key] = sized, programs[0], _returned_at_corners(sized, programs)
        sized, first, leaves = self.sized[key]
        assert first.returned is not None
        return replace(first, graph=sized.at(at), returned=replace(first.returned, leaves=sized.literals_at(at, leaves)))

    def _capture(self, inputs: Any) -> Captured:
        return capture_module(self.model, inputs, training=self.solution.training, precision=self.solution.precision)

    def _sizes(self, dynamic: DynamicShapes, inputs: Any) -> dict[str, int] | None:
        """The sizes of the plan's dims in a call; None where it is out of their ranges, and is captured by itself."""
        shapes = {name: x.shape for name, x in self._named(inputs) if isinstance(x, torch.Tensor)}
        try:
            sizes = sizes_of(dynamic.inputs, shapes)
        except ValueError:
            return None
        return sizes if all(one.holds(sizes[name]) for name, one in dynamic.ranges.items()) else None

    def _named(self, inputs: Any) -> Iterator[tuple[str, Any]]:
        return zip(self.inputs.names(inputs), pytree.tree_leaves(listed(inputs)))

    def _step(self, captured: _Captured) -> tuple[TracedCall, list[fx.GraphModule]]:
        """The call; where shards differ in size, not yet in order, and the same passes of the first rank, whose shards are the largest."""
        graph, solution, where = captured.graph, self.solution, self.where
        program = lower(graph, *of_one_microbatch(solution), where.mesh, device=where.device.type)

        def traced(coordinate: tuple[int, ...]) -> RankGraphs:
            graphs = trace(program, graph, where.groups, coordinate, where.device.type, drops=captured.drops)
            return with_sums(graphs, solution.accumulation_dtype) if solution.microbatches > 1 else graphs

        graphs = traced(where.coordinate)
        moves = step_moves(solution, captured.step, where) if solution.microbatches > 1 else None
        shapes = {f"{r.kind}:{r.name}": graph.tensor(r.value).shape for r in graph.results if r.value is not None}
        shards = {name: where.shard(value, graphs.slots[name].layout).clone() for name, value in captured.constants.items()}
        call = TracedCall(graphs, graphs.inference(), shapes, captured.returned, shards, where, self.patiently, moves)
        if not program.is_even:
            of_first = traced((0,) * len(where.coordinate))
            return call, [*of_first.passes.values(), of_first.inference()]
        self._order(call)
        return call, []

    def _order(self, call: TracedCall, reference: Sequence[fx.GraphModule] = ()) -> None:
        """Starts the collectives early; where ranks differ, as the first one would."""
        spare = spare_bytes(self.solution.peak_bytes, self.solution.memory_limit)
        rows = scheduled(list(call.present.values()), Pace(self.where.mesh, self.where.groups), spare, self.where.second_group, reference)
        call.timelines = dict(zip(call.present, rows, strict=True))


def _alike(step: TracedCall, reference: Sequence[fx.GraphModule]) -> bool:
    return all(are_alike(one.graph, other.graph) for one, other in zip(reference, step.present.values(), strict=True))


def _returned_at_corners(sized: SizedGraph, programs: Sequence[Captured]) -> list[tuple]:
    """The leaves of what the program returns, at the corners of the ranges. programs: those of the corners, and of the middle.

    ValueError where they read constants that differ, or return what differs and is no size.
    """
    leaves = [one.returned.leaves for one in programs if one.returned is not None]
    at_corners, first = leaves[: len(sized.graphs)], constants(programs[0].fx_graph)
    for at, other, own in zip((*corners(sized.ranges), middle(sized.ranges)), programs, leaves, strict=True):
        held = constants(other.fx_graph)
        same = first.keys() == held.keys() and all(torch.equal(x, held[name]) for name, x in first.items())
        if not same or sized.literals_at(at, at_corners) != own:
            raise ValueError("the model's constants, or what it returns, depend on the sizes of its inputs; plan one shape")
    return at_corners


def _too_odd(resized: str, reasons: str) -> str:
    return f"this batch can't be sharded as planned: {resized}, so {reasons}; pad or drop rows until its dims divide as the planned ones do"


def _check_shareable(returned: Returned) -> None:
    """ValueError where the structure of the results can't be pickled: the first rank sends it to the others."""
    try:
        pickle.dumps(returned)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the model returns something that can't be sent to other ranks ({error}); define its class at the top of a module, "
            "or return tensors, tuples, lists and dicts"
        ) from error
