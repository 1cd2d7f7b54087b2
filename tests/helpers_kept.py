"""Words and numbers that stay what they were, until somebody means to change them."""

import json
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


def assert_stays(name: str, told: str | Mapping[str, Any]) -> None:
    """Compares text or plain data with what is kept in tests/data/NAME, floats to 1e-6. After a change that is meant: remove that file, run
    the test twice, the first time writes it, and read the difference."""
    path = DATA / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(told if isinstance(told, str) else _by_line(_rounded(told)))
        pytest.fail(f"{path} was written; read the difference")
    differ = _difference(told, path.read_text())
    assert not differ, f"{assert_stays.__doc__}\n{differ}"


def _difference(told: str | Mapping[str, Any], kept: str) -> Any:
    if isinstance(told, str):
        lines = unified_diff(kept.splitlines(keepends=True), told.splitlines(keepends=True), "kept", "told")
        return "".join(lines) or (told != kept)
    was, plain = json.loads(kept), json.loads(json.dumps(told))
    return {key: (was.get(key), plain.get(key)) for key in {*was, *plain} if not _close(was.get(key), plain.get(key))}


def _by_line(record: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    return a == b or (isinstance(a, float) and isinstance(b, float) and (a != a and b != b or a == pytest.approx(b, rel=1e-6)))
