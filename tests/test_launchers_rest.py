"""A better configuration keeps what a launch doesn't decide: the data, the optimizer, where checkpoints go."""

import tomllib

import pytest

from autoshard.launch import Launch, LaunchConfig, configuration_text, kept_settings, read_configuration
from autoshard.launch.texts import toml_text
from autoshard.launch.torchtitan import FLAVORS
from tests.helpers_command import run

OURS = """
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf"

[training]
steps = 1000
seq_len = 8192
batch_size = 1
compile = true

[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_microbatches = 8

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
"""


def test_a_configuration_of_torchtitan_keeps_its_other_settings():
    launch = Launch(8, 8192, 8, data=8, shard=8, zero=3, recompute="full")
    text = configuration_text("torchtitan", LaunchConfig(launch, FLAVORS["llama3", "8B"]), kept_settings("torchtitan", OURS, "job.toml"))
    data, before = tomllib.loads(text), tomllib.loads(OURS)
    assert data["job"] == before["job"] and data["quantize"] == before["quantize"]
    assert data["training"]["steps"] == 1000 and data["model"]["hf_assets_path"] == "./assets/hf"
    assert "experimental" not in data and not {"batch_size", "compile"} & set(data["training"])  # decided anew, under today's names
    assert data["activation_checkpoint"] == {"mode": "full"} and data["parallelism"]["data_parallel_shard_degree"] == 8
    assert read_configuration("torchtitan", text, "job.toml").launch == launch


@pytest.mark.parametrize("launcher,path", [("torchtitan", "job.json"), ("accelerate", "fsdp.yaml"), ("megatron", "run.sh")])
def test_other_configurations_are_written_anew(launcher, path):
    assert kept_settings(launcher, "{}", path) is None


def test_toml_is_read_as_it_was_written():
    data = {"a": [1, "x", [True]], "b c": {"d": {"e": {}}, "f": [{"g": 1.5, "h i": '"\n'}]}, "j": {"k": {"l": False}}}
    assert tomllib.loads(toml_text(data)) == data


def test_check_says_what_it_kept(tmp_path):
    job, better = tmp_path / "job.toml", tmp_path / "better.toml"
    job.write_text(OURS)
    code, _, err = run("check", str(job), "--launcher", "torchtitan", "--devices", "8", "--out", str(better))
    assert code in (0, 1) and "other settings are those of" in err
    assert tomllib.loads(better.read_text())["job"]["dump_folder"] == "./outputs"
