"""Joining and moving collectives in small graphs by hand: what may be joined, what must not, what starts when."""

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.lower.bucketing import bucket
from autoshard.lower.collectives import Groups
from autoshard.lower.flow import STARTS, WAIT, Pace, live_bytes
from autoshard.lower.overlap import described, overlap, room
from tests.helpers_lower import mesh_of

c10d = torch.ops._c10d_functional
SMALL, BIG = (64,), (512, 512)


@pytest.fixture(scope="module")
def pace():
    """Two axes of two ranks; a fake process group, whose all_reduce leaves everything as it is."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield Pace(mesh_of(2, 2), Groups.of(init_device_mesh("cpu", (2, 2))))
    dist.destroy_process_group()


def reduced(x, group):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


def gathered(x, group):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x.unsqueeze(0), 2, group)).flatten(0, 1)


def traced(function, *shapes) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape) for shape in shapes))



def starts(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target in STARTS]


def test_independent_reductions_of_a_group_are_joined_and_give_the_same(pace):
    a, b = pace.groups.names

    def gradients(x, y, z):
        return reduced(x * 2, a), reduced(y + 1, a), reduced(z.sin(), b), reduced((x * y[:1]).unsqueeze(1), a)

    module, given = traced(gradients, SMALL, SMALL, SMALL), [torch.randn(SMALL) for _ in range(3)]
    expected = gradients(*given)
    assert bucket(module, pace, room(module.graph, 1e9)) == 2
    assert len(starts(module)) == 2  # one per group
    assert all(torch.equal(x, y) for x, y in zip(module(*given), expected))


def test_a_reduction_that_stands_on_another_is_not_joined_to_it(pace):
    a, _ = pace.groups.names
    module = traced(lambda x: reduced(reduced(x * 2, a).sin() * 3, a), SMALL)
    assert bucket(module, pace, room(module.graph, 1e9)) == 0
    module = traced(lambda x: reduced(reduced(x * 2, a), a), SMALL)  # nothing but a wait between them
    assert bucket(module, pace, room(module.graph, 1e9)) == 0


def test_two_pairs_that_would_wait_for_each_other_are_not_both_joined(pace):
    a, b = pace.groups.names

    def crossed(x, y):
        first, second = x * 2, y * 2
        a1 = reduced(first, a)
        b2 = reduced(second, b)
        b1 = reduced(a1 + 1, b)  # stands on a1
        a2 = reduced(b2.view(8, 8), a)  # stands on b2
        return b1, a2

    module, given = traced(crossed, SMALL, SMALL), [torch.randn(SMALL) for _ in range(2)]
    expected = crossed(*given)
    assert bucket(module, pace, room(module.graph, 1e9)) <= 1
    assert all(torch.equal(x, y) for x, y in zip(module(*given), expected))


def layers(group):
    def forward(x, *weights):
        for w in weights:
            x = (x @ gathered(w, group)).relu()
        return x

    return forward


def test_gathers_of_parameters_are_prefetched_in_order_where_there_is_room(pace):
    group = pace.groups.names[0]
    shapes = [(512, 512), *[(256, 512)] * 3]
    tight, wide = traced(layers(group), *shapes), traced(layers(group), *shapes)
    few = overlap(tight, pace, room(tight.graph, 0.0))  # no byte to spare: the last one fits beside a relu, not beside a matmul
    rows = overlap(wide, pace, room(wide.graph, 2e6))
    assert [row.hidden > other.hidden for row, other in zip(rows, few)] == [False, False, True]
    assert all(row.hidden > 0 for row in rows[1:])
    nodes = list(wide.graph.nodes)
    matmuls = [i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default]
    assert [nodes.index(start) < mm for start, mm in zip(starts(wide)[1:], matmuls)] == [True, True]  # before the layer before
    nodes_of_tight = list(tight.graph.nodes)
    assert max(live_bytes(nodes_of_tight[:-1], nodes_of_tight[-1])) <= room(tight.graph, 0.0)
    assert max(live_bytes(nodes[:-1], nodes[-1])) <= room(tight.graph, 2e6)
    assert "forward: 3 collectives for 3 of the plan" in described({"forward": rows}, pace.mesh)


def test_reductions_are_waited_for_at_the_end_or_where_their_bytes_do_not_fit(pace):
    group = pace.groups.names[0]

    def backward(x, *weights):
        found = []
        for w in weights:
            found.append(reduced(x.t() @ x, group))
            x = x @ w
        return found

    shapes = [BIG] * 4
    for spare, late in ((1e9, True), (0.0, False)):
        module = traced(backward, *shapes)
        overlap(module, pace, room(module.graph, spare))
        nodes = list(module.graph.nodes)
        last = max(i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default)
        assert (min(nodes.index(node) for node in nodes if node.target is WAIT) > last) is late
    # a start comes right behind what it reduces
    assert all(nodes.index(start) - nodes.index(start.args[0]) <= 2 for start in starts(module))
