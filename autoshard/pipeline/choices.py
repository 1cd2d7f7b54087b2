"""The configurations of one number of microbatches, and the chosen one in words.

    planned   the division of the dynamic program
    equal     P equal cuts over equal sub-meshes, each stage with the best layouts that fit; interleaved: two cuts per sub-mesh
    grid      the same cuts with fixed layouts: data parallel over D, Megatron over H, P = devices / (D H)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.pipeline.configurations import Combination, Configuration, equal_cuts, in_flight
from autoshard.pipeline.interop import Nodes, Stage, SubMesh, Tiling, inter_op
from autoshard.pipeline.pipeline_record import PipelineStage
from autoshard.pipeline.schedules import schedule_of
from autoshard.pipeline.stage_programs import stage_program
from autoshard.pipeline.stage_tables import StageTable, Sums
from autoshard.pipeline.submeshes import Cluster

CHUNKS = 2  # parts per device of an interleaved schedule


def choices_of(table: StageTable, schedules: Sequence[str], *, grid: bool) -> list[Configuration]:
    """All configurations of this number of microbatches."""
    found: list[Configuration] = []
    division = inter_op(table.seconds(), table.there + table.back, table.cluster.tiling, table.K)
    if division is not None:
        for name in _single_chunk(table, schedules, len(division.stages)):
            made = _made("planned", table, name, division.stages)
            found += [made] if made else []
    shapes = _grid(table) if len(table.cluster.kinds) == 1 else []
    for P in sorted({P for P, *_ in shapes}):
        u = _submesh(table, table.cluster.num_devices // P)
        for name, cuts in _schedules_and_cuts(table, schedules, P):
            made = _made("equal", table, name, [Stage(a, b, u) for a, b in cuts])
            found += [made] if made else []
    return [*found, *(_grid_points(table, schedules, shapes) if grid else [])]


def _single_chunk(table: StageTable, schedules: Sequence[str], stages: int) -> list[str]:
    """One stage, and a program without a backward pass, have one order only."""
    names = [name for name in schedules if name != "interleaved_1f1b"]
    return names[:1] if stages == 1 or not table.training else names


def _schedules_and_cuts(table: StageTable, schedules: Sequence[str], P: int) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    found = []
    cuts, finer = equal_cuts(table.layers.count, P), equal_cuts(table.layers.count, CHUNKS * P)
    for name in _single_chunk(table, schedules, P):
        found += [(name, cuts)] if cuts else []
    if "interleaved_1f1b" in schedules and P > 1 and finer and table.training:
        found.append(("interleaved_1f1b", finer))
    return found


def _submesh(table: StageTable, devices: int) -> int:
    return next(u for u, s in enumerate(table.cluster.submeshes) if s.size == devices)


def _grid(table: StageTable) -> list[tuple[int, int, int]]:
    """(P, D, H) with P D H = devices, stages that tile the nodes."""
    n, sizes = table.cluster.num_devices, {s.size for s in table.cluster.submeshes}
    found = []
    for m in sorted(sizes):
        if n % m == 0 and n // m <= table.layers.count:
            found += [(n // m, m // H, H) for H in range(1, m + 1) if m % H == 0]
    return found


def _has_room(table: StageTable, point: tuple[int, int, int]) -> bool:
    """Whether parameters, gradients and optimizer state fit when tensor and pipeline parallelism cut all of them."""
    P, _, H = point
    return table.held_bytes / (P * H) <= table.memory(table.cluster.submeshes[0])


def _grid_points(table: StageTable, schedules: Sequence[str], shapes: Sequence[tuple[int, int, int]]) -> list[Configuration]:
    kind = table.cluster.kinds[0] if table.cluster.kinds else None
    assert kind is not None
    shapes = [point for point in shapes if _has_room(table, point)]
    ways, submeshes = {}, {}
    for P, D, H in shapes:
        mesh = kind.mesh(tuple(n for n in (D, H) if n > 1) or (1,))
        ways[P, D, H] = Combination(mesh, table.recompute == "always", 0.0, "megatron" if H > 1 else "data_parallel")
        submeshes[P, D, H] = table.cluster.submeshes[_submesh(table, D * H)]
    table.add_pinned([ways[p] for p in shapes], [submeshes[p] for p in shapes])
    found = []
    tight: list[tuple[int, int, int]] = []
    for point in shapes:
        made = _grid_point(table, schedules, point, ways[point])
        found += made
        hopeless = all(any(fixed > memory for fixed, memory in zip(c.static_bytes, c.memory)) for c in made)
        if made and table.training and table.recompute == "auto" and not any(c.fits for c in made) and not hopeless:
            tight.append(point)
    again = {p: replace(ways[p], recompute=True) for p in tight}
    table.add_pinned([again[p] for p in tight], [submeshes[p] for p in tight])
    return [*found, *(c for p in tight for c in _grid_point(table, schedules, p, again[p]))]


def _grid_point(table: StageTable, schedules: Sequence[str], point: tuple[int, int, int], way: Combination) -> list[Configuration]:
    if way not in table.pinned:
        return []
    P, D, H = point
    u = _submesh(table, D * H)
    made = [
        _made("grid", table, name, [Stage(a, b, u) for a, b in cuts], table.pinned[way])
        for name, cuts in _schedules_and_cuts(table, schedules, P)
    ]
    return [replace(c, data=D, tensor=H) for c in made if c is not None]


def _made(way: str, table: StageTable, schedule: str, parts: Sequence[Stage], pinned: Sums | None = None) -> Configuration | None:
    """The configuration with the best combination for every part that fits; None where a part of it fits in no way."""
    chunks = CHUNKS if schedule == "interleaved_1f1b" else 1
    groups = len(parts) // chunks
    held = in_flight(schedule_of(schedule, groups, table.K, chunks))
    chosen = []
    for part, q in zip(parts, held):
        one = pinned or table.choose(part.first, part.last, part.submesh, q, 1.0 / chunks)
        if one is None:
            return None
        chosen.append(one)
    over = [*(part.first for part in parts[1:]), 0]
    meshes = [table.cluster.submeshes[part.submesh] for part in parts[:groups]]
    ends = [(part.submesh, parts[(v + 1) % len(parts)].submesh) for v, part in enumerate(parts)]
    return Configuration(
        way, table.K, schedule, tuple(parts), tuple(one.option(part.first, part.last) for one, part in zip(chosen, parts)),
        tuple(one.combination for one in chosen),
        tuple(float(table.there[c, a, u]) for c, (a, u) in zip(over, ends)),
        tuple(float(table.back[c, a, u]) for c, (a, u) in zip(over, ends)),
        tuple(table.memory(s) for s in meshes), tuple(s.size for s in meshes),
    )  # fmt: skip


def described(best: Configuration, table: StageTable) -> tuple[PipelineStage, ...]:
    """The stages in words: which devices, which layouts."""
    placed = place([table.cluster.submeshes[part.submesh] for part in best.parts[: best.groups]], table.cluster)
    held = in_flight(best.order)
    stages = []
    for v, (part, option, way) in enumerate(zip(best.parts, best.options, best.ways)):
        d = v % best.groups
        program = stage_program(table.layers, part.first, part.last)
        program = program.recomputed() if way.recompute else program
        layouts = dict(zip((op.name for op in program.graph.ops), option.layouts, strict=True))
        parameters = {name: layouts[name].outputs[0] or "" for name in program.graph.parameters}
        kind = table.cluster.kinds[table.cluster.submeshes[part.submesh].kind]
        stages.append(
            PipelineStage(
                part.first, part.last, d, placed[d], kind.mesh((1,)).device.name, option.mesh, option.forward, option.backward, option.once,
                best.there[v] if v + 1 < len(best.parts) else 0.0, best.run.peak_bytes[d], held[v], option.recompute, parameters, layouts,
            )  # fmt: skip
        )
    return tuple(stages)


def place(wanted: Sequence[SubMesh], cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks for every sub-mesh: the largest first, each on the node with the least room that is enough. ValueError if they don't fit."""
    free: list[list[list[int]]] = []  # by kind and node
    start = 0
    for kind in cluster.kinds:
        free.append([list(range(start + n * kind.devices, start + (n + 1) * kind.devices)) for n in range(kind.nodes)])
        start += kind.nodes * kind.devices
    found: dict[int, tuple[int, ...]] = {}

    def search(order: list[int]) -> bool:
        if not order:
            return True
        i, rest = order[0], order[1:]
        s = wanted[i]
        nodes = free[s.kind]
        if s.nodes > 1:
            whole = [n for n in nodes if len(n) == cluster.kinds[s.kind].devices][: s.nodes]
            able = [whole] if len(whole) == s.nodes else []
        else:
            able = [[n] for n in sorted((n for n in nodes if len(n) >= s.devices), key=len)]
        tried = set()
        for option in able:
            key = tuple(len(n) for n in option)
            if key in tried:
                continue
            tried.add(key)
            taken = [[n.pop(0) for _ in range(s.devices)] for n in option]
            found[i] = tuple(rank for part in taken for rank in part)
            if search(rest):
                return True
            for n, part in zip(option, taken):
                n[:0] = part
        return False

    if not search(sorted(range(len(wanted)), key=lambda i: (-wanted[i].size, i))):
        raise ValueError(f"sub-meshes of {[s.size for s in wanted]} devices don't fit on the cluster")
    return [found[i] for i in range(len(wanted))]


def speed_ups(cluster: Cluster, tables: Sequence[StageTable], best: Configuration) -> tuple[dict[str, Any], ...]:
    """Seconds on the first 1, 2, 4, ... devices of a cluster of one kind of nodes (from plans of single layers), and on all of them.

    seconds: None where the model does not fit. speed_up: over the fewest devices that fit, which count as so many; None where the model
    does not fit, and everywhere where all devices are the fewest: there is nothing to compare them with.
    """
    if len(cluster.kinds) > 1:
        return ()
    M, n = cluster.kinds[0].devices, cluster.num_devices
    counts = [m for m in range(1, n) if (m < M and M % m == 0) or (m % M == 0 and n % m == 0)]
    rows: list[dict[str, Any]] = []
    for m in counts:
        keep = [u for u, s in enumerate(cluster.submeshes) if s.size <= m]
        tiling = Tiling((Nodes(max(1, m // M), min(m, M)),), tuple(cluster.submeshes[u] for u in keep))
        least = math.inf
        for table in tables:
            x = (table.there + table.back)[np.ix_(range(table.layers.count + 1), keep, keep)]
            division = inter_op(table.seconds()[keep], x, tiling, table.K)
            least = min(least, division.seconds if division else math.inf)
        rows.append({"devices": m, "seconds": least if math.isfinite(least) else None})
    rows.append({"devices": n, "seconds": best.seconds})
    base = next(row for row in rows if row["seconds"])
    for row in rows:
        compared = row["seconds"] and base is not rows[-1]
        row["speed_up"] = base["devices"] * base["seconds"] / row["seconds"] if compared else None
    return tuple(rows)
