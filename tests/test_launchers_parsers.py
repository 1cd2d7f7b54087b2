"""Configurations that we write, read by torchtitan's own parser where it is installed: a release that reads TOML (0.2), and tyro."""

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from autoshard.launchers import Described, Launch, configuration_text
from autoshard.launchers.space import launches, structures
from autoshard.launchers.torchtitan import FLAVORS

FEW = 12


def sampled(sizes):
    rows = launches(structures(Launch(64, 4096, 256), "torchtitan"), sizes, "torchtitan")
    return [rows.launch(i) for i in np.linspace(0, len(rows) - 1, FEW).astype(int)]


def manager():
    """torchtitan's; a release after 0.2 reads no files."""
    pytest.importorskip("tyro")
    config = pytest.importorskip("torchtitan.config", exc_type=ImportError)
    if not hasattr(config, "JobConfig"):
        pytest.skip("this torchtitan has no JobConfig")
    return config.ConfigManager()


@pytest.mark.parametrize("model, flavor", [("llama3", "70B"), ("deepseek_v3", "671B")])
def test_torchtitans_own_parser_reads_what_is_written(tmp_path, model, flavor):
    sizes, reader, path = FLAVORS[model, flavor], manager(), tmp_path / "job.toml"
    for launch in sampled(sizes):
        path.write_text(configuration_text("torchtitan", Described(launch, sizes)))
        read = reader.parse_args(["--job.config-file", str(path)])
        of = read.parallelism
        sizes_of = (of.tensor_parallel_degree, of.context_parallel_degree, of.pipeline_parallel_degree, of.expert_parallel_degree)
        assert sizes_of == (launch.tensor, launch.context, launch.pipeline, launch.expert)
        assert of.data_parallel_replicate_degree * of.data_parallel_shard_degree == launch.data
        assert (read.model.name, read.model.flavor) == (model, flavor)
        assert (read.training.seq_len, read.training.global_batch_size) == (4096, 256)
        if launch.pipeline > 1:
            assert get_schedule_class(of.pipeline_parallel_schedule)
            assert len(of.module_fqns_per_model_part) == launch.pipeline * launch.virtual


def test_torchtitans_own_parser_refuses_a_key_that_it_lacks(tmp_path, capsys):
    reader, path = manager(), tmp_path / "job.toml"
    text = configuration_text("torchtitan", Described(sampled(FLAVORS["llama3", "8B"])[0], FLAVORS["llama3", "8B"]))
    path.write_text(text.replace("tensor_parallel_degree", "tensor_degree"))
    with pytest.raises((SystemExit, ValueError, TypeError)):
        reader.parse_args(["--job.config-file", str(path)])
