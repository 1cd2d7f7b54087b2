"""A program of a rank run without its device: fake tensors say that they are on it, and each operator is looked up in torch's table.

    for each operator that a record of the program calls, kernels and routes included:
        it has a kernel for the device         dispatch_table.py
        its results are on the device          a tensor elsewhere would be copied at every step, or stop the run

What is not seen: whether a kernel's library is installed, its limits on sizes and strides that torch's fake kernels don't check, its
numbers. Those need the device (`verify(device="cuda")`). A library's own operator is trusted where it has a kernel: what that calls is
not looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard.capture import fake_grouped_mm
from autoshard.graph import Graph
from autoshard.lower.collectives import Ask, Asking, DataDependent, Rank, answer_shape, drive
from autoshard.lower.dispatch_table import has_kernel
from autoshard.lower.kernels.table import FUNCTIONS
from autoshard.lower.program import LoadPlaceholder, RankProgram, Redistribute, RunOp, Slot
from autoshard.lower.run import check, local_program, run_route
from autoshard.torch_private import FakeTensorMode, TorchDispatchMode, parse_to, pytree

aten = torch.ops.aten
NOT_LINKED = "not linked with support for"  # a fake kernel in Python asked this torch for a device that it was built without


@dataclass(frozen=True)
class CannotRun:
    """An op of a graph that can't run on a device."""

    op: str  # its name; of a tensor that is redistributed, that tensor's
    module: str  # the module that it comes from
    target: str
    why: str

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "module": self.module, "target": self.target, "why": self.why}


@torch.no_grad()
def dry_run(program: RankProgram, graph: Graph, device: str = "cuda") -> tuple[CannotRun, ...]:
    """What of a program that was lowered for `device` can't run there, in the program's order; empty where everything can."""
    return tuple(_DryRun(program, graph, device).run())


class _DryRun:
    def __init__(self, program: RankProgram, graph: Graph, device: str):
        self.program, self.graph, self.device = program, graph, device
        self.held: dict[str, Tensor] = {}

    def run(self) -> list[CannotRun]:
        mesh, problems = self.program.mesh, []
        without_driver = torch.backends.cudnn.flags(enabled=False)  # which torch.lstm would ask, to choose cuDNN's kernel or its own
        with FakeTensorMode(), _WithoutDevice(), fake_grouped_mm(), without_driver:
            rank = Rank(mesh, tuple(torch.zeros((), dtype=torch.int64, device=self.device) for _ in mesh.axes), (0,) * len(mesh.axes))
            for record in self.program.records:
                if isinstance(record, LoadPlaceholder):
                    self._hold([record.slot], [])
                elif isinstance(record, (Redistribute, RunOp)):
                    problems += [CannotRun(*self._subject(record), why) for why in dict.fromkeys(self._whys(record, rank))]
        return problems

    def _subject(self, record: Redistribute | RunOp) -> tuple[str, str, str]:
        op = self.graph.ops[record.op if isinstance(record, RunOp) else record.source.value[0]]
        return op.name, op.module, op.target if isinstance(record, RunOp) else "redistribution"

    def _whys(self, record: Redistribute | RunOp, rank: Rank) -> list[str]:
        """Why a record can't run. Its outputs are held in any case, so that all others are tried as well."""
        with _Called(self.device) as called:
            try:
                if isinstance(record, Redistribute):
                    outputs = [self._drive(run_route(record.steps, rank, self.held[record.source.name], record.global_shape))]
                else:
                    outputs = list(self._drive(local_program(record, rank, [self.held[slot.name] for slot in record.inputs])))
                for slot, x in zip(_outputs(record), outputs, strict=False):
                    if slot is not None:
                        check(slot, x, "the dry run")
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                if not called.whys and NOT_LINKED not in str(error):
                    called.whys.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                outputs = []
        self._hold(_outputs(record), [] if called.whys else outputs)
        return called.whys

    def _hold(self, slots: Sequence[Slot | None], tensors: Sequence[Any]) -> None:
        for k, slot in enumerate(slots):
            if slot is not None:
                empty = k >= len(tensors)
                dtype = getattr(torch, slot.dtype)
                self.held[slot.name] = torch.empty(slot.shape_on(0), dtype=dtype, device=self.device) if empty else tensors[k]

    def _drive(self, asking: Asking) -> Any:
        """Runs a generator to its end; a collective is answered by a tensor of the shape of its answer."""
        return drive(asking, self._answer)

    def _answer(self, ask: Ask | DataDependent) -> Any:
        if isinstance(ask, DataDependent):
            return ask.call([""] * len(self.program.mesh.axes))
        return ask.tensor.new_empty(answer_shape(ask, self.program.mesh))


def _outputs(record: Redistribute | RunOp) -> Sequence[Slot | None]:
    return [record.target] if isinstance(record, Redistribute) else record.outputs


class _Called(TorchDispatchMode):
    """The reasons why the operators that are called inside can't run on a device."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.whys = device, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "prim":  # a question about a tensor
            return NotImplemented
        if func.namespace == "autoshard" and str(func) in FUNCTIONS:  # it chooses a kernel for the device
            with self:
                return FUNCTIONS[str(func)](*args, **(kwargs or {}))
        if not has_kernel(func, self.device.upper()):
            self.whys.append(f"{func} has no kernel for {self.device}")
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type != self.device:
                self.whys.append(f"{func} makes a tensor on {x.device.type}")
        return result


SAME = {Tensor.contiguous: aten.contiguous.default, Tensor.__invert__: aten.bitwise_not.default}
DTYPES = {Tensor.float: torch.float32, Tensor.double: torch.float64, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16,
          Tensor.bool: torch.bool, Tensor.int: torch.int32, Tensor.long: torch.int64}  # fmt: skip


class _WithoutDevice(TorchFunctionMode):
    """Calls operators in place of Python's methods that first make a tensor's device the current one, which a torch without it can't."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in SAME:
            return SAME[func](*args, **kwargs)
        if func in DTYPES:
            return _converted(args[0], DTYPES[func], None)
        if func is Tensor.to and not (len(args) > 1 and isinstance(args[1], Tensor)):
            device, dtype, *_ = parse_to(*args[1:], **kwargs)
            return _converted(args[0], dtype, device)
        if func is Tensor.__getitem__:
            return _selected(*args)
        return func(*args, **kwargs)


def _converted(x: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    same = dtype in (None, x.dtype) and (device is None or device.type == x.device.type)
    return x if same else aten._to_copy.default(x, dtype=dtype, device=device)


def _selected(x: Tensor, index: Any) -> Tensor:
    """x[index], for numbers, slices, new dims and at most one tensor."""
    items = index if isinstance(index, tuple) else (index,)
    dim = 0
    for k, item in enumerate(items):
        if item is Ellipsis:
            dim = x.dim() - sum(after is not None for after in items[k + 1 :])
        elif isinstance(item, int):
            x = aten.select.int(x, dim, item)
        elif item is None:
            x, dim = aten.unsqueeze.default(x, dim), dim + 1
        elif isinstance(item, slice):
            last = x.shape[dim] if item.stop is None else item.stop
            x, dim = aten.slice.Tensor(x, dim, item.start or 0, last, item.step or 1), dim + 1
        else:
            x, dim = aten.index.Tensor(x, [*[None] * dim, item]), dim + item.dim()
    return x
