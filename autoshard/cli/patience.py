"""Progress lines of long waits: what a verb waits for, for how long so far, and what Ctrl-C does. No verb is silent for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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


class Patience:
    """Prints a line where none was printed for SILENCE seconds. say: prints a line. clock: in seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self.say, self.clock, self.what = say, clock, "starting"
        self.began = self.said = clock()
        self.over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        self.over.set()

    def doing(self, what: str, *, said: bool = False) -> None:
        """Note what is being done; said: whether a line has been printed about it."""
        self.what = what
        if said:
            self.said = self.clock()

    def look(self) -> None:
        """Print a line if it is due."""
        now = self.clock()
        if now - self.said >= SILENCE and not self.over.is_set():
            self.said = now
            self.say(f"{self.what}, {now - self.began:.0f} s so far; Ctrl-C {interrupt_effect(self.what)}")

    def _watch(self) -> None:
        while not self.over.wait(LISTEN):
            self.look()
