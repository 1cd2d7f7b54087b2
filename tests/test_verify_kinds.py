"""Kinds of models that verify has to compare right: complex numbers, dropout, parameters that the forward writes, constants, recurrence.

Every kind in each of its modes: the plan and random layouts are right, and a planted fault is found.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, nan

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoshard import api
from autoshard.capture import capture
from autoshard.graph import Graph, Op, Ref, Result, Tensor
from autoshard.lower import plant_fault, run_global, verify_program
from autoshard.lower.generator import draws
from autoshard.lower.sharding import gap, largest
from autoshard.lower.unsharded import index_bounds, run_unsharded
from autoshard.mesh import Mesh
from autoshard.precision import Precision
from autoshard.solution import Placed
from autoshard.strategies import candidates
from tests.helpers_lower import laid, mesh_of, one_op, random_layouts
from tests.helpers_models import Model
from tests.helpers_refusals import assert_refused

X, IMAGE, TOKENS = (4, 8, 16), (4, 4, 8, 8), (4, 8)


def rotary(m, x):
    q = torch.view_as_complex(m.q(x).view(4, 8, 4, 4, 2)) * m.turns[:, None]
    return F.mse_loss(m.o(torch.view_as_real(q).flatten(2)), x)


def fourier(device):
    weight = nn.Parameter(torch.randn(9, 16, dtype=torch.complex64, device=device))
    return Model(filtered, weight=weight, linear=nn.Linear(16, 16, device=device))


def filtered(m, x):
    return torch.fft.irfft(torch.fft.rfft(m.linear(x).repeat(1, 2, 1), dim=1) * m.weight, n=16, dim=1).square().mean()


def conjugated(m, x):
    """Conjugated twice, so that the captured program reads a pending conjugation; the gradient of a complex matmul is a third."""
    return (torch.complex(m.linear(x), x).conj() @ m.weight).conj().imag.exp().sum(0).square().mean()


def dropout(forward):
    return Model(forward, a=nn.Linear(16, 32), b=nn.Linear(32, 16), drop=nn.Dropout(0.3))


def block(m, x):
    return m.b(m.drop(F.relu(m.a(x))))


def encoder(m, tokens):
    return F.cross_entropy(m.drop(m.layer(m.drop(m.words(tokens)))).flatten(0, 1), tokens.flatten())


def writes_parameter(m, x):
    with torch.no_grad():
        m.decay.mul_(0.5)
    return (m.linear(x) * m.decay).square().mean()


def writes_activation(m, x):
    y = m.linear(x)
    m.state.copy_(y)
    return (y * m.state).mean()


def constants(m, x):
    y = m.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0] * 4)
    y = torch.where(torch.tensor(nan).isnan(), y, 0.0)
    return torch.cat([torch.tensor([]), y.flatten()]).square().mean()


def squared(*layers):
    return Model(lambda m, x: m.layers(x).square().mean(), layers=nn.Sequential(*layers))


def linear(forward, **parts):
    return Model(forward, linear=nn.Linear(16, 16), **parts)


def with_attribute(forward=lambda m, x: (m.linear(x) * m.steps).square().mean(), device="cpu"):
    model = linear(forward)
    model.steps = torch.arange(16.0, device=device)
    return model


@dataclass(frozen=True)
class Kind:
    build: Callable[[], nn.Module]
    modes: tuple[bool, ...] = (False, True)  # training?
    shape: tuple[int, ...] = X

    def inputs(self):
        generator = torch.Generator().manual_seed(0)
        if self.shape == TOKENS:
            return (torch.randint(0, 16, self.shape, generator=generator),)
        return (torch.randn(self.shape, generator=generator),)


FORWARD, TRAINING = (False,), (True,)  # dropout in a forward alone can't be captured
TURNS = torch.polar(torch.ones(8, 4), 0.1 * torch.arange(32.0).reshape(8, 4))
KINDS = {
    # queries turned as complex numbers, the frequencies a complex buffer
    "rotary": Kind(lambda: Model(rotary, q=nn.Linear(16, 32, bias=False), o=nn.Linear(32, 16, bias=False), turns=TURNS)),
    # a complex parameter on the 9 frequencies of a dim of 16: parts are uneven
    "fourier": Kind(lambda: fourier("cpu")),
    "fourier on meta": Kind(lambda: fourier("meta")),
    "conjugated": Kind(lambda: linear(conjugated, weight=nn.Parameter(torch.randn(16, 16, dtype=torch.complex64) / 8))),
    "dropout": Kind(lambda: dropout(lambda m, x: block(m, block(m, x)).square().mean()), TRAINING),
    # its masks are drawn again in the backward pass
    "checkpointed dropout": Kind(
        lambda: dropout(lambda m, x: block(m, checkpoint(partial(block, m), x, use_reentrant=False)).square().mean()), TRAINING
    ),
    # dropout of attention's scores, and of a tensor whose dims are permuted in memory
    "encoder": Kind(
        lambda: Model(
            encoder, words=nn.Embedding(16, 16), drop=nn.Dropout(0.2),
            layer=nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True),
        ), TRAINING, TOKENS,
    ),
    # dropout of whole channels, and one that is no op of its own
    "channels": Kind(lambda: squared(nn.Conv2d(4, 8, 3), nn.Dropout2d(0.3), nn.AlphaDropout(0.2)), TRAINING, IMAGE),
    "noise": Kind(lambda: linear(lambda m, x: (m.linear(x + torch.randn_like(x)) * torch.rand(16)).square().mean())),
    # as RWKV, which rescales its weights in the forward
    "writes a parameter": Kind(lambda: linear(writes_parameter, decay=nn.Parameter(torch.rand(16) + 1))),
    # a buffer that gets what a gradient flows through
    "writes an activation": Kind(lambda: linear(writes_activation, state=torch.zeros(4, 8, 16))),
    "batch norm": Kind(lambda: squared(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)), shape=IMAGE),
    # statistics and gradients of a norm whose own tensors have 16 bits
    "batch norm of 16 bits": Kind(
        lambda: Model(lambda m, x: m.norm(x.bfloat16()).float().square().mean(), norm=nn.BatchNorm2d(4, dtype=torch.bfloat16)),
        TRAINING, IMAGE,
    ),
    # an empty constant (a cache before its first token), one of several values, and nan
    "constants": Kind(lambda: linear(constants)),
    # a tensor that is neither parameter nor buffer; dynamo refuses it
    "attribute": Kind(with_attribute, FORWARD),
    "attribute without values that nothing reads": Kind(lambda: with_attribute(lambda m, x: m.linear(x).square(), "meta"), FORWARD),
    # its kernel returns no workspace where the capture has an empty one
    "recurrent": Kind(lambda: linear(lambda m, x: m.linear(m.lstm(x)[0]), lstm=nn.LSTM(16, 16, batch_first=True)), FORWARD),
}  # fmt: skip
CASES = [(name, training) for name, kind in KINDS.items() for training in kind.modes]


@cache
def planned(name, training):
    torch.manual_seed(0)
    model, inputs = KINDS[name].build(), KINDS[name].inputs()
    return model, inputs, api.plan(model, inputs, Mesh.from_bandwidths((2, 2)), training=training, baselines=False, objective="serial")


@pytest.mark.parametrize(("name", "training"), CASES)
def test_the_plan_and_random_layouts_are_right(name, training):
    model, inputs, solution = planned(name, training)
    found = api.verify(model, inputs, solution, random=3)
    assert found["ok"], found


@pytest.mark.parametrize(("name", "training"), CASES)
def test_a_planted_fault_is_found(name, training):
    model, inputs, solution = planned(name, training)
    for seed in range(3):
        assert not api.verify(model, inputs, solution, plant_fault=True, seed=seed)["ok"]


# -- complex numbers ---------------------------------------------------------------------------------------------------------------


def test_the_gap_of_complex_tensors_is_the_largest_of_a_component():
    a = torch.tensor([1 + 2j, 3 - 4j])
    assert gap(a, a.clone()) == 0.0
    assert gap(a, a + 0.5j) == 0.5 and gap(a, a - 0.25) == 0.25
    assert gap(a, a.conj()) == 8.0 and gap(a.conj(), a.conj().resolve_conj()) == 0.0
    assert largest(a) == 4.0 and largest(torch.tensor([complex(0.5, nan), complex(-inf, 0.25)])) == 0.5
    assert gap(torch.tensor([complex(inf, nan)]), torch.tensor([complex(inf, nan)])) == 0.0
    assert gap(torch.tensor([complex(inf, 0.0)]), torch.tensor([complex(0.0, 0.0)])) == inf
    assert gap(torch.tensor([1]), torch.tensor([2])) == inf  # integers are equal or not


def test_a_wrong_sign_of_the_imaginary_part_is_found():
    """The gradient of a complex parameter, conjugated, has the right modulus everywhere."""
    model, inputs, solution = planned("fourier", True)
    graph = capture(model, inputs, training=True)
    values, reference = run_unsharded(model, inputs, graph, training=True, seed=0)
    check = lambda expected: verify_program(graph, solution.layouts, solution.results, solution.mesh, values, expected)  # noqa: E731
    assert check(reference).ok
    found = check({**reference, "gradient:weight": reference["gradient:weight"].conj()})
    assert not found.ok and not found.placement_mismatches and found.max_relative_error_gradients > 0.01


def test_the_noise_of_complex_placeholders_is_that_of_their_components():
    x, y = torch.tensor([1 + 1j, 2 - 1j]), torch.tensor([1 + 1j, 2 - 1j])
    graph, values = one_op("aten.sub.Tensor", x, y)  # zero but for rounding
    layouts = laid(graph, ["S(0)", "S(0)"], ["S(0)"])
    assert verify_program(graph, layouts, {}, mesh_of(2), values, {"output:0": torch.zeros(2, dtype=torch.complex64)}).ok
    assert verify_program(graph, layouts, {}, mesh_of(2), {**values, "x0": x * (1 + 1e-7)}, {"output:0": torch.full((2,), 1e-9j)}).ok
    assert not verify_program(graph, layouts, {}, mesh_of(2), values, {"output:0": torch.full((2,), 1e-3j)}).ok


def test_layouts_that_explain_uneven_parts_are_looked_for_by_the_shapes_of_all_ranks():
    """Rank 0 of 9 rows has 5 of them; a fault that explains itself as a sum would add 5 rows to 4."""
    graph, values = one_op("aten.clone.default", torch.randn(9, 5))
    found = verify_program(graph, laid(graph, ["S(0)"], ["S(1)"]), {}, mesh_of(2), values)
    assert [(m.planned, m.actual) for m in found.placement_mismatches] == [("S(1)", "S(0)")]


# -- random numbers ----------------------------------------------------------------------------------------------------------------


def test_random_ops_draw_one_after_the_other():
    """Two draws of one shape differ, another seed draws others, and torch's own generator is left as it was."""
    t = Tensor((64,), "float32")
    ops = [Op("x", "input", (), (), (t,), "input")]
    ops += [Op(f"bernoulli_{k}", "aten.bernoulli.p", ((0, 0),), ((Ref(0), 0.5), ()), (t,)) for k in range(2)]
    graph = Graph(tuple(ops), tuple(Result("output", str(k), (k + 1, 0)) for k in range(2)))
    values, state = {"x": torch.zeros(64)}, torch.get_rng_state()
    first, again, other = run_global(graph, values), run_global(graph, values), run_global(graph, values, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first["output:0"], first["output:1"]) and not torch.equal(first["output:0"], other["output:0"])
    assert all(torch.equal(first[key], again[key]) for key in first)
    torch.manual_seed(0)
    assert torch.equal(first["output:0"], torch.bernoulli(values["x"], 0.5))  # as one process does
    layouts = {"x": Placed((), ("R",)), **{f"bernoulli_{k}": Placed(("R",), ("R",)) for k in range(2)}}
    assert verify_program(graph, layouts, {}, mesh_of(2), values, first).ok
    with pytest.raises(ValueError, match=r"differ in output:0.* \(dropout\) .*model\.eval\(\)"):
        verify_program(graph, layouts, {}, mesh_of(2), values, {"output:0": first["output:1"], "output:1": first["output:0"]})


def test_what_draws_and_what_only_passes_a_mask_on():
    assert draws("aten.native_dropout.default") and draws("aten.rand_like.default")
    assert not draws("aten.native_dropout_backward.default") and not draws("autoshard.attention.default")


# -- what the forward writes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("writes a parameter", "decay"), ("writes an activation", "state")])
def test_what_is_written_is_a_result_and_has_no_tangent_of_its_own(kind, name, training):
    graph = capture(KINDS[kind].build(), (torch.randn(X),), training=training)
    assert [result.kind for result in graph.results if result.name == name and result.kind != "gradient"] == ["buffer"]
    assert [result.name for result in graph.results if result.kind == "output"] == ["0"]
    assert [op.name for op in graph.ops if op.kind == "tangent"] == (["tangent_0"] if training else [])


def test_what_is_written_is_compared_with_the_model():
    model, inputs, solution = planned("writes a parameter", True)
    graph = capture(model, inputs, training=True)
    values, reference = run_unsharded(model, inputs, graph, training=True, seed=0)
    assert torch.equal(reference["buffer:decay"], model.decay.detach() * 0.5)
    wrong = {**reference, "buffer:decay": model.decay.detach()}
    assert not verify_program(graph, solution.layouts, solution.results, solution.mesh, values, wrong).ok


def test_a_model_that_runs_on_no_device_is_refused_in_a_sentence():
    """A mixture of dtypes that the capture takes: a float32 buffer before a norm whose own tensors have 16 bits."""
    model = linear(lambda m, x: m.norm(m.linear(x) * m.scale), norm=nn.LayerNorm(16), scale=torch.ones(16))
    inputs = KINDS["attribute"].inputs()
    given = {"training": False, "precision": Precision.of("bf16")}
    graph, told = capture(model, inputs, **given), "the unsharded model fails on cpu with real tensors: RuntimeError: mixed dtype"
    assert_refused(told, run_unsharded, model, inputs, graph, seed=0, **given)


@pytest.mark.parametrize("training", [False, True])
def test_ids_of_a_bag_are_rows_of_its_table(training):
    bag = nn.EmbeddingBag(1, 8, device="meta")
    bounds = index_bounds(capture(bag, (torch.zeros(4, 3, dtype=torch.int64, device="meta"),), training=training))
    assert list(bounds.values()) == [1]


# -- nothing to hold ---------------------------------------------------------------------------------------------------------------


def test_no_fault_is_planted_in_an_empty_tensor():
    """Of nothing every layout is right, so that it would not be found."""
    graph, _ = one_op("aten.clone.default", torch.ones(0))
    assert_refused("there is no op whose layout can be wrong", plant_fault, laid(graph, ["R"], ["R"]), graph, mesh_of(2), 0)


def test_an_output_that_a_kernel_lacks_is_empty_or_an_error():
    check = Op("op", "aten._assert_async.default", ((0, 0),), ((Ref(0),), ()), (Tensor((0,), "uint8"),))  # a kernel that returns None
    x, placed = Op("x", "input", (), (), (Tensor((), "float32"),), "input"), {"x": Placed((), ("R",)), "op": Placed(("R",), ("R",))}
    run = lambda op: verify_program(Graph((x, op), ()), placed, {}, mesh_of(2), {"x": torch.ones(())})  # noqa: E731
    assert run(check).ok
    with pytest.raises(ValueError, match=r"_assert_async.* returned nothing where the captured program has a tensor of \(4,\)"):
        run(replace(check, outputs=(Tensor((4,), "float32"),)))


# -- on other meshes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8,), (2, 3)], ids=str)
def test_dropout_in_random_layouts_on_other_meshes(sizes):
    model, inputs, _ = planned("dropout", True)
    graph, mesh = capture(model, inputs, training=True), mesh_of(*sizes)
    values, reference = run_unsharded(model, inputs, graph, training=True, seed=7)
    possible = candidates(graph, mesh)
    for seed in range(3):
        layouts, results = random_layouts(graph, mesh, seed, possible)
        assert verify_program(graph, layouts, results, mesh, values, reference, seed=7).ok
