"""Pickles of strangers: what costs more than their size is refused before it is run, and nothing reaches a class."""

import pickle
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from autoshard.mesh import Mesh
from autoshard.runtime.checkpoint_files import _names, index_of
from autoshard.solution import load
from autoshard.solution.pickles import Inert, _Reader
from tests.helpers_mutations import bad_bytes
from tests.helpers_refusals import assert_file_refused, assert_refused
from tests.helpers_solutions import linear_solution

ROOT = Path(__file__).parent.parent
CHUNK = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n"  # a class that the index of a checkpoint refers to
SPARE = 300 * 2**20  # bytes of address space beyond what the interpreter has when it begins to read


def doubled(levels: int, width: int = 10) -> bytes:
    """A list of lists of ... : each level names the one below `width` times, so that `levels` lines stand for width**levels values."""
    content = b"\x80\x02]q\x00"
    for level in range(levels):
        content += b"0](" + (b"h" + bytes([level])) * width + b"eq" + bytes([level + 1])
    return content


def in_plan(value: bytes) -> bytes:
    """{"format": 1, "assumptions": value}."""
    return b"\x80\x02}U\x06formatK\x01sU\x0bassumptions" + value.removeprefix(b"\x80\x02") + b"s."


HOSTILE = {
    "a memo of 2**31 places": (b"\x80\x04K\x01r\xff\xff\xff\x7f.", "saves value 2147483647 of 0"),
    "a memo of 2**28 places": (b"\x80\x04K\x01r\x00\x00\x00\x10.", "saves value 268435456 of 0"),
    "a memo in text": (b"I1\np99999999\n.", "saves value 99999999 of 0|neither JSON nor a pickle"),
    "a negative memo": (b"I1\np-1\n.", "neither JSON nor a pickle"),
    "a long text": (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.", "no sound pickle"),
    "a long byte array": (b"\x80\x05\x96\x00\x00\x00\x00\xff\x00\x00\x00x.", "no sound pickle"),
    "a long frame": (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.", "no sound pickle"),
    "a long number": (b"\x80\x04\x8b\xff\xff\xff\x7f\x01.", "no sound pickle"),
    "a number of 255 bytes": (in_plan(b"\x8a\xff" + b"\x7f" * 255), "more than 64 bits"),
    "a number in text": (b"}(V" + b"format\nL" + b"9" * 5000 + b"L\nu.", "neither JSON nor a pickle"),
    "lists that name each other": (in_plan(doubled(70, 2)), "more than 64 levels"),
    "a deep list": (b"\x80\x02}U\x01a" + b"](" * 500 + b"e" * 500 + b"s.", "more than 64 levels"),
    "a very deep list": (b"\x80\x02" + b"](" * 10**5 + b"e" * 10**5 + b".", "holds a list|no sound pickle"),
    "itself": (b"\x80\x02}q\x00U\x01ah\x00s.", "more than 64 levels"),
    "an extension": (b"\x80\x02\x82\x01.", "uses EXT1"),
    "bytes": (b"\x80\x03C\x01x.", "uses SHORT_BINBYTES"),
    "a set": (b"\x80\x04\x8f.", "uses EMPTY_SET"),
    "a value twice from the stack": (b"\x80\x02K\x012.", "uses DUP"),
    "not a number": (in_plan(b"G\x7f\xf8\x00\x00\x00\x00\x00\x00"), "too large for a float"),
    "a half character": (in_plan(b"X\x03\x00\x00\x00\xed\xa0\x80"), "half a character|no sound pickle"),
    "a NUL": (in_plan(b"X\x01\x00\x00\x00\x00"), "NUL"),
    "keys that are no text": (in_plan(b"}K\x01K\x01s"), ""),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_pickle_that_costs_more_than_its_size_is_refused(tmp_path, what):
    content, sentence = HOSTILE[what]
    path = tmp_path / "plan.pkl"
    path.write_bytes(content)
    assert_file_refused(sentence, load, path)


CLASSES = {
    "a class that is written to": (b"\x80\x02" + CHUNK + b"}U\x03dimK\x01sb.", "writes to a class"),
    "a class whose slots are written to": (b"\x80\x02" + CHUNK + b"N}U\x08__init__K\x01s\x86b.", "writes to a class"),
    "a class that is called": (b"\x80\x02" + CHUNK + b")R.", "calls a class"),
    "a class by name and arguments": (b"\x80\x02(" + CHUNK.replace(b"c", b"i", 1) + b".", "uses INST"),
}


@pytest.mark.parametrize("what", CLASSES)
def test_a_pickle_reaches_no_class_that_its_kind_of_file_may_refer_to(tmp_path, what):
    content, sentence = CLASSES[what]
    path = tmp_path / ".metadata"
    path.write_bytes(content)
    assert_file_refused(sentence, index_of, path)
    assert_file_refused("wants to use|uses INST", load, path)


def test_lists_that_name_each_other_count_as_often_as_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("autoshard.reading.MOST_VALUES", 10_000)
    path = tmp_path / "plan.pkl"
    path.write_bytes(in_plan(doubled(3)))  # 1,111 lists
    assert_refused("lacks 'status'", load, path)
    path.write_bytes(in_plan(doubled(12)))
    assert_refused("holds more than 10000 values", load, path)


LIMITED = """
import resource, sys
from pathlib import Path
from autoshard.solution import load
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
for path in sys.argv[2:]:
    try:
        load(path)
        print("loaded")
    except ValueError as error:
        print("refused", " ".join(str(error).split())[:300])
"""


def under_a_memory_cap(paths: list[Path]) -> list[str]:
    """What the reader says to each file when it may take SPARE bytes; a process that ends otherwise is an error here."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(SPARE), *map(str, paths)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.splitlines()


def test_hostile_pickles_are_refused_under_a_memory_cap(tmp_path):
    paths = []
    for k, (content, _) in enumerate(HOSTILE.values()):
        paths.append(tmp_path / f"{k}.pkl")
        paths[-1].write_bytes(content)
    said = under_a_memory_cap(paths)
    assert len(said) == len(paths) and all(line.startswith("refused") for line in said)
    assert not any("MemoryError" in line or "memory" in line.lower() for line in said)  # refused for what they are


@pytest.mark.slow
def test_the_cap_is_one(tmp_path):
    """The nine bytes take more than the cap where nothing looks at them first."""
    path = tmp_path / "nine.pkl"
    path.write_bytes(HOSTILE["a memo of 2**28 places"][0])
    unguarded = "import autoshard.solution, pickle\nload = lambda path: pickle.load(open(path, 'rb'))"
    script = LIMITED.replace("from autoshard.solution import load", unguarded)
    done = subprocess.run([sys.executable, "-c", script, str(SPARE), str(path)], capture_output=True, text=True, cwd=ROOT)
    assert "MemoryError" in done.stderr


def mutated(k: int) -> bytes:
    rng = random.Random(zlib.crc32(f"pickle:{k}".encode()))
    good = pickle.dumps(linear_solution().to_dict(), protocol=rng.choice([2, 3, 4, 5]))
    if rng.random() < 0.3:
        return bad_bytes(good, rng)
    content = bytearray(good)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(content))
        content[at] = rng.choice([rng.randrange(256), *b"rjqpbRic\x93\x81\x82\x8b\x8d\x96\x95"])
    return bytes(content)


def refused_or_sound(path: Path) -> bool:
    try:
        solution = load(path)
    except ValueError as error:
        said = str(error)
        assert said.startswith(str(path)) and "\n" not in said and len(said) < 600 + len(str(path))
        return False
    assert all(isinstance(name, str) for name in solution.layouts) and isinstance(solution.mesh, Mesh)
    return True


def test_changed_pickles_are_read_or_refused_in_one_sentence(tmp_path):
    for k in range(150):
        path = tmp_path / f"{k}.pkl"
        path.write_bytes(mutated(k))
        refused_or_sound(path)


@pytest.mark.slow
def test_many_changed_pickles_are_read_or_refused_under_a_memory_cap(tmp_path):
    paths = [tmp_path / "named.pkl"]
    paths[0].write_bytes(in_plan(doubled(12)))
    for k in range(3000):
        paths.append(tmp_path / f"{k}.pkl")
        paths[-1].write_bytes(mutated(k))
    said = under_a_memory_cap(paths)
    assert len(said) == len(paths) and {line.split()[0] for line in said} == {"loaded", "refused"}


def test_the_classes_of_a_file_are_its_own_and_stay_empty():
    content = b"\x80\x02" + CHUNK + b")\x81}U\x05sizesK\x01sb."
    first, second = _Reader(content, _names()), _Reader(content, _names())
    one, two = first.load(), second.load()
    assert isinstance(one, Inert) and vars(one) == {"sizes": 1} and type(one) is not type(two)
    assert "sizes" not in vars(type(one))
