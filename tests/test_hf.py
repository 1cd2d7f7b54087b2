"""Hugging Face models from their config: the published module, example inputs, settings, and sentences where it can't be."""

import builtins
import copy
import importlib
import json
import sys

import pytest
import torch
import transformers

from autoshard.capture import capture
from autoshard.capture.huggingface import UNMASKED, load_huggingface
from autoshard.cli import launchers, main
from autoshard.cli.model import load_model
from autoshard.cli.model_source import config_folder
from benchmarks.coverage import HF
from tests.helpers_refusals import assert_refused

MODELS = sorted(path.parent.name for path in HF.glob("*/config.json"))


def folder(name):
    return str(HF / name)


def real(module, seed=0):
    """The module on the CPU with seeded weights, its buffers as the published class makes them."""
    torch.manual_seed(seed)
    made = published(module, module.config._attn_implementation)
    made.__class__ = type(module)
    return made


def published(module, attention="eager"):
    """The published class on the CPU."""
    return (
        getattr(transformers, module.config.architectures[0])
        ._from_config(copy.deepcopy(module.config), attn_implementation=attention)
        .eval()
    )


def values(example_inputs, words=100, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(3, words, x.shape, generator=g) if x.dtype == torch.int64 else torch.randn(x.shape, generator=g)
        for name, x in example_inputs.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_the_published_ones(name):
    module, example_inputs = load_huggingface(folder(name), {}, training=True)
    config = transformers.AutoConfig.from_pretrained(folder(name))
    with torch.device("meta"):
        theirs = getattr(transformers, config.architectures[0])._from_config(config)
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    assert all(p.is_meta for p in module.parameters())
    assert type(module).__name__ == config.architectures[0]
    assert example_inputs


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "bart", "whisper", "vit", "clip", "opt", "mixtral"])
def test_what_is_left_out_changes_no_number(name):
    """Without a mask, cache and other outputs the module computes what the published one does."""
    module, example_inputs = load_huggingface(folder(name), {}, training=True)
    assert module.config._attn_implementation == UNMASKED
    ours = real(module)
    theirs = published(module)
    theirs.load_state_dict(ours.state_dict())
    given = values(example_inputs)
    given |= {"labels": given["labels"] % 8} if name == "vit" else {}
    more = {"return_loss": True} if name == "clip" else {}
    with torch.no_grad():
        assert ours(**given).item() == pytest.approx(theirs(**given, **more).loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "falcon"])
def test_the_mask_that_is_given_is_the_one_that_would_be_built(name):
    module, example_inputs = load_huggingface(folder(name), {}, training=True)
    mask = example_inputs["attention_mask"]
    ours, given = real(module), values({k: v for k, v in example_inputs.items() if k != "attention_mask"})
    theirs = published(module)
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert ours(**given, attention_mask=mask).item() == pytest.approx(theirs(**given).loss.item(), rel=1e-5)


@pytest.mark.parametrize("alibi", [None, True])
def test_a_model_with_biases_by_distance_makes_them_of_a_mask_of_its_own(tmp_path, alibi):
    """Bloom has no word for them in its config; a Falcon says that it has them."""
    kind, more = ("Bloom", {"n_head": 2, "n_layer": 1}) if alibi is None else ("Falcon", {"alibi": alibi, "num_attention_heads": 2})
    config = getattr(transformers, f"{kind}Config")(hidden_size=16, vocab_size=100, **({"num_hidden_layers": 1} | more))
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    module, example_inputs = load_huggingface(tmp_path, {"batch": 2, "seq": 8}, training=True)
    assert set(example_inputs) == {"input_ids", "labels"}
    ours, given = real(module), values(example_inputs)
    theirs = published(module, module.config._attn_implementation)
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert ours(**given).item() == pytest.approx(theirs(**given).loss.item(), rel=1e-5)
    assert capture(module, example_inputs, training=True).parameters


def test_settings_change_layers_sizes_and_type():
    settings = {"layers": 3, "batch": 2, "seq": 4, "dtype": "bfloat16"}
    module, example_inputs = load_huggingface(folder("gemma3"), settings)
    assert len(module.model.layers) == 3 and len(module.config.layer_types) == 3
    assert example_inputs["input_ids"].shape == (2, 4) and "labels" not in example_inputs
    assert module.dtype == torch.bfloat16
    module, _ = load_huggingface(folder("clip"), {"layers": 1})
    assert len(module.text_model.encoder.layers) == len(module.vision_model.encoder.layers) == 1


def test_a_causal_mask_is_no_part_of_the_graph():
    """Under capture transformers would build one for packed sequences, [batch, 1, seq, seq]."""
    module, example_inputs = load_huggingface(folder("llama"), {"batch": 4, "seq": 32})
    graph = capture(module, example_inputs, training=False)
    assert not any(t is not None and t.dtype == "bool" for op in graph.ops for t in op.outputs)
    assert any(op.target == "autoshard.attention.default" for op in graph.ops)


def test_the_loss_is_an_output_on_its_own():
    module, example_inputs = load_huggingface(folder("gpt2"), {}, training=True)
    graph = capture(module, example_inputs, training=True)
    assert [r.kind for r in graph.results].count("output") == 1
    assert graph.tensor(next(r.value for r in graph.results if r.kind == "output")).shape == ()
    module, example_inputs = load_huggingface(folder("gpt2"), {"loss": True})
    assert "labels" in example_inputs


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        ({}, {"depth": 2}, "hf: models take no setting 'depth'; they take batch, seq, image_size, layers"),
        ({}, {"layers": 0}, "layers is 0; expected a whole number of 1 or more"),
        ({}, {"dtype": "float99"}, "dtype is 'float99'; expected a name of torch's"),
        ({}, {"attention": "none_such"}, "can't build LlamaForCausalLM from .*none_such"),
        ({"architectures": ["NoSuchModel"]}, {}, "has architecture 'NoSuchModel', which transformers .* has not"),
        ({"architectures": "LlamaForCausalLM"}, {}, 'architectures holds "LlamaForCausalLM" is not of types'),
        ({"architectures": [3]}, {}, "architectures/0 holds 3 is not of type"),
        ({"architectures": ["logging"]}, {}, "has architecture 'logging'"),  # a name in transformers that is no model
        ({"vocab_size": "many"}, {}, "config.json"),
        ({"hidden_size": [64]}, {}, "config.json"),
        ({"num_attention_heads": 0}, {}, "config.json"),
        ({"num_hidden_layers": None}, {}, "config.json"),
        ({"rope_parameters": 3}, {}, "config.json"),
        ({}, {"batch": "many"}, "batch is 'many'; expected a whole number of 1 or more"),
        ({}, {"seq": -4}, "seq is -4; expected a whole number of 1 or more"),
        ({"model_type": "no_such_type"}, {}, "config.json can't be read as a config by transformers"),
        ({"architectures": ["LlamaModel"]}, {"loss": True}, "LlamaModel computes no loss"),
    ],
)
def test_what_can_not_be_is_one_sentence(tmp_path, change, settings, said):
    written = json.loads((HF / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | change))
    with pytest.raises(ValueError, match=said) as caught:
        load_huggingface(str(tmp_path), settings)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_config_is_said(tmp_path):
    assert_refused("there is no file .*config.json; hf:DIR names a folder", load_model, f"hf:{tmp_path}", {})


def test_transformers_missing_is_one_sentence(monkeypatch):
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=missed)
        return original(name, *args, **kwargs)

    missed = "transformers"
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match="hf: models need the package transformers, which is not installed; run: pip install"):
        load_huggingface(folder("llama"), {})
    missed = "tokenizers"
    assert_refused("transformers is installed, but it can't be imported .*; install what it names", load_huggingface, folder("llama"), {})


@pytest.mark.parametrize("error", [ImportError("libcudart.so.12: cannot open"), RuntimeError("operator torchvision::nms does not exist")])
def test_a_broken_import_inside_transformers_is_not_blamed_on_the_config(error, monkeypatch, tmp_path):
    """The module of a model fails while transformers imports it."""
    (tmp_path / "broken_for_test.py").write_text(f"raise {type(error).__name__}({str(error)!r})")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Config:
        @staticmethod
        def for_model(**written):
            importlib.import_module("broken_for_test")

    monkeypatch.setattr(sys.modules["transformers"], "AutoConfig", Config)  # another test imports it again
    with pytest.raises(ValueError, match="a package that it needs, is missing or broken") as refused:
        load_huggingface(folder("llama"), {})
    assert str(error) in str(refused.value) and "correct" not in str(refused.value)


def test_experts_in_a_loop_are_refused_with_their_line():
    module, example_inputs = load_huggingface(folder("mixtral"), {"experts": "eager"})
    assert_refused(r"MixtralForCausalLM can't be captured at .*modeling_mixtral.py:\d+.*", capture, module, example_inputs, training=True)


def test_the_command_line_takes_a_folder(tmp_path, capsys):
    out = tmp_path / "plan.json"
    model = f"hf:{folder('bert')}"
    assert main(["plan", model, "--set", "layers=1", "--mesh", "2x2", "--train", "--no-baselines", "--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["replicated_ops"] == []
    assert main(["verify", str(out), "--trust", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


# -- names of the hub -----------------------------------------------------------------------------------------------------------


def in_cache(folder, name, config):
    """The config of a repository as `hf download` leaves it in the hub's cache."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(config)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "gpt2"])
def test_a_name_of_the_hub_is_found_in_its_cache_or_the_sentence_says_how_to_get_it(hub, capsys, name):
    argv = ["plan", f"hf:{name}", "--mesh", "2", "--set", "layers=1", "--batch", "4", "--seq", "8", "--no-baselines", "--json"]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert f"hf download {name} config.json" in said and "--local-dir DIR" in said and said.count("\n") == 1
    in_cache(hub, name, (HF / "llama" / "config.json").read_text())
    assert main(argv) == 0
    cached = json.loads(capsys.readouterr().out)
    assert main(["plan", f"hf:{HF / 'llama'}", *argv[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == cached["fingerprint"]
    assert launchers.sizes_of(f"hf:{name}", {}).layers == 2


def test_sizes_that_a_config_leaves_out_are_those_of_its_class(tmp_path):
    """As Gemma 3's published configs do; layers that are asked for are those of the text."""
    text = {"model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    sizes = launchers.sizes_of(f"hf:{tmp_path}", {})
    assert (sizes.head_dim, sizes.vocab, sizes.windowed, sizes.parameters / 1e9) == (256, 262208, 40, pytest.approx(11.77, abs=0.01))
    assert launchers.sizes_of(f"hf:{tmp_path}", {"layers": 6}).layers == 6
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {**text, "vocab_size": 128}}))
    assert launchers.sizes_of(f"hf:{tmp_path}", {"layers": 6}).layers == 6
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of nobody", "hidden_size": 64}))
    assert_refused("config.json has none of num_hidden_layers", launchers.sizes_of, f"hf:{tmp_path}", {})


@pytest.mark.parametrize("name", ["Qwen/Qwen3/8B", "../Qwen", "/nowhere", "Qwen/", "a" * 200, "-x/y"])
def test_what_is_no_name_of_the_hub_is_a_folder_that_is_not_there(hub, name):
    assert_refused("there is no file .*config.json; hf:DIR names a folder", config_folder, name)


def test_a_folder_is_taken_before_the_cache(hub):
    in_cache(hub, "Qwen/Qwen3-8B", "{}")
    (hub / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    (hub / "Qwen" / "Qwen3-8B" / "config.json").write_text("{}")
    assert str(config_folder("Qwen/Qwen3-8B")) == "Qwen/Qwen3-8B"
