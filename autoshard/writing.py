"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path`, with its ending: what the block wrote there gets the name `path` when the block ends well.

        with whole("plot.png") as beside:
            figure.savefig(beside)

    OSError where `path` is a folder or lies in none. A block that raises leaves what there was before, and nothing else.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file to write")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into; make it first")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        beside.chmod(0o644)  # mkstemp makes it private
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(content: str | bytes, path: str | os.PathLike[str]) -> None:
    """Write text (UTF-8) or bytes whole or not at all; OSError where that can't be."""
    with whole(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
