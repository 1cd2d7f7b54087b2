"""Measure a live cluster, one process per device: every collective on every mesh axis, and the device.

All groups of an axis run the collective at the same time, so that the time includes the sharing of links. The timed call is the one
that a plan executes (`Groups.answer`). The slowest rank's time counts; all ranks know the same times, so they make the same decisions.
The first group of an axis repeats some all_gathers while the others are idle: the ratio of the times shows how many groups share a link.

Sizes: first a coarse grid (x4) of all collectives from small to large, so that an interrupted measurement is useful; then, while time
is left, the middle of the gap with the highest score: the distance (in log seconds) of its ends from the line through their
neighbours.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.calibrate.device_rates import measure_device, typical_seconds
from autoshard.calibrate.rates import OpSample
from autoshard.lower import CollectiveCall, Groups
from autoshard.mesh import shape_text

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SMALLEST = 2**10  # bytes
FINE = 1.5  # a gap between sizes below this ratio is not halved
SHARED = 3  # sizes, the largest of the coarse grid, at which one group is measured alone


@dataclass
class Measured:
    """The measurements so far: seconds by (axis, collective) and size in bytes, and the times of the device's ops."""

    collectives: dict[tuple[int, str], dict[float, float]] = field(default_factory=dict)
    device: list[OpSample] = field(default_factory=list)
    alone: dict[int, dict[float, float]] = field(default_factory=dict)  # axis -> the same of an all_gather in one group alone
    complete: bool = False


def agree_on(device: torch.device) -> Callable[[float], float]:
    """A function that returns on every rank the largest of all ranks' numbers, once all ranks have called it."""

    def agree(value: float) -> float:
        x = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return float(x.item())

    return agree


def measure(
    device_mesh: DeviceMesh, *, clock: Callable[[], float], seconds: float = 40.0, largest: float | None = None
) -> Iterator[tuple[str, float, Measured]]:
    """After each step (its description, the fraction done, all measurements so far); the same on every rank.

    seconds: the time limit, exceeded by at most one measurement. largest: bytes; default 64 MiB on cpu, 1 GiB on cuda.
    """
    device = torch.device(device_mesh.device_type)
    agree, groups = agree_on(device), Groups.of(device_mesh)
    measured, began = Measured(), clock()
    for of_size, op in measure_device(device, clock=clock, seconds=seconds / 5, agree=agree):
        measured.device.append(op)
        yield f"device: {op.op} {op.dtype} {of_size}", 0.2 * min(1.0, (clock() - began) / (seconds / 5)), measured
    limit = largest or (2.0**30 if device.type == "cuda" else 2.0**26)
    keys = [(axis, collective) for axis, n in enumerate(device_mesh.shape) if n > 1 for collective in COLLECTIVES]
    measured.collectives = {key: {} for key in keys}

    def left() -> float:
        return seconds - agree(clock() - began)

    def time(key: tuple[int, str], size: float) -> str:
        axis, collective = key
        n = device_mesh.shape[axis]
        size = max(1, round(size / (4 * n))) * 4.0 * n  # whole floats on every rank
        ask = CollectiveCall(collective, axis, buffer_of(collective, int(size) // 4, n, device))
        measured.collectives[key][size] = typical_seconds(lambda: groups.answer(ask), device, clock, agree)
        return f"{collective} on axis {axis}: {size:.0f} bytes"

    def time_alone(axis: int, size: float) -> str:
        n, where = device_mesh.shape[axis], device_mesh.get_coordinate()
        assert where is not None, "every rank is in the mesh"
        is_first = not any(c for k, c in enumerate(where) if k != axis)
        ask = CollectiveCall("all_gather", axis, buffer_of("all_gather", int(size) // 4, n, device))
        taken = typical_seconds(lambda: groups.answer(ask) if is_first else None, device, clock, agree)
        measured.alone.setdefault(axis, {})[size] = taken
        return f"all_gather on axis {axis}, one group alone: {size:.0f} bytes"

    def report(what: str) -> tuple[str, float, Measured]:
        return what, 1 - 0.8 * max(0.0, min(1.0, left() / (0.8 * seconds))), measured

    size = float(SMALLEST)
    while size <= limit:
        for key in keys:
            times = measured.collectives[key]
            expected = max(times.values()) * size / max(times) if times else 0.0  # in proportion to the size
            if 8 * expected * len(keys) < max(left(), 0.0):  # large sizes must leave time for the others
                yield report(time(key, size))
        size *= 4
    for axis, n in enumerate(device_mesh.shape):
        times = measured.collectives.get((axis, "all_gather"), {})
        for size in sorted(times)[-SHARED:] if math.prod(device_mesh.shape) > n else ():
            if 8 * times[size] < left():
                yield report(time_alone(axis, size))
    while (gap := _gap(measured.collectives, left())) is not None:
        yield report(time(*gap))
    measured.complete = True
    yield "done", 1.0, measured


def buffer_of(collective: str, floats: int, n: int, device: torch.device) -> torch.Tensor:
    """The input of one rank where the largest buffer has `floats` elements."""
    shape = {"all_reduce": (floats,), "all_gather": (floats // n,)}.get(collective, (n, floats // n))
    return torch.ones(shape, device=device)


def _gap(curves: dict[tuple[int, str], dict[float, float]], left: float) -> tuple[tuple[int, str], float] | None:
    """The curve and size to measure next; None where time is up or all gaps are small."""
    best, gap = 0.0, None
    for key, times in curves.items():
        sizes = sorted(times)
        bends = [0.0] * len(sizes)
        for i in range(1, len(sizes) - 1):
            a, x, b = sizes[i - 1], sizes[i], sizes[i + 1]
            straight = times[a] + (times[b] - times[a]) * (x - a) / (b - a)
            bends[i] = abs(math.log(times[x] / straight))
        for i in range(len(sizes) - 1):
            wide = math.log(sizes[i + 1] / sizes[i])
            score = (max(bends[i], bends[i + 1]) + 0.01) * wide
            if sizes[i + 1] / sizes[i] > FINE and 8 * times[sizes[i + 1]] < left and score > best:
                best, gap = score, (key, math.sqrt(sizes[i] * sizes[i + 1]))
    return gap if left > 0.2 else None


def measure_this_cluster(
    shape: tuple[int, ...], *, clock: Callable[[], float], seconds: float, backend: str = "auto", largest: float | None = None
) -> Iterator[tuple[int, dict, str, float, Measured]]:
    """`measure` on the processes that torchrun started: (rank, device, description of the step, fraction done, all measurements so far).

    backend: nccl, gloo, or auto (nccl where torch sees GPUs). A shape of one device needs no torchrun. ValueError where there are no
    such processes, or their number is not that of the shape.
    """
    cuda = backend == "nccl" or (backend == "auto" and torch.cuda.is_available())
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if math.prod(shape) == 1 and not dist.is_torchelastic_launched() else {}
    try:
        dist.init_process_group("nccl" if cuda else "gloo", **alone)
    except ValueError as error:
        n = math.prod(shape)
        raise ValueError(
            f"no processes to measure between ({error}); start them with: torchrun --nproc-per-node {n} -m autoshard calibrate measure ..."
        ) from None
    try:
        if dist.get_world_size() != math.prod(shape):
            raise ValueError(f"{dist.get_world_size()} processes run, but the mesh {shape_text(shape)} has {math.prod(shape)}")
        if cuda:
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        device_mesh = init_device_mesh("cuda" if cuda else "cpu", shape)
        about = _about(cuda, dist.get_world_size())
        for what, fraction, measured in measure(device_mesh, clock=clock, seconds=seconds, largest=largest):
            yield dist.get_rank(), about, what, fraction, measured
    finally:
        dist.destroy_process_group()


def _about(cuda: bool, num_ranks: int) -> dict:
    """Name and memory of this rank's device; a CPU's ranks share the machine's memory."""
    if cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {"backend": "nccl", "device": properties.name, "memory": float(properties.total_memory), "torch": torch.__version__}
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return {"backend": "gloo", "device": "cpu", "memory": memory / num_ranks, "torch": torch.__version__}
