"""Seconds of an op whose local program computes and sends at the same time: stages, each on the kernel's stream or on that of a mesh axis.

    a stage begins     when the stage before it on its stream has ended, and all stages that it waits for
    seconds            from the first begin to the last end                                                  (`makespan`)
    in the open        the seconds without those of the kernels; shared out among the axes by the seconds of their stages  (`in_the_open`)

So a hop of a ring takes the longer of the transfer and the kernel beside it. Axes on one link have one stream: they take turns.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autoshard.cost.collectives import PricedCollective
from autoshard.cost.links import axis_transfer_seconds, shared_links
from autoshard.mesh import Mesh

KERNEL = -1  # stream; the others are the numbers of links


class TimedStage(NamedTuple):
    collective: str  # "" for a kernel
    axis: int
    seconds: float
    sent: float  # bytes, per rank
    after: tuple[int, ...]


def timed(
    stages: Sequence[tuple[str, int, float, tuple[int, ...]]], kernel: Callable[[float], float], mesh: Mesh
) -> tuple[TimedStage, ...]:
    """The seconds of stages (collective, axis, bytes or share of the kernel, after). kernel: the seconds of a share of the kernel."""
    known: dict[tuple[int, float], float] = {}
    for _, axis, amount, _ in stages:
        if (axis, amount) not in known:
            known[axis, amount] = axis_transfer_seconds(amount, mesh.axes[axis]) if axis >= 0 else kernel(amount)
    return tuple(TimedStage(name, axis, known[axis, amount], amount if name else 0.0, after) for name, axis, amount, after in stages)


def makespan(stages: Sequence[TimedStage], mesh: Mesh) -> float:
    """Seconds from the begin of the first stage to the end of the last."""
    links, ends, free = shared_links(mesh), list[float](), dict[int, float]()
    for stage in stages:
        stream = KERNEL if stage.axis < 0 else links[stage.axis]
        begin = max([free.get(stream, 0.0), *(ends[k] for k in stage.after)])
        ends.append(begin + stage.seconds)
        free[stream] = ends[-1]
    return max(ends, default=0.0)


def in_the_open(stages: Sequence[TimedStage], mesh: Mesh) -> tuple[PricedCollective, ...]:
    """Per axis its messages as one, with the seconds in which no kernel runs beside them."""
    open_seconds = makespan(stages, mesh) - sum(stage.seconds for stage in stages if not stage.collective)
    sending = sum(stage.seconds for stage in stages if stage.collective)
    rows = []
    for axis in sorted({stage.axis for stage in stages if stage.collective}):
        of_axis = [stage for stage in stages if stage.axis == axis]
        share = sum(stage.seconds for stage in of_axis) / sending if sending else 0.0
        sent = sum(stage.sent for stage in of_axis)
        rows.append(PricedCollective(of_axis[0].collective, axis, int(sent), max(open_seconds, 0.0) * share, sent))
    return tuple(rows)
