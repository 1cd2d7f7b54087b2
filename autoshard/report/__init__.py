"""Reports: plain records for scripts; text, HTML and plots for people. Names are loaded when first used, as those of api."""

from importlib import import_module
from typing import Any

_NAMES = {  # by the module that defines them
    "changes": "comparison comparison_tables",
    "explained": "check_table prices_report robustness_table",
    "frontier": "svg",
    "launchers": "launch_table",
    "plan_tables": "axis_line price_parts",
    "planned": "plan_report planned_report summary verify_report",
    "programs": "programs_record programs_report",
    "serving": "serving_report",
    "terminal": "as_text exported exported_text",
    "timeline": "trace_of trace_of_run",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_PAGES = ("calibration", "explained", "frontier", "launchers", "pipeline", "redistribution", "tables", "timeline")  # each of one verb


def __getattr__(name: str) -> Any:
    if name not in (*_HOMES, *_PAGES):
        raise AttributeError(f"module 'autoshard.report' has no attribute {name!r}")
    module = import_module(f"autoshard.report.{_HOMES.get(name, name)}")
    return getattr(module, name) if name in _HOMES else module
