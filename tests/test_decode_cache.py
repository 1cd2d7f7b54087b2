"""A decode step of a Hugging Face model with its cache object: captured as it is, planned, verified, and run on gloo ranks."""

import copy
import json

import pytest
import torch
import transformers

import autoshard
from autoshard.capture import cache_name
from autoshard.capture.nested_tensors import copied, tensors_of
from autoshard.cli import main
from autoshard.cli.model import load_model
from benchmarks.coverage import HF
from tests.helpers import fast_mesh
from tests.helpers_models import full, parallel
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused

KINDS = ("StaticCache", "DynamicCache")
BATCH, PROMPT, ROOM, STEPS = 4, 6, 12, 3


def model(layers=2):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(HF / "llama", num_hidden_layers=layers)).eval()


def filled(kind, layers=2):
    """A cache after a prompt, and the token that comes next."""
    module, ids = model(layers), torch.randint(3, 60, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    more = {"max_cache_len": ROOM} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=module.config, **more)
    with torch.no_grad():
        token = module(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return cache, token


def inputs(kind, layers=2):
    cache, token = filled(kind, layers)
    return {"input_ids": token, "past_key_values": cache, "use_cache": True}


def planned(kind, layers=2):
    pins = {f"model.layers.*.self_attn.{name}_proj.weight": "S(0)" for name in "qkv"} | {"model.layers.*.self_attn.o_proj.weight": "S(1)"}
    return autoshard.plan(model(layers), inputs(kind, layers), fast_mesh((2,)), baselines=False, objective="serial", pins=pins)


@pytest.mark.parametrize("kind", [pytest.param("StaticCache", marks=pytest.mark.slow), "DynamicCache"])
def test_a_step_with_its_cache_is_verified_and_its_attention_is_sharded(kind):
    solution, given = planned(kind), inputs(kind)
    before = [tensor.clone() for tensor in tensors_of(given["past_key_values"])]
    report = autoshard.verify(model(), given, solution)
    assert report["ok"] and report["plans"][0]["max_relative_error_outputs"] < 1e-5
    assert not autoshard.verify(model(), given, solution, plant_fault=True)["ok"]
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(given["past_key_values"]), strict=True))
    used = [placed.inputs for name, placed in solution.layouts.items() if "scaled_dot_product" in name or "attention" in name]
    used = [one for one in used if one]
    assert len(used) == 2 and all(one[:3] in (("S(0)",) * 3, ("S(1)",) * 3) for one in used)  # by the batch, or by heads


def decoded(rank, kind, layers, solution=None):
    """Tokens of greedy decoding: a static cache takes several steps, of one that grows a plan is one step."""
    module, (cache, token) = parallel(model(layers), solution), filled(kind, layers)
    made = []
    with torch.no_grad():
        for _ in range(STEPS if kind == "StaticCache" else 1):
            logits = full(module(input_ids=token, past_key_values=cache, use_cache=True).logits)
            token = logits[:, -1:].argmax(-1)
            made.append((token.tolist(), logits))
    return made


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_greedy_decoding_on_two_ranks_says_what_the_model_says(kind):
    layers = 1 if kind == "StaticCache" else 2  # of one that grows a plan is one step, which takes a part of the time
    expected = decoded(0, kind, layers)
    for made in results(2, decoded, kind, layers, planned(kind, layers)):
        assert [tokens for tokens, _ in made] == [tokens for tokens, _ in expected]
        for (_, ours), (_, theirs) in zip(made, expected):
            assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(("model", "kind"), [
    ("llama", "dynamic"), pytest.param("llama", "static", marks=pytest.mark.slow), ("gemma2", "static")])  # fmt: skip
def test_the_cache_setting_plans_a_decode_step_and_verify_runs_it(model, kind, tmp_path, capsys):
    plan = str(tmp_path / "plan.json")
    words = ("--set", f"cache={kind}", "--batch", "4", "--seq", "8")
    assert main(["plan", f"hf:{HF}/{model}", *words, "--mesh", "2", "--no-baselines", "--out", plan, "--json", "--quiet"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == "optimal"
    assert main(["verify", plan, "--trust", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_the_cache_setting_makes_the_inputs_of_one_token_on_the_meta_device():
    module, given = load_model(f"hf:{HF / 'llama'}", {"cache": "static", "seq": 16, "batch": 4})
    assert given["input_ids"].shape == (4, 1) and given[cache_name(module)].layers[0].keys.shape == (4, 4, 16, 8)
    assert all(tensor.is_meta for tensor in tensors_of(given[cache_name(module)]))
    for settings, sentence in (({"cache": "paged"}, "expected static or dynamic"), ({"cache": "static", "loss": True}, "leave it out")):
        assert_refused(sentence, load_model, f"hf:{HF / 'llama'}", settings)


def test_a_device_that_an_object_notes_follows_its_tensors():
    class Noted:
        def __init__(self):
            self.rows, self.device, self.other = torch.empty(2, device="meta"), torch.device("meta"), torch.device("cuda:3")

    original = Noted()
    moved = copied(original, lambda tensor: torch.zeros(2))
    assert moved.device == torch.device("cpu") and moved.other == torch.device("cuda:3") and original.device == torch.device("meta")
    assert copy.deepcopy(original).device == torch.device("meta")


# -- in place


class Cache(torch.nn.Module):
    """Rows go into a buffer: by one call, by two, after the old rows were read, before they are; or the buffer is the output, too."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, torch.nn.Linear(4, 4)
        self.register_buffer("rows", torch.ones(4, 2, 8, 4))

    def forward(self, x, position):
        before, new = self.rows.sum(2), self.linear(x)
        if self.how == "before":
            rows = self.rows.index_copy(2, position, new)
            y = rows.sum(2) + self.rows.sum(2)
            self.rows.copy_(rows)
            return y
        if self.how == "index_put":
            self.rows[:, :, position] = new
        else:
            self.rows.index_copy_(2, position, new)
        if self.how == "twice":
            self.rows.index_copy_(2, position + 1, 2 * new)
        y = self.rows.sum(2) + (before if self.how == "after" else 0)
        return (y, self.rows) if self.how == "output" else y


WAYS = {"index_copy": 1, "index_put": 1, "twice": 2, "after": 1, "before": 0, "output": 0}


def cache_and_inputs(how, devices, rows=1):
    generator = torch.Generator().manual_seed(0)
    x, position = torch.randn(4, 2, rows, 4, generator=generator), torch.arange(rows)
    torch.manual_seed(1)
    return Cache(how), (x, position), fast_mesh((devices,)) if devices > 1 else autoshard.Mesh.from_bandwidths((1,))


def two_steps(rank, how, solution, by_inductor, rows):
    """What two calls return and leave in the buffer, and whether it is at the same place."""
    module, (x, position), _ = cache_and_inputs(how, solution.mesh.num_devices if solution else 1, rows)
    module = parallel(module, solution)
    if by_inductor:
        module.compile()
    made, at = [], [local(module.rows).data_ptr()]
    with torch.no_grad():
        for k in range(2):
            y = module(x + k, position + 3 * k)
            made.append([full(one).clone() for one in (y if isinstance(y, tuple) else (y,))] + [full(module.rows).clone()])
            at.append(local(module.rows).data_ptr())
    graphs = [one.inference for one in module._runner.calls.values()] if solution else []
    written = sum("_copy_." in str(n.target) or "_put_." in str(n.target) for graph in graphs[:1] for n in graph.graph.nodes)
    return made, written, len(set(at)) == 1


def local(x):
    return getattr(x, "_local_tensor", x)


def check_two_steps(how, devices, pins, by_inductor=False, rows=1, written=None):
    module, inputs, mesh = cache_and_inputs(how, devices, rows)
    solution = autoshard.plan(module, inputs, mesh, baselines=False, objective="serial", pins=pins)
    expected, _, _ = two_steps(0, how, None, False, rows)
    for made, count, same in results(devices, two_steps, how, solution, by_inductor, rows):
        assert count == (WAYS[how] if written is None else written) and same
        for ours, theirs in zip(made, expected, strict=True):
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("how", WAYS)
def test_rows_of_a_buffer_are_written_into_it_unless_the_old_ones_are_read_afterwards(how):
    check_two_steps(how, 1, {})


CASES = [(how, pin, False, 1, None) for how in ("index_copy", "twice", "output") for pin in ("S(1)", "S(2)")]
CASES += [("after", "S(1)", False, 1, None), ("index_copy", "S(2)", True, 1, None)]
CASES += [("index_copy", "S(2)", False, 3, 0), ("index_put", "S(0)", False, 3, None)]


@pytest.mark.parametrize(("how", "pin", "by_inductor", "rows", "written"), [
    case if k in (1, 8) else pytest.param(*case, marks=pytest.mark.slow) for k, case in enumerate(CASES)])  # fmt: skip
def test_rows_of_shards_are_written_into_them_too(how, pin, by_inductor, rows, written):
    check_two_steps(how, 2, {"rows": pin, "index_*": pin}, by_inductor, rows, written)


class TwoCaches(torch.nn.Module):
    def forward(self, x, keys, values, position):
        keys.index_copy_(1, position, x)
        values.index_copy_(1, position, 2 * x)
        return keys.sum(1) + values.sum(1)


@pytest.mark.parametrize("kind", ["plain", "transposed", "sliced", "the same twice"])
def test_caches_of_the_caller_are_written_whatever_their_strides(kind):
    assert results(1, written_caches, kind) == [True]


def written_caches(rank, kind):
    def caches():
        make = {"transposed": lambda: torch.ones(8, 2, 4).transpose(0, 1), "sliced": lambda: torch.ones(2, 16, 4)[:, ::2]}
        keys, values = (make.get(kind, lambda: torch.ones(2, 8, 4))() for _ in range(2))
        return keys, (keys if kind == "the same twice" else values)

    x, position, ours, theirs = torch.randn(2, 1, 4), torch.tensor([3]), caches(), caches()
    plain = (x, torch.ones(2, 8, 4), torch.ones(2, 8, 4), position)
    solution = autoshard.plan(TwoCaches(), plain, autoshard.Mesh.from_bandwidths((1,)), baselines=False, objective="serial")
    with torch.no_grad():
        made, expected = parallel(TwoCaches(), solution)(x, *ours, position), TwoCaches()(x, *theirs, position)
    return all(torch.allclose(a, b) for a, b in zip((made, *ours), (expected, *theirs), strict=True))


def test_a_write_is_priced_by_its_rows_and_takes_no_memory():
    def plan(how, rows):
        with torch.device("meta"):
            module, inputs = Cache(how), (torch.empty(4, 2, 1, 4), torch.empty(1, dtype=torch.int64))
            module.rows = torch.empty(4, 2, rows, 4)
        return autoshard.plan(module, inputs, autoshard.Mesh.from_bandwidths((1,)), baselines=False, objective="serial")

    size = 4 * 4 * 2 * 4 * 2**22  # bytes of the buffer
    small, large, kept = plan("index_copy", 8), plan("index_copy", 2**22), plan("before", 2**22)
    seconds = size / large.mesh.device.memory_rate
    assert large.cost - small.cost == pytest.approx(seconds, rel=0.1)  # the sum reads it
    assert kept.cost - large.cost == pytest.approx(3 * seconds, rel=0.1)  # and a sum more, and a copy
    assert large.peak_bytes < 1.1 * size < 1.9 * size < kept.peak_bytes
