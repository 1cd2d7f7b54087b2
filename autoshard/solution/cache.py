"""A cache of plans, by key exactly, by family those that are near: a folder, or any location of fsspec for a team.

    key       a hash of all that the plan depends on: graph, mesh, prices, options, version
    family    a hash of what near plans share: the operators, the mesh's shape; other sizes, prices or numbers of layers are near

A family is a folder in it, a plan a file there, as JSON and nobody's word: who reads one judges it (api.cached_plans). It is safe under
many processes and killed ones: an entry is there completely or not at all. In a folder of this machine what was used longest ago goes
first where the entries exceed `most_bytes`; other locations know no such order, and are pruned by `autoshard cache prune`.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.writing import write_atomically

MOST_BYTES = 1e9  # of all entries of a folder
LOOKED_AT = 20  # entries of a family
BEGINNING = b'{"key": "'  # of an entry's file


@dataclass(frozen=True)
class CacheEntry:
    key: str
    family: str
    facts: Mapping[str, Any]  # for people, and to choose among near ones
    text: str = ""  # the plan's file


class PlanCache:
    """The cache at the path of a folder, new or old, or at a URL (`memory://plans`, `s3://bucket/plans`)."""

    def __init__(self, location: str | os.PathLike[str], most_bytes: float = MOST_BYTES):
        import fsspec  # here: few plans are cached

        if not isinstance(location, (str, os.PathLike)) or not os.fspath(location):
            raise ValueError(f"cache is {location!r}; expected the path of a folder, or a URL")
        where, self.most_bytes = os.fsdecode(location), most_bytes
        try:
            self.files, self.root = fsspec.core.url_to_fs(where)
        except (ValueError, ImportError) as error:
            raise ValueError(f"cache {where}: {error}") from None
        self.is_local = "file" in self.files.protocol
        if self.is_local and os.path.isfile(self.root):
            raise ValueError(f"cache {where} is a file; expected a folder of plans, new or old: give another")

    def get(self, key: str, family: str) -> CacheEntry | None:
        path = self._path(key, family)
        entry = next(iter(self._read([path])), None)
        if entry is not None and self.is_local:
            _could(os.utime, path)  # not in a folder that can't be written, which serves its plans all the same
        return entry

    def put(self, entry: CacheEntry) -> None:
        """OSError where the location can't be written."""
        path, content = self._path(entry.key, entry.family), json.dumps(vars(entry)).encode()
        self.files.makedirs(os.path.dirname(path), exist_ok=True)
        if self.is_local:
            write_atomically(content, path)
            self.prune(self.most_bytes)
        else:
            self.files.pipe_file(path, content)  # object stores show it completely or not at all

    def near(self, family: str) -> list[CacheEntry]:
        """Of this family, in a folder of this machine the ones used last."""
        return self._read([*self._listed(family)][:LOOKED_AT])

    def entries(self) -> list[CacheEntry]:
        """All, in a folder of this machine the ones used last first."""
        return self._read(self._listed())

    def prune(self, most_bytes: float) -> int:
        """Removes what was used longest ago, until the rest has at most so many bytes; returns how many entries went. Files that are no
        entries stay, wherever the folder is."""
        kept, gone = 0, 0
        for path, num_bytes in self._listed().items():
            kept += num_bytes
            if kept > most_bytes and self._content(path, len(BEGINNING)) == BEGINNING:
                gone += _could(self.files.rm_file, path)
        return gone

    def _path(self, key: str, family: str) -> str:
        return f"{self.root}/{family}/{key}.json"

    def _listed(self, family: str = "") -> dict[str, int]:
        """The bytes of the entries by their paths, those used last first."""
        infos = self.files.find(f"{self.root}/{family}", detail=True)
        paths = (path for path in infos if path.count("/") == self.root.count("/") + 2)
        plans = (path for path in paths if path.endswith(".json") and not Path(path).name.startswith("."))  # dots: being written
        return {path: infos[path]["size"] for path in sorted(plans, key=lambda path: (-infos[path].get("mtime", 0.0), path))}

    def _read(self, paths: Iterable[str]) -> list[CacheEntry]:
        return [_of_file(path, content) for path in paths if (content := self._content(path)) is not None]

    def _content(self, path: str, most: int | None = None) -> bytes | None:
        try:
            return self.files.cat_file(path, end=most)
        except (FileNotFoundError, NotADirectoryError):
            return None  # another process may have pruned it
        except PermissionError as error:
            return json.dumps({str(error): None}).encode()  # no plan: who reads it says what it holds


def _could(change: Callable[[str], object], path: str) -> bool:
    """Changes a file; False where that is impossible: another process may have pruned it."""
    try:
        change(path)
        return True
    except OSError:
        return False


def _of_file(path: str, content: bytes) -> CacheEntry:
    """Of a torn file, an entry whose text is no plan: who reads that says so, and puts another in its place."""
    family, key = path.removesuffix(".json").split("/")[-2:]
    try:
        data = json.loads(content)
        return CacheEntry(key, family, dict(data["facts"]), str(data["text"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return CacheEntry(key, family, {"status": "no plan"}, content.decode(errors="replace"))
