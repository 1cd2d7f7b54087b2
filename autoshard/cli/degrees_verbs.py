"""`autoshard fits`: will a launch fit, with odds. `autoshard degrees`: every launch of a launcher on some devices, predicted and sorted.
`autoshard serve-plan`: degrees for serving a language model, with its cache in memory, and their seconds."""

import math
from typing import Any

from autoshard import report
from autoshard.cli.app import NO, OK, app
from autoshard.cli.launchers import launcher_of, load_launchers, model_builder, read_launch, site_of, sizes_of, write_page
from autoshard.cli.loading import load_api
from autoshard.cli.model import load_model
from autoshard.cli.model_source import names_model
from autoshard.cli.output import Output
from autoshard.cli.table import ONLY
from autoshard.cli.verbs import Asked
from autoshard.writing import write_atomically, write_json

TABLE_ROWS = 20


def _only(asked: Asked) -> dict[str, list]:
    """Values of degrees that are asked for, by their columns."""
    given = {name: getattr(asked, name) for name in ONLY}
    only = {name: list(values) for name, values in given.items() if values and not name.startswith("no_")}
    only |= {name.removeprefix("no_"): [1] for name, value in given.items() if value and name.startswith("no_")}
    return only | ({"zero": [int(stage) for stage in only["zero"]]} if "zero" in only else {})


@app.command()
def fits(asked: Asked, output: Output) -> int:
    """Will it fit? yes, tight or no, with odds; where the bytes are and when; the largest microbatch; what makes it fit, cheapest first.

    A MODEL is trained with the degrees given here, its states sharded over the other devices. Exit code 1 where it is less likely to fit
    than not. --observed says what a run of this launch needed, and --evidence keeps that: the next answers for the launcher are corrected.

    \b
    autoshard fits hf:Llama-3.1-8B --devices 8 --seq 8192 --microbatch 2 --recompute selective_op
    autoshard fits models/llama.py:llama3_70b --devices 64 --launcher megatron --tp 8 --pp 2
    autoshard fits llama3_70b.toml --devices 64 --memory 80GB
    autoshard fits llama3_70b.toml --devices 64 --observed train.log --evidence memory.json
    """
    room = load_launchers()
    is_model = names_model(asked.target)
    launcher = launcher_of(asked.target, asked.launcher or ("torchtitan" if is_model else None))
    described = _described(room, asked, launcher) if is_model else read_launch(asked.target, asked, launcher)[0]
    site = site_of(asked, launcher)
    answer = room.will_fit(described, launcher, site)
    record = answer.to_dict()
    if asked.observed is not None:
        record["observed"] = _observed(output, asked, answer)
    if asked.html is not None:
        write_page(output, asked.html, room.check_launch(described, launcher, site).to_dict(), asked.target, fits=record)
    output.answer(record, lambda: report.launchers.fits_table(record, asked.target))
    return OK if record["ok"] else NO


def _described(room: Any, asked: Asked, launcher: str) -> Any:
    """A model with the degrees of the command line: data parallel over the other devices, sharded as the launcher shards."""
    if asked.devices is None:
        raise ValueError(f"{asked.target} is a model, and how many devices train it isn't said; add --devices 8")
    microbatch, model = asked.microbatch or 1, asked.tp * asked.pp * asked.cp
    data = max(asked.devices // model, 1)
    zero = (1 if launcher in ("megatron", "nanotron") else 2 if asked.pp > 1 else 3) * (data > 1)
    launch = room.Launch(
        asked.devices, asked.seq or 8192, asked.global_batch or data * microbatch * (2 * asked.pp if asked.pp > 1 else 1), microbatch,
        data=data, shard=data if zero else 1, zero=zero, tensor=asked.tp, pipeline=asked.pp, context=asked.cp, recompute=asked.recompute,
        expert_tensor=asked.tp if launcher in room.DIVIDE_EXPERTS else 1, precision=asked.precision, compiled=asked.compiled,
        sequence_parallel=asked.tp > 1 and launcher not in ("accelerate", "deepspeed"),
        compiled_loss=asked.compiled and launcher in room.COMPILE_LOSSES,
    )  # fmt: skip
    sizes = sizes_of(asked.target, asked.settings)
    return room.LaunchConfig(launch, sizes.with_padded_vocab(room.PADDED.get(launcher, 0), asked.tp))


def _observed(output: Output, asked: Asked, answer: Any) -> dict[str, Any]:
    """What a run needed beside what was predicted of it; written to the evidence, where there is a file for it."""
    api = load_api()
    seen = api.observed(asked.observed)
    runs = api.read_evidence(asked.evidence, new=True).with_run(answer, seen).runs
    written = f": the next answers for {answer.launcher} are corrected"
    output.write(asked.evidence, lambda path: write_json(runs, path, indent=1), written)
    return {**runs[answer.launcher][-1], "by_kind": seen.beside(answer)}


@app.command()
def degrees(asked: Asked, output: Output) -> int:
    """Which degrees? Every legal launch of MODEL, with predicted tokens/s, MFU and memory; and how far the best is from any plan.

    Exit code 1 where none fits. --out writes the best one as the launcher's configuration.

    \b
    autoshard degrees hf:Llama-3.1-8B --devices 64 --seq 8192 --global-batch 512 --out best.toml
    autoshard degrees models/llama.py:llama3_70b --devices 512 --launcher megatron --no-bound --row 1
    autoshard degrees models/llama.py:llama3_8b --devices 64 --no-bound --tp 1,2 --recompute full --no-cp
    """
    room, launcher = load_launchers(), asked.launcher
    compiled = {"compiled": asked.compiled, "compiled_loss": asked.compiled}
    launch = room.Launch(asked.devices, asked.seq, asked.global_batch, precision=asked.precision, gather8=True, **compiled)
    output.progress("reading the model's sizes", 0.0)
    sizes = sizes_of(asked.model, asked.settings)
    output.progress("pricing launches", 0.1)
    builder = None if asked.no_bound else model_builder(asked.model, asked.settings, asked.seq)
    options = {"model_of": builder, "progress": output.progress, "time_limit": asked.time_limit, "only": _only(asked), **asked.links}
    answer = room.degrees(sizes, launch, site_of(asked, launcher), launcher, **options)
    for sentence in sizes.not_counted(asked.seq):
        output.note(f"not counted: {sentence}")
    if answer.why_not:
        output.note(f"no regret: {answer.why_not}")
    row = None if asked.row is None else asked.row - 1
    record = answer.to_dict(asked.top if output.as_json else 1, row)
    shown, prices = row or 0, answer.ranked.prices
    if prices.fits[shown] and prices.bytes[shown] > answer.ranked.site.usable:
        output.note(f"row {shown + 1} is tight: it fits with a chance of {prices.chance[shown]:.0%}")
    best = answer.ranked.launch(shown)
    output.write(asked.out, lambda out: write_atomically(room.configuration_text(launcher, room.LaunchConfig(best, sizes)), out))
    output.write(asked.plot, lambda plot: report.launchers.draw(answer, plot))
    if asked.html is not None:
        ranked = report.launchers.ranked_launches(answer, asked.top or TABLE_ROWS)
        of_best = room.LaunchConfig(best, answer.ranked.sizes.with_padded_vocab(answer.ranked.sizes.multiple, best.tensor))
        checked = room.check_launch(of_best, launcher, answer.ranked.site, ranked=answer.ranked, changes=False)
        write_page(output, asked.html, checked.to_dict(), f"{asked.model}, launch {shown + 1}", ranked=ranked)
    output.answer(record, lambda: report.launchers.degrees_table(answer, asked.top or TABLE_ROWS, record.get("row")))
    return OK if answer.ranked.prices.fits[0] else NO


SERVED = "bfloat16"  # weights of hf: models, where nobody says


@app.command("serve-plan")
def serve_plan(asked: Asked, output: Output) -> int:
    """Degrees for serving MODEL: memory with the cache, time to first token, time per output token, and the style of every module.

    MODEL is hf:DIR, or file.py:function that returns a model of transformers. Exit code 1 where no degrees fit.

    \b
    autoshard serve-plan hf:llama-3-70b --devices 8 --device h100 --max-tokens 32768 --batch 64
    autoshard serve-plan hf:llama-3-8b --devices 4 --max-tokens 8192 --prompt 4096 --batch 128 --memory 72GB --json
    """
    if asked.prompt is not None and asked.prompt >= asked.max_tokens:
        raise ValueError(f"--prompt is {asked.prompt} of --max-tokens {asked.max_tokens}; expected fewer, so that an answer has room")
    usual = {"dtype": SERVED} if asked.model.startswith("hf:") else {}
    output.progress("building the model", 0.0)
    module, _ = load_model(asked.model, usual | asked.settings)
    if (quantized := getattr(getattr(module, "config", None), "quantization_config", None)) is not None:
        method = dict(quantized).get("quant_method", "some method")
        output.note(f"the weights are quantized ({method}), which isn't priced: they are counted as {next(module.parameters()).dtype}")
    from autoshard.serving import serve_plan as planned  # here: transformers takes seconds to import

    names = ("max_tokens", "batch", "prompt", "device", "devices_per_node", "expert_parallel", "eager")
    options = {name: getattr(asked, name) for name in names}
    plan = planned(module, asked.devices, memory_limit=asked.memory, progress=output.progress, **options)
    record = plan.to_dict() | {"model": asked.model, "styles": _styles(plan.solution)}
    output.answer(record, lambda: report.serving.serving_report(record))
    return OK if plan.best is not None else NO


def _styles(solution) -> dict[str, dict[str, str]]:
    """The style of every module as each launcher writes it, whatever else the priced step does; empty where no row that fits shards
    modules without copies of heads."""
    if solution is None:
        return {}
    return {kind: dict(load_api().export(solution, kind, within=math.inf)) for kind in ("tp_plan", "vllm", "sglang")}
