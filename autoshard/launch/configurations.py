"""A configuration in any launcher's format as a `LaunchConfig`, and back as text that the launcher reads."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.reading import text_of

from . import accelerate, automodel, deepspeed, megatron, nanotron, torchtitan
from .edits import edited
from .legality import check_launcher
from .model_sizes import ModelSizes
from .runs import Launch, LaunchConfig, Overrides
from .texts import arguments_text, flat, json_text, nested, parsed, toml_text, yaml_text


@dataclass(frozen=True)
class Syntax:
    """How a launcher's configurations are read, and what a launch decides of them is written."""

    read: Callable[[str, str, Overrides], LaunchConfig]
    settings: Callable[[LaunchConfig], dict[str, Any]]  # by dotted names; None where there should be none
    text: Callable[[Mapping[str, Any]], str] = yaml_text
    place: Callable[[str, str, str], str] = lambda text, path, name: name  # the name under which a text has a setting
    exclusive: tuple[frozenset[str], ...] = ()  # groups of keys of which one counts
    omitted: tuple = (None,)  # values that are left out of a new configuration
    model: Callable[[ModelSizes], dict[str, Any]] = lambda sizes: {}  # ... and what it says of the model besides


FORMATS = {
    "torchtitan": Syntax(torchtitan.read, torchtitan.settings, toml_text, torchtitan.place, torchtitan.EXCLUSIVE, model=torchtitan.model),
    "megatron": Syntax(megatron.read, megatron.settings, arguments_text, megatron.place, megatron.EXCLUSIVE),
    "accelerate": Syntax(accelerate.read, accelerate.settings, place=accelerate.place),
    "nanotron": Syntax(nanotron.read, nanotron.settings, model=nanotron.model),
    "deepspeed": Syntax(deepspeed.read, deepspeed.settings, json_text, deepspeed.place, omitted=(None, -1, "none")),
    "automodel": Syntax(automodel.read, automodel.settings, place=automodel.place),
}
ROUNDS = 3  # of changes
SIGNS = {  # keys, by their dotted names, that one launcher's files have and no other's
    "torchtitan": r"parallelism\.\w+_degree|training\.(seq_len|local_batch_size|steps)|job\..*",
    "megatron": r"(.*[._])?(tensor|pipeline)_model_parallel_size|MODEL_ARGS\..*", "accelerate": "distributed_type|compute_environment",
    "nanotron": r"parallelism\.(dp|tp|pp)|tokens\..*", "deepspeed": r"zero_optimization\..*|train_(micro_batch_size_per_gpu|batch_size)",
    "automodel": r"step_scheduler\..*|distributed\.(strategy|_target_|[a-z]+_size)",
}
# Keys that change a run in a way that no figure counts, by launcher, refused or noted: the values that change nothing, as a pattern, `on`,
# `off`, or `present` where leaving it out changes something; what to say of others; a degree that has to be above 1. For a section: `peft.`
UNCOUNTED = json.loads(text_of(Path(__file__).with_name("uncounted.json"), "launch"))
PATTERNS = {"on": "on|true|yes|1", "off": "off|false|no|none|0|", "present": ".*"}


def read_configuration(launcher: str, text: str, path: str, known: Overrides | None = None) -> LaunchConfig:
    """The launch and the model that a configuration describes. path: its file, whose ending tells TOML, YAML and JSON apart.

    known: facts that the configuration may leave open; its devices, sequence and batch go before those written. ValueError, in one
    sentence, where the configuration can't be read, or leaves open what is not known.
    """
    check_launcher(launcher)
    known = known or Overrides()
    written = megatron.arguments_in(text, path) if launcher == "megatron" else flat(parsed(text, path))
    if (signs := _launchers_of(text, path)) and launcher not in signs:
        raise ValueError(f"{path} is no configuration of {launcher}, but one of {min(signs)}; add --launcher {min(signs)}")
    keys = {name: (" ".join(value) or "on") if launcher == "megatron" else str(value) for name, value in written.items()}
    if refused := uncounted("refused", launcher, keys):
        raise ValueError(f"{path}: {refused[0]}")
    try:
        config = FORMATS[launcher].read(text, path, known)
    except ValueError as error:
        raise ValueError(f"{error}" if path in str(error) else f"{path}: {error}") from None
    config = replace(config, not_counted=uncounted("noted", launcher, keys, config.launch))
    if known.microbatch not in (None, said := config.launch.microbatch):
        raise ValueError(f"{path} says that a microbatch is {said} sequences, not {known.microbatch}; change it there or leave it out")
    return config


def _launchers_of(text: str, path: str) -> set[str]:
    """Those whose signs a file has; none of a script."""
    keys = flat(parsed(text, path)) if path.endswith((".toml", ".yaml", ".yml", ".json")) else {}
    return {launcher for launcher, sign in SIGNS.items() if any(re.fullmatch(sign, key) for key in keys)}


def uncounted(kind: str, launcher: str, keys: Mapping[str, str], launch: Launch | None = None) -> tuple[str, ...]:
    """A sentence for each key with a value that nothing counts. kind: refused or noted. keys: of a configuration, by dotted names."""
    said = []
    for name, (harmless, effect, *degree) in UNCOUNTED[launcher][kind].items():
        values = [value for key, value in keys.items() if key == name or (name.endswith(".") and key.startswith(name))]
        nothing = f"{PATTERNS.get(harmless, harmless)}|auto|none"  # ... or leave it to others
        values = [value for value in values if not re.fullmatch(nothing, value.lower())][:1]
        if harmless == "present" and name not in keys:
            values = ["is missing"]
        if values and all(getattr(launch, field) > 1 for field in degree):
            said.append(f"{name.rstrip('.')} {values[0][:60]}: {effect}")
    return tuple(said)


def configuration_text(launcher: str, config: LaunchConfig) -> str:
    """The configuration as the launcher reads it, with all that a launch decides. ValueError where it can't express the model."""
    check_launcher(launcher)
    form = FORMATS[launcher]
    values = {**form.model(config.sizes), **form.settings(config)}
    return form.text(nested({name: value for name, value in values.items() if value not in form.omitted}))


def settings_of(launcher: str, config: LaunchConfig) -> dict[str, Any]:
    """What a launch decides, by the names of the launcher's keys."""
    return FORMATS[launcher].settings(config)


def edited_text(launcher: str, config: LaunchConfig, text: str, path: str, known: Overrides | None = None) -> str:
    """Another configuration, `text` of the file `path`, with the values of this one and otherwise as it is: the same text where they
    are the same. known: as for `read_configuration`. ValueError where the text can't be changed so that it is read as this configuration.
    """
    check_launcher(launcher)
    file = known or Overrides()
    if launcher == "accelerate":  # whose microbatch is in the script
        file = replace(file, microbatch=config.launch.microbatch)
    form, gone = FORMATS[launcher], set[str]()
    for _ in range(ROUNDS):  # some keys have others as their default
        described = form.read(text, path, _as_written(launcher, text, path, file))
        now, wanted = form.settings(described), form.settings(replace(config, sizes=described.sizes))
        flags = now if launcher == "megatron" else {}  # other launchers leave unread what another key has switched off
        changes = {name: wanted.get(name) for name in {**flags, **wanted} if now.get(name) != wanted.get(name)}
        if not changes:
            return text
        changes |= {name: False for name in gone & changes.keys() & megatron.FLAGS if path.endswith(megatron.DATA)}  # a preset says it
        for group in form.exclusive:
            if group & changes.keys():
                changes = {**dict.fromkeys(group), **changes}
        gone |= {name for name, value in changes.items() if value is None}
        text = edited(text, path, {form.place(text, path, name): changes[name] for name in sorted(changes)}, megatron.FLAGS)
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
