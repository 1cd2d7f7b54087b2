"""Files that are written completely or not at all.

What isn't a file, such as a device or a pipe, is written into and stays what it is.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacement(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file with the suffix of `path`. Its content becomes the content of `path` when the block ends without an exception.

        with replacement("plot.png") as beside:
            figure.savefig(beside)

    A file is replaced, a link stays and its target is replaced, a device or a pipe gets the content. OSError where `path` is a folder or
    something else that is never a file, or where its folder doesn't exist. After an exception in the block everything is as it was before.
    """
    path = destination(path)
    through = is_stream(path)
    folder = Path(tempfile.gettempdir()) if through else path.parent
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        if through:
            _pour(beside, path)
        else:
            beside.chmod(0o644)  # mkstemp makes it private
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_atomically(content: str | bytes, path: str | os.PathLike[str]) -> None:
    """Write text (UTF-8) or bytes, completely or not at all; OSError where that is impossible."""
    with replacement(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def destination(path: str | os.PathLike[str]) -> Path:
    """The file that a write to `path` replaces or creates, after links; or the device or pipe that is written to. OSError if impossible."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file to write")
    if is_stream(path):
        return path
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is neither a file nor a pipe; give the name of a file to write")
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # a link that can't be resolved is a cycle
        raise OSError(f"{path} is a link to itself; give the name of a file to write")
    if not target.parent.is_dir():
        named = path if target == path.absolute() else target
        raise FileNotFoundError(f"there is no folder {named.parent}; make it first")
    return target


def is_stream(path: Path) -> bool:
    """Whether this is a pipe, a character device such as /dev/null, or a file that the process has open, by its number (/dev/stdout)."""
    if os.path.realpath(path.parent).startswith("/proc/") or (path.is_symlink() and os.readlink(path).startswith("/proc/")):
        return path.exists()
    return path.is_fifo() or path.is_char_device()


def _pour(source: Path, path: Path) -> None:
    """Write to a pipe or a device: no file is created, and a pipe without a reader is an error."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(f"{path} is a pipe that nobody reads; start its reader first") from None
        raise
    os.set_blocking(handle, True)
    with open(source, "rb") as content, open(handle, "wb") as stream:
        shutil.copyfileobj(content, stream)
