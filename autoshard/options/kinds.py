"""Kinds of options: how a value is typed on a command line, what it means, and which values there are.

    kind.read(name, typed) -> value       what was typed, read: "80GB" is 8e10; ValueError where it can't be read
    kind.check(name, value)               ValueError where there is no such value: what was found, what was expected

name: of the option as the user knows it, `memory_limit` or `--memory`. None of this needs torch, so that a wrong word is refused at once.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.precision import Precision

# Bytes of state per element, states in float32 as in mixed-precision practice: two moments, none, one moment.
OPTIMIZERS = {"adamw": 8, "sgd": 0, "momentum": 4}
MOST_DIM = 63  # that a layout can shard
FORGOTTEN = 1000.0  # bytes: below them a number without a unit is one whose unit was forgotten
_SCALE = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _as_typed(name: str, typed: Any) -> Any:
    return typed


@dataclass(frozen=True)
class ValueKind:
    """One kind of value; see the top of this file."""

    check: Callable[[str, Any], object]
    read: Callable[[str, Any], Any] = _as_typed
    typed: Any = str  # the type of what is typed: str, int, float, bool, or list[str] where the option is repeated
    schema: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of a value in a file


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -- plain values --------------------------------------------------------------------------------------------------------------------


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected True or False")


SWITCH = ValueKind(_check_switch, typed=bool, schema={"type": "boolean"})
OFF = ValueKind(_check_switch, lambda name, typed: not typed, bool, {"type": "boolean"})  # typed as --no-NAME
TEXT = ValueKind(_as_typed, schema={"type": "string"})


def one_of(known: Sequence[str], what: str = "") -> ValueKind:
    """One of these words; what: the noun of which they are names, for the sentence about another word."""

    def check(name: str, value: Any) -> None:
        if value not in known and not (what == "solver" and callable(getattr(value, "solve", None))):
            sentence = f"there is no {what} {value!r}" if what else f"{name} is {value!r}"
            raise ValueError(f"{sentence}; expected one of {', '.join(known)}")

    return ValueKind(check, schema={"enum": list(known)})


def count(least: int = 1) -> ValueKind:
    """A whole number of `least` or more."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}; expected a whole number of {least} or more")

    return ValueKind(check, typed=int, schema={"type": "integer", "minimum": least})


def number(least: float = 0.0, *, above: bool = False, finite: bool = True, unit: str = "") -> ValueKind:
    """A number of `least` or more, or above it."""
    wanted = f"number above {least:g}" if above else f"number of {least:g} or more"
    wanted += f", in {unit}" if unit else ""

    def check(name: str, value: Any) -> None:
        enough = is_number(value) and (value > least if above else value >= least)
        if not enough or (finite and not value < math.inf):
            raise ValueError(f"{name} is {value!r}; expected a {'finite ' if value == math.inf else ''}{wanted}")

    return ValueKind(check, typed=float, schema={"type": "number", "exclusiveMinimum" if above else "minimum": least})


def _check_counts(name: str, value: Any) -> None:
    several = value if isinstance(value, (list, tuple)) else ()
    if not several or any(not isinstance(one, int) or isinstance(one, bool) or one < 1 for one in several):
        raise ValueError(f"{name} is {value!r}; expected whole numbers of 1 or more, for example (4, 8)")


def _read_counts(name: str, typed: str) -> tuple[int, ...]:
    parts = [part.strip() for part in typed.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name} is {typed!r}; expected whole numbers of 1 or more, for example 4 or 1,2,4")
    return tuple(map(int, parts))


COUNTS = ValueKind(_check_counts, _read_counts)


def some_of(known: Sequence[str]) -> ValueKind:
    """Several of these words; on a command line with commas between them."""
    one = one_of(known)

    def check(name: str, value: Any) -> None:
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(f"{name} is {value!r}; expected some of {', '.join(known)}")
        for word in value:
            one.check(name, word)

    return ValueKind(check, lambda name, typed: tuple(word.strip() for word in typed.split(",")))


# -- bytes ---------------------------------------------------------------------------------------------------------------------------


def parse_bytes(written: str, what: str = "memory") -> float:
    """`80GB`, `300 GB/s`, `64GiB`, `8e10` -> bytes (per second)."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([KMGT]?I?)(B?)(?:/S)?\s*", written, re.IGNORECASE)
    try:
        value = float(match[1]) * _SCALE[match[2].upper()] if match else math.nan
    except (ValueError, KeyError):
        value = math.nan
    example = "300GB/s" if "bandwidth" in what else "80GB"
    if match and match[3] == "b" and "bandwidth" in what:
        raise ValueError(f"{what} is {written!r}, a number of bits; write bytes, {value / 8e9:g}GB/s, or a capital B if they are bytes")
    if not 0 < value < math.inf:
        raise ValueError(f"{what} is {written!r}; expected a positive number with a unit, for example {example}")
    if value < FORGOTTEN and match is not None and not match[2] and not match[3]:
        raise ValueError(f"{what} is {written!r}, which is {value:g} bytes; add its unit, for example {example}")
    return value


def _check_bytes(name: str, value: Any) -> None:
    if not (is_number(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; expected a positive number of bytes per device, or None")


def _read_bytes(name: str, typed: str) -> float:
    return parse_bytes(typed, name)


SIZE = ValueKind(_check_bytes, _read_bytes, str, {"type": "number", "minimum": 0})


def _check_sizes(name: str, value: Any) -> None:
    for one in value if isinstance(value, (list, tuple)) else [value]:
        _check_bytes(name, one)


SIZES = ValueKind(_check_sizes, lambda name, typed: tuple(_read_bytes(name, one) for one in typed), list[str])


# -- layouts -------------------------------------------------------------------------------------------------------------------------


def check_layout(name: str, written: str, *, any_placement: bool = True) -> None:
    """ValueError where it isn't placements as `layout.parse` reads them; any_placement: `*` is one."""
    for part in (part.strip() for part in written.split(",")):
        shard = re.fullmatch(r"S\((\d{1,3})\)|S(\d{1,3})", part)
        known = part == "R" or re.fullmatch(r"P(\((sum|avg|max|min)\))?", part) or (any_placement and part == "*")
        if not known and not (shard and int(shard[1] or shard[2]) <= MOST_DIM):
            raise ValueError(f"{name}: layout {written!r} has {part!r}; expected R, S(dim) or P per mesh axis, for example S(0),R")


def parse_pins(written: Sequence[str], option: str = "--pin") -> dict[str, str]:
    """`["wte.weight=R,S(0)"]` -> {"wte.weight": "R,S(0)"}."""
    named = parse_forbidden(written, option)
    if twice := [name for name, layouts in named.items() if len(layouts) > 1]:
        raise ValueError(f"{option} gives {twice[0]!r} twice; give it one layout")
    return {name: layout for name, (layout,) in named.items()}


def parse_forbidden(written: Sequence[str], option: str = "--forbid") -> dict[str, list[str]]:
    """`["wte.weight=R,R", "wte.weight=S(0),R"]` -> {"wte.weight": ["R,R", "S(0),R"]}."""
    forbidden: dict[str, list[str]] = {}
    for item in written:
        name, equals, layout = (part.strip() for part in item.rpartition("="))
        if not equals or not name or not layout:
            raise ValueError(f"{option} {item!r} is not NAME=LAYOUT; write for example {option} 'wte.weight=R,S(0)'")
        forbidden.setdefault(name, []).append(layout)
    return forbidden


def _check_names(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}; expected a dict, for example {{'wte.weight': 'S(0),R'}}")
    if wrong := [key for key in value if not isinstance(key, str)]:
        raise ValueError(f"{name} names {wrong[0]!r}; expected the name of a tensor, or a glob of names, as text")


def _read_pins(parse: Callable[[Sequence[str], str], Mapping[str, Any]]) -> Callable[[str, Sequence[str]], Mapping[str, Any]]:
    def read(name: str, typed: Sequence[str]) -> Mapping[str, Any]:
        named = parse(typed, name)
        for tensor, layouts in named.items():
            for written in [layouts] if isinstance(layouts, str) else layouts:
                check_layout(f"{name} {tensor}", written)
        return named

    return read


_LAYOUT = {"type": "string"}
LAYOUTS = ValueKind(_check_names, _read_pins(parse_pins), list[str], {"type": "object", "additionalProperties": _LAYOUT})
FORBIDDEN = ValueKind(
    _check_names, _read_pins(parse_forbidden), list[str],
    {"type": "object", "additionalProperties": {"type": ["array", "string"], "items": _LAYOUT}},
)  # fmt: skip


def _read_dims(name: str, typed: Sequence[str]) -> dict[str, dict[int, tuple[str, int, int, int]]]:
    """`["input_*=batch:1-64,8*seq:1-8"]` -> {"input_*": {0: ("batch", 1, 64, 1), 1: ("seq", 1, 8, 8)}}; a dim of one size is left empty."""
    named = {}
    for item in typed:
        inputs, equals, dims = (part.strip() for part in item.partition("="))
        rows = [re.fullmatch(r"(?:(?:(\d{1,9})\*)?([^\W\d]\w*):(\d{1,9})-(\d{1,9}))?", dim.strip()) for dim in dims.split(",")]
        if not all((inputs, equals, dims, *rows)):
            raise ValueError(f"{name} {item!r} is not INPUT=DIMS; write for example {name} 'input_*=batch:1-64,seq:128-8192'")
        if inputs in named:
            raise ValueError(f"{name} gives {inputs!r} twice; give it all its dims at once")
        named[inputs] = {k: (row[2], int(row[3]), int(row[4]), int(row[1] or 1)) for k, row in enumerate(rows) if row and row[2]}
        if wrong := [row[0] for row in rows if row and row[2] and not 0 < int(row[3]) < int(row[4])]:
            raise ValueError(
                f"{name} {item!r} has {wrong[0]}; expected sizes of 1 or more, the least first and the greatest above it, for example "
                "batch:1-64; leave the place of a dim of one size empty"
            )
    return named


DIMS = ValueKind(_as_typed, _read_dims, list[str])


# -- values of one option ------------------------------------------------------------------------------------------------------------


def bytes_per_parameter(optimizer: str | float) -> float:
    """Bytes of state per element of an optimizer by name, or the number itself; ValueError on anything else."""
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    if is_number(optimizer) and 0 <= optimizer < math.inf:  # type: ignore[operator]
        return optimizer  # type: ignore[return-value]
    known = ", ".join(OPTIMIZERS)
    raise ValueError(f"unknown optimizer {optimizer!r}; expected {known}, or its bytes of state per parameter, for example 8")


def _read_optimizer(name: str, typed: str) -> str | float:
    """`adamw`, or `12` -> 12.0 bytes of state per parameter."""
    try:
        return float(typed)
    except ValueError:
        return typed


OPTIMIZER = ValueKind(lambda name, value: bytes_per_parameter(value), _read_optimizer, str, {"type": ["string", "number"]})
PRECISION = ValueKind(
    lambda name, value: Precision.of(value), lambda name, typed: Precision.parse(typed), str,
    {"type": "string", "description": "dtypes of mixed precision: bfloat16:reduce=float32,output=float32"},
)  # fmt: skip


def recomputed(words: Sequence[str]) -> ValueKind:
    """A number of blocks, or one of these words."""

    *first, last = ["a number of blocks", *map(repr, words)]

    def check(name: str, value: Any) -> None:
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_count and value not in words:
            raise ValueError(f"{name} is {value!r}; expected {', '.join(first)} or {last}")

    def read(name: str, typed: str) -> int | str:
        return int(typed) if typed.isascii() and typed.isdecimal() else typed

    return ValueKind(check, read, str, {"anyOf": [{"type": "integer", "minimum": 0}, {"enum": list(words)}]})


def _check_accepted(name: str, value: Any) -> None:
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(is_number(x) and x >= 0 for x in value)):
        raise ValueError(f"{name} is {value!r}; expected a relative gap and seconds, for example (0.01, 60)")


ACCEPTED = ValueKind(_check_accepted)
