"""`autoshard check | certify`: whether a saved plan is still good for the model as it is now, or a launcher's configuration for its model;
and what a plan costs and the bound on all plans, computed again from numbers alone."""

from typing import Any

from rich.console import Group

from autoshard import report
from autoshard.certify import FORMAT
from autoshard.certify import certify as certified
from autoshard.cli.app import NO, OK, app
from autoshard.cli.combinations import is_launch
from autoshard.cli.launchers import as_in, checked_launch, load_launchers, write_page
from autoshard.cli.loading import load_any_plan, load_api, load_cluster, load_plan, model_of, models_for
from autoshard.cli.model import load_model
from autoshard.cli.output import Output
from autoshard.cli.table import LAUNCHERS
from autoshard.cli.verbs import Asked
from autoshard.reading import content_of, file_and_program, parsed
from autoshard.writing import write_atomically, write_json


@app.command()
def certify(asked: Asked, output: Output) -> int:
    """Compute a plan's cost and the bound on all plans again, from a file of numbers alone: the problem, the choice, prices and shifts.

    The check is autoshard/certify.py, a hundred lines that need numpy and nothing else. Of a plan and its model, the numbers are worked out
    first and kept by --out; --problem writes the same problem for another solver. Both are of the sum of all seconds. Exit code 1, with
    the reasons, where the numbers refute what they claim.

    \b
    autoshard certify gpt2.json models/gpt2.py:small --out numbers.json
    autoshard certify numbers.json
    autoshard certify gpt2.json --trust --problem gpt2.mps
    """
    record, notes = _numbers(asked, output)
    answer = certified(record)
    gap = (answer["cost"] - answer["bound"]) / answer["cost"] if answer["cost"] else 0.0
    shown = {
        "ok": answer["ok"], "wrong": answer["wrong"], "cost_seconds": answer["cost"], "bound_seconds": answer["bound"], "gap": gap,
        "peak_bytes": answer["peak"], **notes,
    }  # fmt: skip
    output.answer(shown, lambda: _certified_table(shown))
    return OK if answer["ok"] else NO


def _numbers(asked: Asked, output: Output) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers, and what the plan says of itself, where they are of one."""
    _, program = file_and_program(asked.numbers)
    content = b"" if program else content_of(asked.numbers, "certificate")
    data = parsed(content, asked.numbers, "certificate") if content.lstrip()[:1] == b"{" else {}
    if data.get("format") == FORMAT:
        if asked.model or asked.problem or asked.out:
            raise ValueError(f"{asked.numbers} has the numbers already; give a plan where MODEL, --out or --problem are asked for")
        return data, {}
    plan = load_plan(asked.numbers)
    written, keywords = model_of(plan, asked.model, asked.settings, asked.numbers, asked.trust)
    module, inputs = load_model(written, keywords, training=plan.training, program=program)
    api = load_api()
    if asked.problem is not None:
        api.write_problem(api.problem_of(module, inputs, plan), asked.problem)
    output.progress("proving the bound", 0.5)
    record = api.certificate_of(module, inputs, plan)
    output.write(asked.out, lambda path: write_json(record, path))
    return record, {"plan_cost_seconds": plan.cost, "plan_bound_seconds": plan.bound}


def _certified_table(shown: dict[str, Any]) -> Group:
    named = {"cost_seconds": "cost", "bound_seconds": "bound", "plan_bound_seconds": "the plan's own bound"}
    rows = [("certificate", "holds" if shown["ok"] else "; ".join(shown["wrong"]))]
    rows += [(name, f"{shown[key]:.9g} s") for key, name in named.items() if key in shown]
    rows += [("gap", f"{shown['gap']:.2g}"), ("peak memory", f"{shown['peak_bytes']:.6g} bytes")]
    return report.terminal.pairs(rows)


@app.command()
def check(asked: Asked, output: Output) -> int:
    """Check a saved plan against the model as it is now: does it fit, what does it cost today, how far is it from the best plan now?

    Of a launcher's configuration: is it legal for its model, does it fit, how fast will it be and why, what would gain most? Changes are
    compared at its global batch; --out writes it with the change that gains most, --html a page. Exit code 1, with the reasons, where it
    does not fit, is illegal or too far off.

    \b
    autoshard check llama3_70b.toml --devices 64 --out better.toml --html check.html
    autoshard check fsdp.yaml hf:Llama-3.1-8B --launcher accelerate --seq 4096 --microbatch 1
    autoshard check gpt2.json --trust
    autoshard check rl.json rl.py:programs
    autoshard check gpt2.json models/gpt2.py:small --batch 256 --any-graph --within 2%
    """
    if is_launch(asked.solution, asked.launcher):
        return _check_launch(output, asked)
    loaded = load_any_plan(asked.solution)
    modules, inputs = models_for(output, loaded, asked)
    checked = load_api().check(
        modules, inputs, loaded, within=asked.within, solve=not asked.no_solve, same_graph=not asked.any_graph, time_limit=asked.time_limit,
        mesh=None if asked.cluster is None else load_cluster(asked.cluster), progress=output.progress,
    )  # fmt: skip
    record, sentence = checked.to_dict(), checked.sentence(asked.solution)
    output.answer({**record, "message": sentence}, lambda: report.explained.check_table(record, sentence))
    file, program = file_and_program(asked.solution)
    if program and not checked.ok:
        output.note(f"{program} shares its weights with other programs; `autoshard check {file}` compares all of them together")
    return OK if checked.ok else NO


def _check_launch(output: Output, asked: Asked) -> int:
    """Print what is known of a launcher's configuration; the exit code says whether it will run."""
    room, path = load_launchers(), asked.solution
    checked, text, overrides = checked_launch(output, asked, path)
    launcher = checked.launcher
    if asked.out is not None:
        better, rest = checked.better(), f"all else is as in {path}"
        try:
            written = room.edited_text(launcher, better, text, path, overrides)
        except ValueError:
            if not asked.out.endswith(LAUNCHERS[launcher]):  # as new files do
                raise
            written, rest = room.configuration_text(launcher, better), f"it holds what a launch decides, so take the rest from {path}"
        if launcher == "accelerate":  # whose files hold no batch
            rest += f"; give the script microbatches of {better.launch.microbatch} sequences, {better.launch.microbatches} per step"
        output.write(asked.out, lambda out: write_atomically(as_in(path, written), out), f": {checked.changes[0].what}; {rest}")
    record = checked.to_dict()
    write_page(output, asked.html, record, path)
    output.answer(record, lambda: report.launchers.launch_table(record, path, compared=True))
    return OK if checked.ok else NO
