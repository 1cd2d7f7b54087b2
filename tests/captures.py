"""Captures are kept in a test process: most tests plan the same few models, and torch takes 5 ms for an op.

A capture is kept under all that it depends on: classes, attributes, functions with what they enclose, tensors, inputs, options, and the
functions of autoshard.capture, which a test may replace. What has anything else (a hook, an object that is neither plain nor of
transformers) is captured anew each time, and so is everything in the tests of capturing.
"""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

import autoshard.capture.depth
import autoshard.capture.module
from autoshard.capture.module import Captured, capture_without_casts
from autoshard.capture.nested_tensors import tensors_of

KEPT: dict[tuple, tuple[Captured, list]] = {}
MODELS = Path(__file__).parent.parent / "models"
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
OBJECTS = ("transformers", "autoshard")  # whose objects are their attributes
HOOKS = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}  # all are empty


class Unknown(Exception):
    """Something that a capture may depend on, and that has no key."""


class Keys:
    """Keys of the parts of one call: tensors have numbers, so that those that are tied have the same. Parameters, buffers and inputs become
    fake tensors of the CPU in a capture, wherever they are: on ranks the runtime captures a copy on the meta device of what was planned."""

    def __init__(self, module: nn.Module, example_inputs: Any) -> None:
        self.numbers: dict[int, int] = {}
        direct = [(*part._parameters.values(), *part._buffers.values(), *vars(part).values()) for part in module.modules()]
        self.become_fake = {id(tensor) for tensor in (*itertools.chain(*direct), *tensors_of(example_inputs))}

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return None if tensor.device.type in ("cpu", "meta") and id(tensor) in self.become_fake else tensor.device

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, nn.Parameter):
                raise Unknown
            number = self.numbers.setdefault(id(value), len(self.numbers))
            return (number, type(value), tuple(value.shape), value.stride(), value.dtype, self.device_of(value), value.requires_grad)
        if isinstance(value, PLAIN):
            return (type(value), value)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(self.of, value))
        if isinstance(value, dict):
            return (type(value), *((self.of(key), self.of(item)) for key, item in value.items()))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(map(self.of, value)))
        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, FunctionType):
            return self.of_function(value)
        if isinstance(value, nn.Module):
            return self.of_module(value)
        if type(value).__module__.split(".")[0] in OBJECTS and hasattr(value, "__dict__"):
            return (self.of_class(type(value)), self.of(vars(value)))
        raise Unknown

    def of_module(self, module: nn.Module) -> tuple:
        if any(vars(module)[name] != value for name, value in HOOKS.items()):
            raise Unknown
        items = {key: item for key, item in vars(module).items() if key not in HOOKS}
        return (self.of_class(type(module)), *((key, self.of(item)) for key, item in items.items()))

    def of_function(self, function: FunctionType) -> tuple:
        """Its code, and what it encloses."""
        if function.__globals__ is not vars(sys.modules.get(function.__module__, sys)):
            raise Unknown
        enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
        return (function.__module__, function.__code__, *map(self.of, (enclosed, function.__defaults__, function.__kwdefaults__)))

    def of_class(self, kind: type) -> Any:
        """The class that has this name in its module; one of models by its file, of which `load_model` makes a new class each time; one
        that a function made by all that is in it."""
        module = sys.modules.get(kind.__module__)
        file = Path(getattr(module, "__file__", None) or "")
        if file.resolve().parent == MODELS and "<" not in kind.__qualname__:
            return (file.name, kind.__qualname__)
        if functools.reduce(lambda there, name: getattr(there, name, None), kind.__qualname__.split("."), module) is kind:
            return (kind, getattr(kind, "forward", None))  # a test may put another one there
        own = {key: item for key, item in vars(kind).items() if not key.startswith("__") or isinstance(item, FunctionType)}
        return (kind.__name__, *map(self.of_class, kind.__bases__), self.of(own))


def code_of_capturing() -> list:
    """All that has a name in autoshard.capture; dynamo adds names of its own there, "__import_torch" and "_1234_c0"."""
    spaces = [vars(module) for name, module in sys.modules.items() if name.startswith("autoshard.capture")]
    return [item for space in spaces for name, item in space.items() if not (name.startswith("__") or name[1:2].isdigit())]


@functools.wraps(capture_without_casts)
def kept_capture(module: nn.Module, example_inputs: Any, **options: Any) -> Captured:
    keys, code = Keys(module, example_inputs), code_of_capturing()
    try:
        settings = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled())
        key = (keys.of(module), keys.of(example_inputs), repr(sorted(options.items())), settings, *map(id, code))
        hash(key)
    except (Unknown, RecursionError, TypeError):  # TypeError: what has no hash
        return capture_without_casts(module, example_inputs, **options)
    if key not in KEPT:
        KEPT[key] = capture_without_casts(module, example_inputs, **options), code  # so that nothing else gets one of these ids
    return KEPT[key][0]


def keep(monkeypatch: Any) -> None:
    for place in (autoshard.capture.depth, autoshard.capture.module):
        monkeypatch.setattr(place, "capture_without_casts", kept_capture)
