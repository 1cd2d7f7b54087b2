"""autoshard plans how to shard every tensor of a PyTorch model over a mesh of devices, with a proof.

Names are loaded when first used: `import autoshard.problem` and `autoshard.solvers` stay free of torch.
"""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

from .version import VERSION as __version__  # noqa: F401

_HOMES = {
    "Axis": "mesh", "Device": "mesh", "Mesh": "mesh",
    "Infeasible": "api", "NoAnswer": "api",
    "autosharding_pass": "api", "export": "api", "load": "api", "parallelize": "api", "plan": "api", "verify": "api",
    "certificate_of": "api", "problem_of": "api", "write_problem": "api",
    "backend": "api", "check": "api", "dry_run": "api", "explain": "api",
    "kept_layouts": "api", "mesh_shapes": "api", "frontier": "api",
    "RankLost": "api", "device_mesh": "api", "load_checkpoint": "api", "save_checkpoint": "api",
    "Plan": "solution", "Solution": "solution", "Program": "api", "Cluster": "pipeline.submeshes",
    "Precision": "precision",
    "serve_plan": "serving",
    "Problem": "problem", "evaluate": "problem",
    "solve": "solvers",
    "Table": "tables", "plan_tables": "tables", "plan_with_tables": "api",
    "Row": "strategies", "register_rule": "strategies", "DefaultCosts": "cost", "register_price": "cost",
}  # fmt: skip

__all__ = sorted(_HOMES)
_MOVED = {  # until the next version: where they are, and what to write
    "load_programs": ("solution.load", "load"), "load_pipeline": ("solution.load", "load"), "verify_pipeline": ("api.verify", "verify"),
    "plan_programs": ("planning.plan_programs", "plan"), "plan_meshes": ("planning.plan_meshes", "plan"),
    "pipeline": ("pipeline.pipelines.pipeline", "plan"),
    "ProgramsSolution": ("solution.ProgramsSolution", "Plan"), "Frontier": ("api.Frontier", "api.Frontier"),
    "Option": ("tables.Option", "tables.Option"), "dp_proposals": ("tables.dp_proposals", "tables.dp_proposals"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        place, new = _MOVED[name]
        warnings.warn(f"autoshard.{name} is now autoshard.{new}", FutureWarning, stacklevel=2)
        room, _, inside = place.rpartition(".")
        return getattr(import_module(f"autoshard.{room}"), inside)
    if name not in _HOMES:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    return getattr(import_module(f"autoshard.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


class _Facade(ModuleType):
    """A public function hides the room of its name: `autoshard.pipeline` is the function, `from autoshard.pipeline import X` the room."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in (_HOMES | _MOVED) and isinstance(value, ModuleType)):  # what importing a room would set
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Facade
