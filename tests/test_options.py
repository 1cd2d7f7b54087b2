"""Kinds of options: what is typed, what it means, and what is refused, in tables; and what follows from a declaration."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from autoshard.options import declared as declarations
from autoshard.options import kinds
from autoshard.options.declared import declared
from tests.helpers_refusals import assert_refused

WORDS, RECOMPUTED = kinds.one_of(("a", "b"), "letter"), kinds.recomputed(("all", "none"))
CHECKED = {  # kind: values that it knows, values that it refuses, what the sentence expects
    "SWITCH": (kinds.SWITCH, (True, False), (0, 1, None, "True"), "expected True or False"),
    "one_of": (WORDS, ("a", "b"), ("c", 1), r"^there is no letter .*; expected one of a, b$"),
    "one_of plain": (kinds.one_of(("p", "q"), ""), ("p", "q"), ("a", 3), "^x is .*; expected one of p, q$"),
    "solver": (kinds.one_of(("a",), "solver"), ("a", SimpleNamespace(solve=min)), ("b", SimpleNamespace(solve=1)), "there is no solver"),
    "callable": (WORDS, (), (SimpleNamespace(solve=min),), "there is no letter"),
    "count": (kinds.count(), (1, 7), (0, -1, True, 1.0, "1"), r"whole number of 1 or more$"),
    "count 0": (kinds.count(0), (0, 3), (-1, False), r"whole number of 0 or more$"),
    "number": (kinds.number(), (0, 0.0, 0.5, 7), (-0.1, math.inf, math.nan, True, "1"), r"expected a (finite )?number of 0 or more$"),
    "above": (kinds.number(1.0, above=True, unit="s"), (1.1, 2), (1, 1.0, 0, math.inf), r"(finite )?number above 1, in s$"),
    "infinite": (kinds.number(2.0, finite=False), (2, math.inf), (1.9, math.nan), r"number of 2 or more$"),
    "COUNTS": (kinds.COUNTS, ((1,), [4, 8]), ((), (0,), (1, True), (1.0,), 3, "1"), "whole numbers of 1 or more"),
    "some_of": (kinds.some_of(("a", "b")), (("a",), ["b", "a"]), ((), "a", ("a", "c")), "expected (some|one) of a, b"),
    "SIZE": (kinds.SIZE, (1, 0.5, 8e10), (0, -1, True, None, "80GB"), "expected a positive number of bytes per device, or None"),
    "SIZES": (kinds.SIZES, (5, (1, 2.5), [3]), ((1, 0), 0, ["1"]), "positive number of bytes"),
    "LAYOUTS": (kinds.LAYOUTS, ({}, {"w": "R"}), ([], "w", {1: "R"}), "expected (a dict|the name of a tensor)"),
    "OPTIMIZER": (kinds.OPTIMIZER, ("adamw", "sgd", 0, 7.5), ("adam", -1, math.inf, True, None), "expected adamw, sgd, momentum, or"),
    "recomputed": (RECOMPUTED, (0, 3, "all", "none"), (-1, True, 1.0, "some"), "expected a number of blocks, 'all' or 'none'$"),
    "ACCEPTED": (kinds.ACCEPTED, ((0, 0), [0.5, 60]), ((-1, 0), (0,), (1, 2, 3), 1, (True, 1)), "relative gap and seconds"),
}  # fmt: skip
READ = (  # kind, what is typed, what it means: a type where it is refused
    (kinds.OFF, True, False), (kinds.COUNTS, "1, 2,8", (1, 2, 8)), (kinds.COUNTS, "4", (4,)), (kinds.COUNTS, "0", ValueError),
    (kinds.COUNTS, "1,,2", ValueError), (kinds.COUNTS, "-1", ValueError), (kinds.some_of(("a",)), "a, b", ("a", "b")),
    (kinds.SIZE, "80GB", 80e9), (kinds.SIZE, " 1.5 kb ", 1500.0), (kinds.SIZE, "2MB", 2e6), (kinds.SIZE, "3T", 3e12),
    (kinds.SIZE, "1KiB", 1024.0), (kinds.SIZE, "1MiB", 2.0**20), (kinds.SIZE, "64GiB", 2.0**36), (kinds.SIZE, "1TiB", 2.0**40),
    (kinds.SIZE, "8e10", 8e10), (kinds.SIZE, "1000", 1000.0), (kinds.SIZE, "999", ValueError), (kinds.SIZE, "0.5B", 0.5),
    (kinds.SIZE, "0.5k", 500.0), (kinds.SIZE, "0GB", ValueError), (kinds.SIZE, "1e999", ValueError), (kinds.SIZE, "1.2.3GB", ValueError),
    (kinds.SIZE, "80I", ValueError), (kinds.SIZE, "80Gb", 80e9), (kinds.SIZES, ["1k", "2GB/s"], (1e3, 2e9)),
    (kinds.LAYOUTS, ["a.b=S(0), R", "c=P(max),*"], {"a.b": "S(0), R", "c": "P(max),*"}), (kinds.LAYOUTS, ["a=b=S63"], {"a=b": "S63"}),
    *((kinds.LAYOUTS, [wrong], ValueError) for wrong in ("a", "=R", "a=", "a=S(64)", "a=S64", "a=P(min", "a=R,,R", "a=Q")),
    (kinds.LAYOUTS, ["a=R", "a=P"], ValueError), (kinds.FORBIDDEN, ["a=R", "b=P", "a=S0"], {"a": ["R", "S0"], "b": ["P"]}),
    (kinds.FORBIDDEN, ["a=R", "a=T"], ValueError), (kinds.OPTIMIZER, "adamw", "adamw"), (kinds.OPTIMIZER, "12", 12.0),
    (kinds.DIMS, ["x=b:1-64, 8*s:1-8", "y=,s_2:2-3"], {"x": {0: ("b", 1, 64, 1), 1: ("s", 1, 8, 8)}, "y": {1: ("s_2", 2, 3, 1)}}),
    *((kinds.DIMS, [wrong], ValueError) for wrong in ("x", "x=", "=b:1-2", "x=b:0-2", "x=b:2-2", "x=b:3-2", "x=1b:1-2", "x=b:1-2,c")),
    (kinds.DIMS, ["x=b:1-2", "x=c:1-2"], ValueError), (RECOMPUTED, "12", 12), (RECOMPUTED, "all", "all"), (RECOMPUTED, "-1", "-1"),
)  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_a_kind_knows_its_values_and_says_what_it_expects(name):
    kind, known, unknown, said = CHECKED[name]
    for value in known:
        kind.check("x", value)
    for value in unknown:
        assert_refused(said, kind.check, "x", value)


@pytest.mark.parametrize(("kind", "typed", "value"), READ, ids=lambda x: str(x)[:30] if isinstance(x, (str, list)) else "")
def test_what_is_typed_is_read(kind, typed, value):
    if value is ValueError:
        assert_refused("^x", kind.read, "x", typed)
    else:
        assert kind.read("x", typed) == value and type(kind.read("x", typed)) is type(value)


def test_bits_and_placements_are_named_in_the_sentence():
    assert_refused("a number of bits; write bytes, 50GB/s, or a capital B", kinds.parse_bytes, "400Gb/s", "bandwidth")
    assert_refused("for example 300GB/s", kinds.parse_bytes, "5", "bandwidth")
    assert_refused("which is 5 bytes; add its unit, for example 80GB", kinds.parse_bytes, "5")
    assert_refused(r"has '\*'; expected R, S\(dim\) or P", kinds.check_layout, "w", "R,*", any_placement=False)
    assert_refused("has b:2-1; expected sizes", kinds.DIMS.read, "x", ["i=,2*a:1-2,b:2-1"])
    assert [kinds.bytes_per_parameter(name) for name in ("adamw", "sgd", "momentum", 3)] == [8, 0, 4, 3]


def test_a_file_has_the_values_that_a_kind_knows():
    least = [one.schema for one in (kinds.count(2), kinds.number(0.5), kinds.number(0.5, above=True), kinds.SIZE, WORDS)]
    assert [tuple(schema.items())[-1] for schema in least] == [
        ("minimum", 2), ("minimum", 0.5), ("exclusiveMinimum", 0.5), ("minimum", 0), ("enum", ["a", "b"]),
    ]  # fmt: skip
    assert RECOMPUTED.schema == {"anyOf": [{"type": "integer", "minimum": 0}, {"enum": ["all", "none"]}]}


@dataclass(frozen=True)
class Two:
    """Two options and a field that is none."""

    other: int = 3
    num_parts: int = declared(2, kinds.count(), "parts", kept=True, not_in={"serve": "it has none"})
    names: dict | None = declared(dict, kinds.LAYOUTS, flags=("-n",))
    limit: float | None = declared(None, kinds.SIZE)


def test_what_follows_from_a_declaration():
    options = declarations.options_of(Two)
    assert list(options) == ["num_parts", "names", "limit"] and declarations.having(Two, "kept") == ("num_parts",)
    assert declarations.defaults_of(Two) == {"num_parts": 2, "names": {}, "limit": None}
    assert [one.typed_as(name) for name, one in options.items()] == [("--num-parts",), ("-n",), ("--limit",)]
    for right in (Two(), Two(num_parts=1, limit=5.0), Two(names={"w": "R"})):
        declarations.check_values(right)
    for wrong, said in ((Two(num_parts=0), "num_parts is 0"), (Two(names=None), "names is a NoneType"), (Two(limit=0.0), "limit is 0.0")):
        assert_refused(said, declarations.check_values, wrong)
    declarations.refuse_elsewhere(Two, "plan", {"num_parts": 1})
    declarations.refuse_elsewhere(Two, "serve", {"limit": 1})
    assert_refused("^serve takes no 'num_parts': it has none; leave it out$", declarations.refuse_elsewhere, Two, "serve", {"num_parts": 1})
    assert declarations.checked_options(Two, {"num_parts": 5}) == Two(num_parts=5)
    assert_refused("unknown option 'num_part'; did you mean 'num_parts'?", declarations.checked_options, Two, {"num_part": 5})
    assert_refused("unknown option 'zz'; known are limit$", declarations.checked_options, Two, {"zz": 1}, ("limit",))
