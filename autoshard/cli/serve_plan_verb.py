"""`autoshard serve-plan`: tensor and pipeline degrees for serving a language model, with its cache in memory, and their seconds."""

from __future__ import annotations

import math

from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_api, load_report
from autoshard.cli.model import load_model
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked

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
    from autoshard.serving import serve_plan as planned  # here: transformers takes seconds to import

    names = ("max_tokens", "batch", "prompt", "device", "devices_per_node", "expert_parallel", "eager")
    options = {name: getattr(asked, name) for name in names}
    plan = planned(module, asked.devices, memory_limit=asked.memory, progress=output.progress, **options)
    record = plan.to_dict() | {"model": asked.model, "styles": _styles(plan.solution)}
    output.answer(record, lambda: load_report().serving.serving_report(record))
    return OK if plan.best is not None else NO


def _styles(solution) -> dict[str, dict[str, str]]:
    """The style of every module as each launcher writes it, whatever else the priced step does; empty where no row that fits shards
    modules without copies of heads."""
    if solution is None:
        return {}
    return {kind: dict(load_api().export(solution, kind, within=math.inf)) for kind in ("tp_plan", "vllm", "sglang")}
