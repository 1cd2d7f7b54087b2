"""`autoshard show | explain | export`: what a plan's file holds, as tables, as a page, or for another tool; and why it is so.

Each question of `explain` adds a part to the answer: keys of the record and a renderable. Without NAME the answer lists prices, which needs
no model. NAME and --robust need the model, and plan again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard import report
from autoshard.cli.app import NO, OK, app, say_no
from autoshard.cli.combinations import is_launch
from autoshard.cli.launchers import checked_launch, write_page
from autoshard.cli.loading import load_any_plan, load_api, load_plan, model_for, model_of
from autoshard.cli.model_source import names_model
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.reading import data_of
from autoshard.writing import write_atomically


@app.command()
def show(asked: Asked, output: Output) -> int:
    """Show a plan: its cost and proof, beside the usual plans, the layout of each parameter, and where the time goes; or a launcher's
    configuration.

    Of several programs, what sharing costs each of them; FILE#NAME is the plan of one. Of a pipeline, its stages. With OTHER, what
    differs between two plans: seconds, bytes, the layouts that changed, and the assumptions that did; or between two configurations:
    seconds and bytes by kind, and the keys that changed.

    --html writes one page instead, which needs no network: costs, memory, layouts on the mesh, the model, the time line. The time line
    needs the model: the one named, or with --trust the one that the plan says it is for. Where that one can't be built, the page is
    written without it and says why.

    \b
    autoshard show solutions/gpt2-small-2x4.json
    autoshard show gpt2-2x4.json gpt2-8x1.json
    autoshard show llama3_70b.toml better.toml --devices 64
    autoshard show gpt2.json --html gpt2.html --trust
    autoshard show gpt2.json --html gpt2.html --model models/gpt2.py:small --set batch=512 --frontier frontier.json
    """
    if asked.other is not None:
        same = _compare(output, asked)
        return NO if asked.exit_code and not same else OK
    if is_launch(asked.solution, asked.launcher):
        return _show_launch(output, asked)
    loaded = load_any_plan(asked.solution)
    if asked.html is None:
        _print(output, loaded)
    else:
        _write(output, loaded, asked)
    return OK


def _print(output: Output, loaded: Any) -> None:
    if hasattr(loaded, "programs"):
        output.answer(report.programs.programs_record(loaded), lambda: report.programs.programs_report(loaded))
    elif hasattr(loaded, "stages"):
        output.answer(loaded.to_dict(layouts=False), lambda: report.pipeline.pipeline_report(loaded))
    else:
        output.answer(report.planned.summary(loaded), lambda: report.planned.planned_report(loaded))


def _compare(output: Output, asked: Asked) -> bool:
    """Print the differences of two plans, and return whether they are the same."""
    both = (asked.solution, asked.other)
    kinds = {is_launch(path, asked.launcher) for path in both}
    if len(kinds) == 2:
        raise ValueError(f"one of {' and '.join(both)} is a launcher's configuration and the other a plan; give two of a kind")
    if kinds == {True}:
        record = report.changes.launches_compared(*(checked_launch(output, asked, path, changes=False)[0].to_dict() for path in both))
    else:
        record = report.changes.comparison(*(load_any_plan(path) for path in both))
    output.answer(record, lambda: report.changes.comparison_tables(record))
    return record["same"]


def _show_launch(output: Output, asked: Asked, *, explained: bool = False) -> int:
    """Print what a launcher's configuration takes, without what would be better; or write its page, with it."""
    html = getattr(asked, "html", None)
    record = checked_launch(output, asked, asked.solution, changes=html is not None)[0].to_dict()
    write_page(output, html, record, asked.solution)
    more = [report.launchers.sensitivity_table(record)] if explained and record["legal"] else []
    output.answer(record, lambda: report.launchers.launch_table(record, asked.solution, *more))
    return OK


def _write(output: Output, loaded: Any, asked: Asked) -> None:
    """Write the page of a plan."""
    out = asked.html
    points = None if asked.frontier is None else data_of(asked.frontier, "frontier")
    several = _several(asked.solution, loaded)
    if several and (asked.model is not None or asked.settings or points is not None):
        raise ValueError(several)
    page, why = (load_api().html_report(loaded), "") if several else _page(output, loaded, asked, points)
    if why and not asked.no_model:
        output.note(f"without a time line: {why}")
    output.write(out, lambda path: write_atomically(page, path))
    sections = report.html.shown_sections(loaded, has_timeline=not why, has_frontier=points is not None)
    num_bytes = len(page.encode())
    record = {"out": out, "bytes": num_bytes, "sections": sections, "no_model": why or None}
    output.answer(record, lambda: Text(f"{out}: {num_bytes / 1e3:.0f} kB, opens in any browser"))


def _several(path: str, loaded: Any) -> str:
    """Why the page has no model and no frontier; empty for a plan of one program."""
    if hasattr(loaded, "programs"):
        return f"{path} is a plan of several programs; name one of them: {path}#{loaded.home}"
    return f"{path} is a pipeline, whose page needs nothing else; leave the other words out" if hasattr(loaded, "stages") else ""


def _page(output: Output, loaded: Any, asked: Asked, points: dict | None) -> tuple[str, str]:
    """The page, and why it has no time line (empty where it has one). ValueError where a model that was named can't be used."""
    api, named, path = load_api(), asked.model is not None or bool(asked.settings), asked.solution
    if asked.no_model or not (named or loaded.model):
        why = "it was left out" if asked.no_model else "the plan doesn't say which model it is for"
        return api.html_report(loaded, frontier=points, no_model=why), why
    without = "; or --no-model, for a page without a time line"
    model_of(loaded, asked.model, asked.settings, path, asked.trust, option="--model", without=without)  # where nobody said to run it
    try:
        module, inputs = model_for(output, loaded, asked, path)
        return api.html_report(loaded, module, inputs, frontier=points, progress=output.progress), ""
    except (ValueError, OSError) as error:
        if named:
            raise
        why = " ".join(str(error).split())
        return api.html_report(loaded, frontier=points, no_model=why), why


@app.command()
def explain(asked: Asked, output: Output) -> int:
    """Say what a plan's seconds are made of and how far each price may be off; or why NAME has its layout, and what others would cost.

    Of a launcher's configuration: seconds and bytes by kind, the nearest published run, and what other links and microbatches would do.

    \b
    autoshard explain gpt2.json
    autoshard explain gpt2.json h.3.attn.c_attn.weight --trust
    autoshard explain gpt2.json h.3.attn.c_attn.weight --trust --why-not 'S(1),R'
    autoshard explain gpt2.json --trust --robust
    autoshard explain rl.json
    autoshard explain llama3_70b.toml --devices 64
    """
    if is_launch(asked.solution, asked.launcher):
        return _show_launch(output, asked, explained=True)
    if asked.name is not None and names_model(asked.name):
        raise ValueError(f"NAME is {asked.name!r}, which is a model; give it as --model {asked.name}, and as NAME what to explain")
    if asked.why_not is not None and asked.name is None:
        raise ValueError(f"--why-not {asked.why_not!r} asks about nothing; name a parameter, op or block before it")
    loaded = load_any_plan(asked.solution)
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
        module, example_inputs = model_for(output, loaded, asked, asked.solution, option="--model")
        options: dict[str, Any] = {"time_limit": asked.time_limit, "progress": output.progress}
    if asked.name is not None:
        options_of_name = {"why_not": asked.why_not, "most": asked.alternatives}
        record["explained"] = load_api().explain(module, example_inputs, loaded, asked.name, **options_of_name, **options).to_dict()
        shown.append(lambda: report.explained.explained(record["explained"]))
        if loaded.overlapped:
            shown.append(lambda: report.explained.sums_report(loaded))
    if asked.robust:
        record["robust"] = load_api().robustness(module, example_inputs, loaded, slack=asked.within, **options)
        shown.append(lambda: report.explained.robustness_table(record["robust"]))
    output.answer(record, lambda: Group(*(part() for part in shown)))
    return OK


def _programs(output: Output, plan: Any) -> int:
    """What sharing costs each of several programs, and the parts of each one's cost."""
    prices: dict[str, dict] = {}
    parts: list[Callable[[], RenderableType]] = [partial(report.programs.programs_report, plan)]
    for name, one in plan.programs.items():
        parts.append(partial(Text, f"\nprogram {name}", style="bold"))
        _prices(one, prices.setdefault(name, {}), parts)
    output.answer({**report.programs.programs_record(plan), "prices": prices}, lambda: Group(*(part() for part in parts)))
    return OK


def _prices(loaded: Any, record: dict, shown: list[Callable[[], RenderableType]]) -> None:
    """The parts of the cost, with the errors of their prices; the interval is of what the objective counts."""
    record["objective_seconds"] = loaded.objective_seconds
    record["interval_seconds"] = None if loaded.interval is None else list(loaded.interval)
    record["fingerprint"] = loaded.fingerprint.get("prices")
    record["prices"] = report.plan_tables.price_parts(loaded)
    shown.append(lambda: report.explained.prices_report(loaded))


@app.command()
def export(asked: Asked, output: Output) -> int:
    """Write a plan in the format of another tool: printed as JSON, or written with --out. What it can't carry is said on stderr.

    Exit code 1 where a step takes longer as exported than --within allows, or needs more memory than the plan's limit; the sentence names
    the formats that hold the plan. Of formats whose seconds the reader decides (sharding_map, json, distribute_module) nothing is known.

    \b
    autoshard export gpt2.json --format tp_plan --out tp_plan.json
    autoshard export gpt2.json --format fully_shard --out recipe.py
    """
    output.progress("reading the plan", 0.0)
    api, loaded = load_api(), load_plan(asked.solution)
    try:
        value = api.export(loaded, asked.kind, asked.out, axis=asked.axis, within=asked.within)
    except api.NotHeld as error:
        return say_no(output, error, {"format": asked.kind})
    if asked.out is not None:
        output.note(f"wrote {asked.out}")
    for line in value.said:
        output.note(line)
    plain = api.as_plain(value, asked.kind)
    record = {"format": asked.kind, "export": plain, "left": [one._asdict() for one in value.left]}
    record |= {"cost_seconds": value.cost_seconds, "plan_cost_seconds": loaded.cost, "extra_seconds": value.extra_seconds}
    if asked.out is None or output.as_json:
        output.answer(record, lambda: report.terminal.exported_text(plain))
    return OK
