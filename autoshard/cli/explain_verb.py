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
from autoshard.cli.loading import load_any_plan, load_api, load_report, model_of
from autoshard.cli.model import check_sizes, load_model
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked


@app.command()
def explain(asked: Asked, output: Output) -> int:
    """Say what a plan's seconds are made of and how far each price may be off; or why NAME has its layout, and what others would cost.

    \b
    autoshard explain gpt2.json
    autoshard explain gpt2.json h.3.attn.c_attn.weight --trust
    autoshard explain gpt2.json h.3.attn.c_attn.weight --trust --why-not 'S(1),R'
    autoshard explain gpt2.json --trust --robust
    autoshard explain rl.json
    """
    _check_words(asked.name, asked.why_not)
    loaded = load_any_plan(asked.solution, asked.mesh)
    if hasattr(loaded, "programs"):
        if asked.name is not None or asked.robust:
            raise ValueError(f"{asked.solution} is a plan of several programs; ask about one of them: {asked.solution}#{loaded.home}")
        return _programs(output, loaded)
    if hasattr(loaded, "stages"):
        raise ValueError(f"{asked.solution} is a pipeline, whose parts `autoshard show` lists; explain needs a plan without stages")
    record: dict[str, Any] = {"cost_seconds": loaded.cost}
    shown: list[Callable[[], RenderableType]] = []
    if asked.name is None:
        _prices(loaded, record, shown)
    if asked.name is not None or asked.robust:
        written, keywords = model_of(loaded, asked.model, asked.settings, asked.solution, asked.trust, option="--model")
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(written, keywords, training=loaded.training)
        check_sizes(module, example_inputs, loaded, asked.solution)
        options: dict[str, Any] = {"time_limit": asked.time_limit, "progress": output.progress}
    if asked.name is not None:
        options_of_name = {"why_not": asked.why_not, "most": asked.alternatives}
        record["explained"] = load_api().explain(module, example_inputs, loaded, asked.name, **options_of_name, **options).to_dict()
        shown.append(lambda: load_report().explained(record["explained"]))
    if asked.robust:
        record["robust"] = load_api().robustness(module, example_inputs, loaded, slack=asked.within, **options)
        shown.append(lambda: load_report().robustness_table(record["robust"]))
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
