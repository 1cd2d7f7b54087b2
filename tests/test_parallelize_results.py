"""What a model returns comes back from a parallel module in the same types; fine-tuning by adapters; BatchNorm over process groups."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture.nested_tensors import tensors_of
from tests.helpers import fast_mesh
from tests.helpers_models import Model, full, losses_of, parallel, right_plan
from tests.helpers_ranks import results


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    note: object = None


@dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    inner: Output


class Named(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Slotted:
    __slots__ = ("logits", "loss")

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


FORMS = {
    "dataclass": lambda loss, y: Output(loss, y, note=("kept", 3)),
    "frozen and nested": lambda loss, y: Frozen(loss, Output(loss * 2, y)),
    "named tuple": Named,
    "slots": Slotted,
    "dict": lambda loss, y: {"loss": loss, "rest": [y, (y + 1, None)]},
    "ordered dict": lambda loss, y: OrderedDict(loss=loss, y=y),
    "constants and objects": lambda loss, y: (None, 3, Output(loss, y, note={"more": [y * 2, "text"]}), "name", y + 1),
    "list of objects": lambda loss, y: [Output(loss, y), {"k": Named(loss, y + 1)}],
}


def returning(form):
    def forward(m, x):
        y = m.down(m.up(x).relu())
        return FORMS[form](y.pow(2).mean(), y)

    torch.manual_seed(0)
    return Model(forward, up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def with_heads():
    torch.manual_seed(0)
    parts = {name: nn.Linear(8, 8) for name in ("trunk", "left", "right")}
    return Model(lambda m, x: (m.left(m.trunk(x)).square().mean(), m.right(m.trunk(x)).mean(), m.trunk.bias.sum()), **parts)


def differentiated(rank, solution, of):
    """The parameters and gradients after a step of weight decay on the sum of some outputs: in the last microbatch of the first of them."""
    model = parallel(with_heads(), solution)
    optimizer, x = torch.optim.AdamW(model.parameters(), weight_decay=0.5), torch.ones(8, 8)
    given = [(x,)] * 2 if solution is None else model.microbatches((torch.cat([x, x]),))
    for some, inputs in zip((of, of[:1]), given, strict=True):
        outputs = model(*inputs)
        sum(outputs[k] for k in some).backward()
    optimizer.step()
    return {name: (full(p.detach()), None if p.grad is None else full(p.grad)) for name, p in model.named_parameters()}


def test_a_parameter_that_no_differentiated_output_reaches_has_no_gradient():
    """It would have one of zeros, and weight decay would change it."""
    solution = autoshard.plan(with_heads(), (torch.ones(8, 8),), fast_mesh((2,)), training=True, microbatches=2, objective="serial")
    for of in ((0,), (1, 0), (2,)):
        alone = differentiated(0, None, of)
        for found in results(2, differentiated, solution, of):
            assert {n for n, (_, grad) in found.items() if grad is None} == {n for n, (_, grad) in alone.items() if grad is None}
            for name, (value, grad) in found.items():
                torch.testing.assert_close(value, alone[name][0])
                assert grad is None or torch.allclose(grad, alone[name][1])


def described(result):
    """The result with shapes in place of its tensors."""
    if isinstance(result, torch.Tensor):
        return tuple(result.shape)
    if isinstance(result, dict):
        return type(result), [(key, described(part)) for key, part in result.items()]
    if isinstance(result, (tuple, list)):
        return type(result), [described(part) for part in result]
    names = getattr(result, "__dict__", {}) or getattr(type(result), "__slots__", ())
    return (type(result), [(name, described(getattr(result, name))) for name in names]) if names else result


def values(result):
    return [full(x).detach() for x in tensors_of(result)]


def returned(rank, plans, x):
    mesh = init_device_mesh("cpu", (2,))
    made = {}
    for (form, training), solution in plans.items():
        module = autoshard.parallelize(returning(form), solution, mesh)
        result = module(x)
        if training:
            tensors_of(result)[0].sum().backward()
            assert all(p.grad is not None for p in module.parameters())
        made[form, training] = described(result), values(result)
    return made


def test_results_come_back_as_what_the_model_returns():
    x = torch.randn(16, 8)
    cases = [(form, form in ("frozen and nested", "slots", "constants and objects")) for form in FORMS]
    asked = {"baselines": False, "objective": "serial"}
    plans = {(form, t): autoshard.plan(returning(form), (x,), fast_mesh((2,)), training=t, **asked) for form, t in cases}
    found = autoshard.verify(returning("constants and objects"), (x,), plans["constants and objects", True])
    assert found["ok"], found
    for made in results(2, returned, plans, x):
        for form, training in cases:
            expected = returning(form)(x)
            shape, got = made[form, training]
            assert shape == described(expected), (form, training)
            pairs = zip(got, values(expected), strict=False)  # a tensor that is returned twice comes back as two
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs) and got, (form, training)


def test_a_forward_that_an_instance_has_returns_objects_too():
    model = returning("frozen and nested")
    model.forward = partial(type(model).forward, model)
    assert right_plan(model, (torch.randn(16, 8),), fast_mesh((2,)), training=False)


# -- steps of the optimizer ---------------------------------------------------------------------------------------------------------


def steps(rank, model, inputs, trained, solution=None):
    """Losses of three steps, and the trained parameters after them."""
    module = parallel(model, solution)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.01)
    losses, held = losses_of(module, optimizer, [inputs] * 3), dict(module.named_parameters())
    return losses, [full(held[name]).detach() for name in trained]


def assert_trains_as_one_process(model, inputs, shape, rel=1e-9):
    """In float64, and verified with layouts at random."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    solution = right_plan(model, inputs, fast_mesh(shape), training=True, random=1)
    assert {name.partition(":")[2] for name in solution.results if name.startswith("gradient:")} == set(trained)
    losses, parameters = steps(0, copy.deepcopy(model), inputs, trained)
    for found_losses, found_parameters in results(solution.mesh.num_devices, steps, model, inputs, trained, solution):
        assert found_losses == pytest.approx(losses, rel=rel)
        assert all(torch.allclose(a, b, rtol=rel, atol=rel / 1e3) for a, b in zip(found_parameters, parameters, strict=True))
    return solution


def normed():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4), nn.BatchNorm1d(4))
    return Model(lambda m, x: m.layers(x).pow(3).mean(), layers=nn.SyncBatchNorm.convert_sync_batchnorm(layers))


def test_sync_batch_norm_normalizes_over_the_global_batch_on_any_ranks():
    assert_trains_as_one_process(normed().double(), {"x": torch.randn(8, 3, 8, 8, dtype=torch.float64)}, (2,))


def test_a_norm_over_a_part_of_the_ranks_is_refused():
    model = normed()
    model.layers[1].process_group = object()
    with pytest.raises(ValueError, match=r"layers.1 normalizes over the batch of a process group; .* use BatchNorm"):
        autoshard.plan(model, {"x": torch.empty(8, 3, 8, 8)}, fast_mesh((2,)), training=True, objective="serial")


def adapted(linear, magnitude):
    """A frozen linear layer beside one of low rank, as peft has it. magnitude: weights of unit length times a trained vector (DoRA)."""

    def forward(m, x):
        y = m.base(x) + m.b(m.a(x))
        if not magnitude:
            return y
        return y * m.magnitude / (m.base.weight + m.b.weight @ m.a.weight).norm(dim=1).detach()

    model = Model(forward, base=linear, a=nn.Linear(8, 2, bias=False), b=nn.Linear(2, 8, bias=False))
    nn.init.normal_(model.b.weight)
    model.magnitude = nn.Parameter(linear.weight.norm(dim=1).detach()) if magnitude else None
    return model


def attention(magnitude):
    def forward(m, x):
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (m.q, m.k, m.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return Output(m.out(y.transpose(1, 2).flatten(2)).pow(2).mean(), y)

    torch.manual_seed(0)
    q, v, k, out = (nn.Linear(8, 8).requires_grad_(False) for _ in range(4))
    return Model(forward, q=adapted(q, magnitude), v=adapted(v, magnitude), k=k, out=out)


@pytest.mark.parametrize("magnitude", [False, True], ids=["LoRA", "DoRA"])
def test_only_the_adapters_are_trained(magnitude):
    model = nn.Sequential(attention(magnitude)).double()
    assert_trains_as_one_process(model, {"input": torch.randn(4, 6, 8, dtype=torch.float64)}, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["LoRA", "DoRA", "IA3", "prefix"])
@pytest.mark.parametrize("heads", [2, 4], ids=["grouped", "single"])
def test_peft_trains_as_in_one_process(method, heads):
    peft = pytest.importorskip("peft", reason="the mechanism is covered above")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=heads, use_cache=False))
    config = {
        "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]),
        "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], use_dora=True),
        "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    }[method]()
    tokens = torch.randint(0, 32, (4, 8))
    adapted = peft.get_peft_model(model, config).double()
    assert_trains_as_one_process(adapted, {"input_ids": tokens, "labels": tokens.clone()}, (2, 2), rel=1e-6)  # the loss is in float32
