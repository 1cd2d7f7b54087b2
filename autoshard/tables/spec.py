"""Readers of tables from plain records: rows of a CSV file, or JSON. A ValueError with one sentence says what is no table."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from .records import Option, Table

COLUMNS = tuple(f.name for f in fields(Table) if f.name != "options")
OPTION_KEYS = tuple(f.name for f in fields(Option))
INTEGERS = ("rows", "columns", "item_size", "features")
NUMBERS = ("pooling", "skew")
TORCHREC = {"num_embeddings": "rows", "embedding_dim": "columns"}  # torchrec's name: ours
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # of files that call themselves CSV


def tables_of_rows(rows: Sequence[Mapping[str, str]], header: Sequence[str]) -> list[Table]:
    """Tables of a CSV file's rows, texts by column; `name`, `rows` and `columns` are needed, the others have defaults."""
    for separator, what in SEPARATORS.items():
        if len(header) == 1 and separator in header[0]:
            raise ValueError(f"the CSV has one column {header[0][:40]!r}, with {what} in its name; expected columns separated by commas")
    _known(header, COLUMNS, "column", "the CSV")
    for name in ("name", "rows", "columns"):
        if name not in header:
            raise ValueError(f"the CSV has no column {name!r}; expected name, rows, columns, and any of {', '.join(COLUMNS[3:])}")
    if len(set(header)) < len(header):
        raise ValueError("the CSV names a column twice; name each once")
    return [_table_of_texts(row, f"line {k}") for k, row in enumerate(rows, start=2)]


def tables_of_json(data: Any) -> list[Table]:
    """Tables of {"tables": [{"name": ..., "rows": ..., "columns": ..., "options": [...]}]}, or of the list alone, which follow the schema
    of such files: it says types."""
    items = data.get("tables", ()) if isinstance(data, Mapping) else data
    if isinstance(data, Mapping):
        _known(list(data), ("tables",), "key", "the spec")
    return [_table_of_record(item, f"table {k}") for k, item in enumerate(items)]


def _table_of_texts(row: Mapping[str, Any], where: str) -> Table:
    if None in row or None in row.values():
        raise ValueError(f"{where} of the CSV has another number of fields than the header; expected as many")
    given: dict[str, Any] = {}
    for key, text in row.items():
        text = text.strip()
        if not text and key not in ("name", "rows", "columns"):
            continue  # the default
        given[key] = _number(text, key, where) if key in (*INTEGERS, *NUMBERS) else text
    return Table(**given)


def _number(text: str, key: str, where: str) -> int | float:
    try:
        value = float(text)
        return int(value) if key in INTEGERS and value == int(value) else value
    except (ValueError, OverflowError):
        raise ValueError(f"{where} of the CSV: {key} is {text!r}; expected a number") from None


def _table_of_record(item: Any, where: str) -> Table:
    _known(list(item), (*COLUMNS, "options"), "key", where)
    if "name" not in item:
        raise ValueError(f"{where} of the spec has no name; give it one")
    needed = () if "options" in item else ("rows", "columns")
    for key in needed:
        if key not in item:
            raise ValueError(f"table {item['name']!r} has no {key!r}; expected rows and columns, or options")
    given = dict(item)
    if "options" in item:
        given["options"] = tuple(_option(one, f"table {item['name']!r}") for one in item["options"])
    return Table(**given)


def _option(item: Any, where: str) -> Option:
    _known(list(item), OPTION_KEYS, "key", f"an option of {where}")
    for key in ("sharding", "seconds", "hbm_bytes"):
        if key not in item:
            raise ValueError(f"{where}: an option has no {key!r}; expected sharding, seconds and hbm_bytes")
    try:
        return Option(**item)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _known(given: Sequence[object], known: Sequence[str], what: str, where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            if TORCHREC.get(str(key)) in known:
                hint = f"{TORCHREC[str(key)]} is what torchrec calls {key}"
            raise ValueError(f"{where} has an unknown {what} {str(key)[:40]!r}; {hint}")
