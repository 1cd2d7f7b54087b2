"""The command line: arguments, output, exit codes."""

from . import (  # noqa: F401 (each module adds its verbs to the app)
    cache_verb,
    calibrate_verb,
    certify_verb,
    check_verb,
    degrees_verb,
    doctor_verb,
    pipeline_verb,
    plan_verbs,
    saved_plan_verbs,
    serve_plan_verb,
    simulate_verb,
    verbs_without_model,
)
from .app import main as main
