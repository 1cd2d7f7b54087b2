"""torchrec's planner with our proposer and partitioner; without torchrec, the sentence that says what to install."""

import importlib.util
import sys

import pytest

from autoshard.tables import Table, plan_tables

WITHOUT = importlib.util.find_spec("torchrec") is None
needs_torchrec = pytest.mark.skipif(WITHOUT, reason="torchrec is not installed: pip install 'autoshard[tables]', see README")


def test_without_torchrec_a_sentence_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchrec" or name == "autoshard.tables.torchrec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(ImportError, match=r"needs torchrec: pip install 'autoshard\[tables\]'"):
        importlib.import_module("autoshard.tables.torchrec")


def collection(tables: int):
    import torch
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=16 * (1 + i % 4), num_embeddings=1000 * (1 + i * i), feature_names=[f"f{i}"])
        for i in range(tables)
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def planned(tables: int, hbm: int, **ours):
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    topology = Topology(world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=hbm, ddr_cap=2**33)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=64, **ours)
    plan = planner.plan(collection(tables), [EmbeddingBagCollectionSharder()])
    return plan, planner._perf_model.rate(planner._best_plan), planner._num_proposals


@needs_torchrec
@pytest.mark.slow  # torchrec takes seconds to import, its default proposers a minute
def test_the_real_planner_takes_ours_and_rates_it_no_worse_than_its_own():
    from autoshard.tables.torchrec import TablePartitioner, TableProposer

    proposer = TableProposer()
    for hbm in (2**30, 2**28):
        plan, rating, proposals = planned(30, hbm, proposer=proposer, partitioner=TablePartitioner())  # the same one again: load resets
        _, default, _ = planned(30, hbm)
        assert proposals <= 20 and rating <= default * (1 + 1e-9)
        (module,) = plan.plan.values()
        assert len(module) == 30 and all(0 <= rank < 4 for p in module.values() for rank in p.ranks)


@needs_torchrec
@pytest.mark.slow
def test_a_plan_as_torchrec_s_own_records():
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    from autoshard.tables.torchrec import parameter_constraints, sharding_plan

    tables = [Table(f"t{i}", 1000 * (1 + i * i), 16 * (1 + i % 4)) for i in range(12)]
    ours = plan_tables(tables, 4, hbm=1e9, devices_per_node=2, effort=0.05)
    (module,) = sharding_plan(ours, tables, "ebc").plan.values()
    for table in tables:
        parameter, placed = module[table.name], ours.tables[table.name]
        assert tuple(parameter.ranks) == placed.devices
        if parameter.sharding_spec is not None:  # the shards cover the table once
            cells = sum(s.shard_sizes[0] * s.shard_sizes[1] for s in parameter.sharding_spec.shards)
            assert cells == table.rows * table.columns
    constraints = parameter_constraints(ours, tables)
    topology = Topology(world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=2**31, ddr_cap=2**33)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=64, constraints=constraints)
    (theirs,) = planner.plan(collection(12), [EmbeddingBagCollectionSharder()]).plan.values()
    assert all(theirs[name].sharding_type == module[name].sharding_type for name in module)
