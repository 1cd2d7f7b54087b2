"""Work in a process of its own that ends where it takes more memory or time of the processor than it may."""

import os
import pickle
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MB = 2**20


def in_bounds(work: Callable[[], Any], *, megabytes: int = 300, seconds: int = 20) -> Any:
    """What `work()` returns, or the exception that it raises, in a fork of this process; "killed" where it takes more than it may.

    megabytes: of address space beyond what this process has. seconds: of the processor, a patience that only runaway work exceeds.
    """
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        answer: Any = "killed"
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * MB,) * 2)
        spent = sum(os.times()[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + seconds,) * 2)
        try:
            answer = work()
        except (MemoryError, RecursionError):
            answer = "killed"
        except BaseException as error:
            answer = error if isinstance(error, ValueError) else "".join(traceback.format_exception(error))
        finally:
            with os.fdopen(writable, "wb") as stream:
                stream.write(pickle.dumps(answer))
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as stream:
        content = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(content) if content else "killed"
