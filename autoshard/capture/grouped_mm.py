"""Fake kernel of grouped matmuls for every type that torch multiplies: torch's own (2.13) knows bfloat16 only.

    x (s, k), w (e, k, n), ends (e) -> (s, n)        x (k, s), y (s, n), ends (e) -> (e, k, n)
    x (e, s, k), y (k, n), ends (e) -> (s, n)        x (e, s, k), y (e, k, n)     -> (e, s, n)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autoshard.torch_private import DispatchKey

aten = torch.ops.aten


@contextmanager
def fake_grouped_mm() -> Iterator[None]:
    """Inside the block fake grouped matmuls are of any float type."""
    operator, key, library = aten._grouped_mm.default, DispatchKey.Meta, torch.library.Library("aten", "IMPL")
    torchs = operator.py_kernels.get(key)  # which torch's dispatcher in Python calls, where that is on
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Overriding a previously registered kernel")
        library.impl("_grouped_mm", _fake, "Meta", allow_override=True)
    _use(operator, key, _fake)
    try:
        yield
    finally:
        _use(operator, key, torchs)
        library._destroy()


def _use(operator: Any, key: Any, kernel: Any) -> None:
    if kernel is None:
        operator.py_kernels.pop(key, None)
    else:
        operator.py_kernels[key] = kernel
    operator._dispatch_cache.clear()


def _fake(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    rows, columns = self.shape[-2], mat2.shape[-1]
    if self.dim() != mat2.dim():
        shape: tuple[int, ...] = (rows if self.dim() == 2 else self.shape[1], columns)
    else:
        assert self.dim() == 3 or offs is not None
        shape = (self.shape[0] if offs is None else offs.shape[0], rows, columns)
    if bias is not None or not self.is_floating_point() or self.dtype != mat2.dtype or self.shape[-1] != mat2.shape[-2]:
        raise RuntimeError(f"grouped_mm of {tuple(self.shape)} {self.dtype} and {tuple(mat2.shape)} {mat2.dtype} is not supported")
    step = 16 // self.element_size()  # rows begin at multiples of 16 bytes, as in torch's own
    return self.new_empty((*shape[:-1], -(-columns // step) * step), dtype=out_dtype).narrow(-1, 0, columns)
