"""Experiments of AMD Primus, which say what differs from presets: of the trainer and the model, files that extend each other, in
primus/configs of its checkout. What they say is Megatron's arguments; an experiment goes before its model, and that before its trainer.

Format: AMD-AGI/Primus, examples/megatron/configs; `${NAME:default}` is the default here, as the environment of a run isn't known.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.reading import text_of

from .texts import parsed

DEFAULT = re.compile(r"\$\{\w+:([^}]*)\}")
FOLDER = Path("primus") / "configs"
KINDS = ("modules", "config"), ("models", "model")  # folders of presets, and what an experiment calls them
DEEPEST = 16  # of presets that extend each other


def experiment(text: str, path: str) -> dict[str, Any]:
    """What an experiment says with its presets, as the model's section; other data as they are. ValueError where presets aren't there."""
    data = parsed(text, path)
    modules = data["modules"].values() if isinstance(data.get("modules"), Mapping) else ()
    if not any(isinstance(module, Mapping) and "framework" in module for module in modules):
        return data
    modules = parsed(DEFAULT.sub(r"\1", text), path)["modules"].values()
    module = next(module for module in modules if isinstance(module, Mapping) and "framework" in module)
    if module["framework"] != "megatron":
        raise ValueError(f"{path} is an experiment of Primus with framework {module['framework']}; expected megatron")
    folder = next((parent / FOLDER for parent in Path(path).resolve().parents if (parent / FOLDER).is_dir()), None)
    if folder is None:
        raise ValueError(f"{path} is an experiment of Primus, whose presets are in {FOLDER} of its checkout; expected the file in one")
    trainer, model = (_preset(folder / kind / "megatron" / str(module.get(name))) for kind, name in KINDS)
    overrides = module.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        raise ValueError(f"{path}: overrides is {str(overrides)[:40]!r}; expected a section of keys")
    said = _merged(_merged(trainer, model), overrides)
    if (kind := said.get("model_type", "gpt")) != "gpt":
        raise ValueError(f"{path}: model_type is {str(kind)[:40]!r}, which has no prices here; expected gpt")
    if isinstance(lora := said.get("lora"), Mapping) and not lora.get("enabled", True):
        del said["lora"]
    if said.get("enable_primus_turbo") and (said.get("use_turbo_deepep") or said.get("turbo_sync_free_moe_stage") in (2, 3)):
        said["moe_token_dispatcher_type"] = "flex"  # tokens travel by DeepEP
    return {"model": {name: value for name, value in said.items() if value is not None}}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of both as one, as Primus joins presets."""
    both = [name for name, value in over.items() if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)]
    return {**base, **over, **{name: _merged(base[name], over[name]) for name in both}}


def _preset(path: Path, depth: int = 0) -> dict[str, Any]:
    if depth > DEEPEST:
        raise ValueError(f"{path} extends more than {DEEPEST} presets one after the other")
    data = parsed(DEFAULT.sub(r"\1", text_of(path, "launch")), str(path))
    said: dict[str, Any] = {}
    bases = (data.pop("extends", None) or data.pop("bases", None)) or ()
    for base in [bases] if isinstance(bases, str) else bases:
        said = _merged(said, _preset(path.parent / str(base), depth + 1))
    return _merged(said, data)
