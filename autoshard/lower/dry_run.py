"""A program of a rank run without its device: fake tensors say that they are on it, and each operator is looked up in torch's table.

    for each operator that a record of the program calls, kernels and routes included:
        it has a kernel for the device         `has_kernel`
        its results are on the device          a tensor elsewhere would be copied at every step, or stop the run

What is not seen: whether a kernel's library is installed, its limits on sizes and strides that torch's fake kernels don't check, its
numbers. Those need the device (`verify(device="cuda")`). A library's own operator is trusted where it has a kernel: what that calls is
not looked up.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard.capture import fake_grouped_mm
from autoshard.graph import Graph
from autoshard.lower.collectives import Rank, drive, uncomputed
from autoshard.lower.kernels.table import FUNCTIONS
from autoshard.lower.program import LoadPlaceholder, RankProgram, Record, Redistribute, RunOp, Slot
from autoshard.lower.run import Interpreter, check, local_program
from autoshard.reading import text_of
from autoshard.torch_private import FakeTensorMode, OpOverload, TorchDispatchMode, has_computed_kernel, parse_to, pytree

TABLE = Path(torch.__file__).parent.parent / "torchgen" / "packaged" / "ATen" / "native" / "native_functions.yaml"
ANY_DEVICE = {"CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}
NOT_ASKED = ("_c10d_functional", "c10d", "prim")  # collectives run wherever their group's backend does; prim asks for a tensor's device
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
    without_driver = torch.backends.cudnn.flags(enabled=False)  # which torch.lstm would ask, to choose cuDNN's kernel or its own
    with FakeTensorMode(), _WithoutDevice(), fake_grouped_mm(), without_driver:
        dry = _DryRun(program, graph, device)
        for record in program.records:
            dry.do(record, {})
    return tuple(dry.problems)


class _DryRun(Interpreter):
    def __init__(self, program: RankProgram, graph: Graph, device: str):
        super().__init__()
        self.program, self.graph, self.device = program, graph, device
        axes = program.mesh.axes
        self.rank = Rank(program.mesh, tuple(torch.zeros((), dtype=torch.int64, device=device) for _ in axes), (0,) * len(axes))
        self.problems: list[CannotRun] = []

    def do(self, record: Record, values: Mapping[str, Tensor]) -> None:
        """Notes why a record can't run. Its outputs are held in any case, so that all others are tried as well."""
        if not isinstance(record, (Redistribute, RunOp)):
            super().do(record, values)
            return
        with _Called(self.device) as called:
            try:
                super().do(record, values)
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                if not called.whys and NOT_LINKED not in str(error):
                    called.whys.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                self._hold_empty(record)
        if called.whys:
            self._hold_empty(record)
            op = self.graph.ops[record.op]
            target = op.target if isinstance(record, RunOp) else "redistribution"
            self.problems += [CannotRun(op.name, op.module, target, why) for why in dict.fromkeys(called.whys)]

    def _hold_empty(self, record: Redistribute | RunOp) -> None:
        self.held |= {slot.name: self._empty(slot) for slot in record.outputs if slot is not None}

    def _empty(self, slot: Slot) -> Tensor:
        return torch.empty(slot.shape_on(0), dtype=getattr(torch, slot.dtype), device=self.device)

    def load(self, record: LoadPlaceholder, values: Mapping[str, Tensor]) -> Tensor:
        return self._empty(record.slot)

    def outputs(self, record: Redistribute | RunOp) -> Sequence[Any]:
        asking = local_program(record, self.rank, [self.held[slot.name] for slot in record.inputs])
        return drive(asking, lambda call: uncomputed(call, self.program.mesh))

    def check(self, slot: Slot, value: Any, where: str) -> None:
        check(slot, value, "the dry run")


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


@dataclass(frozen=True)
class Entry:
    """A row of the table. keys: dispatch keys with a kernel of their own; None where the row has no dispatch table."""

    keys: frozenset[str] | None
    delegate: str


def has_kernel(operator: OpOverload, key: str) -> bool:
    """Whether an operator runs on the devices of a dispatch key ("CUDA"), as torch's own table says it, which every wheel holds: so it can
    be asked without such a device. The operators of other libraries are looked up in torch's dispatcher."""
    name = operator.name()
    if operator.namespace in NOT_ASKED:
        return True
    if operator.namespace != "aten" or (row := _entry(name.removeprefix("aten::"))) is None:
        return has_computed_kernel(name, key)
    return row.keys is None or bool(row.keys & {key, *ANY_DEVICE})


def _entry(name: str) -> Entry | None:
    row = _table().get(name)
    while row is not None and row.delegate:
        row = _table().get(row.delegate)
    return row


@cache
def _table() -> dict[str, Entry]:
    """Rows by operator and overload ("mm.out"). The file is YAML of one fixed form: a list of maps with scalars and one map of scalars.

        - func: mm(Tensor self, Tensor mat2) -> Tensor          has what mm.out has
          structured_delegate: mm.out
        - func: mm.out(...)                                      CPU and CUDA
          dispatch:
            CPU: mm_out_cpu
            CUDA: mm_out_cuda

    An operator without a dispatch table, or with a composite kernel, calls other operators; one with an inner loop for `Generic` tensors
    has it on CPU and CUDA; one that is generated from another (autogen) has that one's kernels.
    """
    rows: dict[str, Entry] = {}
    for text in re.split(r"^- func: ", text_of(TABLE, "operators"), flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^  (\w+): *(.*)$", text, re.MULTILINE))
        keys = re.findall(r"^    ([\w, ]+):", text, re.MULTILINE) if "dispatch" in fields else None
        name = text[: text.index("(")]
        split = None if keys is None else {key.strip() for line in keys for key in line.split(",")}
        generic = {"CPU", "CUDA"} if "ufunc_inner_loop" in fields else set()
        rows[name] = Entry(None if split is None else frozenset(split | generic), fields.get("structured_delegate", ""))
        for generated in filter(None, map(str.strip, fields.get("autogen", "").split(","))):
            rows.setdefault(generated, Entry(None, name))
    return rows
