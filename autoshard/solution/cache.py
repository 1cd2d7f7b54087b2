"""A cache of plans: by key exactly, by family those that are near. A SQLite file for one machine, or any fsspec location for a team.

    key       a hash of all that the plan depends on: graph, mesh, prices, options, version
    family    a hash of what near plans share: the operators, the mesh's shape; other sizes, prices or numbers of layers are near

Entries are plans as JSON, and nobody's word: who reads one judges it (api.cached_plans). The file is safe under many processes and killed
ones: an entry is there completely or not at all. What was used longest ago goes first where the entries exceed `most_bytes`; a location has
no such order, and is pruned by `autoshard cache prune`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 1e9  # of all entries of a file
SCHEMA = """BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS plans (key TEXT PRIMARY KEY, family TEXT, facts TEXT, plan BLOB, bytes INTEGER, used INTEGER);
CREATE INDEX IF NOT EXISTS families ON plans (family, used);
CREATE INDEX IF NOT EXISTS uses ON plans (used, bytes);
COMMIT;"""
CHANGES = (  # by the beginning of what SQLite says
    ("unable to open", "give the name of a file, new or old, in a folder that exists"),
    ("database is locked", "another process holds it: try again"),
    ("attempt to write a readonly", "it or its folder can't be written: plans are read from it, and none is kept"),
    ("disk I/O error", "its folder can't be written, or its disk is full"),
    ("", "it is no cache of plans, or damaged: remove it, or give another"),
)
WAIT = 60.0  # seconds for another process to finish writing
LOOKED_AT = 20  # entries of a family


@dataclass(frozen=True)
class CacheEntry:
    key: str
    family: str
    facts: Mapping[str, Any]  # for people, and to choose among near ones
    text: str = ""  # the plan's file


def open_cache(location: str | os.PathLike[str], most_bytes: float = MOST_BYTES) -> SQLiteCache | FsspecCache:
    """The cache at a path, or at a URL (`memory://plans`, `s3://bucket/plans`), which needs fsspec."""
    if not isinstance(location, (str, os.PathLike)) or not os.fspath(location):
        raise ValueError(f"cache is {location!r}; expected the path of a file, or a URL")
    where = os.fsdecode(location)
    return FsspecCache(where) if "://" in where else SQLiteCache(where, most_bytes)


class SQLiteCache:
    """One file."""

    def __init__(self, path: str, most_bytes: float = MOST_BYTES):
        self.path, self.most_bytes = path, most_bytes
        needed = (path, os.path.dirname(path) or ".")  # beside the file, SQLite writes its journal
        self.is_read_only = os.path.exists(path) and not all(os.access(one, os.W_OK) for one in needed)
        self._open: dict[tuple[int, int], sqlite3.Connection] = {}  # by process and thread: a fork or another thread has its own

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connection()
        except (sqlite3.DatabaseError, zlib.error, UnicodeDecodeError, json.JSONDecodeError) as error:
            told = ((start, change) for start, change in CHANGES if str(error).startswith(start))
            raise ValueError(f"cache {self.path}: {error}; {next(told)[1]}") from None

    def _connection(self) -> sqlite3.Connection:
        place = os.getpid(), threading.get_ident()
        if place not in self._open:
            where = Path(self.path).absolute().as_uri() + "?mode=ro&immutable=1" if self.is_read_only else self.path
            connection = sqlite3.connect(where, timeout=WAIT, isolation_level=None, uri=self.is_read_only)
            names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
            if names and "uses" not in names:
                raise sqlite3.DatabaseError(f"it has the tables of another program, such as {names[0]}")
            if not self.is_read_only:
                connection.execute("PRAGMA synchronous=NORMAL")
                if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    connection.execute("PRAGMA journal_mode=WAL")
                if not names:
                    connection.executescript(SCHEMA)
            self._open[place] = connection
        return self._open[place]

    def get(self, key: str, family: str = "*") -> CacheEntry | None:
        with self._connected() as connection:
            row = connection.execute("SELECT key, family, facts, plan FROM plans WHERE key = ?", (key,)).fetchone()
            if row is not None and not self.is_read_only:
                connection.execute("UPDATE plans SET used = (SELECT max(used) FROM plans) + 1 WHERE key = ?", (key,))
        return None if row is None else _entry(row)

    def put(self, entry: CacheEntry) -> None:
        blob = zlib.compress(entry.text.encode())
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "INSERT OR REPLACE INTO plans VALUES (?, ?, ?, ?, ?, (SELECT coalesce(max(used), 0) + 1 FROM plans))",
                (entry.key, entry.family, json.dumps(dict(entry.facts)), blob, len(blob)),
            )
            self._shrink(connection, self.most_bytes)
            connection.execute("COMMIT")

    def near(self, family: str) -> list[CacheEntry]:
        """Of this family, the ones used last first."""
        with self._connected() as connection:
            query = "SELECT key, family, facts, plan FROM plans WHERE family = ? ORDER BY used DESC LIMIT ?"
            return [_entry(row) for row in connection.execute(query, (family, LOOKED_AT))]

    def entries(self) -> list[CacheEntry]:
        """All, without their plans, the ones used last first."""
        with self._connected() as connection:
            return [_entry((*row, None)) for row in connection.execute("SELECT key, family, facts FROM plans ORDER BY used DESC")]

    def prune(self, most_bytes: float) -> int:
        """Removes what was used longest ago, until the rest has at most so many bytes; returns how many entries went."""
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            gone = self._shrink(connection, most_bytes)
            connection.execute("COMMIT")
        return gone

    def _shrink(self, connection: sqlite3.Connection, most_bytes: float) -> int:
        summed = "SELECT used, sum(bytes) OVER (ORDER BY used DESC) AS kept FROM plans"
        return connection.execute(f"DELETE FROM plans WHERE used IN (SELECT used FROM ({summed}) WHERE kept > ?)", (most_bytes,)).rowcount


class FsspecCache:
    """A folder per family, a file per plan."""

    def __init__(self, url: str):
        try:
            import fsspec  # here: only locations need it
        except ModuleNotFoundError:
            raise ValueError(f"cache {url} is a URL, which needs fsspec: pip install fsspec; or give the path of a file") from None
        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ValueError(f"cache {url}: {error}") from None

    def get(self, key: str, family: str = "*") -> CacheEntry | None:
        """family: the entry's, where it is known; all folders are searched otherwise."""
        paths = self.files.glob(f"{self.root}/*/{key}.json") if family == "*" else [f"{self.root}/{family}/{key}.json"]
        return next(iter(self._read(paths)), None)

    def _read(self, paths: Iterable[str]) -> list[CacheEntry]:
        return [_of_file(path, content) for path in paths if (content := self._content(path)) is not None]

    def _content(self, path: str) -> bytes | None:
        try:
            return self.files.cat_file(path)
        except FileNotFoundError:
            return None  # another process may have pruned it

    def put(self, entry: CacheEntry) -> None:
        path, content = f"{self.root}/{entry.family}/{entry.key}.json", json.dumps(vars(entry)).encode()
        self.files.makedirs(f"{self.root}/{entry.family}", exist_ok=True)
        if "file" not in self.files.protocol:
            self.files.pipe_file(path, content)  # object stores show it completely or not at all
            return
        partial = f"{path}.{id(content)}-{hash(content)}.partial"
        self.files.pipe_file(partial, content)
        self.files.mv(partial, path)

    def near(self, family: str) -> list[CacheEntry]:
        return self._read(sorted(self.files.glob(f"{self.root}/{family}/*.json"))[:LOOKED_AT])

    def entries(self) -> list[CacheEntry]:
        return self._read(sorted(self.files.glob(f"{self.root}/*/*.json")))

    def prune(self, most_bytes: float) -> int:
        """Removes files in the order of their names, until the rest has at most so many bytes; returns how many went."""
        paths = sorted(self.files.glob(f"{self.root}/*/*.json"))
        sizes = [self.files.size(path) for path in paths]
        gone = next(k for k in range(len(paths) + 1) if sum(sizes[k:]) <= most_bytes)
        for path in paths[:gone]:
            self.files.rm_file(path)
        return gone


def _entry(row: tuple) -> CacheEntry:
    key, family, facts, plan = row
    return CacheEntry(key, family, json.loads(facts), "" if plan is None else zlib.decompress(plan).decode())


def _of_file(path: str, content: bytes) -> CacheEntry:
    """Of a torn file, an entry whose text is no plan: who reads that says so, and puts another in its place."""
    family, key = path.removesuffix(".json").split("/")[-2:]
    try:
        data = json.loads(content)
        return CacheEntry(key, family, dict(data["facts"]), str(data["text"]))
    except (ValueError, TypeError, KeyError):
        return CacheEntry(key, family, {"status": "no plan"}, content.decode(errors="replace"))
