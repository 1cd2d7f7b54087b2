"""Mixed precision: parameters are stored in one dtype, the model computes in another, and gradients are reduced in a third.

A Precision is torch's `MixedPrecisionPolicy`, written as text in files and on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

FLOATS = ("bfloat16", "float16", "float32", "float64")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64"}
WORDS = {"reduce": "reduce_dtype", "output": "output_dtype", "cast_forward_inputs": "cast_forward_inputs"}


@dataclass(frozen=True)
class Precision:
    """In which dtypes a model computes, reduces gradients and returns; the fields of `torch.distributed.fsdp.MixedPrecisionPolicy`.

    Each dtype is given as torch.bfloat16, "bfloat16" or "bf16". As text: `bfloat16:reduce=float32`.
    """

    param_dtype: Any = None  # of parameters where they are used, and so of the computation; None: as they are stored
    reduce_dtype: Any = None  # in which gradients are summed over the ranks; None: in which they are computed
    output_dtype: Any = None  # to which the model's floating-point results are cast; None: as they are
    cast_forward_inputs: bool = True  # floating-point inputs are cast to param_dtype

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        if not isinstance(self.cast_forward_inputs, bool):
            raise ValueError(f"cast_forward_inputs is {self.cast_forward_inputs!r}; expected True or False")

    def __str__(self) -> str:
        """`bfloat16:reduce=float32,output=float32`; `Precision.parse` is the inverse."""
        rest = [f"reduce={self.reduce_dtype or 'none'}"]
        rest += [f"output={self.output_dtype}"] if self.output_dtype else []
        rest += [] if self.cast_forward_inputs else ["cast_forward_inputs=false"]
        return f"{self.param_dtype or 'none'}:{','.join(rest)}"

    @staticmethod
    def parse(written: str) -> Precision:
        """`bf16` computes in bfloat16 and reduces gradients in float32, as torchtitan and Megatron do; `bf16:reduce=bf16,output=fp32` says
        otherwise. ValueError on anything else."""
        head, _, rest = written.partition(":")
        values: dict[str, Any] = {"param_dtype": _none(head)}
        for part in filter(None, rest.split(",")):
            word, sign, value = part.partition("=")
            if word not in WORDS or not sign or WORDS[word] in values:
                words = f"{', '.join(WORDS)}, each once at most"
                raise ValueError(f"precision {written!r} has {part!r}; expected {words}, as in bf16:reduce=fp32,output=fp32")
            values[WORDS[word]] = _none(value) if word != "cast_forward_inputs" else {"true": True, "false": False}.get(value, value)
        return Precision(**{"reduce_dtype": "float32"} | values)

    @staticmethod
    def of(given: Any) -> Precision | None:
        """None, text, a Precision, or torch's MixedPrecisionPolicy as a Precision. ValueError on anything else."""
        names = [f.name for f in fields(Precision)]
        if given is None or isinstance(given, Precision):
            return given
        if isinstance(given, str):
            return Precision.parse(given)
        if all(hasattr(given, name) for name in names):
            return Precision(**{name: getattr(given, name) for name in names})
        raise ValueError(f"precision is {given!r}; expected 'bf16', 'bf16:reduce=fp32,output=fp32', or an autoshard.Precision")


def _none(word: str) -> str | None:
    return None if word == "none" else word


def _dtype(name: str, given: Any) -> str | None:
    """A dtype by torch's name, without `torch.`."""
    word = None if given is None else str(given).removeprefix("torch.")
    word = SHORT.get(word, word) if word is not None else None
    if word is not None and word not in FLOATS:
        raise ValueError(f"{name} is {given!r}; expected a floating-point dtype: {', '.join(FLOATS)}, or bf16, fp16, fp32")
    return word
