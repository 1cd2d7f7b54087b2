"""`autoshard explain`: the parts of a plan's cost, the reasons for one layout in it, and how much the plan depends on each price.

Each question adds a part to the answer: keys of the record and a renderable. Without NAME the answer lists prices, which needs no model.
NAME and --robust need the model, and plan again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Group, RenderableType

from autoshard.cli.app import OK, app
from autoshard.cli.arguments import parse_settings
from autoshard.cli.loading import load_any_plan, load_api, load_report, model_of
from autoshard.cli.model import check_sizes, load_model
from autoshard.cli.output import Output


@app.command()
def explain(
    solution: str,
    name: str | None = None,
    why_not: str | None = None,
    alternatives: int = 5,
    model: str | None = None,
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    trust: bool = False,
    robust: bool = False,
    within: float = 0.0,
    time_limit: float = 60.0,
    mesh: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Say what a plan's seconds are made of and how far each price may be off; or why NAME has its layout, and what others would cost.

    \b
    autoshard explain gpt2.json
    autoshard explain gpt2.json h.3.attn.c_attn.weight --trust
    autoshard explain gpt2.json h.3.attn.c_attn.weight --trust --why-not 'S(1),R'
    autoshard explain gpt2.json --trust --robust
    autoshard explain rl.json
    """
    _check_words(name, why_not)
    with Output(as_json=as_json, quiet=quiet) as output:
        loaded = load_any_plan(solution, mesh)
        if hasattr(loaded, "programs"):
            if name is not None or robust:
                raise ValueError(f"{solution} is a plan of several programs; ask about one of them: {solution}#{loaded.home}")
            return _programs(output, loaded)
        if hasattr(loaded, "stages"):
            raise ValueError(f"{solution} is a pipeline, whose parts `autoshard show` lists; explain needs a plan without stages")
        record: dict[str, Any] = {"cost_seconds": loaded.cost}
        shown: list[Callable[[], RenderableType]] = []
        if name is None:
            _prices(loaded, record, shown)
        if name is not None or robust:
            written, keywords = model_of(loaded, model, parse_settings(settings), solution, trust, option="--model")
            output.progress("building the model", 0.0)
            module, example_inputs = load_model(written, keywords, training=loaded.training)
            check_sizes(module, example_inputs, loaded, solution)
            options: dict[str, Any] = {"time_limit": time_limit, "progress": output.progress}
        if name is not None:
            explained = load_api().explain(module, example_inputs, loaded, name, why_not=why_not, most=alternatives, **options).to_dict()
            record["explained"] = explained
            shown.append(lambda: load_report().explained(explained))
        if robust:
            ranges = load_api().robustness(module, example_inputs, loaded, slack=within, **options)
            record["robust"] = ranges
            shown.append(lambda: load_report().robustness_table(ranges))
        output.answer(record, lambda: Group(*(part() for part in shown)))
    return OK


def _programs(output: Output, plan: Any) -> int:
    """What sharing costs each of several programs, and the parts of each one's cost."""
    from rich.text import Text

    report = load_report()
    prices: dict[str, dict] = {}
    parts: list[Callable[[], RenderableType]] = [partial(report.programs_report, plan)]
    for name, one in plan.programs.items():
        parts.append(partial(Text, f"\nprogram {name}", style="bold"))
        _prices(one, prices.setdefault(name, {}), parts)
    output.answer({**report.programs_record(plan), "prices": prices}, lambda: Group(*(part() for part in parts)))
    return OK


def _check_words(name: str | None, why_not: str | None) -> None:
    if name is not None and (".py:" in name or name.startswith("hf:")):
        raise ValueError(f"NAME is {name!r}, which is a model; give it as --model {name}, and as NAME what to explain")
    if why_not is not None and name is None:
        raise ValueError(f"--why-not {why_not!r} asks about nothing; name a parameter, op or block before it")


def _prices(loaded: Any, record: dict, shown: list[Callable[[], RenderableType]]) -> None:
    """The parts of the cost, with the errors of their prices."""
    record["interval_seconds"] = None if loaded.interval is None else list(loaded.interval)
    record["fingerprint"] = loaded.fingerprint.get("prices")
    record["prices"] = load_report().price_parts(loaded)
    shown.append(lambda: load_report().prices_report(loaded))
