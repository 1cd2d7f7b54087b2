"""Joining and moving collectives in small graphs by hand: what may be joined, what must not, what starts when."""

import copy
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.capture import capture
from autoshard.graph import Graph
from autoshard.lower import compiled, lower
from autoshard.lower.collectives import Groups
from autoshard.lower.flow import STARTS, WAIT, Flow, LiveBytes, Pace, live_bytes, owners, size
from autoshard.lower.fx_program import RankGraphs, spare_gloo, trace
from autoshard.lower.generator import drawing
from autoshard.lower.kernels import offload
from autoshard.lower.kernels.offload import with_waits
from autoshard.precision import Precision
from autoshard.runtime import overlap as overlapping
from autoshard.runtime.bucketing import bucket
from autoshard.runtime.overlap import described, overlap, room, scheduled
from autoshard.simulate import timeline_of_solution
from autoshard.solution import Solution
from models import gpt2, llama, mlp, moe
from tests.helpers_lower import mesh_of
from tests.helpers_models import scheme_plan

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


def stacked(x, group):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x.unsqueeze(0), 2, group))


def gathered(x, group):
    return stacked(x, group).flatten(0, 1)


def traced(function, *shapes) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape) for shape in shapes))



def starts(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target in STARTS]


KERNELS = {  # function, shapes, floating-point operations
    "mm": (torch.mm, [(512, 1024), (1024, 2048)], 2 * 512 * 1024 * 2048),
    "bmm": (torch.bmm, [(4, 512, 1024), (4, 1024, 2048)], 4 * 2 * 512 * 1024 * 2048),
    "addmm": (torch.addmm, [(2048,), (512, 1024), (1024, 2048)], 2 * 512 * 1024 * 2048),
    "baddbmm": (torch.baddbmm, [(1, 1, 2048), (4, 512, 1024), (4, 1024, 2048)], 4 * 2 * 512 * 1024 * 2048),
    "a product that moves more than it computes": (torch.mm, [(4096, 1), (1, 4096)], 0),
    "no product": (torch.add, [(512, 1024), (512, 1024)], 0),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernels_seconds_are_those_of_its_operations_or_of_its_bytes(pace, kernel):
    function, shapes, flops = KERNELS[kernel]
    *inputs, node, _ = traced(function, *shapes).graph.nodes
    moved, device = sum(x.meta["val"].numel() * 4 for x in (*inputs, node)), pace.mesh.device
    expected = flops / device.flops32 if flops else moved / device.memory_bandwidth
    assert pace.compute(node) == pytest.approx(expected + device.launch, rel=1e-12)
    assert pace.compute(inputs[0]) == 0.0


def test_independent_reductions_of_a_group_are_joined_and_give_the_same(pace):
    a, b = pace.groups.names

    def gradients(x, y, z):
        return reduced(x * 2, a), reduced(y + 1, a), reduced(z.sin(), b), reduced((x * y[:1]).unsqueeze(1), a)

    module, given = traced(gradients, SMALL, SMALL, SMALL), [torch.randn(SMALL) for _ in range(3)]
    expected = gradients(*given)
    assert bucket(module, pace, room([module.graph], 1e9)) == 2
    assert len(starts(module)) == 2  # one per group
    assert all(torch.equal(x, y) for x, y in zip(module(*given), expected))


def test_what_is_drawn_behind_a_joined_collective_stays_in_its_turn(pace):
    a, _ = pace.groups.names

    def noisy(x, y):  # the second gathering, in which the first one is joined, stands behind both draws
        first = torch.bernoulli(torch.sigmoid(gathered(x, a)))
        return first, torch.rand_like(x), gathered(y, a)

    module = traced(noisy, SMALL, SMALL)
    drawn = [node.name for node in drawing(module.graph)]
    assert len(drawn) == 2
    assert bucket(module, pace, room([module.graph], 1e9)) == 1
    assert [node.name for node in drawing(module.graph)] == drawn


def test_a_reduction_that_nothing_reads_is_left_out(pace):
    def evaluated(x, y):
        reduced(y.sum(), pace.groups.names[0])  # of a loss whose weights are summed for its backward
        return reduced(x * 2, pace.groups.names[0])

    module = traced(evaluated, SMALL, SMALL)
    (rows,) = scheduled([module], pace, 1e9)
    assert len(rows) == len(starts(module)) == 1 and list(module.graph.nodes)[-1].op == "output"


USES = {  # of a gathered tensor, and whether it is copied in another order of dims
    "as it is": (lambda x: x.sin(), False), "turned": (lambda x: x.permute(1, 0, 2).sin(), False),
    "turned twice": (lambda x: x.permute(1, 0, 2).transpose(0, 1).sin(), False), "copied": (lambda x: x.clone(), False),
    "turned, copied": (lambda x: x.permute(1, 0, 2).clone(), True),
    "turned for two": (lambda x: x.permute(1, 0, 2).sin() + x.permute(1, 0, 2), False),
    "turned, and copied for two": (lambda x: (y := x.permute(1, 0, 2)).clone() + y, False),
    "turned twice, copied": (lambda x: x.transpose(0, 1).permute(1, 0, 2).clone(), True),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_tensor_of_a_joined_gathering_is_contiguous_unless_all_that_is_done_is_a_copy_of_it(pace, use):
    function, is_copied = USES[use]
    module = traced(lambda x, y: [function(stacked(z, pace.groups.names[0])) for z in (x, y)], (8, 8), (8, 8))
    copies = sum(node.target is torch.ops.aten.clone.default for node in module.graph.nodes)
    assert bucket(module, pace, room([module.graph], 1e9)) == 1
    after = sum(node.target is torch.ops.aten.clone.default for node in module.graph.nodes)
    assert after - copies == (0 if is_copied else 2)


def test_joining_moves_no_kernel(pace):
    """The first reduction is read at once, and the other is of the last kernel: the reader waits, and no kernel runs early for it."""
    a, _ = pace.groups.names

    def backward(x, total):
        y, first = x, x.cos()
        total = torch.ops.aten.add_.Tensor(total, reduced(first * 2, a))
        for _ in range(3):
            y, unread = y.sin(), y.exp()
            first = first + unread
        return total, first, reduced(y * 2, a)

    def kernels(module):
        return [node.name for node in Flow.of(module.graph).anchors]

    module, given = traced(backward, SMALL, SMALL), [torch.randn(SMALL) for _ in range(2)]
    before, expected = kernels(module), backward(given[0], given[1].clone())
    assert bucket(module, pace, room([module.graph], 1e9)) == 1
    assert kernels(module) == before
    assert all(torch.equal(x, y) for x, y in zip(module(*given), expected))


def test_a_reduction_that_stands_on_another_is_not_joined_to_it(pace):
    a, _ = pace.groups.names
    module = traced(lambda x: reduced(reduced(x * 2, a).sin() * 3, a), SMALL)
    assert bucket(module, pace, room([module.graph], 1e9)) == 0
    module = traced(lambda x: reduced(reduced(x * 2, a), a), SMALL)  # nothing but a wait between them
    assert bucket(module, pace, room([module.graph], 1e9)) == 0


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
    assert bucket(module, pace, room([module.graph], 1e9)) <= 1
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
    few = overlap(tight, pace, room([tight.graph], 0.0))  # no byte to spare: the last one fits beside a relu, not beside a matmul
    rows = overlap(wide, pace, room([wide.graph], 2e6))
    assert [row.hidden > other.hidden for row, other in zip(rows, few)] == [False, False, True]
    assert all(row.hidden > 0 for row in rows[1:])
    nodes = list(wide.graph.nodes)
    matmuls = [i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default]
    assert [nodes.index(start) < mm for start, mm in zip(starts(wide)[1:], matmuls)] == [True, True]  # before the layer before
    nodes_of_tight = list(tight.graph.nodes)
    assert max(live_bytes(nodes_of_tight[:-1], nodes_of_tight[-1])) <= room([tight.graph], 0.0)
    assert max(live_bytes(nodes[:-1], nodes[-1])) <= room([tight.graph], 2e6)
    assert "forward: 3 collectives for 3 of the plan" in described({"forward": rows}, pace.mesh)


@pytest.mark.parametrize("between", [(0, 0, 0), (1, 40, 2), (40, 1, 1), (30, 30, 30), (90, 0, 90)])
def test_a_gather_of_a_parameter_ends_before_its_reader_and_before_what_is_behind_it_has_to_begin(pace, between):
    """u and v are gathered in one group each, and w in both, one after the other."""
    first, second = pace.groups.names

    def forward(x, u, v, w):
        for count, gather in zip(between, (lambda: gathered(u, first), lambda: gathered(v, second), lambda: twice(w))):
            for _ in range(count):
                x = x.relu()
            x = x @ gather()
        return x

    def twice(w):
        return gathered(gathered(w, first), second)

    module = traced(forward, BIG, (256, 512), (256, 512), (128, 512))
    until = overlapping._Schedule(module.graph, pace, 1e9).until
    of_u, of_v, of_w, again = starts(module)
    kernels = Flow.of(module.graph).anchors
    products = [i for i, node in enumerate(kernels) if node.target is torch.ops.aten.mm.default]
    before = [sum(map(pace.compute, kernels[:i])) for i in products]
    last, begin = before[2], before[2] - pace.collective(again)
    assert until == pytest.approx({
        again: last, of_w: begin, of_v: min(before[1], begin), of_u: min(before[0], begin - pace.collective(of_w)),
    })  # fmt: skip


@pytest.mark.parametrize("also_read", [False, True])
def test_a_gather_of_a_cast_parameter_is_prefetched_unless_a_kernel_reads_the_cast_too(pace, also_read):
    group = pace.groups.names[0]

    def forward(x, *weights):
        x = x.half()
        for w in weights:
            part = w.half()
            y = x @ gathered(part, group)
            x = (y + part.sum() if also_read else y).relu()
        return x

    module = traced(forward, (512, 512), *[(256, 512)] * 3)
    overlap(module, pace, room([module.graph], 2e6))
    nodes = list(module.graph.nodes)
    matmuls = [i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default]
    assert [nodes.index(start) < mm for start, mm in zip(starts(module)[1:], matmuls)] == [not also_read] * 2  # before the layer before


@pytest.mark.parametrize("spare, early", [(0.0, False), (2e6, True)])
def test_a_gather_of_activations_begins_early_only_where_its_bytes_fit(pace, spare, early):
    """It is read behind the fullest moment; before, it would be one large tensor more there."""
    group = pace.groups.names[0]

    def forward(x):
        part = x[:256] * 2
        y = x @ x
        for _ in range(2):
            y = torch.sin(y) @ torch.cos(y)
        return y @ gathered(part, group)

    module = traced(forward, BIG)
    limit = room([module.graph], spare)
    overlap(module, pace, limit)
    nodes = list(module.graph.nodes)
    assert max(live_bytes(nodes[:-1], nodes[-1])) <= limit
    assert (nodes.index(starts(module)[0]) < min(i for i, n in enumerate(nodes) if n.target is torch.ops.aten.sin.default)) is early


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
        overlap(module, pace, room([module.graph], spare))
        nodes = list(module.graph.nodes)
        last = max(i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default)
        assert (min(nodes.index(node) for node in nodes if node.target is WAIT) > last) is late
    # a start comes right behind what it reduces
    assert all(nodes.index(start) - nodes.index(start.args[0]) <= 2 for start in starts(module))


def test_a_view_of_a_parameter_that_is_returned_too_holds_no_gather_back(pace):
    """What the backward pass reads of a parameter's own part is returned by the forward pass, and stands in the order of ops."""
    group = pace.groups.names[0]

    def forward(x, v, w):
        turned = w.t()
        return x @ gathered(v, group) @ gathered(turned, group), turned

    module, given = traced(forward, (512, 512), (256, 512), (512, 256)), [torch.randn(s) for s in ((512, 512), (256, 512), (512, 256))]
    expected = forward(*given)
    assert [Flow.of(module.graph).ready[start] for start in starts(module)] == [-1, -1]
    assert bucket(module, pace, room([module.graph], 1e9)) == 1
    assert all(torch.equal(x, y) for x, y in zip(module(*given), expected))


def fsdp_plan(make, precision=None) -> tuple[Graph, Solution]:
    """Of a tiny model, its parameters and batch cut over four ranks."""
    graph = capture(*make(), training=True, precision=precision)
    return graph, scheme_plan(graph, mesh_of(2, 2), "fsdp", training=True)


def passes_of(graph: Graph, solution: Solution, pace) -> RankGraphs:
    return trace(lower(graph, solution.layouts, solution.results, solution.mesh), graph, pace.groups, (0, 0))


def fsdp_passes(pace) -> RankGraphs:
    return passes_of(*fsdp_plan(gpt2.tiny), pace)


@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16)], ids=["as stored", "bf16"])
@pytest.mark.parametrize("make", [mlp.tiny, moe.tiny, pytest.param(llama.tiny, marks=pytest.mark.slow)], ids=["mlp", "moe", "llama"])
def test_the_simulator_has_in_the_background_what_a_run_has_in_the_second_group(make, precision, pace, monkeypatch):
    """Gathers of parameters, of casts of them too, and reductions of gradients. A run counts the loss, which is returned, to them."""
    monkeypatch.setattr("autoshard.graph.casts.LARGE", 0)
    graph, solution = fsdp_plan(make, precision)
    run, simulated = Counter(), Counter()
    for module in passes_of(graph, solution, pace).passes.values():
        flow = Flow.of(module.graph)
        run.update((STARTS[start.target], start in flow.unhurried) for start in flow.starts)
    axes = len(solution.mesh.axes)
    simulated.update((t.kind, t.stream > axes) for t in timeline_of_solution(graph, solution).tasks if t.kind in STARTS.values())
    differ = {kind for kind, unhurried in run | simulated if run[kind, unhurried] != simulated[kind, unhurried]}
    assert differ <= {"all_reduce"} and run["all_gather", True] > 4 and run["reduce_scatter", True] > 4


def steps(group):
    def step(x, *weights):
        for w in weights:
            x = reduced(x @ gathered(w, group), group).relu()
        return x.sum(), reduced(x.t() @ x, group)

    return step


def test_what_no_kernel_waits_for_soon_has_a_second_group_and_begins_where_the_first_is_idle(pace):
    group, shapes = pace.groups.names[0], [(512, 512), *[(256, 512)] * 3]
    module, plain = traced(steps(group), *shapes), traced(layers(group), *shapes)
    (rows,) = scheduled([module], pace, 1e9, lambda axis: f"second {axis}")
    groups = [(STARTS[node.target], node.args[-1]) for node in starts(module)]
    assert {name for kind, name in groups if kind == "all_gather"} == {"second 0"}
    assert groups.count(("all_reduce", group)) == 3 and groups.count(("all_reduce", "second 0")) == 1  # the one that is only returned
    activations = [row for row in rows if row.collective == "all_reduce"][:-1]
    gathers = [row for row in rows if row.collective == "all_gather"]
    assert not any(one.start <= gather.start < one.end for one in activations for gather in gathers)
    scheduled([plain], pace, 1e9, lambda axis: f"second {axis}")
    assert {node.args[-1] for node in starts(plain)} == {group}  # an axis with nothing else needs none


def test_what_no_kernel_waits_for_soon_lets_others_go_first_where_a_later_gap_has_room(pace):
    group = pace.groups.names[0]

    def step(x, w):
        x = reduced(x.relu(), group)
        for _ in range(40):
            x = x @ x
        x = reduced(reduced(x, group).relu(), group)
        return x.relu().relu() @ gathered(w, group)

    module = traced(step, BIG, (256, 512))
    (rows,) = scheduled([module], pace, 1e9, lambda axis: f"second {axis}")
    gather, (first, second, _) = next(r for r in rows if r.collective == "all_gather"), [r for r in rows if r.collective == "all_reduce"]
    assert first.end <= gather.start < gather.end <= second.start  # it would have delayed the first


def live(module: fx.GraphModule) -> list[int]:
    *nodes, output = module.graph.nodes
    return [now for node, now in zip(nodes, live_bytes(nodes, output)) if node.op != "placeholder"]


def test_the_backward_pass_begins_with_the_bytes_that_the_forward_pass_leaves(pace):
    graphs = fsdp_passes(pace)
    *nodes, output = graphs.forward.graph.nodes
    memory, backward = LiveBytes(nodes, output), live(graphs.backward)
    for node in nodes:
        memory.run(node)
    first = next(node for node in graphs.backward.graph.nodes if node.op != "placeholder")
    given = next(node for node in graphs.forward.graph.nodes if node.op == "output").args[0]
    lost = {owners(list(graphs.forward.graph.nodes))[node] for node in given[: len(graphs.outputs)]}
    lost -= {owners(list(graphs.forward.graph.nodes))[node] for node in given[len(graphs.outputs) :]}
    made = 0 if owners(list(graphs.backward.graph.nodes))[first] is not first else size(first)
    assert backward[0] - made == memory.now - sum(size(node) for node in lost) > 0
    for node in graphs.backward.graph.nodes:
        node.meta.pop("kept", None)
    assert live(graphs.backward)[0] == made  # without what was noted on them, nothing is known of what they hold


def test_a_pass_may_reach_what_another_pass_of_the_step_reaches(pace):
    group = pace.groups.names[0]
    shapes = [(512, 512), *[(256, 512)] * 3]
    alone, first, second = traced(layers(group), *shapes), traced(layers(group), *shapes), traced(lambda x: x.repeat(4, 1) @ x, BIG)
    (rows,) = scheduled([alone], pace, 0.0)
    better, _ = scheduled([first, second], pace, 0.0)
    assert len(better) < len(rows) == 3  # the second pass has more alive, so in the first there is room to join gathers


def test_what_waits_in_the_hosts_memory_is_not_alive_on_the_device():
    bytes, op = 4 * BIG[0] * BIG[1], torch.ops.autoshard

    def forward(x):
        return op.offload(x @ x, exposed=0.0), x.sum()

    def backward(saved, x):
        return (op.reload(saved, device=x.device, exposed=0.0) @ x).sum()

    first, second = traced(forward, BIG), with_waits(traced(backward, BIG, BIG))
    *nodes, output = first.graph.nodes
    assert live_bytes(nodes, output)[-1] <= 8  # the product was alive while it was copied: only its sum is at the end
    assert max(live_bytes(nodes, output)) == bytes
    *nodes, output = second.graph.nodes
    nodes[0].meta["kept"] = ("saved", bytes)
    assert max(live_bytes(nodes, output)) == 2 * bytes  # what came back, once, and the product
    nodes[1].meta["kept"] = ("x", bytes)  # a tensor that stayed on the device counts from the begin
    assert live_bytes(nodes, output)[1] == bytes


def test_a_reload_goes_to_the_named_gpu_or_the_current_one_and_is_waited_for_once(monkeypatch):
    x, asked, waited = torch.ones(2), [], []
    back = lambda host, where: asked.append(where) or host.clone()  # noqa: E731
    monkeypatch.setattr(offload, "_copies", lambda index: SimpleNamespace(back=back))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waited.append))
    for device in ("cuda", "cuda:1", "cpu"):
        y = torch.ops.autoshard.reload(x, device=torch.device(device), exposed=0.0)
        assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
    assert asked == [torch.device("cuda", 3), torch.device("cuda", 1)]
    copies = SimpleNamespace(running={x.data_ptr(): "copied"})
    for _ in range(2):
        offload._Copies.wait(copies, x)
    assert waited == ["copied"]


def test_at_every_limit_of_live_bytes_as_many_are_joined_as_fit(pace):
    def sums(x):
        waited = []
        for k in (4, 1, 6, 2, 5, 3, 7, 8):
            x = x.sin()
            waited.append(reduced(x[: 8 * k].cos(), pace.groups.names[k > 4]))
            if len(waited) % 3 == 0:
                x = x + waited[-2].sum()
        return waited

    module = traced(sums, SMALL)
    least, found = int(room([module.graph], 0.0)), []
    for limit in range(least, least + 1000, 24):
        copied = copy.deepcopy(module)
        found.append(bucket(copied, pace, limit))
        assert room([copied.graph], 0.0) <= limit
    assert found == sorted(found) and Counter(found) == {1: 6, 2: 9, 3: 25, 4: 2}


@pytest.mark.slow
def test_buckets_keep_the_limit_of_live_bytes_with_what_they_add(pace):
    graphs, wide = fsdp_passes(pace), fsdp_passes(pace)
    passes = [graphs.forward, graphs.backward]
    limit = room([part.graph for part in passes], 0.0)
    assert sum(bucket(part, pace, limit) for part in passes)
    assert max(max(live(part)) for part in passes) <= limit
    for part in (wide.forward, wide.backward):
        bucket(part, pace, limit + 1e9)
    assert max(live(wide.backward)) > limit  # what they would take without one


@pytest.mark.parametrize("batch, width", [(64, 64), (256, 64), (16, 128)])
@pytest.mark.parametrize("part", [0.0, 0.02, 0.1])
def test_no_node_of_a_new_order_is_above_the_limit(pace, batch, width, part):
    """What begins early counts at every node from there to its given place, not at kernels only."""
    graph, solution = fsdp_plan(lambda: mlp.mlp(batch=batch, width=width, hidden=2 * width, layers=3))
    graphs = passes_of(graph, solution, pace)
    passes = [graphs.forward, graphs.backward]
    limit = room([one.graph for one in passes], 0.0)
    scheduled(passes, pace, part * limit)
    assert max(max(live(one)) for one in passes) <= 1.001 * (1 + part) * limit


def test_what_is_late_is_placed_where_it_frees_what_does_not_fit(pace):
    """A small copy of a large sum, that a later collective reads, stands where it was: else the sum waits for this one."""
    a, b = pace.groups.names

    def step(x):
        row = reduced(x.relu(), a)[:1].clone()
        return reduced(torch.cat([row, x.repeat(3, 1).sum(0, keepdim=True)]), b)

    module, given = traced(step, BIG), torch.randn(BIG)
    expected, limit = step(given), room([module.graph], 0.0)
    scheduled([module], pace, 0.0)
    assert max(live(module)) == limit and torch.equal(module(given), expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gathers_on_the_cpu_write_to_given_tensors_others_are_left(pace, device):
    with FakeTensorMode():
        module = make_fx(lambda x: gathered(x, pace.groups.names[0]) * 2)(torch.empty(8, device=device))
    spare_gloo(module.graph)
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    plain, given = c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_out.default
    assert (targets.count(plain), targets.count(given)) == ((0, 1) if device == "cpu" else (1, 0))
    module.graph.lint()


@torch.library.custom_op("autoshard_tests::seen", mutates_args=())
def seen(x: torch.Tensor, name: str) -> torch.Tensor:
    ALIVE[name] = [reference() is not None for reference in GIVEN]
    return x.clone()


@seen.register_fake
def _(x, name):
    return torch.empty_like(x)


ALIVE: dict[str, list[bool]] = {}
GIVEN: list = []


def test_a_compiled_graph_keeps_its_order_and_frees_what_it_is_given():
    """Only the output reads `first`, as it does a weight's gradient: inductor would compute it last, and hold what it is computed from."""

    def computes(x, y, z):
        first = seen(torch.mm(x, y), "first")
        return [torch.mm(seen(torch.mm(z, z), "second"), z), first]

    arguments = [torch.randn(8, 8) for _ in range(3)]
    expected = computes(*arguments)
    function = compiled(make_fx(computes, tracing_mode="fake")(*arguments))
    ALIVE.clear()
    GIVEN[:] = map(weakref.ref, arguments)
    for one, other in zip(function(arguments), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert arguments == []
    assert ALIVE == {"first": [False, False, True], "second": [False, False, True]} and list(ALIVE) == ["first", "second"]
