"""Errors that all ranks raise together: an error of one rank is raised on all of them, and a rank that died ends the others.

A check that fails on one rank only would leave the others waiting in the next collective. So the ranks exchange their complaints, and
each of them raises the first one (by rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.capture import no_warnings_about_torch
from autoshard.torch_private import GlooOptions, get_default_store, set_pg_timeout

T = TypeVar("T")


class RankLost(RuntimeError):
    """Another rank of the mesh has died or doesn't answer."""


def agree(complaint: str | None, what: str, group: dist.ProcessGroup | None = None, plan: str = "", lost: str | None = None) -> None:
    """Every rank calls this at the same point. ValueError on all of them when one complains; RankLost when one isn't there.

    what: what the ranks are about to do, for the message. group: of the ranks, by default all. plan: the digest of what a rank is about
    to run; where the ranks have different ones, that is the error, since other complaints may follow from it. lost: the sentence of
    RankLost, where it isn't the usual one.
    """
    said: list[Any] = [(complaint, plan)]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        said = [None] * dist.get_world_size(group)
        with rank_lost(what, lost or LOST):
            dist.all_gather_object(said, (complaint, plan), group=group)
    _check_same([plan for _, plan in said])
    complaints: list[str | None] = [complaint for complaint, _ in said]
    raised = [(rank, text) for rank, text in enumerate(complaints) if text is not None]
    if not raised:
        return
    first = raised[0][1]
    ranks = [rank for rank, text in raised if text == first]
    who = "" if len(ranks) == len(complaints) else f" (on rank {', '.join(map(str, ranks))} of {len(complaints)})"
    raise ValueError(f"{first}{who}")


def _check_same(plans: list[str]) -> None:
    """ValueError where the ranks have different plans. plans: their digests, by rank."""
    if len(set(plans)) > 1:
        ranks = {plan: [rank for rank, other in enumerate(plans) if other == plan] for plan in dict.fromkeys(plans)}
        each = "; ".join(f"plan {plan[:8]} on rank {_numbers(of)}" for plan, of in ranks.items())
        raise ValueError(f"the ranks have different plans: {each}; start all ranks with the same plan, as of one file")


def _numbers(ranks: list[int]) -> str:
    """Ranks in order, runs of them by their ends: 0-2, 5."""
    ends = [[k, k] for k in ranks[:1]]
    for k in ranks[1:]:
        if k == ends[-1][1] + 1:
            ends[-1][1] = k
        else:
            ends.append([k, k])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)


def agreed(
    work: Callable[[], T],
    what: str,
    group: dist.ProcessGroup | None = None,
    *,
    errors: tuple[type[Exception], ...] = (ValueError,),
    in_words: Callable[[Exception], str] = str,
) -> T:
    """The result of `work()`, which every rank of the group does; where it fails on one of them, ValueError on all, `in_words`."""
    try:
        result, complaint = work(), None
    except errors as error:
        result, complaint = None, in_words(error)
    agree(complaint, what, group)
    return result  # type: ignore[return-value]


def of_first_rank(
    work: Callable[[], T],
    what: str,
    group: dist.ProcessGroup | None = None,
    *,
    errors: tuple[type[Exception], ...] = (ValueError,),
    in_words: Callable[[Exception], str] = str,
) -> T:
    """The result of `work()`, done by the first rank of the group, on all of them; where it fails, ValueError on all, `in_words`."""
    message: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            message = [work(), None]
        except errors as error:
            message = [None, in_words(error)]
    if dist.get_world_size(group) > 1:
        with rank_lost(what), no_warnings_about_torch():
            dist.broadcast_object_list(message, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    result, complaint = message
    if complaint is not None:
        raise ValueError(complaint)
    return result


# Words of torch's backends' messages when a peer is gone; torch has no exception type for it.
GONE = ("connection", "timed out", "timeout", "gloo", "nccl", "peer", "socket", "broken pipe", "watchdog")


LOST = "a rank of the mesh died or stopped answering; start all ranks again, from the last checkpoint where there is one"


@contextmanager
def rank_lost(what: str, sentence: str = LOST) -> Iterator[None]:
    """Turns a backend's error about a peer that is gone into RankLost, with the same sentence on every rank.

    what: what this rank is doing, added as a note to the error.
    """
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        said = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(word in said for word in GONE):
            raise
        lost = RankLost(sentence)
        lost.add_note(f"noticed while {what}")
        raise lost from error


PREPARING = 1800.0  # seconds that one rank may need to capture or compile while the others wait


def limit_waiting(device_mesh: DeviceMesh, seconds: float) -> None:
    """Sets how long a collective along an axis of the mesh waits for the other ranks before it fails."""
    for k in range(device_mesh.ndim):
        set_pg_timeout(timedelta(seconds=seconds), device_mesh.get_group(k))


@contextmanager
def patiently(device_mesh: DeviceMesh, seconds: float) -> Iterator[None]:
    """Inside the block ranks may be late; afterwards the limit is `seconds` again. The group of an axis may be the default group, which
    `agree` and `share` use."""
    limit_waiting(device_mesh, PREPARING)
    try:
        yield
    finally:
        limit_waiting(device_mesh, seconds)


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def join(backend: str, timeout: float) -> bool:
    """The default process group of the ranks that a launcher started; False where there is one already.

    RankLost when not all ranks come within `timeout` seconds; ValueError, as torch's, where no launcher says which ranks there are.
    """
    if dist.is_initialized():
        return False
    with rank_lost("waiting for the other ranks to start", absent(timeout)):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    get_default_store().set_timeout(timedelta(seconds=PREPARING))
    set_pg_timeout(timedelta(seconds=PREPARING))
    return True


def absent(timeout: float) -> str:
    return f"not all ranks came within {timeout:g} s: one died or is late; see each rank's first error, then start all of them again"


def grouped(device_type: str, shape: tuple[int, ...], names: tuple[str, ...], timeout: float | None) -> DeviceMesh:
    """A device mesh on the default process group. timeout: seconds that its groups wait for their ranks, None for torch's default.
    RankLost when a rank does not come."""
    groups = {}
    for name, size in zip(names, shape, strict=True):
        if timeout is not None and size != dist.get_world_size():  # else the default group is the axis's
            options = GlooOptions() if device_type == "cpu" else dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout)
            groups[name] = (BACKENDS[device_type], options)
    with rank_lost("making the groups of the mesh", LOST if timeout is None else absent(timeout)):
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=groups)
    if timeout is not None:
        limit_waiting(mesh, PREPARING)
    return mesh
