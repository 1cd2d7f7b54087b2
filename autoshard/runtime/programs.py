"""One module for several programs on one set of weights: each program runs its own plan, on the same parameters or on copies of them.

    home        the module of the plan's home program; its parameters are the originals, and those that an optimizer gets
    program     a parallel module per program and shape, whose parameters are home's own where the layouts are equal
    copies      the other parameters: made from the originals by the route that the plan has for them          (`parameter_copies`)
    state       buffers that home lacks and it writes (a key-value cache): zero when the program begins, freed when another one does

    module.program("generate")(tokens)              runs that program; copies are made anew where the originals have changed
    with module.switched("generate"):               makes copies and state; `module` itself runs that program; both are freed at the end
        module(tokens)

On ranks that a program doesn't use its module returns None: there they send what the others need.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.layout import Layout, parse
from autoshard.lower import state_of_module
from autoshard.routes import DeviceSet, Transfers
from autoshard.runtime.agreement import agree
from autoshard.runtime.call_inputs import BoundInputs, CallInputs, arguments_of, padded
from autoshard.runtime.distribute import Where, local
from autoshard.runtime.module import ParallelModule, attach, parallel_class
from autoshard.runtime.parameter_copies import Copies, Mover, Sent
from autoshard.solution import ProgramsSolution
from autoshard.torch_private import pytree


@dataclass(eq=False)
class RunningProgram:
    """A program as it runs: a module per planned shape, the copies and the state that they share."""

    name: str
    shapes: dict[str, ParallelModule]  # by name in the plan; empty on ranks that it doesn't use
    copies: Copies
    state: dict[str, Tensor]
    keeps_state: bool
    plan: ProgramsSolution
    pad: Mapping[str, float]
    noted: dict[tuple, str] = field(default_factory=dict)  # by shape of a call: how it ran, where it was not planned
    has_state: bool = True

    def begin(self, *, anew: bool) -> None:
        """Copies and state are there. anew: also where the originals have not changed."""
        if anew or not self.copies.are_current:
            self.copies.refresh()
        if not self.has_state:
            for buffer in self.state.values():
                local(buffer).untyped_storage().resize_(local(buffer).nbytes)
                local(buffer).zero_()
            self.has_state = True

    def end(self) -> None:
        """Copies and state are freed, where they are not to be kept."""
        if self.plan.switches.get(self.name) != 0:
            self.copies.free()
        if not self.keeps_state and self.state:
            for buffer in self.state.values():
                local(buffer).untyped_storage().resize_(0)
            self.has_state = False

    def call(self, args: tuple, kwargs: dict) -> Any:
        """Runs the plan of the call's shape, of the next planned one where it is padded, or else of the nearest."""
        if not self.shapes:
            return None
        if len(self.shapes) == 1:
            return _run(next(iter(self.shapes.values())), args, kwargs)
        shapes = {name: module._runner.inputs.planned for name, module in self.shapes.items()}
        bound = next(iter(self.shapes.values()))._runner.inputs.of_any_shape(args, kwargs)
        actual = bound.named_shapes
        name, padded = _chosen(shapes, actual, self.pad)
        module = self.shapes[name]
        if actual == {key: shapes[name][key] for key in actual}:
            return _run(module, args, kwargs)
        inputs = module._runner.inputs
        batch = _padded(inputs, bound, self.pad) if padded else inputs.shard(bound.inputs, local=False)
        self._note(name, shapes[name], actual, padded)
        return _run(module, *arguments_of(batch))

    def _note(self, name: str, planned: Mapping[str, Any], actual: Mapping[str, Any], padded: bool) -> None:
        key = tuple(sorted(actual.items()))
        if key in self.noted:
            return
        sizes = " and ".join(f"{k} of {s}" for k, s in actual.items() if s != planned[k])
        if padded:
            full, given = (sum(math.prod(shapes[k]) for k in actual) for shapes in (planned, actual))
            seconds = self.plan[name].cost * (1 - given / full)
            note = f"{sizes} is padded to the shape of {name}: {1 - given / full:.0%} of its elements, about {seconds:.3g} s of a call"
        else:
            note = f"{sizes} was not planned and runs in the layouts of {name}, the nearest shape; plan it too, as one of shapes"
        self.noted[key] = note
        warnings.warn(note, stacklevel=6)


def _run(module: ParallelModule, args: tuple, kwargs: dict) -> Any:
    return ParallelModule.forward(module, *args, **kwargs)


def _chosen(shapes: Mapping[str, Mapping[str, Any]], actual: Mapping[str, tuple[int, ...]], pad: Mapping[str, float]) -> tuple[str, bool]:
    """The planned shape for a call, and whether the call is padded to it. ValueError where its inputs are others than planned."""
    alike = {
        name: planned for name, planned in shapes.items()
        if all(planned.get(key) is not None and len(planned[key]) == len(shape) for key, shape in actual.items())
    }  # fmt: skip
    if not alike:
        raise ValueError(f"the call has inputs {actual}; planned are {shapes}")

    def apart(name: str) -> float:
        pairs = [(a, b) for key, shape in actual.items() for a, b in zip(shape, alike[name][key], strict=True)]
        return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in pairs)

    larger = [name for name, planned in alike.items() if all(a <= b for k, s in actual.items() for a, b in zip(s, planned[k], strict=True))]
    nearest, next_larger = min(alike, key=apart), min(larger, key=apart, default=None)
    if next_larger is not None and pad and apart(nearest) > 0:
        return next_larger, True
    return nearest, False


def _padded(inputs: CallInputs, bound: BoundInputs, pad: Mapping[str, float]) -> Any:
    """The inputs of a call with every tensor padded at its end to the planned shape."""
    leaves = []
    for name, leaf in zip(bound.names, bound.leaves, strict=True):
        planned = inputs.planned.get(name) if isinstance(leaf, Tensor) else None
        leaves.append(leaf if planned is None else padded(name, leaf, planned, pad))
    return inputs.filled(bound.inputs, pytree.tree_unflatten(leaves, bound.structure))


class ProgramModule(nn.Module):
    """One program of a module with several: call it as the model. On ranks that it doesn't use it returns None."""

    def __init__(self, family: RunningProgram):
        super().__init__()
        self._family = family

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        family = self._family
        family.begin(anew=False)
        return family.call(args, kwargs)

    @property
    def notes(self) -> tuple[str, ...]:
        """How calls ran whose shapes were not planned."""
        return tuple(self._family.noted.values())

    def shape(self, number: int = 0) -> nn.Module:
        """The parallel module of a planned shape, with `shard_inputs`, `microbatches` and `timeline`. ValueError on ranks without it."""
        shapes = list(self._family.shapes.values())
        if number >= len(shapes):
            raise ValueError(f"there is no shape {number} of this program on this rank; it has {len(shapes)}")
        return shapes[number]


@dataclass(eq=False)
class Programs:
    """What a module of several programs holds beside its parameters."""

    plan: ProgramsSolution
    families: dict[str, RunningProgram]
    sent: Sent
    active: str

    def __deepcopy__(self, memo: dict) -> "Programs":
        raise ValueError("a module of several programs can't be copied, as their parameters are shared; parallelize the model again")


class ProgramsModule(ParallelModule):
    """The methods of a module that runs several programs on its parameters. Without `switched` it runs the home program."""

    _programs: Programs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        programs = self._programs
        return programs.families[programs.active].call(args, kwargs)

    def program(self, name: str) -> ProgramModule:
        """The program of that name on the same parameters; where it has copies, they follow the originals. ValueError without one."""
        programs = self._programs
        programs.plan.shapes_of(name)
        return ProgramModule(programs.families[name])

    @contextmanager
    def switched(self, name: str) -> Iterator[nn.Module]:
        """Inside the block the module runs that program: copies are made when it begins, copies and state freed when it ends.

        Every rank enters it. Optimizer state stays where it is. Gradients stay too: call zero_grad() before, as the plan takes them to be
        freed.
        """
        programs = self._programs
        programs.plan.shapes_of(name)
        before, family = programs.active, programs.families[name]
        family.begin(anew=programs.plan.switches.get(name) != 0)
        programs.active = name
        try:
            yield self
        finally:
            programs.active = before
            if name != before:
                family.end()

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent for copies of parameters so far."""
        return self._programs.sent.bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """How calls ran whose shapes were not planned, of all programs."""
        return tuple(note for family in self._programs.families.values() for note in family.noted.values())


def parallelize_programs(
    model: nn.Module | Mapping[str, nn.Module],
    plan: ProgramsSolution,
    device_mesh: DeviceMesh,
    *,
    example_inputs: Mapping[str, Any] | None,
    from_first_rank: bool,
    pad: Mapping[str, float],
    timeout: float,
    parallel_module: Callable[..., ParallelModule],
) -> nn.Module:
    """As `parallelize`, for a plan of several programs. parallel_module: makes the module of one of them (runtime.parallelize)."""
    home = plan.families[plan.home]
    agree(_why_not(model, plan), "comparing plan and models", plan=plan.digest)
    models = {name: model[name] if isinstance(model, Mapping) else model for name in plan.family_names}
    everywhere = DeviceSet(plan.mesh, tuple(range(plan.mesh.num_devices)))
    where, module_of = Where.on(plan.mesh, device_mesh), partial(parallel_module, timeout=timeout)

    def original(name: str, tensor: Tensor, layout: Layout) -> Tensor:
        return where.distributed(tensor, layout, from_first_rank=from_first_rank)

    main = module_of(models[home], plan[plan.home], where, original)
    sent, families = Sent(), {}
    for name in (home, *(f for f in plan.family_names if f != home)):
        first = plan.shapes_of(name)[0]
        own, devices = where, everywhere
        if (numbers := plan.devices.get(first)) is not None:
            devices = DeviceSet(plan[first].mesh, tuple(numbers))
            own = Where.among(devices.mesh, numbers, device_mesh.device_type, dist.new_group(list(numbers)))
        mover = Mover(everywhere, devices, Transfers(plan.mesh, everywhere, devices), own, sent)
        families[name] = _family(name, plan, main, own, mover, partial(module_of, models[name]), pad, from_first_rank)
    _share_generator(main, families, plan)
    programs = Programs(plan, families, sent, home)
    attach(main, parallel_class(type(main), ProgramsModule, "Programs"), plan.digest, programs=programs)
    for name, batch in (example_inputs or {}).items():
        for module in list(families[name].shapes.values())[:1]:
            module._runner.prepare(module, batch)
    return main


def _share_generator(main: ParallelModule, families: Mapping[str, RunningProgram], plan: ProgramsSolution) -> None:
    """Programs on all devices draw one after the other, as in one process; one on some devices has numbers of its own."""
    for number, (name, family) in enumerate(families.items()):
        for module in family.shapes.values():
            if plan.devices.get(plan.shapes_of(name)[0]) is None:
                module._runner.random = main._runner.random
            else:
                module._runner.random.branch = number


def _why_not(model: nn.Module | Mapping[str, nn.Module], plan: ProgramsSolution) -> str | None:
    if isinstance(model, Mapping) and (missing := [name for name in plan.family_names if name not in model]):
        return f"there is no model for program {missing[0]!r}; give one by each program's name, or one for all"
    if plan.home in plan.devices:
        return f"program {plan.home!r} holds the original parameters and has only some of the devices; plan it on all of them"
    own = plan[plan.home].parameters
    for name, solution in plan.programs.items():
        if extra := [parameter for parameter in solution.parameters if parameter not in own]:
            return f"program {name!r} has the parameter {extra[0]!r}, which {plan.home!r} lacks; give that one all parameters"
    return None


def _family(
    program: str, plan: ProgramsSolution, main: ParallelModule, where: Where, mover: Mover, module_of: Callable[..., ParallelModule],
    pad: Mapping[str, float], from_first_rank: bool,
) -> RunningProgram:  # fmt: skip
    """The modules of one program on its mesh, `where`; `mover` makes its copies."""
    held = state_of_module(main)
    copied = {row["parameter"]: row for row in plan.copied(program)}
    modules, own = {}, dict[str, Tensor]()

    def placed(name: str, tensor: Tensor, layout: Layout) -> Tensor:
        if name in held and name not in copied and held[name].shape == tensor.shape:
            return held[name]
        if name not in own:
            source = torch.empty_like(tensor, device="meta") if name in copied else tensor  # what is copied is made later
            own[name] = where.distributed(source, layout, from_first_rank=from_first_rank)
            if name in copied and isinstance(tensor, nn.Parameter):
                own[name] = nn.Parameter(own[name], requires_grad=False)
        return own[name]

    if where.coordinate:
        for shape in plan.shapes_of(program):
            modules[shape] = main if shape == plan.home else module_of(plan[shape], where, placed)
    moves = {name: mover.of(held[name], parse(row["from"]), parse(row["to"])) for name, row in copied.items()}
    copies = Copies({name: held[name] for name in copied}, {name: own[name] for name in copied if name in own}, moves)
    state = {name: x for name, x in own.items() if f"buffer:{name}" in plan[plan.shapes_of(program)[0]].results}  # constants stay
    family = RunningProgram(program, modules, copies, state, program in plan.keeps_state, plan, pad)
    if plan.families[plan.home] != program and not family.keeps_state:
        family.end()
    return family
