"""MODEL on the command line: `file.py:function`, called with the --set keywords, returns `(module, example_inputs)`; or `hf:DIR`."""

import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from autoshard.cli.model_source import config_folder, may_have, model_file


def load_model(written: str, settings: Mapping[str, Any], *, training: bool = False, program: str = "") -> tuple[Any, Any]:
    """Run the function; ValueError in one sentence where it is missing, fails or returns something else.

    training: a Hugging Face model then gets labels and returns its loss; a function has its own --set for that.
    program: the one that is meant where the function returns several and `written` names none.
    """
    returned = load_model_or_programs(written, settings, training=training)
    if not isinstance(returned, Mapping):
        return returned
    if not program:
        names = [*map(str, returned)]
        raise ValueError(f"{written} returned programs {', '.join(names)}; name one of them, as {written}#{names[0]}")
    return _checked(_program(returned, program, written), written)


def load_model_or_programs(written: str, settings: Mapping[str, Any], *, training: bool = False) -> tuple[Any, Any] | Mapping[str, Any]:
    """As `load_model`; where the function returns programs by name, those."""
    if written.startswith("hf:"):
        return _huggingface(written.removeprefix("hf:"), settings, training)
    written, _, program = written.partition("#")
    returned = _returned(written, settings)
    if isinstance(returned, Mapping) and returned and not program:
        return returned
    return _checked(_program(returned, program, written) if program else returned, written)


def _huggingface(written: str, settings: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """The model of a Hugging Face config, in a folder or in the hub's cache on this machine."""
    from autoshard.capture import load_huggingface  # here: torch takes seconds to import

    caches: dict[str, Any] = {}
    if "cache" in settings:
        from autoshard.serving import empty_cache  # here: as above

        caches = {"empty_cache": empty_cache}
    return load_huggingface(config_folder(written), settings, training=training, name=written, **caches)


def check_sizes(module: Any, example_inputs: Any, solution: Any, path: str, *, of_any_shape: bool = False) -> None:
    """ValueError where parameters or inputs of the model are not those that the plan was made for: its seconds would be others.
    of_any_shape: inputs of a plan for ranges may have other sizes."""
    from autoshard.torch_private import pytree  # here: torch takes seconds to import

    for name, parameter in module.named_parameters():
        row = solution.parameters.get(name, {})
        here = {"shape": list(parameter.shape), "dtype": str(parameter.dtype).removeprefix("torch.")}
        if other := [key for key in here if key in row and (list(row[key]) if key == "shape" else row[key]) != here[key]]:
            planned = row[other[0]]
            raise ValueError(_other_sizes(f"parameter {name} with {other[0]} {planned}, here it is {here[other[0]]}", path))
    if of_any_shape and solution.dynamic_shapes is not None:
        return
    planned_shapes = Counter(shape for shape in solution.inputs.values() if shape is not None)
    given = Counter(tuple(leaf.shape) for leaf in pytree.tree_leaves(example_inputs) if hasattr(leaf, "shape"))
    if missing := planned_shapes - given:
        raise ValueError(_other_sizes(f"inputs of shape {list(next(iter(missing)))}, here they are {list(map(list, given))}", path))


def _other_sizes(what: str, path: str) -> str:
    return (
        f"{path} was planned for {what}; leave out the --set, --batch, --seq or --dtype that changes it, or plan again; "
        "`autoshard check --any-graph` says what the plan is worth at other sizes"
    )


def _program(programs: object, name: str, written: str) -> tuple[Any, Any]:
    """The model and the inputs of one of several programs, `train`, or of one of its shapes, `train[0]`."""
    known = {} if not isinstance(programs, Mapping) else {
        variant: (one.model, inputs) for key, one in programs.items() for variant, inputs, _ in one.variants(key)
    }  # fmt: skip
    if name not in known:
        raise ValueError(f"{written} has no program {name!r}; it has {', '.join(known) or 'none'}")
    return known[name]


def _returned(written: str, settings: Mapping[str, Any]) -> object:
    """What the function returns."""
    path, _, name = written.rpartition(":")
    if not path or not name.isidentifier():
        raise ValueError(f"MODEL is {written!r}; expected file.py:function, for example models/gpt2.py:small, or hf:DIR")
    file = model_file(path)
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)  # as `python file.py` does, so that the file may import its neighbours
    try:
        module = _run_file(file)
        function = _function(module, name, path)
        _check_settings(function, name, settings)
        return _call(function, f"{path}:{name}", file, settings)
    finally:
        sys.path.remove(folder)


def _run_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"autoshard_model_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file; MODEL is file.py:function, for example models/gpt2.py:small")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises is the user's to read, in one sentence
        raise ValueError(f"{file} can't be imported: {_what_and_where(error, file)}; correct the file") from error
    return module


def _function(module: ModuleType, name: str, path: str) -> Callable:
    function = getattr(module, name, None)
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{path}:{name} is async, and a call of it returns no model; expected a function that is defined with def alone")
    if callable(function):
        return function
    may_have(path, name)
    raise ValueError(f"{path}:{name} is no function; expected one that returns a module and its example inputs")


def _check_settings(function: Callable, name: str, settings: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [key for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not accepts_any and (unknown := [key for key in settings if key not in named]):
        raise ValueError(f"{name}() takes no {unknown[0]!r}; it takes {', '.join(named) or 'nothing'}, so correct the --set")
    if missing := [key for key in named if parameters[key].default is inspect.Parameter.empty and key not in settings]:
        raise ValueError(f"{name}() needs a value for {missing[0]!r}; give it with --set {missing[0]}=VALUE")


def _call(function: Callable, what: str, file: Path, settings: Mapping[str, Any]) -> object:
    try:
        return function(**settings)
    except (Exception, SystemExit) as error:  # as above
        raise ValueError(f"{what} failed: {_what_and_where(error, file)}; correct the function or its --set values") from error


def _what_and_where(error: BaseException, file: Path) -> str:
    """`ValueError: seq is 4096 (line 81)`, the line being the last one in the user's file."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == file.resolve()]
    said = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}{': ' if said else ''}{said}{f' (line {lines[-1]})' if lines else ''}"


def _checked(returned: object, written: str) -> tuple[Any, Any]:
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        size = f" of {len(returned)}" if isinstance(returned, (tuple, list)) else ""
        raise ValueError(f"{written} returned a {type(returned).__name__}{size}; expected (module, example_inputs)")
    module, inputs = returned
    if not callable(getattr(module, "named_parameters", None)):  # asked like this, the numbers-only verbs need no torch
        raise ValueError(f"{written} returned a {type(module).__name__} first; expected (module, example_inputs) with a torch.nn.Module")
    if not isinstance(inputs, (tuple, list, dict)):
        raise ValueError(f"{written} returned example inputs of type {type(inputs).__name__}; expected a tuple of tensors")
    return module, tuple(inputs) if isinstance(inputs, list) else inputs
