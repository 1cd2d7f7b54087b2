"""Captures of the plain models of models/ are kept in a test process: most tests plan the same few, and torch takes 5 ms for an op.

A capture is kept under all that it depends on: classes, plain attributes, tensors, inputs and options. What has anything else (a hook,
a config, a class of a test) is captured anew each time, and so is everything in the tests of capturing.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autoshard.capture.depth
import autoshard.capture.module
from autoshard.capture.module import Captured, capture_without_casts

KEPT: dict[tuple, Captured] = {}
MODELS = Path(__file__).parent.parent / "models"
PLAIN = (bool, int, float, str, type(None))
EMPTY = vars(nn.Module())  # the attributes of every module


class Unknown(Exception):
    """Something that a capture may depend on, and that has no key."""


def key_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise Unknown
        return (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(key_of, value))
    if isinstance(value, PLAIN):
        return (type(value), value)
    raise Unknown


def class_key(kind: type[nn.Module]) -> Any:
    """A class of torch itself; one of models by its file, of which `load_model` makes a new class each time. Raises Unknown."""
    if kind.__module__.split(".")[0] == "torch":
        return kind
    file = Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    if file.resolve().parent != MODELS or "<" in kind.__qualname__:  # a class of a function may hold other values
        raise Unknown
    return (file.name, kind.__qualname__)


def module_key(module: nn.Module) -> tuple:
    """Of classes of torch.nn and models only. Raises Unknown."""
    key = []
    numbers: dict[int, int] = {}  # of the tensors: which are tied
    for name, part in module.named_modules(remove_duplicate=False):
        key.append((name, class_key(type(part))))
        for attribute, value in vars(part).items():
            if attribute in ("_parameters", "_buffers"):
                for other, tensor in value.items():
                    number = numbers.setdefault(id(tensor), len(numbers))
                    key.append((name, other, number, None if tensor is None else key_of(tensor)))
            elif attribute == "_modules":
                continue
            elif attribute in EMPTY and not isinstance(value, PLAIN):
                if value != EMPTY[attribute]:
                    raise Unknown  # a hook
            else:
                key.append((name, attribute, key_of(value)))
    return tuple(key)


@functools.wraps(capture_without_casts)
def kept_capture(module: nn.Module, example_inputs: Any, **options: Any) -> Captured:
    try:
        leaves, structure = pytree.tree_flatten(example_inputs)
        inputs = tuple(key_of(leaf) for leaf in leaves)
        settings = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled())
        key = (module_key(module), inputs, str(structure), repr(sorted(options.items())), settings)
        hash(key)
    except Unknown:
        return capture_without_casts(module, example_inputs, **options)
    if key not in KEPT:
        KEPT[key] = capture_without_casts(module, example_inputs, **options)
    return KEPT[key]


def keep(monkeypatch: Any) -> None:
    for place in (autoshard.capture.depth, autoshard.capture.module):
        monkeypatch.setattr(place, "capture_without_casts", kept_capture)
