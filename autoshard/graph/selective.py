"""Recomputation per tensor: which forward values the backward pass reads, and how it can get each of them.

    saved        a forward value that a backward op reads, or that a recomputed op reads; views count as their own ops
    region       a layer (an instance of a repeated block), or the ops between two layers
    kept         it stays on the device from its op to its last reader                                           always possible
    recomputed   its op runs again, from saved values    not of random ops, nor of values that another region's forward reads
    offloaded    it is copied to the host's memory after its last forward reader and copied back before its first backward reader

Where the backward pass first reads a value, `_Restoring` finds the ops that could run again for it, back to values that can't be
recomputed. That place is the same whatever is chosen, so that all choices are about one order of ops:

    alternatives(graph)          all of these ops as copies, and an op of kind SELECTED for every value that is no view: what the backward
                                 reads, from the forward's op (its first input) or from the copy (its second)
    selective(graph, chosen)     the graph of one choice: the copies that it recomputes, an OFFLOADED and a RELOADED op per offloaded value
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autoshard.graph.blocks import repeated_blocks
from autoshard.graph.casts import CAST
from autoshard.graph.random import is_random
from autoshard.graph.recompute import SUFFIX
from autoshard.graph.records import Const, Graph, Op, Ref, Value, reached
from autoshard.graph.rewriting import Rewriting

SELECTED, OFFLOADED, RELOADED = "selected", "offloaded", "reloaded"  # kinds of ops, and the ends of the last two's names
_LITERALS: tuple = ((Ref(0),), ())
IDENTITY = "aten.alias.default"
TO_HOST, FROM_HOST = "autoshard.offload.default", "autoshard.reload.default"


@dataclass(frozen=True)
class Offload:
    """Where an offloaded value is copied back: before this op. exposed: the share of its transfers that the step waits for."""

    before: str
    exposed: float = 0.0


@dataclass(frozen=True)
class Chosen:
    """A choice for every saved value: what is in neither is kept."""

    recomputed: frozenset[str] = frozenset()  # names of ops that run again
    offloaded: Mapping[str, Offload] = field(default_factory=dict)  # by value, "op.k"

    def __bool__(self) -> bool:
        return bool(self.recomputed or self.offloaded)


@dataclass(frozen=True)
class Alternatives:
    """The graph with every copy that could be made, and what each of them is."""

    graph: Graph
    copies: Mapping[str, str]  # name of the copy -> name of the op that it repeats
    selected: Mapping[str, str]  # name of the op of kind SELECTED -> value, "op.k"


def alternatives(graph: Graph) -> Alternatives:
    restoring = _Restoring(graph)
    selecting = _Selecting(graph, restoring, None)
    return Alternatives(selecting.rewritten(), selecting.copies, selecting.selected)


def selective(graph: Graph, chosen: Chosen) -> Graph:
    """The graph of a choice. ValueError where it names an op or a value that the graph can't recompute or offload."""
    if not chosen:
        return graph
    restoring = _Restoring(graph)
    copied = {graph.ops[j].name for steps in restoring.before.values() for kind, (j, _) in steps if kind == "copy"}
    saved = {name_of(graph, value) for steps in restoring.before.values() for kind, value in steps if kind == "select"}
    for what, names, known in (("recompute", chosen.recomputed, copied), ("offload", chosen.offloaded, saved)):
        if unknown := sorted(set(names) - known):
            raise ValueError(f"the plan has to {what} {unknown[0]!r}, which this model's backward pass does not read; plan this model")
    return _Selecting(graph, restoring, chosen).rewritten()


def name_of(graph: Graph, value: Value) -> str:
    """A value as text, "op.k"."""
    return f"{graph.ops[value[0]].name}.{value[1]}"


class _Restoring:
    """For each backward op, the steps in front of it that could give it the forward values that it reads.

    before: position -> steps, each ("copy", (op, 0)), ("hoist", (op, 0)) of a later cast, or ("select", value)
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.regions = _regions(graph)
        self.constant = constants(graph)
        self.casts = _backward_casts(graph, self.constant)
        self.restored: set[Value] = set()
        self.copied: set[int] = set()
        self.hoisted: set[tuple[str, Value]] = set()
        self.before: dict[int, list[tuple[str, Value]]] = {}
        for t, op in enumerate(graph.ops):
            if op.backward and not op.is_placeholder:
                self._restore(t, op.inputs)
        self._select_with_copies()

    def is_saved(self, value: Value) -> bool:
        op = self.graph.ops[value[0]]
        return not (op.backward or op.is_placeholder or value[0] in self.constant)

    def is_boundary(self, value: Value) -> bool:
        """Whether the forward of another region reads it, or a view of it."""
        region = self.regions[value[0]]
        return any(not is_view and self.regions[j] != region for j, is_view in readers_of(self.graph, value))

    def _restore(self, t: int, values: Iterable[Value]) -> None:
        waiting = [*values]
        steps: list[tuple[str, Value]] = []
        while waiting:
            value = waiting.pop()
            if value in self.restored:
                continue
            op = self.graph.ops[value[0]]
            if value[0] in self.casts and (cast := ("hoist", (self.casts[value[0]], 0))) not in self.hoisted:
                self.hoisted.add(cast)
                steps.append(cast)
                waiting += op.inputs
            if not self.is_saved(value):
                continue
            self.restored.add(value)
            if op.alias is None:
                steps.append(("select", value))
            if op.alias is not None or (not is_random(op) and not self.is_boundary(value)):
                if value[0] not in self.copied:
                    self.copied.add(value[0])
                    steps.append(("copy", (value[0], 0)))
                waiting += op.inputs
        if steps:
            forward = {cast: i for i, cast in self.casts.items()}
            self.before[t] = sorted(steps, key=lambda s: (forward.get(s[1][0], s[1][0]), s[0] == "select", s[1][1]))

    def _select_with_copies(self) -> None:
        """Every value is selected right behind its copy, also where it is read later."""
        at = {j: t for t, steps in self.before.items() for kind, (j, _) in steps if kind == "copy"}
        for t in sorted(self.before):
            for step in [s for s in self.before[t] if s[0] == "select" and at.get(s[1][0], t) < t]:
                self.before[t].remove(step)
                steps = self.before[at[step[1][0]]]
                steps.insert(1 + max(n for n, s in enumerate(steps) if s[1][0] == step[1][0]), step)


def _regions(graph: Graph) -> list[object]:
    places = repeated_blocks(graph).places
    regions: list[object] = []
    latest: object = None
    for op, place in zip(graph.ops, places, strict=True):
        if op.is_placeholder or op.backward:
            regions.append(None)
        elif place is None:
            regions.append(("after", latest))
        else:
            latest = (place.block, place.instance)
            regions.append(latest)
    return regions


def constants(graph: Graph) -> set[int]:
    """Placeholders, the casts of parameters, and views of these: no storage of theirs is an activation."""
    constant: set[int] = set()
    for i, op in enumerate(graph.ops):
        is_cast = op.target == CAST and len(op.inputs) == 1 and graph.ops[op.inputs[0][0]].kind == "parameter"
        if op.is_placeholder or is_cast or op.alias is not None and all(a in constant for a, _ in op.inputs):
            constant.add(i)
    return constant


def _backward_casts(graph: Graph, constant: set[int]) -> dict[int, int]:
    """Of a forward cast of a parameter, or a view of one, the backward op that does the same (graph.casts): a recomputed op reads it."""
    same: dict[tuple, int] = {}
    number: dict[int, int] = {}  # backward op -> the forward op that it repeats
    casts: dict[int, int] = {}
    for i in sorted(constant):
        op = graph.ops[i]
        if op.is_placeholder or graph.ops[graph.storage((i, 0))[0]].is_placeholder:
            continue
        key = (op.target, op.literals, tuple((number.get(a, a), k) for a, k in op.inputs))
        if not op.backward:
            same.setdefault(key, i)
        elif key in same:
            number[i] = same[key]
            casts.setdefault(same[key], i)
    return casts


class _Selecting(Rewriting):
    """One walk over the graph, which inserts the steps of `_Restoring`: all of them (chosen None), or those of a choice.

    late: what backward ops read instead of a forward value.
    """

    def __init__(self, graph: Graph, restoring: _Restoring, chosen: Chosen | None):
        super().__init__(graph)
        self.restoring, self.chosen = restoring, chosen
        self.copies: dict[str, str] = {}
        self.selected: dict[str, str] = {}
        self.on_host: dict[Value, Value] = {}  # old value: its copy there
        self.leave: dict[int, list[Value]] = {}  # old index of the last forward reader -> values that are then offloaded
        self.back: dict[int, list[Value]] = {}  # old index of the op before which they are copied back
        if chosen is not None:
            self._plan_offloads(chosen)
        self.live = self._chosen_steps(chosen) if chosen is not None else None

    def rewritten(self) -> Graph:
        hoisted = set()
        for i, op in enumerate(self.source.ops):
            for value in self.back.get(i, ()):
                self._reload(value)
            for kind, value in self.restoring.before.get(i, ()):
                if self.live is not None and (kind, value) not in self.live:
                    continue
                if kind == "hoist":
                    hoisted.add(value[0])
                    self.keep(value[0], late=True)
                elif kind == "copy":
                    self._copy(value[0])
                elif self.chosen is None:
                    self._select(value)
            if i not in hoisted:
                self.keep(i, late=op.backward)
            for value in self.leave.get(i, ()):
                self._offload(value)
        return self.graph()

    def _copy(self, i: int) -> None:
        op, casts = self.source.ops[i], self.restoring.casts
        name = op.name + SUFFIX
        self.copies[name] = op.name
        inputs = tuple(self.read((casts[a], k)) if a in casts else self.read((a, k), late=True) for a, k in op.inputs)
        at, _ = self.add(replace(op, name=name, inputs=inputs, backward=True))
        self.late |= {(i, k): (at, k) for k in range(len(op.outputs)) if self._reads_copy((i, k))}

    def _reads_copy(self, value: Value) -> bool:
        """Whether the backward reads this output of a copied op from the copy."""
        if self.chosen is None:
            return True
        return name_of(self.source, value) not in self.chosen.offloaded and not self._is_kept_output(value)

    def _is_kept_output(self, value: Value) -> bool:
        return self.source.ops[value[0]].alias is None and self.restoring.is_saved(value) and self.restoring.is_boundary(value)

    def _select(self, value: Value) -> None:
        op, name = self.source.ops[value[0]], name_of(self.source, value)
        has_copy = value in self.late and not self._is_kept_output(value)
        inputs = (self.read(value), *((self.late[value],) if has_copy else ()))
        self.selected[f"{name}.{SELECTED}"] = name
        selected = Op(f"{name}.{SELECTED}", IDENTITY, inputs, _LITERALS, (op.outputs[value[1]],), SELECTED, op.module, backward=True)
        self.late[value] = self.add(selected)

    # -- of a choice

    def _plan_offloads(self, chosen: Chosen) -> None:
        for name, offload in chosen.offloaded.items():
            op, _, k = name.rpartition(".")
            value = (self.source.index[op], int(k))
            if offload.before not in self.source.index:
                raise ValueError(f"the plan copies {name!r} back before {offload.before!r}, an op that this model lacks; plan this model")
            last = max((j for j, _ in readers_of(self.source, value)), default=value[0])
            self.leave.setdefault(last, []).append(value)
            self.back.setdefault(self.source.index[offload.before], []).append(value)
        read = {value: t for t, steps in self.restoring.before.items() for kind, value in steps if kind == "select"}
        for values in self.back.values():
            values.sort(key=lambda value: (read[value], min((j for j, _ in readers_of(self.source, value, backward=True)), default=0)))

    def _chosen_steps(self, chosen: Chosen) -> set[tuple[str, Value]]:
        """The steps of the choice: its copies, and the casts that these read."""
        casts, copies = self.restoring.casts, [self.source.index[name] for name in chosen.recomputed]
        read = reached(copies, lambda i: [a for a, _ in self.source.ops[i].inputs if a in casts])
        hoisted = {("hoist", (casts[a], 0)) for i in read for a, _ in self.source.ops[i].inputs if a in casts}
        return hoisted | {("copy", (i, 0)) for i in copies}

    def _offload(self, value: Value) -> None:
        assert self.chosen is not None
        op, name = self.source.ops[value[0]], name_of(self.source, value)
        literals = ((Ref(0),), (("exposed", self.chosen.offloaded[name].exposed),))
        outputs = (op.outputs[value[1]],)
        self.on_host[value] = self.add(Op(f"{name}.{OFFLOADED}", TO_HOST, (self.read(value),), literals, outputs, OFFLOADED, op.module))

    def _reload(self, value: Value) -> None:
        source = self.on_host[value]
        host, name = self.ops[source[0]], f"{name_of(self.source, value)}.{RELOADED}"
        literals = (host.literals[0], (("device", Const("device", "cpu")), *host.literals[1]))
        reloaded = replace(host, name=name, target=FROM_HOST, inputs=(source,), literals=literals, kind=RELOADED, backward=True)
        self.late[value] = self.add(reloaded)


def readers_of(graph: Graph, value: Value, backward: bool = False) -> Iterator[tuple[int, bool]]:
    """The forward, or backward, ops that read the value or a view of it, and whether each is such a view."""
    waiting = [value]
    while waiting:
        for j, a in graph.users.get(waiting.pop(), ()):
            op = graph.ops[j]
            if op.backward == backward:
                yield j, op.alias == a
            waiting += [(j, k) for k in range(len(op.outputs))] if op.alias == a else []
