"""Collectives against loops that count messages, FLOPs against torch's own counter, the roofline by hand."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autoshard import cost
from autoshard.cost import bytes_sent, collective_seconds, op_flops, op_seconds
from autoshard.cost.compute import EFFICIENCY
from autoshard.cost.links import offload_seconds
from autoshard.cost.several_kernels import expert_kernels, loss_kernels
from autoshard.graph import ROWS
from autoshard.layout import R, S
from autoshard.mesh import DEVICES, Axis, Device, LinkCurve, Mesh
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import assert_refused

aten = torch.ops.aten
PRICED = list(itertools.product(cost.COLLECTIVES, (1, 2, 3, 4, 7, 8, 64)))


def axis(n, *, bandwidth=100e9, latency=1e-6, shared_by=1, backend="nccl"):
    return Axis("a", n, bandwidth, latency, shared_by, backend)


def test_prices_of_links_devices_and_states_stay_what_they_are():
    plain, preset = Mesh.from_bandwidths((2, 4)), Mesh.from_bandwidths((2, 8), device="h100")
    curves = tuple(
        LinkCurve(name, (1e4, 1e6, 1e8), tuple((1 + k) * t for t in (2e-5, 4e-5, 3e-3)), 3e-11) for k, name in enumerate(cost.COLLECTIVES)
    )
    axes = [*plain.axes, *preset.axes, axis(3), replace(axis(4, shared_by=4), curves=curves), axis(1)]
    sizes = np.array([1.0, 1e3, 65e3, 3e5, 2e7, 1e9])
    told: dict = {}
    for k, one in enumerate(axes):
        for name in cost.COLLECTIVES:
            of_size = [[float(f(name, one, size)) for size in sizes] for f in (collective_seconds, bytes_sent, cost.ring_seconds)]
            told[f"{k} {name}"] = [*of_size, cost.least_joined_seconds(name, one, sizes).tolist()]
        moved = [cost.axis_transfer_seconds(size, one) for size in (0.0, *sizes)]
        told[f"{k}"] = [cost.bucket_limit(one), cost.transfer_latency(one), [cost.groups_on_link(one, n) for n in (1, 2, 8)], moved]
    for mesh in (plain, preset):
        layouts = [tuple(layout) for layout in itertools.product((S(0), R), repeat=2)]
        gathered = [cost.gather_seconds((64, 32), 4, layout, mesh) for layout in layouts]
        told[f"{mesh.shape}"] = [gathered, cost.slowest_seconds_per_byte(mesh), cost.shared_links(mesh), cost.axes_by_link(mesh.axes)]
    for name, device in DEVICES.items():
        bandwidth = cost.host_bandwidth(device)
        told[name] = [bandwidth, bandwidth and [float(cost.host_seconds(1e9, device)), float(offload_seconds(1e9, 0.3, device))]]
    bytes_of = {name: [cost.optimizer_step_bytes(10, size, name, master_weights=m) for size in (2, 4) for m in (False, True)]
                for name in cost.OPTIMIZERS}  # fmt: skip
    spare = [cost.spare_bytes(peak, limit) for peak in (1e6, 1e9, math.inf) for limit in (None, 9e5, 1.01e9, 2e9)]
    told["states"] = [bytes_of, spare, cost.accumulation_bytes(10, 2, 4), cost.master_bytes(10, 2), cost.master_bytes(10, 4)]
    shapes = [((6, 4), "bfloat16"), ((8, 1), "int64"), ((8, 1), "float32"), ((3, 4, 10), "bfloat16"), ((3, 5, 4), "bfloat16")]
    hidden = ((6, 10), "bfloat16")
    told["experts"] = [expert_kernels(shapes, backward=False), expert_kernels(shapes[:1] + shapes, backward=True),
                       expert_kernels([*shapes[:1], *shapes, hidden], backward=True, keeps=True)]  # fmt: skip
    losses = [[((tokens, 4), "bfloat16"), ((4, 10), "bfloat16")] for tokens in (8, ROWS, ROWS + 1)]
    told["losses"] = [loss_kernels(one[:1] * backward + one, backward=backward) for one in losses for backward in (False, True)]
    stages = [("", -1, 0.5, ()), ("all_gather", 0, 1e6, ()), ("", -1, 0.25, (1,)), ("all_to_all", 1, 2e6, (0,)), ("", -1, 0.25, (2, 3))]
    run = cost.timed(stages, lambda share: 1e-5 * share, plain)
    assert [one.sent for one in run] == [0, 1e6, 0, 2e6, 0]
    told["stages"] = [cost.makespan(run, plain), [tuple(one) for one in cost.in_the_open(run, plain)], cost.makespan((), plain)]
    assert_stays("rooms/prices.json", told)


# ---- collectives


def sent_by_definition(collective: str, n: int, size: int) -> float:
    """Bytes that rank 0 sends when what everyone must hear is sent once, by counting (part, listener) pairs."""
    part = size / n
    gather = sum(part for listener in range(n) if listener != 0)  # my part to the others
    scatter = sum(part for owner in range(n) if owner != 0)  # their parts to the owners
    return {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": scatter + gather, "all_to_all": scatter}[collective]


@pytest.mark.parametrize("collective, n", PRICED)
def test_volume_is_what_the_ranks_send(collective, n):
    assert bytes_sent(collective, axis(n), 840.0) == pytest.approx(sent_by_definition(collective, n, 840), rel=1e-15)


@pytest.mark.parametrize("collective, n", PRICED)
def test_rounds_are_those_of_doubling(collective, n):
    rounds, reached = 0, 1
    while reached < n:  # who knows a thing doubles per round
        rounds, reached = rounds + 1, reached * 2
    passes = 2 if collective == "all_reduce" else 1
    free_link = axis(n, bandwidth=math.inf)
    assert collective_seconds(collective, free_link, 1e6) == pytest.approx(passes * rounds * 1e-6, rel=1e-15)


@pytest.mark.parametrize("collective, n", PRICED)
def test_an_array_of_bytes_gives_each_its_price(collective, n):
    sizes = np.array([0.0, 1.0, 1e3, 1e6, 1e9])
    prices = collective_seconds(collective, axis(n), sizes)
    assert prices.tolist() == [collective_seconds(collective, axis(n), float(b)) for b in sizes]
    assert prices[0] == 0
    assert (np.diff(prices) > 0).all() if n > 1 else (prices == 0).all()


@pytest.mark.parametrize("n", [2, 3, 8])
def test_gloo_reduces_and_gathers_everything_to_keep_a_part(n):
    gloo, nccl, b = axis(n, backend="gloo"), axis(n), 1e6
    assert collective_seconds("reduce_scatter", gloo, b) == collective_seconds("all_reduce", nccl, b)
    assert collective_seconds("all_to_all", gloo, b) == collective_seconds("all_gather", nccl, n * b)
    assert bytes_sent("all_to_all", gloo, b) == pytest.approx((n - 1) * b, rel=1e-15)  # my part to each of the others
    for collective in ("all_gather", "all_reduce"):
        assert collective_seconds(collective, gloo, b) == collective_seconds(collective, nccl, b)


# ---- compute


def described(tensors):
    return tuple(None if t is None else (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_tensors(heads, key_heads, head_dim, value_dim):
    return empty(2, heads, 6, head_dim), empty(2, key_heads, 10, head_dim), empty(2, key_heads, 10, value_dim)


CONVOLUTIONS = [  # x, weight, stride, padding, transposed, groups
    ((2, 6, 9, 8), (4, 6, 3, 3), [1, 1], [1, 1], False, 1),
    ((2, 6, 9, 8), (8, 6, 3, 2), [2, 1], [0, 0], False, 1),
    ((2, 6, 20), (4, 3, 5), [2], [2], False, 2),
    ((2, 6, 9, 8), (6, 4, 3, 3), [2, 2], [0, 0], True, 1),
    ((2, 6, 9, 8), (6, 6, 4, 4), [2, 2], [1, 1], True, 1),
]
CALLS = [
    (aten.mm.default, (empty(5, 7), empty(7, 3))),
    (aten.addmm.default, (empty(3), empty(5, 7), empty(7, 3))),
    (aten.bmm.default, (empty(4, 5, 7), empty(4, 7, 3))),
    (aten.baddbmm.default, (empty(4, 5, 3), empty(4, 5, 7), empty(4, 7, 3))),
    (aten.linear.default, (empty(2, 5, 7), empty(3, 7), empty(3))),
    (aten.linear.default, (empty(5, 7), empty(3, 7))),
    *(
        (aten.convolution.default, (empty(*x), empty(*w), None, stride, pad, [1] * len(stride), transposed, [0] * len(stride), groups))
        for x, w, stride, pad, transposed, groups in CONVOLUTIONS
    ),
    *((aten._scaled_dot_product_flash_attention.default, attention_tensors(*sizes)) for sizes in itertools.product([4], [4, 2], [8], [8])),
    (aten._scaled_dot_product_efficient_attention.default, (*attention_tensors(4, 4, 8, 16), None, True)),
]


def call_name(call):
    return f"{call[0]}-{'-'.join('x'.join(map(str, a.shape)) for a in call[1] if isinstance(a, torch.Tensor))}"


def counted(operator, arguments):
    """FLOPs that torch counts, and the outputs as a tuple."""
    with FlopCounterMode(display=False) as counter:
        outputs = operator(*arguments)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return counter.get_total_flops(), [o for o in outputs if o is None or isinstance(o, torch.Tensor)]


@pytest.mark.parametrize("call", CALLS, ids=call_name)
def test_flops_equal_torchs_counter(call):
    operator, arguments = call
    flops, outputs = counted(operator, arguments)
    inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
    assert flops > 0
    assert op_flops(str(operator), described(inputs), described(outputs)) == flops


@pytest.mark.parametrize("convolution", [c for c in CONVOLUTIONS if c[-1] == 1])  # torch counts groups too often
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
def test_convolution_backward_flops_equal_torchs_counter(convolution, mask):
    x, w, stride, padding, transposed, groups = convolution
    rest = (stride, padding, [1] * len(stride), transposed, [0] * len(stride), groups)
    y = aten.convolution.default(empty(*x), empty(*w), None, *rest)
    arguments = (y, empty(*x), empty(*w), [y.shape[1]], *rest, list(mask))
    flops, outputs = counted(aten.convolution_backward.default, arguments)
    outputs = [out if asked else None for out, asked in zip(outputs, mask)]
    assert op_flops("aten.convolution_backward.default", described(arguments[:3]), described(outputs)) == flops


def test_attention_backward_flops_equal_torchs_counter():
    q, k, v = attention_tensors(4, 4, 8, 8)
    y = aten._scaled_dot_product_flash_attention.default(q, k, v)
    arguments = (y[0], q, k, v, y[0], y[1], y[2], y[3], 6, 10, 0.0, False, y[6], y[7])
    flops, outputs = counted(aten._scaled_dot_product_flash_attention_backward.default, arguments)
    inputs = described(a for a in arguments if isinstance(a, torch.Tensor))
    forward, _ = counted(aten._scaled_dot_product_flash_attention.default, (q, k, v))
    assert flops == 2.5 * forward
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable"):
        assert op_flops(f"aten._scaled_dot_product_{kernel}_backward.default", inputs, described(outputs)) == flops
        assert op_flops(f"aten._scaled_dot_product_{kernel}.default", described((q, k, v)), described(y[:1])) == forward


def test_bilinear_takes_the_flops_of_a_matmul():
    """As torch computes it: for each of n outputs (b, m) @ (m, p), and the product with (b, p); its gradients do as much."""
    b, m, n, p = 80, 64, 32, 96
    x, w, y, out = (((b, m), "float32"), ((n, m, p), "float32"), ((b, p), "float32"), ((b, n), "float32"))
    for inputs, output in ((x, w, y), out), ((out, w, y), x), ((x, out, y), w), ((x, w, out), y):
        assert op_flops("aten._trilinear.default", inputs, (output,)) == 2 * b * m * n * p


def test_other_ops_take_one_flop_per_element_of_their_largest_tensor():
    assert op_flops("aten.sum.dim_IntList", (((8, 9), "float32"),), (((8,), "float32"),)) == 72
    assert op_flops("aten.full.default", (), (((8, 9), "float32"),)) == 72


DEVICE = Device("d", flops=1e12, flops32=5e11, memory_bandwidth=1e9, memory=1e9, launch=1e-6)


def square(n, dtype):
    return ((n, n), dtype)


@pytest.mark.parametrize("dtype, itemsize, peak", [("bfloat16", 2, 1e12), ("float32", 4, 5e11)])
@pytest.mark.parametrize("n", [16, 30_000])  # bound by memory; bound by compute
def test_roofline_is_the_slower_of_compute_and_memory(n, dtype, itemsize, peak):
    compute, memory = 2 * n**3 / (peak * EFFICIENCY), 3 * n * n * itemsize / 1e9
    assert (compute > memory) == (n == 30_000)
    tensors = (square(n, dtype), square(n, dtype)), (square(n, dtype),)
    assert op_seconds("aten.mm.default", *tensors, None, DEVICE) == pytest.approx(max(compute, memory) + 1e-6, rel=1e-12)


def test_views_and_getitem_are_free():
    big, row = square(1000, "float32"), ((1_000_000,), "float32")
    assert op_seconds("aten.view.default", (big,), (row,), 0, DEVICE) == 0
    assert op_seconds("operator.getitem", (big,), (big,), None, DEVICE) == 0
    assert op_seconds("aten.clone.default", (big,), (big,), None, DEVICE) == pytest.approx(8e-3 + 1e-6, rel=1e-12)


def test_an_output_that_is_not_computed_costs_nothing():
    x, w, y = ((2, 3, 4, 4), "float32"), ((5, 3, 1, 1), "float32"), ((2, 5, 4, 4), "float32")
    both = op_seconds("aten.convolution_backward.default", (y, x, w), (x, w, None), None, DEVICE)
    one = op_seconds("aten.convolution_backward.default", (y, x, w), (None, w, None), None, DEVICE)
    assert both - one == pytest.approx(math.prod(x[0]) * 4 / 1e9, rel=1e-9)


LOOKUPS = [
    ("aten.embedding.default", (((1000, 8), "float32"), ((5, 2), "int64")), (5, 2, 8), 80),
    ("aten._embedding_bag.default", (((1000, 8), "float32"), ((20,), "int64"), ((4,), "int64")), (4, 8), 160),
    ("aten.index.Tensor", (((1000, 8), "float32"), ((5,), "int64")), (5, 8), 40),
    ("aten.index_select.default", (((1000, 8), "float32"), ((5,), "int64")), (5, 8), 40),
    ("aten.gather.default", (((10, 8), "float32"), ((10, 1), "int64")), (10, 1), 10),
    ("aten.nll_loss_forward.default", (((10, 800), "float32"), ((10,), "int64")), (), 10),
]


@pytest.mark.parametrize("target, inputs, output, elements", LOOKUPS)
def test_lookups_read_only_what_they_select(target, inputs, output, elements):
    others = sum(8 * math.prod(shape) for shape, _ in inputs[1:])
    moved = 4 * elements + others + 4 * math.prod(output)
    assert op_seconds(target, inputs, ((output, "float32"),), None, DEVICE) == pytest.approx(moved / 1e9 + 1e-6, rel=1e-12)


# ---- memory


@pytest.mark.parametrize("optimizer", cost.OPTIMIZERS)
def test_optimizer_state_is_what_torch_keeps(optimizer):
    parameter = torch.nn.Parameter(torch.ones(64, 3))
    made = {
        "adamw": lambda: torch.optim.AdamW([parameter]),
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.1),
        "momentum": lambda: torch.optim.SGD([parameter], lr=0.1, momentum=0.9),
    }[optimizer]()
    parameter.grad = torch.ones_like(parameter)
    made.step()
    tensors = [t for state in made.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.shape == parameter.shape]
    assert cost.optimizer_state_bytes(parameter.numel(), optimizer) == sum(t.nbytes for t in tensors)


def test_an_unknown_optimizer_is_named_with_the_known_ones():
    assert_refused("unknown optimizer 'adam'; expected adamw, sgd, momentum", cost.optimizer_step_bytes, 1, 4, "adam")


def test_tf32_prices_matmuls_and_convolutions_as_torch_runs_them():
    """The settings of this torch are those that the prices assume."""
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (True, False)
    device = replace(DEVICE, flops_tf32=8e11, memory_bandwidth=1e15, launch=0.0)
    a, image, kernel = square(30_000, "float32"), ((8, 64, 64, 64), "float32"), ((64, 64, 3, 3), "float32")
    matmul = [op_seconds("aten.mm.default", (a, a), (a,), None, one) for one in (device, device.with_tf32())]
    assert matmul == pytest.approx([2 * 30_000**3 / (rate * EFFICIENCY) for rate in (5e11, 8e11)], rel=1e-12)
    convolved = [op_seconds("aten.convolution.default", (image, kernel), (image,), None, one) for one in (device, device.with_tf32())]
    assert convolved[0] == convolved[1] == pytest.approx(2 * 8 * 64 * 64 * 9 * 64 * 64 / (8e11 * EFFICIENCY), rel=1e-12)
    wide, narrow = ((square(30_000, dtype), square(30_000, dtype)) for dtype in ("float64", "bfloat16"))
    for pair in (wide, narrow):
        prices = {op_seconds("aten.mm.default", pair, pair[:1], None, one) for one in (device, device.with_tf32())}
        assert len(prices) == 1
