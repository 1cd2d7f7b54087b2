"""A Solution in the formats of other tools."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from autoshard.solution import Solution
from autoshard.solution.files import PICKLE_SUFFIXES, json_text, write_whole

from .sharding_map import as_text, portable
from .sharding_map import sharding_map as sharding_map

KINDS = ("sharding_map", "json")


def export(solution: Solution, kind: str, path: str | os.PathLike[str] | None = None) -> Any:
    """The plan as `kind`; also written to `path`, whole or not at all, where one is given.

    sharding_map: `{module: {"node", "sharding": {attribute: DTensorSpec}}}`; a `.pkl` file holds the specs, any other the
    same map as JSON with layouts as text. json: `portable`, placements by parameter name.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no export {kind!r}; expected one of {', '.join(KINDS)}")
    value = sharding_map(solution) if kind == "sharding_map" else portable(solution)
    if path is not None:
        write_whole(_content(value, kind, Path(path)), path)
    return value


def _content(value: dict, kind: str, path: Path) -> bytes:
    if kind == "sharding_map" and path.suffix in PICKLE_SUFFIXES:
        return pickle.dumps(value)
    if path.suffix in PICKLE_SUFFIXES:
        raise ValueError(f"{path} asks for a pickle, but {kind} is text; name a file that ends in .json")
    return (json_text(as_text(value) if kind == "sharding_map" else value) + "\n").encode()
