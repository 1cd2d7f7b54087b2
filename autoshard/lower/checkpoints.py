"""Checkpoints of a parallel module: saved from one mesh, loaded on any other, and never half written.

All ranks write their shards into `.NAME.partial` beside the folder (torch.distributed.checkpoint); when all of them are done, rank 0
renames it. Where a rank dies before that, the previous checkpoint stays as it was. A checkpoint that is written in the background has a
process group of its own: the collectives of the saving thread would otherwise mix with those of the training steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from autoshard.lower.agreement import agree, rank_lost, share
from autoshard.lower.module import ParallelModule
from autoshard.lower.pipeline_module import PipelineModule, of_all_stages, of_this_rank
from autoshard.solution.files import clear_folder, publish_folder


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping | None = None,
    wait: bool = True,
) -> Saving | None:
    """Parameters, buffers, optimizer state and `extra` (plain values, the same on every rank) into the folder `path`.

    Of a pipeline each rank writes what its stages hold: the folder has the whole model, and any other pipeline or plan can load it.
    Every rank calls this. wait: False copies the values and returns at once with a `Saving`, which writes them while training goes on;
    the folder gets its name when every rank calls `result()` of it, before the next checkpoint. ValueError on all ranks where the folder
    can't be written, RankLost when one of them dies.
    """
    path = Path(os.path.realpath(path))  # a symbolic link is kept, the folder that it points to is replaced
    partial = path.with_name(f".{path.name}.partial")
    _on_first(lambda: clear_folder(partial, path), f"the checkpoint {path} can't be written", "beginning a checkpoint")
    state = _state(module, optimizer, extra or {})
    if isinstance(module, PipelineModule):
        state = of_all_stages(module, state)
    if wait:
        _publish(path, partial, lambda: dcp.save(state, checkpoint_id=partial))
        return None
    with rank_lost("beginning a checkpoint"):
        group = dist.new_group(backend="gloo")
        future: Any = dcp.async_save(state, checkpoint_id=partial, process_group=group)
    return Saving(path, partial, future, group)


@dataclass(eq=False)
class Saving:
    """A checkpoint that is written in the background."""

    path: Path
    partial: Path
    future: Future
    group: dist.ProcessGroup | None  # None when it is complete

    def result(self) -> None:
        """Waits until the checkpoint is complete; every rank calls this, and again where it likes. Errors as of `save_checkpoint`."""
        if self.group is not None:
            group, self.group = self.group, None
            _publish(self.path, self.partial, self.future.result)
            dist.destroy_process_group(group)


def _publish(path: Path, partial: Path, written: Callable[[], object]) -> None:
    """The folder gets its name after `written()`, where that succeeds on every rank."""
    complaint = None
    try:
        with rank_lost(f"saving the checkpoint {path}"):
            written()
    except (OSError, dcp.api.CheckpointException) as error:
        complaint = f"the checkpoint {path} can't be written: {str(error).splitlines()[0]}"
    agree(complaint, f"saving the checkpoint {path}")
    _on_first(lambda: publish_folder(partial, path), f"the checkpoint {path} can't be written", "finishing a checkpoint")


def load_checkpoint(path: str | os.PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The inverse of `save_checkpoint`, on any mesh: fills module and optimizer and returns `extra`.

    Dropout draws what it would have drawn, where it goes on on the same kind of device: generators of CPUs and GPUs differ.
    ValueError on all ranks where the folder holds no complete checkpoint, or one of another model.
    """
    path = Path(path)
    metadata, complaint = None, None
    if dist.get_rank() == 0:
        try:
            metadata = dcp.FileSystemReader(path).read_metadata()
        except (OSError, EOFError, ValueError) as error:
            complaint = f"{path} is not a complete checkpoint ({type(error).__name__}); give a folder that save_checkpoint wrote"
    metadata = share(metadata, complaint, f"reading the checkpoint {path}")
    sizes = {name: getattr(entry, "size", None) for name, entry in metadata.state_dict_metadata.items()}
    state = _state(module, optimizer, {key.removeprefix("extra."): None for key in sizes if key.startswith("extra.")})
    if "random" in sizes:
        state["random"] = torch.empty(tuple(sizes["random"] or ()), dtype=torch.uint8)
    agree(_misfit(path, state, sizes), f"reading the checkpoint {path}")
    with rank_lost(f"loading the checkpoint {path}"):
        dcp.load(state, checkpoint_id=path)
    if isinstance(module, PipelineModule):
        state = of_this_rank(module, state)
    set_model_state_dict(module, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(module, optimizer, state["optimizer"])
    if "random" in state and isinstance(module, ParallelModule) and module.generator_has(state["random"]):
        module.random_state = state["random"]
    return dict(state["extra"])


def _state(module: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(module), "extra": dict(extra)}
    if isinstance(module, ParallelModule) and module.random_state is not None:
        state["random"] = module.random_state
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(module, optimizer)
    return state


def _misfit(path: Path, state: Mapping, sizes: Mapping[str, Any]) -> str | None:
    for name, tensor in state["model"].items():
        key = f"model.{name}"
        if key not in sizes:
            return f"the checkpoint {path} is of another model: it lacks {name!r}"
        if isinstance(tensor, torch.Tensor) and tuple(sizes[key] or ()) != tuple(tensor.shape):
            return f"the checkpoint {path} is of another model: {name!r} is {tuple(sizes[key] or ())} there and {tuple(tensor.shape)} here"
    if "optimizer" in state and not any(key.startswith("optimizer.") for key in sizes):
        return f"the checkpoint {path} has no optimizer state; load it without the optimizer"
    return None


def _on_first(action: Any, complaint: str, what: str) -> None:
    """Let rank 0 do something for all ranks; ValueError on all of them where it fails."""
    failure = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = f"{complaint}: {error.strerror or error}"
    share(None, failure, what)
