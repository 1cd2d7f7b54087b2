"""One stage on one rank as a stage of torch.distributed.pipelining: its graphs run in the order that torch's schedule asks for.

torch's runtime calls, for microbatch k: get_fwd_recv_ops, forward_one_chunk, get_fwd_send_ops, get_bwd_recv_ops, backward_one_chunk,
get_bwd_send_ops, backward_weight_one_chunk, and perform_reduce_grad after the last one. Stages that follow each other on the same devices
hand their values over instead (set_local_fwd_input, set_local_bwd_input). autograd takes no part: the backward pass is a graph.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.lower import state_of_module
from autoshard.runtime.distribute import Where, local
from autoshard.runtime.microbatches import OpenStep, StepMoves
from autoshard.runtime.shared_generator import SharedGenerator
from autoshard.runtime.stage_graphs import StageGraphs
from autoshard.runtime.stages import LOSS_TANGENT, LoweredStage
from autoshard.runtime.transfers import Incoming, exchange, outgoing
from autoshard.solution import RECEIVED, SENT
from autoshard.torch_private import PipelineStageBase


@dataclass(eq=False)
class PipelineRank:
    """A rank and the groups of the pipeline."""

    rank: int
    device: torch.device
    sends: dist.ProcessGroup  # of all ranks, for what goes from stage to stage
    alone: dist.ProcessGroup  # of this rank


@dataclass(eq=False)
class StepInputs:
    """What the stages of a rank read in a step, set before it runs."""

    values: Callable[[str, int], Tensor]  # the global tensor of an input in a microbatch
    weights: Mapping[int, float] = field(default_factory=dict)  # of each microbatch's loss


class StageRun(PipelineStageBase):
    """The state of a stage during a step, and its passes."""

    def __init__(
        self,
        stage: LoweredStage,
        graphs: StageGraphs,
        held: nn.Module,
        constants: Mapping[str, Tensor],
        place: PipelineRank,
        where: Where,
        num_stages: int,
    ):
        super().__init__(nn.Module(), stage.index, num_stages, place.device, place.alone)
        self.stage, self.graphs, self.place, self.constants, self.where = stage, graphs, place, constants, where
        self.named = state_of_module(held)
        sums = {name: move.source for name, move in stage.reductions.items()}
        self.moves = StepMoves({}, sums, stage.reductions, where)
        self.incoming: dict[tuple[bool, int], Incoming] = {}  # by direction (forward: True) and microbatch
        self.held: dict[tuple[bool, int], dict[str, Tensor]] = {}  # crossing values, received and produced
        self.saved: dict[int, list[Tensor]] = {}
        self.kept: dict[int, list[Tensor]] = {}
        self.step, self.gradients = OpenStep(), dict[str, Tensor]()
        self.inputs: StepInputs | None = None
        self.random = SharedGenerator(place.device.type)  # of the stage's ranks
        self.args_recv_info = {0: ()}  # read by the schedule's check of neighbours

    def begin(self, inputs: StepInputs) -> None:
        """Forgets the former step, also one that failed."""
        self.inputs, self.step, self.gradients = inputs, OpenStep(), {}
        for state in (self.incoming, self.held, self.saved, self.kept):
            state.clear()

    # -- forward --

    @torch.no_grad()
    def forward_one_chunk(self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True) -> Any:
        received = self._received(True, fwd_chunk_id)
        graphs = self.graphs.of
        loads = [self._load(name, received, fwd_chunk_id) for name in graphs.loads]
        run = self.graphs.forward if self.has_backward else self.graphs.inference
        updated = {id(x) for name, x in zip(graphs.loads, loads, strict=True) if f"buffer:{name}" in graphs.outputs}
        with self._drawing():
            values = list(run(loads + self.where.position))
        outputs, saved = dict(zip(graphs.outputs, values)), values[len(graphs.outputs) :]
        if self.has_backward:  # a buffer gets its new value before the backward pass
            self.saved[fwd_chunk_id] = [x.clone() if id(x) in updated else x for x in saved]
        for key, value in outputs.items():
            if key.startswith("buffer:"):
                local(self.named[key.removeprefix("buffer:")]).copy_(value)
        produced = {key.removeprefix(f"output:{SENT}"): x for key, x in outputs.items() if key.startswith(f"output:{SENT}")}
        self.held[True, fwd_chunk_id] = {**received, **produced}
        return outputs.get("output:0")

    def _load(self, name: str, received: Mapping[str, Tensor], k: int) -> Tensor:
        if name.startswith(RECEIVED):
            return received[name.removeprefix(RECEIVED)]
        if name in self.named:
            return local(self.named[name]).detach()
        if name in self.constants:
            return self.constants[name]
        assert self.inputs is not None
        return self.where.shard(self.inputs.values(name, k), self.graphs.of.slots[name].layout)

    def _drawing(self) -> AbstractContextManager:
        """The context of a pass: where it may draw random numbers, it draws from the state that the stage's ranks share."""
        return self.random.drawing() if self.graphs.of.is_random else nullcontext()

    # -- backward --

    @torch.no_grad()
    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        received = self._received(False, bwd_chunk_id)
        self.held.pop((True, bwd_chunk_id), None)
        graphs, halves = self.graphs.of, self.graphs.halves
        arguments = self.saved.pop(bwd_chunk_id)
        arguments += [self._tangent(name, received, bwd_chunk_id) for name in graphs.tangents] + self.where.position
        if full_backward:
            arguments += self._sums()  # no second list: it would hold what the pass frees
            with self._drawing():
                values = dict(zip(graphs.gradients, self.graphs.backward(arguments), strict=True))
            sent = {key: x for key, x in values.items() if key.startswith(f"gradient:{SENT}")}
        else:
            assert halves is not None
            with self._drawing():
                results = list(halves.inputs(arguments))
            self.kept[bwd_chunk_id] = results[len(halves.sent) :]
            sent = {graphs.gradients[k]: x for k, x in zip(halves.sent, results)}
        produced = {key.removeprefix(f"gradient:{SENT}"): x for key, x in sent.items()}
        if self.stage.leaves[False]:
            self.held[False, bwd_chunk_id] = {**received, **produced}

    @torch.no_grad()
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward:
            assert self.graphs.halves is not None
            with self._drawing():
                self.graphs.halves.weights(self.kept.pop(bwd_chunk_id) + self._sums())

    def _sums(self) -> list[Tensor]:
        return self.step.summed(self.moves, self.graphs.of.sums)

    def _tangent(self, name: str, received: Mapping[str, Tensor], k: int) -> Tensor:
        if name.startswith(RECEIVED):
            return received[name.removeprefix(RECEIVED)]
        assert self.inputs is not None
        slot = self.graphs.of.slots[name]
        weight = self.inputs.weights[k] if name == LOSS_TANGENT else 0.0
        return torch.full(slot.shape, weight, dtype=getattr(torch, slot.dtype), device=self.device)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After the stage's last backward pass: its sums are reduced to the layouts of the parameters."""
        if self.has_backward:
            self.gradients = self.step.reduced(self.moves, lambda name: getattr(torch, self.stage.reductions[name].target.dtype))

    # -- from stage to stage --

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive(True, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(True, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive(False, bwd_chunk_id) if self.has_backward else []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(False, bwd_chunk_id) if self.has_backward else []

    def _receive(self, forward: bool, k: int) -> list[dist.P2POp]:
        incoming = self.incoming[forward, k] = Incoming(self.stage.arrives[forward], self.place.rank, self.device, self.place.sends)
        return incoming.ops

    def _send(self, forward: bool, k: int) -> list[dist.P2POp]:
        return outgoing(self.stage.leaves[forward], self.place.rank, self.held.pop((forward, k), {}), self.place.sends)

    def _received(self, forward: bool, k: int) -> dict[str, Tensor]:
        incoming = self.incoming.pop((forward, k), None)
        return {} if incoming is None else incoming.tensors()

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Called on the stage behind one of the same devices, right after that one's forward pass."""
        self._handed_over(True, mb_index, self.before.held.pop((True, mb_index)))

    def get_local_bwd_output(self, mb_index: int) -> dict[str, Tensor]:
        return self.held.pop((False, mb_index), {})

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            self._handed_over(False, mb_index, next_stage_bwd_outputs)

    def _handed_over(self, forward: bool, k: int, values: Mapping[str, Tensor]) -> None:
        """What arrives from the same devices; they exchange it where the two stages shard it differently."""
        transfers, place = self.stage.arrives[forward], self.place
        incoming = self.incoming[forward, k] = Incoming((), place.rank, self.device, place.sends)
        incoming.values = exchange(transfers, place.rank, values, self.device, place.sends)

    before: "StageRun"  # the stage before, where it is on the same devices

    # -- what torch's schedule asks of a stage beside --

    def _prepare_forward_infra(self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False) -> Any:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: dict) -> tuple:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def clear_runtime_states(self) -> None:
        """`begin` does it."""


def gradients_of(runs: list[StageRun]) -> dict[str, Tensor]:
    """The gradients of a rank's stages by parameter; those of two stages that read one parameter are added."""
    total: dict[str, Tensor] = {}
    for run in runs:
        for name, x in run.gradients.items():
            total[name] = total[name] + x if name in total else x
    return total
