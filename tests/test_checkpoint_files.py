"""Checkpoints of strangers and damaged ones: nothing in them is run, a missing, truncated or changed file is one sentence on all ranks."""

import copy
import io
import json
import os
import pickle
import resource
import shutil
import signal
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import autoshard
from autoshard.reading import file_facts
from autoshard.runtime.checkpoint_files import INDEX, MANIFEST, PlainPlanner, Reader, Writer, contents, why_broken
from autoshard.runtime.checkpoints import _misfit
from models import mlp
from tests.helpers import fast_mesh
from tests.helpers_models import full, parallel
from tests.helpers_models import said as refused_with
from tests.helpers_ranks import results, run_ranks
from tests.test_parallelize import perceptron

EXTRA = {"step": 3, "rates": [0.1, {"a": (1, 2.5, None)}], 7: "sieben", "draws": torch.arange(4)}


def state(extra=EXTRA) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {"model": {"w": torch.randn(64, 8, generator=generator), "b": torch.zeros(5, dtype=torch.bfloat16)}, "extra": (extra,)}


def written(folder: Path, *, manifest: bool) -> Path:
    """A checkpoint of one process, as save_checkpoint writes it, or as torch alone does."""
    dcp.save(state(), storage_writer=Writer(folder, "0123") if manifest else dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def loaded(folder: Path) -> dict:
    """What load_checkpoint does on a single rank, without a module. ValueError where it refuses."""
    held = contents(folder)
    if (why := why_broken(folder, held, 0, 1)) is not None:
        raise ValueError(why)
    found = copy.deepcopy(state(None))
    found["model"]["w"].zero_()
    dcp.load(found, storage_reader=Reader(folder, held.index), planner=PlainPlanner(), no_dist=True)
    return found


def refusal(folder: Path) -> str:
    """The sentence, or of DCP's exceptions what failed on the rank."""
    try:
        loaded(folder)
    except ValueError as error:
        return str(error)
    except dcp.api.CheckpointException as failed:
        return str(failed.failures[0][0])
    return ""


@pytest.fixture(params=[True, False], ids=["manifest", "torch's own"])
def saved(tmp_path, request) -> Path:
    return written(tmp_path / "saved", manifest=request.param)


def test_what_was_saved_is_loaded_with_or_without_a_manifest(saved):
    found, expected = loaded(saved), state()
    assert torch.equal(found["model"]["w"], expected["model"]["w"]) and torch.equal(found["model"]["b"], expected["model"]["b"])
    extra = found["extra"][0]
    assert torch.equal(extra.pop("draws"), EXTRA["draws"]) and extra == {key: x for key, x in EXTRA.items() if key != "draws"}
    if (saved / MANIFEST).exists():
        noted = json.loads((saved / MANIFEST).read_text())
        assert noted["tensors"]["model.w"] == {"shape": [64, 8], "dtype": "float32"} and noted["plan"] == "0123"
        assert noted["files"].keys() == {INDEX, "__0_0.distcp"}


def saved_without_room(rank: int, folder: str) -> tuple[str, bool]:
    """Why a checkpoint whose file may not grow is not written, and whether the former one is still there."""
    module = nn.Linear(64, 64)
    autoshard.save_checkpoint(folder, module)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    why = refused_with(autoshard.save_checkpoint, folder, module)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return why, autoshard.load_checkpoint(folder, module) == {}


def test_a_checkpoint_for_which_there_is_no_room_says_so(tmp_path):
    ((why, is_there),) = results(1, saved_without_room, str(tmp_path / "saved"))
    assert why == f"the checkpoint {tmp_path / 'saved'} can't be written: a file is incomplete, as on a full disk (on rank 0)" and is_there


# -- damage ------------------------------------------------------------------------------------------------------------------------


def flipped(file: Path) -> None:
    """16 bytes of a tensor's values."""
    content = bytearray(file.read_bytes())
    at = content.find(state()["model"]["w"].numpy().tobytes()[:64]) if file.suffix == ".distcp" else len(content) // 2
    assert at >= 0
    content[at : at + 16] = bytes(byte ^ 0x40 for byte in content[at : at + 16])
    file.write_bytes(content)


DAMAGES = {
    "flipped": flipped,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", INDEX, MANIFEST])
def test_a_damaged_file_is_refused_by_name(saved, name, damage):
    if name == MANIFEST and not (saved / name).exists():
        return
    DAMAGES[damage](saved / name)
    said = refusal(saved)
    assert str(saved / name) in said and "\n" not in said, said


def test_a_flip_that_torch_alone_loads_in_silence(tmp_path):
    """The control: without these checks the 16 bytes are in the model."""
    folder = written(tmp_path / "saved", manifest=True)
    flipped(folder / "__0_0.distcp")
    found = state(None)
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert not torch.equal(found["model"]["w"], state()["model"]["w"])


# -- hostile content -----------------------------------------------------------------------------------------------------------------


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def rewritten(folder: Path, change) -> None:
    """The index changed, and the manifest made to agree with it, as somebody would who wants it to be loaded."""
    index = dcp.FileSystemReader(folder).read_metadata()
    (folder / INDEX).write_bytes(pickle.dumps(change(index) or index))
    agreeing(folder)


def agreeing(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        noted = json.loads((folder / MANIFEST).read_text())
        noted["files"] = {name: file_facts(folder / name) for name in noted["files"]}
        (folder / MANIFEST).write_text(json.dumps(noted))


def in_entry(folder: Path, value: object, **options) -> None:
    """A value that is no tensor replaced by another one."""
    index = dcp.FileSystemReader(folder).read_metadata()
    (key,) = (key for key in index.storage_data if key.fqn == "extra")
    content = io.BytesIO()
    torch.save(value, content, **options)
    entry = index.storage_data[key]
    with open(folder / entry.relative_path, "ab") as file:
        begin = file.tell()
        file.write(content.getvalue())

    def change(index: Metadata) -> None:
        index.storage_data[key] = _StorageInfo(entry.relative_path, begin, len(content.getvalue()))

    rewritten(folder, change)


PLACES = {
    "the whole index": lambda index, evil: evil,
    "its planner's data": lambda index, evil: setattr(index, "planner_data", evil),
    "its version": lambda index, evil: setattr(index, "version", evil),
    "a key": lambda index, evil: index.state_dict_metadata.update({evil: index.state_dict_metadata["model.w"]}),
    "a tensor": lambda index, evil: index.state_dict_metadata.update({"model.w": evil}),
    "a dtype": lambda index, evil: setattr(index.state_dict_metadata["model.w"].properties, "dtype", evil),
    "a size": lambda index, evil: setattr(index.state_dict_metadata["model.w"], "size", evil),
    "an entry's place": lambda index, evil: index.storage_data.update({MetadataIndex("model.w", (0, 0)): evil}),
    "a folder": lambda index, evil: setattr(index.storage_meta, "checkpoint_id", evil),
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_in_an_index_is_run(saved, place):
    mark = saved.parent / "ran"
    rewritten(saved, lambda index: PLACES[place](index, Payload(mark)))
    said = refusal(saved)
    assert "posix.mkdir, which a checkpoint's index never needs; it was not run" in said and not mark.exists()
    pickle.loads((saved / INDEX).read_bytes())
    assert mark.exists()  # the control: this is how torch reads it


def test_nothing_in_an_entry_is_run(saved):
    mark = saved.parent / "ran"
    in_entry(saved, (Payload(mark),))
    assert "posix.mkdir" in refusal(saved) and not mark.exists()
    dcp.load(state(None), storage_reader=dcp.FileSystemReader(saved), no_dist=True)
    assert mark.exists()


HOSTILE = {
    "a file outside": lambda index: index.storage_data.update(moved(index, "../outside")),
    "a file of the system": lambda index: index.storage_data.update(moved(index, "/etc/passwd")),
    "the folder itself": lambda index: index.storage_data.update(moved(index, ".")),
    "a negative offset": lambda index: index.storage_data.update(moved(index, "__0_0.distcp", offset=-5)),
    "a long entry": lambda index: index.storage_data.update(moved(index, "__0_0.distcp", length=2**70)),
    "a short entry": lambda index: index.storage_data.update(moved(index, "__0_0.distcp", length=7)),
    "an entry beyond the end": lambda index: index.storage_data.update(moved(index, "__0_0.distcp", offset=2**40)),
    "an extension": lambda index: index.storage_data.update(moved(index, "__0_0.distcp", transform_descriptors=["zstd"])),
    "a tensor without an entry": lambda index: index.storage_data.pop(MetadataIndex("model.w", (0, 0))) and None,
    "a huge tensor": lambda index: setattr(index.state_dict_metadata["model.w"], "size", torch.Size([2**40, 2**20])),
    "parts that are not all": lambda index: setattr(index.state_dict_metadata["model.w"], "chunks", []),
    "parts twice": lambda index: index.state_dict_metadata["model.w"].chunks.extend(index.state_dict_metadata["model.w"].chunks),
    "no tensors": lambda index: setattr(index, "state_dict_metadata", None),
    "a list": lambda index: [index],
    "a number as a dtype": lambda index: setattr(index.state_dict_metadata["model.w"].properties, "dtype", 7),
}


def moved(index: Metadata, path: str, **changed) -> dict:
    key = MetadataIndex("model.w", (0, 0))
    old = index.storage_data[key]
    return {key: _StorageInfo(**{"relative_path": path, "offset": old.offset, "length": old.length, **changed})}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_that_asks_for_other_things_is_refused(saved, what):
    rewritten(saved, HOSTILE[what])
    said = refusal(saved)
    assert said and "\n" not in said and len(said) < 500, said


def test_an_entry_that_unpacks_to_more_than_it_has_is_refused(saved):
    in_entry(saved, torch.zeros(1000))
    index, name = dcp.FileSystemReader(saved).read_metadata(), saved / "__0_0.distcp"
    entry = next(entry for key, entry in index.storage_data.items() if key.fqn == "extra")
    with zipfile.ZipFile(io.BytesIO(name.read_bytes()[entry.offset :])) as plain:
        parts = {member: plain.read(member) for member in plain.namelist()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in parts.items():
            archive.writestr(member, content)
    begin = name.stat().st_size
    name.write_bytes(name.read_bytes() + packed.getvalue())

    def change(index: Metadata) -> None:
        key = next(key for key in index.storage_data if key.fqn == "extra")
        index.storage_data[key] = _StorageInfo(entry.relative_path, begin, len(packed.getvalue()))

    rewritten(saved, change)
    assert "compressed" in refusal(saved)


# -- ranks ---------------------------------------------------------------------------------------------------------------------------


@cache
def planned():
    return autoshard.plan(*mlp.tiny(), fast_mesh((2,)), training=True, baselines=False, objective="serial")


def module_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = parallel(perceptron(), planned())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(*(torch.ones(16, 32) * k for k in (1, 2))).backward()
    optimizer.step()
    return module, optimizer


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p).detach().clone() for name, p in module.named_parameters()}


def saves_and_loads(rank: int, folder: str) -> list:
    """Saved in three ways, each loaded into a module with other values: what was loaded, and whether all values are back."""
    (module, optimizer), facts = module_and_optimizer(), []
    saved = values(module)
    autoshard.save_checkpoint(f"{folder}/now", module, optimizer, extra=EXTRA)
    autoshard.save_checkpoint(f"{folder}/later", module, optimizer, extra=EXTRA, wait=False).result()
    old = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer), "extra": {"step": 3}}
    dcp.save(old, checkpoint_id=f"{folder}/old")  # as versions without a manifest did, and as a stranger does
    for name in ("now", "later", "old"):
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        extra = autoshard.load_checkpoint(f"{folder}/{name}", module, optimizer)
        facts.append((extra["step"], all(torch.equal(x, saved[key]) for key, x in values(module).items())))
    return facts


def resumes(rank: int, folder: str, restored: bool) -> list[bool]:
    """Saved, trained further, loaded with or without the optimizer: whether values are back, and whether the optimizer's are."""
    module, optimizer = module_and_optimizer()
    autoshard.save_checkpoint(folder, module, optimizer)
    saved = values(module)
    moments = [full(row["exp_avg"]).clone() for row in optimizer.state.values()]
    module(*(torch.ones(16, 32) * k for k in (3, -1))).backward()
    optimizer.step()
    assert not any(torch.equal(x, saved[key]) for key, x in values(module).items())
    autoshard.load_checkpoint(folder, module, optimizer if restored else None)
    equal = [all(torch.equal(x, saved[key]) for key, x in values(module).items())]
    return equal + [torch.equal(full(row["exp_avg"]), before) for row, before in zip(optimizer.state.values(), moments, strict=True)]


@pytest.mark.parametrize("restored", [False, True])
def test_the_optimizers_state_is_loaded_where_an_optimizer_is_given(tmp_path, restored):
    for back, *moments in results(2, resumes, str(tmp_path / "saved"), restored):
        assert back and set(moments) == {restored}


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x).square().mean()


def goes_on(rank: int, folder: str) -> tuple[list, str]:
    """The names of the parameters that have a state after loading; what is said of an optimizer that had none."""
    plan = autoshard.plan(Spare(), (torch.ones(4, 8),), fast_mesh((2,)), training=True, baselines=False, objective="serial")
    module, other = parallel(Spare(), plan), parallel(Spare(), plan)
    optimizer, plain = torch.optim.AdamW(module.parameters()), torch.optim.SGD(module.parameters())
    module(torch.ones(4, 8)).backward()
    optimizer.step()
    autoshard.save_checkpoint(folder, module, optimizer)
    fresh = torch.optim.AdamW(other.parameters())
    autoshard.load_checkpoint(folder, other, fresh)
    names = [name for name, p in other.named_parameters() if fresh.state.get(p)]
    autoshard.save_checkpoint(folder, module, plain)
    try:
        autoshard.load_checkpoint(folder, other, fresh)
    except ValueError as error:
        return names, str(error)
    return names, ""


def test_a_parameter_without_gradient_has_no_state_in_a_checkpoint_and_none_afterwards(tmp_path):
    for names, said in results(2, goes_on, str(tmp_path / "saved")):
        assert names == ["used.weight", "used.bias"] and "optimizer.state" in said


def loads(rank: int, folders: list[str]) -> list[str]:
    """The sentence of each damaged checkpoint; nothing may be loaded."""
    module, optimizer = module_and_optimizer()
    before, said = values(module), []
    for folder in folders:
        try:
            autoshard.load_checkpoint(folder, module, optimizer)
            said.append("loaded")
        except ValueError as error:
            said.append(str(error))
        assert all(torch.equal(x, before[key]) for key, x in values(module).items()), folder
    for wrong in ({"path": Path("x")}, {"module": nn.Linear(2, 2)}, {"call": os.mkdir}):
        try:
            autoshard.save_checkpoint(f"{folders[0]}.other", module, extra=wrong)
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_every_way_of_saving_is_loaded_and_damage_is_one_sentence_on_all_ranks(tmp_path):
    for facts in results(2, saves_and_loads, str(tmp_path)):
        assert facts == [(3, True)] * 3
    assert json.loads((tmp_path / "now" / MANIFEST).read_text())["plan"] == planned().digest
    folders, names = [], []
    cases = [(kind, flipped_anywhere) for kind in ("now", "later", "old")]
    cases += [("now", DAMAGES["cut"]), ("now", DAMAGES["missing"]), ("old", DAMAGES["missing"]), ("now", DAMAGES["a pipe"])]
    for kind, damage in cases:
        for name in ("__0_0.distcp", "__1_0.distcp", INDEX, *([MANIFEST] if kind != "old" and damage is not flipped_anywhere else [])):
            if kind == "old" and name == INDEX and damage is flipped_anywhere:
                continue  # nothing tells what it was
            folders.append(str(tmp_path / f"{kind}{len(folders)}"))
            shutil.copytree(tmp_path / kind, folders[-1])
            damage(Path(folders[-1]) / name)
            names.append(name)
    found = run_ranks(2, loads, folders)
    assert found[0] == found[1], found
    for folder, name, said in zip(folders, names, found[0]):
        assert f"{folder}/{name}" in said and "not a complete checkpoint" in said, said
    refused = found[0][len(folders) :]
    assert len(refused) == 3 and all("extra holds what load_checkpoint would not read" in said for said in refused), refused


def flipped_anywhere(file: Path) -> None:
    """16 bytes of the largest entry's values."""
    content = bytearray(file.read_bytes())
    at = len(content) // 2
    if file.suffix == ".distcp":
        index = dcp.FileSystemReader(file.parent).read_metadata()
        entry = max((e for e in index.storage_data.values() if e.relative_path == file.name), key=lambda e: e.length)
        with zipfile.ZipFile(io.BytesIO(content[entry.offset : entry.offset + entry.length])) as archive:
            largest = max(archive.infolist(), key=lambda member: member.file_size)
        at = entry.offset + largest.header_offset + 200
    content[at : at + 16] = bytes(byte ^ 0x40 for byte in content[at : at + 16])
    file.write_bytes(content)


MODEL = {"model": {"w": torch.zeros(2, 3)}}
SAVED = {"model.w": (2, 3), "optimizer.state.w.step": (), "random": (5,)}


@pytest.mark.parametrize(("state", "sizes", "said"), [
    (MODEL, SAVED, None), (MODEL | {"optimizer": {}, "random": torch.zeros(5)}, SAVED, None),
    ({"model": {"w": torch.zeros(3, 2)}}, SAVED, "'w' is (2, 3) there and (3, 2) here"),
    ({"model": {"v": torch.zeros(2)}}, SAVED, "it lacks 'v'"),
    (MODEL | {"random": torch.zeros(4)}, SAVED, "a generator's state of (5,) bytes"),
    (MODEL | {"optimizer": {"param_groups": [{}]}}, {"model.w": (2, 3), "optimizer.param_groups.0.lr": None}, None),
    (MODEL | {"optimizer": {"param_groups": [{}]}}, {"model.w": (2, 3), **{f"optimizer.param_groups.{k}.lr": None for k in (0, 1)}},
     "the optimizer has 1 parameter groups and that of the checkpoint saved has 2"),
    (MODEL | {"optimizer": {}}, {"model.w": (2, 3)}, "has no optimizer state"), (MODEL, {"model.w": (2, 3)}, None),
])  # fmt: skip
def test_what_a_checkpoint_lacks_is_said(state, sizes, said):
    found = _misfit(Path("saved"), state, sizes)
    assert found is None if said is None else said in found
