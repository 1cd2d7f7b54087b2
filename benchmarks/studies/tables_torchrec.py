"""torchrec's own planners on instances of the study `tables`; importing it fails without torchrec.

Options become ShardingOptions with the same seconds and bytes; torchrec's proposers, greedy partitioner and performance model do the rest,
in the loop that EmbeddingShardingPlanner runs.
"""

from __future__ import annotations

import copy
import math

import torch
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer, GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import Perf, PlannerError, Shard, ShardingOption, Storage, Topology

from autoshard.tables import Option
from autoshard.tables.arrays import Devices

PLENTY = 10**15  # bytes: no limit
PARTITION_BY = {"device": "device", "node": "host", "mesh": "uniform"}
KERNELS = {"hbm": "fused", "host": "fused_uvm", "host_cached": "fused_uvm_caching"}


def ratings(options: list[list[Option]], devices: Devices) -> dict[str, float]:
    """Seconds of the slowest device of the best plan that each finds; inf where none."""
    module = torch.nn.Module()
    space = [sharding_option(f"t{i}", option, module) for i, some in enumerate(options) for option in some]
    topology = Topology(
        world_size=devices.num, local_world_size=devices.per_node, compute_device="cuda",
        hbm_cap=int(min(devices.hbm_limit[0], PLENTY)), ddr_cap=PLENTY,
    )  # fmt: skip
    defaults = [GridSearchProposer(), GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]
    return {"torchrec": best_of(defaults, space, topology), "torchrec_knapsack": best_of([DynamicProgrammingProposer()], space, topology)}


def sharding_option(name: str, option: Option, module: torch.nn.Module) -> ShardingOption:
    shards = [
        Shard(size=[1, 1], offset=[0, 0], storage=Storage(math.ceil(h), math.ceil(x)), perf=Perf(s, 0.0, 0.0, 0.0))
        for s, h, x in zip(option.seconds, option.hbm_bytes, option.host_bytes)
    ]
    return ShardingOption(
        name=name, tensor=torch.empty(1, 1, device="meta"), module=("tables", module), input_lengths=[1.0], batch_size=1,
        sharding_type=option.sharding, partition_by=PARTITION_BY[option.scope], compute_kernel=KERNELS[option.memory],
        shards=shards, is_pooled=True,
    )  # fmt: skip


def best_of(proposers: list, space: list[ShardingOption], topology: Topology) -> float:
    """The planner's loop over its proposers."""
    partitioner, model, best, seen = GreedyPerfPartitioner(), NoopPerfModel(topology), math.inf, {}
    for proposer in proposers:
        proposer.load(copy.deepcopy(space))
    for proposer in proposers:
        proposal = proposer.propose()
        while proposal:
            key = tuple(sorted(map(hash, proposal)))
            if key not in seen:
                try:
                    plan = partitioner.partition(proposal=proposal, storage_constraint=topology)
                    seen[key] = True, plan, model.rate(plan=plan)
                except PlannerError:
                    seen[key] = False, proposal, None
            partitionable, plan, rating = seen[key]
            best = min(best, rating if partitionable else math.inf)
            proposer.feedback(partitionable=partitionable, plan=plan, perf_rating=rating, storage_constraint=topology)
            proposal = proposer.propose()
    return best
