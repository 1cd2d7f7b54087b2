"""The public functions: plan, verify, load, export, the fx pass and the others. Each calls one package after another and holds no
algorithm.

Names are loaded when first used, so that a command loads the rooms that it needs and no others.
"""

from functools import partial
from importlib import import_module
from typing import Any

from autoshard.solution import provide

_NAMES = {  # by the module, below autoshard, that defines them
    "api.checking": "check dry_run verify",
    "api.compiling": "backend",
    "api.observing": "observed read_evidence",
    "api.passes": "PassOptions autosharding_pass",
    "api.planning": "plan",
    "api.reporting": "html_report",
    "api.running": "parallelize",
    "api.simulating": "simulate",
    "api.with_tables": "plan_with_tables",
    "calibrate.measure": "measure_this_cluster",
    "explain.reopened": "certificate_of problem_of write_problem",
    "explain.robustness": "robustness",
    "explain.why": "explain",
    "exports": "NotHeld as_plain export",
    "launch.best_degrees": "Degrees degrees",
    "launch.checked_launch": "CheckedLaunch check_launch",
    "launch.fitting": "Fitting will_fit",
    "pipeline.grid": "Parallel Simulation simulate_grid",
    "runtime.agreement": "RankLost",
    "runtime.checkpoints": "load_checkpoint save_checkpoint",
    "runtime.parallelize": "device_mesh",
    "planning.frontier": "Frontier FrontierPoint frontier",
    "planning.keeping": "edited_layouts kept_layouts",
    "planning.mesh_shapes": "mesh_shapes plan_meshes",
    "planning.options": "Infeasible NoAnswer Options",
    "planning.programs": "Program",
    "solution": "Plan PlanCache ProgramsSolution Solution from_text load load_one",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_CHECKED = (  # their arguments are compared with kinds.KINDS
    "check device_mesh dry_run explain export kept_layouts load load_one parallelize robustness simulate verify"
).split()

__all__ = sorted(_HOMES)


def _called(module: str, name: str, *args: Any, **options: Any) -> Any:
    return getattr(import_module(f"autoshard.{module}"), name)(*args, **options)


# methods of Solution and Frontier whose code is in packages that these classes can't import
provide("notebook", partial(_called, "report.html", "notebook"))
provide("frontier_svg", partial(_called, "report.frontier", "svg"))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoshard.api' has no attribute {name!r}")
    value = getattr(import_module(f"autoshard.{_HOMES[name]}"), name)
    if name in _CHECKED:
        from autoshard.api.kinds import checked_kinds  # here: it knows the classes of plans and pipelines

        value = checked_kinds(value)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return __all__
