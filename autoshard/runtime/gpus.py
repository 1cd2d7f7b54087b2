"""One rank, one GPU: which GPU of its host a rank uses, and the error where two ranks would use the same one.

A launcher may show every rank all GPUs of its host, or each rank another one. So ranks compare the identity of the GPU that each would use.
"""

from __future__ import annotations

import socket
from collections import Counter

import torch
import torch.distributed as dist

from autoshard.runtime.agreement import rank_lost


def use_gpu() -> None:
    """Makes the GPU of this rank the current one: the first rank of a host uses its first GPU. ValueError, the same on every rank, where a
    host has more ranks than GPUs."""
    hosts = _gathered(socket.gethostname())
    place = hosts[: dist.get_rank()].count(socket.gethostname())
    torch.cuda.set_device(place % max(torch.cuda.device_count(), 1))
    check_gpus(place % max(torch.cuda.device_count(), 1))


def check_gpus(device: int | None = None) -> None:
    """ValueError, the same on every rank, where two ranks use one GPU. device: the GPU of this rank, by default the current one."""
    device = torch.cuda.current_device() if device is None else device
    identity = str(torch.cuda.get_device_properties(device).uuid)
    if (complaint := shared(_gathered((socket.gethostname(), identity)))) is not None:
        raise ValueError(complaint)


def shared(used: list[tuple[str, str]]) -> str | None:
    """The complaint where two ranks use one GPU. used: by rank, its host and the identity of its GPU."""
    (host, gpu), count = Counter(used).most_common(1)[0]
    if count == 1:
        return None
    gpus, ranks = len({g for h, g in used if h == host}), sum(h == host for h, _ in used)
    first, second = [rank for rank, place in enumerate(used) if place == (host, gpu)][:2]
    return (
        f"{ranks} ranks run on {host} and use {gpus} GPU{'s' * (gpus > 1)}: ranks {first} and {second} have the same one, and NCCL needs "
        "one per rank; start one rank per GPU, or set each rank's device before this call"
    )


def _gathered(value: object) -> list:
    values: list = [None] * dist.get_world_size()
    with rank_lost("comparing the ranks' GPUs"):
        dist.all_gather_object(values, value)
    return values
