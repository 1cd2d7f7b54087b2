"""The command line: arguments, output, exit codes."""

from . import (  # noqa: F401 (each module adds its verbs to the app)
    calibrate_verb,
    check_verb,
    degrees_verb,
    demo_verb,
    doctor_verb,
    explain_verb,
    export_verb,
    frontier_verb,
    pipeline_verb,
    plan_verbs,
    redistribute_verb,
    serve_plan_verb,
    show_verb,
    simulate_verb,
    solve_verb,
    tables_verb,
)
from .app import main as main
