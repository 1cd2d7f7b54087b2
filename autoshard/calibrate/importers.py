"""Readers for the measurements of other tools: from text to Series in SI units.

    nccl-tests     its printed table: size in bytes, out-of-place time in us                                         (`nccl_tests`)
    PARAM comms    COMMS-RES lines: bytes, us; or, of general all_to_allv, a number per rank joined by "-"       (`param`)
    nnscaler       {"all gather": [[MB, ...], [seconds, ...]]}, a file per device count, 1 MB = 2^20 bytes         (`nnscaler`)
    CSV            one row per measurement, columns by name with their unit: size_bytes, latency_us ...                   (`table`)

A collective or number of devices that the file does not contain is read from its name, as the tools and their users write it
(`all_reduce_perf_8.txt`, `all_to_all_4.txt`, `intra_8.json`), or given by the caller. Every error is one sentence with file and line.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoshard.cost import Series
from autoshard.reading import parsed, rows_of

MIB = 2**20
LONGEST = 1000  # characters of a line that are looked at for words about ranks
LEAST, MOST = 1e-15, 1e15  # of seconds and bytes that were measured; others stand in the wrong column, and their errors have no squares
MOST_DEVICES = 10**8  # more is a number that stands in the wrong column
NAMES = {  # as others write them, without separators -> ours
    "allreduce": "all_reduce", "allgather": "all_gather", "allgatherbase": "all_gather", "allgatherintotensor": "all_gather",
    "reducescatter": "reduce_scatter", "reducescatterbase": "reduce_scatter", "reducescattertensor": "reduce_scatter",
    "alltoall": "all_to_all", "alltoallv": "all_to_allv", "alltoallsingle": "all_to_all", "reduce": "reduce", "broadcast": "broadcast",
    "sendrecv": "send_recv", "dram": "dram", "memcpy": "dram", "gather": "gather", "scatter": "scatter",
}  # fmt: skip


@dataclass(frozen=True)
class MeasuredRow:
    """One measurement, and its line in the file."""

    line: int
    of: Series  # without any sizes
    size: float  # bytes
    seconds: float


def parse(text: str, name: str, *, collective: str | None = None, devices: int | None = None, system: str | None = None) -> list[Series]:
    """The series of one file, in the order of their first rows. The arguments replace, or fill in, the values of the file.

    ValueError: one sentence, for a text in none of the formats and for a row that is no measurement.
    """
    if collective is not None:
        collective = known(collective, f"the collective given for {name}")
    reader = sniff(text, name)
    rows = reader(text, name, collective or from_name(name), devices or count_from_name(name))
    fixed = {key: value for key, value in (("collective", collective), ("devices", devices), ("system", system)) if value is not None}
    rows = [replace(row, of=replace(row.of, **fixed)) for row in rows]  # type: ignore[arg-type]
    if not rows:
        raise ValueError(f"{name} holds no measurements; expected rows of sizes and times after its header")
    for row in rows:
        _check(row, name)
    return series(rows)


def sniff(text: str, name: str):
    """The reader for a text, recognised by content that only its format has."""
    if not text.strip():
        raise ValueError(f"{name} is empty; expected the output of nccl-tests or PARAM, nnscaler JSON, or CSV")
    if text.lstrip()[:1] in "{[":
        return nnscaler
    if "COMMS-RES" in text:
        return param
    if any(line.startswith("#") and {"algbw", "busbw"} <= set(line.split()) for line in text.splitlines()):
        return nccl_tests
    return table


def series(rows: Iterable[MeasuredRow]) -> list[Series]:
    """One series per curve, from its rows."""
    groups: dict[Series, list[MeasuredRow]] = {}
    for row in rows:
        groups.setdefault(row.of, []).append(row)
    return [
        replace(of, sizes=tuple(r.size for r in members), seconds=tuple(r.seconds for r in members)) for of, members in groups.items()
    ]


def _check(row: MeasuredRow, name: str) -> None:
    at = f"{name}:{row.line}"
    between = f"expected a number from {LEAST:g} to {MOST:g}: leave the row out"
    if not LEAST <= row.size <= MOST:
        raise ValueError(f"{at}: size is {row.size:g} bytes; {between}")
    if not LEAST <= row.seconds <= MOST:
        raise ValueError(f"{at}: time is {row.seconds:g} s; {between}, or measure it again")
    nodes, devices = row.of.nodes, row.of.devices
    if not 1 <= nodes <= devices <= MOST_DEVICES or devices % nodes:
        raise ValueError(f"{at}: {devices:g} devices on {nodes:g} nodes can't be; expected as many on each node")


def known(written: str, where: str) -> str:
    """Our name of a collective: AllReduce, all-reduce, all_reduce_perf, all reduce -> all_reduce."""
    plain = re.sub(r"[^a-z]", "", written.lower()).removesuffix("perf")
    if plain not in NAMES:
        raise ValueError(f"{where} is {written!r}; expected one of {', '.join(sorted(set(NAMES.values())))}")
    return NAMES[plain]


def from_name(name: str) -> str | None:
    """The collective that a file's name holds, the longest if several."""
    plain = re.sub(r"[^a-z]", "", name.rsplit("/", 1)[-1].lower())
    keys = [key for key in NAMES if key in plain]
    return NAMES[max(keys, key=len)] if keys else None


def count_from_name(name: str) -> int | None:
    """The last number of a file's name: `all_reduce_8.txt` -> 8."""
    numbers = re.findall(r"\d+", name.rsplit("/", 1)[-1].rsplit(".", 1)[0])
    return int(numbers[-1]) if numbers else None


def _needed(value, what: str, name: str):
    if value is None:
        raise ValueError(f"{name} does not say {what}; name the file for it, as all_reduce_8.txt, or give --{what.split()[-1]}")
    return value


def _number(written: str, what: str, at: str) -> float:
    try:
        number = float(written)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{at}: {what} is {written[:40]!r}; expected a number") from None
    return number


def nccl_tests(text: str, name: str, collective: str | None, devices: int | None) -> list[MeasuredRow]:
    """The printed tables, also several in one file. Rows of size 0, which the tool prints for tiny counts, are left out."""
    rows: list[MeasuredRow] = []
    columns: list[str] = []
    hosts: list[str] = []
    nodes: set[str] = set()
    stated, finished = None, False
    for line, words in _lines(text):
        rest = " ".join(words)[:LONGEST]
        if starting := re.search(r"Collective test starting:\s*(\S+)", rest):
            stated, hosts, nodes, finished = known(starting[1], f"{name}:{line}: the collective"), [], set(), False
        elif rank := re.search(r"\bRank\s+\d+.*\bon\s+(\S+)\s+device\b", rest):
            hosts, nodes = ([], set()) if finished else (hosts, nodes)
            hosts.append(rank[1])
            nodes.add(rank[1])
            finished = False
        elif words[0].startswith("#"):
            header = [word for word in rest.lstrip("#").split() if word]
            columns = header if {"size", "time", "busbw"} <= set(header) else columns
        elif words[0].isdigit() and columns:
            finished = True
            if len(words) <= max(columns.index(c) for c in ("size", "time", "busbw")):
                raise ValueError(f"{name}:{line}: {len(words)} words under {len(columns)} columns; the line is cut off")
            at = f"{name}:{line}"
            size, time = (_number(words[columns.index(c)], c, at) for c in ("size", "time"))
            if size == 0:
                continue
            num = len(hosts) or _needed(devices, "its number of devices", name)
            what = stated or _needed(collective, "its collective", name)
            dtype = words[columns.index("type")] if "type" in columns else ""
            of = Series(what, num, nodes=len(nodes) or 1, dtype=dtype, source="nccl-tests")
            rows.append(MeasuredRow(line, of, size, time * 1e-6))
    return rows


def _lines(text: str) -> Iterable[tuple[int, list[str]]]:
    for line, written in enumerate(text.splitlines(), 1):
        words = written.split()
        if words:
            yield line, words


def param(text: str, name: str, collective: str | None, devices: int | None) -> list[MeasuredRow]:
    """Lines with COMMS-RES; the first is the header."""
    what, n = _needed(collective, "its collective", name), _needed(devices, "its number of devices", name)
    rows: list[MeasuredRow] = []
    header: list[str] | None = None
    for line, words in _lines(text):
        if "COMMS-RES" not in words[0]:
            words = words[next((k for k, word in enumerate(words) if "COMMS-RES" in word), len(words)) :]
        if not words:
            continue
        if header is None or not words[1:2] or not re.fullmatch(r"[\d.]+", words[1]):
            header = [word for word in words if word != "(B)"]
            continue
        at = f"{name}:{line}"
        if len(words) <= max(5, _latency_column(header)):
            raise ValueError(f"{at}: {len(words)} words; expected COMMS-RES, size, elements, latency and two bandwidths")
        if "-" in words[3].strip("-"):  # a number per rank: general all_to_allv, whose third word is batch-tables-dim
            latency = _mean(words[3], at)
        else:
            latency = _number(words[_latency_column(header)], "latency", at)
        size = _number(words[1], "size", at)
        rows.append(MeasuredRow(line, Series(what, n, source="PARAM"), size, latency * 1e-6))
    return rows


def _latency_column(header: Sequence[str]) -> int:
    return next((k for k, word in enumerate(header) if word.lower().startswith("latency")), 3)


def _mean(written: str, at: str) -> float:
    values = [_number(part, "a rank's number", at) for part in written.strip("-").split("-")]
    return sum(values) / len(values)


def nnscaler(text: str, name: str, collective: str | None, devices: int | None) -> list[MeasuredRow]:
    """A profile of communication: sizes in MB and seconds per collective. `collective` is not needed: the file has several."""
    data = parsed(text, name, "measurements")
    expected = 'expected {"all gather": [[sizes in MB], [seconds]], ...}'
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{name} holds a {type(data).__name__}; {expected}")
    n = _needed(devices, "its number of devices", name)
    rows = []
    for key, value in data.items():
        what = known(key, f"{name}: a key")
        pair = value if isinstance(value, list) and all(isinstance(one, list) for one in value) else []
        if len(pair) != 2 or len(pair[0]) != len(pair[1]):
            raise ValueError(f"{name}: {key!r} holds something else; {expected}, as many sizes as seconds")
        for k, (size, seconds) in enumerate(zip(*pair), 1):
            if isinstance(size, bool) or isinstance(seconds, bool) or not all(isinstance(v, (int, float)) for v in (size, seconds)):
                raise ValueError(f"{name}: {key!r} has {size!r}, {seconds!r} in place {k}; expected numbers")
            share = n if what == "all_to_all" else 1  # nnscaler counts the bytes of all ranks, this package those of one rank
            rows.append(MeasuredRow(k, Series(what, n, source="nnscaler"), size * MIB / share, float(seconds)))
    return rows


# -- CSV ---------------------------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, dict[str, float]] = {  # field: the names that its column may have, with the factor to SI
    "size": {"size_bytes": 1, "bytes": 1, "size_b": 1, "size_kb": 1e3, "size_kib": 2**10, "size_mb": 1e6, "size_mib": MIB},
    "seconds": {"latency_us": 1e-6, "time_us": 1e-6, "latency_ms": 1e-3, "time_ms": 1e-3, "latency_s": 1, "seconds": 1, "time_s": 1},
    "devices": {"gpus": 1, "devices": 1, "num_gpus": 1, "num_devices": 1, "world_size": 1, "ranks": 1},
    "nodes": {"nodes": 1, "num_nodes": 1},
    "collective": {"collective": 1, "op": 1, "op_name": 1},
    "system": {"system": 1, "cluster": 1},
    "dtype": {"dtype": 1, "type": 1},
    "source": {"source": 1},
    "kind": {"kind": 1},
}


def table(text: str, name: str, collective: str | None, devices: int | None) -> list[MeasuredRow]:
    """CSV with a header. Rows whose `kind` is not "measured" (interpolated, simulated) are left out."""
    header, records = rows_of(text, name)
    place, scale = {}, {}
    for column in header:
        for ours, names in COLUMNS.items():
            if (column or "").strip().lower() in names:
                place[ours], scale[ours] = column, names[column.strip().lower()]
    for ours in ("size", "seconds"):
        if ours not in place:
            columns = ", ".join(filter(None, header))
            raise ValueError(f"{name} has the columns {columns[:200]}; expected one of {', '.join(COLUMNS[ours])}")
    rows = []
    for line, record in records:
        at = f"{name}:{line}"

        def text_of(ours: str, record=record) -> str:
            return (record[place[ours]] or "").strip() if ours in place else ""

        def number(ours: str, at=at, text_of=text_of) -> float:
            return _number(text_of(ours), place[ours], at) * scale[ours]

        if text_of("kind") not in ("", "measured"):
            continue
        written = text_of("collective")
        what = known(written, f"{at}: the collective") if "collective" in place else _needed(collective, "its collective", name)
        n = number("devices") if "devices" in place else _needed(devices, "its number of devices", name)
        nodes = number("nodes") if text_of("nodes") else 1
        if n != int(n) or nodes != int(nodes):
            raise ValueError(f"{at}: {n:g} devices on {nodes:g} nodes; expected whole numbers")
        of = Series(what, int(n), nodes=int(nodes), system=text_of("system"), dtype=text_of("dtype"), source=text_of("source"))
        rows.append(MeasuredRow(line, of, number("size"), number("seconds")))
    return rows
