"""Kinds of arguments that only the command line has: files that are read or written, models, meshes, lists of numbers."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoshard.cli.model_source import config_folder, may_have, names_model
from autoshard.mesh import DEVICES, parse_shape
from autoshard.options import SIZE, ValueKind, check_layout
from autoshard.reading import FORMATS, content_of, data_of, file_and_program, parsed, refuse_other
from autoshard.writing import destination

SMALL = 1_000_000  # bytes: files up to here are read before anything slow is imported
MOST_WORKERS = 1024  # processes of one machine
SITE_DEVICES = tuple(sorted(set(DEVICES) - {"cpu"}))  # of autoshard/cost/devices
PRICES = ("a100", "h100", "h200", "b200", "mi300x", "l40s", "rtx", "cpu")


def reading(read: Callable[[str, Any], Any], typed: Any = str) -> ValueKind:
    """A kind of which all that can be read is a value."""
    return ValueKind(lambda name, value: None, read, typed)


def each(kind: ValueKind) -> ValueKind:
    """Several of a kind: the option is repeated."""

    def check(name: str, values: Sequence[Any]) -> None:
        for value in values:
            kind.check(name, value)

    return ValueKind(check, lambda name, typed: [kind.read(name, one) for one in typed], list[str])


# -- files ---------------------------------------------------------------------------------------------------------------------------


def _readable(name: str, value: str, expected: str) -> None:
    path = Path(value)
    if path.is_dir():
        raise ValueError(f"{value or '.'} is a folder; expected {expected}")
    if not path.exists():
        raise ValueError(f"there is no file {value}; expected {expected}")


def file(expected: str) -> ValueKind:
    """A file that exists; its reader checks the content."""
    return ValueKind(lambda name, value: _readable(name, value, expected))


def plan(expected: str = "a plan's file, as `autoshard plan --out` writes it", also: tuple[str, ...] = ()) -> ValueKind:
    """A plan's file, or one program of a file with several: FILE#NAME. also: other formats that the verb reads."""

    def check(name: str, value: str) -> None:
        named, _ = file_and_program(value)
        _readable(name, named, expected)
        if Path(named).stat().st_size <= SMALL and content_of(named, "plan").lstrip()[:1] == b"{":  # else a pickle, or a configuration
            try:
                data = parsed(content_of(named, "plan"), named, "plan")
            except ValueError as error:
                raise ValueError(str(error).replace(FORMATS["plan"].expected, expected)) from None
            refuse_other(data, named, "plan", "programs", *also)

    return ValueKind(check)


PLAN = plan()


def _cluster(name: str, value: str) -> None:
    _readable(name, value, "what `autoshard calibrate measure --out` wrote")
    if Path(value).stat().st_size <= SMALL:
        data_of(value, "cluster")


def _folder(name: str, value: str) -> None:
    path = Path(value)
    if (path.exists() and not path.is_dir()) or not path.parent.is_dir():
        raise ValueError(f"{name} {value} is a file, or its folder does not exist; give the name of a folder, new or old")


CLUSTER, FOLDER = ValueKind(_cluster), ValueKind(_folder)
OUT = ValueKind(lambda name, value: check_out(value, name))
PICTURE = ValueKind(lambda name, value: check_picture(value, name))


# -- models --------------------------------------------------------------------------------------------------------------------------


def _model(name: str, value: str) -> None:
    """The file exists, and something in it may have the function's name."""
    if value.startswith("hf:"):
        config_folder(value.removeprefix("hf:"))
        return
    value = value.partition("#")[0]  # one of several programs follows
    path, _, function = value.rpartition(":")
    if not path or not function.isidentifier():
        raise ValueError(f"MODEL is {value!r}; expected file.py:function, for example models/gpt2.py:small, or hf:DIR")
    may_have(path, function)


def _model_or_plan(name: str, value: str) -> None:
    if names_model(value):
        _model(name, value)
    else:
        PLAN.check(name, value)


def _model_or_configuration(name: str, value: str) -> None:
    if names_model(value):
        _model(name, value)
    elif Path(value).suffix in (".toml", ".sh", ".yaml", ".yml", ".json"):
        _readable(name, value, "a launcher's configuration")
    else:
        raise ValueError(f"{value} is neither a model (file.py:function, hf:DIR) nor a configuration (.toml, .sh, .yaml, .json)")


MODEL, MODEL_OR_PLAN, MODEL_OR_CONFIGURATION = ValueKind(_model), ValueKind(_model_or_plan), ValueKind(_model_or_configuration)
SETTINGS = reading(lambda name, typed: parse_settings(typed), list[str])


# -- meshes and devices --------------------------------------------------------------------------------------------------------------

MESH = reading(lambda name, typed: parse_shape(typed))
MESH_OR_AUTO = reading(lambda name, typed: typed if typed == "auto" else parse_shape(typed))


def _nodes(name: str, typed: str) -> tuple[int, int, str | None]:
    match = re.fullmatch(r"(\d+)x(\d+)(?::(\w+))?", typed.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise ValueError(f"{name} is {typed!r}; expected NODESxDEVICES:DEVICE, for example 2x8:h100")
    if match[3] is not None:
        DEVICE.check(name, match[3])
    return int(match[1]), int(match[2]), match[3]


def _known(words: Sequence[str], what: str, more: str = "") -> ValueKind:
    """One of these words, in the sentences of the rooms that have them."""

    def check(name: str, value: str) -> None:
        if value not in words:
            raise ValueError(f"{what} {value!r}; known are {', '.join(words)}{more}")

    return ValueKind(check)


DEVICE = _known(sorted(DEVICES), "unknown device")
PRICED = _known(PRICES, "no prices are known for", ", or measure: autoshard calibrate measure")


def _site_device(name: str, value: str) -> None:
    if value not in SITE_DEVICES:
        count = f"; for a number of devices use --devices {value}" if value.isdecimal() else ""
        raise ValueError(f"unknown device {value!r}; known are {', '.join(SITE_DEVICES)}{count}")


NODES, SITE_DEVICE = reading(_nodes), ValueKind(_site_device)
DEVICE_OR_FILE = ValueKind(lambda name, value: (CLUSTER if value.endswith(".json") else DEVICE).check(name, value))


# -- numbers and words ---------------------------------------------------------------------------------------------------------------


def such(holds: Callable[[Any], bool], expected: str, typed: Any = str) -> ValueKind:
    """What is typed, where this holds of it."""

    def check(name: str, value: Any) -> None:
        try:
            known = holds(value)
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"{name} is {value!r}; expected {expected}")

    return ValueKind(check, typed=typed)


def _percent(name: str, typed: str) -> float:
    """`5%` or `0.05` -> 0.05."""
    try:
        share = float(typed.strip().removesuffix("%")) / (100 if typed.strip().endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise ValueError(f"{name} is {typed!r}; expected a share of 0 or more, for example 5% or 0.05")
    return share


PERCENT = reading(_percent)
SHARE = such(lambda value: 0 <= value < 1, "a number from 0 to 1: 0.01 is one percent", float)
SWITCHES = such(lambda value: value == "none" or 0 <= float(value) < math.inf, "how often per unit, 0 or more, or none")
WORKERS = such(lambda value: 1 <= value <= MOST_WORKERS, f"a number of processes, 1 to {MOST_WORKERS}", int)
LAYOUT = ValueKind(lambda name, value: check_layout(name, value, any_placement=False))
SIZE_OR_NONE = reading(lambda name, typed: 0.0 if typed.strip() in ("0", "0GB") else SIZE.read(name, typed))


# -- settings, results and pictures -------------------------------------------------------------------------------------------------


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
