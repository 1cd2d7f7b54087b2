"""A configuration in any launcher's format as a `LaunchConfig`, and back as text that the launcher reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import accelerate, automodel, deepspeed, megatron, nanotron, torchtitan
from .edits import edited
from .legality import check_launcher
from .runs import LaunchConfig, Overrides

# each with `read`, `write`, `settings`, `place` and groups of keys of which one counts
FORMATS: dict[str, Any] = {
    "torchtitan": torchtitan, "megatron": megatron, "accelerate": accelerate, "nanotron": nanotron, "deepspeed": deepspeed,
    "automodel": automodel,
}  # fmt: skip
ENDINGS = {  # of what is written
    "torchtitan": ".toml", "megatron": ".sh", "accelerate": ".yaml", "nanotron": ".yaml", "deepspeed": ".json", "automodel": ".yaml",
}  # fmt: skip
ROUNDS = 3  # of changes


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


def configuration_text(launcher: str, config: LaunchConfig) -> str:
    """The configuration as the launcher reads it, with all that a launch decides. ValueError where it can't express the model."""
    check_launcher(launcher)
    return FORMATS[launcher].write(config)


def settings_of(launcher: str, config: LaunchConfig) -> dict[str, Any]:
    """What a launch decides, by the names of the launcher's keys."""
    return FORMATS[launcher].settings(config)


def edited_text(launcher: str, config: LaunchConfig, text: str, path: str, known: Overrides | None = None) -> str:
    """Another configuration, `text` of the file `path`, with the values of this one and otherwise as it is: the same text where they
    are the same. known: as for `read_configuration`. ValueError where the text can't be changed so that it is read as this configuration.
    """
    check_launcher(launcher)
    file = replace(known or Overrides(), microbatch=config.launch.microbatch)
    form = FORMATS[launcher]
    for _ in range(ROUNDS):  # some keys have others as their default
        described = form.read(text, path, _as_written(launcher, text, path, file))
        now, wanted = form.settings(described), form.settings(replace(config, sizes=described.sizes))
        flags = now if launcher == "megatron" else {}  # other launchers leave unread what another key has switched off
        changes = {name: wanted.get(name) for name in {**flags, **wanted} if now.get(name) != wanted.get(name)}
        if not changes:
            return text
        for group in form.EXCLUSIVE:
            if group & changes.keys():
                changes = {**dict.fromkeys(group), **changes}
        text = edited(text, path, {form.place(text, path, name): changes[name] for name in sorted(changes)})
    names = ", ".join(changes)
    raise ValueError(f"{path} can't be changed in {names} alone; expected these keys where the launcher's documentation has them")


def _as_written(launcher: str, text: str, path: str, known: Overrides) -> Overrides:
    """What is known beside the file, without what the file says itself."""
    for names in (("seq", "global_batch"), ("global_batch",), ()):
        bare = replace(known, **dict.fromkeys(names))  # type: ignore[arg-type]
        try:
            FORMATS[launcher].read(text, path, bare)
        except ValueError:
            continue
        return bare
    return known
