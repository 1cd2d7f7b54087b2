"""The command line: argv, printing, exit codes."""

from . import calibrate_verb, plan_verbs, redistribute_verb, solve_verb  # they add their verbs to the app
from .app import main as main

__all__ = ["main", "calibrate_verb", "plan_verbs", "redistribute_verb", "solve_verb"]
