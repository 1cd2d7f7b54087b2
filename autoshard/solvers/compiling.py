"""Loops that numba compiles. Where it is not installed, or doesn't go with this numpy, they run as they stand: the same bits, slower."""

import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType


@cache
def numba() -> ModuleType | None:
    """The module; None, which is said once, where it can't be imported. The import takes a third of a second."""
    try:
        import numba  # here: see above
    except ImportError as error:
        warnings.warn(f"loops are not compiled, and large plans take longer ({error}): pip install 'autoshard[fast]'", stacklevel=2)
        return None
    return numba


def compiled(loop: Callable) -> Callable:
    """The loop, compiled when it is first called."""
    library = numba()
    return loop if library is None else library.njit(cache=True, nogil=True)(loop)
