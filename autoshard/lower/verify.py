"""Does the sharded program compute the same as the unsharded one? Every op is compared, on every rank.

Let x be an op's output in the unsharded program, x~ the same in an unsharded program whose placeholders are perturbed by their own
rounding, and y the global tensor for which the ranks' local tensors stand under the PLANNED layout (replicas agree, shards
concatenate, partial sums add up):

    error = max |y - x| / max |x|                                       absolute where x is all zero
    error <= tolerance     or     max |y - x| <= 8 max(|x~ - x|, step)  then the difference is rounding

The second test is for tensors that are zero except for rounding, such as the gradient of a key bias: they are what is left of terms
that cancel, so their own size is no measure. Their error is relative to 8 max(|x~ - x|, step) / tolerance. step is the least positive
number of the dtype, by which the smallest ones differ.

A random op draws the same numbers in all three programs: it starts from the state that the generator had in the unsharded program, and
has to leave it in one state on all ranks. An op that draws per shard (`lower.kernels.random`) is compared with draws of the shards, each
for its first element in the global tensor; then the unsharded op's output replaces its own.

An op whose error is above `op_tolerance`, whose local shape differs or which fails is a placement mismatch. Its output is then
replaced by the right one, so that the next mismatch shows by itself, and a wrong rule is located even where the end result happens
to be right. It is no mismatch where all inputs of the ranks are right and the op on one device makes the same of just these inputs:
there, rounding decides (a comparison, an argmax, a difference of nearly equal numbers). The output is replaced as well. Values that
nothing reads are not compared. A result whose error is above the tolerance is held against the noise of `lower.rounding`.
Another mismatch is a collective that two ranks of a group would issue at different points of their programs (issue_order.py).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from autoshard.graph import Graph, Op, Value, private_values
from autoshard.layout import Layout, P, R, S, is_legal, rank_bounds, rank_shape, text
from autoshard.lower.generator import draws, first_state, from_state, state_of_generator
from autoshard.lower.issue_order import out_of_step
from autoshard.lower.kernels.random import RandomKernel
from autoshard.lower.literals import UNINITIALISED
from autoshard.lower.program import FreeTensors, LoadPlaceholder, RankProgram, Redistribute, ReturnResult, RunOp, Slot, lower, run_record
from autoshard.lower.rounding import difference, in_float64, noise_of, wide_values
from autoshard.lower.run import SimulatedRanks, arguments, as_outputs, check_all, run_on_one_device
from autoshard.lower.sharding import distance, gap, joined, largest, local_tensors
from autoshard.mesh import Mesh
from autoshard.routes import Routes
from autoshard.solution import Placed

# (of results, of single ops) by the least precise float type of the graph. The tolerance of single ops is wider: it has to tell a
# wrong layout (errors of order 1) from rounding, which later ops average out.
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
    """An output that is not in its planned layout. actual: a layout that fits its local tensors, or what happened instead."""

    op: str
    output: int
    planned: str
    actual: str

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "output": self.output, "planned": self.planned, "found": self.actual}


@dataclass(frozen=True)
class Verification:
    """The result of the comparison. `ok` is the answer."""

    ranks: int
    max_relative_error_outputs: float
    max_relative_error_gradients: float
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
    device: str = "cpu",
) -> Verification:
    """Run the planned program on all ranks of the mesh in this process, beside the unsharded program.

    values: a global tensor for each placeholder. reference: what the results should be ("output:0", "gradient:h.0.weight",
    "buffer:count" where it has one); the unsharded program's own results where it is None. seed: of the rounding noise and of random
    ops; a reference must have been computed after torch.manual_seed(seed). device: where all ranks run, and where values and reference are.
    ValueError for layouts that can't be lowered, and
    where the unsharded program's random numbers are not those of the reference.
    """
    program = lower(graph, layouts, results, mesh, routes=routes, device=device)
    return _Comparison(graph, program, values, reference, seed, device).run()


@torch.no_grad()
def run_global(graph: Graph, values: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The unsharded program: placeholders in, results out ("kind:name" -> tensor). seed: of the random ops."""
    return _Unsharded(graph, values, None, seed).results()


class _Unsharded:
    """A simple interpreter of the graph on global tensors. A value is dropped when the op after its last reader runs."""

    def __init__(self, graph: Graph, values: Mapping[str, Tensor], noise: tuple[float, int] | None, seed: int, device: str = "cpu"):
        self.graph, self.values, self.noise, self.device = graph, values, noise, device
        self.random = self.random_before = first_state(seed, device)  # of the generator, now and before the last op
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
            for k, y in enumerate(self.apply(i, [self.held[value] for value in op.inputs])):
                if isinstance(y, Tensor):
                    self.held[i, k] = y
        self.drop = self.ending.get(i, [])

    def results(self) -> dict[str, Tensor]:
        """Runs the program; its results by "kind:name"."""
        results, wanted = dict[str, Tensor](), dict[int, list[tuple[str, Value]]]()
        for r in self.graph.results:
            if r.value is not None:
                wanted.setdefault(r.value[0], []).append((f"{r.kind}:{r.name}", r.value))
        for i in range(len(self.graph.ops)):
            self.do(i)
            results |= {key: self.held[value] for key, value in wanted.get(i, ())}
        return results

    def apply(self, i: int, inputs: list[Tensor]) -> tuple:
        """The outputs of op i for these inputs."""
        op = self.graph.ops[i]
        slots, outputs = [self._slot(value) for value in op.inputs], [self._slot((i, k)) for k in range(len(op.outputs))]
        record = run_record(self.graph, i, tuple(s for s in slots if s), tuple(outputs), ONE_DEVICE, self.device)
        return self._call(record, inputs)

    def _call(self, record: RunOp, inputs: list[Tensor]) -> tuple:
        if not draws(record.target):
            return run_on_one_device(record, inputs, self.device)
        self.random_before = self.random
        with from_state(self.random, self.device):
            outputs = run_on_one_device(record, inputs, self.device)
            self.random = state_of_generator(self.device)
        return outputs

    def _value(self, i: int, op: Op) -> Tensor:
        x = self.values[op.name].detach()
        return x if self.noise is None else perturbed(x, self.noise[0], self.noise[1] * 1_000_003 + i)

    def _slot(self, value: Value) -> Slot | None:
        tensor = self.graph.ops[value[0]].outputs[value[1]]
        return None if tensor is None else Slot("", value, (), tensor.shape, tensor.dtype)


def perturbed(x: Tensor, eps: float, seed: int) -> Tensor:
    """x with its rounding: each element by up to 2 eps of itself; no more than 1 where it wasn't, so that a label stays in [0, 1]."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    random = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype.to_real())
    changed = x * (1 + (2 * random.to(x.device) - 1) * 2 * eps)
    return changed if x.is_complex() else torch.where(x.abs() <= 1, changed.clamp(-1, 1), changed)


ONE_DEVICE = Mesh(())


class _Comparison:
    def __init__(
        self,
        graph: Graph,
        program: RankProgram,
        values: Mapping[str, Tensor],
        reference: Mapping[str, Tensor] | None,
        seed: int,
        device: str,
    ):
        self.graph, self.program, self.values, self.reference = graph, program, values, reference
        self.mesh, self.seed, self.device = program.mesh, seed, device
        lowest = least_precise([graph])
        self.tolerance, self.op_tolerance = TOLERANCES[lowest]
        self.eps = torch.finfo(getattr(torch, lowest)).eps
        self.simulated = SimulatedRanks(self.mesh, device)
        self.unsharded = _Unsharded(graph, values, None, seed, device)
        self.perturbed = _Unsharded(graph, values, (self.eps, seed), seed, device)
        self.private = private_values(graph)  # only what reads them can be compared
        self.read = {*graph.users, *(result.value for result in graph.results)}
        self.roundings: list[dict[str, Tensor]] | None = None  # the results of programs with other roundings, once they are needed
        self.is_random = any(draws(op.target) for op in graph.ops if not op.is_placeholder)
        self.mismatches: list[Mismatch] = []
        self.worst = {"output": 0.0, "gradient": 0.0}

    @torch.no_grad()
    def run(self) -> Verification:
        for record in self.program.records:
            match record:
                case LoadPlaceholder():
                    self.simulated.do(record, self.values)
                    self._run_unsharded(record.slot.value[0])
                case Redistribute():
                    try:
                        self.simulated.do(record, self.values)
                    except (RuntimeError, ValueError, IndexError) as error:
                        self._repair(record.target, error)
                case RunOp():
                    self._run(record)
                case ReturnResult():
                    self._compare_result(record)
                case FreeTensors():
                    self.simulated.do(record, self.values)
        self.mismatches += out_of_order(self.program)
        worst = self.worst["output"], self.worst["gradient"]
        return Verification(self.mesh.num_devices, *worst, tuple(self.mismatches), self.program.redistributes, self.tolerance)

    def _run_unsharded(self, i: int) -> None:
        self.unsharded.do(i)
        self.perturbed.do(i)

    def _run(self, record: RunOp) -> None:
        self._run_unsharded(record.op)
        self.simulated.random = random = self.unsharded.random_before
        try:
            outputs = self.simulated.run(record)
            if _is_per_shard(record):
                self._check_shards(record, outputs, random)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            for slot in record.outputs:
                if slot is not None:
                    self._repair(slot, error)
            return
        for k, slot in enumerate(record.outputs):
            if slot is not None:
                self._hold(record, slot, [out[k] for out in outputs])

    def _check_shards(self, record: RunOp, outputs: list[tuple], random: Tensor) -> None:
        """ValueError where a rank has not drawn, from this state, what belongs to its shard of a tensor that is drawn per shard."""
        for rank, drawn in zip(self.simulated.ranks, outputs, strict=True):
            region, own = record.kernel.region, [self.simulated.held[slot.name][rank.number] for slot in record.inputs]  # type: ignore[union-attr]
            bounds = rank_bounds(region.shape, region.layout, self.mesh, rank.place)
            first = sum(lo * math.prod(region.shape[d + 1 :]) for d, (lo, _) in enumerate(bounds))
            with from_state(random, self.simulated.device):
                expected = as_outputs(record.kernel.drawn(rank, arguments(record, own, rank.number), first))  # type: ignore[union-attr]
            if any(gap(x, y) > 0 for x, y in zip(drawn, expected, strict=True)):
                raise ValueError(f"rank {rank.number} does not draw what belongs to its shard, which begins at element {first}")

    def _hold(self, record: RunOp, slot: Slot, tensors: list) -> None:
        """Hold an output when it is right; otherwise record the mismatch and hold the right one."""
        try:
            check_all(slot, tensors, f"op {record.name}")
        except ValueError:
            self._repair(slot, self._explain(slot, tensors))
            return
        if _is_per_shard(record):
            tensors = local_tensors(self.unsharded.held[slot.value], slot.layout, self.mesh)
        skipped = self.graph.ops[record.op].target in UNINITIALISED or slot.value not in self.read - self.private
        error = 0.0 if skipped else self._error(tensors, slot, self.unsharded.held[slot.value], self.op_tolerance)
        if error > self.op_tolerance:
            if self._is_decided_by_rounding(record, slot, tensors):
                self._hold_right(slot)
            else:
                self._repair(slot, self._explain(slot, tensors))
            return
        self.simulated.held[slot.name] = tensors

    def _is_decided_by_rounding(self, record: RunOp, slot: Slot, tensors: list[Tensor]) -> bool:
        """Whether the inputs of all ranks are right, and the op on one device makes of these inputs what the ranks have."""
        inputs = []
        for source in record.inputs:
            held, right = self.simulated.held[source.name], self.unsharded.held[source.value]
            if source.value in self.private:
                inputs.append(right)
                continue
            if draws(record.target) or self._error(held, source, right, self.op_tolerance) > self.op_tolerance:
                return False
            inputs.append(joined(held, source.layout, self.mesh).to(right.dtype))
        output, other = (
            self.unsharded.apply(record.op, ins)[slot.value[1]]
            for ins in (inputs, [perturbed(x, self.eps, self.seed + k) for k, x in enumerate(inputs)])
        )
        noise = gap(output, other) if output.is_floating_point() or output.is_complex() else 0.0
        return distance(tensors, slot.layout, self.mesh, output) <= max(self.op_tolerance * largest(output), NOISE * noise)

    def _error(self, tensors: list[Tensor], slot: Slot, expected: Tensor, tolerance: float) -> float:
        apart = distance(tensors, slot.layout, self.mesh, expected)
        rounded, other = self.unsharded.held[slot.value], self.perturbed.held[slot.value]
        return relative_error(apart, expected, partial(gap, rounded, other), tolerance)

    def _repair(self, slot: Slot, actual: str | Exception) -> None:
        self.mismatches.append(failure(self.graph, slot, actual))
        self._hold_right(slot)

    def _hold_right(self, slot: Slot) -> None:
        self.simulated.held[slot.name] = local_tensors(self.unsharded.held[slot.value], slot.layout, self.mesh)

    def _explain(self, slot: Slot, tensors: list[Tensor]) -> str:
        """A layout under which the local tensors are right, else their shape and dtype."""
        expected = self.unsharded.held[slot.value]
        for layout in _layouts(expected, tensors, self.mesh):
            if distance(tensors, layout, self.mesh, expected) <= self.op_tolerance * max(largest(expected), self.eps):
                return text(layout)
        return f"no layout: {tuple(tensors[0].shape)} {str(tensors[0].dtype).removeprefix('torch.')} on each rank"

    def _compare_result(self, record: ReturnResult) -> None:
        kind = record.key.split(":")[0]
        expected = self.unsharded.held[record.slot.value]
        if self.reference is not None and (kind in ("output", "gradient") or record.key in self.reference):
            if record.key not in self.reference:
                raise ValueError(f"the reference lacks {record.key!r}; expected every output and gradient of the program")
            expected = self.reference[record.key].detach().to(getattr(torch, record.slot.dtype))  # a sum may have another dtype
            if self.is_random:
                self._check_draws(record, expected)
        error = self._error(self.simulated.held[record.slot.name], record.slot, expected, self.tolerance)
        if error > self.tolerance:
            error = min(error, self._error_beside_rounding(record, expected))
        kind = "gradient" if kind == "gradient" else "output"
        self.worst[kind] = max(self.worst[kind], error)

    def _error_beside_rounding(self, record: ReturnResult, expected: Tensor) -> float:
        """The error of a result relative to NOISE times its noise where that is larger than its size allows for."""
        if self.roundings is None:
            self.roundings = self._other_roundings()
        held = self.simulated.held[record.slot.name]
        result = joined(held, record.slot.layout, self.mesh)
        noise = NOISE * noise_of(self.unsharded.held[record.slot.value], [results[record.key] for results in self.roundings])
        if result.shape != expected.shape or not math.isfinite(noise) or distance(held, record.slot.layout, self.mesh, result) > noise:
            return math.inf
        if not (expected.is_floating_point() or expected.is_complex()):
            return 0.0 if difference(result, expected) <= noise else math.inf
        return difference(result, expected) / max(largest(expected), noise / self.tolerance, _step(expected))

    def _other_roundings(self) -> list[dict[str, Tensor]]:
        """The results with placeholders perturbed differently, and in float64, for which an op may have no kernel. A program that draws
        random numbers draws others in float64."""
        programs = [_Unsharded(self.graph, self.values, (self.eps, self.seed + k), self.seed, self.device) for k in range(3)]
        results = [program.results() for program in programs]
        if self.is_random:
            return results
        try:
            wide = _Unsharded(in_float64(self.graph), wide_values(self.values), None, self.seed, self.device).results()
        except (RuntimeError, TypeError, ValueError):
            return results
        return [*results, wide]

    def _check_draws(self, record: ReturnResult, expected: Tensor) -> None:
        """ValueError when the unsharded program does not compute the reference."""
        slot = replace(record.slot, layout=(R,) * len(self.mesh.axes), shapes=())
        if self._error([self.unsharded.held[slot.value]] * self.mesh.num_devices, slot, expected, self.tolerance) > self.tolerance:
            raise ValueError(
                f"the model and its captured program, both unsharded, differ in {record.key}: they don't draw random numbers (dropout) "
                "in the same order, so that a plan can't be compared with the model; turn dropout off with model.eval(), and plan that"
            )


def least_precise(graphs: Iterable[Graph]) -> str:
    dtypes = {t.dtype for graph in graphs for op in graph.ops for t in op.outputs if t is not None}
    floats = [REAL.get(dtype, dtype) for dtype in dtypes if REAL.get(dtype, dtype) in TOLERANCES]
    return max(floats, key=list(TOLERANCES).index, default="float32")


def relative_error(apart: float, expected: Tensor, noise_of: Callable[[], float], tolerance: float) -> float:
    """The error of a tensor that is `apart` from the expected one (absolutely). noise_of: by how much rounding alone changes that one."""
    size = largest(expected)
    if apart == 0.0 or size == 0.0:
        return apart
    if apart <= tolerance * size:
        return apart / size
    noise = max(noise_of(), _step(expected))
    return apart / max(size, NOISE * noise / tolerance if noise < math.inf else 0.0)


def failure(graph: Graph, slot: Slot, actual: str | Exception) -> Mismatch:
    """An output of an op that is not as planned. actual: what it is instead, or the error."""
    if isinstance(actual, Exception):
        actual = f"{type(actual).__name__}: {str(actual).splitlines()[0][:200] if str(actual) else ''}"
    return Mismatch(graph.ops[slot.value[0]].name, slot.value[1], text(slot.layout), actual)


def _is_per_shard(record: RunOp) -> bool:
    return isinstance(record.kernel, RandomKernel) and not record.kernel.in_full


def out_of_order(program: RankProgram) -> list[Mismatch]:
    """Collectives that ranks of a group would issue in different orders."""
    return [Mismatch(one.record(program).name, 0, *one.said(program)) for one in out_of_step(program)]


def _step(x: Tensor) -> float:
    """The least positive number of the tensor's dtype; 0 for whole numbers."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0
    of_dtype = torch.finfo(x.dtype)
    return of_dtype.tiny * of_dtype.eps


def _layouts(tensor: Tensor, tensors: list, mesh: Mesh) -> list[Layout]:
    """All layouts of the global tensor under which its local tensors have these shapes, those without P first."""
    shape = tuple(tensor.shape)
    per_axis = [[R, *(S(d) for d in range(len(shape))), P()] if axis.size > 1 else [R] for axis in mesh.axes]
    if not all(isinstance(x, Tensor) and x.dtype == tensor.dtype for x in tensors):
        return []
    held = [tuple(x.shape) for x in tensors]
    possible = [layout for layout in product(*per_axis) if is_legal(shape, layout, mesh)]
    return sorted(
        (layout for layout in possible if held == [rank_shape(shape, layout, mesh, c) for c in mesh.coordinates()]),
        key=lambda layout: sum(p == P() for p in layout),
    )
