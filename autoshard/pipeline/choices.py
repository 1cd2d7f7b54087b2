"""The configurations for one number of microbatches, and the description of the chosen one.

    planned   the division of the dynamic program
    equal     P stages of equally many layers on equal sub-meshes, each with the best layouts that fit; interleaved: 2 P parts
    grid      the same stages with fixed layouts: data parallel over D, Megatron over H, P = devices / (D H)

`search` says which of them are worth planning.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard.pipeline.configurations import Configuration, equal_parts, in_flight
from autoshard.pipeline.schedules import schedule_of
from autoshard.pipeline.stage_division import Nodes, Stage, SubMesh
from autoshard.pipeline.stage_planner import StagePlanner
from autoshard.pipeline.stage_programs import stage_program
from autoshard.pipeline.stage_tables import StageTable, Sums
from autoshard.pipeline.submeshes import Cluster
from autoshard.solution import PipelineStage

CHUNKS = 2  # parts per device of an interleaved schedule
Ways = Sequence[tuple[str, Sequence[Stage]]]  # schedules, each with the parts of the model that it runs


def planned_before(table: StageTable, schedules: Sequence[str]) -> list[Configuration]:
    """The configurations on sub-meshes that are planned already, without the grid."""
    ways = [way for P in sorted({P for P, *_ in grid_of(table)}) for way in equal_groups(table, schedules, P)]
    return [*of_division(table, schedules), *configurations("equal", table, ways)]


def of_division(table: StageTable, schedules: Sequence[str]) -> list[Configuration]:
    """The division of the dynamic program over the sub-meshes that are planned, under every schedule of one part per device."""
    division = table.division()
    if division is None:
        return []
    names = _single_chunk(table, schedules, len(division.stages))
    return configurations("planned", table, [(name, division.stages) for name in names])


def _single_chunk(table: StageTable, schedules: Sequence[str], stages: int) -> list[str]:
    """The schedules with one part per device; only the first for one stage, or without a backward pass: there all are the same."""
    names = [name for name in schedules if name != "interleaved_1f1b"]
    return names[:1] if stages == 1 or not table.training else names


def equal_groups(table: StageTable, schedules: Sequence[str], P: int) -> Ways:
    """The schedules that P groups on equal sub-meshes can run, each with the parts that it needs."""
    u = submesh(table, table.cluster.num_devices // P)
    parts, finer = ([Stage(a, b, u) for a, b in equal_parts(table.layers.count, n) or ()] for n in (P, CHUNKS * P))
    ways = [(name, parts) for name in _single_chunk(table, schedules, P)] if parts else []
    if "interleaved_1f1b" in schedules and P > 1 and finer and table.training:
        ways.append(("interleaved_1f1b", finer))
    return ways


def ways_of(table: StageTable, schedules: Sequence[str], stages: int | None) -> Ways:
    """The schedules that some pipeline of so many stages, or of any number, can run, if memory had no limit."""
    of_division = [(name, ()) for name in _single_chunk(table, schedules, stages or table.cluster.num_devices)]
    return of_division or [way for P in {P for P, *_ in grid_of(table)} if stages in (None, P) for way in equal_groups(table, schedules, P)]


def submesh(table: StageTable, devices: int) -> int:
    """The first sub-mesh of that many devices."""
    return next(u for u, s in enumerate(table.cluster.submeshes) if s.size == devices)


def grid_of(table: StageTable) -> list[tuple[int, int, int]]:
    """(P, D, H) with P D H = devices, stages that tile the nodes; none on several kinds of nodes."""
    n, sizes = table.cluster.num_devices, {s.size for s in table.cluster.submeshes}
    stage_sizes = [m for m in sorted(sizes) if n % m == 0 and n // m <= table.layers.count and len(table.cluster.kinds) == 1]
    return [(n // m, m // H, H) for m in stage_sizes for H in range(1, m + 1) if m % H == 0]


def has_room(table: StageTable, point: tuple[int, int, int]) -> bool:
    """Whether parameters, gradients and optimizer state fit when tensor and pipeline parallelism shard all of them."""
    P, _, H = point
    return table.held_bytes / (P * H) <= table.memory(table.cluster.submeshes[0])


def grid_point(table: StageTable, schedules: Sequence[str], point: tuple[int, int, int], sums: Sums) -> list[Configuration]:
    """The same stages under every schedule, all as planned in `sums`."""
    P, D, H = point
    return [replace(c, data=D, tensor=H) for c in configurations("grid", table, equal_groups(table, schedules, P), sums)]


def configurations(way: str, table: StageTable, ways: Ways, pinned: Sums | None = None) -> list[Configuration]:
    """Those for every part of which some combination fits, with the best one that does. pinned: instead, all parts as planned there."""
    rows = [_configuration(way, table, schedule, parts, pinned) for schedule, parts in ways]
    return [row for row in rows if row is not None]


def _configuration(way: str, table: StageTable, schedule: str, parts: Sequence[Stage], pinned: Sums | None) -> Configuration | None:
    chunks = CHUNKS if schedule == "interleaved_1f1b" else 1
    groups = len(parts) // chunks
    held = in_flight(schedule_of(schedule, groups, table.K, chunks))
    chosen = []
    for part, q in zip(parts, held):
        sums = pinned or table.choose(part.first, part.last, part.submesh, q, 1.0 / chunks)
        if sums is None:
            return None
        chosen.append(sums)
    over = [*(part.first for part in parts[1:]), 0]
    meshes = [table.cluster.submeshes[part.submesh] for part in parts[:groups]]
    ends = [(part.submesh, parts[(v + 1) % len(parts)].submesh) for v, part in enumerate(parts)]
    return Configuration(
        way, table.K, schedule, tuple(parts), tuple(sums.option(part.first, part.last) for sums, part in zip(chosen, parts)),
        tuple(sums.combination for sums in chosen),
        tuple(float(table.transfer[c, a, u]) for c, (a, u) in zip(over, ends)),
        tuple(float(table.transfer_back[c, a, u]) for c, (a, u) in zip(over, ends)),
        tuple(table.memory(s) for s in meshes), tuple(s.size for s in meshes), unit_seconds=table.unit_seconds,
    )  # fmt: skip


def described(best: Configuration, table: StageTable) -> tuple[PipelineStage, ...]:
    """The stages of a configuration, with their devices and layouts."""
    placed = place([table.cluster.submeshes[part.submesh] for part in best.parts[: best.groups]], table.cluster)
    held = in_flight(best.order)
    stages = []
    for v, (part, option, combination) in enumerate(zip(best.parts, best.options, best.combinations)):
        d = v % best.groups
        how = {"recompute": combination.recompute, "halved": best.order.splits_backward}
        program = stage_program(table.layers, part.first, part.last, **how)
        layouts = dict(zip((op.name for op in program.graph.ops), option.layouts, strict=True))
        parameters = {name: layouts[name].outputs[0] or "" for name in program.graph.parameters}
        kind = table.cluster.kinds[table.cluster.submeshes[part.submesh].kind]
        stages.append(
            PipelineStage(
                part.first, part.last, d, placed[d], kind.mesh((1,)).device.name, option.mesh, option.forward, option.backward, option.once,
                best.transfer[v] if v + 1 < len(best.parts) else 0.0, best.run.peak_bytes[d], held[v], option.recompute,
                parameters, layouts, combination.mesh,
            )  # fmt: skip
        )
    return tuple(stages)


def place(wanted: Sequence[SubMesh], cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks for every sub-mesh: the largest first, on the node with the fewest free devices that suffice. ValueError if they don't fit."""
    free: list[list[list[int]]] = []  # by kind and node
    start = 0
    for kind in cluster.kinds:
        free.append([list(range(start + n * kind.devices, start + (n + 1) * kind.devices)) for n in range(kind.nodes)])
        start += kind.nodes * kind.devices
    ranks: dict[int, tuple[int, ...]] = {}

    def search(order: list[int]) -> bool:
        if not order:
            return True
        i, rest = order[0], order[1:]
        s = wanted[i]
        nodes = free[s.kind]
        if s.nodes > 1:
            free_nodes = [n for n in nodes if len(n) == cluster.kinds[s.kind].devices][: s.nodes]
            options = [free_nodes] if len(free_nodes) == s.nodes else []
        else:
            options = [[n] for n in sorted((n for n in nodes if len(n) >= s.devices), key=len)]
        tried = set()
        for option in options:
            key = tuple(len(n) for n in option)
            if key in tried:
                continue
            tried.add(key)
            taken = [[n.pop(0) for _ in range(s.devices)] for n in option]
            ranks[i] = tuple(rank for part in taken for rank in part)
            if search(rest):
                return True
            for n, part in zip(option, taken):
                n[:0] = part
        return False

    if not search(sorted(range(len(wanted)), key=lambda i: (-wanted[i].size, i))):
        raise ValueError(f"sub-meshes of {[s.size for s in wanted]} devices don't fit on the cluster")
    return [ranks[i] for i in range(len(wanted))]


def speed_ups(cluster: Cluster, planners: Sequence[StagePlanner], best: Configuration) -> tuple[dict[str, Any], ...]:
    """Seconds on the first 1, 2, 4, ... devices of a cluster of one kind of nodes (from plans of single layers, on sub-meshes that the
    search considered, or that have all these devices; where nothing fits on these, on all sub-meshes), and on all of them.

    seconds: None where the model does not fit. speed_up: relative to the fewest devices that fit, whose speed-up is their number; None
    where the model does not fit, and in all rows if the model fits on all devices only, as there is nothing to compare with.
    """
    if len(cluster.kinds) > 1:
        return ()
    M, n = cluster.kinds[0].devices, cluster.num_devices
    counts = [m for m in range(1, n) if (m < M and M % m == 0) or (m % M == 0 and n % m == 0)]
    rows: list[dict[str, Any]] = [{"devices": m, "seconds": _seconds_on(cluster, planners, best, m)} for m in counts]
    rows.append({"devices": n, "seconds": best.seconds})
    base = next(row for row in rows if row["seconds"])
    for row in rows:
        compared = row["seconds"] and base is not rows[-1]
        row["speed_up"] = base["devices"] * base["seconds"] / row["seconds"] if compared else None
    return tuple(rows)


def _seconds_on(cluster: Cluster, planners: Sequence[StagePlanner], best: Configuration, m: int) -> float | None:
    """On the first m devices of the cluster; None where no division of any number of microbatches fits."""
    M, u_of_all = cluster.kinds[0].devices, submesh(planners[0].table, m)
    nodes = (Nodes(max(1, m // M), min(m, M)),)
    hopeful = [one for one in planners if one.table.held_bytes / m <= one.table.memory(cluster.submeshes[u_of_all])]
    for one in hopeful:
        if one.table.K == best.microbatches and u_of_all not in one.table.known:
            one.plan_on(u_of_all)
    divisions = [division for one in hopeful if (division := one.table.division(m, nodes))]
    if divisions:
        return min(division.seconds for division in divisions)
    smaller = sorted((u for u, s in enumerate(cluster.submeshes) if s.size < m), key=lambda u: -cluster.submeshes[u].size)
    for one in sorted(hopeful, key=lambda one: -one.table.K):  # of a smaller microbatch less is saved
        for u in smaller:
            if u not in one.table.known:
                one.plan_on(u)
                if division := one.table.division(m, nodes):
                    return division.seconds
    return None
