"""`autoshard degrees`: every launch of a launcher on some devices, predicted and sorted, with the regret of the best."""

from __future__ import annotations

from autoshard.cli.app import NO, OK, app
from autoshard.cli.launchers import load_launchers, model_builder, site_of, sizes_of
from autoshard.cli.loading import load_api, load_report
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.writing import write_atomically

TABLE_ROWS = 20


@app.command()
def degrees(asked: Asked, output: Output) -> int:
    """Which degrees? Every legal launch of MODEL, with predicted tokens/s, MFU and memory; and how far the best is from any plan.

    Exit code 1 where none fits. --out writes the best one as the launcher's configuration.

    \b
    autoshard degrees hf:Llama-3.1-8B --devices 64 --seq 8192 --global-batch 512 --out best.toml
    autoshard degrees models/llama.py:llama3_70b --devices 512 --launcher megatron --no-bound --row 1
    """
    room, launcher = load_launchers(), asked.launcher
    launch = room.Launch(asked.devices, asked.seq, asked.global_batch, precision=asked.precision, compiled=asked.compiled)
    output.progress("reading the model's sizes", 0.0)
    sizes = sizes_of(asked.model, asked.settings)
    output.progress("pricing launches", 0.1)
    builder = None if asked.no_bound else model_builder(asked.model, asked.settings, asked.seq)
    options = {"model_of": builder, "progress": output.progress, "time_limit": asked.time_limit, **asked.links}
    answer = load_api().degrees(sizes, launch, site_of(asked), launcher, **options)
    if answer.why_not:
        output.note(f"no regret: {answer.why_not}")
    best = answer.ranked.launch(0)
    output.write(asked.out, lambda out: write_atomically(room.configuration_text(launcher, room.LaunchConfig(best, sizes)), out))
    output.write(asked.plot, lambda plot: load_report().launchers.draw(answer, plot))
    row = None if asked.row is None else asked.row - 1
    record = answer.to_dict(asked.top if output.as_json else 1, row)
    output.answer(record, lambda: load_report().launchers.degrees_table(answer, asked.top or TABLE_ROWS, record.get("row")))
    return OK if answer.ranked.prices.fits[0] else NO
