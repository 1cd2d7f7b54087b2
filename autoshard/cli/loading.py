"""Functions that load plans, and the parts of autoshard that are slow to import."""

import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from autoshard.cli.combinations import is_launch
from autoshard.cli.model import check_sizes, load_model
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.mesh import Device, Mesh
from autoshard.reading import file_and_program


def load_api() -> ModuleType:
    from autoshard import api  # here: torch takes seconds to import, which --help and `solve` shouldn't

    return api


def load_cluster(path: str) -> Mesh:
    from autoshard.cost import load_cluster as load  # here: it takes a moment to import

    return load(path)


def load_device(device: str) -> str | Device:
    """The name of a device as it is; of a file of `calibrate measure` the device that was measured."""
    if not device.endswith(".json"):
        return device
    from autoshard.cost import load_device as load  # here: as above

    return load(device)


def load_plan(path: str) -> Any:
    """A plan of one program. ValueError where the file has another kind."""
    return load_any_plan(path, "load_one")


def load_any_plan(path: str, load: str = "load") -> Any:
    """A plan of one program, of several, or of stages. ValueError for a file that by its ending is a launcher's configuration."""
    if is_launch(path, None) and Path(path).is_file():
        verbs = "`autoshard check`, `fits`, `show` and `explain` answer for it"
        raise ValueError(f"{path} looks like a launcher's configuration, not like a plan; {verbs}")
    return getattr(load_api(), load)(path)


def model_of(
    solution: Any, model: str | None, settings: dict, path: str, trust: bool, *, option: str = "", without: str = ""
) -> tuple[str, dict]:
    """The model that the user names; or with `trust` the one that the plan names with its settings, those given now on top.

    A model is code that runs, and a plan may be anybody's file: ValueError, which shows the plan's model, where nobody said to run it.
    option: how the verb takes a model where not as an argument; without: its words for going on without one.
    """
    if model is not None:
        return model, settings
    named, given = solution.model, solution.model_settings or {}
    if not named:
        raise ValueError(f"{path} does not say which model it is for; name it after the file, for example {path} models/gpt2.py:small")
    if not isinstance(named, str) or not isinstance(given, dict):
        raise ValueError(f"{path} says its model is {str(named)[:80]!r} with settings {str(given)[:80]!r}; expected text; name it yourself")
    settings = {**given, **settings}
    if not trust:
        words = [*option.split(), named, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]
        raise ValueError(
            f"{path} is for a model whose code would run; to run it name it yourself: {shlex.join(words)[:400]}; or add --trust, which "
            f"runs what the plan names{without}"
        )
    return named, settings


def model_for(output: Output, plan: Any, asked: Asked, path: str, *, of_any_shape: bool = False, **words: str) -> tuple[Any, Any]:
    """The module and example inputs of a plan of one program, which have its sizes. of_any_shape: as `check_sizes` has it."""
    written, settings = model_of(plan, asked.model, asked.settings, path, asked.trust, **words)
    output.progress("building the model", 0.0)
    module, example_inputs = load_model(written, settings, training=plan.training, program=file_and_program(path)[1])
    check_sizes(module, example_inputs, plan, path, of_any_shape=of_any_shape)
    return module, example_inputs


def models_for(output: Output, plan: Any, asked: Asked) -> tuple[Any, Any]:
    """What `verify` and `check` take beside a plan: its model and example inputs; of several programs, each of both by name."""
    several, path, model = hasattr(plan, "programs"), asked.solution, asked.model
    file, _, chosen = (model or "").partition("#")
    if several and chosen:
        raise ValueError(f"{path} is a plan of several programs, {model} is one of them; give {file}, or {path}#{chosen} and {model}")
    of_each = {name: (one, f"{file}#{name}" if file else None, f"{path}#{name}") for name, one in plan.programs.items()} if several else {}
    plans = of_each or {"": (plan, model, path)}
    named = {name: model_of(one, written, asked.settings, where, asked.trust) for name, (one, written, where) in plans.items()}
    output.progress("building the model", 0.0)
    built = {
        name: load_model(written, keywords, training=plans[name][0].training, program=file_and_program(path)[1])
        for name, (written, keywords) in named.items()
    }
    return ({name: pair[0] for name, pair in built.items()}, {name: pair[1] for name, pair in built.items()}) if several else built[""]
