"""Where in the list of tasks those of each link stand: what is moved, before or after which op.

    overlap           right after the op that produces the value, unless the value is read in another phase: parameters, and activations
                      that the backward pass reads. These are fetched late: when the reader of the fetch `prefetch` positions
                      earlier is about to run. A view of what is fetched, moved further, is a fetch of its own.
                      As in a run (runtime/overlap.py) none of them begins before its bytes, until they are read, fit into the plan's
                      peak and what `spare_bytes` adds to it.
    no overlap        right before the reader (results: after their producer), all on one stream
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from autoshard.cost import PricedCollective, TimedStage, spare_bytes
from autoshard.formulate import Formulation, TensorEdge
from autoshard.graph import ACCUMULATED, KEPT, REDUCE_THEN_CAST, early_casts
from autoshard.layout import replicated, text
from autoshard.problem import held, usage_profile
from autoshard.routes import Step

REST = "rest"  # the phase of what is there when a step begins


class LinkFacts:
    """What all plans of a formulation have in common. It doesn't hold the formulation, with which it is forgotten."""

    def __init__(self, formulation: Formulation):
        self.graph, self.links = formulation.graph, formulation.tensor_edges
        ops, n = self.graph.ops, len(self.graph.ops)
        self.hubs = {node: value for value, node in formulation.hubs.items()}
        self.phases = [REST if op.is_placeholder or op.kind == KEPT else "backward" if op.backward else "forward" for op in ops]
        self.last_phase = "backward" if "backward" in self.phases else "forward"
        self.reader = [n] * len(self.links)  # the first op that reads the moved value; n where none does
        self.inputs: dict[int, list[int]] = {}  # op -> the links of its inputs
        self.gradients: dict[int, int] = {}  # parameter -> the link of its gradient
        self.fills = {link.b: k for k, link in enumerate(self.links) if link.b in self.hubs}
        self.hub_links = frozenset(self.fills.values())
        self.results = [False] * len(self.links)
        for k, link in enumerate(self.links):
            self._read(k, link, n)
        kinds = {i: op.kind for i, op in enumerate(ops)}
        self.fetches = [k for k, link in enumerate(self.links) if kinds.get(link.b) == KEPT]
        self.reductions = [k for k, link in enumerate(self.links) if kinds.get(link.a) == ACCUMULATED]
        self.of_gradients = self._of_gradients({i for i, kind in kinds.items() if kind in (ACCUMULATED, REDUCE_THEN_CAST)})
        self.bases = {i: op.inputs[op.alias or 0][0] for i, op in enumerate(ops) if op.is_view}
        self.casts = early_casts(self.graph)
        self.copies = np.array([-1 if usage.edge is None else usage.edge for usage in formulation.problem.usages], dtype=np.int64)
        self.ends = np.array([(link.a, link.b) for link in self.links], dtype=np.int64).reshape(-1, 2).T
        numbers: dict[tuple, int] = {}  # links between layers of equal tensors and layouts have one
        alike = ((id(link.tensor), id(link.source_layouts), id(link.target_layouts)) for link in self.links)
        self.alike = [numbers.setdefault(key, len(numbers)) for key in alike]
        self.known: dict[tuple, tuple[Step, ...]] = {}
        self.internal: dict[tuple, tuple[tuple[PricedCollective, ...], tuple[TimedStage, ...]]] = {}

    def _read(self, k: int, link: TensorEdge, n: int) -> None:
        if k in self.hub_links:
            self.reader[k] = min((i for i, _ in self.graph.users.get(self.hubs[link.b], ())), default=n)
        elif link.b < n and not self.graph.ops[link.b].is_placeholder:
            self.reader[k] = link.b
            self.inputs.setdefault(link.b, []).append(k)
        else:
            self.results[k] = True
            if link.b < n:
                self.gradients[link.b] = k

    def _of_gradients(self, sums: set[int]) -> set[int]:
        """The links to a sum of gradients or a parameter, and those to views that are read by such links alone."""
        read: dict[int, list[int]] = {}  # by the node that is read
        into: dict[int, list[int]] = {}  # by the node that reads
        for k, link in enumerate(self.links):
            read.setdefault(link.a, []).append(k)
            into.setdefault(link.b, []).append(k)
        reductions = {k for k, link in enumerate(self.links) if link.b in sums or self.gradients.get(link.b) == k}
        places = [(i, i) for i, op in enumerate(self.graph.ops) if op.is_view] + [(value[0] + 0.5, hub) for hub, value in self.hubs.items()]
        for _, node in sorted(places, reverse=True):  # what reads a node first
            if node in read and reductions.issuperset(read[node]):
                reductions.update(into.get(node, ()))
        return reductions

    def steps(self, formulation: Formulation, choice: Sequence[int]) -> list[tuple[Step, ...]]:
        """The steps of the route of each link."""
        keys = list(zip(self.alike, *np.asarray(choice, dtype=np.int64)[self.ends].tolist()))
        for link, key in zip(self.links, keys):
            if key not in self.known:
                if (route := formulation.route(link, choice)) is None:
                    name, *ends = self.graph.ops[link.value[0]].name, link.source_layouts[key[1]], link.target_layouts[key[2]]
                    between = " to ".join(map(text, ends))
                    raise ValueError(f"the plan moves {name} from {between}, for which there is no route; plan again")
                self.known[key] = route.steps
        return [self.known[key] for key in keys]


KNOWN: WeakKeyDictionary[Formulation, LinkFacts] = WeakKeyDictionary()  # of formulations of which a plan was simulated


def facts_of(formulation: Formulation) -> LinkFacts:
    if formulation not in KNOWN:
        KNOWN[formulation] = LinkFacts(formulation)
    return KNOWN[formulation]


class LinkPositions:
    """The position of each link's tasks as a slot: -1 at the beginning, 2 i before op i, 2 i + 1 after it, 2 n at the end."""

    def __init__(self, formulation: Formulation, facts: LinkFacts, choice: tuple[int, ...], overlap: bool, prefetch: int):
        self.facts, self.graph, self.links = facts, formulation.graph, formulation.tensor_edges
        self.steps, n = facts.steps(formulation, choice), len(self.graph.ops)
        self.moved = sorted(facts.hub_links.union(k for k, steps in enumerate(self.steps) if steps))  # or read as they are by several ops
        self.moved_hubs = {self.links[k].b for k in facts.hub_links if self.steps[k]}
        self.origins = self._origins()
        self.cast_of: dict[int, int] = {}  # of nodes whose value is a cast of a parameter, which runs where its first fetch begins
        self.early = self._early(formulation, choice, facts.casts if overlap else set())
        self.fetched = self._fetched()
        self.late: set[int] = set()  # fetches
        self.later: set[int] = set()  # and what begins when the compute stream is about to run an op
        times, total = usage_profile(formulation.problem, choice)
        total = np.append(total, 0.0)  # at -1: before the first time
        self.peak = float(total.max())
        self.limit = self.peak + spare_bytes(self.peak, formulation.problem.usage_limit)
        self.live = total[np.searchsorted(times, np.arange(n), side="right") - 1]  # bytes during each op, with what begins early
        of, amounts = facts.copies, held(formulation.problem, choice)
        self.sizes = np.bincount(of[of >= 0], amounts[of >= 0], len(self.links)).tolist()
        self.slots = self._overlapped(prefetch) if overlap else {k: self._at_need(k) for k in self.moved}
        filled = {self.links[k].b: self.slots[k] for k in facts.hub_links}
        self.slots = {k: max(slot, filled.get(self.links[k].a, -1)) for k, slot in self.slots.items()}
        self.unhurried = self.late | facts.of_gradients if overlap else set()

    def _at_need(self, k: int) -> int:
        reader = self.facts.reader[k]
        return self._when_produced(k) if self.facts.results[k] or reader == len(self.graph.ops) else 2 * reader

    def _when_produced(self, k: int) -> int:
        """After the op that produces the value: a parameter or input, or a view of it, is there at the begin; returned, at the end."""
        i = self.links[k].value[0]
        if i in self.early:
            return 2 * len(self.graph.ops) if self.facts.results[k] else -1
        return 2 * self.origins.get(i, i) + 1

    def _early(self, formulation: Formulation, choice: tuple[int, ...], casts: set[int]) -> set[int]:
        """Ops whose values can be fetched from the begin on: parameters and inputs, views of them and casts of shards of these."""
        early, full = {i for i, phase in enumerate(self.facts.phases) if phase == REST}, replicated(len(formulation.mesh.axes))
        for i in sorted(self.facts.bases.keys() | casts):
            if self._moves_an_input(i):
                continue
            base = self.facts.bases.get(i, -1)
            if base in early:
                early.add(i)
                self.cast_of |= {i: self.cast_of[base]} if base in self.cast_of else {}
            elif i in casts and self.graph.ops[i].inputs[0][0] in early and formulation.candidate(i, choice).outputs[0] != full:
                early.add(i)
                self.cast_of[i] = i
        of_ops = {hub: self.cast_of[i] for hub, (i, _) in self.facts.hubs.items() if hub not in self.moved_hubs and i in self.cast_of}
        self.cast_of |= of_ops
        return early

    def _fetched(self) -> set[int]:
        """Those, and views of what is fetched: gathered further, they are a fetch that begins when the first one has ended."""
        fetched = set(self.early)
        for i in sorted(self.facts.bases):
            if i not in fetched and all(self.links[k].value[0] in fetched for k in self.facts.inputs.get(i, ())):
                fetched.add(i)
        return fetched

    def _moves_an_input(self, i: int) -> bool:
        return any(self.steps[k] or self.links[k].a in self.moved_hubs for k in self.facts.inputs.get(i, ()))

    def _origins(self) -> dict[int, int]:
        """Of each view of a value that nothing moves, the op that computes it: both are there at once."""
        origins: dict[int, int] = {}
        for i, base in self.facts.bases.items():
            if not self._moves_an_input(i):
                origins[i] = origins.get(base, base)
        return origins

    def _overlapped(self, prefetch: int) -> dict[int, int]:
        slots, reader = {}, self.facts.reader
        phase = {i: REST if i in self.fetched else phase for i, phase in enumerate(self.facts.phases)}  # of nodes: the phase of their value
        waiting, fetches = [], set(self.facts.fetches)
        for k in self.moved:  # those into hubs come first
            link, read = self.links[k], self._phase_of(reader[k], phase[self.links[k].a])
            if k in self.facts.hub_links:
                phase[link.b] = read if self.steps[k] else phase[link.a]
            slots[k] = self._when_produced(k)
            if self.facts.results[k] or not self.steps[k] or k in fetches:
                continue
            if phase[link.a] != read:
                waiting.append(k)
            elif (first := self._first_with_room(k, (slots[k] + 1) // 2)) > (slots[k] + 1) // 2:
                slots[k] = 2 * first
                self.later.add(k)
        waiting.sort(key=lambda k: reader[k])
        self.late = set(waiting)
        self.later |= self.late
        first = 0
        for n, k in enumerate(waiting):
            first = self._first_with_room(k, max(first, reader[waiting[n - prefetch]] if n >= prefetch else 0))
            slots[k] = max(2 * first or -1, -1 if self.links[k].value[0] in self.fetched else slots[k])
        for k in self.moved:
            if not self.steps[k] and self.links[k].value[0] in self.fetched and not self.facts.results[k]:
                slots[k] = self._when_there(self.links[k].a, slots)
        return slots

    def _when_there(self, node: int, slots: dict[int, int]) -> int:
        """The position from which on the value of a node is there that is early or fetched."""
        if node in self.early:
            return -1
        links = [self.facts.fills[node]] if node in self.facts.fills else self.facts.inputs.get(node, ())
        return max((slots[k] if self.steps[k] else self._when_there(self.links[k].a, slots) for k in links), default=-1)

    def _first_with_room(self, k: int, first: int) -> int:
        """The first op, from `first` on, from which on the bytes of link k fit until its reader; they count from there on."""
        full = np.flatnonzero(self.live[first : self.facts.reader[k]] + self.sizes[k] > self.limit)
        first += int(full[-1]) + 1 if len(full) else 0
        self.live[first : self.facts.reader[k]] += self.sizes[k]
        return first

    def _phase_of(self, reader: int, otherwise: str) -> str:
        if reader == len(self.facts.phases):
            return otherwise
        return "backward" if self.graph.ops[reader].backward else "forward"

    def phase_of_move(self, k: int) -> str:
        if self.facts.results[k]:
            return "update" if self.facts.gradients.get(self.links[k].b) == k else self.facts.last_phase
        return self._phase_of(self.facts.reader[k], self.facts.phases[self.links[k].value[0]])

    def by_slot(self) -> dict[int, list[int]]:
        by_slot: dict[int, list[int]] = {}
        once, reader, hub_links = {*self.facts.fetches, *self.facts.reductions}, self.facts.reader, self.facts.hub_links
        for k in sorted(self.moved, key=lambda k: (self.slots[k], reader[k], k not in hub_links, k)):
            if k not in once:
                by_slot.setdefault(self.slots[k], []).append(k)
        return by_slot
