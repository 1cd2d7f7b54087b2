"""Where layers can be inserted: wirings by hand, of which the tiled graph is the one that is built with more layers."""

from collections import Counter

import pytest

from autoshard.graph import Graph, Op, Ref, Result, Tensor, tile
from autoshard.graph.blocks import repetition_of, repetitions, symbols
from autoshard.graph.insertion import tiled_repetitions
from tests.helpers_refusals import assert_refused

FLOAT = Tensor((4,), "float32")


class Built:
    """A graph as fx would name its ops: mul, mul_1, ..."""

    def __init__(self, layers: int, period: int = 1):
        self.ops, self.results, self.numbers = [], [], Counter()
        kinds = [f"layers.{k}.{'weight' if k % period == 0 else 'scale'}" for k in range(layers)]
        self.weights = [self.add(Op(name, "parameter", (), (), (FLOAT,), "parameter")) for name in kinds]
        self.x = self.add(Op("x", "input", (), (), (FLOAT,), "input"))

    def add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def op(self, stem: str, *sources: int, backward: bool = False) -> int:
        number, self.numbers[stem] = self.numbers[stem], self.numbers[stem] + 1
        inputs, literals = tuple((a, 0) for a in sources), (tuple(map(Ref, range(len(sources)))), ())
        return self.add(Op(f"{stem}_{number}" if number else stem, f"aten.{stem}.default", inputs, literals, (FLOAT,), backward=backward))

    def graph(self, output: int) -> Graph:
        return Graph(tuple(self.ops), (Result("output", "0", (output, 0)), *self.results))


def chain(n):
    b = Built(n)
    h = b.x
    for w in b.weights:
        h = b.op("tanh", b.op("mul", h, w))
    return b.graph(b.op("exp", h))


def every_layer_reads_the_input(n):
    b = Built(n)
    h = b.op("exp", b.x)
    first = h
    for w in b.weights:
        h = b.op("mul", b.op("add", h, first), w)
    return b.graph(h)


def every_layer_reads_two_below(n):
    """The second one reads the first twice: a read that no other layer has, below all of them."""
    b = Built(n)
    seen = [b.x]
    for w in b.weights:
        seen.append(b.op("mul", b.op("add", seen[-1], seen[-2 if len(seen) > 2 else -1]), w))
    return b.graph(seen[-1])


def every_layer_reads_the_last_one_of_a_first_pass(n, order=1, output="exp"):
    """As the layers of a decoder read what the encoder returns: the same value, which moves up. order: -1 for the weights backwards."""
    b = Built(n)
    memory = b.x
    for w in b.weights:
        memory = b.op("mul", memory, w)
    h = b.op("exp", memory)
    for w in b.weights[::order]:
        h = b.op("tanh", b.op("sub", b.op("add", *(h, memory)[::order]), w))
    return b.graph(b.op(output, h, memory) if order < 0 else h)


def the_last_one_of_a_first_pass_in_another_order(n, output="div"):
    return every_layer_reads_the_last_one_of_a_first_pass(n, -1, output)


def two_chains_that_meet_at_the_top(n):
    b = Built(n)
    h = g = b.x
    for w in b.weights:
        h = b.op("mul", h, w)
    for w in b.weights:
        g = b.op("sub", g, w)
    return b.graph(b.op("div", h, g))


def forward_and_backward(n):
    b = Built(n)
    h, kept = b.x, []
    for w in b.weights:
        kept.append(h)
        h = b.op("tanh", b.op("mul", h, w))
    g, gradients = b.op("ones_like", h, backward=True), []
    for w, before in zip(reversed(b.weights), reversed(kept)):
        g = b.op("neg", g, backward=True)
        gradients.append(b.op("div", g, before, backward=True))
        g = b.op("sub", g, w, backward=True)
    b.results = [Result("gradient", b.ops[w].name, (g, 0)) for w, g in zip(b.weights, reversed(gradients))]
    return b.graph(h)


def layers_of_two_kinds(n):
    b = Built(2 * n, period=2)
    h = b.x
    for k, w in enumerate(b.weights):
        h = b.op("mul" if k % 2 == 0 else "div", h, w)
    return b.graph(h)


PERIODS = {
    chain: 1, every_layer_reads_the_input: 1, every_layer_reads_two_below: 1, every_layer_reads_the_last_one_of_a_first_pass: 1,
    two_chains_that_meet_at_the_top: 1, the_last_one_of_a_first_pass_in_another_order: 1, forward_and_backward: 1, layers_of_two_kinds: 2,
}  # fmt: skip


@pytest.mark.parametrize("layers", [4, 5, 7])
@pytest.mark.parametrize("build", PERIODS)
def test_layers_are_inserted_as_if_the_graph_had_been_built_with_them(build, layers):
    for times in (-1, 1, 2, 5):
        assert tile(build(layers), times, container="layers", period=PERIODS[build]) == build(layers + times)


def test_an_op_that_repeats_those_of_the_layers_but_reads_otherwise_leaves_no_place():
    graph = the_last_one_of_a_first_pass_in_another_order(5, "add")  # reads the layer below first, and then the first pass
    assert_refused("no place has the same wiring on both sides", tile, graph, 1, container="layers")


@pytest.mark.parametrize("build", PERIODS)
def test_a_point_has_a_period_of_the_same_wiring_on_both_sides(build):
    graph, period = build(6), PERIODS[build]
    inputs = [op.inputs for op in graph.ops]
    repeats = repetitions(symbols(graph, lambda op: op.name.partition(".")[0] + op.name.rpartition(".")[2]))
    parts = tiled_repetitions(repeats, inputs, [0], "layers")
    part_of = repetition_of(parts, len(inputs))
    for part in parts:
        assert part.period <= part.point <= part.matches and part.period % period == 0
        for b in range(part.point - part.period, part.point):
            low, high = inputs[part.item_at(b)], inputs[part.item_at(b + part.period)]
            for (a, _), (later, _) in zip(low, high, strict=True):
                read = parts[part_of[a]]
                assert a == later or (part_of[later] == part_of[a] >= 0 and read.coordinate(later) - read.coordinate(a) == read.period)
