"""Graph + layouts -> RankProgram: everything that a rank does, as a flat tuple of plain records.

    LoadPlaceholder   x:0                                   a placeholder's local tensor
    Redistribute      x:0 -> x:0@hub, x:0@hub -> y.in1      the steps of the route between two layouts
    RunOp             y                                     an ATen function on local tensors (literals made local), or a kernel
    ReturnResult      output:0                              a result of the program, in its planned layout
    FreeTensors       x:0                                   after their last use

A local tensor has the name of its slot: `op:k` is output k in the op's output layout, `op:k@hub` the copy that serves several users,
`op.ink` is input k of the op in its input layout, `kind:name=` a result. The program is the same on every rank, and it moves tensors as
the plan's cost assumes: every user fetches its input by its own route, from the hub where there is one; the hub's copy is made once,
when its first user runs. Where shards are uneven, local shapes and the sizes among an op's arguments differ from rank to rank: both
are listed per rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from autoshard.graph import Graph, Op, Tensor, Value, private_values
from autoshard.layout import Layout, is_even, local_shape, parse, rank_shape, text, why_illegal
from autoshard.lower.collectives import check_step
from autoshard.lower.kernels.table import Kernel, kernel_for
from autoshard.lower.literals import INSTEAD, localise, torch_constants
from autoshard.mesh import Mesh
from autoshard.routes import Routes, Step
from autoshard.solution import Placed

parsed = cache(parse)

# (target, output): the bag of each index, and maxima where none are asked for: torch's kernels for a CPU, CUDA and fake tensors differ
OF_KERNEL = {(f"aten._embedding_bag{which}.default", k) for which in ("", "_forward_only") for k in (1, 3)}


@dataclass(frozen=True)
class Slot:
    """A local tensor: which value of the graph it holds, in which layout, and the shape that each rank therefore has."""

    name: str
    value: Value
    layout: Layout
    shape: tuple[int, ...]  # on each rank, or on the first, which has the largest
    dtype: str
    shapes: tuple[tuple[int, ...], ...] = ()  # by rank, where they differ
    of_kernel: bool = False  # its shape is what a device's kernel makes it, whatever was planned

    def shape_on(self, rank: int) -> tuple[int, ...]:
        return self.shapes[rank] if self.shapes else self.shape


@dataclass(frozen=True)
class LoadPlaceholder:
    name: str  # of the placeholder
    slot: Slot


@dataclass(frozen=True)
class Redistribute:
    source: Slot
    target: Slot
    steps: tuple[Step, ...]
    global_shape: tuple[int, ...] | None = None  # where shards may be uneven on the way

    @property
    def op(self) -> int:
        """The op whose output is moved."""
        return self.source.value[0]

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def inputs(self) -> tuple[Slot, ...]:
        return (self.source,)

    @property
    def outputs(self) -> tuple[Slot, ...]:
        return (self.target,)


@dataclass(frozen=True)
class RunOp:
    op: int
    name: str
    target: str  # the ATen function to call, which may differ from the op's own (literals.INSTEAD)
    arguments: dict[str, Any]  # by the names of the schema, Ref(k) for inputs[k]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot | None, ...]
    kernel: Kernel | None
    by_rank: tuple[dict[str, Any], ...] = ()  # the arguments on each rank, where they differ

    def arguments_on(self, rank: int) -> dict[str, Any]:
        return self.by_rank[rank] if self.by_rank else self.arguments


@dataclass(frozen=True)
class ReturnResult:
    key: str  # "output:0", "gradient:h.0.attn.weight"
    slot: Slot


@dataclass(frozen=True)
class FreeTensors:
    slots: tuple[str, ...]


Record = LoadPlaceholder | Redistribute | RunOp | ReturnResult | FreeTensors


@dataclass(frozen=True)
class RankProgram:
    """The records that every rank of the mesh carries out, in order."""

    mesh: Mesh
    records: tuple[Record, ...]

    @property
    def loads(self) -> tuple[LoadPlaceholder, ...]:
        return tuple(r for r in self.records if isinstance(r, LoadPlaceholder))

    @property
    def results(self) -> tuple[ReturnResult, ...]:
        return tuple(r for r in self.records if isinstance(r, ReturnResult))

    @property
    def is_even(self) -> bool:
        """Whether no shape and no argument differs from rank to rank."""
        moves = (record.global_shape is None for record in self.records if isinstance(record, Redistribute))
        return all(moves) and not any(slot.shapes for record in self.records for slot in slots_of(record))

    @property
    def redistributes(self) -> int:
        """How many tensors are redistributed."""
        return sum(isinstance(record, Redistribute) for record in self.records)


def lower(
    graph: Graph,
    layouts: Mapping[str, Placed],
    results: Mapping[str, str],
    mesh: Mesh,
    *,
    routes: Routes | None = None,
    device: str = "cpu",
) -> RankProgram:
    """The program of a rank.

    layouts: the input and output layouts of each op of the graph. results: "kind:name" -> the layout in which the program returns
    it (where the name is missing, in the layout from which users read it). device: where it will run. ValueError names the op whose
    layouts are missing, illegal, without a route between them, or without a local program.
    """
    return _Lowering(graph, layouts, results, mesh, routes or Routes(mesh), device).program()


class _Lowering:
    """One walk over the graph. `records` grows; `at` holds the slot from which each value is read."""

    def __init__(self, graph: Graph, layouts: Mapping[str, Placed], results: Mapping[str, str], mesh: Mesh, routes: Routes, device: str):
        self.graph, self.layouts, self.mesh, self.routes, self.device = graph, layouts, mesh, routes, device
        self.wanted: dict[Value, list[tuple[str, str | None]]] = {}
        for result in graph.results:
            if result.value is not None:
                key = f"{result.kind}:{result.name}"
                self.wanted.setdefault(result.value, []).append((key, results.get(key)))
        self.private = private_values(graph)
        self.records: list[Record] = []
        self.at: dict[Value, Slot] = {}

    def program(self) -> RankProgram:
        for i, op in enumerate(self.graph.ops):
            placed = self._placed(op)
            outputs = tuple(
                None if t is None else self._slot(f"{op.name}:{k}", (i, k), t, _layout(placed.outputs[k], op))
                for k, t in enumerate(op.outputs)
            )
            if op.is_placeholder:
                assert outputs[0] is not None, f"placeholder {op.name} is not a tensor"
                self.records.append(LoadPlaceholder(op.name, outputs[0]))
            else:
                self.records.append(self._run(i, op, placed, outputs))
            for k, slot in enumerate(outputs):
                if slot is not None:
                    self.at[i, k] = slot
                    self._return(op, (i, k))
        return RankProgram(self.mesh, _with_frees(self.records))

    def _placed(self, op: Op) -> Placed:
        placed = self.layouts.get(op.name)
        if placed is None:
            raise ValueError(f"the layouts lack op {op.name!r}; expected one entry for each of the graph's {len(self.graph.ops)} ops")
        if len(placed.inputs) != len(op.inputs) or len(placed.outputs) != len(op.outputs):
            raise ValueError(
                f"op {op.name} ({op.target}) has {len(op.inputs)} inputs and {len(op.outputs)} outputs, "
                f"its layouts have {len(placed.inputs)} and {len(placed.outputs)}"
            )
        return placed

    def _slot(self, name: str, value: Value, tensor: Tensor, layout: Layout) -> Slot:
        why = why_illegal(tensor.shape, layout, self.mesh)
        if why is not None:
            raise ValueError(f"{name}: {why}")
        of_kernel = (self.graph.ops[value[0]].target, value[1]) in OF_KERNEL and len(tensor.shape) == 1  # maxima asked for are a matrix
        return replace(slot_of(name, value, tensor, layout, self.mesh), of_kernel=of_kernel)

    def _move(self, source: Slot, name: str, layout: Layout) -> Slot:
        """`source` in another layout; `source` itself when it already has that layout."""
        if source.layout == layout:
            return source
        tensor = self.graph.tensor(source.value)
        if source.value in self.private:
            layouts = f"from {text(source.layout)} to {text(layout)}"
            raise ValueError(f"{name} reads {source.name} {layouts}, but only the ranks that computed it know its rows; give it one layout")
        target = self._slot(name, source.value, tensor, layout)
        self.records.append(redistribution(source, target, tensor, self.routes))
        return target

    def _hub(self, value: Value) -> Slot:
        """The slot from which users read a value; the first call redistributes the value to its hub, where it has one."""
        op = self.graph.ops[value[0]]
        hub = self.layouts[op.name].hubs[value[1]]
        if hub is not None and not self.at[value].name.endswith("@hub"):
            slot = self._move(self.at[value], f"{op.name}:{value[1]}@hub", _layout(hub, op))
            self.at[value] = slot
        return self.at[value]

    def _run(self, i: int, op: Op, placed: Placed, outputs: tuple[Slot | None, ...]) -> RunOp:
        inputs = tuple(
            self._move(self._hub(value), f"{op.name}.in{k}", _layout(placed.inputs[k], op)) for k, value in enumerate(op.inputs)
        )
        return run_record(self.graph, i, inputs, outputs, self.mesh, self.device)

    def _return(self, op: Op, value: Value) -> None:
        for key, layout in self.wanted.get(value, ()):
            source = self._hub(value)
            slot = source if layout is None else self._move(source, f"{key}=", _layout(layout, op))
            self.records.append(ReturnResult(key, slot))


def redistribution(source: Slot, target: Slot, tensor: Tensor, routes: Routes) -> Redistribute:
    """The cheapest route of a tensor from one slot to another; ValueError where there is none."""
    route = routes.route(tensor.shape, tensor.itemsize, source.layout, target.layout)
    if route is None:
        raise ValueError(f"there is no route for {source.name} from {text(source.layout)} to {target.name} in {text(target.layout)}")
    for step in route.steps:
        check_step(step)
    even = all(is_even(tensor.shape, layout, routes.mesh) for step in route.steps for layout in (step.before, step.after))
    return Redistribute(source, target, route.steps, None if even else tensor.shape)


def slot_of(name: str, value: Value, tensor: Tensor, layout: Layout, mesh: Mesh) -> Slot:
    shapes = () if is_even(tensor.shape, layout, mesh) else tuple(rank_shape(tensor.shape, layout, mesh, c) for c in mesh.coordinates())
    return Slot(name, value, layout, local_shape(tensor.shape, layout, mesh), tensor.dtype, shapes)


def run_record(graph: Graph, i: int, inputs: tuple[Slot, ...], outputs: tuple[Slot | None, ...], mesh: Mesh, device: str = "cpu") -> RunOp:
    op = graph.ops[i]
    input_shapes = tuple(t.shape for t in graph.input_tensors(i))
    out_layouts = tuple(None if slot is None else slot.layout for slot in outputs)
    kernel = kernel_for(op, input_shapes, tuple(slot.layout for slot in inputs), out_layouts, mesh)
    target, names = INSTEAD.get(op.target, (op.target, None))
    by_shapes: dict[tuple, dict[str, Any]] = {}

    def arguments(rank: int) -> dict[str, Any]:
        shapes = (tuple(s.shape_on(rank) for s in inputs), tuple(None if s is None else s.shape_on(rank) for s in outputs))
        if shapes not in by_shapes:
            values = {name: torch_constants(value, device) for name, value in localise(op, input_shapes, *shapes).items()}
            by_shapes[shapes] = values if names is None else {names[name]: value for name, value in values.items() if name in names}
        return by_shapes[shapes]

    uneven = any(slot is not None and slot.shapes for slot in (*inputs, *outputs))
    by_rank = tuple(arguments(rank) for rank in range(mesh.num_devices)) if uneven else ()
    return RunOp(i, op.name, target, arguments(0), inputs, outputs, kernel, by_rank)


def _layout(layout: str | None, op: Op) -> Layout:
    if layout is None:
        raise ValueError(f"op {op.name} ({op.target}) has no layout for an output that is a tensor")
    return parsed(layout)


def slots_of(record: Record) -> tuple[Slot, ...]:
    match record:
        case LoadPlaceholder() | ReturnResult():
            return (record.slot,)
        case Redistribute() | RunOp():
            return tuple(slot for slot in (*record.inputs, *record.outputs) if slot is not None)
    return ()


def _with_frees(records: list[Record]) -> tuple[Record, ...]:
    """Each slot is freed right after the last record that names it."""
    last = {slot.name: i for i, record in enumerate(records) for slot in slots_of(record)}
    ending: dict[int, list[str]] = {}
    for name, i in last.items():
        ending.setdefault(i, []).append(name)
    frees = {i: (FreeTensors(tuple(names)),) for i, names in ending.items()}
    return tuple(one for i, record in enumerate(records) for one in (record, *frees.get(i, ())))
