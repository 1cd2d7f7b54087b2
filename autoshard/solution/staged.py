"""A pipeline as it is run: the program of each stage with its layouts and devices, and the order of the units of work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.solution.record import Placed

RECEIVED, SENT = "recv:", "send:"  # placeholders and results that are values of other stages: recv:add_4, send:add_4


@dataclass(frozen=True, eq=False)
class StageToRun:
    """One stage. A value of its graph that another stage reads is a result `send:NAME`: an output in the forward pass, a gradient in the
    backward pass. A value of another stage is a placeholder `recv:NAME`: an input in the forward pass, a tangent in the backward pass."""

    graph: Graph
    layouts: Mapping[str, Placed]  # by op
    mesh: Mesh
    devices: tuple[int, ...]  # ranks, in the order of the mesh's coordinates
    group: int  # device group: stages of one group share its devices


@dataclass(frozen=True, eq=False)
class PipelineToRun:
    """All stages and the order in which each device group runs its units (kind, microbatch, stage): F forward, B backward; where there are
    W, weight gradients, B is the backward of what is sent on."""

    stages: tuple[StageToRun, ...]
    order: tuple[tuple[tuple[str, int, int], ...], ...]  # by group
    microbatches: int
    num_devices: int
    split: frozenset[str]  # the inputs that are split into microbatches along dim 0; the others go to each of them
    training: bool
