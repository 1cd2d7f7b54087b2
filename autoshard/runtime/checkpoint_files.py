"""The files of a checkpoint, written and read through torch.distributed.checkpoint (DCP). Reading them runs nothing that is in them.

    manifest.json    bytes and SHA-256 of every file, names and shapes of the tensors, the digest of the plan   (`Writer`)
    .metadata        DCP's index: where each part of each tensor is; a pickle, read by `solution.pickles`        (`index_of`)
    __0_0.distcp     entries of torch.save, one after the other: uncompressed archives, read with weights_only   (`Reader`, `PlainPlanner`)

Folders that DCP itself wrote have no manifest; there the checksums that torch.save keeps in every entry are checked.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autoshard.reading import content_of, data_of, file_facts
from autoshard.solution import Inert, record, unpickled, write
from autoshard.torch_private import INDEX_CALLS, ReaderView, StorageInfo, pytree, set_element

INDEX, MANIFEST = ".metadata", "manifest.json"
OURS = "autoshard"  # noted in the index of a folder that has a manifest


@dataclass(frozen=True)
class Written(WriteResult):
    """An entry that was written, with bytes and SHA-256 of its file."""

    facts: dict[str, Any] = field(default_factory=dict)


class Writer(dcp.FileSystemWriter):
    """Writes a manifest, too: each rank knows its own files, the first one collects what they know. plan: its digest."""

    def __init__(self, path: Path, plan: str):
        super().__init__(path)
        self.plan = plan

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        facts = {name: file_facts(Path(self.path) / name) for name in {result.storage_data.relative_path for result in results}}
        future: Future[list[WriteResult]] = Future()
        future.set_result([Written(**vars(result), facts=facts[result.storage_data.relative_path]) for result in results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files = {INDEX: file_facts(Path(self.path) / INDEX)}
        files |= {result.storage_data.relative_path: result.facts for rank in results for result in rank if isinstance(result, Written)}
        tensors = {
            name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        write({"format": "autoshard.checkpoint/1", "plan": self.plan, "files": files, "tensors": tensors}, Path(self.path) / MANIFEST)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(modules=[OURS])


@dataclass(frozen=True)
class Contents:
    """What a folder's index and its manifest say. files: bytes and SHA-256 by name; None without a manifest."""

    index: Metadata
    files: Mapping[str, Mapping[str, Any]] | None

    @property
    def names(self) -> list[str]:
        """Of all files, in an order in which their sizes fall."""
        if (files := self.files) is not None:
            return sorted(files, key=lambda name: (-files[name]["bytes"], name))
        return sorted({entry.relative_path for entry in self.index.storage_data.values()})


def contents(path: Path) -> Contents:
    """Of a checkpoint's folder, without its shards. ValueError where they can't be."""
    index = index_of(path / INDEX)
    noted = index.storage_meta is not None and OURS in index.storage_meta.modules
    files = data_of(path / MANIFEST, "checkpoint")["files"] if noted or (path / MANIFEST).exists() else None
    held = {INDEX, *(entry.relative_path for entry in index.storage_data.values())}
    if files is not None and (other := sorted(held ^ files.keys())):
        raise ValueError(f"{path / MANIFEST} and {path / INDEX} don't belong together: one of them lacks {other[0][:80]}")
    return Contents(index, files)


def why_broken(path: Path, of: Contents, rank: int, world: int) -> str | None:
    """The first of this rank's share of the files that is missing, truncated or changed, in words."""
    reader = Reader(path, of.index)
    files = of.files
    for name in of.names[rank::world]:
        try:
            if files is None:
                reader.check(name)
            elif (actual := file_facts(path / name)) != (saved := files[name]):
                changed = f"has {actual['bytes']} bytes" if actual["bytes"] != saved["bytes"] else "has changed since it was saved"
                return f"{path / name} {changed}, the manifest says {saved['bytes']} bytes with another SHA-256"
        except FileNotFoundError:
            return f"there is no file {path / name}"
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            return f"{path / name} can't be read: {str(error)[:200]}"
    return None


class View(ReaderView):
    """A part of a file as a file; torch's own counts from its end into the wrong direction."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return super().seek(self.len + offset if whence == os.SEEK_END else offset, os.SEEK_CUR if whence == os.SEEK_CUR else os.SEEK_SET)


class Reader(dcp.FileSystemReader):
    """Reads shards by an index that has been read already."""

    def __init__(self, path: Path, index: Metadata):
        super().__init__(path)
        self.index, self.transforms = index, self

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def transform_load_stream(self, item: dcp.planner.ReadItem, descriptors: Sequence[str], stream: IO[bytes]) -> IO[bytes]:
        """What DCP calls before it reads an entry. ValueError where that would be larger in memory than it is in the file."""
        with zipfile.ZipFile(stream) as archive:
            _check_stored(archive, stream)
        stream.seek(0)
        return stream

    def _slice_file(self, file: Any, sinfo: StorageInfo) -> IO[bytes]:
        return cast("IO[bytes]", View(file, sinfo.offset, sinfo.length))

    def check(self, name: str) -> None:
        """ValueError or BadZipFile where an entry of this file is truncated or changed, by the checksums that torch.save writes."""
        if not os.path.isfile(Path(self.path) / name):
            raise FileNotFoundError(name)
        with self.fs.create_stream(Path(self.path) / name, "rb") as file:
            for entry in self.index.storage_data.values():
                if entry.relative_path == name:
                    stream = self._slice_file(file, entry)
                    with zipfile.ZipFile(stream) as archive:
                        _check_stored(archive, stream)
                        if (bad := archive.testzip()) is not None:
                            raise ValueError(f"{bad} at byte {entry.offset} has changed since it was saved")


def _check_stored(archive: zipfile.ZipFile, stream: IO[bytes]) -> None:
    length = stream.seek(0, os.SEEK_END)
    members = archive.infolist()
    if any(member.compress_type for member in members) or sum(member.file_size for member in members) > length:
        raise ValueError("it holds compressed data, which torch.save never writes")


class PlainPlanner(dcp.DefaultLoadPlanner):
    """Loads values that aren't tensors without running them."""

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: IO[bytes]) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, map_location="cpu", weights_only=True))


def with_plain_numbers(state: Any) -> Any:
    """The same state with numpy's numbers as Python's, which are read back without running anything."""

    def plain(value: Any) -> Any:
        is_number = hasattr(value, "dtype") and hasattr(value, "item") and not isinstance(value, torch.Tensor)
        return value.item() if is_number and value.ndim == 0 else value

    return pytree.tree_map(plain, state)


def why_not_plain(extra: object) -> str | None:
    """Why the values could not be loaded again; None where they can be."""
    content = io.BytesIO()
    try:
        torch.save(extra, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        return f"extra holds what load_checkpoint would not read ({why}); give containers, numbers, text and tensors"
    return None


# -- the index ----------------------------------------------------------------------------------------------------------------------

DCP = "torch.distributed.checkpoint"
RECORDS = {
    **{
        name: f"{DCP}.metadata"
        for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")
    },
    "_StorageInfo": f"{DCP}.filesystem",
}


class Stated(Inert):
    """A record whose state is a tuple."""

    def __setstate__(self, state: object) -> None:
        self.state = state


class NotedCall:
    """What stands for a function: its calls are noted as their arguments."""

    __slots__ = ()

    def __call__(self, *args: object) -> tuple:
        return args

    def __setstate__(self, state: object) -> None:
        raise ValueError("it writes to a function")


def _names() -> dict[str, object]:
    """What stands for the classes and functions of DCP's index."""
    paths = (f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath"))
    dtypes = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    records = {f"{module}.{name}": record(name) for name, module in RECORDS.items()}
    records[f"{DCP}.metadata.TensorProperties"] = record("TensorProperties", Stated)
    return {**dict.fromkeys((*INDEX_CALLS, *paths), NotedCall()), **dtypes, **records}


def index_of(path: Path) -> Metadata:
    """DCP's index as its own records, of values that were checked. ValueError in one sentence where it is something else."""
    content = content_of(path, "index")
    data = unpickled(content, path, "index", _names(), len(content))
    try:
        return _index(data)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no sound index of a checkpoint ({str(error)[:80]}); copy the folder or save it again") from None


def _index(data: Any) -> Metadata:
    _check(data, "Metadata")
    tensors = {name: _tensor(entry) for name, entry in _items(data.state_dict_metadata, "names of tensors", str)}
    places = {_place(key): _entry(key, value) for key, value in _items(data.storage_data, "places of entries", Inert)}
    parts: dict[str, list] = {
        name: [tuple(part.offsets) for part in getattr(entry, "chunks", ())] or [None] for name, entry in tensors.items()
    }
    for name, offsets in parts.items():
        for k, offset in enumerate(offsets):
            if (name, offset) not in places:
                raise ValueError(f"it lacks the place of {name[:40]} at {offset}")
            entry = tensors[name]
            if offset is not None and places[name, offset][1].length < prod(entry.chunks[k].sizes) * entry.properties.dtype.itemsize:
                raise ValueError(f"the entry of {name[:40]} at {offset} is too short")
    if len(places) != sum(map(len, parts.values())):
        raise ValueError("it has places of tensors that it lacks")
    noted = getattr(data, "storage_meta", None)
    modules = [name for name in getattr(noted, "modules", ()) if isinstance(name, str)]
    return Metadata(tensors, storage_data=dict(places.values()), storage_meta=StorageMeta(modules=modules), version="1.0.0")


def _check(value: object, name: str) -> None:
    if not isinstance(value, Inert) or type(value).__name__ != name:
        raise ValueError(f"it holds a {type(value).__name__} instead of a {name}")


def _items(value: object, what: str, kind: type) -> Any:
    if not isinstance(value, dict) or not all(isinstance(key, kind) for key in value):
        raise ValueError(f"its {what} are a {type(value).__name__}")
    return value.items()


def _size(value: Any) -> torch.Size:
    """The argument of torch.Size: whole numbers that are not negative."""
    (numbers,) = value or ((),)
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"a size is {str(numbers)[:40]}")
    return torch.Size(numbers)


def _tensor(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    _check(entry, "TensorStorageMetadata")
    _check(entry.properties, "TensorProperties")
    dtype, size = entry.properties.state[0], _size(entry.size)
    parts = [ChunkStorageMetadata(_size(part.offsets), _size(part.sizes)) for part in entry.chunks]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype is {str(dtype)[:40]}")
    for part in parts:
        if not len(part.offsets) == len(part.sizes) == len(size) or any(a + n > m for a, n, m in zip(part.offsets, part.sizes, size)):
            raise ValueError(f"a part of a tensor of {tuple(size)} is {tuple(part.sizes)} at {tuple(part.offsets)}")
    if sum(prod(part.sizes) for part in parts) != prod(size):
        raise ValueError(f"the parts of a tensor of {tuple(size)} are not all of it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, parts)


def _place(key: Any) -> tuple[str, tuple[int, ...] | None]:
    _check(key, "MetadataIndex")
    if not isinstance(key.fqn, str):
        raise ValueError("a name is no text")
    offset = getattr(key, "offset", None)
    return key.fqn, None if offset is None else tuple(_size(offset))


def _entry(key: Any, value: Any) -> tuple[MetadataIndex, StorageInfo]:
    _check(value, "_StorageInfo")
    name, offset = _place(key)
    path, begin, length = value.relative_path, value.offset, value.length
    if not isinstance(path, str) or os.path.basename(path) != path or path in ("", ".", ".."):
        raise ValueError(f"the file {str(path)[:40]!r} is not in the folder")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (begin, length)):
        raise ValueError(f"an entry of {path[:40]} is {str(length)[:20]} bytes at {str(begin)[:20]}")
    if getattr(value, "transform_descriptors", None):
        raise ValueError("its entries are transformed by an extension, which load_checkpoint doesn't have")
    return MetadataIndex(name, offset), StorageInfo(path, begin, length)
