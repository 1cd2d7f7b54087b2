"""`autoshard check`: whether a saved plan is still good for the model as it is now, or a launcher's configuration for its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoshard.cli.app import NO, OK, app
from autoshard.cli.arguments import parse_settings, parse_share
from autoshard.cli.launchers import load_launchers, site_of, sizes_of
from autoshard.cli.loading import DEVICE, INTER, load_any_plan, load_api, load_cluster, models_for
from autoshard.cli.output import Output
from autoshard.reading import text_of
from autoshard.writing import write_atomically

WRITTEN_FOR = {
    ".toml": "torchtitan", ".sh": "megatron", ".yaml": "accelerate, nanotron or megatron", ".yml": "accelerate, nanotron or megatron"
}  # fmt: skip


@app.command()
def check(
    solution: str,
    model: str | None = None,
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    trust: bool = False,
    within: str = "5%",
    no_solve: bool = False,
    any_graph: bool = False,
    cluster: str | None = None,
    time_limit: float = 600.0,
    mesh: str | None = None,
    launcher: str | None = None,
    devices: int | None = None,
    seq: int | None = None,
    microbatch: int | None = None,
    global_batch: int | None = None,
    device: str = DEVICE,
    per_node: int = 8,
    memory: str | None = None,
    inter_node_bandwidth: str = INTER,
    out: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Check a saved plan against the model as it is now: does it fit, what does it cost today, how far is it from the best plan now?

    With --launcher, check a launcher's configuration: is it legal for its model, does it fit, how fast will it be, what would gain most?
    Changes are compared at its global batch; --out then writes it with the change that gains most. Exit code 1, with the reasons, where
    it does not fit, is illegal or too far off.

    \b
    autoshard check llama3_70b.toml --launcher torchtitan --devices 64 --out better.toml
    autoshard check fsdp.yaml hf:Llama-3.1-8B --launcher accelerate --seq 4096 --microbatch 1
    autoshard check gpt2.json --trust
    autoshard check rl.json rl.py:programs
    autoshard check gpt2.json models/gpt2.py:small --set batch=256 --any-graph --within 2%
    """
    if launcher is not None:
        known = {"devices": devices, "per_node": per_node, "seq": seq, "microbatch": microbatch, "global_batch": global_batch}
        site = site_of(device, per_node, memory, inter_node_bandwidth)
        with Output(as_json=as_json, quiet=quiet) as output:
            return _check_launch(output, launcher, solution, model, parse_settings(settings), known, site, out)
    options: dict[str, Any] = {"within": parse_share(within), "solve": not no_solve, "same_graph": not any_graph, "time_limit": time_limit}
    with Output(as_json=as_json, quiet=quiet) as output:
        _refuse_configuration(solution)
        loaded = load_any_plan(solution, mesh)
        options |= {"mesh": None if cluster is None else load_cluster(cluster), "progress": output.progress}
        modules, inputs = models_for(output, loaded, solution, model, parse_settings(settings), trust)
        checked = load_api().check(modules, inputs, loaded, **options)
        record, sentence = checked.to_dict(), checked.sentence(solution)
        output.answer({**record, "message": sentence}, lambda: _table(record, sentence))
    return OK if checked.ok else NO


def _refuse_configuration(path: str) -> None:
    """ValueError for a file that by its ending is no plan, but a launcher's configuration."""
    launchers = WRITTEN_FOR.get(Path(path).suffix)
    if launchers is not None and Path(path).is_file():
        raise ValueError(f"{path} looks like a launcher's configuration, not like a plan; add --launcher {launchers}")


def _check_launch(
    output: Output, launcher: str, path: str, model: str | None, settings: dict, known: dict[str, Any], site: Any, out: str | None
) -> int:
    """Print what is known of a launcher's configuration; the exit code says whether it will run."""
    room = load_launchers()
    sizes = None if model is None else sizes_of(model, settings)
    text = text_of(path, "launch")
    described = room.read_configuration(launcher, text, path, room.Overrides(**known, sizes=sizes))
    output.progress("pricing launches", 0.2)
    checked = load_api().check_launch(described, launcher, site)
    if out is not None:
        kept = room.kept_settings(launcher, text, path)
        write_atomically(room.configuration_text(launcher, checked.better(), kept), out)
        rest = f"other settings are those of {path}" if kept else f"it holds what a launch decides, so take the rest from {path}"
        output.note(f"wrote {out}: {checked.changes[0].what}; {rest}")
    record = checked.to_dict()
    output.answer(record, lambda: _launch_table(record, path))
    return OK if checked.ok else NO


def _launch_table(record: dict, path: str):
    from rich.console import Group  # here: as in loading
    from rich.text import Text

    from autoshard.report import launch_table

    batch = f"global batch {record['global_batch']} sequences of {record['seq']} tokens; changes are compared at this batch"
    return Group(launch_table(record, path), Text(batch))


def _table(record: dict, sentence: str):
    from autoshard.report import check_table  # here: as in loading

    return check_table(record, sentence)
