"""The program to plan, as frozen records without torch: ops in execution order, values, results.

A value is `(op index, output index)`. A time is an op index. Storage: the output of an op with `alias = i` is a view, which shares
the storage of input i, or writes into it (WRITES); every other output owns its bytes, from its op until the last op that reads it or
one of its views.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
Value = tuple[int, int]

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

DELTA_CHUNK = 64  # tokens that kernels of the gated delta rule take at once, one chunk after the other
FIRST_MATRIX = {"aten.mm.default": 0, "aten.addmm.default": 1}
TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.numpy_T.default", "aten.mT.default")
PLACEHOLDERS = ("parameter", "buffer", "input", "tangent")
# With an alias they write into it: a program's buffer or input, whose new value they are and which nothing reads afterwards
WRITES = ("aten.index_copy.default", "aten.index_put.default")


@dataclass(frozen=True)
class Tensor:
    """Global shape and dtype (torch's name without `torch.`) of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Ref:
    """In `Op.literals`: the place of `op.inputs[index]`."""

    index: int


@dataclass(frozen=True)
class Const:
    """In `Op.literals`: a torch constant by name. kind: dtype, device, layout, memory_format."""

    kind: str
    text: str


@dataclass(frozen=True)
class Fused:
    """Of an op that shares a kernel: how much of each input its kernel reads for it, and of each output it writes, 0 to 1."""

    reads: tuple[float, ...]
    writes: tuple[float, ...]
    launches: bool  # the first op of a kernel
    held: tuple[bool, ...] = ()  # of each output, whether it takes memory: not where kernels compute it as they go, of what is there


@dataclass(frozen=True)
class Op:
    """One node. `literals` is `(args, kwargs as sorted pairs)`: nested tuples of numbers, strings, None, Ref, Const."""

    name: str
    target: str  # "aten.mm.default"; for placeholders the kind
    inputs: tuple[Value, ...]
    literals: tuple
    outputs: tuple[Tensor | None, ...]
    # compute, random (graph.random), one of PLACEHOLDERS, kept or accumulated (graph.accumulation), or a gradient's cast:
    # cast_then_reduce, reduce_then_cast
    kind: str = "compute"
    module: str = ""  # the module that the op comes from, "h.0.attn"
    alias: int | None = None  # the input whose storage the output shares
    backward: bool = False
    fused: Fused | None = None  # of a compiled program: what the op adds to the kernel that it shares with others

    @property
    def is_placeholder(self) -> bool:
        return self.kind in PLACEHOLDERS

    @property
    def is_view(self) -> bool:
        return self.alias is not None and self.target not in WRITES

    def holds(self, a: int) -> bool:
        """Whether input a has to stay on the device until the op runs; not the first of an op that selects (graph.selective)."""
        return self.kind != "selected" or a > 0

    @property
    def output(self) -> Tensor:
        assert self.outputs[0] is not None, f"{self.name} has no tensor as output"
        return self.outputs[0]

    @property
    def signature(self) -> tuple:
        """All that candidates depend on except for the input tensors, which `Graph.signature` adds. Costs depend on `fused`, too."""
        return (self.target, self.literals, self.outputs, self.kind, self.alias)


@dataclass(frozen=True)
class Result:
    """What the program returns. kind: output, gradient (`name` is the parameter or input) or buffer (its new value)."""

    kind: str
    name: str
    value: Value | None


@dataclass(frozen=True)
class Graph:
    """Ops in execution order (placeholders first) and what the program returns."""

    ops: tuple[Op, ...]
    results: tuple[Result, ...]
    tied: tuple[tuple[str, str], ...] = ()  # (second name, name) of a parameter that a model holds under several names
    # by a name that the graph which was given has for them (a node, `file.py:line`): (op name, output)
    called: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict, compare=False)

    def tensor(self, value: Value) -> Tensor:
        tensor = self.ops[value[0]].outputs[value[1]]
        assert tensor is not None, f"value {value} of {self.ops[value[0]].name} is not a tensor"
        return tensor

    def input_tensors(self, index: int) -> tuple[Tensor, ...]:
        return tuple(self.tensor(v) for v in self.ops[index].inputs)

    def signature(self, index: int) -> tuple:
        return (self.ops[index].signature, self.input_tensors(index))

    @cached_property
    def users(self) -> dict[Value, tuple[tuple[int, int], ...]]:
        """For each value the (op index, argument index) pairs that read it, in order; results are not counted."""
        pairs = grouped((value, (i, a)) for i, op in enumerate(self.ops) for a, value in enumerate(op.inputs))
        return {value: tuple(readers) for value, readers in pairs.items()}

    @cached_property
    def returned(self) -> frozenset[Value]:
        """The values of results."""
        return frozenset(result.value for result in self.results if result.value is not None)

    def only_user(self, value: Value) -> int | None:
        """The op that alone reads the value, with one of its arguments; None where there are others, or it is a result."""
        users = self.users.get(value, ())
        return users[0][0] if len(users) == 1 and value not in self.returned else None

    @cached_property
    def index(self) -> dict[str, int]:
        """Op index by op name; parameters, buffers and inputs are named by their qualified names."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def names(self) -> tuple[Mapping[str, tuple[Value, ...]], ...]:
        """What names mean, those that come first first: parameters, buffers and inputs; `called`; ops; module paths, which mean the last
        value that the module's forward computes."""
        stored = {op.name: ((i, 0),) for i, op in enumerate(self.ops) if op.is_placeholder}
        called = {name: tuple((self.index[op], k) for op, k in of if op in self.index) for name, of in self.called.items()}
        paths: dict[str, tuple[Value, ...]] = {}
        for i, op in enumerate(self.ops):
            parts = op.module.split(".") if op.module and not op.backward and op.outputs[0] is not None else []
            paths |= {".".join(parts[:k]): ((i, 0),) for k in range(1, len(parts) + 1)}
        stored |= {second: stored[name] for second, name in self.tied}
        return stored, called, {op.name: ((i, 0),) for i, op in enumerate(self.ops)}, paths

    @property
    def trains(self) -> bool:
        return any(result.kind == "gradient" for result in self.results)

    @cached_property
    def parameters(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.ops) if op.kind == "parameter"}

    def storage(self, value: Value) -> Value:
        """The value that owns the bytes of `value`: views are followed to their base."""
        op = self.ops[value[0]]
        while op.alias is not None:
            value = op.inputs[op.alias]
            op = self.ops[value[0]]
        return value

    @cached_property
    def last_use(self) -> dict[Value, int]:
        """For each value the last time at which it, or a view of it, is read; len(ops) when the program returns it.

        A gradient goes to its parameter, and the new value of a buffer to its buffer, as soon as it is computed: its last use is the
        time of its op.
        """
        last: dict[Value, int] = {}
        for result in self.results:
            if result.value is not None:
                end = len(self.ops) if result.kind == "output" else result.value[0]
                last[result.value] = max(last.get(result.value, 0), end)
        for i in range(len(self.ops) - 1, -1, -1):
            op = self.ops[i]
            if op.alias is not None:  # a view: its base lives as long as the view does
                base = op.inputs[op.alias]
                ends = [last.get((i, k), i) for k in range(len(op.outputs))]
                last[base] = max(last.get(base, i), *ends)
            for a, value in enumerate(op.inputs):
                if op.holds(a):
                    last[value] = max(last.get(value, i), i)
        return last

    def is_by_columns(self, index: int) -> bool:
        """Whether an op multiplies a matrix whose columns are contiguous, a transposed one, by another: as a weight's gradient does."""
        op = self.ops[index]
        at = FIRST_MATRIX.get(op.target)
        return at is not None and len(op.inputs) > at and self.ops[op.inputs[at][0]].target in TRANSPOSES

    def fingerprint(self) -> str:
        """A hash of ops, wiring, literals, shapes, results and ties; the same on every machine."""
        ops = ((op.name, op.target, op.inputs, op.literals, op.outputs, op.kind, op.alias) for op in self.ops)
        return hash_of(*ops, (self.results, self.tied))

    def structure(self) -> str:
        """As `fingerprint` without sizes: equal for the same model with another batch size or width."""
        ranks = (tuple(None if t is None else len(t.shape) for t in op.outputs) for op in self.ops)
        return hash_of(*((op.name, op.target, op.inputs, of, op.kind, op.alias) for op, of in zip(self.ops, ranks)), self.results)

    def origin(self, value: Value) -> int:
        """The op that a value comes from, when views, casts and other ops of one input are followed back."""
        while len(self.ops[value[0]].inputs) == 1:
            value = self.ops[value[0]].inputs[0]
        return value[0]


def hash_of(*rows: object) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()


def replace_refs(literals: object, values: tuple) -> object:
    """The nested literals with each Ref(k) replaced by values[k]; tuples stay tuples."""
    if isinstance(literals, Ref):
        return values[literals.index]
    if isinstance(literals, tuple):
        return tuple(replace_refs(item, values) for item in literals)
    return literals


def leaves(literals: object) -> Iterator[object]:
    """All non-tuple items of nested literals, in order."""
    if isinstance(literals, tuple):
        for item in literals:
            yield from leaves(item)
    else:
        yield literals


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """By first the seconds of the pairs, both in the order in which they come."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def reached(start: Iterable[T], further: Callable[[T], Iterable[T]], where: Callable[[T], bool] = lambda _: True) -> dict[T, None]:
    """The items of `start`, and all to which `further` leads from them, each once in the order in which it is found; only those `where`."""
    items = dict.fromkeys(filter(where, start))
    waiting = list(items)
    while waiting:
        new = dict.fromkeys(item for item in further(waiting.pop()) if item not in items and where(item))
        items |= new
        waiting += new
    return items


def is_dense(shape: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...], offset: int | None) -> bool:
    """Whether a view by these strides is a reshape of a contiguous tensor of this shape: it has the same offset and all elements."""
    step = 1
    for n, s in reversed(list(zip(size, stride, strict=True))):
        if n != 1 and s != step:
            return False
        step *= n
    return not offset and step == math.prod(shape)
