"""The text of a configuration as plain data, and plain data as text: TOML, YAML, JSON, and arguments of a command line.

TOML, YAML, JSON    nested dicts; looked up by dotted names (`Nested`)
arguments           words as a shell script has them, with its assignments of variables replaced: {"num-layers": ["32"], "bf16": []}

A text may be hostile: what its variables, aliases and merges stand for is counted before it is made, and no step takes more than time
proportional to the text. What is written is compared with what the format's own parser reads of it.
"""

import ast
import json
import math
import operator
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

import yaml

from autoshard.reading import DEEPEST, check_sound

NAME = re.compile(r"[A-Za-z_]\w*")
DEFAULT = re.compile(r"\$\{(\w+):?[-=]([^}]*)\}")  # ${NAME:-value}
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
ARITHMETIC, BARE = re.compile(r"\$\(\((?:[^()]|\([^()]*\))*\)\)"), re.compile(r"(?<![\w$])(?<!\$\{)[A-Za-z_]\w*")  # $((A*B)): without $
NUMBERS = re.compile(r"\$\(\(((?:[\d+*/% -]|\([\d+*/% -]*\)){1,40})\)\)")  # $((8*(2+1)))
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}
DECLARED = re.compile(r"^(?:(?:then|else|do|export|local|readonly|declare|typeset)\s+|-\w+\s+|[^\s()=$]+\)\s*)*")  # before NAME=value
ASSIGNED = re.compile(r"""([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s"'#(]*)(?:\s+|$)""")
ARRAY = re.compile(r"""\b\w+\+?=\((?=["']?--)""")  # ARGS=(--bf16
PRESET = re.compile(r"\$\{(\w+):?=([^{}]*)\}")  # ${NAME:=value}
WORD = r"""["']?([^"'\s$]*)["']?"""
CONDITION, CASE = re.compile(rf"(?:el)?if \[\[? {WORD} (-eq|-ne|==?|!=) {WORD} \]\]?$"), re.compile(rf"case {WORD} in$")
ARM = re.compile(r"""\(?["']?([^"'()$;=]*)["']?\)""")  # of a case
PART = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|(?<![\w-])[\w-]++)"""  # of a dotted key
DEEP_KEY = re.compile(rf"(?:{PART}[ \t]*\.[ \t]*){{{DEEPEST}}}")  # tomllib takes time that grows with the square of the parts
MOST_EXPANDED = 10**6  # characters
MOST_VALUES = 10**5  # of a file with its aliases and merges written out
MOST_KEYS = 1000  # of a section
LARGEST = 2**31  # products of sizes stay within 64 bits
NEAR = 0.85  # difflib's ratio from which on a key that nobody knows is a misspelling


def parsed(text: str, path: str) -> dict[str, Any]:
    """The mapping in a TOML, YAML or JSON text, told by the ending of its file. ValueError in one sentence where it is none."""
    try:
        if path.endswith(".toml"):
            if DEEP_KEY.search(text):
                raise ValueError(f"a key has more than {DEEPEST} parts")
            data = tomllib.loads(text)
        elif path.endswith(".json"):
            data = json.loads(text)
        else:
            data = _yaml(text)
    except Exception as error:  # YAML's tags raise anything: a KeyError for `!!bool maybe`
        why = " ".join(str(error).split())[:200] if isinstance(error, (ValueError, yaml.YAMLError, RecursionError)) else repr(error)[:80]
        raise ValueError(f"{path} can't be read: {why}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {'nothing' if data is None else f'a {type(data).__name__}'}; expected keys with values")
    check_sound(data, path, most=MOST_VALUES)
    return data


def _yaml(text: str) -> Any:
    depth = 0
    for event in yaml.parse(text, Loader=PlainLoader):  # yaml.load recurses in C, which pyyaml 6.0.1 does not survive
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
    return yaml.load(text, Loader=PlainLoader)


class PlainLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # not every system has libyaml
    """YAML's safe loader, which leaves dates as text, and makes nothing that is much larger than the text."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _count(node, {}) > MOST_VALUES:
            raise ValueError(f"its aliases and merges stand for more than {MOST_VALUES} values")
        return node


def _count(node: yaml.Node, known: dict[int, float]) -> float:
    """Values of a node with all aliases written out; inf where it holds itself. known: those of other nodes, by id."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        pairs = isinstance(node, yaml.MappingNode)
        known[id(node)] = 1 + sum(_count(part, known) for item in node.value for part in (item if pairs else (item,)))
    return known[id(node)]


PlainLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":timestamp")]
    for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def integer(value: Any, what: str, least: int | None = None) -> int:
    """A whole number from a configuration, which may be text. ValueError for anything else, and for a smaller one than `least`."""
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int) or abs(number) >= LARGEST:
        unset = ", so write the variable's value" * str(value).startswith("$")
        raise ValueError(f"{what} is {str(value)[:60]!r}; expected a whole number below 2^31{unset}")
    if least is not None and number < least:
        raise ValueError(f"{what} is {number}; expected a whole number of {least} or more")
    return number


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
                if inner is None:
                    break
                if not isinstance(inner, Mapping):
                    raise ValueError(f"{self.path}: {section[:-1]} is {str(inner)[:40]!r}; expected a section of keys")
                if step not in inner:
                    self._check_spelling(inner, section, step)
                inner = inner.get(step)
                section += f"{step}."
            if inner is not None:
                return inner
        return None

    def _check_spelling(self, keys: Mapping[str, Any], section: str, missing: str) -> None:
        """ValueError where one of the section's keys is unknown, and nearer to the missing one than to any known."""
        if len(keys) > MOST_KEYS:
            raise ValueError(f"{self.path} has {len(keys)} keys in {section or 'its first section'}; expected {MOST_KEYS} at most")
        unknown = [key for key in keys if isinstance(key, str) and key not in self.known]
        for key in get_close_matches(missing, unknown, len(unknown) or 1, NEAR):
            if get_close_matches(key, {missing, *self.known}, 1, NEAR) == [missing]:
                raise ValueError(f"{self.path}: there is no {section}{key}; near is {missing}")

    def number(self, *names: str, default: int | None = None, least: int | None = None) -> int:
        value = self.value(*names)
        if value is None:
            if default is None:
                raise ValueError(f"{self.path} has no {names[0]}; expected a whole number")
            return default
        return integer(value, f"{self.path}: {names[0]}", least)

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the data, empty where it is not there. ValueError where something else is there."""
        value = self.value(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.path}: {name} is {str(value)[:40]!r}; expected a section of keys")
        return value or {}

    def flag(self, *names: str) -> bool:
        value = self.value(*names)
        return value.lower() in ("true", "yes", "on", "1") if isinstance(value, str) else bool(value)

    def text(self, *names: str, default: str = "") -> str:
        value = self.value(*names)
        return default if value is None else str(value)


def _with_defaults(text: str, written: Callable[[re.Match[str]], str]) -> str:
    """The text in which every ${NAME:-value} is written otherwise."""
    closed, brace, rest = text.rpartition("}")  # every one that begins also ends: none is looked for in all of the text
    return DEFAULT.sub(written, closed + brace) + rest


def arguments_of(text: str) -> dict[str, list[str]]:
    """The options in a shell script or a list of arguments, each with its words; an option that comes twice counts as its last."""
    text = _with_defaults(text, lambda one: one[0].replace("\n", " "))
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    variables, branches, running = Variables({}), _Branches(), []
    for line in lines:
        runs = []
        for part in re.split(r";(?=\s|$)", line):
            branches.note(part, variables)
            runs.append(branches.runs)
            if branches.runs is not False:
                variables.note(part, branches.runs is None)
        running += [line] if any(one is not False for one in runs) else []
    uncommented = (re.sub(r"\s#.*$", "", variables.replaced(ARRAY.sub("( ", line))) for line in running)
    options: dict[str, list[str]] = {}
    name, is_quoted, began_quoted = "", False, False
    for written in (word for line in uncommented for word in re.split(r"\s+", line)):
        word, closes = written.strip("\"'\\,;"), written.count(")") > written.count("(")
        if written.count("(") != written.count(")"):  # of an array of options, not of a word
            word = word.strip("\"'()\\,")
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name, began_quoted = name.replace("_", "-"), is_quoted or (written[0] == '"' and written.count('"') == 1)
            options[name] = [value.strip("\"'")] if value else []
        elif name and word:
            options[name].append(word)
        is_quoted ^= written.count('"') % 2 == 1
        if closes or (began_quoted and not is_quoted):  # the end of the options, behind which a command follows
            name = ""
    return options


@dataclass
class Variables:
    """The variables of a shell script, by name, and how many characters they may still stand for."""

    known: dict[str, str]
    left: int = MOST_EXPANDED
    unsure: set[str] = field(default_factory=set)  # which the branches of an if or a case set differently

    def note(self, line: str, in_branch: bool = False) -> None:
        """The variables that a line sets, if it does: [export] NAME=value [NAME=value] # comment."""
        for name, value in PRESET.findall(line):
            self.known.setdefault(name, value)
        line = line.strip()[DECLARED.match(line.strip()).end() :]  # type: ignore[union-attr]
        several = ASSIGNED.findall(line) if re.fullmatch(f"(?:{ASSIGNED.pattern}){{2,}}(?:#.*)?", line) else [line.partition("=")[::2]]
        for name, rest in several:
            value = rest[:1] + rest[1:].partition("#")[0]
            if "=" in line and NAME.fullmatch(name) and not (value.strip() and value[0].isspace()) and value[:1] != "(":
                self._set(name, self.replaced(value.strip().strip("\"'")), in_branch, re.search(rf"\$\{{?{name}\b", value) is not None)

    def _set(self, name: str, value: str, in_branch: bool, adds: bool) -> None:
        differs = in_branch and not adds and (name in self.unsure or self.known.get(name, value) not in ("", value))
        if differs and "$" not in value:
            self.unsure.add(name)
            self.known.pop(name, None)
        elif not differs:
            self.unsure.discard(name)
            self.known[name] = value

    def replaced(self, text: str) -> str:
        """The text with the variables' values. ValueError, before it is made, where it would be too long."""

        def value(match: re.Match) -> str:
            meant = self.known.get(match[1] or match[2], match[0])
            self.left -= len(meant)
            if self.left < 0:
                raise ValueError(f"the variables of the script stand for more than {MOST_EXPANDED} characters; write their values out")
            return meant

        text = _with_defaults(text, lambda one: f"${{{one[1]}}}" if self.known.get(one[1]) else one[2].strip("\"'"))
        text = ARITHMETIC.sub(lambda one: BARE.sub(r"$\g<0>", one[0]), text)
        return NUMBERS.sub(_calculated, VARIABLE.sub(value, text))


@dataclass
class _Branch:
    """Of an if or a case. None: unknown."""

    outside: bool | None  # whether the whole runs
    subject: str | None = None  # of a case
    begins: bool | None = None  # by its condition
    began: bool | None = False  # whether one before it did


class _Branches:
    """The branches in which a line of a script stands."""

    def __init__(self) -> None:
        self.open: list[_Branch] = []

    @property
    def runs(self) -> bool | None:
        """Whether the lines of this place run."""
        both = (self.open[-1].outside, self.open[-1].begins) if self.open else ()
        return False if False in both else None if None in both else True

    def note(self, part: str, variables: Variables) -> None:
        part = " ".join(part.split())
        word = part.partition(" ")[0]
        if word in ("if", "case"):
            subject = CASE.match(variables.replaced(part))
            self.open.append(_Branch(self.runs, subject and subject[1]))
        if not self.open:
            return
        if word in ("if", "elif"):
            asked = CONDITION.match(variables.replaced(part))
            self._begin(None if asked is None else (asked[1] == asked[3]) == (asked[2] in ("-eq", "=", "==")))
        elif word == "else":
            self._begin(True)
        elif word in ("fi", "esac"):
            self.open.pop()
        elif self.open[-1].subject is not None and (arm := ARM.match(part)):
            self._begin(arm[1].strip() == "*" or self.open[-1].subject in arm[1].split("|"))

    def _begin(self, truth: bool | None) -> None:
        branch = self.open[-1]
        branch.begins = False if branch.began or truth is False else None if None in (branch.began, truth) else True
        branch.began = branch.began or (branch.began if branch.begins is False else branch.begins)


def _calculated(text: re.Match[str]) -> str:
    """What a shell makes of $((8*(2+1))); the text itself where that is no number."""

    def value(node: Any) -> int:
        return OPERATORS[type(node.op)](value(node.left), value(node.right)) if isinstance(node, ast.BinOp) else node.value

    try:
        return str(value(ast.parse(text[1].strip(), mode="eval").body))
    except (SyntaxError, KeyError, AttributeError, ZeroDivisionError):
        return text[0]


def flat(data: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Nested sections as one, by dotted names."""
    values: dict[str, Any] = {}
    for key, value in data.items():
        values |= flat(value, f"{section}{key}.") if isinstance(value, Mapping) else {f"{section}{key}": value}
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as sections: the inverse of `flat`."""
    data: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return data


def toml_text(data: Mapping[str, Any]) -> str:
    """Plain values and sections of them as TOML. ValueError where TOML can't hold them."""
    return _as_written(_toml_text(data), data, tomllib.loads)


def _as_written(text: str, data: object, parser: Callable[[str], object]) -> str:
    """The text. ValueError where its format's parser doesn't read the data in it."""
    try:
        if parser(text) == data and text.encode():
            return text
        why = "other values are read"
    except (ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())[:200]
    raise ValueError(f"the configuration can't be written: {why} in the text of it; give its odd values another form")


def _toml_text(data: Mapping[str, Any], section: str = "") -> str:
    rows = "".join(f"{toml_key(key)} = {toml_value(value)}\n" for key, value in data.items() if not isinstance(value, Mapping))
    inner = {f"{section}.{toml_key(key)}".lstrip("."): value for key, value in data.items() if isinstance(value, Mapping)}
    head = f"[{section}]\n" if section and (rows or not inner) else ""
    return "\n".join(filter(None, [head + rows, *(_toml_text(value, name) for name, value in inner.items())]))


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _quoted(key)


def _quoted(text: str) -> str:
    """TOML's strings are JSON's, but that characters are not written as two halves, and DEL is escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: Any) -> str:
    """JSON's text, numbers and booleans are TOML's."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_key(key)} = {toml_value(inner)}' for key, inner in value.items())}}}"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def yaml_text(data: Mapping[str, Any]) -> str:
    """Plain values as YAML. ValueError where YAML can't hold them."""
    return _as_written(yaml.safe_dump(dict(data), sort_keys=False), data, partial(yaml.load, Loader=PlainLoader))


def json_text(data: Mapping[str, Any]) -> str:
    return _as_written(json.dumps(data, indent=2) + "\n", data, json.loads)


def argument_words(value: Any) -> str:
    """Behind an option's name."""
    return "" if value is True else "".join(f" {shlex.quote(str(word))}" for word in (value if isinstance(value, list) else [value]))


def arguments_text(options: Mapping[str, Any]) -> str:
    """Options as lines of a command: True is a flag, False and None are left out."""
    rows = [f"--{name}{argument_words(value)}" for name, value in options.items() if value not in (None, False)]
    words = [word for row in rows for word in shlex.split(row)]
    return _as_written(" \\\n".join(rows) + "\n", words, lambda text: shlex.split(text.replace("\\\n", "")))
