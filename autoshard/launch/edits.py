"""A configuration with other values, in which everything else stays as it is: order, comments, spaces, keys that nobody here knows.

    edited(text, path, {"parallelism.tensor_parallel_degree": 4, "model.converters": None})

Keys have dotted names; None removes one. TOML is read statement by statement, YAML and JSON are changed where their parser saw a value,
arguments where they stand in the script. The caller reads again what was written.
"""

import json
import re
import tomllib
from collections.abc import Container, Iterator, Mapping
from functools import reduce
from typing import Any

import yaml

from .texts import PlainLoader, argument_words, toml_key, toml_value

STATEMENT = 500  # lines of a value in TOML at most
# a word of a shell, and words that are no values of the option before them: options, comments, operators, arrays, and more of a line's end
WORD = r"""(?:"[^"\n]*"|'[^'\n]*'|`[^`\n]*`|\$\(\([^()\n]*\)\)|[^\s\\"'`)(;|&<>])++"""
# the options of a script, with the spaces of a line that begins with one; those that are no options of what starts it (torchrun)
OPTION = r"(?:^|\s)#[^\n]*|(?:^(?P<indent>[ \t]*)|(?<=[\s\"'(]))(?P<option>--\w)"
BESIDE = OPTION[:-3] + r"(?:num|tensor|pipeline|context|hidden|micro|global|seq|bf16|fp16)\b)"
NOT_YAML = re.compile(r"\t|\\u[dD][89a-fA-F]\w\w")  # of JSON: what YAML's parser stops at, tabs and half characters
GONE = "\0"  # in a text's place of what is left out
NO_VALUE = r"""["']?-|[#;|&<>]|\d*[<>]|"?\$\{\w+\[[@*]"""


def edited(text: str, path: str, changes: Mapping[str, Any], flags: Container[str] = ()) -> str:
    """The text with other values. flags: arguments without one. ValueError where a value can't be found or put there."""
    if path.endswith(".toml"):
        return _toml(text, changes)
    if path.endswith((".yaml", ".yml", ".json")):
        for name, value in changes.items():
            text = _yaml(text, name.split("."), value)
        return text
    for name, value in changes.items():
        text = _argument(text, name, value, name in flags)
    return text


# -- TOML ------------------------------------------------------------------------------------------------------------------------------


def _toml(text: str, changes: Mapping[str, Any]) -> str:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        place = last = None
        for at, start, end in _statements(lines):
            if at == section:
                last = end
                if start != end and key in tomllib.loads("".join(lines[start:end])):
                    place = start, end
        written = f"{toml_key(key)} = {toml_value(value)}"
        if place:
            start, end = place
            comment = _comment(lines[start]) if end == start + 1 else ""
            lines[start:end] = [] if value is None else [f"{_indent(lines[start])}{written}{comment}\n"]
        elif value is not None and last is not None:
            lines.insert(last, f"{_indent(lines[last - 1])}{written}\n")
        elif value is not None:
            lines += ["\n", f"[{section}]\n", f"{written}\n"]
    return "".join(lines)


def _statements(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """(section, first line, line behind the last) of every key; and of each heading, as an empty range behind it."""
    section, at = "", 0
    while at < len(lines):
        line, start = lines[at].strip(), at
        at += 1
        if re.match(r"\[[^\[]", line):
            section = ".".join(part.strip(" \"'") for part in line[1 : line.index("]")].split("."))
            yield section, at, at
        elif line and line[0] not in "#[":
            while at - start < STATEMENT and not _is_toml("".join(lines[start:at])):
                at += 1
            yield section, start, at


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _is_toml(text: str) -> bool:
    try:
        return bool(tomllib.loads(text))
    except tomllib.TOMLDecodeError:
        return False


def _comment(line: str) -> str:
    """What stands behind the value of a line."""
    ends = (i for i, letter in enumerate(line) if letter == "#" and _is_toml(line[:i]))
    end = next(ends, len(line.rstrip()))
    return line.rstrip("\n")[len(line[:end].rstrip()) :].rstrip()


# -- YAML and JSON ---------------------------------------------------------------------------------------------------------------------


def _yaml(text: str, names: list[str], value: Any) -> str:
    node: Any = yaml.compose(NOT_YAML.sub(lambda one: " " * len(one[0]), text), Loader=PlainLoader)
    for depth, name in enumerate(names):
        if isinstance(node, yaml.Node) and (node.value == [] or node.tag.endswith(":null")):
            begin, end = node.start_mark.index, node.end_mark.index
            inner = reduce(lambda inner, step: {step: inner}, reversed(names[depth:]), value)
            filled = _yaml(text, names[:depth], inner) if depth else f"{text[:begin]}{json.dumps(inner)}{text[end:]}"
            return text if value is None else filled
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{'.'.join(names[:depth])} is no section")
        parent = node
        key, node = next((pair for pair in reversed(node.value) if pair[0].value == name), (parent, None))  # parsers take the last
        if node is None:
            return text if value is None else _inserted(text, parent, names[depth:], value)
    begin, end = node.start_mark.index, len(text[: node.end_mark.index].rstrip())  # a block ends where the next key begins
    if parent.flow_style:
        return f"{text[:begin]}{json.dumps(value)}{text[end:]}"
    if value is None:
        return text[: text.rfind("\n", 0, key.start_mark.index) + 1] + text[_end_of_line(text, end) :]
    if begin >= end or not isinstance(node, yaml.ScalarNode):  # nothing, or a block
        begin = key.end_mark.index + 1
        return f"{text[:begin]} {_plain(value)}{text[max(begin, end):]}"
    return f"{text[:begin]}{_plain(value)}{text[end:]}"


def _inserted(text: str, node: yaml.MappingNode, names: list[str], value: Any) -> str:
    """With a key more at the end of a mapping; the sections above it too where they are new."""
    last_key, last = node.value[-1]
    first = node.value[0][0].start_mark
    indent = text[first.index - first.column : first.index]
    indent = " " * first.column if indent.strip() else indent
    if node.flow_style:
        for name in reversed(names[1:]):
            value = {name: value}
        at = last.end_mark.index
        line = "\n" + indent if last_key.start_mark.line != node.start_mark.line else " "
        return f"{text[:at]},{line}{json.dumps(names[0])}: {json.dumps(value)}{text[at:]}"
    at = last.end_mark.index if isinstance(last, yaml.ScalarNode) else len(text[: last.end_mark.index].rstrip())
    at = _end_of_line(text, at)
    rows = [f"{indent}{'  ' * depth}{name}:" for depth, name in enumerate(names)]
    rows[-1] += f" {_plain(value)}"
    before = "" if not at or text[at - 1] == "\n" else "\n"
    return text[:at] + before + "\n".join(rows) + "\n" + text[at:]


def _end_of_line(text: str, at: int) -> int:
    """Behind the line with the character before `at`."""
    end = text.find("\n", max(at - 1, 0))
    return len(text) if end < 0 else end + 1


def _plain(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


# -- arguments -------------------------------------------------------------------------------------------------------------------------


def _argument(text: str, name: str, value: Any, is_flag: bool) -> str:
    """In all places of a script that are no comments; where there is none, in front of the first line that begins with an option."""
    option = rf"--{re.sub('[-_]', '[-_]', name)}(?![\w-])"
    option = rf"""(?<![\w-])(?:"{option}"|'{option}'|{option})"""
    words = "" if is_flag else rf"(?:(?:[ \t=]|\\\n)+(?!{NO_VALUE}){WORD}(?:[ \t]+(?!{NO_VALUE}|\$){WORD})*)?"
    written = "" if value in (None, False) else f"--{name}{argument_words(value)}"
    place = re.compile(rf"((?:^|(?<=\s))#[^\n]*)|{option}{words}", re.MULTILINE)  # a comment, or the option
    is_there = any(one[1] is None for one in place.finditer(text))
    text = place.sub(lambda one: one[1] or written or GONE, text)
    alone = rf"[ \t\"']*{GONE}[ \t\"']*"  # a line of nothing else; the last of a command takes the backslash before it along
    text = re.sub(rf"(?:(?<![ \t])[ \t]*\\)?\n{alone}(?=\n|\Z)|^{alone}\\?\n|{GONE}(?:[ \t]+(?=\S))?", "", text, flags=re.MULTILINE)
    if written and not is_there:
        firsts = [one for pattern in (BESIDE, OPTION) for one in re.finditer(pattern, text, re.MULTILINE) if one["option"]]
        if not firsts:
            raise ValueError(f"there is no option beside which --{name} has a place; expected the arguments of the launcher's command")
        indent, at = firsts[0]["indent"], firsts[0].start("option")
        at -= re.match(r"""(["'])--[\w-]+\1""", text[max(at - 1, 0) :]) is not None
        line = text[text.rfind("\n", 0, at) + 1 : text.find("\n", at) % (len(text) + 1)]
        goes_on = line.rstrip().endswith("\\") or text[: at - len(indent or "")].endswith("\\\n")
        after = " " if indent is None else f"{' ' + chr(92) if goes_on else ''}\n{indent}"
        text = f"{text[:at]}{written}{after}{text[at:]}"
    return text
