"""Plans that run on torch.distributed: of one program or several (runtime.parallelize), and pipelines."""

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.api.checking import captured_pipeline
from autoshard.capture import deep_enough
from autoshard.pipeline import SCHEDULES, with_schedule
from autoshard.runtime import CapturedPipeline, parallel_pipeline
from autoshard.runtime import parallelize as parallelize_plan
from autoshard.solution import AnyPlan, Pipeline

log = logging.getLogger("autoshard")


def parallelize(
    model: nn.Module | Mapping[str, nn.Module],
    solution: AnyPlan,
    device_mesh: DeviceMesh,
    *,
    example_inputs: Any = None,
    from_first_rank: bool = True,
    pad: Mapping[str, float] | None = None,
    timeout: float = 50.0,
    schedule: str | None = None,
) -> nn.Module:
    """The model as a module that runs `solution` on `device_mesh`; every rank of the mesh calls this.

    The result is a copy of the model (which is left as it is) with DTensor parameters under their own names, in the layouts of the
    plan. Call it like the model, with tensors of the planned global shape, the same on every rank, or with DTensors:
    `shard_inputs(batch)` makes them from global inputs of any shape, `shard_inputs(batch, local=True)` from this rank's shards. Replicated
    results are plain tensors, all others DTensors. Hooks on submodules and calls of submodules are refused: the plan's graph runs instead.
    A plan made with training=True can be differentiated: `loss.backward()`, any optimizer, gradients add up over calls. With several
    microbatches, iterate `model.microbatches(batch)` for a step: a call outside of it is a step of its own.

    from_first_rank: all ranks use rank 0's parameters (False: all ranks hold the same ones already). The parameters of a model on the meta
    device are nan until `load_state_dict` or torch.distributed.checkpoint fills them. timeout: seconds after which a rank that does not
    answer counts as lost. example_inputs: capture now instead of with the first call.

    A plan of several programs gives one module with one set of parameters: `module.program("generate")` runs that program,
    `with module.switched("generate"):` lets the module itself run it. model: one for all programs, or one by program's name.
    example_inputs: by program. pad: values by input's name, with which a batch is padded to the next planned shape, or by `shard_inputs`
    to the next shape that a plan with dynamic_shapes covers.

    A pipeline (`autoshard.pipeline`) needs example_inputs, those of the full batch. Each rank's copy has the
    parameters of its stages; `loss = model.step(*inputs)` runs forward and backward of a batch, `model.evaluate(*inputs)` the forward,
    `model.clip_grad_norm_(max_norm)` clips over all stages, and each rank has an optimizer of its `model.parameters()`. schedule: instead
    of the pipeline's own another one of autoshard, a class of torch.distributed.pipelining ("InterleavedZeroBubble"), or a file `.csv`
    of its units.

    ValueError, the same on every rank, where mesh, model and plan don't belong together; RankLost (a RuntimeError) when a rank dies.
    """
    options: dict[str, Any] = {"from_first_rank": from_first_rank, "timeout": timeout}
    if dist.is_initialized() and dist.get_rank() == 0 and (unverified := solution.unverified):
        log.warning(
            "the plan%s was never verified: check on simulated ranks that it computes what the model computes, and keep that in its file, "
            "by `autoshard verify PLAN MODEL --mark` or plan.marked(autoshard.verify(model, inputs, plan))",
            f" of {', '.join(unverified)}" if all(unverified) else "",
        )  # fmt: skip
    if not isinstance(solution, Pipeline):
        if schedule is not None:
            raise ValueError(f"schedule is {schedule!r}, but the plan has no stages; only a pipeline has a schedule")
        return parallelize_plan(model, solution, device_mesh, example_inputs=example_inputs, pad=pad, **options)
    if isinstance(model, Mapping) or pad is not None:
        raise ValueError("a pipeline is of one program; give one model, and no values to pad with")
    return _pipelined(model, solution, device_mesh, example_inputs, schedule, options)


def _pipelined(
    model: nn.Module, pipeline: Pipeline, device_mesh: DeviceMesh, example_inputs: Any, schedule: str | None, options: Mapping[str, Any]
) -> nn.Module:
    if example_inputs is None:
        raise ValueError("a pipeline is captured before it runs; give example_inputs=(...), those of the full batch (meta tensors will do)")
    if schedule is not None and schedule.lower() in SCHEDULES:
        pipeline, schedule = with_schedule(pipeline, schedule.lower()), None

    def captured(on_meta: nn.Module) -> CapturedPipeline:
        return captured_pipeline(on_meta, example_inputs, pipeline)

    with deep_enough(model):
        number = pipeline.mesh.num_devices
        return parallel_pipeline(model, captured, device_mesh, number, example_inputs, digest=pipeline.digest, schedule=schedule, **options)
