"""Seconds of a collective over one mesh axis, from the axis' latency and bandwidth or from a measured curve.

    t(B) = L * ceil(log2 n) * latency  +  V * (n - 1)/n * B / bandwidth        (`collective_seconds`)
    bytes that one rank sends = V * (n - 1)/n * B                              (`bytes_sent`)

n = axis.size, bandwidth = axis.device_bandwidth (the link's bandwidth divided by its number of users), B = the bytes of the largest
buffer that one rank of the group holds (the "size" of nccl-tests):

    all_gather       B = the gathered output, n times the input of one rank
    reduce_scatter   B = the input of one rank
    all_reduce       B = the input of one rank; a reduce_scatter and an all_gather, hence L = V = 2
    all_to_all       B = the input of one rank, as large as its output

Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience" (2007): no
algorithm needs fewer than ceil(log2 n) rounds or sends fewer bytes; the paper has no all_to_all, but the same bounds hold for it.
Few algorithms reach both terms at once, so real times are larger. t = 0 when n = 1 or B = 0: nothing is sent. t grows with B.

Where the axis has a measured curve of the collective, t(B) is the value of the curve: affine between the measured sizes, constant
below the first, with the slope `tail` above the last.

gloo has neither reduce_scatter nor all_to_all: torch runs an all_reduce or an all_gather instead and keeps a part of its output
(`_executed`).
"""

from typing import NamedTuple, TypeVar

import numpy as np

from autoshard.mesh import Axis

Amount = TypeVar("Amount", float, np.ndarray)


class Cost(NamedTuple):
    rounds: int  # L, times ceil(log2 n)
    volume: int  # V, times (n - 1)/n * B


COLLECTIVES = {
    "all_gather": Cost(1, 1),
    "reduce_scatter": Cost(1, 1),
    "all_reduce": Cost(2, 2),
    "all_to_all": Cost(1, 1),
}


def collective_seconds(collective: str, axis: Axis, bytes: Amount) -> Amount:
    """Seconds of a collective whose buffer has B = `bytes`, a number or an array of them."""
    curve = axis.curve(collective) if axis.size > 1 else None
    if curve is not None:
        t = np.interp(bytes, curve.sizes, curve.seconds) + curve.tail * np.maximum(bytes - curve.sizes[-1], 0.0)
    else:
        run, _ = _executed(collective, axis)
        log2_n = (axis.size - 1).bit_length()  # ceil(log2 n), exactly
        t = COLLECTIVES[run].rounds * log2_n * axis.latency + bytes_sent(collective, axis, bytes) / axis.device_bandwidth
    if isinstance(bytes, np.ndarray):
        return np.where(bytes > 0, t, 0.0)
    return float(t) if bytes > 0 else 0.0


def bytes_sent(collective: str, axis: Axis, bytes: Amount) -> Amount:
    """Bytes that each of the n ranks sends, and receives, when the buffer has B = `bytes`."""
    run, multiple = _executed(collective, axis)
    return COLLECTIVES[run].volume * (axis.size - 1) * (multiple * bytes) / axis.size


class PricedCollective(NamedTuple):
    """A collective over one mesh axis, with its seconds and bytes."""

    collective: str
    axis: int
    bytes: int  # B
    seconds: float
    sent: float  # bytes, per rank


def _executed(collective: str, axis: Axis) -> tuple[str, int]:
    """The collective that the axis' backend runs for another one, and its B as a multiple of the other's B."""
    if axis.backend == "gloo" and collective == "reduce_scatter":
        return "all_reduce", 1
    if axis.backend == "gloo" and collective == "all_to_all":
        return "all_gather", axis.size
    return collective, 1
