"""Files with one fault each, made from good ones by a seed: values of a wrong type or size, keys lost or new, bytes changed."""

import copy
import json
import random

HOSTILE = [  # as JSON writes them; what json.dumps can't say too
    "null", "true", '""', '"1"', '"x\\u0000y"', '"\\ud800"', "0", "-1", "1.5", "1e-320", "1e308", "1e999", "-1e999", "NaN", "Infinity",
    str(2**62), str(2**64), "9" * 400, "9" * 5000, "[]", "{}", "[[]]", '{"a": {"b": [1]}}', "[1, 2, 3]", '["R,R"]', '"S(99),R"',
    "[" * 70 + "]" * 70, '"' + "a" * 100_000 + '"',
]  # fmt: skip
MARK = "\x01here\x01"  # where a hostile value goes
BYTES = [
    b"", b"\x00", b"\xff\xfe", b"[" * 100_000, b"{" * 100_000, b"}", b"\x80\x04.", b"1e999", b'"', b",", b"\n", b"NaN", b"\xef\xbb\xbf",
]  # fmt: skip

FIELDS = [
    "", "x", "-1", "0", "1.5", "nan", "inf", "1e999", "1e308", "1e-320", "9" * 400, "9" * 5000, '"', '"a\nb"', "\x00", "\ud7ff",
    "a" * 200_000,
]  # fmt: skip


def parent_of(data, way: tuple):
    for step in way[:-1]:
        data = data[step]
    return data


def _some_place(data: object, rng: random.Random) -> tuple:
    """One place, first of a random depth, so that heads of files are met as often as their many leaves."""
    way: tuple = ()
    while True:
        here = parent_of(data, (*way, None))
        keys = list(here) if isinstance(here, dict) else list(range(len(here))) if isinstance(here, list) else []
        if not keys or (way and rng.random() < 0.25):
            return way
        way = (*way, rng.choice(keys))


def bad_json(good: str, rng: random.Random) -> bytes:
    """The text of a JSON file with one fault."""
    data = copy.deepcopy(json.loads(good))
    way = _some_place(data, rng)
    if not way or rng.random() < 0.15:
        return bad_bytes(good.encode(), rng)
    where, key = parent_of(data, way), way[-1]
    fault = rng.randrange(5)
    if fault == 0:
        del where[key]
    elif fault == 1 and isinstance(where, dict):
        where[rng.choice(["", "new", "a\x00", "format", "x" * 1000])] = where[key]
    elif fault == 1:
        where.insert(rng.randrange(len(where) + 1), where[key])
    elif fault == 2 and isinstance(where[key], (int, float)) and not isinstance(where[key], bool):
        where[key] = rng.choice([-where[key], where[key] * 1e9, where[key] + 0.5, 0, str(where[key])])
    else:
        where[key] = MARK
    return json.dumps(data).replace(json.dumps(MARK), rng.choice(HOSTILE)).encode()


def bad_bytes(good: bytes, rng: random.Random) -> bytes:
    """Bytes lost, changed or put in anywhere."""
    at, length = rng.randrange(len(good) + 1), rng.choice([0, 1, 1, 7, 1000])
    return rng.choice([good[:at], good[:at] + rng.choice(BYTES) + good[at + length :]])


def bad_csv(good: str, rng: random.Random) -> bytes:
    """A CSV with one field, line or byte changed."""
    lines = good.splitlines()
    k = rng.randrange(len(lines))
    fields = lines[k].split(",")
    fault = rng.randrange(4)
    if fault == 0:
        return bad_bytes(good.encode(), rng)
    if fault == 1:
        del fields[rng.randrange(len(fields))]
    elif fault == 2:
        fields.insert(rng.randrange(len(fields) + 1), "extra")
    else:
        fields[rng.randrange(len(fields))] = rng.choice(FIELDS)
    lines[k] = ",".join(fields)
    return ("\n".join(lines) + "\n").encode()
