"""The tensors that modules and arguments hold anywhere: in lists, caches and other objects, not only as parameters and buffers.

reachable   every object that can be reached through attributes, items and slots, each once
copied      a deep copy with its tensors replaced; objects that can't be copied (a lock, a file) are shared
opened      a module whose arguments and results are trees of tensors: an object among them is replaced by the list of its tensors
"""

import copy
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from autoshard.torch_private import disable_current_modes, pytree

_CLOSED = (str, bytes, int, float, complex, type, type(None), types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_PLAIN = (torch.Tensor, str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def reachable(*roots: Any, seen: Collection[int] = ()) -> Iterator[Any]:
    """Tensors and other objects, depth first in the order of attributes and items. seen: the ids of objects that are left out."""
    seen = set(seen)
    waiting = [*reversed(roots)]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _CLOSED):
            continue
        seen.add(id(item))
        yield item
        if not isinstance(item, torch.Tensor):
            waiting += reversed(list(_parts(item)))


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from item
    elif isinstance(item, types.MethodType):
        yield item.__self__
    yield from getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if isinstance(kind.__dict__.get(slot), types.MemberDescriptorType) and hasattr(item, slot):
                yield getattr(item, slot)


def copied(item: Any, replacement: Callable[[torch.Tensor], torch.Tensor], instead: Mapping[int, Any] | None = None) -> Any:
    """A deep copy of the item in which `replacement(t)` replaces each tensor t, once per tensor. instead: objects that replace
    others, by the id of the object that they replace. A device that an object notes (a cache does) follows the tensors on it."""
    memo: dict[int, Any] = {}
    parts = list(reachable(item))
    devices: dict[torch.device, torch.device] = {}
    for part in parts:
        if isinstance(part, torch.Tensor):
            memo[id(part)] = replacement(part)
            devices[part.device] = memo[id(part)].device
        elif not _is_copyable(part):
            memo[id(part)] = part
    memo |= {id(part): devices.get(part, part) for part in parts if isinstance(part, torch.device)}
    return copy.deepcopy(item, memo | dict(instead or {}))


def _is_copyable(item: Any) -> bool:
    if hasattr(type(item), "__deepcopy__") or isinstance(item, (nn.Module, dict, list, tuple, types.MethodType)):
        return True
    try:
        item.__reduce_ex__(4)
    except (TypeError, NotImplementedError):  # raised by objects that have no state to copy
        return False
    return True


def unsupported_kind(tensor: torch.Tensor) -> str:
    """Why a tensor of this kind can't be planned, as a sentence; "" for a dense one."""
    if nn.parameter.is_lazy(tensor):
        return "a parameter has no shape yet (LazyLinear and the like): run the model on one batch first, then plan it"
    if tensor.is_nested:
        return "a nested tensor has no one shape to shard: pad it (torch.nested.to_padded_tensor) and give a mask"
    if tensor.is_quantized:
        return f"a tensor of {tensor.dtype} is quantized, and no rule shards its scales: plan with tensor.dequantize()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} is sparse: plan with tensor.to_dense()"
    if tensor.is_floating_point() and tensor.itemsize == 1:
        return f"a tensor of {tensor.dtype} can be neither compared nor sent by all backends: plan with tensor.to(torch.bfloat16)"
    return ""


def tensors_of(item: Any) -> list[torch.Tensor]:
    return [part for part in reachable(item) if isinstance(part, torch.Tensor)]


def opened(module: nn.Module, args: tuple, kwargs: dict, templates: list[Any] | None = None) -> tuple[nn.Module, tuple, dict]:
    """The module and arguments, with each object that is neither tensor nor number replaced by the list of the tensors in it.

    The module is changed in place: pass a copy. Its forward rebuilds copies of the objects from the tensors, and is
    `listing`.
    """
    given, holds_objects = (args, kwargs), has_objects(args, kwargs)
    original, holding, noted = type(module), _with_state(module), [] if templates is None else templates

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if holds_objects:
            args, kwargs = filled(given, (args, kwargs))
        with holding():
            return listing(original.forward, noted)(self, *args, **kwargs)

    module.__class__ = type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
    if "forward" in vars(module):  # a method of the class, as above, is that of a copy, too; this one isn't
        module.__dict__["forward"] = listing(module.forward, noted)
    return module, *listed((args, kwargs))


def _with_state(module: nn.Module) -> Callable[[], AbstractContextManager]:
    """A context in which objects that modules hold (a static cache) have the module's parameters and buffers of the moment in the place
    of those of now: a trace replaces these, but not what else refers to them."""
    names = {id(tensor): name for name, tensor in _state(module)}
    inner = {id(part): part for part in module.modules()}
    own = [(part, key, item) for part in module.modules() for key, item in vars(part).items() if key not in OF_MODULES]
    # what an object holds, but not through a module alone
    objects = [(part, key, item) for part, key, item in own if not isinstance(item, _PLAIN)]
    held = [row for row in objects if any(id(t) in names for t in reachable(row[2], seen=inner))]

    @contextmanager
    def holding() -> Iterator[None]:
        state = dict(_state(module))
        items = [item for _, _, item in held]
        current = copied(items, lambda t: state[names[id(t)]] if id(t) in names else t, inner) if held else []
        for (part, key, _), item in zip(held, current, strict=True):
            part.__dict__[key] = item
        try:
            yield
        finally:
            for part, key, item in held:
                part.__dict__[key] = item

    return holding


OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has


def _state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def listing(function: Callable, templates: list[Any]) -> Callable:
    """The function with the list of its tensors in place of each object that it returns. Where there are objects, what it would have
    returned is added to the templates, with tensors on the meta device."""

    def listed_results(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if has_objects(result):
            templates.append(_on_meta(result))
        return listed(result)

    return listed_results


def _on_meta(result: Any) -> Any:
    with disable_current_modes():  # these tensors are no part of the program that is traced
        return copied(result, lambda tensor: torch.empty(tuple(map(int, tensor.shape)), dtype=tensor.dtype, device="meta"))


def listed(inputs: Any) -> Any:
    """The inputs with the list of its tensors in the place of each object."""
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, _PLAIN) else tensors_of(leaf), inputs)


def filled(inputs: Any, lists: Any) -> Any:
    """`inputs` with the leaves of `lists` in the place of its own: the inverse of `listed`. Objects are copied."""
    leaves, spec = pytree.tree_flatten(inputs)
    new = spec.flatten_up_to(lists)
    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, _PLAIN):
            tensors = dict(zip(map(id, tensors_of(leaf)), new[k], strict=True))
            new[k] = copied(leaf, lambda tensor: tensors[id(tensor)])  # noqa: B023  (called at once)
    return pytree.tree_unflatten(new, spec)


def state_of(inputs: Any) -> tuple:
    """What the objects among the inputs hold beside tensors (lengths, flags), in an order that is the same on every rank: a program
    was captured for one state."""
    waiting = [leaf for leaf in reversed(pytree.tree_leaves(inputs)) if not isinstance(leaf, _PLAIN)]
    state: list[Any] = []
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor) or id(item) in seen:
            continue
        if isinstance(item, _PLAIN):
            state.append((type(item), repr(item)))
        elif hasattr(item, "tobytes"):  # an array of numpy, whose repr leaves most numbers out
            state.append((str(getattr(item, "dtype", "")), getattr(item, "shape", ()), item.tobytes()))
        elif not isinstance(item, _CLOSED):
            seen.add(id(item))
            state.append(type(item))
            waiting += reversed(list(_parts(item)))
    return tuple(state)


def has_objects(*trees: Any) -> bool:
    return not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(trees))
