"""Files that are written completely or not at all.

What isn't a file, such as a device or a pipe, is written into and stays what it is. The content is first written to a temporary file, which
its process keeps locked: one that isn't locked belongs to a process that was killed, and the next write into its folder removes it.
"""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY = re.compile(r"\.autoshard-writing-\d+-\d+(\..*)?")  # the names of temporary files: process, count, ending


@contextmanager
def replacement(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file with the suffix of `path`. Its content becomes the content of `path` when the block ends without an exception.

        with replacement("plot.png") as beside:
            figure.savefig(beside)

    A file is replaced and keeps its mode (and owner, if root writes), a new one has the mode that the umask leaves. A link stays and its
    target is replaced, a device or a pipe gets the content. OSError where `path` is a folder or something else that is never a file, where
    its folder doesn't exist, and where the content can't be written, for example on a full disk. After an exception everything is as it
    was before.
    """
    given, path = path, destination(path)
    through = is_stream(path)
    folder = Path(tempfile.gettempdir()) if through else path.parent
    old = None if through or not path.exists() else path.stat()
    beside: Path | None = None
    try:
        _remove_leftovers(folder)
        handle, beside = _temporary(folder, path.suffix, 0o600 if through or old is not None else 0o666)
        try:
            yield beside
            if through:
                _pour(beside, path)
                return
            if old is not None:
                _liken(handle, old)
            os.replace(beside, path)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno is None or (error.filename is not None and str(error.filename) != str(beside)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(given)) from None  # it is this file that the user knows
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)


def write_atomically(content: str | bytes, path: str | os.PathLike[str], check: Callable[[bytes], object] | None = None) -> None:
    """Write text (UTF-8) or bytes, completely or not at all; OSError where that is impossible.

    check: the parser of the content's format, which reads it before it replaces anything. ValueError where it can't.
    """
    try:
        encoded = content.encode() if isinstance(content, str) else content
        if check is not None:
            check(encoded)
    except (ValueError, SyntaxError, RecursionError) as error:
        raise ValueError(f"{path} was not written: it could not be read back ({' '.join(str(error).split())[:200]})") from None
    with replacement(path) as beside:
        beside.write_bytes(encoded)


def write_json(data: object, path: str | os.PathLike[str], *, indent: int | None = None) -> None:
    """Write plain data as JSON, completely or not at all."""
    write_atomically(json_of(data, indent) + "\n", path)


def json_of(data: object, indent: int | None = None) -> str:
    """Plain data as JSON, with null in place of inf and nan, which JSON can't hold."""
    try:
        return json.dumps(data, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(data), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def _temporary(folder: Path, suffix: str, mode: int, count: int = 0) -> tuple[int, Path]:
    """A new file that this process has open and locked; the lock ends with the process. Where files can't be locked, leftovers stay."""
    path = folder / f".autoshard-writing-{os.getpid()}-{count}{suffix}"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return _temporary(folder, suffix, mode, count + 1)
    _lock(handle, fcntl.LOCK_EX)
    if os.fstat(handle).st_nlink:
        return handle, path
    os.close(handle)  # another process removed it before it was locked
    return _temporary(folder, suffix, mode, count + 1)


def _lock(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how)
    except OSError:
        return False
    return True


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that no process has locked."""
    if os.access(folder, os.R_OK):  # a folder may be written to but not listed
        for name in filter(TEMPORARY.fullmatch, os.listdir(folder)):
            _remove_unlocked(folder / name)


def _remove_unlocked(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # another user's, or gone
        return False
    try:
        if free := _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            path.unlink(missing_ok=True)
        return free
    except PermissionError:  # another user's, in a folder of all users
        return False
    finally:
        os.close(handle)


def _liken(handle: int, old: os.stat_result) -> None:
    """Give an open file the owner, where that is allowed, and the mode of an older one."""
    if os.geteuid() == 0:
        os.fchown(handle, old.st_uid, old.st_gid)
    if os.fstat(handle).st_mode != old.st_mode:
        os.fchmod(handle, stat.S_IMODE(old.st_mode))


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
