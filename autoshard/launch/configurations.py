"""A configuration in any launcher's format as a `LaunchConfig`, and back as text that the launcher reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import accelerate, megatron, nanotron, torchtitan
from .legality import check_launcher
from .runs import LaunchConfig, Overrides
from .texts import parsed

FORMATS = {"torchtitan": torchtitan, "megatron": megatron, "accelerate": accelerate, "nanotron": nanotron}  # each with `read` and `write`
ENDINGS = {"torchtitan": ".toml", "megatron": ".sh", "accelerate": ".yaml", "nanotron": ".yaml"}  # of what is written


def read_configuration(launcher: str, text: str, path: str, known: Overrides | None = None) -> LaunchConfig:
    """The launch and the model that a configuration describes. path: its file, whose ending tells TOML, YAML and JSON apart.

    known: facts that the configuration may leave open; its devices, sequence and batch go before those written. ValueError, in one
    sentence, where the configuration can't be read, or leaves open what is not known.
    """
    check_launcher(launcher)
    known = known or Overrides()
    config = FORMATS[launcher].read(text, path, known)
    written = config.launch.microbatch
    if known.microbatch not in (None, written):
        raise ValueError(f"{path} says that a microbatch is {written} sequences, not {known.microbatch}; change it there or leave it out")
    return config


def configuration_text(launcher: str, config: LaunchConfig, rest: Mapping[str, Any] | None = None) -> str:
    """The configuration as the launcher reads it. ValueError where it can't express the model.

    rest: a configuration of torchtitan whose other settings (data, optimizer, checkpoints) are kept.
    """
    check_launcher(launcher)
    return torchtitan.write(config, rest) if launcher == "torchtitan" else FORMATS[launcher].write(config)


def kept_settings(launcher: str, text: str, path: str) -> Mapping[str, Any] | None:
    """What `configuration_text` can take over from a configuration; None where the launcher's writer starts anew."""
    return parsed(text, path) if launcher == "torchtitan" and path.endswith(".toml") else None
