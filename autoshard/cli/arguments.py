"""Arguments of the command line parsed to values: 80GB, 300GB/s, layers=2, h.0.attn.weight=S(0),R. ValueError on anything else."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from autoshard.writing import destination

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
PICTURES = (".png", ".svg", ".pdf")  # endings of files that a picture can be drawn into
FORGOTTEN = 1000.0  # bytes: below them a number without a unit is one whose unit was forgotten
_SCALE = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(written: str, what: str = "memory") -> float:
    """`80GB`, `300 GB/s`, `64GiB`, `8e10` -> bytes (per second)."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([KMGT]?I?)(B?)(?:/S)?\s*", written, re.IGNORECASE)
    try:
        value = float(match[1]) * _SCALE[match[2].upper()] if match else math.nan
    except (ValueError, KeyError):
        value = math.nan
    example = "300GB/s" if "bandwidth" in what else "80GB"
    if not 0 < value < math.inf:
        raise ValueError(f"{what} is {written!r}; expected a positive number with a unit, for example {example}")
    if value < FORGOTTEN and match is not None and not match[2] and not match[3]:
        raise ValueError(f"{what} is {written!r}, which is {value:g} bytes; add its unit, for example {example}")
    return value


class Bandwidths(TypedDict):
    """Keywords of `Mesh.from_bandwidths`, in bytes per second."""

    intra_node_bandwidth: float
    inter_node_bandwidth: float


def bandwidths(intra_node_bandwidth: str, inter_node_bandwidth: str) -> Bandwidths:
    """The two options, parsed."""
    return {
        "intra_node_bandwidth": parse_bytes(intra_node_bandwidth, "--intra-node-bandwidth"),
        "inter_node_bandwidth": parse_bytes(inter_node_bandwidth, "--inter-node-bandwidth"),
    }


def model_settings(written: Sequence[str], **options: int | str | None) -> dict[str, int | float | bool | str | None]:
    """The --set keywords and the options of the model that have a name of their own (--batch, --seq, --dtype), where they are given."""
    settings = parse_settings(written)
    for key, value in options.items():
        if value is not None and key in settings:
            raise ValueError(f"--{key} {value} and --set {key}={settings[key]} are the same; leave one out")
    return settings | {key: value for key, value in options.items() if value is not None}


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


def parse_pins(written: Sequence[str]) -> dict[str, str]:
    """`["wte.weight=R,S(0)"]` -> {"wte.weight": "R,S(0)"}."""
    pins: dict[str, str] = {}
    for name, layout in _named_layouts(written, "--pin"):
        if name in pins:
            raise ValueError(f"--pin gives {name!r} twice; give it one layout")
        pins[name] = layout
    return pins


def parse_forbidden(written: Sequence[str]) -> dict[str, list[str]]:
    """`["wte.weight=R,R", "wte.weight=S(0),R"]` -> {"wte.weight": ["R,R", "S(0),R"]}."""
    forbidden: dict[str, list[str]] = {}
    for name, layout in _named_layouts(written, "--forbid"):
        forbidden.setdefault(name, []).append(layout)
    return forbidden


def _named_layouts(written: Sequence[str], option: str) -> list[tuple[str, str]]:
    layouts = []
    for item in written:
        name, equals, layout = (part.strip() for part in item.rpartition("="))
        if not equals or not name or not layout:
            raise ValueError(f"{option} {item!r} is not NAME=LAYOUT; write for example {option} 'wte.weight=R,S(0)'")
        layouts.append((name, layout))
    return layouts


def parse_optimizer(written: str) -> str | float:
    """`adamw`, or `12` -> 12.0 bytes of state per parameter; the planner checks the name."""
    try:
        state = float(written)
    except ValueError:
        return written
    if not 0 <= state < math.inf:
        raise ValueError(f"--optimizer is {written}; expected adamw, sgd, momentum, or bytes per parameter from 0 on")
    return state


def parse_recompute(written: str) -> int | str:
    """`4` -> 4 blocks; the planner checks `all` and other words."""
    if written.startswith("-"):
        raise ValueError(f"--recompute is {written}; expected a number of blocks from 0 on, all, blocks or auto")
    return int(written) if written.isascii() and written.isdecimal() else written


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


def parse_share(written: str) -> float:
    """`5%` or `0.05` -> 0.05."""
    number = written.strip()
    return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
