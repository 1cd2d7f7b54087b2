"""Turns an error that stops a capture into one sentence that names the line of the model; torch's log messages are suppressed.

line    the deepest frame in a file that defines one of the module's classes (other than torch's), else the deepest frame outside
        of torch, autoshard and the standard library
change  what to change in the model: the first row of CHANGES that matches the error's text, a function or a file of torch that it went
        through
"""

import inspect
import logging
import os
import re
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard.torch_private import DYNAMO_ERRORS, FAKE_TENSOR_LOG, functorch

_LOGS = (FAKE_TENSOR_LOG, "torch.fx.experimental.symbolic_shapes")  # they print tracebacks of errors that we explain in a sentence
_OWN, _TORCH, _LIBRARY = (
    f"{path}{os.sep}" for path in (Path(__file__).parent.parent, Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)

FLEX = "give the module itself, in which flex_attention becomes attention with a mask, or call F.scaled_dot_product_attention"
# (pattern, what the error means or "", what to change)
CHANGES = (
    (r"\b_detect_is_causal_mask\b", "torch compares the values of the mask with a causal one",
     "say what it is: tgt_is_causal=True for a TransformerDecoder, is_causal=True for a TransformerEncoder (or False)"),
    (r"torch\.autograd\.(grad|backward)|Mixing fake modes|does not require grad and does not have a grad_fn",
     "the forward differentiates, and autograd can't be captured within a program",
     "call torch.func.grad (or vjp, jacrev, hessian) there"),
    (r"(?is)data.dependent.*/distributions/(distribution|constraints|kl)\.py",
     "torch.distributions checks the values of its arguments", "pass validate_args=False to the distribution"),
    (r"(?is)(pack|pad)_(padded|packed)?_?sequence|(data.dependent|failed to unpack the object).*/nn/modules/rnn\.py",
     "the shapes of packed sequences depend on their lengths",
     "pad the sequences, run the layer on the padded batch, and mask what is behind each end"),
    (r"_nested_|nested_tensor|/torch/nested/",
     "a nested tensor has no one shape to shard", "pad it (torch.nested.to_padded_tensor) and give a mask"),
    (r"missing a required argument|too many positional arguments|got an unexpected keyword argument",
     "", "give example inputs that its forward accepts, one for each argument without a default"),
    (r"(?is)data.dependent.*/nn/modules/batchnorm\.py", "BatchNorm(momentum=None) weighs a batch by the number of batches before it",
     "give it a momentum"),
    (r"memo disaster|DynamicOutputShape|UnbackedSymbol|(?i:data.?dependent)", "its shapes or its control flow depend on the data",
     "compute the whole with masks, experts with batched or grouped matmuls"),
    (r"maximum recursion depth", "its modules are nested deeper than Python's recursion limit allows",
     "flatten them, or call sys.setrecursionlimit(10000) where the model is built"),
    (r"Constant .* is mutated in the forward|mutating a non-functional tensor|Unexpected fake buffer",
     "the forward writes into a tensor that is no buffer of the module",
     "register it with register_buffer, or pass it (or the cache that holds it) as an input"),
    (r"_checkpoint_context_fn|Tensor dtype mismatch! Expected",
     "torch.utils.checkpoint or torch.autocast is in a graph that was traced before",
     "give the model itself to autoshard.plan, and run what parallelize returns"),
    (r"^invalid syntax \(proxy_tensor", "torch can't write a call of random_ with two bounds", "use torch.randint"),
)  # fmt: skip


class WithoutAutograd(TorchFunctionMode):
    """Refuses autograd inside a forward, where its result would be a constant of the program; torch.func may call it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_alone = functorch.peek_interpreter_stack() is None
        if is_alone and func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            raise RuntimeError(f"torch.autograd.{func.__name__} is called")
        return func(*args, **(kwargs or {}))


def leave_transforms() -> None:
    """Ends the levels of vmap and grad that an error inside them has left open."""
    functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)


@contextmanager
def explained(module: nn.Module):
    """Raises an error of the capture as ValueError: one sentence with the line of the model, where the error went through one."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    except (Exception, SystemExit) as error:  # the user's forward may raise anything
        frames = _frames(error)
        if isinstance(error, ValueError) and frames and frames[-1][0].startswith(_OWN):
            raise  # it is one sentence already
        raise ValueError(f"{type(module).__name__} can't be captured{_at(frames, module)}: {_sentence(error, frames)}") from error
    finally:
        leave_transforms()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _sentence(error: BaseException, frames: list[tuple[str, int, str]]) -> str:
    """The error's first line, with its meaning and what to change where those are known."""
    text = str(error).strip()
    raised = re.search(r"got (\w+Error\(['\"].+['\"]\))|raised exception (\w+\(.*\))", text)  # dynamo's first line does not name it
    first = next(filter(None, raised.groups())) if raised else text.splitlines()[0].strip() if text else ""
    if isinstance(error, KeyError | SystemExit) or not first or type(error).__module__ not in ("builtins", DYNAMO_ERRORS):
        first = f"{type(error).__name__}{f': {first}' if first else ''}"  # the message alone doesn't say what went wrong
    first = first.rstrip(".")
    files = (file for file, _, _ in frames if file.startswith(_TORCH))
    through = " ".join([type(error).__name__, re.sub(rf"{re.escape(_OWN)}\S+", "", text), *(name for _, _, name in frames), *files])
    for pattern, means, change in CHANGES:
        if re.search(pattern, through):
            return f"{means} ({first}); {change}" if means else f"{first}; {change}"
    return first


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that the error went through: those in dynamo's message, then those of the traceback."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in getattr(error, "real_stack", None) or ()]
    frames += _frames_in(str(error))
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def _frames_in(text: str) -> list[tuple[str, int, str]]:
    """File, line and function of each frame in a printed stack trace."""
    return [(name, int(line), function) for name, line, function in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)]


def line_of(stack_trace: str) -> str:
    """` at file:line` of the deepest line outside of torch in the stack trace of a node; "" where there is none."""
    return _at(_frames_in(stack_trace), nn.Module())


def _at(frames: list[tuple[str, int, str]], module: nn.Module) -> str:
    """` at file:line` of the line of the model; "" where the error went through none."""
    sources = {_source(type(part)) for part in module.modules()}
    outside = [frame for frame in frames if not frame[0].startswith((_OWN, _TORCH, "<"))]
    outside = [frame for frame in outside if "site-packages" in frame[0] or not frame[0].startswith(_LIBRARY)]
    model_frames = [frame for frame in outside if frame[0] in sources] or outside
    return f" at {model_frames[-1][0]}:{model_frames[-1][1]}" if model_frames else ""


def _source(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except (TypeError, OSError):  # it was defined at a prompt
        return None
