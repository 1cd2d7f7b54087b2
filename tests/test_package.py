"""The installed package: what the wheel holds, that it works without the repository, and what is said where an extra is missing."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import autoshard
from autoshard.cli.app import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def package_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def test_each_extra_installs_what_the_command_line_says_of_it():
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert package in [package_of(requirement) for requirement in extras[extra]], package
        assert package not in [package_of(requirement) for requirement in PROJECT["dependencies"]], package
    assert {extra for extra in EXTRAS.values()} == set(re.findall(r"\w+", extras["full"][0])) - {"autoshard"}


def run(*arguments: str, folder: Path, path: Path = ROOT, before: str = "") -> subprocess.CompletedProcess:
    code = f"import sys; {before}\nfrom autoshard.cli import main\nsys.exit(main({list(arguments)!r}))"
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path):
    (tmp_path / "tables.csv").write_text("name,rows,columns\nt,1000,16\n")
    words = ("tables", "tables.csv", "--devices", "2", "--plot", "load.png")
    done = run(*words, folder=tmp_path, before="sys.modules['matplotlib'] = None")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "autoshard: matplotlib is not installed; run: pip install 'autoshard[plots]'"


def test_the_version_has_one_place(tmp_path):
    assert run("--version", folder=tmp_path).stdout == f"autoshard {autoshard.__version__}\n"
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT


@pytest.mark.slow
def test_a_bundled_model_is_found_from_any_folder_and_a_file_of_the_same_name_comes_first(tmp_path):
    assert run("plan", "models/mlp.py:tiny", "--mesh", "2", "--json", folder=tmp_path).returncode == 0
    (tmp_path / "mlp.py").write_text("def tiny(): raise ValueError('mine')")
    done = run("plan", "mlp.py:tiny", "--mesh", "2", "--json", folder=tmp_path)
    assert done.returncode == 2 and "mine" in done.stderr
    assert "there is no file gpt3.py" in run("plan", "gpt3.py:tiny", "--mesh", "2", folder=tmp_path).stderr


@pytest.mark.slow
def test_the_wheel_works_without_the_repository(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for path in [*ROOT.glob("autoshard/**/*"), *ROOT.glob("models/*.py")]:
        inside = path.relative_to(ROOT) if path.is_relative_to(ROOT / "autoshard") else Path("autoshard") / path.relative_to(ROOT)
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(inside) in held, f"{path} is not in the wheel"
    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    plan = tmp_path / "plan.json"
    done = run("plan", "models/gpt2.py:tiny", "--mesh", "2x2", "--train", "--out", str(plan), "--json", folder=tmp_path, path=installed)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "optimal"
    where = run("--version", folder=tmp_path, path=installed, before="import autoshard; print(autoshard.__file__)")
    assert str(installed) in where.stdout
    assert run("verify", str(plan), "--trust", folder=tmp_path, path=installed).returncode == 0
    assert run("show", str(plan), "--trust", "--html", "report.html", folder=tmp_path, path=installed).returncode == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000
