"""Does the sharded program compute what the whole one does? Every op is looked at, on every rank.

With x an op's output in the whole program, x~ the same in a whole program whose placeholders are off by their own rounding,
and y what the ranks' parts stand for under the PLANNED layout (replicas agree, shards concatenate, partials add up):

    error = max |y - x| / max |x|                                       absolute where x is all zero
    error <= tolerance     or     max |y - x| <= 8 max |x~ - x|         then it is rounding

A random op (dropout) draws the same numbers in every program: each of the three goes on from the state that the generator had in
the whole one. Where an op without a program of its own is sharded, its parts are the whole one's; their shapes are looked at.

The second test is for tensors that are zero but for rounding (the gradient of a key bias): what is left of terms that cancel
can't be compared with itself; its error is given relative to 8 max |x~ - x| / tolerance. An op whose error is above
`op_tolerance`, whose local shape differs or which fails is a placement mismatch; its output is then replaced by the right
one, so that the next mismatch is found on its own and a wrong row is located even where the end result happens to be right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from autoshard.graph import Graph, Op, Value
from autoshard.layout import Layout, P, R, S, is_legal, rank_shape, text
from autoshard.lower.dropout import draws, first_state, from_state
from autoshard.lower.literals import UNINITIALISED
from autoshard.lower.parts import cut, distance, gap, largest
from autoshard.lower.program import Free, Give, Load, Move, Program, Run, Slot, lower, run_record
from autoshard.lower.run import World, alone, check_all
from autoshard.mesh import Mesh
from autoshard.redistribute import Routes
from autoshard.solution import Placed

# (of results, of single ops) by the least precise float type of the graph. An op's is wider: it has to tell a wrong layout
# (errors of order 1) from rounding that later ops average out.
TOLERANCES = {
    "float64": (1e-10, 1e-8),
    "float32": (1e-5, 3e-4),
    "float16": (5e-3, 5e-2),
    "bfloat16": (3e-2, 2e-1),
}
REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}  # the type of a complex number's components
# The gradient of BERT's key bias differs by up to 1.8 times the noise (tiny GPT-2, Llama, BERT; 8 ranks, 10 random plans each), one of
# CLIP's by 4.1 times (2x2, layouts at random; the same layouts in float64: 7e-11).
NOISE = 8


@dataclass(frozen=True)
class Mismatch:
    """An output that is not what its planned layout says. found: a layout that fits, or what happened instead."""

    op: str
    output: int
    planned: str
    found: str


@dataclass(frozen=True)
class Verification:
    """What the comparison found. `ok` is the answer."""

    ranks: int
    max_relative_error_outputs: float
    max_relative_error_gradients: float
    max_relative_error_ops: float  # over all ops that match
    placement_mismatches: tuple[Mismatch, ...]
    redistributes: int
    tolerance: float

    @property
    def ok(self) -> bool:
        worst = max(self.max_relative_error_outputs, self.max_relative_error_gradients)
        return not self.placement_mismatches and worst <= self.tolerance


def verify_program(
    graph: Graph,
    layouts: Mapping[str, Placed],
    results: Mapping[str, str],
    mesh: Mesh,
    values: Mapping[str, Tensor],
    reference: Mapping[str, Tensor] | None = None,
    *,
    routes: Routes | None = None,
    seed: int = 0,
) -> Verification:
    """Run the planned program on all ranks of the mesh in this process, beside the whole program.

    values: a whole tensor for each placeholder. reference: what the results should be ("output:0", "gradient:h.0.weight",
    "buffer:count" where it has one); the whole program's own results where it is None. seed: of the rounding noise and of random
    ops: a reference must have been computed after torch.manual_seed(seed). ValueError for layouts that can't be lowered, and
    where the whole program's random numbers are not those of the reference.
    """
    program = lower(graph, layouts, results, mesh, routes=routes)
    return _Comparison(graph, program, values, reference, seed).run()


@torch.no_grad()
def run_whole(graph: Graph, values: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The unsharded program: placeholders in, results out ("kind:name" -> tensor). seed: of what random ops draw."""
    whole = _Whole(graph, values, None, seed)
    results: dict[str, Tensor] = {}
    wanted: dict[Value, list[str]] = {}
    for result in graph.results:
        if result.value is not None:
            wanted.setdefault(result.value, []).append(f"{result.kind}:{result.name}")
    for i, op in enumerate(graph.ops):
        whole.do(i)
        for k in range(len(op.outputs)):
            results.update({key: whole.held[i, k] for key in wanted.get((i, k), ())})
    return results


class _Whole:
    """A simple interpreter of the graph on whole tensors; values are dropped when the op after their last reader runs."""

    def __init__(self, graph: Graph, values: Mapping[str, Tensor], noise: tuple[float, int] | None, seed: int):
        self.graph, self.values, self.noise = graph, values, noise
        self.random = self.random_before = first_state(seed)  # of the generator, now and before the last op
        self.held: dict[Value, Tensor] = {}
        self.ending: dict[int, list[Value]] = {}
        for value, users in graph.users.items():
            self.ending.setdefault(max(i for i, _ in users), []).append(value)
        for i, op in enumerate(graph.ops):
            self.ending.setdefault(i, []).extend((i, k) for k in range(len(op.outputs)) if (i, k) not in graph.users)
        self.drop: list[Value] = []

    def do(self, i: int) -> None:
        op = self.graph.ops[i]
        for value in self.drop:
            self.held.pop(value, None)
        if op.is_placeholder:
            self.held[i, 0] = self._value(i, op)
        else:
            inputs, outputs = [self._slot(value) for value in op.inputs], [self._slot((i, k)) for k in range(len(op.outputs))]
            record = run_record(self.graph, i, tuple(s for s in inputs if s), tuple(outputs), ONE_DEVICE)
            for k, y in enumerate(self._call(record, [self.held[value] for value in op.inputs])):
                if isinstance(y, Tensor):
                    self.held[i, k] = y
        self.drop = self.ending.get(i, [])

    def _call(self, record: Run, inputs: list[Tensor]) -> tuple:
        if not draws(record.target):
            return alone(record, inputs)
        self.random_before = self.random
        with from_state(self.random):
            outputs = alone(record, [x.contiguous() for x in inputs])  # as the ranks draw: in the order of memory
            self.random = torch.get_rng_state()
        return outputs

    def _value(self, i: int, op: Op) -> Tensor:
        x = self.values[op.name].detach()
        if self.noise is None or not (x.is_floating_point() or x.is_complex()):
            return x
        eps, seed = self.noise
        random = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed * 1_000_003 + i), dtype=x.dtype.to_real())
        return x * (1 + (2 * random - 1) * 2 * eps)

    def _slot(self, value: Value) -> Slot | None:
        tensor = self.graph.ops[value[0]].outputs[value[1]]
        return None if tensor is None else Slot("", value, (), tensor.shape, tensor.dtype)


ONE_DEVICE = Mesh(())


class _Comparison:
    def __init__(self, graph: Graph, program: Program, values: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None, seed: int):
        self.graph, self.program, self.values, self.reference = graph, program, values, reference
        self.mesh = program.mesh
        dtypes = {t.dtype for op in graph.ops for t in op.outputs if t is not None}
        floats = [REAL.get(dtype, dtype) for dtype in dtypes if REAL.get(dtype, dtype) in TOLERANCES]
        lowest = max(floats, key=list(TOLERANCES).index, default="float32")
        self.tolerance, self.op_tolerance = TOLERANCES[lowest]
        self.eps = torch.finfo(getattr(torch, lowest)).eps
        self.world = World(self.mesh)
        self.whole, self.near = _Whole(graph, values, None, seed), _Whole(graph, values, (self.eps, seed), seed)
        self.is_random = any(draws(op.target) for op in graph.ops if not op.is_placeholder)
        self.mismatches: list[Mismatch] = []
        self.worst = {"output": 0.0, "gradient": 0.0, "op": 0.0}

    @torch.no_grad()
    def run(self) -> Verification:
        for record in self.program.records:
            match record:
                case Load():
                    self._load(record)
                case Move():
                    self._move(record)
                case Run():
                    self._run(record)
                case Give():
                    self._give(record)
                case Free():
                    self.world.do(record, self.values)
        return Verification(
            self.mesh.num_devices,
            self.worst["output"],
            self.worst["gradient"],
            self.worst["op"],
            tuple(self.mismatches),
            self.program.redistributes,
            self.tolerance,
        )

    def _load(self, record: Load) -> None:
        self.world.do(record, self.values)
        self._do_whole(record.slot.value[0])

    def _do_whole(self, i: int) -> None:
        self.whole.do(i)
        self.near.do(i)

    def _move(self, record: Move) -> None:
        try:
            self.world.do(record, self.values)
        except (RuntimeError, ValueError, IndexError) as error:
            self._repair(record.target, _first_line(error))

    def _run(self, record: Run) -> None:
        self._do_whole(record.op)
        try:
            outputs = self.world.run(record, self.whole.random_before if draws(record.target) else None)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            for slot in record.outputs:
                if slot is not None:
                    self._repair(slot, _first_line(error))
            return
        for k, slot in enumerate(record.outputs):
            if slot is not None:
                self._look(record, slot, [out[k] for out in outputs])

    def _look(self, record: Run, slot: Slot, parts: list) -> None:
        """Hold an output when it is right, else note it and hold the right one."""
        try:
            check_all(slot, parts, f"op {record.name}")
        except ValueError:
            self._repair(slot, self._explain(slot, parts))
            return
        if draws(record.target) and record.kernel is None and any(p.is_shard() for p in slot.layout):
            parts = cut(self.whole.held[slot.value], slot.layout, self.mesh)  # each rank's own numbers, which can't be compared
        skipped = self.graph.ops[record.op].target in UNINITIALISED
        error = 0.0 if skipped else self._error(parts, slot, self.whole.held[slot.value], self.op_tolerance)
        if error > self.op_tolerance:
            self._repair(slot, self._explain(slot, parts))
            return
        self.worst["op"] = max(self.worst["op"], error)
        self.world.held[slot.name] = parts

    def _error(self, parts: list[Tensor], slot: Slot, expected: Tensor, tolerance: float) -> float:
        apart = distance(parts, slot.layout, self.mesh, expected)
        size = largest(expected)
        if apart == 0.0 or size == 0.0:
            return apart
        if apart <= tolerance * size:
            return apart / size
        noise = gap(self.whole.held[slot.value], self.near.held[slot.value])
        return apart / max(size, NOISE * noise / tolerance if noise < math.inf else 0.0)

    def _repair(self, slot: Slot, found: str) -> None:
        op = self.graph.ops[slot.value[0]]
        self.mismatches.append(Mismatch(op.name, slot.value[1], text(slot.layout), found))
        self.world.held[slot.name] = cut(self.whole.held[slot.value], slot.layout, self.mesh)

    def _explain(self, slot: Slot, parts: list[Tensor]) -> str:
        """A layout under which the parts are right, else their shapes."""
        whole = self.whole.held[slot.value]
        for layout in _layouts(whole, parts, self.mesh):
            if distance(parts, layout, self.mesh, whole) <= self.op_tolerance * max(largest(whole), self.eps):
                return text(layout)
        return f"no layout: {tuple(parts[0].shape)} {str(parts[0].dtype).removeprefix('torch.')} on each rank"

    def _give(self, record: Give) -> None:
        kind = record.key.split(":")[0]
        expected = self.whole.held[record.slot.value]
        if self.reference is not None and (kind in ("output", "gradient") or record.key in self.reference):
            if record.key not in self.reference:
                raise ValueError(f"the reference lacks {record.key!r}; expected every output and gradient of the program")
            expected = self.reference[record.key].detach()
            if self.is_random:
                self._check_draws(record, expected)
        error = self._error(self.world.parts(record.slot), record.slot, expected, self.tolerance)
        kind = "gradient" if kind == "gradient" else "output"
        self.worst[kind] = max(self.worst[kind], error)


    def _check_draws(self, record: Give, expected: Tensor) -> None:
        """ValueError when the whole program, unsharded, does not compute the reference."""
        slot = replace(record.slot, layout=(R,) * len(self.mesh.axes), shapes=())
        if self._error([self.whole.held[slot.value]] * self.mesh.num_devices, slot, expected, self.tolerance) > self.tolerance:
            raise ValueError(
                f"the model and its captured program, both unsharded, differ in {record.key}: they don't draw random numbers (dropout) "
                "in the same order, so that a plan can't be compared with the model; turn dropout off with model.eval(), and plan that"
            )


def _layouts(whole: Tensor, parts: list, mesh: Mesh) -> list[Layout]:
    """All layouts under which the ranks hold parts of these shapes, those without P first."""
    shape = tuple(whole.shape)
    per_axis = [[R, *(S(d) for d in range(len(shape))), P()] if axis.size > 1 else [R] for axis in mesh.axes]
    if not all(isinstance(part, Tensor) and part.dtype == whole.dtype for part in parts):
        return []
    held = [tuple(part.shape) for part in parts]
    possible = [layout for layout in product(*per_axis) if is_legal(shape, layout, mesh)]
    return sorted(
        (layout for layout in possible if held == [rank_shape(shape, layout, mesh, c) for c in mesh.coordinates()]),
        key=lambda layout: sum(p == P() for p in layout),
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
