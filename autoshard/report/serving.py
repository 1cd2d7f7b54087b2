"""Degrees for serving as a table, and the style of every module. Takes the record that `serve-plan --json` prints."""

import re
from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from autoshard.mesh import UNMEASURED_DEVICE
from autoshard.report.terminal import shown
from autoshard.report.values import ReportTable, numbers
from autoshard.units import seconds, size

WORTH_SAYING = 0.1  # share of the weights that is replicated
SHOWN = 20  # rows, the best


def serving_report(record: Mapping) -> RenderableType:
    """One row per pair of degrees, those that fit first; the reasons of the others below."""
    priced = [row for row in record["configurations"] if row["memory_bytes"] is not None]
    illegal = [row for row in record["configurations"] if row["memory_bytes"] is None]
    left_out = f"and {len(priced) - SHOWN} rows that `--json` has" if len(priced) > SHOWN else None
    columns = numbers("tp", "pp", "replicas", "first", "per token", "tokens/s", "weights", "cache", "memory", "most", "fits")
    table = ReportTable("", columns, [_cells(row) for row in priced[:SHOWN]], "tight")
    head = (
        f"{record['batch']} sequences of {record['max_tokens']} tokens ({record['prompt']} of them the prompt) of {record['model']} on "
        f"{record['devices']} {record['device']}, {size(record['memory_limit_bytes'])} each"
    )
    tail = (
        "first: seconds to the first token; most: sequences that fit. Prices of data sheets: kernels are off by "
        f"{UNMEASURED_DEVICE:.0%} on average. Sampling isn't priced."
    )
    return shown(head, "", table, left_out, *_reasons([*priced[:SHOWN], *illegal]), "", tail, *_styles(record["styles"]))


def _cells(row: Mapping) -> list[str]:
    times = [seconds(row["seconds_to_first_token"]), seconds(row["seconds_per_token"]), f"{row['tokens_per_second']:.0f}"]
    sizes = [size(row[f"{what}_bytes"]) for what in ("weight", "cache", "memory")]
    degrees = [str(row[name]) for name in ("tensor", "pipeline", "replicas")]
    return [*degrees, *times, *sizes, str(row["most_sequences"]), "yes" if row["fits"] else "no"]


def _reasons(rows: Sequence[Mapping]) -> list[str]:
    """Why degrees don't fit, and what is to be known about those that do; equal words once, whatever the degree that they end in."""
    words: dict[str, list[str]] = {}
    for row in rows:
        tensor, pipeline, said = f"tp {row['tensor']}", f"pp {row['pipeline']}", [row["why"]] if row["why"] else []
        degree = f"{tensor} {pipeline}"
        if row["memory_bytes"] is None and said:
            degree = pipeline if row["why"].endswith("stages") else tensor
            said = [re.sub(r"\bby \d+$", "by that", re.sub(r"\d+ stages$", "so many stages", row["why"]))]
        if row["copies"] > 1:
            said.append(f"{row['copies']} copies of each key-value head")
        if row["memory_bytes"] is not None and row["replicated_bytes"] > WORTH_SAYING * row["weight_bytes"] * row["pipeline"]:
            said.append(f"{size(row['replicated_bytes'])} of weights are on every device: no tensor parallel style shards them")
        for one in said:
            of = words.setdefault(one, [])
            of += [] if degree in of else [degree]
    lines = [f"{', '.join(of[:SHOWN])}{' ...' * (len(of) > SHOWN)}: {one}" for one, of in words.items()]
    return ["", *lines] if lines else []


def _styles(styles: Mapping[str, Mapping[str, str]]) -> list[str | ReportTable]:
    plan = {name: style for name, style in styles.get("tp_plan", {}).items() if style != "replicate"}
    table = ReportTable("", ("module", "style"), list(plan.items()), "open")
    return ["", "styles (`--json` has them for transformers, vLLM and SGLang):", table] if plan else []
