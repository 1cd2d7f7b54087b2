"""What works where only the package's own requirements are installed, without any of its extras."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAIN = """
import importlib, pkgutil, sys
sys.modules["scipy"] = sys.modules["matplotlib"] = None
import autoshard
import autoshard.cli.app
from models import mlp
for module in pkgutil.walk_packages(autoshard.__path__, "autoshard."):
    if not module.name.startswith(("autoshard.calibrate", "autoshard.__main__", "autoshard.tables.torchrec", "autoshard.pytest_plugin")):
        importlib.import_module(module.name)
try:
    autoshard.report.figures.blank(1, 1)
except ModuleNotFoundError as error:
    print(error.name.partition(".")[0])
mesh = autoshard.Mesh.from_bandwidths((2,), intra_node_bandwidth=1e9)
model, inputs = mlp.tiny(layers=1)
plan = autoshard.plan(model, inputs, mesh, training=True)
assert len(autoshard.frontier(model, inputs, mesh, training=True, points=2).points) > 1
less = autoshard.plan(model, inputs, mesh, training=True, objective="serial", memory_limit=0.7 * plan.peak_bytes)
assert less.peak_bytes < plan.peak_bytes
sys.exit(autoshard.cli.app.main(["calibrate", "fit", sys.argv[1]]))
"""


def test_all_but_calibration_and_figures_works_where_neither_scipy_nor_matplotlib_is_installed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PLAIN, str(ROOT / "README.md")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "matplotlib\n"), done.stderr  # which a figure asked for
    assert done.stderr.splitlines()[-1] == "autoshard: scipy is not installed; run: pip install 'autoshard[calibrate]'"
