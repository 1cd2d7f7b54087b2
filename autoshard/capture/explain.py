"""What stops a capture, as one sentence that names the model's own line; torch's own words about it are kept off the terminal.

    line    the deepest frame in a file that defines one of the module's classes (torch's own left out), else the deepest one
            outside of torch, autoshard and the standard library
    change  what to do about it, by the first row of CHANGES that fits the error's words or the functions it came through
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._dynamo
from torch import nn

_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")  # they print tracebacks of what we say in a sentence
_OWN, _TORCH, _LIBRARY = (
    f"{path}{os.sep}" for path in (Path(__file__).parent.parent, Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)

FLEX = "no rule shards flex_attention: call F.scaled_dot_product_attention, with is_causal=True or an attn_mask"
# (pattern, what goes before the error's own words, what to change)
CHANGES = (
    (
        r"\b_detect_is_causal_mask\b",
        "torch compares the values of the mask with a causal one",
        "say what it is: tgt_is_causal=True for a TransformerDecoder, is_causal=True for a TransformerEncoder (or False)",
    ),
    (r"(?i)flex_?attention|create_block_mask", "", FLEX),
    (
        r"memo disaster|(?i:data.dependent)",
        "its shapes or its control flow depend on the data",
        "compute the whole with masks, experts with batched or grouped matmuls",
    ),
    (
        r"Expected inputs of BF16 type",
        "torch's fake kernel of grouped_mm knows bfloat16 only",
        "plan in bfloat16 (model.bfloat16(), --set dtype=bfloat16) or with batched matmuls (--set experts=batched_mm)",
    ),
    (
        r"maximum recursion depth",
        "its modules are nested deeper than Python's recursion limit allows",
        "flatten them, or call sys.setrecursionlimit(10000) where the model is built",
    ),
    (
        r"Constant .* is mutated in the forward|mutating a non-functional tensor|Unexpected fake buffer",
        "the forward writes into a tensor that is no buffer of the module",
        "register it with register_buffer, or pass it (or the cache that holds it) as an input",
    ),
)


@contextmanager
def explained(module: nn.Module):
    """Turns what stops a capture into one sentence with the model's own line, where there is one."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    except (Exception, SystemExit) as error:  # whatever the user's forward raises is the user's to read, in one sentence
        frames = _frames(error)
        if isinstance(error, ValueError) and frames and frames[-1][0].startswith(_OWN):
            raise  # a sentence already
        raise ValueError(f"{type(module).__name__} can't be captured{_at(frames, module)}: {_said(error, frames)}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _said(error: BaseException, frames: list[tuple[str, int, str]]) -> str:
    """The error's first line, with what it means and what to change where that is known."""
    text = str(error).strip()
    raised = re.search(r"got (\w+Error\(['\"].+['\"]\))|raised exception (\w+\(.*\))", text)  # dynamo's own first line does not say this
    first = next(filter(None, raised.groups())) if raised else text.splitlines()[0].strip() if text else ""
    if isinstance(error, KeyError | SystemExit) or not first or type(error).__module__ not in ("builtins", "torch._dynamo.exc"):
        first = f"{type(error).__name__}{f': {first}' if first else ''}"  # the words alone don't say what went wrong
    first = first.rstrip(".")
    through = " ".join([text, *(name for _, _, name in frames)])
    for pattern, means, change in CHANGES:
        if re.search(pattern, through):
            return f"{means} ({first}); {change}" if means else f"{first}; {change}"
    return first


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that the error went through: those that dynamo tells of, then its traceback's."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in getattr(error, "real_stack", None) or ()]
    frames += _told(str(error))
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def _told(text: str) -> list[tuple[str, int, str]]:
    return [(name, int(line), function) for name, line, function in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)]


def line_of(stack_trace: str) -> str:
    """` at file:line` of the deepest line outside of torch in a stack trace as nodes keep it; "" where there is none."""
    return _at(_told(stack_trace), nn.Module())


def _at(frames: list[tuple[str, int, str]], module: nn.Module) -> str:
    """` at file:line` of the model's own line; "" where the error went through none."""
    sources = {_source(type(part)) for part in module.modules()}
    outside = [frame for frame in frames if not frame[0].startswith((_OWN, _TORCH, "<"))]
    outside = [frame for frame in outside if "site-packages" in frame[0] or not frame[0].startswith(_LIBRARY)]
    own = [frame for frame in outside if frame[0] in sources] or outside
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def _source(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except (TypeError, OSError):  # it was written at a prompt
        return None
