"""Writes plain data to files and reads it, as JSON for people or as a pickle. A file is written completely or not at all, and never run.

The content of a pickle (solution.pickles) must be as sound as JSON (reading.check_sound): a list that is referred to a thousand times
counts a thousand times.
"""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.reading import MOST_VALUES, check_sound, content_of, parsed
from autoshard.solution.pickles import unpickled
from autoshard.writing import write_atomically

LINE = 140  # characters; a record that fits is written in one line

PICKLE_SUFFIXES = (".pkl", ".pickle", ".dill")


def write(data: dict, path: str | os.PathLike[str]) -> None:
    """Write plain data, by suffix as a pickle or as JSON, through a temporary file in the same folder."""
    path = Path(path)
    if path.suffix in PICKLE_SUFFIXES:
        write_atomically(pickle.dumps(data, protocol=4), path)
    else:
        write_atomically(json_text(data) + "\n", path, json.loads)


VERIFIED = "verified"  # the assumption that says with what a plan was verified (Plan.verified)
# what decides what the ranks of a plan run; the rest of a plan says how it was found and what it costs
RUN = frozenset(
    "mesh layouts results training parameters peak_bytes assumptions home families switches devices keeps_state copies stages schedule "
    "microbatches".split()
)


def digest(data: Mapping[str, Any]) -> str:
    """A hash of what is run of a plan's plain data: equal for equal plans, whenever and wherever they were made."""
    kept: dict[str, Any] = {key: value for key, value in data.items() if key in RUN}
    kept["assumptions"] = {key: value for key, value in kept.get("assumptions", {}).items() if key != VERIFIED}
    kept["programs"] = {name: digest(program) for name, program in data.get("programs", {}).items()}
    return json_hash(kept)


def json_hash(data: object) -> str:
    """Of plain data, whatever the order of keys; equal on every machine."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


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
    data = parsed(content, path, "plan") if is_json else unpickled(content, path, "plan", {}, MOST_VALUES)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not a plan; expected a file that `autoshard plan --out` wrote")
    if not is_json:
        check_sound(data, path)
    return data


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
