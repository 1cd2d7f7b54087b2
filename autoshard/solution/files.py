"""Writes plain data to files and reads it, as JSON for people or as a pickle. A file is written completely or not at all, and never run.

A pickle is a program. The reader first checks its opcodes: it accepts only those that picklers write for plain data and for placements,
with a memo that is counted up as picklers do. Then it runs the program without anything that could be called: the only names allowed are
those of torch's placement classes, which old plans hold, and these stand for records of the written fields instead of torch's classes.
The result must be as sound as JSON (reading.check_sound): a list that is referred to a thousand times counts a thousand times.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import pickletools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.reading import FORMATS, MOST_VALUES, check_sound, content_of, parsed
from autoshard.writing import write_atomically

LINE = 140  # characters; a record that fits is written in one line

PICKLE_SUFFIXES = (".pkl", ".pickle", ".dill")

PLACEMENT_MODULES = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")
PLACEMENT_NAMES = ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard")


def write(data: dict, path: str | os.PathLike[str]) -> None:
    """Write plain data, by suffix as a pickle or as JSON, through a temporary file in the same folder."""
    path = Path(path)
    content = pickle.dumps(data, protocol=4) if path.suffix in PICKLE_SUFFIXES else (json_text(data) + "\n").encode()
    write_atomically(content, path)


# what decides what the ranks of a plan run; the rest of a plan says how it was found and what it costs
RUN = frozenset(
    "mesh layouts results training parameters peak_bytes assumptions home families switches devices keeps_state copies stages schedule "
    "microbatches".split()
)


def digest(data: Mapping[str, Any]) -> str:
    """A hash of what is run of a plan's plain data: equal for equal plans, whenever and wherever they were made."""
    kept: dict[str, Any] = {key: value for key, value in data.items() if key in RUN}
    kept["programs"] = {name: digest(program) for name, program in data.get("programs", {}).items()}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def json_text(data: object, indent: int = 0) -> str:
    """JSON with one record per line: the two outer levels have a line per item, inner levels only if they are long."""
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
    """The dict in a file, whose content shows whether it is JSON or a pickle; ValueError in one sentence where something is wrong."""
    content = content_of(path, "plan")
    is_json = content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[", b"")
    data = parsed(content, path, "plan") if is_json else _from_pickle(content, path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not a plan; expected a file that `autoshard plan --out` wrote")
    if not is_json:
        check_sound(data, path, Inert)
    return data


class Inert:
    """A placement of a pickle: the name of its class and its fields as they were written, none of them trusted."""


class _Closed(type):
    """A class of which a pickle can create records without arguments, and which it can neither call nor write to."""

    def __call__(cls, *args: object, **options: object) -> object:
        raise pickle.UnpicklingError("it calls a class")

    def __setstate__(cls, state: object) -> None:
        raise pickle.UnpicklingError("it writes to a class")


class _Reader(pickle.Unpickler):
    """Lets a pickle create records of empty classes, which exist for this file alone, and call nothing."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.refused = ""
        self.stubs = {name: _Closed(name, (Inert,), {}) for name in PLACEMENT_NAMES}

    def find_class(self, module: str, name: str) -> type:
        if module in PLACEMENT_MODULES and name in self.stubs:
            return self.stubs[name]
        self.refused = f"{module}.{name}"
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("the pickle refers to objects outside itself")


OPCODES = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE INT BININT BININT1 "
    "BININT2 LONG LONG1 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST LIST "
    "APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL NEWOBJ BUILD "
    "REDUCE PERSID BINPERSID".split()  # the reader refuses the last three: it can say what they want to use
)
PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


def _check_opcodes(content: bytes) -> None:
    """UnpicklingError on opcodes that picklers don't write for a plan; ValueError (of pickletools) on other or missing bytes."""
    saved = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in OPCODES:
            raise pickle.UnpicklingError(f"it uses {opcode.name}, which no plan needs")
        if count > MOST_VALUES:
            raise pickle.UnpicklingError(f"it has more than {MOST_VALUES} opcodes")
        if opcode.name in PUTS and argument is not None and not 0 <= argument <= saved:
            raise pickle.UnpicklingError(f"it saves value {argument} of {saved}")  # the memo is an array as long as the largest index
        saved += opcode.name in PUTS or opcode.name == "MEMOIZE"


def _from_pickle(content: bytes, path: str | os.PathLike[str]) -> object:
    reader = _Reader(content)
    try:
        _check_opcodes(content)
        return reader.load()
    except Exception as error:  # a broken or hostile pickle can raise anything, and the user gets one of our sentences
        if reader.refused:
            raise ValueError(
                f"{path} wants to use {reader.refused[:80]}, which a plan never needs; it was not run, so take a plan from a source "
                "that you trust or plan again"
            ) from None
        if content[:1] != b"\x80":
            raise ValueError(f"{path} is neither JSON nor a pickle; expected {FORMATS['plan'].expected}") from None
        raise ValueError(f"{path} is no sound pickle ({str(error)[:80]}); expected a whole plan, so copy it or write it again") from None


def clear_folder(path: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Create an empty folder in place of whatever is there. OSError where that is impossible, and where `final`, the folder's later name,
    is something else than a folder."""
    path = Path(path)
    if os.path.lexists(final) and not Path(final).is_dir():
        raise NotADirectoryError(f"{final} is not a folder; give a folder, or a name that is free")
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def publish_folder(partial: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Rename a complete folder to its final name; an older folder of that name is removed when the new one is in place."""
    path, old = Path(path), Path(path).with_name(f".{Path(path).name}.old")
    if old.exists():
        shutil.rmtree(old)
    if path.exists():
        os.replace(path, old)
    os.replace(partial, path)
    if old.exists():
        shutil.rmtree(old)
