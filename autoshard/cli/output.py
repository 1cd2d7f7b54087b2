"""Where words go: the answer to stdout (tables, or one JSON object), progress and everything else to stderr."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autoshard.cli.patience import Patience, gives

PATIENCE = 2.0  # seconds until progress is shown
NARROW = 100  # columns, where nobody says how wide the terminal is


class Output(AbstractContextManager):
    """Holds one verb's output. Inside it, what others print goes to stderr, so that stdout holds the answer alone."""

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.stdout = sys.stdout
        self.others = redirect_stdout(sys.stderr)
        self.progress_shown = Quiet() if quiet else Bar() if Console(file=sys.stderr).is_terminal else Lines()

    def __enter__(self) -> Output:
        self.others.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress_shown.stop()
        self.others.__exit__(kind, error, trace)

    def progress(self, what: str, fraction: float) -> None:
        """Say what is being done and how much of it is (0 to 1)."""
        self.progress_shown.update(f"{what} (Ctrl-C {gives(what)})" if isinstance(self.progress_shown, Bar) else what, fraction)

    def answer(self, record: dict, table: Callable[[], RenderableType]) -> None:
        """Print the answer: the record under --json, else the table."""
        self.progress_shown.stop()
        if self.as_json:
            print(json.dumps(finite(record), allow_nan=False), file=self.stdout)
        else:
            self._print(table())

    def _print(self, table: RenderableType) -> None:
        console = Console(file=self.stdout, highlight=False)
        if console.is_terminal:
            console.print(table)
            return
        console.width = NARROW
        with console.capture() as captured:
            console.print(table)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()), file=self.stdout)

    def note(self, line: str) -> None:
        """One line to the side, not part of the answer."""
        if not self.quiet:
            complain(line)


class Quiet:
    """No progress."""

    def update(self, what: str, fraction: float) -> None: ...

    def stop(self) -> None: ...


class Lines(Quiet):
    """Progress where stderr is a file: one line per stage, from two seconds on, and one where a stage takes long."""

    def __init__(self) -> None:
        self.began, self.stage = time.monotonic(), ""
        self.patience = Patience(complain)
        self.patience.start()

    def update(self, what: str, fraction: float) -> None:
        stage = what.partition(":")[0]
        is_new = stage != self.stage and time.monotonic() - self.began > PATIENCE
        if is_new:
            self.stage = stage
            complain(f"{stage} ...")
        self.patience.doing(what, said=is_new)

    def stop(self) -> None:
        self.patience.stop()


class Bar(Quiet):
    """Progress on a terminal: a bar, from two seconds on."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False, redirect_stderr=False)
        self.task = self.bar.add_task("", total=1.0)
        self.over, self.lock = False, threading.Lock()
        self.timer = threading.Timer(PATIENCE, self._start)
        self.timer.daemon = True
        self.timer.start()

    def _start(self) -> None:
        with self.lock:
            if not self.over:
                self.bar.start()

    def update(self, what: str, fraction: float) -> None:
        self.bar.update(self.task, description=what, completed=fraction)

    def stop(self) -> None:
        with self.lock:
            self.over = True
        self.timer.cancel()
        self.bar.stop()


def complain(line: str) -> None:
    print(line, file=sys.stderr)


def finite(value: Any) -> Any:
    """The same with None in place of inf and nan, which JSON can't hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
