"""A verb is a function with plain arguments; what the command line is told of each stands in `table` and in `autoshard.options`.

    @app.command()
    def frontier(model: str, mesh: str | None = None, ..., **planning: Any) -> int

`**planning` are the options of planning that the verb has, those that are on the command line, as values: `memory_limit=8e10`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autoshard.cli.combinations import check_combinations, check_files, check_repeated, check_together
from autoshard.cli.table import Argument, option_of, options_of_verb, record_of
from autoshard.options import Declaration, defaults_of

EMPTY = inspect.Parameter.empty


class Verb(TyperCommand):
    """A command that checks its arguments before it runs, since what it imports may take seconds.

    It refuses an option of one value that comes twice, a value that its declaration doesn't know, and options that have no effect beside
    others.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        order = self.make_parser(ctx).parse_args(args=list(args))[-1]
        check_repeated(called(p) for p in order if _has_one_value(p))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        verb, names = ctx.obj, {parameter.name: called(parameter) for parameter in self.params}
        for name, value in ctx.params.items():
            if value is not None and not isinstance(value, bool) and value not in ([], ()):
                option_of(verb, name).kind.check_typed(names[name], value)
        given = frozenset(name for name in names if _is_given(ctx, name))
        check_together(verb, ctx.params)
        check_combinations(verb, names, given, ctx.params)
        check_files(verb, names, ctx.params)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort() from None


class Verbs(typer.Typer):
    """A Typer whose commands are Verbs: each is declared in the table under all its words, `calibrate fit`."""

    def command(self, name: str | None = None, **more: Any) -> Any:
        register = super().command

        def add(function: Callable[..., int]) -> Callable[..., int]:
            words = f"{self.info.name or ''} {name or function.__name__.replace('_', '-')}".strip()
            return register(name, cls=Verb, context_settings={"obj": words}, **more)(spread(words, function))

        return add


def spread(verb: str, function: Callable[..., int]) -> Callable[..., int]:
    """The function as typer reads it: its arguments with their declarations, and the verb's options of planning one by one."""
    own = {p.name: p for p in inspect.signature(function, eval_str=True).parameters.values()}
    spreads = [name for name, p in own.items() if p.kind is inspect.Parameter.VAR_KEYWORD]
    planning = [name for name in options_of_verb(verb) if name not in own] if spreads else []
    usual = defaults_of(record_of(verb))

    @wraps(function)
    def run(context: typer.Context, **values: Any) -> int:
        given = {name: values.pop(name) for name in planning}
        return function(**values, **{name: _read(verb, name, value) for name, value in given.items() if _is_given(context, name)})

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [_declared(verb, name, p.annotation, p.default) for name, p in own.items() if name not in spreads]
    parameters += [_declared(verb, name, *_typed(option_of(verb, name), usual[name])) for name in planning]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # type: ignore[attr-defined]  # else typer would read the types of the function itself
    return run


def _typed(option: Declaration, default: Any) -> tuple[Any, Any]:
    """The type of what is typed for an option of planning, and its default there: of lists [], of switches off."""
    kind = option.kind.typed
    default = ",".join(default) if isinstance(default, tuple) else default
    if kind is bool or kind == list[str]:
        return kind, kind()
    return (kind | None, None) if default is None or "Default:" in option.help else (kind, kind(default))


def _declared(verb: str, name: str, annotation: Any, default: Any) -> inspect.Parameter:
    option = option_of(verb, name)
    facts: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    facts["show_default"] = default is not EMPTY and default not in (None, [])
    info = typer.Argument(**facts) if isinstance(option, Argument) else typer.Option(*option.typed_as(name), **facts)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[annotation, info], default=default)


def _read(verb: str, name: str, typed: Any) -> Any:
    option = option_of(verb, name)
    return option.kind.read(option.typed_as(name)[0], typed)


def _is_given(context: Any, name: str) -> bool:
    return context.get_parameter_source(name).name == "COMMANDLINE"


def _has_one_value(parameter: Any) -> bool:
    return parameter.param_type_name == "option" and not (parameter.multiple or parameter.is_flag)


def called(parameter: Any) -> str:
    """The name that the user knows: --mesh, MODEL."""
    return str(max(parameter.opts, key=len)) if parameter.param_type_name == "option" else str(parameter.metavar or parameter.name).upper()
