"""The casts of mixed precision. A model is captured in the dtypes in which it computes; `mixed` adds the casts of its Precision:

    parameter   stored -> param_dtype, once before its first reader in the forward and once more before its first reader in the backward
                (views in between are taken again, too): between them only the stored parameter is held
    input       as the caller passes it -> param_dtype
    gradient    param_dtype -> reduce_dtype, [sum over the ranks], reduce_dtype -> stored
    output      its dtype -> output_dtype; its tangent goes the other way

The cast of a sum comes when LAG more gradients have been computed, so that kernels don't wait for the sum meanwhile.

A large parameter is cast as its rank holds it and gathered after that: fewer bytes are sent, and the cast needn't wait (`early_casts`).
Of others the layout in which they are cast is one like any other, and so is priced. Where a gradient's partial sums are
added is part of the policy: an op of kind "cast_then_reduce" leaves them pending (`pending`), one of kind "reduce_then_cast" wants none.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from autoshard.graph.accumulation import ACCUMULATED, KEPT
from autoshard.graph.records import Const, Graph, Op, Ref, Tensor, Value, reached
from autoshard.graph.rewriting import Rewriting
from autoshard.precision import FLOATS, Precision

CAST = "aten._to_copy.default"
CAST_THEN_REDUCE, REDUCE_THEN_CAST = "cast_then_reduce", "reduce_then_cast"
LARGE = 2**22  # elements of a parameter whose cast runs early; casts of smaller ones are many launches, which bounds would lose
LAG = 12  # gradients: about those of a block of a transformer


def mixed(graph: Graph, precision: Precision, stored: Mapping[str, str]) -> tuple[Graph, dict[Value, Value]]:
    """The graph with the casts of the policy, and its value for each of the given graph.

    graph: captured in the dtypes in which it computes. stored: the dtypes of parameters and inputs as the module and the caller hold
    them, by name.
    """
    mixing = _Mixing(graph, precision, stored)
    return mixing.mixed(), mixing.values


class _Mixing(Rewriting):
    """One walk over the graph, which inserts the casts."""

    def __init__(self, graph: Graph, precision: Precision, stored: Mapping[str, str]):
        super().__init__(graph)
        self.precision = precision
        self.stored = {
            i: dtype
            for i, op in enumerate(graph.ops)
            if op.kind in ("parameter", "input") and op.outputs[0] and (dtype := stored.get(op.name)) in FLOATS and op.output.dtype != dtype
        }
        self.views = {i for i in self.stored if graph.ops[i].kind == "parameter"}  # cast parameters and their views in the forward
        for i, op in enumerate(graph.ops):
            if op.alias is not None and not op.backward and len(op.outputs) == 1 and all(a in self.views for a, _ in op.inputs):
                self.views.add(i)
        self.returned = {r.value: int(r.name) for r in graph.results if r.kind == "output" and r.value is not None and r.name.isdigit()}
        self.out_of_tangent = {f"tangent_{k}" for value, k in self.returned.items() if self._is_cast_output(value)}
        self.gradients: dict[Value, str] = {}  # of a gradient, the dtype in which its parameter is stored
        for result in graph.results:
            if result.kind == "gradient" and result.value is not None and result.name in graph.index:
                i = graph.index[result.name]
                self.gradients[result.value] = self.stored.get(i, graph.tensor((i, 0)).dtype)
        self.casts: dict[tuple[Value, bool], Value] = {}  # (old value, whether its reader is of the backward pass): new value
        self.ends: dict[Value, Value] = {}  # old value: the new value that the program returns in its place
        self.summed: deque[Callable[[], None]] = deque()  # the casts of sums that are to come, oldest first

    def mixed(self) -> Graph:
        waiting: list[Value] = []  # values of placeholders, which come first
        for i, op in enumerate(self.source.ops):
            if not op.is_placeholder:
                while waiting:
                    self._finish(waiting.pop(0))
            self.keep(i, inputs=tuple(self._read(value, op) for value in op.inputs), outputs=self._outputs(i, op))
            for k in range(len(op.outputs)):
                waiting.append((i, k)) if op.is_placeholder else self._finish((i, k))
        for value in waiting:
            self._finish(value)
        while self.summed:
            self.summed.popleft()()
        ends = [r for r in self.source.results if r.kind == "output" or (r.kind == "gradient" and r.value in self.gradients)]
        return self.graph({r: self.ends[r.value] for r in ends if r.value in self.ends})

    def _is_cast_output(self, value: Value) -> bool:
        dtype = self.source.tensor(value).dtype
        return self.precision.output_dtype is not None and dtype in FLOATS and dtype != self.precision.output_dtype

    def _outputs(self, i: int, op: Op) -> tuple[Tensor | None, ...]:
        if i in self.stored:
            return (replace(op.output, dtype=self.stored[i]),)
        if op.kind == "tangent" and op.name in self.out_of_tangent:
            return (replace(op.output, dtype=self.precision.output_dtype),)
        return op.outputs

    def _read(self, value: Value, reader: Op) -> Value:
        """The value as this op reads it; the first reader of a pass gets a cast in front of it where the value is stored otherwise."""
        i, k = value
        op, again = self.source.ops[i], reader.backward and i in self.views
        if not again and (i not in self.stored and op.name not in self.out_of_tangent):
            return self.read(value)
        if (value, again) not in self.casts:
            if op.is_placeholder:
                computed = self.source.tensor(value).dtype
                name = f"{op.name}_{computed}{'_backward' if again else ''}"
                self.casts[value, again] = self._cast(name, self.read(value), computed, "compute", reader.module, reader.backward)
            else:
                inputs = tuple(self._read(base, reader) for base in op.inputs)
                at, _ = self.add(replace(op, name=f"{op.name}_backward", inputs=inputs, backward=True))
                self.casts[value, again] = (at, k)
        return self.casts[value, again]

    def _finish(self, value: Value) -> None:
        """Adds the casts of a gradient or an output behind the op that computes it."""
        i, k = value
        op, at = self.source.ops[i], self.read(value)
        if value in self.returned and self._is_cast_output(value):
            wanted = self.precision.output_dtype
            assert wanted is not None
            self.ends[value] = self._cast(f"output_{self.returned[value]}_{wanted}", at, wanted, "compute", op.module, False)
        if value in self.gradients:
            computed, stored = self.source.tensor(value).dtype, self.gradients[value]
            reduced = self.precision.reduce_dtype or computed
            name = f"{op.name}_gradient" if len(op.outputs) == 1 else f"{op.name}_gradient_{k}"
            if reduced != computed:
                at = self._cast(f"{name}_{reduced}", at, reduced, CAST_THEN_REDUCE, op.module, True)
            self.ends[value] = at
            if stored != reduced:
                self.summed.append(partial(self._finish_sum, value, f"{name}_{stored}", stored, op.module))
            if len(self.summed) > LAG:
                self.summed.popleft()()

    def _finish_sum(self, value: Value, name: str, dtype: str, module: str) -> None:
        self.ends[value] = self._cast(name, self.ends[value], dtype, REDUCE_THEN_CAST, module, True)

    def _cast(self, name: str, source: Value, dtype: str, kind: str, module: str, backward: bool) -> Value:
        tensor = self.ops[source[0]].outputs[source[1]]
        assert tensor is not None
        while name in self.source.index:
            name += "_cast"
        literals = ((Ref(0),), (("dtype", Const("dtype", dtype)),))
        return self.add(Op(name, CAST, (source,), literals, (replace(tensor, dtype=dtype),), kind, module, None, backward))


# Ops that the partial sums of a gradient pass on their way to its cast, beside views.
ADDITIONS = ("aten.add.Tensor", "aten.clone.default", CAST)


def pending(graph: Graph) -> frozenset[Value]:
    """The values whose partial sums have to stay pending: those on the way to a cast of kind "cast_then_reduce", through views and
    additions, that nothing else reads."""
    def is_alone(value: Value) -> bool:
        return value not in graph.returned and len(graph.users[value]) < 2 and not graph.ops[value[0]].is_placeholder

    def summands(value: Value) -> tuple[Value, ...]:
        op = graph.ops[value[0]]
        return op.inputs if op.alias is not None or op.target in ADDITIONS else ()

    return frozenset(reached((op.inputs[0] for op in graph.ops if op.kind == CAST_THEN_REDUCE), summands, is_alone))


def with_shared_casts(graph: Graph) -> Graph:
    """The graph in which each parameter is cast (and gathered) once in the backward pass: of casts of parameters there and of views of
    these, equal ones become one. Recomputed ops have copies of the casts of the forward pass."""
    first: dict[tuple, int] = {}
    same: dict[int, int] = {}
    shared: set[int] = set()
    for i, op in enumerate(graph.ops):
        is_cast = op.target == CAST and graph.ops[op.inputs[0][0]].kind == "parameter"
        if op.backward and (is_cast or op.alias is not None and all(a in shared for a, _ in op.inputs)):
            shared.add(i)
            j = first.setdefault((op.target, op.literals, tuple((same.get(a, a), k) for a, k in op.inputs)), i)
            if j != i:
                same[i] = j
    if not same:
        return graph
    new = Rewriting(graph)
    for i, op in enumerate(graph.ops):
        if i in same:
            new.values |= {(i, k): new.read((same[i], k)) for k in range(len(op.outputs))}
        else:
            new.keep(i)
    return new.graph()


def early_casts(graph: Graph) -> set[int]:
    """Casts of large parameters, inputs and views of these: they can run as soon as the program begins."""
    there, casts = set[int](), set[int]()
    for i, op in enumerate(graph.ops):
        is_cast = op.target == CAST and op.kind != ACCUMULATED and bool(op.inputs)
        if op.is_placeholder or op.kind == KEPT or ((is_cast or op.is_view) and op.inputs[op.alias or 0][0] in there):
            if is_cast and math.prod(op.output.shape) >= LARGE:
                casts.add(i)
            if not is_cast or i in casts:
                there.add(i)
    return casts
