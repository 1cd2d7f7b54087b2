"""A verb is a function of what a command line asks for; what that is stands in `table` and in `autoshard.options`.

    @app.command()
    def frontier(asked: Asked, output: Output) -> int

asked: a value for each of the verb's own arguments, and in `planning` the options of planning that are on the command line. All are read by
their kinds: `memory_limit` is 8e10, not "80GB".
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autoshard.cli.combinations import check_combinations, check_files, check_repeated, check_together, named_settings
from autoshard.cli.output import Output
from autoshard.cli.table import LINKS, OWN, REQUIRED, Argument, option_of, options_of_verb, record_of
from autoshard.options import ValueKind, defaults_of


class Asked(SimpleNamespace):
    """The values of a verb's arguments by their names in the table; `settings` has those with options of their own too."""

    planning: dict[str, Any]

    @property
    def links(self) -> dict[str, Any]:
        """Keywords of `Mesh.from_bandwidths`, in bytes per second."""
        return {name: getattr(self, name) for name in LINKS}


class Verb(TyperCommand):
    """A command that checks its arguments before it runs, since what it imports may take seconds.

    It refuses an option of one value that comes twice, a value that its declaration doesn't know, and options that have no effect beside
    others.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        order = self.make_parser(ctx).parse_args(args=list(args))[-1]
        check_repeated(called(p) for p in order if p.param_type_name == "option" and not (p.multiple or getattr(p, "is_flag", False)))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        verb, names = ctx.obj, {parameter.name: called(parameter) for parameter in self.params}
        values = {name: read_and_checked(option_of(verb, name).kind, names[name], typed) for name, typed in ctx.params.items()}
        given = frozenset(name for name in names if ctx.get_parameter_source(name).name == "COMMANDLINE")
        check_together(verb, values)
        check_combinations(verb, names, given, values)
        check_files(verb, names, values)
        planning = {name: values[name] for name in options_of_verb(verb) if name in given}
        ctx.meta["asked"] = asked = Asked(**{name: values[name] for name in OWN[verb]}, planning=planning)
        if "settings" in OWN[verb]:
            asked.settings |= named_settings(verb, values)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort() from None
        except ValueError as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (as_typed(error.args[0], names), *error.args[1:])
            raise


def as_typed(sentence: str, names: Mapping[str, str]) -> str:
    """A sentence about options with their names on the command line: --memory for memory_limit. names: these, by those in Python."""
    options = {name: written for name, written in names.items() if "_" in name and written.startswith("--")}
    return re.sub(r"(?<![\w.'\"/=-])\w+(=True)?(?![\w.'\"/-])", lambda word: options.get(word[0].removesuffix("=True"), word[0]), sentence)


def read_and_checked(kind: ValueKind, name: str, typed: Any) -> Any:
    """The value of what is typed; None where nothing is. ValueError where it is none of this kind."""
    value = None if typed is None else kind.read(name, typed)
    if value is not None and typed not in ([], ()):
        kind.check(name, value)
    return value


class Verbs(typer.Typer):
    """A Typer whose commands are Verbs: each is declared in the table under all its words, `calibrate fit`."""

    def command(self, name: str | None = None, **more: Any) -> Any:
        register = super().command

        def add(function: Callable[..., int]) -> Callable[..., int]:
            words = f"{self.info.name or ''} {name or function.__name__.replace('_', '-')}".strip()
            register(name, cls=Verb, context_settings={"obj": words}, **more)(spread(words, function))
            return function

        return add


def spread(verb: str, function: Callable[..., int]) -> Callable[..., int]:
    """The function as typer reads it: with the verb's own arguments, and its options of planning, one by one."""
    own, usual = OWN[verb], defaults_of(record_of(verb))

    def run(context: typer.Context, **typed: Any) -> int:
        asked = context.meta["asked"]
        with Output(as_json=asked.as_json, quiet=getattr(asked, "quiet", False)) if "as_json" in own else nullcontext() as output:
            return function(asked, output)

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [_declared(name, option, option.default) for name, option in own.items()]
    planning = {name: option_of(verb, name) for name in options_of_verb(verb)}
    parameters += [_declared(name, option, _default(option, usual[name])) for name, option in planning.items()]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _default(option: Any, default: Any) -> Any:
    """What an option of planning is where it isn't typed: of lists [], of switches off."""
    kind = option.kind.typed
    if kind is bool or kind == list[str]:
        return kind()
    return None if default is None or "Default:" in option.help else kind(",".join(default) if isinstance(default, tuple) else default)


def _declared(name: str, option: Any, default: Any) -> inspect.Parameter:
    facts: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    facts["show_default"] = default is not REQUIRED and default not in (None, [])
    info = typer.Argument(**facts) if isinstance(option, Argument) else typer.Option(*option.typed_as(name), **facts)
    kind = option.kind.typed if default is not None else option.kind.typed | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info], default=default)


def called(parameter: Any) -> str:
    """The name that the user knows: --mesh, MODEL."""
    return str(max(parameter.opts, key=len)) if parameter.param_type_name == "option" else str(parameter.metavar or parameter.name).upper()
