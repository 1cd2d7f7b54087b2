"""Thousands of files with one fault each, in every format that is read: no traceback, nothing run, within a second and 300 MB each.

    python -m tests.mutants [--random 2000] [--systematic 5000] [--seed 0] [--only FORMAT]

    systematic    every place of a good file: without its key, and with each hostile value; of text every line without it and with each
                  hostile word; of bytes every byte changed
    random        faults by a seed, as tests/test_mutations.py has them

Prints a row per format: mutants, refused, the most seconds of the processor and MB, and what failed; exits with 1 where anything did.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import pickle
import random
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import autoshard
from autoshard.launch import Overrides, read_configuration
from autoshard.launch.torchtitan import FLAVORS
from autoshard.problem import read_contest
from autoshard.reading import text_of
from tests.helpers_mutations import FIELDS, HOSTILE, MARK, parent_of
from tests.test_mutations import ENCODINGS, GOOD, LOADERS, QUICK, VERBS, loaded, written

MOST_SECONDS, MOST_MB = 1.0, 300.0
TEXT = (".toml", ".yaml", ".sh", ".txt", ".csv")
HEAVY = {"page", "solve", "page with a frontier"}  # verbs whose own work takes long: one mutant in ten
RUNS = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork", "pty.spawn", "pickle.find_class", "socket.connect",
)  # fmt: skip
SPECIAL = ("[" * 5000, "*a", "&a", "!!bool x", "${a:-", "$a", "\U0001f600")
CHECKED = {"on": False, "ran": ""}


def launch(launcher: str) -> Callable[[str], object]:
    known = Overrides(devices=64, sizes=FLAVORS["llama3", "8B"], seq=64, microbatch=1)
    return lambda path: read_configuration(launcher, text_of(path, "launch"), path, known)


# what reads a file and does nothing else; most mutants go there, some to the verbs
READERS = {
    "plan": autoshard.load, "plan as a pickle": autoshard.load, "programs": autoshard.load, "problem": read_contest,
    "torchtitan.toml": launch("torchtitan"), "megatron.sh": launch("megatron"), "nanotron.yaml": launch("nanotron"),
    "accelerate.yaml": launch("accelerate"),
}  # fmt: skip
for form, reader in READERS.items():
    VERBS[f"read {form}"], LOADERS[f"read {form}"] = (form, ""), reader


def is_of_numba() -> bool:
    """Whether numba reads the pickles in which it keeps compiled code."""
    frame = sys._getframe()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("numba."):
        frame = frame.f_back
    return frame is not None


def watch(event: str, arguments: tuple) -> None:
    """Notes what a file must not make the reader do."""
    if CHECKED["on"] and event in RUNS and not is_of_numba():
        CHECKED["ran"] = f"{event} {str(arguments)[:80]}"


def places(data: object, way: tuple = ()) -> Iterator[tuple]:
    """Every kind of place: of lists and of objects with many keys the first and the last item."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    few = keys if isinstance(data, dict) and len(keys) <= 30 else keys[:1] + keys[1:][-1:]
    for key in few:
        yield (*way, key)
        yield from places(data[key], (*way, key))  # type: ignore[index]


def systematic_json(good: str) -> Iterator[Callable[[], bytes]]:
    data = json.loads(good)

    def mutant(way: tuple, value: str | None) -> bytes:
        bad = copy.deepcopy(data)
        if value is None:
            del parent_of(bad, way)[way[-1]]
        else:
            parent_of(bad, way)[way[-1]] = MARK
        return json.dumps(bad).replace(json.dumps(MARK), value or "").encode()

    return (partial(mutant, way, value) for way in places(data) for value in (None, *HOSTILE))


def systematic_text(good: str) -> Iterator[Callable[[], bytes]]:
    lines = good.splitlines()

    def mutant(k: int, new: list[str]) -> bytes:
        return "\n".join([*lines[:k], *new, *lines[k + 1 :]]).encode("utf-8", "surrogatepass")

    for k, line in enumerate(lines):
        yield partial(mutant, k, [])
        glue = "," if line.count(",") > 2 else " "
        words = line.split(glue)
        for j in range(len(words)):
            yield from (partial(mutant, k, [glue.join([*words[:j], value, *words[j + 1 :]])]) for value in (*FIELDS, *SPECIAL))


def systematic_bytes(good: bytes) -> Iterator[Callable[[], bytes]]:
    def mutant(begin: int, middle: bytes, end: int) -> bytes:
        return good[:begin] + middle + good[end:]

    for k in range(len(good)):
        yield partial(mutant, k, b"", k + 1)
        yield partial(mutant, k, b"", len(good))
        yield from (partial(mutant, k, bytes([byte]), k + 1) for byte in (0x00, 0xFF, *b"rRcbi.0h", good[k] ^ 1))


def systematic(form: str) -> Iterator[Callable[[], bytes]]:
    suffix, good, _ = GOOD[form]
    if suffix == ".metadata":
        return systematic_bytes(good().encode(ENCODINGS[form]))
    if suffix == ".pkl":
        return (content for protocol in (2, 4) for content in systematic_bytes(pickle.dumps(json.loads(good()), protocol=protocol)[:1200]))
    return systematic_text(good()) if suffix in TEXT else systematic_json(good())


def evenly(mutants: list, most: int) -> list:
    return mutants if len(mutants) <= most else [mutants[k * len(mutants) // most] for k in range(most)]


def rss(name: str) -> float:
    """MB that this process has (VmRSS), or had at most (VmHWM)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


@dataclass
class Row:
    mutants: int = 0
    refused: int = 0
    seconds: float = 0.0
    megabytes: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, what: str, code: object, said: str, seconds: float, megabytes: float) -> None:
        self.mutants, self.refused = self.mutants + 1, self.refused + (code == 2)
        self.seconds, self.megabytes = max(self.seconds, seconds), max(self.megabytes, megabytes)
        sentence = said.startswith("autoshard: ") and said.count("\n") == 1 and len(said) < 2100
        if code not in (0, 1, 2) or (code == 2 and not sentence) or "Traceback" in said:
            self.failures.append(f"{what}: exit {code}: {said[-300:]!r}")
        if seconds > MOST_SECONDS or megabytes > MOST_MB:
            self.failures.append(f"{what}: {seconds:.2f} s, {megabytes:.0f} MB: {said[-100:]!r}")
        if CHECKED["ran"]:
            self.failures.append(f"{what}: it ran {CHECKED['ran']}")
            CHECKED["ran"] = ""


def tried(verb: str, content: bytes, folder: Path) -> tuple[object, str, float, float]:
    """Exit code, what was said, seconds of the processor, MB beyond those that the process had."""
    from autoshard.cli import main

    form, words = VERBS[verb]
    path = folder / ("config.json" if form == "config" else f"all_reduce_8{GOOD[form][0]}")
    path.write_bytes(content)
    named = {"FILE": path, "PLAN": folder / "plan.json", "OUT": folder / "out.html", "hf:FOLDER": f"hf:{folder}"}
    said, before = io.StringIO(), rss("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        CHECKED["on"] = True
        try:
            code: object = main([str(named.get(word, word)) for word in words.split()]) if words else loaded(verb, path)
        except BaseException:
            code = traceback.format_exc()[-600:]
        CHECKED["on"] = False
    return code, said.getvalue(), time.process_time() - began, rss("VmHWM") - before


def mutants_of(form: str, verbs: list[str], num_random: int, num_systematic: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """What it is called, the verb that reads it, and the mutant."""
    light = [f"read {form}"] if form in READERS else [verb for verb in verbs if verb not in HEAVY] or verbs
    chosen = evenly(list(systematic(form)), num_systematic)
    turns = [*light * (9 * len(verbs)), *verbs]
    for k, content in enumerate(chosen):
        yield f"systematic {k}", turns[k % len(turns)], content()
    _, good, plant = GOOD[form]
    for k in range(num_random):
        yield f"random {k}", turns[k % len(turns)], plant(good(), random.Random(zlib.crc32(f"{seed}:{form}:{k}".encode())))


def main_of_mutants(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="mutants of every format")
    parser.add_argument("--random", type=int, default=2000)
    parser.add_argument("--systematic", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args(arguments)
    table = {**QUICK, "plan hf": VERBS["plan hf"]}
    verbs: dict[str, list[str]] = {}
    for verb, (form, _) in table.items():
        verbs.setdefault(form, []).append(verb)
    forms = [form for form in verbs if not options.only or form in options.only]
    sys.addaudithook(watch)
    failed = total = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(written("plan.2"))
        for form in forms:
            for verb in verbs[form]:  # what is imported and compiled once
                good = GOOD[form][1]()
                tried(verb, good.encode(ENCODINGS.get(form, "utf-8")), folder)
            each = [-(-n // len(forms)) for n in (options.random, options.systematic)]
            row = Row()
            for what, verb, content in mutants_of(form, verbs[form], each[0], each[1], options.seed):
                row.add(f"{what} of {form} to {verb!r}", *tried(verb, content, folder))
            total, failed = total + row.mutants, failed + len(row.failures)
            print(f"{form:20} {row.mutants:5} mutants {row.refused:5} refused {row.seconds:6.2f} s {row.megabytes:6.1f} MB", flush=True)
            for failure in row.failures[:20]:
                print("   ", failure, flush=True)
    print(f"{total} mutants, {failed} failures")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main_of_mutants())
