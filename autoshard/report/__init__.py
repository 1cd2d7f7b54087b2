"""Reports: plain records for scripts; text, HTML and plots for people. Its modules are loaded when first used."""

from importlib import import_module
from types import ModuleType

_PAGES = (
    "calibration changes explained frontier html launchers page_of_launch pipeline plan_tables planned programs redistribution serving "
    "tables terminal timeline"
).split()


def __getattr__(name: str) -> ModuleType:
    if name not in _PAGES:
        raise AttributeError(f"module 'autoshard.report' has no attribute {name!r}")
    return import_module(f"autoshard.report.{name}")
