"""Errors that all ranks raise together: an error of one rank is raised on all of them, and a rank that died ends the others.

A check that fails on one rank only would leave the others waiting in the next collective. So the ranks exchange their complaints, and
each of them raises the first one (by rank). Among the checks: one rank uses one GPU, and the graphs that ranks are about to run issue their
collectives in one order.
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.capture import no_warnings_about_torch
from autoshard.lower import STARTS, Groups, Issued
from autoshard.torch_private import GlooOptions, get_default_store, pytree, set_pg_timeout

T = TypeVar("T")
LOST = "a rank of the mesh died or stopped answering; start all ranks again, from the last checkpoint where there is one"


class RankLost(RuntimeError):
    """Another rank of the mesh has died or doesn't answer."""


def agree(complaint: str | None, what: str, group: dist.ProcessGroup | None = None, plan: str = "", lost: str | None = None) -> None:
    """Every rank calls this at the same point. ValueError on all of them when one complains; RankLost when one isn't there.

    what: what the ranks are about to do, for the message. group: of the ranks, by default all. plan: the digest of what a rank is about
    to run; where the ranks have different ones, that is the error, since other complaints may follow from it. lost: the sentence of
    RankLost, where it isn't the usual one.
    """
    said = [(complaint, plan)]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        said = gathered(said[0], what, group, lost or LOST)
    if len({plan for _, plan in said}) > 1:
        ranks = {plan: [rank for rank, (_, other) in enumerate(said) if other == plan] for _, plan in said}
        each = "; ".join(f"plan {plan[:8]} on rank {_numbers(of)}" for plan, of in ranks.items())
        raise ValueError(f"the ranks have different plans: {each}; start all ranks with the same plan, as of one file")
    complaints: list[str | None] = [complaint for complaint, _ in said]
    raised = [(rank, text) for rank, text in enumerate(complaints) if text is not None]
    if not raised:
        return
    first = raised[0][1]
    on = [rank for rank, text in raised if text == first]
    who = "" if len(on) == len(complaints) else f" (on rank {', '.join(map(str, on))} of {len(complaints)})"
    raise ValueError(f"{first}{who}")


def gathered(value: Any, what: str, group: dist.ProcessGroup | None = None, sentence: str = LOST) -> list[Any]:
    """The values of all ranks of the group, by rank; every one of them calls this. what, sentence: as of `rank_lost`."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with rank_lost(what, sentence):
        dist.all_gather_object(values, value, group=group)
    return values


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
    result, complaint = _tried(work, errors, in_words)
    agree(complaint, what, group)
    return result  # type: ignore[return-value]


def _tried(work: Callable[[], Any], errors: tuple[type[Exception], ...], in_words: Callable[[Exception], str]) -> tuple[Any, str | None]:
    """The result, or why there is none."""
    try:
        return work(), None
    except errors as error:
        return None, in_words(error)


def of_first_rank(
    work: Callable[[], T],
    what: str,
    group: dist.ProcessGroup | None = None,
    *,
    errors: tuple[type[Exception], ...] = (ValueError,),
    in_words: Callable[[Exception], str] = str,
) -> T:
    """The result of `work()`, done by the first rank of the group, on all of them; where it fails, ValueError on all, `in_words`."""
    message: list[Any] = [*_tried(work, errors, in_words)] if dist.get_rank(group) == 0 else [None, None]
    if dist.get_world_size(group) > 1:
        with rank_lost(what), no_warnings_about_torch():
            dist.broadcast_object_list(message, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    result, complaint = message
    if complaint is not None:
        raise ValueError(complaint)
    return result


# Words of torch's backends' messages when a peer is gone; torch has no exception type for it.
GONE = ("connection", "timed out", "timeout", "gloo", "nccl", "peer", "socket", "broken pipe", "watchdog")


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


def limit_waiting(device_mesh: DeviceMesh, seconds: float, second: Iterable[dist.ProcessGroup] = ()) -> None:
    """Sets how long a collective along an axis of the mesh waits for the other ranks before it fails. second: other groups of its axes."""
    for group in (*map(device_mesh.get_group, range(device_mesh.ndim)), *second):
        set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def patiently(device_mesh: DeviceMesh, seconds: float, second: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """Inside the block ranks may be late; afterwards the limit is `seconds` again. The group of an axis may be the default group, which
    `agree` and `share` use. second: other groups of its axes, also those that the block makes."""
    limit_waiting(device_mesh, PREPARING, second)
    try:
        yield
    finally:
        limit_waiting(device_mesh, seconds, second)


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


COMPARING_GPUS = "comparing the ranks' GPUs"


def use_gpu() -> None:
    """Makes the GPU of this rank the current one: the first rank of a host uses its first GPU. ValueError, the same on every rank, where a
    host has more ranks than GPUs."""
    hosts = gathered(socket.gethostname(), COMPARING_GPUS)
    place = hosts[: dist.get_rank()].count(socket.gethostname())
    torch.cuda.set_device(place % max(torch.cuda.device_count(), 1))
    check_gpus(place % max(torch.cuda.device_count(), 1))


def check_gpus(device: int | None = None) -> None:
    """ValueError, the same on every rank, where two ranks use one GPU. device: the GPU of this rank, by default the current one."""
    device = torch.cuda.current_device() if device is None else device
    identity = str(torch.cuda.get_device_properties(device).uuid)
    if (complaint := shared(gathered((socket.gethostname(), identity), COMPARING_GPUS))) is not None:
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


def of_graph(graph: fx.Graph, groups: Groups) -> list[Issued]:
    """The collectives of a rank's graph in their order."""
    collectives = []
    for node in graph.nodes:
        given = {x for x in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(x, str)}
        used = tuple(sorted({groups.axis(name) for name in given & {*groups.names, *groups.background}}))
        if node.op != "call_function" or not used:
            continue
        source = next((x.meta["val"] for x in node.all_input_nodes), torch.empty(0))
        reduce_op = str(node.args[1]) if "reduce" in STARTS.get(node.target, "") else ""
        records = tuple(node.meta.get("members", (node.meta.get("record"),)))
        second = " of a second group" if given & groups.background.keys() else ""
        collectives.append(Issued(records, str(node.target) + second, used, tuple(source.shape), str(source.dtype), reduce_op))
    return collectives


def compare(own: Mapping[str, tuple[tuple[int, ...], Sequence[Issued]]], group: dist.ProcessGroup | None = None) -> None:
    """ValueError on every rank where two ranks are about to issue other collectives along an axis that they share.

    own: by the name of a pass, this rank's coordinate on the pass's mesh and its collectives. Every rank of the group calls this.
    """
    digests = {}
    for which, (where, sequence) in own.items():
        for axis in range(len(where)):
            along = repr([one for one in sequence if axis in one.axes])
            digests[which, axis, where] = hashlib.sha256(along.encode()).digest()
    of_ranks = gathered(digests, "comparing the order of collectives", group)
    first: dict[tuple, tuple[tuple[int, ...], bytes]] = {}
    for (which, axis, where), digest in (row for of_rank in of_ranks for row in of_rank.items()):
        other, expected = first.setdefault((which, axis, where[:axis], where[axis + 1 :]), (where, digest))
        if digest != expected:
            raise ValueError(
                f"the ranks at {other} and {where} of the mesh would issue other collectives along axis {axis} in the {which}, and wait "
                "for each other forever; plan with other layouts (pins), and report this: ranks of a group must have one order"
            )
