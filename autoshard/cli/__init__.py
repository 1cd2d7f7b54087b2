"""The command line: arguments, output, exit codes."""

from . import (  # noqa: F401 (each module adds its verbs to the app)
    cache_verb,
    calibrate_verb,
    check_verbs,
    degrees_verbs,
    doctor_verb,
    pipeline_verb,
    plan_verbs,
    saved_plan_verbs,
    simulate_verb,
    verbs_without_model,
)
from .app import main as main
