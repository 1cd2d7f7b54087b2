"""Random ops on any mesh: the numbers of one device, or those of each shard alone; never the same on two shards nor others on replicas."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import capture
from autoshard.graph import Op, Tensor, is_without_dropout
from autoshard.graph import random as random_ops
from autoshard.lower import generator, verify_program
from autoshard.lower.kernels import random
from autoshard.lower.unsharded import materialized, run_unsharded
from autoshard.runtime import shared_generator
from autoshard.runtime.shared_generator import SharedGenerator
from autoshard.strategies.candidates import candidates
from tests.helpers import fast_mesh
from tests.helpers_lower import mesh_of, random_layouts
from tests.helpers_models import Model, gradients_of, losses_of, parallel, right_plan
from tests.helpers_ranks import results

D = torch.distributions
ROWS, COLUMNS = 6, 8

# h [6, 8] needs a gradient, t is h transposed, p are probabilities
DRAWS = {
    "rand": lambda h, t, p: torch.rand(ROWS, COLUMNS) * h,
    "randn": lambda h, t, p: torch.randn(ROWS, COLUMNS, dtype=h.dtype) * h,
    "randint": lambda h, t, p: torch.randint(2, 9, (ROWS, COLUMNS)) * h,
    "randint high": lambda h, t, p: torch.randint(9, (ROWS, COLUMNS)) * h,
    "normal of numbers": lambda h, t, p: torch.normal(1.0, 2.0, (ROWS, COLUMNS)) * h,
    "rand_like": lambda h, t, p: torch.rand_like(h) * h,
    "randn_like": lambda h, t, p: torch.randn_like(h) * h,
    "randn_like, transposed": lambda h, t, p: torch.randn_like(t) * t,
    "randint_like": lambda h, t, p: torch.randint_like(p, 7) * h,
    "randint_like low": lambda h, t, p: torch.randint_like(p, 3, 7) * h,
    "normal_": lambda h, t, p: torch.empty_like(h).normal_(1.0, 2.0) * h,
    "normal_, transposed": lambda h, t, p: torch.empty_like(t).normal_() * t,
    "uniform_": lambda h, t, p: torch.empty_like(h).uniform_(-1.0, 2.0) * h,
    "exponential_": lambda h, t, p: torch.empty_like(h).exponential_(2.0) * h,
    "cauchy_": lambda h, t, p: torch.empty_like(h).cauchy_() * h,
    "log_normal_": lambda h, t, p: torch.empty_like(h).log_normal_() * h,
    "geometric_": lambda h, t, p: torch.empty_like(h).geometric_(0.3) * h,
    "random_": lambda h, t, p: torch.empty_like(h).random_(5) * h,
    "bernoulli_": lambda h, t, p: torch.empty_like(h).bernoulli_(0.4) * h,
    "bernoulli_ of probabilities": lambda h, t, p: torch.empty_like(h).bernoulli_(p) * h,
    "bernoulli_ of a row": lambda h, t, p: torch.empty_like(h).bernoulli_(p[:1]) * h,
    "bernoulli": lambda h, t, p: torch.bernoulli(p) * h,
    "bernoulli.p": lambda h, t, p: torch.bernoulli(h.detach(), 0.4) * h,
    "bernoulli, transposed": lambda h, t, p: torch.bernoulli(p.mT) * t,
    "normal of means": lambda h, t, p: torch.normal(p, 2.0) * h,
    "normal of deviations": lambda h, t, p: torch.normal(1.0, p) * h,
    "normal of tensors": lambda h, t, p: torch.normal(p, p[:1]) * h,
    "multinomial": lambda h, t, p: torch.multinomial(p, 3).float().mean() * h,
    "multinomial with replacement": lambda h, t, p: torch.multinomial(p, 5, replacement=True).float().mean() * h,
    "randperm": lambda h, t, p: h[torch.randperm(ROWS)],
    "poisson": lambda h, t, p: torch.poisson(3 * p) * h,
    "binomial": lambda h, t, p: torch.binomial(torch.full_like(p, 5.0), p) * h,
    "gamma": lambda h, t, p: D.Gamma(h.exp(), 2.0, validate_args=False).rsample(),
    "gumbel_softmax": lambda h, t, p: F.gumbel_softmax(h, tau=0.5),
    "gumbel_softmax, hard": lambda h, t, p: F.gumbel_softmax(h, hard=True),
    "drop path": lambda h, t, p: h * h.new_empty(ROWS, 1).bernoulli_(0.7) / 0.7,
    "dropout": lambda h, t, p: F.dropout(h, 0.3),
    "dropout, transposed": lambda h, t, p: F.dropout(t, 0.3),
    "dropout of all": lambda h, t, p: F.dropout(h, 1.0) + F.dropout(h, 0.5),
    "alpha_dropout": lambda h, t, p: F.alpha_dropout(h, 0.3, training=True),
    "feature_dropout": lambda h, t, p: F.dropout2d(h[None].expand(4, -1, -1)[..., None], 0.3),
    "feature_alpha_dropout": lambda h, t, p: F.feature_alpha_dropout(h[None].expand(4, -1, -1), 0.3, training=True),
    "rrelu": lambda h, t, p: F.rrelu(h, training=True),
    "normal rsample": lambda h, t, p: D.Normal(h, p, validate_args=False).rsample(),
    "uniform rsample": lambda h, t, p: D.Uniform(h, h + 1.0, validate_args=False).rsample(),
    "laplace rsample": lambda h, t, p: D.Laplace(h, p, validate_args=False).rsample(),
    "exponential rsample": lambda h, t, p: D.Exponential(h.exp(), validate_args=False).rsample(),
    "categorical sample": lambda h, t, p: D.Categorical(logits=h, validate_args=False).sample().float().mean() * h,
    "unused": lambda h, t, p: (torch.randn_like(h), torch.randn_like(h) * h)[1],
    "in a slice": lambda h, t, p: torch.cat([torch.empty_like(h)[:3].uniform_(), h[3:]]) * h,
}  # fmt: skip


ASKING = ("poisson", "binomial", "gamma", "rrelu")  # drawn per shard at any size


def drawing(names):
    """Draws each of these twice, the second time from what came first."""

    def forward(m, x):
        loss, h = 0.0, m.linear(x)
        for linear in (m.second, m.linear):
            with torch.no_grad():
                p = torch.sigmoid(h)
            for name in names:
                y = DRAWS[name](h, h.mT, p)
                loss = loss + y.square().mean()
            h = linear(y.reshape(-1)[: ROWS * COLUMNS].reshape(ROWS, COLUMNS))
        return loss

    return with_linear(forward, second=nn.Linear(COLUMNS, COLUMNS))


def with_linear(forward, **parts):
    return Model(forward, linear=nn.Linear(COLUMNS, COLUMNS), **parts)


@cache
def built(*names):
    torch.manual_seed(0)
    model, x = drawing(names), torch.randn(ROWS, COLUMNS)
    return model, x, capture(model, (x,), training=True)


def verified(names, sizes, seeds):
    """The verifications of random layouts."""
    model, x, graph = built(*names)
    values, reference = run_unsharded(model, (x,), graph, training=True, seed=7)
    mesh = mesh_of(*sizes)
    possible = candidates(graph, mesh)
    for seed in seeds:
        layouts, results = random_layouts(graph, mesh, seed, possible)
        yield verify_program(graph, layouts, results, mesh, values, reference, seed=7)


NAMES = ("randn_like, transposed", "dropout", "rrelu", "rand", "bernoulli_ of a row")
EACH = [pytest.param((name,), sizes, 3, marks=pytest.mark.slow) for name in DRAWS for sizes in ((2, 2), (3,))]


@pytest.mark.parametrize("in_full", [random_ops.IN_FULL, 0])
@pytest.mark.parametrize("names, sizes, seeds", [(NAMES, (2, 2), 2), *EACH])
def test_random_ops_draw_what_one_device_or_one_shard_draws(names, sizes, seeds, in_full, monkeypatch):
    monkeypatch.setattr(random_ops, "IN_FULL", in_full)
    for found in verified(names, sizes, range(seeds)):
        assert found.ok, found


def same_on_two_shards(self, rank):
    return 0


def other_on_two_replicas(self, rank):
    return rank.number


@pytest.mark.parametrize("fault", [same_on_two_shards, other_on_two_replicas])
def test_a_shard_that_draws_for_another_is_found(fault, monkeypatch):
    monkeypatch.setattr(random_ops, "IN_FULL", 0)
    monkeypatch.setattr(random.Region, "first", fault)
    for found in verified(NAMES, (2, 2), range(2)):
        assert any("does not draw what belongs to its shard" in mismatch.actual for mismatch in found.placement_mismatches), found


def alone(self, x, rank):
    """A shard of the right shape that begins at 0 on every rank."""
    for d, (lo, hi) in enumerate(self.bounds(rank)):
        x = x.narrow(d, 0, hi - lo)
    return x


def with_its_own_seed(self, x, rank):
    if rank.mesh.axes:
        torch.manual_seed(rank.number)
    for d, (lo, hi) in enumerate(self.bounds(rank)):
        x = x.narrow(d, lo, hi - lo)
    return x


@pytest.mark.parametrize("fault", [alone, with_its_own_seed])
def test_a_rank_that_keeps_another_shard_or_draws_on_from_its_own_seed_is_found(fault, monkeypatch):
    monkeypatch.setattr(random.Region, "shard", fault)
    for found in verified(NAMES[:2], (2, 2), range(2)):
        assert found.placement_mismatches, found


# -- what else knows of random ops -------------------------------------------------------------------------------------------------


def test_a_plan_names_the_ops_that_draw_other_numbers_than_one_device():
    model, x, _ = built("rrelu", "randn_like")
    solution = autoshard.plan(model, (x,), fast_mesh((2,)), training=True, baselines=False, objective="serial")
    assert solution.assumptions["random_numbers_per_shard"] == {"aten.rrelu_with_noise_functional.default": 2}
    model, x, _ = built("randn_like")
    assert "random_numbers_per_shard" not in autoshard.plan(model, (x,), fast_mesh((2,)), baselines=False, objective="serial").assumptions


@torch.library.custom_op("tests_random_ops::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape)


@noise.register_fake
def _(x):
    return torch.empty_like(x)


def custom():
    """An op that nobody knows draws, and one whose rule says that it can be sharded."""

    def forward(m, x):
        h = m.linear(x)
        return (h * torch.ops.tests_random_ops.noise(h.detach()) + torch.randn_like(h)).square().mean()

    return with_linear(forward)


def evaluated(kind):
    def forward(m, x):
        h = m.linear(x)
        if kind == "drop path" and m.training:
            h = h * h.new_empty(ROWS, 1).bernoulli_(0.7).div_(0.7)
        if kind == "noise" and m.training:
            h = h + torch.randn_like(h)
        if kind == "alpha":
            h = F.alpha_dropout(h, 0.3, m.training)
        if kind == "attention":
            h = m.attention(h[None])
        return m.drop(h).square().mean()

    attention = nn.TransformerEncoderLayer(COLUMNS, 2, 16, dropout=0.3, batch_first=True)
    return with_linear(forward, drop=nn.Dropout(0.3), attention=attention)


KINDS = {"dropout": True, "drop path": True, "attention": True, "noise": False, "alpha": False}


@pytest.mark.parametrize(("kind", "is_same"), KINDS.items())
def test_eval_mode_is_training_without_dropout_or_another_program(kind, is_same):
    evaluation, training = (capture(evaluated(kind).train(mode), (torch.randn(ROWS, COLUMNS),), training=True) for mode in (False, True))
    assert is_without_dropout(evaluation, training) == is_same and is_without_dropout(evaluation, evaluation)


def test_eval_mode_drops_nothing_of_the_default_half_either():
    """Its mask is drawn whole, with a probability that is torch's default, which a graph leaves out."""
    model, inputs = with_linear(lambda m, x: m.drop(m.linear(x)).square().mean(), drop=nn.Dropout(0.5)), (torch.randn(ROWS, COLUMNS),)
    solution = autoshard.plan(model, inputs, mesh_of(1), training=True, baselines=False, objective="serial")
    (found,) = results(1, lambda rank: parallel(model, solution).eval()(*inputs).item())
    assert found == pytest.approx(model.eval()(*inputs).item(), rel=1e-6)


def test_gradients_in_eval_mode_are_those_without_dropout():
    """Its forward pass was right, and each dropout, that of attention too, divided the gradients by the share that is kept."""

    def forward(m, x):
        q = m.linear(x)[None, None]
        return m.drop(F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if m.training else 0.0)[0, 0]).square().mean()

    model, inputs = with_linear(forward, drop=nn.Dropout(0.3)), (torch.randn(ROWS, COLUMNS),)
    solution = autoshard.plan(model, inputs, mesh_of(1), training=True, baselines=False, objective="serial")
    (found,) = results(1, eval_gradients, model, solution, inputs)
    expected = eval_gradients(0, model, None, inputs)
    assert found.keys() == expected.keys() and all(torch.allclose(x, expected[name]) for name, x in found.items())


def eval_gradients(rank, model, solution, inputs):
    module = parallel(model, solution).eval()
    module(*inputs).backward()
    return gradients_of(module)


@pytest.mark.parametrize("recompute", ["all", "auto"])
def test_what_is_drawn_is_kept_where_the_rest_is_recomputed(recompute):
    model = Model(lambda m, x: m.layers(x).square().mean(), layers=nn.Sequential(*(block() for _ in range(3))))
    inputs = (torch.randn(4, COLUMNS),)
    solution = right_plan(model, inputs, mesh_of(2), training=True, recompute=recompute, memory_limit=1e9, random=2)
    again = [name for name in solution.layouts if name.endswith("_recomputed")]
    assert (recompute == "auto" or again) and not any("dropout" in name or "rand" in name for name in again)


def block():
    def forward(m, x):
        h = torch.relu(m.up(x) + torch.randn(32))
        return x + m.drop(m.down(torch.tanh(h)))

    return Model(forward, up=nn.Linear(COLUMNS, 32), down=nn.Linear(32, COLUMNS), drop=nn.Dropout(0.3))


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.randn_like(grad)


# -- on ranks ------------------------------------------------------------------------------------------------------------------------


def trained(rank, model, solution=None):
    """Losses of three steps and one without gradients; ranks come with different seeds of their own."""
    module = parallel(materialized(model, 0), solution)
    torch.manual_seed(42 + rank)
    *batches, last = torch.randn(4, ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = losses_of(module, optimizer, ((x,) for x in batches), clip=0.1)  # some of these distributions have heavy tails
    with torch.no_grad():
        return [*losses, module(last).item()]


def planned(model, sizes, **options):
    options = {"training": True, "baselines": False, "objective": "serial", **options}
    return autoshard.plan(model, (torch.empty(ROWS, COLUMNS),), fast_mesh(sizes), **options)


EXACT = tuple(name for name in DRAWS if name not in ASKING)
ON_RANKS = {
    "ops": drawing(("randn_like, transposed", "dropout", "rand", "bernoulli_ of a row", "unused")),
    "all ops": drawing(EXACT),
    "custom": custom(),
    "a draw in the backward pass": with_linear(lambda m, x: (_Noisy.apply(m.linear(x)) * torch.rand_like(x)).square().mean()),
}


@pytest.mark.parametrize("name", [name if name == "ops" else pytest.param(name, marks=pytest.mark.slow) for name in ON_RANKS])
def test_ranks_train_on_the_numbers_of_one_process_whatever_their_seeds(name):
    model, sizes = ON_RANKS[name], (2,) if name == "ops" else (2, 2)
    solution = planned(model, sizes)
    drawn = [placed.outputs[0] for name, placed in solution.layouts.items() if name.startswith(("rand", "native_dropout", "bernoulli"))]
    assert any("S" in layout for layout in drawn) or name != "ops", drawn
    (expected,) = results(1, trained, model)
    for losses in results(math.prod(sizes), trained, model, solution):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_ranks_agree_on_a_state_once_and_branches_draw_other_numbers(monkeypatch):
    monkeypatch.setattr(shared_generator, "of_first_rank", lambda state, *_: state())

    def drawn(*branch):
        torch.manual_seed(3)
        one = SharedGenerator("cpu", None, *branch)
        one.agree()
        one.agree()
        with one.drawing():
            first = torch.rand(())
        with one.drawing():
            return first.item(), torch.rand(()).item(), torch.rand(()).item()  # the last one is drawn by the block, too

    first, second, third = (torch.manual_seed(3), [torch.rand(()).item() for _ in range(3)])[1]
    assert drawn() == drawn(0) == (first, second, third)
    assert drawn(1) == drawn(1) and len({*drawn(1), *drawn(2), first, second}) == 8
    torch.manual_seed(3)
    SharedGenerator("cpu").agree()
    assert torch.rand(()).item() == second  # what the module does not draw goes on by one


def test_seeds_of_branches_and_of_shards_stay_what_they_are(monkeypatch):
    assert generator.mixed(torch.arange(5, dtype=torch.uint8), 3) == 44314061594911975
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "of the GPU")
    assert generator.state_of_generator("cuda") == "of the GPU" and isinstance(generator.state_of_generator(), torch.Tensor)


def test_small_draws_are_made_in_full_unless_values_say_how_often():
    small, large = (Tensor((n,), "float32") for n in (random_ops.IN_FULL, random_ops.IN_FULL + 1))
    for target in ("aten.rand.default", "aten.bernoulli.p", "aten.native_dropout.default"):
        assert [random_ops.is_drawn_in_full(Op("x", target, (), ((), ()), (one,))) for one in (small, large)] == [True, False]
    of_attention = [Op("x", random_ops.DROPOUT_ATTENTION, (), ((), ()), (large, large, one)) for one in (small, large)]
    assert [random_ops.is_drawn_in_full(op) for op in of_attention] == [True, False]
    for target in ("aten.poisson.default", "mine.rand.default"):
        assert not random_ops.is_drawn_in_full(Op("x", target, (), ((), ()), (small,)))


def test_a_graph_is_random_if_one_of_its_operators_draws():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.neg.default, (x,))
    assert not generator.is_random(graph)
    graph.call_function(torch.ops.aten.rand_like.default, (x,))
    assert generator.is_random(graph)


def of_own_seeds(self):
    self.state = self.state if self.state is not None else generator.state_of_generator(self.device)


@pytest.mark.slow
def test_ranks_that_draw_from_their_own_seeds_are_noticed(monkeypatch):
    """The negative control of the test above."""
    model = ON_RANKS["ops"]
    (expected,) = results(1, trained, model)
    monkeypatch.setattr(SharedGenerator, "agree", of_own_seeds)
    assert any(losses != pytest.approx(expected, rel=1e-5) for losses in results(4, trained, model, planned(model, (2, 2))))


def in_microbatches(rank, solution):
    """Losses of the microbatches of two steps."""
    module = parallel(materialized(drawing(("randn_like", "dropout")), 0), solution)
    torch.manual_seed(42 + rank)
    x, losses = torch.ones(2 * ROWS, COLUMNS), []
    for _ in range(2):
        for (part,) in zip(x.chunk(2)) if solution is None else module.microbatches((x,)):
            loss = module(part)
            (loss / 2).backward()
            losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_every_microbatch_draws_what_one_process_draws_for_it():
    model = drawing(("randn_like", "dropout"))
    (expected,) = results(1, in_microbatches, None)
    assert len(set(expected)) == 4  # of equal rows
    for losses in results(2, in_microbatches, planned(model, (2,), microbatches=2)):
        assert losses == pytest.approx(expected, rel=1e-5)


def two_programs(rank, plan):
    """Losses of training, then of the other program, in turn."""
    model = materialized(drawing(("randn_like", "rand")), 0)
    module = model if plan is None else autoshard.parallelize(model, plan, init_device_mesh("cpu", (4,)))
    torch.manual_seed(42 + rank)
    x, losses = torch.ones(ROWS, COLUMNS), []
    other = model if plan is None else module.program("other")
    for _ in range(2):
        losses += [module(x).item(), None if (loss := other(x)) is None else loss.item()]
    if plan is not None:
        module.random_state = None
    torch.manual_seed(42 + rank)
    return [*losses, module(x).item()]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, (0, 1)])
def test_programs_draw_one_after_the_other_or_numbers_of_their_own(devices):
    model, inputs = drawing(("randn_like", "rand")), (torch.empty(ROWS, COLUMNS),)
    other = autoshard.Program(model, inputs, training=devices is None, devices=devices)
    plan = autoshard.plan({"train": autoshard.Program(model, inputs, training=True), "other": other}, fast_mesh((4,)))
    (expected,) = results(1, two_programs, None)
    assert len(set(expected[:4])) == 4 and expected[4] == expected[0]
    for losses in results(4, two_programs, plan):
        if devices is None:
            assert losses == pytest.approx(expected, rel=1e-5)
        else:
            assert losses[0] == pytest.approx(expected[0], rel=1e-5) == losses[4] and len(set(losses[:4])) == 4 - (losses[1] is None)
