"""Use of the tables planner inside torchrec's planner (a Proposer and a Partitioner), and conversion of plans to torchrec's records.

    planner = EmbeddingShardingPlanner(topology=topology, proposer=TableProposer(topology), partitioner=TablePartitioner())

The prices are torchrec's: those of its enumerator for every shard (`perf.total` seconds, `storage` bytes), summed per device as in its
performance model. The proposer plans options and devices together; the partitioner keeps those devices where they fit into the free
memory, else it plans the devices again.

Needs `pip install torchrec` (versions in README).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np

try:
    import torch
    from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
    from torchrec.distributed.planner.types import (
        Enumerator,
        ParameterConstraints,
        PartitionByType,
        Partitioner,
        PlannerError,
        PlannerErrorType,
        Proposer,
        ShardingOption,
        Topology,
    )
    from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
    from torchrec.distributed.types import (
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingPlan,
        ShardMetadata,
    )
except ImportError as error:
    raise ImportError(
        "autoshard.tables.torchrec needs torchrec: pip install 'autoshard[tables]', then "
        f"pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 ({error})"
    ) from None

from autoshard.graph import grouped
from autoshard.tables.arrays import Devices
from autoshard.tables.plan import plan_options
from autoshard.tables.records import Option, PlacedTable, Table, TablePlan

MOST = 20  # proposals
RESERVE = 0.15  # the share of the memory that torchrec's planner keeps free by default
KERNELS = {"hbm": "fused", "host": "fused_uvm", "host_cached": "fused_uvm_caching"}
SHARDINGS = {"grid": "grid_shard"}  # the other names are equal


def devices_of(topology: Topology, keep_free: float = 0.0) -> Devices:
    """The devices of a topology; every device has its own host memory, as in torchrec."""
    num = topology.world_size
    limits = [[device.storage.hbm, device.storage.ddr] for device in topology.devices]
    free = np.maximum(np.array(limits, dtype=float), 0.0) * (1 - keep_free)
    return Devices(min(topology.local_world_size, num), np.arange(num), free[:, 0], free[:, 1])


def option_of(sharding: ShardingOption, devices: Devices) -> Option | None:
    """torchrec's option as an Option; None where these devices can't hold it."""
    shards = sharding.shards
    scope = {"uniform": "mesh", "host": "node", "device": "device"}.get(sharding.partition_by)
    if sharding.partition_by == PartitionByType.MULTI_HOST.value:
        # torchrec wants every column part on a separate node: expressed as one part on all nodes, or not at all
        scope = "mesh" if len(shards) == devices.num else None
    wide = {"mesh": devices.num, "node": devices.per_node, "device": 1}.get(scope or "", 0)
    if not wide or len(shards) % wide or (scope == "mesh" and len(shards) != wide):
        return None
    columns = zip(*((float(s.perf.total), float(s.storage.hbm), float(s.storage.ddr)) for s in shards))
    seconds, hbm, ddr = (tuple(column) for column in columns)
    if any(math.isnan(x) or x < 0 for x in (*seconds, *hbm, *ddr)):
        return None
    return Option(sharding.sharding_type, seconds, hbm, ddr, scope or "", sharding.compute_kernel)


def topology_of(enumerator: Enumerator | None) -> Topology | None:
    """The topology of the enumerator's estimators, or None (torchrec passes no topology to a proposer before its first feedback)."""
    for estimator in getattr(enumerator, "_estimators", ()):
        topology = getattr(estimator, "_topology", None)
        if isinstance(topology, Topology):
            return topology
    return None


class TableProposer(Proposer):
    """Proposes the options of autoshard's plan, the best plan first; plans again when the planner reports the available memory.

    topology: the planner's, by default the one that its enumerator's estimators hold; the first proposal is planned for it. reserve: the
    share of the memory that the planner will keep free. `load` resets all state.
    """

    def __init__(self, topology: Topology | None = None, reserve: float = RESERVE, most: int = MOST, effort: float = 0.5) -> None:
        if not 1 <= most <= MOST:
            raise ValueError(f"most is {most!r}; expected 1 to {MOST} proposals")
        self.topology, self.reserve, self.most, self.effort = topology, reserve, most, effort
        self.reset()

    def reset(self) -> None:
        self.by_table: dict[str, list[ShardingOption]] = {}
        self.queue: list[list[ShardingOption]] = []
        self.proposed = 0
        self.planned_for: list[tuple] = []
        self.plans: list[TablePlan] = []

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        self.reset()
        self.by_table = grouped((option.fqn, option) for option in search_space)
        if not self.by_table:
            return
        topology = self.topology or topology_of(enumerator)
        if topology is not None:
            self._plan(devices_of(topology, self.reserve), self.effort / 2)
        if not self.queue:  # the memory is not known yet: propose the least, then plan after the planner's feedback
            self.queue.append([min(some, key=lambda o: (o.total_storage.hbm, o.total_storage.ddr)) for some in self.by_table.values()])

    def propose(self) -> list[ShardingOption] | None:
        if not self.queue or self.proposed >= self.most:
            return None
        return self.queue[0]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        if self.queue:
            self.queue.pop(0)
            self.proposed += 1
        if storage_constraint is not None:
            self._plan(devices_of(storage_constraint), self.effort)

    def _plan(self, devices: Devices, effort: float) -> None:
        """Queue the plan for these devices, unless it was planned before."""
        key = (devices.per_node, devices.hbm_limit.tobytes(), devices.host_limit.tobytes())
        if key in self.planned_for:
            return
        self.planned_for.append(key)
        listed = {name: [(o, option_of(o, devices)) for o in some] for name, some in self.by_table.items()}
        usable = {name: [(o, option) for o, option in some if option is not None] for name, some in listed.items()}
        if not all(usable.values()):
            return
        plan = plan_options(list(usable), [[option for _, option in some] for some in usable.values()], devices, effort=effort)
        self.plans.append(plan)
        if not plan.tables:
            return
        proposal = []
        for name, placed in plan.tables.items():
            proposal.append(copy.deepcopy(usable[name][placed.index][0]))
            _place(proposal[-1], placed)  # for the partitioner
        self.queue.append(proposal)


class TablePartitioner(Partitioner):
    """Places the shards of a proposal so that the slowest device is as fast as possible; PlannerError where no placement was found.

    Ranks that a proposal already has are kept where they fit. torchrec's partitioner places tables that torchrec ties together (towers).
    """

    def __init__(self, effort: float = 0.3) -> None:
        self.effort = effort

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        if any(option.dependency for option in proposal):
            return GreedyPerfPartitioner().partition(proposal, storage_constraint)
        devices = devices_of(storage_constraint)
        if all(shard.rank is not None for option in proposal for shard in option.shards) and _fits(proposal, devices):
            return proposal
        options = [option_of(option, devices) for option in proposal]
        names = [option.fqn for option in proposal]
        if None in options:
            wrong = proposal[options.index(None)]
            raise PlannerError(f"{wrong.fqn}: {wrong.sharding_type} can't be placed on this topology", PlannerErrorType.PARTITION)
        plan = plan_options(names, [[option] for option in options if option is not None], devices, effort=self.effort)
        if not plan.tables:
            raise PlannerError(f"can't find a plan: {plan.reason}", PlannerErrorType.PARTITION)
        for option, placed in zip(proposal, plan.tables.values()):
            _place(option, placed)
        return proposal


def _place(option: ShardingOption, placed: PlacedTable) -> None:
    for shard, rank in zip(option.shards, placed.devices):
        shard.rank = rank


def _fits(proposal: Sequence[ShardingOption], devices: Devices) -> bool:
    hbm, ddr = np.zeros(devices.num), np.zeros(devices.num)
    for option in proposal:
        for shard in option.shards:
            hbm[shard.rank] += shard.storage.hbm
            ddr[shard.rank] += shard.storage.ddr
    return bool((hbm <= devices.hbm_limit).all() and (ddr <= devices.host_limit).all())


# -- plans in torchrec's records -----------------------------------------------------------------------------------------------------


def parameter_constraints(plan: TablePlan, tables: Sequence[Table]) -> dict[str, ParameterConstraints]:
    """Constraints that leave torchrec's planner only the options of the plan, by table."""
    by_name = {table.name: table for table in tables}
    per_node = int(plan.assumptions.get("devices_per_node", len(plan.devices)))
    constraints = {}
    for name, placed in plan.tables.items():
        table, sharding = by_name[name], _sharding(placed.option)
        by_columns = "column" in sharding or "grid" in sharding
        constraints[name] = ParameterConstraints(
            sharding_types=[sharding],
            compute_kernels=[_kernel(placed.option)],
            min_partition=table.columns // _column_parts(placed.option, len(placed.devices), per_node) if by_columns else None,
            pooling_factors=[table.pooling] * table.features,
        )
    return constraints


def sharding_plan(
    plan: TablePlan, tables: Sequence[Table], module_path: str = "", device: str = "cpu", devices_per_node: int | None = None
) -> ShardingPlan:
    """The plan as torchrec's ShardingPlan of one embedding module at `module_path`. ValueError for a plan without devices."""
    if not plan.devices:
        raise ValueError(f"the plan places no table ({plan.reason}); there is nothing to export")
    world = len(plan.devices)
    per_node = devices_per_node or int(plan.assumptions.get("devices_per_node", world))
    by_name = {table.name: table for table in tables}
    of_module = EmbeddingModuleShardingPlan()
    for name, placed in plan.tables.items():
        of_module[name] = _parameter(by_name[name], placed.option, placed.devices, world, per_node, device)
    return ShardingPlan({module_path: of_module})


def _parameter(table: Table, option: Option, devices: Sequence[int], world: int, per_node: int, device: str) -> ParameterSharding:
    sharding = _sharding(option)
    columns = table.columns // _column_parts(option, len(devices), per_node)
    tensor = torch.empty(table.rows, table.columns, device="meta")
    sizes, offsets = calculate_shard_sizes_and_offsets(tensor, world, per_node, sharding, columns)
    shards = [
        ShardMetadata(shard_sizes=size, shard_offsets=offset, placement=placement(device, rank, per_node))
        for size, offset, rank in zip(sizes, offsets, devices, strict=True)
    ]
    spec = None if sharding == "data_parallel" else EnumerableShardingSpec(shards)
    return ParameterSharding(sharding_spec=spec, sharding_type=sharding, compute_kernel=_kernel(option), ranks=list(devices))


def _column_parts(option: Option, shards: int, per_node: int) -> int:
    return {"column_wise": shards, "grid": shards // per_node, "grid_shard": shards // per_node}.get(option.sharding, 1)


def _sharding(option: Option) -> str:
    return SHARDINGS.get(option.sharding, option.sharding)


def _kernel(option: Option) -> str:
    return "dense" if option.sharding == "data_parallel" else KERNELS.get(option.memory, option.memory)
