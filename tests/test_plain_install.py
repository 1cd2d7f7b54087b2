"""What works where only the package's own requirements are installed, without any of its extras."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = """
import importlib, pkgutil, sys
sys.modules["matplotlib"] = None
import autoshard.report
for module in pkgutil.iter_modules(autoshard.report.__path__):
    importlib.import_module(f"autoshard.report.{module.name}")
try:
    autoshard.report.figures.blank(1, 1)
except ModuleNotFoundError as error:
    print(error.name.partition(".")[0])
"""


def test_tables_are_printed_where_matplotlib_is_not_installed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", TABLES], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "matplotlib\n"), done.stderr  # and a figure asks for it
