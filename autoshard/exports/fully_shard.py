"""A recipe of calls for a launcher: parallelize_module on an axis of tensor parallelism, checkpoint and fully_shard on blocks.

    recipe = export(solution, "fully_shard")     {"mesh", "parallelize_module", "checkpoint", "fully_shard", "replicate", ...}
    apply(recipe, model, device_mesh)                   or write it: export(solution, "fully_shard", "recipe.py")

A recipe is one of the schemes that planning has priced (`Solution.modules`); each shards the batch over the data axes:

    an axis       modules       tensor parallelism on it; the data axes are the others, parameters are replicated on them
                  fully_shard   the same; parameters are sharded on them
    no axis       data_parallel, zero1, zero2, zero3, hsdp       (baselines/schemes.py); all axes are data axes

It is the scheme that the plan itself follows, if that holds the plan (record.why_not_held), else the fastest of those that fit. What the
schemes fix once for all parameters:

    gathered again for every use      reshard_after_forward=True       zero3, hsdp
    gathered once per step            reshard_after_forward=False, and set_reshard_after_backward(False) up to the last microbatch
    gradients reduced once per step   set_requires_gradient_sync(False) up to the last microbatch       zero1, data_parallel

    for k in range(m):
        begin_microbatch(recipe, model, k)      before the forward of microbatch k
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from autoshard.exports.checkpoint_policy import RECOMPUTE, contexts_of, of_block, policy_of
from autoshard.exports.modules import NO_AXIS, PRECISION, RECOMPUTED, block_of, on_axis, owners_of, parallelize_plan, styles_as_text
from autoshard.exports.record import Export, Left, why_not_held, with_cost
from autoshard.exports.source import comments, literal, rows
from autoshard.layout import parse
from autoshard.solution import Solution
from autoshard.torch_private import source_of

RESHARDS = {"data_parallel": False, "zero1": False, "zero2": False, "zero3": True, "hsdp": True}  # after forward
SYNCS = {"data_parallel": False, "zero1": False, "zero2": True, "zero3": True, "hsdp": True}  # gradients of every microbatch
CARRIED = (PRECISION, RECOMPUTED)


class Scheme(NamedTuple):
    """What is done on which axes."""

    axis: str  # of tensor parallelism; NO_AXIS without
    name: str
    data: tuple[str, ...]  # axes that shard the batch
    reshards: bool

    @property
    def sharded(self) -> tuple[str, ...]:
        """Axes that shard parameters."""
        return () if self.name in ("modules", "data_parallel") else self.data[-1:] if self.name == "hsdp" else self.data


def recipe(solution: Solution, axis: str | None = None, within: float = math.inf) -> Export:
    """The recipe of the plan's own scheme, or of the one that holds the plan best. axis: of tensor parallelism, one that the plan uses.

    within: how much longer than the plan a step of the plan's own scheme may take. ValueError on a plan without prices of schemes, and on
    parameters that fully_shard refuses.
    """
    scheme = _scheme(solution, axis, within)
    if scheme.sharded:
        _check_parameters(solution)
    known = solution.modules.get(scheme.axis) or on_axis(solution, scheme.axis or None)[1]
    styles = parallelize_plan(solution, scheme.axis) if scheme.axis else Export()
    replicated = [name for name in scheme.data if name not in scheme.sharded]
    value: dict[str, Any] = {
        "mesh": {"shape": list(solution.mesh.shape), "axis_names": list(solution.mesh.axis_names)},
        "parallelize_module": {"axis": scheme.axis or None, "plan": dict(styles)},
        "fully_shard": {"axes": list(scheme.sharded), "modules": [*_blocks(solution), ""] if scheme.sharded else []},
        "replicate": {"axes": replicated},
    }
    if scheme.sharded:
        value["fully_shard"]["reshard_after_forward"] = scheme.reshards
    if solution.precision is not None and scheme.data:
        value["mp_policy"] = asdict(solution.precision)
    carried = CARRIED if scheme.data else CARRIED[1:]
    left = [one for one in styles.left if "fully_shard can shard on the others" not in one.why and one.what not in carried]
    if again := _recomputed(solution):
        value["checkpoint"], lost = again
        left += lost
    if solution.microbatches > 1:
        value["microbatches"], unequal = _microbatches(solution, scheme)
        left += unequal
    if scheme.data:
        left.append(Left("which dim of each parameter is sharded on the data axes", "fully_shard shards dim 0 of all of them"))
        why = "each rank computes it of its own rows, and gradients are averaged: use SyncBatchNorm, multiply a sum by the number of ranks"
        left += [Left("what is computed of all rows: batch norm, a loss that is no mean of rows", why)] if solution.training else []
    return with_cost(solution, value, tuple(left), known, scheme.name)


def _check_parameters(solution: Solution) -> None:
    """ValueError on what fully_shard refuses: scalars, what is empty, and trained parameters of a block of several dtypes."""
    dtypes: dict[str, dict[str, str]] = {}  # by block, by dtype: a parameter
    for name, row in solution.parameters.items():
        if not row["shape"]:
            raise ValueError(f"fully_shard takes no scalars, and {name} is one: give it one dim")
        if f"gradient:{name}" in solution.results:
            if not math.prod(row["shape"]):
                raise ValueError(f"fully_shard reduces no empty gradients, and {name} has the shape {tuple(row['shape'])}: freeze it")
            dtypes.setdefault(block_of(name), {}).setdefault(row["dtype"], name)
    for of in dtypes.values():
        if len(of) > 1:
            several = " and ".join(f"{name} is {dtype}" for dtype, name in of.items())
            raise ValueError(f"fully_shard takes one dtype for all that it trains of a block, and {several}: store them in one")


def _scheme(solution: Solution, axis: str | None, within: float) -> Scheme:
    """The scheme to export: the plan's own, if it holds the plan; else the fastest that fits."""
    own = _own_scheme(solution, axis)
    priced = {name: row for name, row in solution.modules.items() if axis in (None, name)}
    trains = solution.training and axis is None  # "inside": gradients to sum over the axis, which no call of the recipe does
    legal = {name: row for name, row in priced.items() if not (trains and "inside" in row["styles"].values())}
    other = [
        _named(solution, name, scheme)
        for name, row in legal.items()
        for scheme in row["seconds"]
        if _runs(solution, scheme) or (name != NO_AXIS and (_used(solution, name) or axis is not None))
    ]
    known = own.name in solution.modules.get(own.axis, {}).get("seconds", {})
    if not other or (known and not why_not_held(solution, *_price(solution, own), within)):
        return own
    return min(other, key=lambda one: _order(solution, *_price(solution, one)))


def _runs(solution: Solution, scheme: str) -> bool:
    """Whether the calls of the recipe do a scheme without tensor parallelism: fully_shard has no gradients that are summed in groups of
    ranks for several microbatches, and no groups on meshes of three axes."""
    return scheme in RESHARDS and (scheme != "hsdp" or (len(_used(solution, NO_AXIS)) == 2 and solution.microbatches == 1))


def _order(solution: Solution, cost: float, peak: float | None) -> tuple[bool, float]:
    limit = solution.memory_limit
    return limit is not None and (peak or 0.0) > limit, cost


def _price(solution: Solution, scheme: Scheme) -> tuple[float, float | None]:
    row = solution.modules[scheme.axis]
    return row["seconds"][scheme.name] or math.inf, row.get("peak_bytes", {}).get(scheme.name)


def _named(solution: Solution, axis: str, name: str) -> Scheme:
    data = _used(solution, axis)
    return Scheme(axis, name, data, RESHARDS.get(name, _gathered_again(solution, data)))


def _used(solution: Solution, axis: str) -> tuple[str, ...]:
    """The axes of several devices without this one."""
    return tuple(one.name for one in solution.mesh.axes if one.size > 1 and one.name != axis)


def _own_scheme(solution: Solution, axis: str | None) -> Scheme:
    """What the plan itself does with most bytes of its parameters."""
    tensor, known = on_axis(solution, axis)
    if axis is not None or known["styles"] or NO_AXIS not in solution.modules:
        data = _used(solution, tensor)
        return _named(solution, tensor, "fully_shard" if data and _is_sharded(solution, data) else "modules")
    data = _used(solution, NO_AXIS)
    if not _is_sharded(solution, data):
        return _named(solution, NO_AXIS, "data_parallel")
    if len(data) == 2 and solution.microbatches == 1 and not _is_sharded(solution, data[:1]):
        return _named(solution, NO_AXIS, "hsdp")
    if _gathered_again(solution, data):
        return _named(solution, NO_AXIS, "zero3")
    return _named(solution, NO_AXIS, "zero1" if solution.microbatches == 1 or _reduced_once(solution, data) else "zero2")


def _most(solution: Solution, axes: tuple[str, ...], layout_of: Callable[[str, dict], str | None], holds: Callable[[Any], bool]) -> bool:
    """Whether it holds, on some of the axes, for the layouts of most bytes of parameters; those without such a layout aren't counted."""
    places, sum_of = [solution.mesh.axis_names.index(name) for name in axes], 0.0
    for name, row in solution.parameters.items():
        if "tied_to" not in row and (written := layout_of(name, row)) is not None:
            sum_of += row["local_bytes"] * (1 if any(holds(parse(written)[k]) for k in places) else -1)
    return sum_of > 0


def _is_sharded(solution: Solution, axes: tuple[str, ...]) -> bool:
    return _most(solution, axes, lambda name, row: row["layout"], lambda p: p.is_shard())


def _gathered_again(solution: Solution, axes: tuple[str, ...]) -> bool:
    """Whether most sharded parameters are gathered for every use: their copies of the step, or what their readers share, are sharded."""
    if solution.microbatches > 1:
        return _most(solution, axes, lambda name, row: row.get("kept"), lambda p: p.is_shard())
    return bool(solution.modules.get(NO_AXIS, {}).get("gathered_again", True))


def _reduced_once(solution: Solution, axes: tuple[str, ...]) -> bool:
    return _most(solution, axes, lambda name, row: row.get("accumulated"), lambda p: p.is_partial())


def _recomputed(solution: Solution) -> tuple[dict, tuple[Left, ...]] | None:
    """The blocks under torch.utils.checkpoint, with what a plan per tensor saves in each; None where nothing runs again."""
    if not solution.training or not (solution.recompute or solution.saved):
        return None
    blocks = solution.modules.get(NO_AXIS, {}).get("recomputed") or _blocks(solution)[: solution.recompute]
    if not solution.saved:
        return {"modules": _blocks(solution, blocks)}, ()
    policy = policy_of(solution)
    blocks = _blocks(solution, (block_of(f"{name}.") for name in policy if block_of(f"{name}.")))
    return {"modules": blocks, "saved": {name: of_block(policy, name) for name in blocks}}, policy.left


def _blocks(solution: Solution, chosen: Iterable[str] | None = None) -> list[str]:
    """The chosen blocks, or all that hold parameters of their own; a module with several names under the one that its parameters have."""
    owner = owners_of(solution)
    return list(dict.fromkeys(filter(None, owner.values()) if chosen is None else (owner.get(block) or block for block in chosen)))


def _microbatches(solution: Solution, scheme: Scheme) -> tuple[dict, list[Left]]:
    """How copies of parameters and sums of gradients are treated on the data axes, and what that loses of the plan."""
    places = [solution.mesh.axis_names.index(name) for name in scheme.data]
    stored = [row for row in solution.parameters.values() if "kept" in row and "tied_to" not in row]
    sync = SYNCS.get(scheme.name, not _reduced_once(solution, scheme.data))

    def otherwise(key: str, chosen: bool, holds: Callable[[Any], bool]) -> int:
        return sum(any(holds(parse(row[key])[k]) for k in places) != chosen for row in stored if key in row)

    why = "fully_shard has one choice here for all"
    left = [Left(f"the kept copies of {n} parameters", why) for n in [otherwise("kept", scheme.reshards, lambda p: p.is_shard())] if n]
    left += [Left(f"when {n} gradients are reduced", why) for n in [otherwise("accumulated", not sync, lambda p: p.is_partial())] if n]
    if solution.accumulation_dtype:
        left.append(Left(f"sums of gradients in {solution.accumulation_dtype}", "fully_shard adds them up in its reduce_dtype"))
    step = {"number": solution.microbatches, "reshard_after_forward": scheme.reshards, "requires_gradient_sync": sync}
    return step, left


def begin_microbatch(recipe: dict, model: nn.Module, k: int) -> None:
    """Sets, before the forward of microbatch k of a step, what `apply`'s modules do after forward and backward."""
    step = recipe["microbatches"]
    is_last = k == step["number"] - 1
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(is_last or step["requires_gradient_sync"], recurse=False)
            module.set_reshard_after_backward(is_last or step["reshard_after_forward"], recurse=False)


def apply(recipe: dict, model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Carry the recipe out on a model and a DeviceMesh whose axes have the recipe's names; the same module, changed.

    recipe: the value of `export(solution, "fully_shard")`. Every rank calls this. ValueError where the axes have other names.
    """
    if tuple(device_mesh.mesh_dim_names or ()) != tuple(recipe["mesh"]["axis_names"]):
        raise ValueError(f"the device mesh's axes are {device_mesh.mesh_dim_names}, the recipe's {recipe['mesh']['axis_names']}")
    tensor = recipe["parallelize_module"]
    if tensor["plan"]:
        parallelize_module(model, device_mesh[tensor["axis"]], tensor["plan"])
    again = recipe.get("checkpoint", {})
    for name in again.get("modules", ()):
        block = model.get_submodule(name)
        options = {"context_fn": contexts_of(again["saved"], name)} if "saved" in again else {}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)  # type: ignore[method-assign]
    shard, replicated = recipe["fully_shard"], recipe["replicate"]["axes"]
    policy = MixedPrecisionPolicy(**{k: getattr(torch, v) if isinstance(v, str) else v for k, v in recipe.get("mp_policy", {}).items()})
    inner = replace(policy, output_dtype=None)  # only the model's own outputs are cast
    if shard["modules"]:
        data = device_mesh[(*replicated, *shard["axes"])] if replicated else _flat(device_mesh, shard["axes"])
        for name in shard["modules"]:
            options = {"mp_policy": inner if name else policy, "reshard_after_forward": shard.get("reshard_after_forward")}
            fully_shard(model.get_submodule(name), mesh=data, **options)
    elif replicated:
        from autoshard.torch_private import replicate  # here: only plans with replicated parameters need it

        replicate(model, mesh=_flat(device_mesh, replicated), mp_policy=policy)
    return model


def _flat(device_mesh: DeviceMesh, axes: list[str]) -> DeviceMesh:
    part = device_mesh[tuple(axes)] if len(axes) > 1 else device_mesh[axes[0]]
    return part._flatten("_".join(axes)) if len(axes) > 1 else part


def as_text(recipe: dict) -> dict:
    """The recipe as plain data, with the styles as text."""
    tensor = recipe["parallelize_module"]
    return {**recipe, "parallelize_module": {"axis": tensor["axis"], "plan": styles_as_text(tensor["plan"])}}


RECOMPUTING = """from functools import partial

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

"""  # of a file that recomputes blocks
CONTEXTS = f"""

def contexts(saved):
    def policy(_, operator, *args, **kwargs):
        return getattr(CheckpointPolicy, saved.get(str(operator), "{RECOMPUTE}"))

    return create_selective_checkpoint_contexts(policy)
"""
IMPORTS = "from dataclasses import replace\n\nimport torch\n"  # of a file with a policy of mixed precision


def as_python(recipe: Any) -> str:
    """A module with one function `apply(model, device_mesh)` that does it, for a launcher without autoshard."""
    plan = rows(as_text(recipe)["parallelize_module"]["plan"])
    names, shape = tuple(recipe["mesh"]["axis_names"]), tuple(recipe["mesh"]["shape"])
    head = f"Written by autoshard. For init_device_mesh(device, {shape}, mesh_dim_names={names})."
    shard, replicated = recipe["fully_shard"], recipe["replicate"]["axes"]
    lines = [f"    parallelize_module(model, device_mesh[{literal(recipe['parallelize_module']['axis'])}], PLAN)"] if plan else []
    policy = ", mp_policy=POLICY" if "mp_policy" in recipe else ""
    again = recipe.get("checkpoint", {})
    if again:
        saved = ", context_fn=partial(contexts, SAVED[name])" if "saved" in again else ""
        lines += [f"    for name in {literal(again['modules'])}:", "        block = model.get_submodule(name)"]
        lines += [f"        block.forward = partial(checkpoint, block.forward, use_reentrant=False{saved})"]
    if shard["modules"]:
        both = f"device_mesh[tuple({literal([*replicated, *shard['axes']])})]" if replicated else _mesh_code(shard["axes"])
        options = f"{policy and ', mp_policy=INNER if name else POLICY'}, reshard_after_forward={shard.get('reshard_after_forward')!r}"
        lines += [f"    data = {both}", f"    for name in {literal(shard['modules'])}:"]
        lines += [f"        fully_shard(model.get_submodule(name), mesh=data{options})"]
    elif replicated:
        lines += [f"    {source_of('replicate')}", ""]
        lines += [f"    replicate(model, mesh={_mesh_code(replicated)}{policy})"]
    imports = f"{RECOMPUTING if again else ''}{IMPORTS if policy else ''}"
    return (
        f"{comments([head, *getattr(recipe, 'said', ())])}\n"
        f"{imports}from torch.distributed.fsdp import {'MixedPrecisionPolicy, ' if policy else ''}fully_shard\n"
        "from torch.distributed.tensor import Replicate\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n\n"
        f"PLAN = {{\n{plan}}}\n{_policy_code(recipe)}{_saved_code(again)}\n\ndef apply(model, device_mesh):\n"
        + "\n".join([*lines, "    return model"]) + "\n" + _loop_code(recipe)
    )  # fmt: skip


def _saved_code(again: dict) -> str:
    """What each block saves, and the context that does it, where a plan chose per tensor."""
    if "saved" not in again:
        return ""
    saved = {name: repr({str(operator): str(way) for operator, way in ways.items()}) for name, ways in again["saved"].items()}
    return f"SAVED = {{\n{rows(saved)}}}\n{CONTEXTS}"


def _loop_code(recipe: dict) -> str:
    """The function to be called before each microbatch, where a step has several."""
    step = recipe.get("microbatches")
    if step is None:
        return ""
    last = f"k == {step['number'] - 1}"
    values = {"requires_gradient_sync": step["requires_gradient_sync"], "reshard_after_backward": step["reshard_after_forward"]}
    calls = [f"            module.set_{key}({True if value else last}, recurse=False)" for key, value in values.items()]
    head = f"def begin_microbatch(model, k):\n    # before the forward of microbatch k of {step['number']}\n"
    body = ["    for module in model.modules():", "        if hasattr(module, 'set_requires_gradient_sync'):", *calls]
    return f"\n\n{head}" + "\n".join(body) + "\n"


def _policy_code(recipe: dict) -> str:
    """The lines that make the policy of mixed precision; empty without one."""
    if "mp_policy" not in recipe:
        return ""
    given = [f"{name}={f'torch.{value}' if isinstance(value, str) else value}" for name, value in recipe["mp_policy"].items()]
    lines = [f"POLICY = MixedPrecisionPolicy({', '.join(given)})", "INNER = replace(POLICY, output_dtype=None)  # of modules inside"]
    return "\n".join([*lines, ""])


def _mesh_code(axes: list[str]) -> str:
    if len(axes) == 1:
        return f"device_mesh[{literal(axes[0])}]"
    return f"device_mesh[tuple({literal(axes)})]._flatten({literal('_'.join(axes))})"
