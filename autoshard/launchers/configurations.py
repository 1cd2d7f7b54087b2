"""A configuration in any launcher's format as a `Described`, and back as text that the launcher reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import accelerate, megatron, nanotron, torchtitan
from .launch import Described, Known
from .legality import LAUNCHERS
from .texts import parsed

DATA = {"torchtitan": torchtitan.read, "nanotron": nanotron.read, "accelerate": accelerate.read}
WRITERS = {"torchtitan": torchtitan.write, "megatron": megatron.write, "accelerate": accelerate.write, "nanotron": nanotron.write}
ENDINGS = {"torchtitan": ".toml", "megatron": ".sh", "accelerate": ".yaml", "nanotron": ".yaml"}  # of what is written


def read_configuration(launcher: str, text: str, path: str, known: Known | None = None) -> Described:
    """The launch and the model that a configuration describes. path: its file, whose ending tells TOML, YAML and JSON apart.

    known: facts that the configuration may leave open; its devices, sequence and batch go before those written. ValueError, in one
    sentence, where the configuration can't be read, or leaves open what is not known.
    """
    known = known or Known()
    if launcher not in LAUNCHERS:
        raise ValueError(f"there is no launcher {launcher!r}; expected one of {', '.join(LAUNCHERS)}")
    described = _read(launcher, text, path, known)
    written = described.launch.microbatch
    if known.microbatch not in (None, written):
        raise ValueError(f"{path} says that a microbatch is {written} sequences, not {known.microbatch}; change it there or leave it out")
    return described


def _read(launcher: str, text: str, path: str, known: Known) -> Described:
    if launcher == "megatron":
        is_data = path.endswith((".json", ".yaml", ".yml"))
        return megatron.read(megatron.of_data(parsed(text, path)) if is_data else megatron.of_text(text), path, known)
    return DATA[launcher](parsed(text, path), path, known)


def configuration_text(launcher: str, described: Described, rest: Mapping[str, Any] | None = None) -> str:
    """The configuration as the launcher reads it. ValueError where it can't express the model.

    rest: a configuration of torchtitan whose other settings (data, optimizer, checkpoints) are kept.
    """
    if launcher not in WRITERS:
        raise ValueError(f"there is no launcher {launcher!r}; expected one of {', '.join(WRITERS)}")
    return torchtitan.write(described, rest or {}) if launcher == "torchtitan" else WRITERS[launcher](described)


def kept_settings(launcher: str, text: str, path: str) -> Mapping[str, Any] | None:
    """What `configuration_text` can take over from a configuration; None where the launcher's writer starts anew."""
    return parsed(text, path) if launcher == "torchtitan" and path.endswith(".toml") else None
