"""Python's search for reference cycles (its garbage collector): paused while only long-lived records are created, rarer in a command."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Pause Python's collector: everything that the block creates stays alive, and scanning it repeatedly takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def search_cycles_rarely() -> None:
    """For a process of one command: most of its objects live as long as it does, and are looked through in vain."""
    gc.set_threshold(5_000_000, 50, 100)
