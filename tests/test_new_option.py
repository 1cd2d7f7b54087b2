"""An option is declared once: with one field more, a copy of the package has it in the verb, the pass, the file, `--help` and `check`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BEFORE = "    # of the seconds over the ranges, relative to the best plan of each size\n"
FIELD = '    patience_of_users: float = declared(1.0, number(), "How long users wait.")\n'
RUN = """
import json, sys
import autoshard
from autoshard.api import PassOptions
from autoshard.cli import main
from autoshard.explain.reopened import options_of
from models import mlp

mesh = autoshard.Mesh.from_bandwidths((2,))
solution = autoshard.plan(*mlp.tiny(), mesh, baselines=False, objective="serial", patience_of_users=3.0)
solution.save("plan.json")
loaded = autoshard.load("plan.json")
usual = autoshard.plan(*mlp.tiny(), mesh, baselines=False, objective="serial")
answers = {"noted": loaded.assumptions["patience_of_users"], "again": options_of(loaded).patience_of_users}
answers["usual"] = "patience_of_users" in usual.assumptions
answers["other_question"] = usual.fingerprint["options"] != loaded.fingerprint["options"]
answers["pass"] = PassOptions.of({"mesh_shape": (2,), "patience_of_users": 2.0}).planning().patience_of_users
data = json.loads(open("plan.json").read())
data["assumptions"]["patience_of_users"] = "long"
open("wrong.json", "w").write(json.dumps(data))
for kind, ask in {
    "in_file": lambda: autoshard.load("wrong.json"),
    "in_python": lambda: autoshard.plan(*mlp.tiny(), mesh, patience_of_users=-1),
    "near": lambda: autoshard.plan(*mlp.tiny(), mesh, patience_of_user=1),
}.items():
    try: ask()
    except ValueError as error: answers[kind] = str(error)
words = "plan models/mlp.py:tiny --mesh 2 --patience-of-users 4 --no-baselines --objective serial --out verb.json --json"
answers["verb"] = main(words.split())
answers["in_verbs_plan"] = autoshard.load("verb.json").assumptions["patience_of_users"]
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package with one field more; nothing else of it is changed."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "autoshard", folder / "autoshard", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "models", folder / "models", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "autoshard" / "options" / "planning.py"
    text = path.read_text()
    assert text.count(BEFORE) == 1
    path.write_text(text.replace(BEFORE, FIELD + BEFORE))
    return folder


def run(copy: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    return subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)


def test_a_new_option_is_everywhere(copy):
    done = run(copy, "-c", RUN)
    answers = json.loads(done.stdout.rpartition("ANSWERS")[2] or "{}")
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = {"noted": 3.0, "again": 3.0, "usual": False, "other_question": True, "pass": 2.0, "verb": 0, "in_verbs_plan": 4.0}
    assert {key: answers[key] for key in wanted} == wanted
    assert "assumptions/patience_of_users" in answers["in_file"]
    assert answers["in_python"] == "patience_of_users is -1; expected a number of 0 or more"
    assert answers["near"] == "unknown option 'patience_of_user'; did you mean 'patience_of_users'?"


def test_a_new_option_is_in_the_words_of_the_command_line(copy):
    shown = run(copy, "-m", "autoshard", "plan", "--help").stdout
    assert re.search("--patience-of-users <?float>?", shown, re.IGNORECASE)
    assert re.search(r"How long users wait\.\s+\\?\[default: 1.0\]", shown)
    refused = run(copy, "-m", "autoshard", "plan", "models/mlp.py:tiny", "--mesh", "2", "--patience-of-users", "-3")
    assert refused.returncode == 2 and refused.stderr == "autoshard: --patience-of-users is -3.0; expected a number of 0 or more\n"
