"""An option is declared once, as a field of the record that it belongs to; whatever else knows options asks here.

    solver: str = declared("auto", one_of(SOLVERS), "How the problem is solved.")      in `planning.Options`
    having(Options, "kept")                                                             ("training", "memory_limit", ...)

The options of a verb and of the pass, the words of `--help`, the checks before anything slow is imported, what a file holds and what a
plan that is made anew takes over follow from the declaration.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from autoshard.options.kinds import ValueKind


@dataclass(frozen=True)
class Declaration:
    """What is declared of an option beside its name, its type and its default."""

    kind: ValueKind
    help: str = ""
    flags: tuple[str, ...] = ()  # as they are typed; by default --name
    metavar: str | None = None
    # of an option of planning:
    verbs: tuple[str, ...] = ("plan",)  # of the command line that have it
    in_pass: bool = True  # `autosharding_pass` has it
    kept: bool = False  # a plan that is made from an older one has the older one's, where nothing else is asked for
    reopened: bool = True  # `explain` and `check` plan with it again
    of_training: bool = False  # without effect on a forward pass
    of_all: bool = False  # several programs have it together
    noted: str = "changed"  # in plans: "always"; "changed", where it isn't the default; "never"
    in_fingerprint: bool = True  # another value asks for another plan
    not_in: Mapping[str, str] = field(default_factory=dict)  # functions that don't have it, and why

    def typed_as(self, name: str) -> tuple[str, ...]:
        """How it is typed on a command line."""
        return self.flags or ("--" + name.replace("_", "-"),)


def declared(default: Any, kind: ValueKind, help: str = "", **facts: Any) -> Any:
    """A field of a dataclass with its declaration. default: a function without arguments makes it, as `dict` does."""
    metadata = {"option": Declaration(kind, help, **facts)}
    return field(default_factory=default, metadata=metadata) if callable(default) else field(default=default, metadata=metadata)


def options_of(record: Any) -> dict[str, Declaration]:
    """The declarations of a record's fields by name, in their order."""
    return {one.name: one.metadata["option"] for one in fields(record) if "option" in one.metadata}


def defaults_of(record: Any) -> dict[str, Any]:
    """The defaults of the options of a record, by name."""
    ours = (one for one in fields(record) if "option" in one.metadata)
    return {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in ours}


def having(record: Any, fact: str) -> tuple[str, ...]:
    """The names of the options of which this fact is true."""
    return tuple(name for name, option in options_of(record).items() if getattr(option, fact))


def check_values(record: Any) -> None:
    """ValueError where a field of this record has a value that its declaration does not know; None stands for a default of None."""
    for name, default in defaults_of(record).items():
        value = getattr(record, name)
        if value is not None or default is not None:
            options_of(record)[name].kind.check(name, value)


def refuse_elsewhere(record: Any, function: str, options: Mapping[str, Any]) -> None:
    """ValueError on an option that this function does not have, with the reason."""
    for name, option in options_of(record).items():
        if name in options and (why := option.not_in.get(function)):
            raise ValueError(f"{function} takes no {name!r}: {why}; leave it out")


def checked_options(kind: Callable[..., Any], options: Mapping[str, Any], known: tuple[str, ...] = ()) -> Any:
    """The options as a record; an unknown name is an error that says which one was meant. known: the names, if not all fields are."""
    known = known or tuple(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"))
    return kind(**options)
