"""`autoshard check`: whether a saved plan is still good for the model as it is now, or a launcher's configuration for its model."""

from __future__ import annotations

from autoshard.cli.app import NO, OK, app
from autoshard.cli.combinations import is_launch
from autoshard.cli.launchers import checked_launch, load_launchers, write_page
from autoshard.cli.loading import load_any_plan, load_api, load_cluster, load_report, models_for
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.writing import write_atomically


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
    autoshard check gpt2.json models/gpt2.py:small --set batch=256 --any-graph --within 2%
    """
    if is_launch(asked.solution, asked.launcher):
        return _check_launch(output, asked)
    loaded = load_any_plan(asked.solution, asked.mesh)
    modules, inputs = models_for(output, loaded, asked)
    checked = load_api().check(
        modules, inputs, loaded, within=asked.within, solve=not asked.no_solve, same_graph=not asked.any_graph, time_limit=asked.time_limit,
        mesh=None if asked.cluster is None else load_cluster(asked.cluster), progress=output.progress,
    )  # fmt: skip
    record, sentence = checked.to_dict(), checked.sentence(asked.solution)
    output.answer({**record, "message": sentence}, lambda: load_report().explained.check_table(record, sentence))
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
            written, rest = room.configuration_text(launcher, better), f"it holds what a launch decides, so take the rest from {path}"
        output.write(asked.out, lambda out: write_atomically(written, out), f": {checked.changes[0].what}; {rest}")
    record = checked.to_dict()
    write_page(output, asked.html, record, path)
    output.answer(record, lambda: load_report().launchers.launch_table(record, path))
    return OK if checked.ok else NO
