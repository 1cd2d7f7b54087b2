"""What stops a capture, as one sentence that names the model's own line; torch's own words about it are kept off the terminal."""

from __future__ import annotations

import inspect
import logging
import re
from contextlib import contextmanager

import torch._dynamo
from torch import nn

_STOPS = (RuntimeError, TypeError, AssertionError, AttributeError, NotImplementedError, KeyError, IndexError)
_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")  # they print tracebacks of what we say in a sentence


@contextmanager
def explained(module: nn.Module):
    """Turns what stops a capture into one sentence with the model's own line, where there is one."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    except ValueError:
        raise
    except (*_STOPS, torch._dynamo.exc.TorchDynamoException) as error:
        line = model_line(error, type(module))
        said = re.search(r"got \w+Error\(['\"](.+)['\"]\)", str(error))  # dynamo's own first line does not say what went wrong
        first = said[1] if said else str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "memo disaster" in first or "data-dependent" in first.lower():
            change = "compute the whole with masks, experts with batched or grouped matmuls"
            first = f"its shapes or its control flow depend on the data ({first}); {change}"
        raise ValueError(f"{type(module).__name__} can't be captured{line}: {first}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def model_line(error: BaseException, kind: type) -> str:
    """` at file:line` of the deepest frame in the file that defines the module, from the error's traceback or dynamo's message."""
    try:
        source: str | None = inspect.getsourcefile(kind)
    except TypeError:
        source = None
    if not source:
        return ""
    lines = [int(line) for name, line in re.findall(r'File "([^"]+)", line (\d+)', str(error)) if name == source]
    lines += [frame.lineno for frame in getattr(error, "real_stack", None) or () if frame.filename == source]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == source:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" at {source}:{lines[-1]}" if lines else ""
