"""Plain data to a file and back: JSON to read and compare by eye, or a pickle; whole or not at all, and never code.

A pickle is a program. The reader here runs it with nothing to call: the only names that it may use are those of torch's
placement classes, which old plans hold, and even they are not torch's classes but records that say what was written.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path

from autoshard.writing import write_whole

LINE = 140  # characters; what fits is written in one line

PICKLE_SUFFIXES = (".pkl", ".pickle", ".dill")

PLACEMENT_MODULES = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")
PLACEMENT_NAMES = ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard")


def write(data: dict, path: str | os.PathLike[str]) -> None:
    """Write plain data, by suffix as a pickle or as JSON, through a temporary file in the same folder."""
    path = Path(path)
    content = pickle.dumps(data, protocol=4) if path.suffix in PICKLE_SUFFIXES else (json_text(data) + "\n").encode()
    write_whole(content, path)


def json_text(data: object, indent: int = 0) -> str:
    """JSON with one record per line: the two outer levels are spread over lines, what is inside them only if it is long."""
    line = json.dumps(data, ensure_ascii=False, allow_nan=False)
    if not isinstance(data, (dict, list)) or not data:
        return line
    items = data.values() if isinstance(data, dict) else data
    flat = not any(isinstance(item, (dict, list)) for item in items)
    if (flat or indent >= 4) and len(line) + indent <= LINE:
        return line
    pad = " " * (indent + 2)
    if isinstance(data, dict):
        rows = [f"{pad}{json.dumps(str(key), ensure_ascii=False)}: {json_text(item, indent + 2)}" for key, item in data.items()]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(pad + json_text(item, indent + 2) for item in data) + "\n" + " " * indent + "]"


def read(path: str | os.PathLike[str]) -> dict:
    """The dict that a file holds, JSON or pickle by content; ValueError that says in one sentence what is wrong with it."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a plan's file, as `autoshard plan --out` writes it")
    if not path.exists():
        raise ValueError(f"there is no file {path}; expected a plan's file, as `autoshard plan --out` writes it")
    content = path.read_bytes()
    if not content.strip():
        raise ValueError(f"{path} is empty; expected a plan, so write it again with `autoshard plan --out {path.name}`")
    data = _from_json(content, path) if content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in b"{[" else _from_pickle(content, path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not a plan; expected a file that `autoshard plan --out` wrote")
    return data


def _from_json(content: bytes, path: Path) -> object:
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        cut = "ends early" if error.pos >= len(error.doc.rstrip()) - 1 else f"is no sound JSON at line {error.lineno}, column {error.colno}"
        raise ValueError(f"{path} {cut} ({error.msg}); expected a whole plan, so copy it or write it again") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits, or nested without end
        raise ValueError(f"{path} is no sound JSON ({str(error)[:80]}); expected a plan, so copy it or write it again") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"it holds {name}")


class Inert:
    """Stands for a placement in a pickle: what was written are its class's name and its fields, none of it trusted."""


class _Reader(pickle.Unpickler):
    """Gives a pickle nothing to call but fresh empty classes, made for this file alone."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.refused = ""
        self.stubs = {name: type(name, (Inert,), {}) for name in PLACEMENT_NAMES}

    def find_class(self, module: str, name: str) -> type:
        if module in PLACEMENT_MODULES and name in self.stubs:
            return self.stubs[name]
        self.refused = f"{module}.{name}"
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("the pickle refers to objects outside itself")


def _from_pickle(content: bytes, path: Path) -> object:
    reader = _Reader(content)
    try:
        return reader.load()
    except Exception as error:  # a broken or hostile pickle can raise anything; none of it may reach the user as it is
        if reader.refused:
            raise ValueError(
                f"{path} wants to use {reader.refused[:80]}, which a plan never needs; it was not run, so take a plan from a source "
                "that you trust or plan again"
            ) from None
        if content[:1] != b"\x80":
            raise ValueError(f"{path} is neither JSON nor a pickle; expected a plan's file, as `autoshard plan --out` writes it") from None
        raise ValueError(f"{path} is no sound pickle ({str(error)[:80]}); expected a whole plan, so copy it or write it again") from None


def clear_folder(path: str | os.PathLike[str]) -> None:
    """Make an empty folder here, in place of what there is. OSError where that can't be."""
    path = Path(path)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def publish_folder(partial: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Give a folder that is complete its name; one that had the name goes when the new one is in place."""
    path, old = Path(path), Path(path).with_name(f".{Path(path).name}.old")
    if old.exists():
        shutil.rmtree(old)
    if path.exists():
        os.replace(path, old)
    os.replace(partial, path)
    if old.exists():
        shutil.rmtree(old)
