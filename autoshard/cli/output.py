"""Output of the command line: the answer to stdout (tables, or one JSON object), progress and everything else to stderr.

Names in files are not trusted, and a terminal executes the control characters that are written to it. So all text is printed through
`visible`, which escapes control characters, and no name is interpreted as markup.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from autoshard.writing import json_of

PATIENCE = 2.0  # seconds until progress is shown
NARROW = 80  # columns, where neither a terminal nor COLUMNS says how many
KNOWN = "found a plan"  # progress that stays on the screen
WIDEST = 10_000  # columns: wider than any table


class Output(AbstractContextManager):
    """The output of one verb. Inside the context, prints of other code go to stderr, so that stdout holds the answer alone."""

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.stdout = sys.stdout
        self.others = redirect_stdout(sys.stderr)
        self.progress_shown = Quiet() if quiet else Bar() if Console(file=sys.stderr).is_terminal else Lines().watching()

    def __enter__(self) -> Output:
        self.others.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress_shown.stop()
        self.others.__exit__(kind, error, trace)

    def progress(self, what: str, fraction: float) -> None:
        """Say what is being done and how much of it is (0 to 1)."""
        assert 0 <= fraction <= 1, (what, fraction)
        self.progress_shown.update(f"{what} (Ctrl-C {interrupt_effect(what)})" if isinstance(self.progress_shown, Bar) else what, fraction)

    def answer(self, record: dict, table: Callable[[], RenderableType]) -> None:
        """Print the answer: the record under --json, else the table."""
        self.progress_shown.stop()
        if self.as_json:
            print(json_of(record), file=self.stdout)
        else:
            self._print(Visible(table()))

    def write(self, path: str | None, write: Callable[[str], object], more: str = "") -> None:
        """Write a result to the path, where there is one, and say so."""
        if path is not None:
            write(path)
            self.note(f"wrote {path}{more}")

    def plain(self, text: str) -> None:
        """Print text with its own line breaks: rich would wrap or crop long lines."""
        print(visible(text), file=self.stdout)

    def _print(self, table: RenderableType) -> None:
        console = Console(file=self.stdout, highlight=False, markup=False, emoji=False)
        if console.is_terminal:
            console.print(table, crop=False)
            return
        console.width = shutil.get_terminal_size((NARROW, 24)).columns
        with console.capture() as captured:
            console.print(table, crop=False)
        print("\n".join(line.rstrip() for line in captured.get().split("\n")[:-1]), file=self.stdout)

    def note(self, line: str) -> None:
        """Print one line to stderr, not part of the answer."""
        if not self.quiet:
            complain(line)


class Quiet:
    """No progress."""

    def update(self, what: str, fraction: float) -> None: ...

    def stop(self) -> None: ...


class Bar(Quiet):
    """Progress on a terminal: a bar, from two seconds on."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False, redirect_stderr=False)
        self.task = self.bar.add_task("", total=1.0)
        self.over, self.lock, self.began = False, threading.Lock(), time.monotonic()
        self.timer = threading.Timer(PATIENCE, self._start)
        self.timer.daemon = True
        self.timer.start()

    def _start(self) -> None:
        with self.lock:
            if not self.over:
                self.bar.start()

    def update(self, what: str, fraction: float) -> None:
        if what.startswith(KNOWN) and time.monotonic() - self.began > PATIENCE:
            self.bar.console.print(visible(what.partition(" (Ctrl-C")[0]), markup=False, highlight=False)
        self.bar.update(self.task, description=" ".join(visible(what).split()), completed=fraction)

    def stop(self) -> None:
        with self.lock:
            self.over = True
        self.timer.cancel()
        self.bar.stop()


def say(line: str) -> None:
    print(visible(line))


def complain(line: str) -> None:
    print(visible(line), file=sys.stderr)


def visible(text: str) -> str:
    """The text with every character that can't be seen, but for spaces and the ends of lines, written as JSON escapes it: \\u001b."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(c: str) -> str:
    return c if c.isprintable() or c == "\n" or unicodedata.category(c) == "Zs" else json.dumps(c)[1:-1]


class Visible:
    """A renderable whose text is `visible`; its styles stay."""

    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fit(self.renderable, console, options.max_width)
        for segment in console.render(self.renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def fit(renderable: RenderableType, console: Console, width: int) -> None:
    """Make tables show every character of their cells within `width` columns. A wider table loses its lines, then words are folded."""
    for part in renderable.renderables if isinstance(renderable, Group) else (renderable,):
        if isinstance(part, Group):
            fit(part, console, width)
        elif isinstance(part, Table):
            widest = console.options.update(max_width=WIDEST)
            if part.box is not None and part.__rich_measure__(console, widest).maximum > width:
                part.box, part.padding = None, (0, 1, 0, 0)
            fixed = [column for column in part.columns if column.no_wrap]
            if sum(max(Measurement.get(console, widest, cell).maximum + 2 for cell in column.cells) for column in fixed) > width:
                for column in fixed:
                    column.no_wrap = False
            for column in part.columns:
                column.overflow = "fold"


class VisibleLines(logging.Formatter):
    """Lines of a log, `visible`."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


# -- where nothing is printed for long ----------------------------------------------------------------------------------------------


SILENCE = 9.0  # seconds without a line
LISTEN = 0.5  # seconds between checks of the clock

# What Ctrl-C does, by the beginning of what is being done; the longest beginning that matches counts.
INTERRUPT_EFFECTS = {
    "": "ends it without an answer",
    "solving": "ends the search: the best plan so far, if there is one, is the answer",
    "solving the baselines": "ends it without an answer",
    "mesh ": "ends the search on this mesh, or all of it where nothing is found yet",
    **dict.fromkeys(("searching", "improving", "proving", "bounding again"), "ends the search: the best plan so far is the answer"),
    "measuring": "ends it: what was measured so far is written",
    "found a plan": "leaves out what is beside it",
    "pricing schemes of modules": "leaves this out: the plan is known",
    "pricing padded parameters": "leaves this out: the plan is known",
    "pricing the pins": "leaves this out: the plan is known",
    "looking for what conflicts": "ends it without the reason",
}


def interrupt_effect(what: str) -> str:
    """What Ctrl-C does while this is done."""
    return INTERRUPT_EFFECTS[max((beginning for beginning in INTERRUPT_EFFECTS if what.startswith(beginning)), key=len)]


class Lines(Quiet):
    """Progress where stderr is a file: a line per stage, from two seconds on, and one where none was printed for SILENCE seconds.

    say: prints a line. clock: in seconds.
    """

    def __init__(self, say: Callable[[str], None] = complain, clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self.clock, self.what, self.stage = say, clock, "starting", ""
        self.began = self.said = clock()
        self.over = threading.Event()

    def watching(self) -> Lines:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def stop(self) -> None:
        self.over.set()

    def update(self, what: str, fraction: float) -> None:
        self.what, stage = what, what.partition(":")[0]
        if stage != self.stage and self.clock() - self.began > PATIENCE:
            self.stage, self.said = stage, self.clock()
            self.say(f"{stage} ...")

    def look(self) -> None:
        """Print a line if it is due."""
        now = self.clock()
        if now - self.said >= SILENCE and not self.over.is_set():
            self.said = now
            self.say(f"{self.what}, {now - self.began:.0f} s so far; Ctrl-C {interrupt_effect(self.what)}")

    def _watch(self) -> None:
        while not self.over.wait(LISTEN):
            self.look()
