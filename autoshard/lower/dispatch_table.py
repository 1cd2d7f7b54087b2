"""Which devices an ATen operator has a kernel for, as torch's own table says it: native_functions.yaml, which every wheel holds.

    - func: mm(Tensor self, Tensor mat2) -> Tensor          has what mm.out has
      structured_delegate: mm.out
    - func: mm.out(...)                                      CPU and CUDA
      dispatch:
        CPU: mm_out_cpu
        CUDA: mm_out_cuda

So it can be asked without such a device, and of a torch that was built without it. An operator without a dispatch table, or with a
composite kernel, calls other operators; one with an inner loop for `Generic` tensors has it on CPU and CUDA; one that is generated from
another (autogen) has that one's kernels. The operators of other libraries are looked up in torch's dispatcher.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from autoshard.reading import text_of
from autoshard.torch_private import OpOverload, has_computed_kernel

TABLE = Path(torch.__file__).parent.parent / "torchgen" / "packaged" / "ATen" / "native" / "native_functions.yaml"
ANY_DEVICE = {"CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}
NOT_ASKED = ("_c10d_functional", "c10d", "prim")  # collectives run wherever their group's backend does; prim asks for a tensor's device


@dataclass(frozen=True)
class Entry:
    """A row of the table. keys: dispatch keys with a kernel of their own; None where the row has no dispatch table."""

    keys: frozenset[str] | None
    delegate: str


def has_kernel(operator: OpOverload, key: str) -> bool:
    """Whether an operator runs on the devices of a dispatch key ("CUDA")."""
    name = operator.name()
    if operator.namespace in NOT_ASKED:
        return True
    if operator.namespace != "aten" or (row := _entry(name.removeprefix("aten::"))) is None:
        return has_computed_kernel(name, key)
    return row.keys is None or bool(row.keys & {key, *ANY_DEVICE})


def _entry(name: str) -> Entry | None:
    row = _table().get(name)
    while row is not None and row.delegate:
        row = _table().get(row.delegate)
    return row


@cache
def _table() -> dict[str, Entry]:
    """Rows by operator and overload ("mm.out"). The file is YAML of one fixed form: a list of maps with scalars and one map of scalars."""
    rows: dict[str, Entry] = {}
    for text in re.split(r"^- func: ", text_of(TABLE, "operators"), flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^  (\w+): *(.*)$", text, re.MULTILINE))
        keys = re.findall(r"^    ([\w, ]+):", text, re.MULTILINE) if "dispatch" in fields else None
        name = text[: text.index("(")]
        split = None if keys is None else {key.strip() for line in keys for key in line.split(",")}
        generic = {"CPU", "CUDA"} if "ufunc_inner_loop" in fields else set()
        rows[name] = Entry(None if split is None else frozenset(split | generic), fields.get("structured_delegate", ""))
        for generated in filter(None, map(str.strip, fields.get("autogen", "").split(","))):
            rows.setdefault(generated, Entry(None, name))
    return rows
