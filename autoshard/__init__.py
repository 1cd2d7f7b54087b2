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
    "backend": "api", "check": "api", "dry_run": "api", "explain": "api",
    "kept_layouts": "api", "mesh_shapes": "api", "plan_meshes": "api",
    "Frontier": "api", "frontier": "api",
    "RankLost": "api", "device_mesh": "api", "extrapolate": "api", "load_checkpoint": "api", "save_checkpoint": "api",
    "Cluster": "pipeline.submeshes", "pipeline": "api",
    "Program": "api", "plan_programs": "api", "ProgramsSolution": "api",
    "Solution": "api",
    "Precision": "precision",
    "serve_plan": "serving",
    "Problem": "problem", "evaluate": "problem",
    "solve": "solvers",
    "Option": "tables", "Table": "tables", "dp_proposals": "tables", "plan_tables": "tables", "plan_with_tables": "api",
    "Row": "strategies", "register_rule": "strategies",
}  # fmt: skip

__all__ = sorted(_HOMES)
_RENAMED = {"load_programs": "load", "load_pipeline": "load", "verify_pipeline": "verify"}  # until the next version


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"autoshard.{name} is now autoshard.{_RENAMED[name]}, which takes every kind of plan", FutureWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _HOMES:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    return getattr(import_module(f"autoshard.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


class _Facade(ModuleType):
    """A public function hides the room of its name: `autoshard.pipeline` is the function, `from autoshard.pipeline import X` the room."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):  # what importing a room would set
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Facade
