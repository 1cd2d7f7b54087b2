"""Reports: plain records for scripts; text, HTML and plots for people."""

from autoshard.report.changes import comparison as comparison
from autoshard.report.changes import comparison_tables as comparison_tables
from autoshard.report.explained import check_table as check_table
from autoshard.report.explained import explained as explained
from autoshard.report.explained import prices_report as prices_report
from autoshard.report.explained import robustness_table as robustness_table
from autoshard.report.frontier import svg as svg
from autoshard.report.launchers import launch_table as launch_table
from autoshard.report.plan_tables import axis_line as axis_line
from autoshard.report.plan_tables import price_parts as price_parts
from autoshard.report.programs import programs_record as programs_record
from autoshard.report.programs import programs_report as programs_report
from autoshard.report.serving import serving_report as serving_report
from autoshard.report.timeline import trace_of as trace_of
from autoshard.report.timeline import trace_of_run as trace_of_run

from . import calibration, frontier, launchers, pipeline, redistribution, tables, timeline  # noqa: F401 (each of one verb)
from .planned import plan_report as plan_report
from .planned import planned_report as planned_report
from .planned import summary as summary
from .planned import verify_report as verify_report
from .terminal import as_text as as_text
from .terminal import exported as exported
from .terminal import exported_text as exported_text
