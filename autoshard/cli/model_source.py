"""What a model is named after: the folder of a Hugging Face config; what the source of a file says of its function, without running it.

Imports nothing slow, but what looks a folder up that isn't there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.reading import content_of

HUGGING_FACE = ("batch", "seq", "image_size", "layers", "loss", "attention", "experts", "dtype", "cache")  # settings of hf: models
HUB_NAME = r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?"  # of a repository: ORG/NAME, or NAME of an old one


def names_model(written: str) -> bool:
    """Whether this is a MODEL, and no file of a plan or of a configuration."""
    return written.startswith("hf:") or ".py:" in written


def config_folder(written: str) -> Path:
    """The folder that holds the config.json of hf:`written`: itself, or that of a repository in the local cache of the Hugging Face hub.

    Nothing is downloaded. ValueError where there is none, which says how to get it.
    """
    folder = Path(written)
    if (folder / "config.json").is_file():
        return folder
    sentence = f"there is no file {folder / 'config.json'}; hf:DIR names a folder that holds a Hugging Face config.json"
    if folder.exists() or not re.fullmatch(HUB_NAME, written):
        raise ValueError(sentence)
    try:
        from huggingface_hub import try_to_load_from_cache  # here: it takes half a second, and only names of the hub need it
    except ImportError:
        cached = None
    else:
        cached = try_to_load_from_cache(written, "config.json")
    if not isinstance(cached, str):
        raise ValueError(
            f"{sentence}, and the hub's cache on this machine has no {written}; run `hf download {written} config.json`, after which "
            f"hf:{written} is found; or with --local-dir DIR, and give hf:DIR"
        )
    return Path(cached).parent


def model_file(path: str) -> Path:
    """The file of a model; where there is none at this place, `models/NAME.py` or `NAME.py` is the one that came with autoshard."""
    file = Path(path)
    package = Path(__file__).resolve().parent.parent
    places = [file]
    if file.parent in (Path(), Path("models")):
        places += [package / "models" / file.name, package.parent / "models" / file.name]  # as a wheel installs them, in a checkout
    for place in places:
        if place.is_file():
            return place
    raise ValueError(f"there is no file {path}; MODEL is file.py:function, for example models/gpt2.py:small")


def may_have(path: str, function: str) -> None:
    """ValueError where the file certainly has no such function."""
    tree = _tree(str(model_file(path)))
    if function not in _bound(tree):
        own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
        raise ValueError(f"{path} has no function {function!r}; it has {', '.join(own) or 'none'}")


def may_be_programs(written: str) -> bool:
    """Whether the model may be several Programs, which say themselves whether they train: its file has a name with that word."""
    if written.startswith("hf:") or "#" in written:
        return False
    nodes = ast.walk(_tree(str(model_file(written.rpartition(":")[0]))))
    return any("program" in str(getattr(node, field, "")).lower() for node in nodes for field in ("id", "name", "attr"))


def settings_of(written: str, given: Mapping[str, Any]) -> None:
    """ValueError for a --set that the model's function does not accept, as far as its source shows."""
    if written.startswith("hf:"):
        if unknown := [key for key in given if key not in HUGGING_FACE]:
            raise ValueError(f"hf: models take no setting {unknown[0]!r}; they take {', '.join(HUGGING_FACE)}")
        return
    path, _, name = written.partition("#")[0].rpartition(":")
    tree = _tree(str(model_file(path)))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(functions) != 1 or functions[0] not in tree.body or functions[0].decorator_list or functions[0].args.kwarg:
        return
    arguments = functions[0].args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if unknown := [key for key in given if key not in named]:
        raise ValueError(f"{name}() takes no {unknown[0]!r}; it takes {', '.join(named) or 'nothing'}, so correct the --set")


def _tree(path: str) -> ast.Module:
    """The file's syntax tree; where it can't be parsed, which running the file will report, one that may bind any name."""
    try:
        return ast.parse(content_of(path, "model"))
    except (SyntaxError, ValueError, RecursionError):
        return ast.parse("from anything import *")


def _bound(tree: ast.Module) -> set[str] | _All:
    """Every name that the file binds anywhere; all names where it may bind some that its source does not show."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return _All() if names & {"*", "globals", "vars", "exec", "setattr", "__getattr__", "locals"} else names


class _All:
    def __contains__(self, name: object) -> bool:
        return True
