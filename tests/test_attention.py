"""Attention is one op: its kernels, its rows, and that captures hold it whichever kernel torch chose."""

import warnings
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard import torch_private
from autoshard.capture import capture, capture_fx
from autoshard.capture.attention import canonical
from autoshard.capture.operators import ATTENTION, DROPOUT, DROPOUT_BACKWARD, differentiate
from autoshard.capture.operators import BACKWARD as ATTENTION_BACKWARD
from autoshard.capture.replaced import _is_one_op
from autoshard.cli.model import load_model
from autoshard.cost.compute import op_flops
from autoshard.layout import S, parse
from autoshard.lower.kernels import attention
from autoshard.strategies.candidates import Candidate, candidates
from tests.helpers import candidate_error, one_op
from tests.helpers_lower import mesh_of

FORWARD, BACKWARD = "autoshard.attention.default", "autoshard.attention_backward.default"
aten = torch.ops.aten


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(heads, groups, width=8, of_values=8, queries=6, keys=6, dtype=torch.float32):
    return (
        random(2, heads, queries, width, seed=1, dtype=dtype),
        random(2, groups, keys, width, seed=2, dtype=dtype),
        random(2, groups, keys, of_values, seed=3, dtype=dtype),
    )


def reference(q, k, v, mask, is_causal, scale):
    """Head by head, query by query."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for b, h, t in product(*map(range, q.shape[:3])):
        g = h * k.shape[1] // q.shape[1]
        scores = (k[b, g] @ q[b, h, t]) * scale
        if mask is not None:
            full = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
            scores = scores + full[b, h, t]
        last = t + 1 if is_causal else k.shape[2]
        rows.append(torch.softmax(scores[:last], 0) @ v[b, g, :last])
    return torch.stack(rows).reshape(*q.shape[:3], -1)


CASES = [
    *product((4,), (4, 2, 1), (8,), (None, (2, 1, 1, 6), (1, 4, 6, 6), (6, 6)), (False,), (None, 0.3)),
    *product((4,), (4, 2), (8, 5), (None,), (True, False), (None,)),
]


@pytest.mark.parametrize("kernel", ["flash for CPU", "math"])
def test_every_kernel_computes_attention_and_its_gradients(kernel, monkeypatch):
    for heads, groups, of_values, mask_shape, is_causal, scale in CASES:
        if kernel == "flash for CPU" and of_values != 8:
            continue
        monkeypatch.setattr(attention, "kernel_of", lambda call: kernel)
        tensors = [x.requires_grad_() for x in qkv(heads, groups, of_values=of_values, dtype=torch.float64)]
        mask = None if mask_shape is None else random(*mask_shape, seed=4, dtype=torch.float64)
        expected = reference(*tensors, mask, is_causal, scale)
        grad = random(*expected.shape, seed=5, dtype=torch.float64)
        gradients = torch.autograd.grad(expected, tensors, grad)
        with torch.no_grad():
            out, logsumexp = attention.attention(*tensors, mask, is_causal, scale)
            computed = attention.attention_backward(grad, *tensors, out, logsumexp, mask, is_causal, scale)
        for x, y in zip((expected, *gradients), (out, *computed), strict=True):
            assert x.shape == y.shape and (x - y).abs().max() < 1e-12, (kernel, heads, groups, mask_shape, is_causal)


def test_a_query_that_may_attend_to_nothing_gets_zeros(monkeypatch):
    q, k, v = qkv(2, 2)
    mask = torch.zeros(6, 6).masked_fill(torch.eye(6, dtype=torch.bool), 0.0)
    mask[3] = -torch.inf
    monkeypatch.setattr(attention, "kernel_of", lambda call: "math")
    out, logsumexp = attention.attention(q, k, v, mask)
    assert out[:, :, 3].abs().max() == 0 and (logsumexp[:, :, 3] == -torch.inf).all()
    grads = attention.attention_backward(torch.ones_like(out), q, k, v, out, logsumexp, mask)
    assert all(torch.isfinite(g).all() for g in grads) and grads[0][:, :, 3].abs().max() == 0


@pytest.mark.parametrize(("other", "masked"), [("flash", False), ("efficient", True)])
@pytest.mark.parametrize("off", [None, "forward", "backward", "error"])
def test_cudnns_kernel_is_taken_only_where_it_agrees_with_the_other(off, other, masked, monkeypatch):
    """The two kernels of the CPU stand for those of CUDA; one that is off, or fails, is not taken."""

    def forward(call):
        if off == "error":
            raise RuntimeError("no engine")
        assert (call.attn_mask is None) != masked
        out, logsumexp = attention.math_attention(call)
        return (out * 1.1 if off == "forward" else out), logsumexp

    def backward(call, *given):
        grad_q, *grads = attention.math_attention_backward(call, *given)
        return (-grad_q if off == "backward" else grad_q), *grads

    math = (attention.math_attention, attention.math_attention_backward)
    monkeypatch.setattr(attention, "KERNELS_OF", {other: math, "cuDNN": (forward, backward)})
    attention.cudnn_agrees.cache_clear()
    with warnings.catch_warnings(record=True) as said, FakeTensorMode():  # as in a trace, in which it is asked
        warnings.simplefilter("always")
        assert attention.cudnn_agrees("cpu", torch.float32, masked) == (off is None)
    attention.cudnn_agrees.cache_clear()
    messages = [str(w.message) for w in said if w.category is UserWarning]
    assert [one.startswith(f"attention runs by the {other} kernel") for one in messages] == [True] * (off is not None)


@pytest.mark.parametrize(("capability", "agrees", "mask", "is_causal", "queries", "kernel"), [
    ((9, 0), True, None, True, 8, "cuDNN"), ((9, 0), True, (8, 8), False, 8, "cuDNN"), ((9, 0), True, (8,), False, 1, "cuDNN"),
    ((9, 0), True, None, False, 1, "flash"), ((9, 0), False, (8, 8), False, 8, "efficient"), ((9, 0), True, (8, 8), True, 8, "efficient"),
    ((8, 0), True, (8, 8), False, 8, "efficient"), ((8, 0), True, None, True, 8, "flash"), ((7, 5), True, None, True, 8, "efficient"),
])  # fmt: skip
def test_cudnns_kernel_is_for_hopper_with_a_mask_and_without(capability, agrees, mask, is_causal, queries, kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "cudnn_is_wanted", lambda: True)
    monkeypatch.setattr(attention, "cudnn_agrees", lambda *given: agrees)
    with FakeTensorMode():
        q, k = (torch.empty(2, n, t, 64, dtype=HALF, device="cuda") for n, t in ((4, queries), (2, 8)))
        given = None if mask is None else torch.empty(*mask, dtype=HALF, device="cuda")
        assert attention.kernel_of(attention.call_of(q, k, k, given, is_causal, None)) == kernel


HALF, FULL = torch.bfloat16, torch.float32
TABLE = [  # device, dtype, D, E, queries, keys, mask, causal -> kernel
    ("cpu", FULL, 64, 64, 16, 16, None, True, "flash for CPU"),
    ("cpu", HALF, 64, 64, 16, 8, (16, 8), False, "flash for CPU"),
    ("cpu", FULL, 64, 32, 16, 16, None, True, "math"),
    ("cuda", HALF, 64, 64, 16, 16, None, True, "flash"),
    ("cuda", torch.float16, 256, 256, 16, 8, None, False, "flash"),
    ("cuda", HALF, 64, 64, 16, 8, None, True, "efficient"),  # not square
    ("cuda", HALF, 64, 64, 16, 12, (2, 1, 1, 12), False, "efficient"),
    ("cuda", HALF, 512, 512, 16, 16, None, True, "efficient"),
    ("cuda", HALF, 64, 32, 16, 16, None, True, "efficient"),
    ("cuda", FULL, 64, 64, 16, 16, None, True, "efficient"),
    ("cuda", HALF, 12, 12, 16, 16, None, True, "math"),  # rows of 24 bytes
    ("cuda", torch.float64, 64, 64, 16, 16, None, True, "math"),
    ("meta", FULL, 64, 64, 16, 16, None, True, "math"),
]


@pytest.mark.parametrize(("device", "dtype", "width", "of_values", "queries", "keys", "mask", "is_causal", "kernel"), TABLE)
def test_the_kernel_is_chosen_by_device_dtype_mask_and_width_and_its_shapes_fit(
    device, dtype, width, of_values, queries, keys, mask, is_causal, kernel, monkeypatch
):
    with FakeTensorMode(), torch.no_grad():
        make = lambda *shape: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
        q, k, v = make(2, 4, queries, width), make(2, 2, keys, width), make(2, 2, keys, of_values)
        call = attention.Call(q, k, v, mask and make(*mask), is_causal, None)
        assert attention.kernel_of(call) == kernel
        for run in [kernel] * (kernel != "efficient") + ["cuDNN"] * (kernel == "flash"):  # the slices of efficient are of test_dry_run
            monkeypatch.setattr(attention, "kernel_of", lambda call, run=run: run)
            out, logsumexp = attention.attention(q, k, v, call.attn_mask, is_causal)
            assert tuple(out.shape) == (2, 4, queries, of_values) and tuple(logsumexp.shape) == (2, 4, queries)
            grads = attention.attention_backward(out, q, k, v, out, logsumexp, call.attn_mask, is_causal)
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and {g.device.type for g in grads} == {device}


@pytest.mark.parametrize("mask", [None, (5,), (2, 5), (3, 1, 1, 5), (1, 1, 2, 5), (3, 4, 2, 5), (1, 4, 1, 1)])
@pytest.mark.parametrize("strided", [False, True])
def test_few_queries_of_a_group_become_rows_of_one_head(mask, strided):
    """As they run on GPUs, by the kernel for masks: no key or value is repeated."""
    q, k, v = random(3, 4, 2, 8, seed=1), random(3, 2, 5, 8, seed=2), random(3, 2, 5, 8, seed=3)
    if strided:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    call = attention.call_of(q, k, v, None if mask is None else random(*mask, seed=4), False, None)
    one = attention._by_groups(call)
    assert one.groups == 1 and one.query.shape == (3, 2, 4, 8) and one.key is call.key
    (out, logsumexp), (ours, of_ours) = attention.math_attention(call), attention.math_attention(one)
    assert torch.allclose(ours.reshape(out.shape), out, atol=1e-6)
    assert torch.allclose(of_ours.reshape(logsumexp.shape), logsumexp, atol=1e-6)
    given = random(*out.shape, seed=5)
    grads = attention.math_attention_backward(call, given, out, logsumexp)
    of_rows = attention.math_attention_backward(one, given.reshape(ours.shape), ours, of_ours)
    assert all(torch.allclose(a, b.reshape(a.shape), atol=1e-5) for a, b in zip(grads, of_rows, strict=True))


@pytest.mark.parametrize("mask", [(5,), (2, 5), (3, 1, 1, 5), (1, 4, 1, 1)])
def test_the_mask_of_cudnns_kernel_has_all_scores_and_dense_rows(mask):
    q, k, v = random(3, 4, 2, 8), random(3, 2, 5, 8), random(3, 2, 5, 8)
    given = random(*mask)
    full = attention._full_mask(attention.call_of(q, k, v, given, False, None))
    assert full.shape == (3, 4, 2, 5) and full.stride(-1) == 1 and torch.equal(full, given.expand(3, 4, 2, 5))


def test_queries_stay_where_keys_are_repeated_for_less():
    call = attention.Call(*qkv(4, 2, queries=9, keys=5), None, False, None)
    assert attention._by_groups(call) is None and attention._by_groups(attention.Call(*qkv(4, 4), None, False, None)) is None
    assert attention._by_groups(attention.Call(*qkv(4, 2), None, True, None)) is None


# -- rows ------------------------------------------------------------------------------------------------------------------------


@cache
def ops(heads, groups, mask=None, is_causal=False, width=4):
    """Forward and backward as graphs of one op each, batch 4."""
    q, k, v = (random(4, n, 8, width, seed=n + i) for i, n in enumerate((heads, groups, groups)))
    mask = None if mask is None else random(*mask, seed=9)
    out, logsumexp = torch.ops.autoshard.attention(q, k, v, mask, is_causal)
    return (
        one_op(FORWARD, q, k, v, mask, is_causal),
        one_op(BACKWARD, random(*out.shape, seed=8), q, k, v, out, logsumexp, mask, is_causal),
    )


SHAPES = [(4, 4), (8, 4), (8, 2), (8, 1), (4, 4, (4, 1, 8, 8)), (8, 2, (8, 8)), (4, 4, None, True), (8, 2, None, True), (14, 7), (6, 3)]


LARGE = [pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((8,), (2, 4))]


@pytest.mark.parametrize("sizes", [(2,), (4,), (3,), (2, 2), *LARGE], ids=str)
def test_every_candidate_computes_attention(sizes):
    count = 0
    for shape in SHAPES if len(sizes) == 1 else SHAPES[1:5]:
        for graph, tensors, outputs in ops(*shape):
            for candidate in candidates(graph, mesh_of(*sizes)).of[-1]:
                assert candidate_error(graph, tensors, outputs, candidate, mesh_of(*sizes)) < 2e-5, (shape, candidate)
                count += 1
    assert count > {1: 40, 2: 120}[len(sizes)]


def layouts(heads, groups, *sizes):
    """Of q and k, forward."""
    graph, _, _ = ops(heads, groups)[0]
    return {(c.inputs[0], c.inputs[1]) for c in candidates(graph, mesh_of(*sizes)).of[-1]}


def test_query_heads_are_sharded_further_than_their_key_value_heads():
    assert (parse("S(1)"), parse("R")) in layouts(8, 1, 8) and (parse("S(1)"), parse("R")) in layouts(8, 4, 8)
    assert (parse("S(1),S(1)"), parse("S(1),R")) in layouts(8, 2, 2, 4)
    assert (parse("S(1),S(1)"), parse("R,S(1)")) not in layouts(8, 2, 2, 2)  # a rank would lack the key-value heads of its queries
    assert (S(1),) not in {k for _, k in layouts(8, 1, 8)} and (parse("S(1)"), parse("R")) not in layouts(8, 8, 8)


def test_key_value_heads_that_are_not_those_of_the_queries_are_refused():
    graph, tensors, outputs = ops(8, 2)[0]
    q, k = parse("S(1),S(1)"), parse("R,S(1)")
    with pytest.raises(ValueError, match="the key-value heads of a rank are not those of its query heads"):
        candidate_error(graph, tensors, outputs, Candidate((q, k, k), (q, q)), mesh_of(2, 2))


def test_flops_are_those_of_torchs_kernels():
    graph = ops(8, 2)[1][0]
    described = [(t.shape, t.dtype) for t in graph.input_tensors(len(graph.ops) - 1)]
    forward = op_flops(FORWARD, described[1:4], [described[0], None])
    assert forward == op_flops("aten._scaled_dot_product_flash_attention.default", described[1:4], [described[0], None])
    assert op_flops(BACKWARD, described, described[1:4]) == 2.5 * forward == 2.5 * 4 * 4 * 8 * 8 * 8 * 4


# -- captures --------------------------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self, attend, heads=4, groups=4):
        super().__init__()
        self.attend, self.heads, self.groups = attend, heads, groups
        self.q, self.k, self.v = nn.Linear(16, 4 * heads), nn.Linear(16, 4 * groups), nn.Linear(16, 4 * groups)

    def forward(self, x):
        split = lambda y, heads: y.unflatten(-1, (heads, 4)).transpose(1, 2)  # noqa: E731
        return self.attend(split(self.q(x), self.heads), split(self.k(x), self.groups), split(self.v(x), self.groups)).mean()


def captured(module, training):
    return capture(module, (torch.empty(2, 6, 16, device="meta"),), training=training)


def expanded(x):
    return x[:, :, None].expand(x.shape[0], x.shape[1], 2, *x.shape[2:]).reshape(x.shape[0], 2 * x.shape[1], *x.shape[2:])


def repeated(x):
    return x.repeat_interleave(2, dim=1)


def tiled(x):
    return torch.cat([x, x], 1)  # other heads: no groups


def masked(*shape, dtype=torch.bool):
    def attend(q, k, v):
        mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
        mask = mask if dtype == torch.bool else torch.zeros(shape).masked_fill(~mask, -9.0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


PLAIN = {
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), {}),
    "scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5), {}),
    "bool mask": (masked(6, 6), {}),
    "mask of batch": (masked(2, 1, 6, 6, dtype=torch.float32), {}),
    "mask of heads": (masked(4, 6, 6), {}),
    "values of another width": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v[..., :3]), {}),
    "enable_gqa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), {"groups": 2}),
    "expanded": (lambda q, k, v: F.scaled_dot_product_attention(q, expanded(k), expanded(v)), {"groups": 2}),
    "repeated": (lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v)), {"groups": 2}),
    "single head": (lambda q, k, v: F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q)), {"groups": 1}),
}


ALONE = ("causal", "expanded")  # quick without training too: a joint graph has the forward as well
FORMS = [pytest.param(name, t, marks=[] if t or name in ALONE else pytest.mark.slow) for name in PLAIN for t in (False, True)]


@pytest.mark.parametrize(("name", "training"), FORMS)
def test_attention_is_captured_as_one_op_and_keys_are_not_repeated(name, training):
    attend, sizes = PLAIN[name]
    graph = captured(Attends(attend, **sizes), training=training)
    targets = [op.target for op in graph.ops]
    assert targets.count(FORWARD) == 1 and targets.count(BACKWARD) == training
    assert not any("scaled_dot_product" in t or "bmm" in t or "softmax" in t or "detach" in t for t in targets)
    op = targets.index(FORWARD)
    assert graph.input_tensors(op)[1].shape[1] == sizes.get("groups", 4)
    larger = [op.name for op in graph.ops for t in op.outputs if t is not None and len(t.shape) == 5]
    assert not larger  # [batch, groups, heads of a group, keys, width]


Q, K, G = (2, 4, 3, 8), (2, 4, 5, 8), (2, 2, 5, 8)  # batch, heads, tokens, width
TAKEN = {  # shapes of query, key and value, and what else differs: whether one operator computes it
    "plain": (Q, K, K, {}, True), "values of another width": (Q, K, (2, 4, 5, 6), {}, True), "masked": (Q, K, K, {"mask": (3, 5)}, True),
    "causal": (Q, Q, Q, {"is_causal": True}, True), "dropout": (Q, K, K, {"dropout": 0.99}, True), "groups": (Q, G, G, {}, True),
    "keys of another width": (Q, (2, 4, 5, 6), K, {}, False), "fewer values": (Q, K, (2, 4, 4, 8), {}, False),
    "heads of values": (Q, K, G, {}, False), "another batch": ((1, 4, 3, 8), K, K, {}, False),
    "no such groups": (Q, *[(2, 3, 5, 8)] * 2, {}, False), "not grouped": (Q, G, G, {"grouped": False}, False),
    "mask of 5 dims": (Q, K, K, {"mask": (1, 2, 1, 3, 5)}, False), "two masks": (Q, K, K, {"mask": (3, 5), "is_causal": True}, False),
    "mask of 4 dims": (Q, K, K, {"mask": (2, 1, 3, 5)}, True), "trained mask": (Q, K, K, {"mask": (3, 5), "trained": True}, False),
    "everything dropped": (Q, K, K, {"dropout": 1.0}, False), "no tokens": ((2, 4, 0, 8), K, K, {}, False),
    "no keys": (Q, *[(2, 4, 0, 8)] * 2, {}, False), "three dims": (Q[1:], K[1:], K[1:], {}, False),
    "three of keys": (Q, K[1:], K[1:], {}, False), "integers": (Q, K, K, {"dtypes": [torch.int64] * 3}, False),
    "a double": (Q, K, K, {"dtypes": [torch.float32, torch.float32, torch.float64]}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_one_operator_computes(name):
    *shapes, more, taken = TAKEN[name]
    more = {"mask": None, "dropout": 0.0, "is_causal": False, "grouped": True, "trained": False, "dtypes": [torch.float32] * 3, **more}
    mask = None if more["mask"] is None else torch.empty(more["mask"], device="meta", requires_grad=more["trained"])
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, more["dtypes"])]
    assert _is_one_op(*tensors, mask, more["dropout"], more["is_causal"], more["grouped"]) is taken


OTHERS = {
    "everything dropped": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1.0),
    "trained mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q @ k.mT),
    "no heads": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_attention_that_trains_its_mask_or_keeps_nothing_stays_decomposed(name):
    graph = captured(Attends(OTHERS[name]), training=True)
    targets = {op.target for op in graph.ops}
    if name == "no heads" and torch_private.VERSION >= (2, 14):  # torch adds the dim, and both kernels become ours
        assert {FORWARD, BACKWARD} <= targets and "aten.bmm.default" not in targets
        return
    assert not any(target.startswith("autoshard") for target in targets) and "aten.bmm.default" in targets


@pytest.mark.parametrize("groups", [tiled, lambda x: expanded(x) + 1], ids=["tiled", "changed"])
def test_other_keys_are_kept(groups):
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, groups(k), groups(v))  # noqa: E731
    graph = captured(Attends(attend, groups=2), training=True)
    op = next(i for i, op in enumerate(graph.ops) if op.target == FORWARD)
    assert graph.input_tensors(op)[1].shape[1] == 4


def test_repeated_keys_that_are_read_elsewhere_too_keep_their_gradient():
    def attend(q, k, v):
        k = expanded(k)
        return F.scaled_dot_product_attention(q, k, expanded(v)) + k

    graph = captured(Attends(attend, groups=2), training=True)
    op = next(i for i, op in enumerate(graph.ops) if op.target == FORWARD)
    assert [t.shape[1] for t in graph.input_tensors(op)] == [4, 4, 4]  # as they were: keys and values have one number of heads


def test_outside_of_a_capture_attention_is_torchs():
    q, k, v = qkv(4, 4)
    traced = make_fx(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(q, k, v)
    assert "_scaled_dot_product_flash_attention_for_cpu" in traced.code and "autoshard" not in traced.code


KERNELS = {
    "flash_attention": ((0.0, True), torch.bfloat16),
    "efficient_attention": ((None, True, 0.0, True), torch.float32),
    "cudnn_attention": ((None, True, 0.0, True), torch.bfloat16),
    "flash_attention_for_cpu": ((0.0, True), torch.float32),
    "fused_attention_overrideable": ((None, 0.0, True), torch.bfloat16),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_graph_with_any_kernel_of_torch_becomes_the_same_op(name):
    options, dtype = KERNELS[name]
    device = "cpu" if name.endswith("cpu") else "cuda"

    def run(q, k, v):
        return getattr(aten, f"_scaled_dot_product_{name}").default(q, k, v, *options, scale=0.5)[0]

    with FakeTensorMode() as mode:
        example = [torch.empty(2, 4, 32, 8, dtype=dtype, device=device) for _ in range(3)]
    with mode:
        graph = capture_fx(make_fx(run)(*example)).graph
    (op,) = [op for op in graph.ops if not op.is_placeholder]
    assert op.target == FORWARD and op.literals[0][3:] == (None, True, 0.5)
    assert [t.shape for t in op.outputs] == [(2, 4, 32, 8), (2, 4, 32)]


def test_a_joint_graph_with_a_kernel_of_torch_becomes_forward_and_backward():
    def run(g, q, k, v):
        out, logsumexp, _, _, a, b, seed, offset, _ = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True)
        more = (None, None, a, b, 0.0, True, seed, offset)
        return out, *aten._scaled_dot_product_flash_attention_backward.default(g, q, k, v, out, logsumexp, *more)

    with FakeTensorMode() as mode:
        example = [torch.empty(2, 4, 32, 8, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    with mode:
        graph = capture_fx(make_fx(run)(*example)).graph
    assert [op.target for op in graph.ops if not op.is_placeholder] == [FORWARD, BACKWARD]


def test_a_joint_graph_whose_kernel_keeps_detached_results_becomes_forward_and_backward():
    def run(g, q, k, v):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True)
        kept = out.detach().detach()
        return out, *aten._scaled_dot_product_flash_attention_for_cpu_backward.default(g, q, k, v, kept, logsumexp, 0.0, True)

    with FakeTensorMode():
        example = [torch.empty(2, 4, 32, 8) for _ in range(4)]
    traced = make_fx(run)(*example)
    assert canonical(traced)
    assert [str(node.target) for node in traced.graph.nodes if str(node.target).startswith(("autoshard", "aten"))] == [FORWARD, BACKWARD]


def test_the_gradients_of_an_operator_are_as_many_as_its_inputs(monkeypatch):
    """torch counts them from 2.14.1 on: one for each positional input, None for those that are no tensors."""
    registered = {}
    monkeypatch.setattr(torch.library, "register_autograd", lambda op, of, setup_context: registered.update({op: of}))
    differentiate(ATTENTION, ATTENTION_BACKWARD)
    differentiate(DROPOUT, DROPOUT_BACKWARD)
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 8)
        saved = (q, q, q, q, q.new_empty(2, 4, 8))
        others = {"attn_mask": None, "is_causal": True, "scale": None, "head_tail": 0}
        attention_grads = registered[ATTENTION](SimpleNamespace(saved_tensors=saved, others=others), q, None)
        saved = (*saved, q.new_empty(2, 4, 8, 8, dtype=torch.bool))
        others = {"dropout_p": 0.5, "attn_mask": None, "is_causal": True, "scale": None}
        dropout_grads = registered[DROPOUT](SimpleNamespace(saved_tensors=saved, others=others), q, None)
    assert len(attention_grads) == len(ATTENTION._schema.arguments) == 7
    assert len(dropout_grads) == len(DROPOUT._schema.arguments)
    assert all(grad is not None for grad in (*attention_grads[:3], *dropout_grads[:3]))


def test_a_capture_is_the_same_after_torch_has_traced_the_model():
    """torch's dispatcher in Python remembers the kernel that it chose, and would not see ours."""
    choices = aten.scaled_dot_product_attention.default._dispatch_cache
    module = Attends(partial(F.scaled_dot_product_attention, is_causal=True))
    choices.clear()
    before = captured(module, training=True)
    torch.export.export(module, (torch.randn(2, 6, 16),))
    assert choices and captured(module, training=True) == before
    assert not choices  # torch does not see ours afterwards


def test_grouped_queries_need_fewer_ops_and_no_more_bytes_than_equal_heads():
    def sizes(kv_heads):
        from models import llama

        model, inputs = llama.build(
            layers=1, heads=8, kv_heads=kv_heads, width=64, hidden=64, vocab=64, batch=2, seq=16, loss=True, dtype="float32"
        )
        graph = capture(model, inputs, training=True)
        keys = [t for i, op in enumerate(graph.ops) if op.target in (FORWARD, BACKWARD) for t in graph.input_tensors(i)[-5:-3]]
        return len(graph.ops), sum(t.bytes for op in graph.ops for t in op.outputs if t is not None), keys

    (grouped, bytes_grouped, _), (equal, bytes_equal, _) = sizes(2), sizes(8)
    assert grouped <= equal and bytes_grouped < bytes_equal


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "qwen3"))])
def test_transformers_repeated_keys_are_undone(name):
    module, inputs = load_model(f"hf:tests/data/hf/{name}", {"layers": 1}, training=True)
    graph = capture(module, inputs, training=True)
    tensors = [graph.input_tensors(i) for i, op in enumerate(graph.ops) if op.target == FORWARD]
    assert tensors and all(k.shape[1] < q.shape[1] for q, k, *_ in tensors)
    assert not any(len(t.shape) == 5 for op in graph.ops for t in op.outputs if t is not None)
