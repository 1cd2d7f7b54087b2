"""What a parallel module is called with and what it holds: storage of its own, whole inputs and shards told apart, names of inputs."""

import copy
import inspect
import random
import warnings
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard.capture import filled, input_names, listed
from autoshard.layout import all_layouts, rank_bounds
from autoshard.runtime.call_inputs import CallInputs, batch_layouts
from autoshard.runtime.distribute import copy_with
from models import gpt2
from tests.helpers import fast_mesh
from tests.helpers_models import Model, full, parallel, said
from tests.helpers_ranks import results


class Normed(nn.Module):
    """Parameters and buffers, two of them tied, one expanded."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down, self.norm = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 16), nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 32, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1).expand(16))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.down(self.up(self.embed(tokens)).relu()).flatten(0, 1)).unflatten(0, tokens.shape) * self.scale
        logits = self.out(x)
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Normed()


def tokens(rows: int = 8, seq: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 32, (2, rows, seq), generator=torch.Generator().manual_seed(seed))
    return drawn[0], drawn[1]


@cache
def planned(shape: tuple[int, ...], by_name: bool = False, scheme: str | None = None):
    given = dict(zip(("tokens", "targets"), tokens())) if by_name else tokens()
    pins = {None: {}, "replicated": {"*": ",".join("R" * len(shape))}}[scheme]
    return autoshard.plan(Normed(), given, fast_mesh(shape), training=True, baselines=False, objective="serial", pins=pins)


def storages(module: nn.Module) -> set[int]:
    held = [*module.parameters(), *module.buffers()]
    return {(x.to_local() if isinstance(x, DTensor) else x).untyped_storage().data_ptr() for x in held}


def trained_beside(rank: int, solution, shape, from_first_rank: bool) -> tuple[int, int, bool]:
    """Shared storages of a module and the model that it was made of, how many those have, and whether training left the model alone."""
    model = build(seed=rank if from_first_rank else 0)
    before = copy.deepcopy(model.state_dict())
    module = autoshard.parallelize(model, solution, init_device_mesh("cpu", shape), from_first_rank=from_first_rank)
    shared = storages(module) & storages(model)
    module(*tokens()).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    same = all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    return len(shared), len(storages(module)), same


@pytest.mark.parametrize("from_first_rank", [True, False])
@pytest.mark.parametrize(("shape", "scheme"), [((1,), None), ((2,), None), ((2,), "replicated"), ((2, 1), None)])
def test_a_parallel_module_shares_no_storage_with_the_model_that_it_was_made_of(shape, scheme, from_first_rank):
    solution = planned(shape, scheme=scheme)
    for shared, count, same in results(torch.Size(shape).numel(), trained_beside, solution, shape, from_first_rank):
        assert count >= 9 and shared == 0 and same


def loaded_from_another_mesh(rank: int, *solutions) -> list[dict[str, torch.Tensor]]:
    one, other = (parallel(build(seed), solution) for seed, solution in enumerate(solutions))
    other.load_state_dict(one.state_dict())
    return [{name: full(x) for name, x in module.state_dict().items()} for module in (one, other)]


def test_values_of_a_module_on_another_mesh_are_loaded():
    for one, other in results(2, loaded_from_another_mesh, planned((2,)), planned((1, 2))):
        assert one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def test_shared_storage_is_seen():
    model = Normed()
    assert storages(model) & storages(copy.copy(model))


def keeping(m, x):
    m.seen = [m.layer(x)]
    return m.seen[0].square().mean()


def test_a_model_that_keeps_results_of_its_last_forward_is_copied():
    """With their gradients torch can't copy them: activations that are kept to be looked at, weights of the former weight_norm."""
    model = Model(keeping, layer=nn.Linear(4, 4))
    model(torch.ones(2, 4))
    copied = copy_with(model, lambda _, tensor: tensor.detach().clone())
    assert torch.equal(copied.seen[0], model.seen[0]) and copied.seen[0].is_leaf and model.seen[0].grad_fn is not None


# -- whole inputs, shards, other shapes ---------------------------------------------------------------------------------------------


def alone(given, **more) -> float:
    return build()(*given, **more).item()


def calls(rank: int, solution) -> dict:
    module = parallel(build(), solution)
    steps, found = module.__dict__["_runner"].calls, {}
    small, whole = tokens(4, seed=1), tokens()
    found["plain and planned"] = module(*whole).item()
    found["plain and small"] = said(module, *small)
    found["small"] = [module(*module.shard_inputs(small)).item() for _ in range(2)]
    sharded = module.shard_inputs(dict(zip(("tokens", "targets"), whole)))
    found["layouts"] = {name: autoshard.layout.text(x.placements) for name, x in sharded.items()}
    found["by name"] = module(**sharded).item()
    found["by name and position"] = module(whole[0], targets=whole[1]).item()
    found["other order"] = module(targets=whole[1], tokens=whole[0]).item()
    local = module.shard_inputs(tuple(sharded[name].to_local() for name in ("tokens", "targets")), local=True)
    found["local"] = module(*local).item()
    found["steps"] = len(steps)
    found["kinds"] = [type(module.shard_inputs(batch)).__name__ for batch in (whole, list(whole), whole[0], sharded)]
    found["extra"] = type(module.shard_inputs((whole[0], 3))[1]).__name__
    return found


@pytest.mark.parametrize("by_name", [False, True])
def test_whole_inputs_and_shards_are_told_apart_and_every_shape_is_captured_once(by_name):
    solution = planned((2,), by_name)
    (name, second) = ("tokens", "targets") if by_name else ("input_0", "input_1")
    assert set(solution.inputs) == {name, second}
    layout = solution.layouts[name].outputs[0]
    loss, small = alone(tokens()), alone(tokens(4, seed=1))
    for found in results(2, calls, solution):
        for kind in ("plain and planned", "by name", "by name and position", "other order", "local"):
            assert found[kind] == pytest.approx(loss, rel=1e-5), kind
        assert found["small"] == pytest.approx([small] * 2, rel=1e-5)
        assert found["plain and small"].startswith(f"{name} is a plain tensor of shape (4, 4), the plan has (8, 4) for it, sharded as S(0)")
        assert "module.shard_inputs(batch, local=True)" in found["plain and small"].replace("model.", "module.")
        assert found["layouts"] == {"tokens": layout, "targets": solution.layouts[second].outputs[0]}
        assert found["steps"] == 2
        assert found["kinds"] == ["tuple", "list", "DTensor", "dict"] and found["extra"] == "int"


def attempts(rank: int, solution) -> dict[str, str]:
    """What is said of inputs and calls for which there is no gradient."""
    model = Model(lambda m, x: m.linear(x).sum(), linear=nn.Linear(8, 8))
    module, x = parallel(model, solution), torch.randn(4, 8, requires_grad=True)
    values = dict(module.named_parameters())
    found = {
        "func": said(torch.func.grad(lambda held: torch.func.functional_call(module, held, x)), values),
        "double": said(module, x.detach().double()),
        "upstream": said(module, x * 2),
        "sharded": said(module, module.shard_inputs(x)),
        "detached": said(module, x.detach()),
    }
    with torch.no_grad():
        return found | {"no_grad": said(module, x)}


def test_what_would_get_no_gradient_is_refused():
    model = Model(lambda m, x: m.linear(x).sum(), linear=nn.Linear(8, 8))
    solution = autoshard.plan(model, (torch.randn(4, 8),), fast_mesh((2,)), training=True, baselines=False, objective="serial")
    for found in results(2, attempts, solution):
        assert "torch.func and vmap can't transform a parallel module" in found["func"]
        assert "input_0 is torch.float64, which no parameter is" in found["double"]
        assert all("input_0 requires a gradient, and the plan has none for inputs" in found[key] for key in ("upstream", "sharded"))
        assert found["detached"] == found["no_grad"] == "nothing"


def steps_in_between(rank: int, solution) -> list[str]:
    found = []
    for kind in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        module, x = parallel(two_layers(), solution), torch.randn(4, 8)
        first, second = module(x), module(x + 1)
        first.backward()
        torch.optim.AdamW(module.parameters(), lr=0.1, **kind).step()
        try:
            second.backward()
        except RuntimeError as error:
            found.append(str(error))
    return found


def two_layers():
    return Model(lambda m, x: m.last(m.first(x).tanh()).sum(), first=nn.Linear(8, 8), last=nn.Linear(8, 8))


def test_a_step_between_forward_and_backward_is_seen():
    """A step in a loop changes the version of the DTensor, not that of its shard, which the backward pass reads; others change neither."""
    options = {"pins": {"*.weight": "R", "*.bias": "R", "input_0": "S(0)"}, "baselines": False, "objective": "serial"}
    solution = autoshard.plan(two_layers(), (torch.randn(4, 8),), fast_mesh((2,)), training=True, **options)
    for found in results(2, steps_in_between, solution):
        assert len(found) == 3 and all(one.startswith("a parameter or input was changed between forward and backward") for one in found)


def parts(rank: int, solution) -> dict[str, str]:
    module = parallel(build(), solution)
    fired: list[str] = []
    module.register_forward_hook(lambda *_: fired.append("whole"))
    module(*tokens())
    hooks = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("hook") and "dict" not in name]
    state = ",".join(module.state_dict())
    module.added = nn.Linear(2, 2)
    return {
        "added": said(module, *tokens()),
        "call": said(module.up, torch.ones(2, 16)),
        **{name: said(getattr(module.norm, name), print) for name in hooks},
        "fired": ",".join(fired),
        "state": state,
    }


def test_calls_and_hooks_of_inner_modules_are_refused_and_those_of_the_whole_work():
    (found,) = results(1, parts, planned((1,)))
    assert found.pop("fired") == "whole" and found.pop("state") == ",".join(Normed().state_dict())
    assert found.pop("added").startswith("the module has 7 parts and was made with 6: add or remove parts of the model")
    assert found.pop("call").startswith("up can't be called: it is a part of a parallel module")
    assert len(found) >= 5
    for name, sentence in found.items():
        assert sentence.startswith(f"norm.{name}() has no effect: it is a part of a parallel module"), name
    assert dist.is_initialized() is False


def hooked() -> nn.Module:
    torch.manual_seed(0)
    model = Model(lambda m, x, flag: m.linear(x).sum() * (m.scale if flag is True else flag), linear=nn.Linear(4, 4), scale=3.0)
    model.register_forward_pre_hook(lambda m, inputs: (inputs[0] + 1, inputs[1]))
    model.register_forward_hook(lambda m, inputs, output: output * 2)
    model.linear.register_forward_hook(lambda m, inputs, output: output * 2)
    return model


def told(rank: int, solution) -> tuple[list[float], list[str], str]:
    """Results of a hooked module with constants that are equal to each other, then with another attribute; warnings; a refusal."""
    module, x = parallel(hooked(), solution), torch.ones(4, 4)
    values = [module(x, flag).item() for flag in (1, True, 1.0)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.eval().train()
        copied = copy.deepcopy(module)
        module.scale = module.scale + 1
        values += [module(x, True).item(), module(x, True).item(), copied(x, True).item()]
        copied.linear.in_features = 5
        copied(x, True)
    model = hooked()
    model.linear.weight.register_hook(print)
    return values, [str(one.message) for one in caught], said(parallel, model, solution)


def test_hooks_of_the_model_run_once_constants_have_types_and_attributes_are_those_of_the_capture():
    model = hooked()
    solution = autoshard.plan(model, (torch.ones(4, 4), 1), fast_mesh((1,)), training=True, baselines=False, objective="serial")
    plain, scaled = (model(torch.ones(4, 4), flag).item() for flag in (1, True))
    ((values, sentences, refused),) = results(1, told, solution)
    assert values == pytest.approx([plain, scaled, plain, scaled, scaled, scaled], rel=1e-5) and scaled == pytest.approx(3 * plain)
    assert [one.partition(" was set on a parallel module")[0] for one in sentences] == ["scale", "linear.in_features"]
    assert refused.startswith("parameter 'linear.weight' has a hook, which the copy of the model would lose")


def complex_model() -> nn.Module:
    return Model(lambda m, x: (x + 0j).matmul(m.weight).abs().sum(), weight=nn.Parameter(torch.ones(4, 3, dtype=torch.complex64)))


def refused(rank: int, plans: list) -> list[str]:
    return [said(parallel, complex_model(), plan) for plan in plans]


def test_complex_parameters_are_trained_in_even_shards_alone():
    """torch's view_as_real, through which Adam updates them, is a copy of a DTensor whose shards differ in size."""
    mesh, options = fast_mesh((2,)), {"training": True, "baselines": False, "objective": "serial"}
    plans = [autoshard.plan(complex_model(), (torch.ones(4, 4),), mesh, pins={"weight": pin}, **options) for pin in ("S(1)", "S(0)", "R")]
    for uneven, *even in results(2, refused, plans):
        assert uneven.startswith("parameter 'weight' is complex and S(1) makes shards of different sizes")
        assert "pins={'weight': 'R'}" in uneven and even == ["nothing"] * 2


# -- what comes back ----------------------------------------------------------------------------------------------------------------


def packs(m, x: torch.Tensor) -> dict:
    """Tensors among constants, one of them twice, one an input; reads a number, which the meta device can't."""
    y = m.linear(x)
    return {"loss": y.sum(), "none": None, "twice": (y, [y]), "number": 3, "text": "a"}


def asks(m, x: torch.Tensor) -> dict:
    """A constant of the forward is read as a number, as Hugging Face's models do."""
    return packs(m, x) | {"number": 3 if torch.compiler.is_compiling() else int(x.sum().item())}


def packing(kind: Callable) -> nn.Module:
    torch.manual_seed(0)
    return Model(kind, linear=nn.Linear(4, 4))


def packed(rank: int, solution, kind: Callable) -> list:
    found = parallel(packing(kind), solution)(torch.ones(4, 4))
    first, (second,) = found["twice"]
    return [list(found), found["none"], found["number"], found["text"], full(first).tolist(), full(second).tolist()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [packs, asks])
def test_what_a_module_returns_is_packed_as_it_was_captured(kind, training):
    solution = autoshard.plan(packing(kind), (torch.ones(4, 4),), fast_mesh((2,)), training=training, baselines=False, objective="serial")
    y = packing(packs)(torch.ones(4, 4))["twice"][0].tolist()
    for found in results(2, packed, solution, kind):
        assert found[:4] == [["loss", "none", "twice", "number", "text"], None, 3, "a"]
        assert found[4] == found[5] == [pytest.approx(row) for row in y]


# -- inputs of one batch ------------------------------------------------------------------------------------------------------------


def loaded(rank: int, solution) -> tuple[dict, float, str, str]:
    """The loss of shards that every rank loads for itself, in one layout for all inputs."""
    device_mesh = init_device_mesh("cpu", (2, 2))
    module = autoshard.parallelize(build(), solution, device_mesh)
    rows = slice(4, 8) if device_mesh.get_coordinate()[0] else slice(0, 4)
    batch = module.shard_inputs(tuple(x[rows] for x in tokens()), local=True)
    wrong = said(module.shard_inputs, (torch.tensor(1), tokens()[1]), local=True)
    unlike = said(module.shard_inputs, (tokens()[0][:4], tokens()[1][:2]), local=True)
    return module.input_layouts, module(*batch).item(), wrong, unlike


def test_none_is_left_out_only_where_it_is_the_default():
    def scaled(self, x, mask, scale=2.0, targets=None, **more): ...

    names, signature = partial(input_names, nn.Module()), inspect.signature(scaled)
    given = CallInputs(None, listed, filled, names, signature, {"x": (Shard(0),)}, {"x": (8, 4)})
    call = {"x": torch.ones(8, 4), "mask": None, "scale": None, "targets": None, "cache": None}
    assert list(given.of_any_shape((), call).inputs) == ["x", "mask", "scale"]


def test_shards_of_all_inputs_of_a_batch_are_loaded_alike_whatever_the_plan_does_with_them():
    pins = {"input_0": "S(0),S(1)", "input_1": "S(0),S(0)"}
    solution = autoshard.plan(Normed(), tokens(), fast_mesh((2, 2)), training=True, baselines=False, objective="serial", pins=pins)
    for layouts, loss, wrong, unlike in results(4, loaded, solution):
        assert layouts == {"input_0": "S(0),R", "input_1": "S(0),R"}
        assert loss == pytest.approx(alone(tokens()), rel=1e-5)
        assert "input_0 has shape ()" in wrong
        assert unlike.startswith("shards of input_0 and input_1 make up inputs of 8 and 4 rows") and "input_1 as S(0),R" in unlike


def test_a_shard_of_a_batch_holds_what_the_plan_gives_the_rank_and_shards_of_one_shape_are_alike():
    mesh, shape = fast_mesh((2, 2, 2)), (8, 8)
    layouts = all_layouts(shape, mesh)
    drawn = random.Random(0)
    sharded = 0
    for _ in range(300):
        inputs = {name: drawn.choice(layouts) for name in ("a", "b")} | {"c": drawn.choice(all_layouts((8,), mesh))}
        made = batch_layouts(inputs, {"a": shape, "b": shape, "c": (8,)})
        sharded += any(p.is_shard() for p in made["a"])
        assert made["a"] == made["b"]
        assert [p == Shard(0) for p in made["a"]] == [p == Shard(0) for p in made["c"]]
        for name, size in {"a": shape, "b": shape, "c": (8,)}.items():
            for where in mesh.coordinates():
                held, wanted = rank_bounds(size, made[name], mesh, where), rank_bounds(size, inputs[name], mesh, where)
                assert all(a <= c and d <= b for (a, b), (c, d) in zip(held, wanted, strict=True)), (inputs, made, where)
    assert 20 < sharded < 290
    alone = batch_layouts({"a": layouts[1], "b": layouts[2]}, {"a": shape, "b": (4, 8)})
    assert alone == {"a": layouts[1], "b": layouts[2]}  # two batches


def test_a_plan_lays_the_inputs_of_a_batch_out_alike_where_that_is_as_good_as_was_asked_for():
    module, inputs = gpt2.tiny(vocab=256, layers=1)
    asked = {"training": True, "baselines": False, "objective": "serial"}
    exact = autoshard.plan(module, inputs, fast_mesh((2, 2)), **asked)
    near = autoshard.plan(module, inputs, fast_mesh((2, 2)), **asked, gap=1e-3)
    first, second = (near.layouts[name].outputs[0] for name in near.inputs)
    assert first == second and near.gap <= 1e-3
    assert exact.layouts["input_0"] != exact.layouts["input_1"] and exact.gap <= 1e-9  # alike costs more, so the proof comes first
    pins = {"input_1": "S(1),S(0)"}
    pinned = autoshard.plan(module, inputs, fast_mesh((2, 2)), **asked, gap=1e-3, pins=pins)
    assert pinned.layouts["input_1"].outputs == ("S(1),S(0)",)
