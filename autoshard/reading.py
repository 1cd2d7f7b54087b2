"""Reads files from outside: it checks them once, so that the rest of autoshard can rely on the types of their values.

    content    a regular file, no larger than its format allows; gzip is unpacked up to the same size,
               and to no more than 100 times its own                                                   (`content_of`)
    text       UTF-8 without NUL; CSV as rows                                                          (`text_of`, `rows_of`)
    data       JSON, checked in this order:                                                            (`data_of`)
               sound      at most 64 levels deep, every number finite and within 64 bits, no text with NUL or half a character
               schema     schemas/<format>.json, the same files that docs/formats.md describes

Every refusal is a ValueError of one sentence that begins with the file's name. A contest's instance of 70 MB is read in 2.2 s, of which the
schema takes 0.1 s (one core): jsonschema-rs was chosen for that; jsonschema takes 300 times as long, fastjsonschema 50 times.
The values of problems are not checked for soundness one by one: their schema allows only numbers in the lists that are read.
"""

import csv
import hashlib
import io
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from autoshard.options import note_schema

DEEPEST = 64  # levels of lists and objects; our own files have about ten
MOST_VALUES = 8_000_000  # in one file, where a shared value of a pickle counts once per reference; a plan has 10 bytes per value
MOST_INTEGER = 2**63
SHOWN = 80  # characters of a wrong value
SCHEMAS = Path(__file__).with_name("schemas")
OPTIONS = "options.1.json"


@dataclass(frozen=True)
class Format:
    """The largest size of a kind of file, and its names in sentences."""

    name: str  # "a plan"
    expected: str  # ends the sentence "expected ..."
    most_bytes: int  # of the file, after unpacking
    schema: str = ""  # schemas/<schema>.json; empty where other projects define the format


MB = 10**6
MOST_RATIO = 100  # of unpacked to packed bytes; plans and problems have 10 to 30, gzip makes up to 1,032 of repetitions
SMALL = 4 * MB  # any gzip file may unpack to so much
PIECE = 2**14  # packed bytes
FORMATS = {
    # 10 kB per layer of GPT-2
    "plan": Format("a plan", "a plan's file, as `autoshard plan --out` writes it", 256 * MB, "plan.2"),
    "certificate": Format("the numbers of a certificate", "what `autoshard certify --out` wrote", 1024 * MB),
    # the largest instance of the contest that we know is 70 MB
    "problem": Format(
        "a problem", "a contest instance, problem.nodes and problem.edges, as JSON or gzipped JSON named .gz", 1000 * MB, "problem.1"
    ),
    # part of a plan, packed: autoshard/planning/keeping.py
    "layouts": Format("packed layouts", "rows of inputs, outputs and hubs, and results", 100 * MB, "layouts.1"),
    "cluster": Format("a measured cluster", "what `autoshard calibrate measure --out` wrote", 64 * MB, "cluster.1"),
    "curves": Format("a file of curves", "what `autoshard calibrate fit --out` wrote", 64 * MB, "curves.1"),
    "frontier": Format("a frontier", "what `autoshard frontier --out` wrote", 64 * MB, "frontier.1"),
    "tables": Format(
        "a list of tables", "CSV (name,rows,columns,...) in a file named .csv, or JSON {'tables': [...]}", 64 * MB, "tables.1"
    ),
    "redistribution": Format(
        "a redistribution problem", "one or a list of shape, mesh, src, src_bs, dst, dst_bs", 64 * MB, "redistribution.1"
    ),
    "measurements": Format("a file of measurements", "the output of nccl-tests or PARAM, nnscaler JSON, or CSV", 64 * MB),
    "operators": Format("torch's table of operators", "the native_functions.yaml of an installed torch", 16 * MB),
    "model": Format("a model's file", "Python source with a function that returns (module, example_inputs)", 16 * MB),
    "launch": Format("a launcher's configuration", "TOML, YAML, JSON, or arguments, as the launcher reads them", 2 * MB),  # 4 kB a layer
    # an allocation has a stack of some 2 kB
    "snapshot": Format("a memory snapshot", "what torch dumps of its CUDA memory, or that as JSON", 1000 * MB),
    "log": Format("a run's log", "text with a line that tells memory", 64 * MB),
    "evidence": Format("evidence", "what `autoshard fits --observed --evidence` wrote", 16 * MB),
    "checkpoint": Format("a checkpoint's manifest", "the manifest.json that save_checkpoint wrote", 256 * MB, "checkpoint.1"),
    # 100 bytes per part of a tensor
    "index": Format("a checkpoint's index", "the .metadata that save_checkpoint or torch.distributed.checkpoint wrote", 1000 * MB),
    "config": Format("a config", "the config.json of a Hugging Face model", 16 * MB, "config.1"),
}  # fmt: skip


# -- content -----------------------------------------------------------------------------------------------------------------------


def file_and_program(written: str | os.PathLike[str]) -> tuple[str, str]:
    """FILE and NAME of FILE#NAME, a program of a plan of several; a file whose own name has a # is itself."""
    file, _, program = str(written).rpartition("#")
    return (file, program) if file and program and not os.path.exists(written) else (str(written), "")


def content_of(path: str | os.PathLike[str], kind: str) -> bytes:
    """The bytes of a regular file. ValueError where it doesn't exist, is something else, or is larger than its format allows."""
    form = FORMATS[kind]
    try:
        mode = os.stat(path).st_mode  # before it is opened: a pipe would wait for its writer, and opening a device can have effects
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"there is no file {path}; expected {form.expected}") from None
    except ValueError:  # a NUL in the name
        raise ValueError(f"{_short(str(path))} can't be the name of a file; expected {form.expected}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is {_kind_of_file(mode)}; expected {form.expected}, in a regular file")
    with open(path, "rb") as file:
        content = file.read(min(max(os.fstat(file.fileno()).st_size, MB), form.most_bytes) + 1)  # as much memory is taken at once
    if len(content) > form.most_bytes:
        raise ValueError(f"{path} is larger than {form.most_bytes / MB:g} MB, which {form.name} never is; expected {form.expected}")
    return _unpacked(content, path, form) if Path(path).suffix == ".gz" else content


def file_facts(path: str | os.PathLike[str]) -> dict[str, int | str]:
    """`bytes` and `sha256` of a regular file, as a checkpoint's manifest has them. FileNotFoundError where there is none."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is {_kind_of_file(os.stat(path).st_mode)}; expected a regular file")
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def _kind_of_file(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a socket")


def _unpacked(content: bytes, path: str | os.PathLike[str], form: Format) -> bytes:
    """The content of all members of a gzip file, unpacked piece by piece: it ends as soon as it is larger than the format allows, or
    much larger than such files are for the bytes that were read."""
    parts, unpacked, used = [b""], 0, 0
    stream = None  # of the member that is being read
    while used < len(content) or (stream is not None and parts[-1]):
        if stream is None:
            if not content[used] and not content[used:].strip(b"\0"):
                break  # gzip may be padded with zeros
            stream = zlib.decompressobj(wbits=31)
        piece = content[used : used + PIECE]
        try:
            parts.append(stream.decompress(piece, SMALL))
        except zlib.error as error:
            raise ValueError(f"{path} is named .gz but is no sound gzip file ({error}); drop the .gz or download it again") from None
        used += len(piece) - len(stream.unconsumed_tail) - len(stream.unused_data)
        unpacked += len(parts[-1])
        if unpacked > form.most_bytes:
            more = f"more than {form.most_bytes / MB:g} MB"
            raise ValueError(f"{path} unpacks to {more}, which {form.name} never is; expected {form.expected}")
        if unpacked > SMALL + MOST_RATIO * used:
            raise ValueError(f"{path} unpacks to more than {MOST_RATIO} times its size, which {form.name} never does; give it unpacked")
        stream = None if stream.eof else stream
    if stream is not None:
        raise ValueError(f"{path} ends early: the gzip stream is truncated; copy or download the file again")
    return b"".join(parts)


# -- text --------------------------------------------------------------------------------------------------------------------------


def text_of(path: str | os.PathLike[str], kind: str) -> str:
    """The text of a regular file, UTF-8 with or without a byte order mark. ValueError where it is no text."""
    try:
        text = content_of(path, kind).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error.reason} at byte {error.start}); expected {FORMATS[kind].expected}") from None
    if "\0" in text:
        raise ValueError(f"{path} is no text: it has NUL at character {text.index(chr(0))}; expected {FORMATS[kind].expected}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def rows_of(text: str, path: str | os.PathLike[str]) -> tuple[list[str], list[tuple[int, dict]]]:
    """The header of a CSV text, and each row as its line number and its texts by column. Surplus fields of a row are under the key None;
    a field that the row lacks is None. ValueError where it is no CSV."""
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    try:
        header = list(reader.fieldnames or ())
        return header, [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"{path} is no sound CSV at line {reader.line_num}: {error}; expected rows of short fields") from None


# -- data --------------------------------------------------------------------------------------------------------------------------


def data_of(path: str | os.PathLike[str], kind: str) -> Any:
    """The JSON of a file, sound and according to the format's schema. ValueError in one sentence where it isn't."""
    data = parsed(content_of(path, kind), path, kind)
    return checked(data, path, kind)


def parsed(content: bytes | str, path: str | os.PathLike[str], kind: str) -> Any:
    """JSON as plain data that is sound; its keys are not checked. ValueError where it can't be read."""
    expected = FORMATS[kind].expected
    if not content.strip():
        raise ValueError(f"{path} is empty; expected {expected}")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        data = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        early = error.pos >= len(error.doc.rstrip()) - 1
        wrong = "ends early" if early else f"is no sound JSON at line {error.lineno}, column {error.colno}"
        raise ValueError(f"{path} {wrong} ({error.msg}); expected {expected}, so copy it or write it again") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits, or nested without end
        raise ValueError(f"{path} is no sound JSON ({_short(error)}); expected {expected}, so copy it or write it again") from None
    if kind != "problem":
        check_sound(data, path)
    return data


def _refuse_constant(name: str) -> object:
    raise ValueError(f"it holds {name}")


def check_sound(data: object, path: str | os.PathLike[str], most: int | None = None) -> None:
    """ValueError where the data is too deep or too large, or holds a number or a text that JSON files in UTF-8 can't hold. A value counts
    once per reference: a pickle can refer to one value a thousand times.

    most: values, by default MOST_VALUES.
    """
    count, most = 0, most or MOST_VALUES
    for item, depth in _values(data):
        count += 1
        if count > most or depth > DEEPEST:
            much = f"{DEEPEST} levels" if depth > DEEPEST else f"{most} values"
            raise ValueError(f"{path} holds more than {much} of lists and objects; expected fewer, so write the file again")
        why = _why_unsound(item)
        if why:
            raise ValueError(f"{path} holds {why}, so write the file again")


def _values(data: object) -> Iterator[tuple[object, int]]:
    """Every value and key with its depth; not recursive, since the depth is what is being checked."""
    waiting: list[tuple[object, int]] = [(data, 0)]
    while waiting:
        item, depth = waiting.pop()
        yield item, depth
        if isinstance(item, dict):
            waiting.extend((key, depth) for key in item)
            waiting.extend((value, depth + 1) for value in item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend((value, depth + 1) for value in item)


def _why_unsound(item: object) -> str:
    if isinstance(item, str):
        if "\0" in item:
            return "a text with NUL; expected text"
        if not item.isascii() and any("\ud800" <= letter <= "\udfff" for letter in item):
            return "a text with half a character (a lone surrogate); expected text"
        return ""
    if item is None or isinstance(item, (bool, dict, list, tuple)):
        return ""
    if isinstance(item, float):
        return "" if math.isfinite(item) else "a number too large for a float; expected finite numbers"
    if isinstance(item, int):
        return "" if abs(item) < MOST_INTEGER else "a whole number of more than 64 bits; expected smaller ones"
    return f"a {type(item).__name__}; expected objects, lists, text and numbers"


def refuse_other(data: Any, path: str | os.PathLike[str], *kinds: str) -> None:
    """ValueError where the data of a file is recognised as of another kind than these: a frontier where a plan is expected."""
    other = _kind_of_data(data) if isinstance(data, dict) else None
    if other is not None and other not in kinds:
        raise ValueError(f"{path} is {FORMATS[other].name}; expected {FORMATS[kinds[0]].expected}")


def _kind_of_data(data: dict) -> str | None:
    written = data.get("format")
    if isinstance(written, int) and not isinstance(written, bool):
        return "plan"
    named = written.removeprefix("autoshard.").partition("/")[0] if isinstance(written, str) else ""
    return named if named in FORMATS else None


def checked(data: Any, path: str | os.PathLike[str], kind: str) -> Any:
    """The same data, if it follows the format's schema; else a ValueError that names the place and the value there."""
    form = FORMATS[kind]
    refuse_other(data, path, kind)
    try:
        first = islice(_validator(form.schema).iter_errors(data), 100)
        error = min(first, key=lambda error: error.instance_path != ["format"], default=None)  # a wrong format is reported first
    except ValueError as why:  # not JSON: a record of a pickle, or keys that are no text; or too deep
        raise ValueError(f"{path} is not {form.name}: {_short(why)}; expected {form.expected}") from None
    if error is None:
        return data
    place = "/".join(str(step) for step in error.instance_path) or "the file"
    raise ValueError(f"{path} is not {form.name}: {_short(place)} {_message(error)}; expected {form.expected}")


def _message(error: Any) -> str:
    """The schema's complaint, in words that follow the name of the place, without long values."""
    if type(error.instance) is float and not math.isfinite(error.instance):
        return "has a number too large for a float"
    if error.kind.name == "required":
        return f"lacks {error.kind.property!r}"
    if error.kind.name == "pattern":  # the only one that our schemas have
        return f"has {_short(error.instance)!r}, which is no layout; expected one placement per mesh axis, such as S(0),R"
    if error.kind.name == "const":
        return f"is {_short(error.instance)!r}; expected {error.kind.expected_value!r}"
    words = "holds " + " ".join(error.message.split())
    return words if len(words) <= 2 * SHOWN else f"{words[:SHOWN]} ... {words[-SHOWN:]}"


@cache
def _validator(schema: str) -> Any:
    import jsonschema_rs  # here: text is read without it

    known = schemas()
    return jsonschema_rs.Draft202012Validator(known[f"{schema}.json"], registry=jsonschema_rs.Registry(list(known.items())))


def schemas() -> dict[str, Any]:
    """Every JSON schema by its name: those of the folder, and that of the options that plans note, from their declarations."""
    return {path.name: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")} | {OPTIONS: note_schema(OPTIONS)}


def _short(value: object) -> str:
    """The start of a message, in one line."""
    return " ".join(str(value).split())[:SHOWN]
