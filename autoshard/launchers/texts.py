"""The text of a configuration as plain data, and plain data as text: TOML, YAML, JSON, and arguments of a command line.

TOML, YAML, JSON    nested dicts; looked up by dotted names (`Nested`)
arguments           words as a shell script has them, with its assignments of variables replaced: {"num-layers": ["32"], "bf16": []}
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from autoshard.reading import check_sound

from .sizes import integer

ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=([^\s(][^\n]*?)?\s*(?:#.*)?$", re.M)
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")  # ${NAME:-value}
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
NEAR = 0.85  # difflib's ratio from which on a key that nobody knows is a misspelling


def parsed(text: str, path: str) -> dict[str, Any]:
    """The mapping in a TOML, YAML or JSON text, told by the ending of its file. ValueError in one sentence where it is none."""
    try:
        if path.endswith(".toml"):
            data = tomllib.loads(text)
        elif path.endswith(".json"):
            data = json.loads(text)
        else:
            data = yaml.load(text, Loader=PlainLoader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} can't be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}; expected keys with values")
    check_sound(data, path)
    return data


class PlainLoader(yaml.SafeLoader):
    """YAML's safe loader, which leaves dates as text."""


PlainLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":timestamp")]
    for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True)
class Nested:
    """Nested data whose values are looked up by dotted names, first name first; values are checked where they are read."""

    data: Mapping[str, Any]
    path: str
    known: frozenset[str] = frozenset()  # keys of the launcher, read or not, that resemble one that is read

    def value(self, *names: str) -> Any:
        """The first of the names that has a value; None where none has. ValueError where one is missing and a key resembles it."""
        for name in names:
            inner: Any = self.data
            section = ""
            for step in name.split("."):
                if isinstance(inner, Mapping) and step not in inner:
                    self._check_spelling(inner, section, step)
                inner = inner.get(step) if isinstance(inner, Mapping) else None
                section += f"{step}."
            if inner is not None:
                return inner
        return None

    def _check_spelling(self, keys: Mapping[str, Any], section: str, missing: str) -> None:
        """ValueError where one of the section's keys is unknown, and nearer to the missing one than to any known."""
        for key in keys:
            if not isinstance(key, str) or key in self.known or not get_close_matches(key, [missing], 1, NEAR):
                continue
            if get_close_matches(key, {missing, *self.known}, 1, NEAR) == [missing]:
                raise ValueError(f"{self.path}: there is no {section}{key}; near is {missing}")

    def number(self, *names: str, default: int | None = None) -> int:
        value = self.value(*names)
        if value is None:
            if default is None:
                raise ValueError(f"{self.path} has no {names[0]}; expected a whole number")
            return default
        return integer(value, f"{self.path}: {names[0]}")

    def flag(self, *names: str) -> bool:
        value = self.value(*names)
        return value.lower() in ("true", "yes", "on", "1") if isinstance(value, str) else bool(value)

    def text(self, *names: str, default: str = "") -> str:
        value = self.value(*names)
        return default if value is None else str(value)


def arguments_of(text: str) -> dict[str, list[str]]:
    """The options in a shell script or a list of arguments, each with its words; an option that comes twice counts as its last."""
    text = DEFAULT.sub(lambda match: match[1], text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    known: dict[str, str] = {}
    for name, value in ASSIGNMENT.findall(text):
        known[name] = _replaced(value.strip().strip("\"'"), known)
    words = []
    for line in lines:
        for word in re.split(r"\s+", re.sub(r"\s#.*$", "", _replaced(line, known))):
            words.append(word.strip("\"'()\\,"))
    options: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            options[name] = [value] if value else []
        elif name and word:
            options[name].append(word)
    return options


def _replaced(text: str, known: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[0]), text)


def toml_text(data: Mapping[str, Any], section: str = "") -> str:
    """Plain values and sections of them as TOML."""
    rows = "".join(f"{_key(key)} = {_value(value)}\n" for key, value in data.items() if not isinstance(value, Mapping))
    inner = {f"{section}.{_key(key)}".lstrip("."): value for key, value in data.items() if isinstance(value, Mapping)}
    head = f"[{section}]\n" if section and (rows or not inner) else ""
    return "\n".join(filter(None, [head + rows, *(toml_text(value, name) for name, value in inner.items())]))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)


def _value(value: Any) -> str:
    """JSON's text, numbers and booleans are TOML's."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in value.items())}}}"
    return json.dumps(value)


def yaml_text(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(data), sort_keys=False)


def arguments_text(options: Mapping[str, Any]) -> str:
    """Options as lines of a command: True is a flag, False and None are left out."""
    rows = [
        f"--{name}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in options.items()
        if value not in (None, False)
    ]
    return " \\\n".join(rows) + "\n"
