"""Reports: plain records for scripts; text, HTML and plots for people."""

from .exported import exported as exported
from .exported import exported_text as exported_text
from .planned import planned_report as planned_report
from .summary import summary as summary
from .text import as_text as as_text
from .text import plan_report as plan_report
from .text import verify_report as verify_report
