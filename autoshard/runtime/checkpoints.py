"""Checkpoints of a parallel module: saved from one mesh, loaded on any other, and never half written.

All ranks write their shards into `.NAME.partial` beside the folder (torch.distributed.checkpoint); when all of them are done, rank 0
renames it. Where a rank dies before that, the previous checkpoint stays as it was. Before anything is loaded, the ranks check all files,
each of them a share (runtime.checkpoint_files). A checkpoint that is written in the background has a
process group of its own: the collectives of the saving thread would otherwise mix with those of the training steps.
"""

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
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from autoshard.lower import state_of_generator
from autoshard.runtime.agreement import agree, agreed, of_first_rank, rank_lost
from autoshard.runtime.checkpoint_files import (
    Contents,
    PlainPlanner,
    Reader,
    Writer,
    contents,
    why_broken,
    why_not_plain,
    with_plain_numbers,
)  # fmt: skip
from autoshard.runtime.module import ParallelModule
from autoshard.runtime.pipeline_module import PipelineModule, of_all_stages, of_this_rank
from autoshard.solution import clear_folder, publish_folder

MOST_RANDOM = 2**16  # bytes of a generator's state; those of torch have 16 and 5,056


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


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping | None = None,
    wait: bool = True,
) -> Saving | None:
    """Parameters, buffers, optimizer state and `extra` (plain values, the same on every rank) into the folder `path`.

    Beside the shards there is a `manifest.json`: size and SHA-256 of every file, names and shapes of the tensors, the plan's digest.

    Of a pipeline each rank writes what its stages hold: the folder has the whole model, and any other pipeline or plan can load it.
    Every rank calls this. wait: False copies the values and returns at once with a `Saving`, which writes them while training goes on;
    the folder gets its name when every rank calls `result()` of it, before the next checkpoint. ValueError on all ranks where the folder
    can't be written or `extra` holds more than containers, numbers, text and tensors; RankLost when one of them dies.
    """
    path = Path(os.path.realpath(path))  # a symbolic link is kept, the folder that it points to is replaced
    partial = path.with_name(f".{path.name}.partial")
    _on_first(lambda: clear_folder(partial, path), f"the checkpoint {path} can't be written", "beginning a checkpoint")
    state = with_plain_numbers(_state(module, optimizer, (dict(extra or {}),)))
    agree(why_not_plain(state["extra"]), "beginning a checkpoint")
    if isinstance(module, PipelineModule):
        state = of_all_stages(module, state)
    writer = Writer(partial, module.__dict__.get("_digest", ""))
    if wait:
        _publish(path, partial, lambda: dcp.save(state, storage_writer=writer))
        return None
    with rank_lost("beginning a checkpoint"):
        group = dist.new_group(backend="gloo")
        future: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
    return Saving(path, partial, future, group)


def _publish(path: Path, partial: Path, written: Callable[[], object]) -> None:
    """The folder gets its name after `written()`, where that succeeds on every rank."""

    def write() -> None:
        with rank_lost(f"saving the checkpoint {path}"):
            written()

    agreed(
        write, f"saving the checkpoint {path}", errors=(OSError, dcp.api.CheckpointException),
        in_words=lambda error: f"the checkpoint {path} can't be written: {_reason(error)}",
    )  # fmt: skip
    _on_first(lambda: publish_folder(partial, path), f"the checkpoint {path} can't be written", "finishing a checkpoint")


def load_checkpoint(path: str | os.PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The inverse of `save_checkpoint`, on any mesh: fills module and optimizer and returns `extra`.

    Folders that torch.distributed.checkpoint wrote are loaded, too. Nothing in a folder is run: values that aren't tensors are read as
    by `torch.load` with weights_only, and what it refuses can be allowed by `torch.serialization.add_safe_globals`.
    Dropout draws what it would have drawn, where it goes on on the same kind of device: generators of CPUs and GPUs differ.
    ValueError on all ranks, with nothing loaded, where a file is missing, truncated or changed, or the checkpoint is of another model.
    """
    path = Path(path)

    def in_words(error: Exception) -> str:
        return f"{path} is not a complete checkpoint: {error}; give a folder that save_checkpoint wrote"

    # what the first rank reads of the folder, on all ranks
    held = of_first_rank(lambda: contents(path), f"reading the checkpoint {path}", errors=(OSError, ValueError), in_words=in_words)
    entries = held.index.state_dict_metadata
    sizes = {name: getattr(entry, "size", None) for name, entry in entries.items()}
    flat = {key.removeprefix("extra."): None for key in sizes if key.startswith("extra.")}  # of older versions
    state = _state(module, optimizer, None if isinstance(entries.get("extra"), BytesStorageMetadata) else flat)
    if shape := sizes.get("random"):
        state["random"] = torch.empty(min(shape[0], MOST_RANDOM), dtype=torch.uint8)
    broken = why_broken(path, held, dist.get_rank(), dist.get_world_size())
    agree(broken and f"{path} is not a complete checkpoint: {broken}; copy it again or load another one", f"reading the checkpoint {path}")
    agree(_misfit(path, state, sizes), f"reading the checkpoint {path}")
    if optimizer is not None:
        state["optimizer"]["state"] = _with_saved_state(state["optimizer"]["state"], sizes)
    _load(path, state, held)
    if isinstance(module, PipelineModule):
        state = of_this_rank(module, state)
    set_model_state_dict(module, state["model"])
    if optimizer is not None:
        # not strict: torch wants a state of every parameter
        set_optimizer_state_dict(module, optimizer, state["optimizer"], options=StateDictOptions(strict=False))
    if "random" in state and isinstance(module, ParallelModule):
        if state["random"].shape == state_of_generator(module._runner.device_type).shape:  # else it is of another kind of device
            module.random_state = state["random"]
    return state["extra"][0] if isinstance(state["extra"], tuple) else state["extra"]


def _load(path: Path, state: dict[str, Any], held: Contents) -> None:
    """Fills the state's tensors, and puts other values in their places."""
    try:
        with rank_lost(f"loading the checkpoint {path}"):
            dcp.load(state, storage_reader=Reader(path, held.index), planner=PlainPlanner())
    except dcp.api.CheckpointException as failed:
        raise ValueError(f"the checkpoint {path} can't be loaded: {_reason(failed)}") from None


def _reason(error: BaseException) -> str:
    """An error in a line; of one of torch's about ranks that of the first of them."""
    if not isinstance(error, dcp.api.CheckpointException):
        return str(error).splitlines()[0]
    rank, (first, _) = min(error.failures.items())
    is_short = "unexpected pos" in str(first)  # what torch's writer of zip files says instead of the error that it met
    return f"{'a file is incomplete, as on a full disk' if is_short else ' '.join(str(first).split())[:300]} (on rank {rank})"


def _state(module: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(module), "extra": extra}
    if isinstance(module, ParallelModule) and module.random_state is not None:
        state["random"] = module.random_state
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(module, optimizer)
    return state


def _with_saved_state(state: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state without parameters that the checkpoint has none of, as they had no gradient; all where it has none at all."""
    keys = [key for key in sizes if key.startswith("optimizer.state.")]
    saved = {name: x for name, x in state.items() if any(key.startswith(f"optimizer.state.{name}.") for key in keys)}
    return saved or dict(state)


def _misfit(path: Path, state: Mapping, sizes: Mapping[str, Any]) -> str | None:
    for name, tensor in state["model"].items():
        key = f"model.{name}"
        if key not in sizes:
            return f"the checkpoint {path} is of another model: it lacks {name!r}"
        if isinstance(tensor, torch.Tensor) and tuple(sizes[key] or ()) != tuple(tensor.shape):
            return f"the checkpoint {path} is of another model: {name!r} is {tuple(sizes[key] or ())} there and {tuple(tensor.shape)} here"
    if "random" in state and tuple(state["random"].shape) != tuple(sizes["random"]):
        return f"the checkpoint {path} has a generator's state of {tuple(sizes['random'])} bytes, which no generator has; save it again"
    if "optimizer" in state and not any(key.startswith("optimizer.") for key in sizes):
        return f"the checkpoint {path} has no optimizer state; load it without the optimizer"
    groups = {key.split(".")[2] for key in sizes if key.startswith("optimizer.param_groups.")}
    if groups and len(groups) != (here := len(state.get("optimizer", {}).get("param_groups", groups))):
        return f"the optimizer has {here} parameter groups and that of the checkpoint {path} has {len(groups)}; give as many"
    return None


def _on_first(action: Callable[[], None], complaint: str, what: str) -> None:
    """Let rank 0 do something for all ranks; ValueError on all of them where it fails."""
    of_first_rank(action, what, errors=(OSError,), in_words=lambda error: f"{complaint}: {getattr(error, 'strerror', None) or error}")
