"""The entry point of the command line. It handles Ctrl-C, and SIGTERM in the same way, before anything slow is imported."""

import gc
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"  # a bar may have hidden it


def main() -> int:
    """Run one verb and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # in the background it is ignored
        signal.signal(signal.SIGINT, _interrupted)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupted)
    from autoshard.cycles import search_cycles_rarely  # here, as what follows: it takes a moment

    search_cycles_rarely()
    from autoshard.cli import main as run

    code = run()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _interrupted:
            signal.signal(number, signal.SIG_IGN)  # the answer is out; what is left is to end
    gc.freeze()  # the interpreter's last search for cycles looks through all that is alive otherwise, up to 2 s
    return code


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Within an import nothing is known that could be lost, and an exception would come out as a traceback, or be swallowed."""
    names = []
    while frame is not None:
        names.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    importing = any(file.startswith("<frozen importlib") for file, _ in names)
    solving = any(file.endswith(os.path.join("solvers", "solve.py")) and name == "solve" for file, name in names)
    if importing and not solving:
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + b"autoshard: interrupted\n")
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
