"""Arguments of the command line that are settings or files: layers=2, a result's name, a model's file. ValueError on anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from autoshard.writing import destination

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
PICTURES = (".png", ".svg", ".pdf")  # endings of files that a picture can be drawn into


def parse_settings(written: Sequence[str]) -> dict[str, int | float | bool | str | None]:
    """`["layers=2", "loss=false"]` -> {"layers": 2, "loss": False}; values are ints, floats, true, false, none, or text."""
    settings: dict[str, int | float | bool | str | None] = {}
    for item in written:
        key, equals, value = item.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ValueError(f"--set {item!r} is not key=value; write for example --set layers=2")
        if key.strip() in settings:
            raise ValueError(f"--set gives {key.strip()!r} twice; give it once")
        settings[key.strip()] = read = _value(value.strip())
        if isinstance(read, float) and not math.isfinite(read):
            raise ValueError(f"--set {item!r} is no finite number; write for example --set layers=2")
    return settings


def _value(written: str) -> int | float | bool | str | None:
    named: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if written.lower() in named:
        return named[written.lower()]
    for kind in (int, float):
        try:
            return kind(written)
        except ValueError:
            continue
    return written


def check_out(written: str | None, what: str = "--out") -> None:
    """ValueError where a result could not be written to this path."""
    if written is None:
        return
    try:
        destination(written)
    except OSError as error:
        said = str(error) if str(error).startswith(written) else f"{written}: {error}"
        raise ValueError(f"{what} {said}") from None
    if (ending := Path(written).suffix) in COMPRESSED:
        raise ValueError(f"{what} {written} ends in {ending}, and no result is compressed; expected {what} {written.removesuffix(ending)}")


def check_picture(written: str | None, what: str) -> None:
    """ValueError where a picture could not be written to this path, or its ending is no format of pictures."""
    check_out(written, what)
    if written is not None and Path(written).suffix not in PICTURES:
        raise ValueError(f"{what} {written} ends in {Path(written).suffix or 'nothing'}; expected one of {', '.join(PICTURES)}")


def model_file(path: str) -> Path:
    """The file of a model; where there is none at this place, `models/NAME.py` or `NAME.py` is the one that came with autoshard."""
    file = Path(path)
    package = Path(__file__).resolve().parent.parent
    places = [file]
    if file.parent in (Path(), Path("models")):
        places += [package / "models" / file.name, package.parent / "models" / file.name]  # as a wheel installs them, in a checkout
    for place in places:
        if place.is_file():
            return place
    raise ValueError(f"there is no file {path}; MODEL is file.py:function, for example models/gpt2.py:small")
