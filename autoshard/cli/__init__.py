"""The command line: argv, printing, exit codes."""

from . import plan_verbs, solve_verb  # they add their verbs to the app
from .app import main as main

__all__ = ["main", "plan_verbs", "solve_verb"]
