"""Reads pickles of strangers without running them.

A pickle is a program. First its opcodes are checked: only those are accepted that picklers write for plain data and for records, with a
memo that is counted up as picklers do. Then the program runs without anything that it could call but what the caller names; classes
stand for records of the written fields.
"""

import io
import os
import pickle
import pickletools
from collections.abc import Mapping

from autoshard.reading import FORMATS


class Inert:
    """A record of a pickle: the name of its class and its fields as they were written, none of them trusted."""


class _Closed(type):
    """A class of which a pickle can create records without arguments, and which it can neither call nor write to."""

    def __call__(cls, *args: object, **options: object) -> object:
        raise pickle.UnpicklingError("it calls a class")

    def __setstate__(cls, state: object) -> None:
        raise pickle.UnpicklingError("it writes to a class")


def record(name: str, base: type = Inert) -> type:
    """A class for the records of one file, which exists for this file alone."""
    return _Closed(name, (base,), {})


class _Reader(pickle.Unpickler):
    """Finds what `names` holds, by full names, and nothing else."""

    def __init__(self, content: bytes, names: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(content))
        self.names, self.refused = names, ""

    def find_class(self, module: str, name: str) -> object:
        if f"{module}.{name}" in self.names:
            return self.names[f"{module}.{name}"]
        self.refused = f"{module}.{name}"
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("the pickle refers to objects outside itself")


OPCODES = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE INT BININT BININT1 "
    "BININT2 LONG LONG1 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST LIST "
    "APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL NEWOBJ BUILD "
    "REDUCE PERSID BINPERSID".split()  # the reader refuses the last two, and calls of classes: it can say what they want to use
)
PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


def _check_opcodes(content: bytes, name: str, most: int) -> None:
    """UnpicklingError on opcodes that picklers don't write for these files; ValueError (of pickletools) on other or missing bytes."""
    saved = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in OPCODES:
            raise pickle.UnpicklingError(f"it uses {opcode.name}, which {name} never needs")
        if count > most:
            raise pickle.UnpicklingError(f"it has more than {most} opcodes")
        if opcode.name in PUTS and argument is not None and not 0 <= argument <= saved:
            raise pickle.UnpicklingError(f"it saves value {argument} of {saved}")  # the memo is an array as long as the largest index
        saved += opcode.name in PUTS or opcode.name == "MEMOIZE"


def unpickled(content: bytes, path: str | os.PathLike[str], kind: str, names: Mapping[str, object], most: int) -> object:
    """The data of a pickle. ValueError in one sentence on anything that is no sound pickle of this kind of file.

    names: what stands for the classes and functions that the file may refer to, by their full names. most: opcodes.
    """
    reader, form = _Reader(content, names), FORMATS[kind]
    try:
        _check_opcodes(content, form.name, most)
        return reader.load()
    except Exception as error:  # a broken or hostile pickle can raise anything, and the user gets one of our sentences
        if reader.refused:
            raise ValueError(
                f"{path} wants to use {_short(reader.refused)}, which {form.name} never needs; it was not run, so take {form.name} from a "
                "source that you trust or write it again"
            ) from None
        if content[:1] != b"\x80":
            raise ValueError(f"{path} is neither JSON nor a pickle; expected {form.expected}") from None
        raise ValueError(f"{path} is no sound pickle ({_short(error)}); expected {form.expected}, so copy it or write it again") from None


def _short(value: object) -> str:
    return " ".join(str(value).split())[:80]
