"""Python source that quotes strings of a plan's file. None of them can become code: names are literals, notes are one-line comments.

    literal("h.0")             'h.0'
    comments(["a\\nb"])         # a\\nb
    rows({"h.0": "Shard(0)"})      'h.0': Shard(0),        a value is source that we wrote; a key is a string of the file
"""

from collections.abc import Iterable, Mapping


def literal(words: str | Iterable[str]) -> str:
    """A string, or a list of strings, as Python reads it back."""
    return repr(str(words)) if isinstance(words, str) else repr([str(word) for word in words])


def comments(lines: Iterable[str]) -> str:
    """Each line as a comment; characters that could end it, or that are not printable, are escaped."""
    return "".join(f"# {''.join(c if c.isprintable() else repr(c)[1:-1] for c in line)}\n" for line in lines)


def rows(table: Mapping[str, str]) -> str:
    """The items of a dict display, one per line: the keys as literals, the values unchanged."""
    return "".join(f"    {literal(key)}: {source},\n" for key, source in table.items())
