"""A model that runs as a pipeline: each rank's copy holds the parameters of its stages, under the model's own names.

loss = model.step(tokens, targets)    the whole batch, forward and backward of all its microbatches; p.grad is set
model.clip_grad_norm_(1.0)            by the norm over all stages
optimizer.step()                      of this rank's stages
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.lower import state_of_module
from autoshard.runtime.agreement import gathered, rank_lost
from autoshard.runtime.call_inputs import BoundInputs, CallInputs
from autoshard.runtime.distribute import Where, as_dtensor, local
from autoshard.runtime.stage_run import PipelineRank, StageRun, StepInputs, gradients_of
from autoshard.runtime.stages import LoweredStages
from autoshard.runtime.transfers import exchange
from autoshard.solution import PipelineToRun


@dataclass(eq=False)
class PipelineRunner:
    """The state of a pipeline on one rank beside its parameters."""

    plan: PipelineToRun
    stages: LoweredStages
    runs: list[StageRun]  # this rank's stages
    schedule: Any  # of torch.distributed.pipelining
    inputs: CallInputs
    planned: BoundInputs  # the inputs of a step, on meta
    place: PipelineRank
    held_on: dict[str, Where]  # this rank's parameters and buffers, and the meshes that hold them
    elsewhere: set[str]  # the parameters and buffers that other ranks hold

    @property
    def group(self) -> int:
        return self.runs[0].stage.group

    def run(self, args: tuple, kwargs: dict, weights: Sequence[float] | None, *, training: bool) -> Tensor:
        """The weighted sum of the microbatches' losses, on every rank."""
        K = self.plan.microbatches
        shares = [1.0 / K] * K if weights is None else list(map(float, weights))
        if len(shares) != K:
            raise ValueError(f"a step has {len(shares)} weights; expected one for each of the {K} microbatches")
        bound = self._bound(args, kwargs)
        if ahead := [name for name, x in bound.tensors.items() if training and x.requires_grad]:
            raise ValueError(f"{ahead[0]} requires a gradient, and a pipeline has none for inputs: give {ahead[0]}.detach()")
        inputs = StepInputs(self._microbatches(bound), dict(enumerate(shares)))
        losses: list[Tensor] = []
        with rank_lost("running a step of the pipeline"):
            for one in self.runs:
                one.begin(inputs)
            run = self.schedule.step if training else self.schedule.eval
            run(target=torch.zeros(K, 1), losses=losses, return_outputs=False)
            return self._shared([share * loss for share, loss in zip(shares, losses)])

    def _bound(self, args: tuple, kwargs: dict) -> BoundInputs:
        bound = self.inputs.of_call(args, kwargs)
        if bound.key != self.planned.key:
            given = ", ".join(f"{name} of {shape}" for name, shape in zip(bound.names, bound.shapes))
            wanted = ", ".join(f"{name} of {shape}" for name, shape in zip(self.planned.names, self.planned.shapes))
            raise ValueError(f"a step was given {given}; the pipeline was made for {wanted}: give it that, or example_inputs like these")
        return bound

    def _microbatches(self, bound: BoundInputs) -> Any:
        """The global tensor of an input in a microbatch."""
        K, split = self.plan.microbatches, self.plan.split
        parts = {name: x.chunk(K) if name in split else (x,) * K for name, x in bound.tensors.items()}
        return lambda name, k: parts[name][k]

    def _shared(self, losses: Sequence[Tensor]) -> Tensor:
        """The last stage's loss, on every rank."""
        last = self.stages.of[-1]
        dtype = getattr(torch, next(r.slot.dtype for r in last.program.results if r.key == "output:0"))
        total = torch.stack(list(losses)).sum().to(dtype) if losses else torch.zeros((), dtype=dtype, device=self.place.device)
        dist.broadcast(total, src=last.devices[0], group=self.place.sends)
        return total

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shards of the step's gradients; of a parameter that several groups hold, the sum over them."""
        gradients = gradients_of(self.runs)
        place = self.place
        with rank_lost("adding the gradients of shared parameters"):
            for copy in self.stages.copies:
                if self.group not in copy.groups:
                    continue
                mine = {f"{copy.name}@{self.group}": gradients[copy.name]}
                for x in exchange(copy.there, place.rank, mine, place.device, place.sends).values():
                    gradients[copy.name] = gradients[copy.name] + x
                sums = {one.name: gradients[copy.name] for one in copy.back}
                for x in exchange(copy.back, place.rank, sums, place.device, place.sends).values():
                    gradients[copy.name] = x
        return gradients

    def copied(self) -> set[str]:
        """This rank's parameters that an earlier device group holds, too."""
        return {copy.name for copy in self.stages.copies if self.group in copy.groups[1:]}


class PipelineModule(nn.Module):
    """The methods that replace the model's own in a pipeline."""

    _runner: PipelineRunner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a pipeline can't be called: model.step(*inputs) runs forward and backward of a batch, model.evaluate the forward")

    def step(self, *args: Any, weights: Sequence[float] | None = None, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch: the loss, the same on every rank; gradients are added to every p.grad.

        args, kwargs: the model's inputs, those of all microbatches, the same global tensors on every rank. The loss is the mean of the
        microbatches' losses; weights: of each of them instead. Every rank calls this. ValueError where the inputs are not of the planned
        shapes, RankLost where a rank dies.
        """
        runner = self._runner
        if not runner.plan.training:
            raise ValueError("the pipeline was planned for inference: it has no backward pass; plan it for training, or call evaluate()")
        loss = runner.run(args, kwargs, weights, training=True)
        named = dict(self.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, x in runner.gradients().items():
                parameter = named[name]
                gradient = as_dtensor(x, parameter._spec)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss

    def evaluate(self, *args: Any, weights: Sequence[float] | None = None, **kwargs: Any) -> Tensor:
        """The loss of a batch, as `step` without gradients and without dropout. What a training step writes into buffers (running means of
        batch norm) is not written. Every rank calls this."""
        buffers = [local(x) for x in self.buffers()] if self._runner.plan.training else []
        before = [x.clone() for x in buffers]
        loss = self._runner.run(args, kwargs, weights, training=False)
        for x, value in zip(buffers, before):
            x.copy_(value)
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all stages so that their norm together is at most max_norm; the former norm. Every rank calls this."""
        runner = self._runner
        own = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        copied = _copied_names(self)
        counted = [grad for name, grad in own.items() if name not in copied]
        norms = [torch.linalg.vector_norm(grad, norm_type) for grad in counted]
        gathered = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
        first = runner.runs[0].stage.devices[0] == runner.place.rank
        total = torch.zeros((), dtype=torch.float64, device=runner.place.device)  # the norm to the power of its type
        if first and gathered:
            together = torch.stack([norm.double() for norm in gathered])
            total = together.max() if norm_type == torch.inf else (together**norm_type).sum()
        with rank_lost("adding the norms of the stages' gradients"):
            dist.all_reduce(total, dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM, group=runner.place.sends)
        norm = total if norm_type == torch.inf else total ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in own.values():
            local(grad).mul_(scale.to(grad.dtype))
        return norm

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As the model's own, of this rank's names; also of the whole model's global tensors, the same on every rank."""
        runner, held = self._runner, state_of_module(self)
        own = {name: x for name, x in state_dict.items() if name in held or name not in runner.elsewhere}  # others are to be reported
        for name in own.keys() & held.keys():
            own[name] = runner.held_on[name].placed(own[name].to(held[name].dtype), held[name])
        return super().load_state_dict(own, strict=strict, assign=assign)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("a pipeline can't be pickled, as it holds its mesh; save its values with autoshard.save_checkpoint")


def of_all_stages(module: PipelineModule, state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of a checkpoint of the whole model: no parameter twice, and parameter groups with the names of all stages."""
    copied = _copied_names(module)
    merged_state = {**state, "model": {name: x for name, x in state["model"].items() if name not in copied}}
    if "optimizer" in state:
        own = state["optimizer"]
        kept = {name: x for name, x in own["state"].items() if name not in copied}
        groups = gathered([group["params"] for group in own["param_groups"]], "collecting the parameter groups")
        names = [list(dict.fromkeys(name for of_rank in groups for name in of_rank[k])) for k in range(len(own["param_groups"]))]
        merged = [{**group, "params": params} for group, params in zip(own["param_groups"], names)]
        merged_state["optimizer"] = {**own, "state": kept, "param_groups": merged}
    return merged_state


def of_this_rank(module: PipelineModule, state: Mapping[str, Any]) -> dict[str, Any]:
    """A loaded checkpoint with parameter groups of this rank's parameters only."""
    if "optimizer" not in state:
        return dict(state)
    held = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    groups = [{**group, "params": [name for name in group["params"] if name in held]} for group in state["optimizer"]["param_groups"]]
    return {**state, "optimizer": {**state["optimizer"], "param_groups": groups}}


def _copied_names(module: PipelineModule) -> set[str]:
    """All names of this rank's parameters that an earlier device group holds and saves."""
    named = list(module.named_parameters(remove_duplicate=False))
    copied = {id(p) for name, p in named if name in module._runner.copied()}
    return {name for name, p in named if id(p) in copied}
