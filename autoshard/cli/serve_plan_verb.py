"""`autoshard serve-plan`: tensor and pipeline degrees for serving a language model, with its cache in memory, and their seconds."""

from __future__ import annotations

import math

from autoshard.cli.app import NO, OK, app
from autoshard.cli.arguments import model_settings, parse_bytes
from autoshard.cli.loading import DEVICE, load_api
from autoshard.cli.model import load_model
from autoshard.cli.output import Output
from autoshard.mesh import DEVICES_PER_NODE

SERVED = "bfloat16"  # weights of hf: models, where nobody says


@app.command("serve-plan")
def serve_plan(
    model: str,
    devices: int,
    max_tokens: int,
    batch: int,
    prompt: int | None = None,
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    dtype: str | None = None,
    device: str = DEVICE,
    devices_per_node: int = DEVICES_PER_NODE,
    memory: str | None = None,
    expert_parallel: bool = False,
    eager: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Degrees for serving MODEL: memory with the cache, time to first token, time per output token, and the style of every module.

    MODEL is hf:DIR, or file.py:function that returns a model of transformers. Exit code 1 where no degrees fit.

    \b
    autoshard serve-plan hf:llama-3-70b --devices 8 --device h100 --max-tokens 32768 --batch 64
    autoshard serve-plan hf:llama-3-8b --devices 4 --max-tokens 8192 --prompt 4096 --batch 128 --memory 72GB --json
    """
    limit = None if memory is None else parse_bytes(memory)
    if prompt is not None and prompt >= max_tokens:
        raise ValueError(f"--prompt is {prompt} of --max-tokens {max_tokens}; expected fewer, so that an answer has room")
    keywords = model_settings(settings, dtype=dtype)
    if model.startswith("hf:"):
        keywords.setdefault("dtype", SERVED)
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("building the model", 0.0)
        module, _ = load_model(model, keywords)
        from autoshard.serving import serve_plan as planned  # here: transformers takes seconds to import

        plan = planned(
            module, devices, max_tokens=max_tokens, batch=batch, prompt=prompt, device=device, memory_limit=limit,
            devices_per_node=devices_per_node, expert_parallel=expert_parallel, eager=eager, progress=output.progress,
        )  # fmt: skip
        record = plan.to_dict() | {"model": model, "styles": _styles(plan.solution)}
        from autoshard.report import serving_report  # here: rich takes a while to import

        output.answer(record, lambda: serving_report(record))
    return OK if plan.best is not None else NO


def _styles(solution) -> dict[str, dict[str, str]]:
    """The style of every module as each launcher writes it, whatever else the priced step does; empty where no row that fits shards
    modules without copies of heads."""
    if solution is None:
        return {}
    return {kind: dict(load_api().export(solution, kind, within=math.inf)) for kind in ("tp_plan", "vllm", "sglang")}
