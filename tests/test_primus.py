"""Experiments of AMD Primus: what is said where, and what can't be read."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.launch import Overrides
from autoshard.launch.configurations import edited_text, read_configuration
from autoshard.launch.megatron import place
from autoshard.launch.primus import experiment
from autoshard.launch.torchtitan import FLAVORS

DATA = Path(__file__).parent / "data" / "primus"
FILE = DATA / "examples" / "llama3.1_8B-BF16-pretrain.yaml"
WRITTEN = """modules:
  pre_trainer:
    framework: ${FRAMEWORK:megatron}
    config: trainer.yaml
    model: ${MODEL:large}.yaml
    overrides:
      tensor_model_parallel_size: ${TP:2}  # 4 on one node
      seq_length: 128
"""
PRESETS = {
    "modules/megatron/trainer.yaml": "extends: [base.yaml, ../all.yaml]\nbf16: true\nmicro_batch_size: 2\n",
    "modules/megatron/base.yaml": "bf16: false\nseq_length: 64\nseed: 1\n", "modules/all.yaml": "seed: 2\n",
    "models/megatron/large.yaml": "bases:\n  - small.yaml\nnum_layers: 4\nmodel_type: gpt\n",
    "models/megatron/small.yaml": "num_layers: 2\nhidden_size: 64\nseq_length: 96\n",
}  # fmt: skip


def checkout(folder: Path, text: str = WRITTEN, **presets: str) -> tuple[str, str]:
    for name, preset in (PRESETS | presets).items():
        path = folder / "primus" / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(preset)
    return text, str(folder / "examples" / "one.yaml")


def test_an_experiment_goes_before_its_model_and_that_before_its_trainer(tmp_path):
    assert experiment(*checkout(tmp_path))["model"] == {
        "bf16": True, "micro_batch_size": 2, "seed": 2, "num_layers": 4, "hidden_size": 64, "model_type": "gpt", "seq_length": 128,
        "tensor_model_parallel_size": 2,
    }  # fmt: skip
    assert experiment("modules: {a: 1}\nb: 2\n", "a.yaml") == {"modules": {"a": 1}, "b": 2}  # not of Primus


def read(folder: Path, more: str, **presets: str):
    text, path = checkout(folder, (WRITTEN + more).replace("${TP:2}", "1"), **presets)
    sizes = FLAVORS["qwen3", "30B-A3B"]
    return read_configuration("megatron", text, path, Overrides(devices=16, sizes=sizes))


def test_presets_are_joined_section_by_section_and_one_alone_may_be_a_name(tmp_path):
    presets = {"modules/megatron/trainer.yaml": "extends: base.yaml\nlora: {enabled: false, lora_A_init_method: xavier}\n"}
    assert read(tmp_path, "      lora: {dim: 8}\n", **presets).launch.seq == 128
    with pytest.raises(ValueError, match="adapters train few of the parameters"):
        read(tmp_path, "      lora: {enabled: true}\n", **presets)


def test_what_is_off_is_off_in_each_of_its_spellings(tmp_path):
    for off in ("false", "0", "${FSDP:False}", '"false"'):
        assert read(tmp_path, f"      use_torch_fsdp2: {off}\n").launch.zero == 0


def test_deepep_of_primus_turbo_is_deepep(tmp_path):
    expert = "      expert_model_parallel_size: 16\n      enable_primus_turbo: {}\n      {}\n"
    for turbo, more, deepep in (("true", "use_turbo_deepep: true", True), ("true", "turbo_sync_free_moe_stage: 2", True),
                                ("true", "turbo_sync_free_moe_stage: 1", False), ("false", "use_turbo_deepep: true", False)):  # fmt: skip
        assert read(tmp_path, expert.format(turbo, more)).launch.deepep == deepep


def test_stages_and_blocks_of_primus_own_arguments_are_read_or_said(tmp_path):
    by_hand = "      pipeline_model_parallel_size: 4\n      decoder_pipeline_manual_split_list: [11, 13, 13, 11]\n"
    assert read(tmp_path, by_hand).launch.split == "11,13,13,11"
    some = read(tmp_path, "      recompute_granularity: full\n      recompute_layer_ids: 0,3\n      use_sink_attention: true\n")
    assert some.launch.recompute == "full"
    assert [note.partition(" ")[0] for note in some.not_counted[-2:]] == ["recompute-layer-ids", "use-sink-attention"]


REFUSED = {
    "framework torchtitan; expected megatron": WRITTEN.replace("${FRAMEWORK:megatron}", "torchtitan"),
    "there is no file": WRITTEN.replace("large", "huge"),
    "overrides is '3'; expected a section": WRITTEN[: WRITTEN.index("overrides")] + "overrides: 3\n",
    "model_type is 'mamba', which has no prices here": WRITTEN + "      model_type: mamba\n",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_read_is_said(tmp_path, why):
    with pytest.raises(ValueError, match=why):
        experiment(*checkout(tmp_path, REFUSED[why]))


def test_presets_have_to_be_there_and_to_end(tmp_path):
    with pytest.raises(ValueError, match="presets are in primus/configs of its checkout"):
        experiment(WRITTEN, str(tmp_path / "one.yaml"))
    with pytest.raises(ValueError, match="extends more than 16 presets"):
        experiment(*checkout(tmp_path, **{"models/megatron/small.yaml": "extends: [large.yaml]\n"}))


def test_a_published_experiment_is_the_launch_that_it_says():
    config = read_configuration("megatron", FILE.read_text(), str(FILE), Overrides(devices=8))
    assert config.sizes.parameters == pytest.approx(8.03e9, rel=1e-3)
    (noted,) = config.not_counted
    assert noted.startswith("no-gradient-accumulation-fusion on")
    launch = config.launch
    assert (launch.seq, launch.microbatch, launch.global_batch, launch.data, launch.zero) == (8192, 2, 128, 8, 1)
    assert (launch.precision, launch.tensor, launch.recompute) == ("bf16", 1, "none")


def test_what_a_preset_has_on_is_written_as_off(tmp_path):
    turbo = "      expert_model_parallel_size: 16\n      enable_primus_turbo: true\n      use_turbo_deepep: true\n"
    preset = {"modules/megatron/trainer.yaml": "extends: [base.yaml]\nuse_distributed_optimizer: true\n"}
    text, path = checkout(tmp_path, (WRITTEN + turbo).replace("${TP:2}", "1"), **preset)
    known = Overrides(devices=16, sizes=FLAVORS["qwen3", "30B-A3B"])
    config = read_configuration("megatron", text, path, known)
    assert (config.launch.zero, config.launch.deepep) == (1, True)
    for change in ({"zero": 0, "shard": 1}, {"deepep": False}):
        launch = replace(config.launch, **change)
        new = edited_text("megatron", replace(config, launch=launch), text, path, known)
        assert read_configuration("megatron", new, path, known).launch == launch


@pytest.mark.parametrize("name", ["tensor-model-parallel-size", "context-parallel-size"])
def test_what_changes_is_changed_in_the_overrides(name):
    assert place(FILE.read_text(), str(FILE), name) == f"modules.pre_trainer.overrides.{name.replace('-', '_')}"
