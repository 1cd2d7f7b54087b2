"""Ctrl-C at any time gives one line or the answer so far, and a verb that takes long says what it waits for and what Ctrl-C gives."""

import json
import signal
import subprocess
import sys
from concurrent.futures import Executor
from importlib import import_module
from pathlib import Path

import pytest

from autoshard import api
from autoshard.cli import main, pipeline_verb
from autoshard.cli.output import INTERRUPT_EFFECTS, SILENCE, Lines, interrupt_effect
from autoshard.solution import Solution
from autoshard.solvers import Answer, Status
from autoshard.tables import Table, plan_tables, planner
from models import mlp
from tests.helpers import fast_mesh

solving, advice = (import_module(f"autoshard.planning.{name}") for name in ("solving", "advice"))

ROOT = Path(__file__).parent.parent
TINY = f"{ROOT}/models/mlp.py:tiny"


def interrupted_at(module: str, *argv: str) -> subprocess.CompletedProcess:
    """Runs the entry point; Ctrl-C arrives when the module is looked for."""
    script = (
        "import importlib.abc, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "class At(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == module:\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, At())\n"
        "module = sys.argv.pop(1)\n"
        "from autoshard.__main__ import main\n"
        "sys.exit(main())\n"
    )
    return subprocess.run([sys.executable, "-c", script, module, *argv], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("autoshard.cli", ("doctor",)),
        ("typer", ("doctor",)),
        ("numpy", ("doctor",)),
        ("autoshard.cli.table", ("plan", "nothing.py:f")),
        ("torch", ("plan", TINY, "--mesh", "2x4")),
        ("torch", ("redistribute", __file__)),
        ("torch.nn", ("plan", TINY, "--mesh", "2x4")),
        ("autoshard.cost.curves", ("calibrate", "show")),
    ],
)
def test_ctrl_c_during_an_import_is_one_line(module, argv):
    done = interrupted_at(module, *argv)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autoshard: interrupted\n")


def test_without_ctrl_c_the_same_way_in_gives_an_answer():
    done = interrupted_at("no.such.module", "calibrate", "show", "h100", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["prices"] and done.stderr == ""


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "where", ["question.capture_deep", "instance.candidates", "search.instance_of", "describe.describe", "search.solve_baselines"]
)
def test_ctrl_c_before_there_is_a_plan_is_one_line(capsys, monkeypatch, where):
    monkeypatch.setattr(f"autoshard.planning.{where}", interrupt)
    code = main(["plan", TINY, "--mesh", "2", "--quiet"])
    out, err = capsys.readouterr()
    assert (code, out, err) == (130, "", "autoshard: interrupted\n")


@pytest.mark.parametrize("where", ["modules_of", "padding_offers", "pin_prices"])
def test_ctrl_c_in_what_is_told_beside_a_plan_gives_the_plan(capsys, monkeypatch, where):
    monkeypatch.setattr(advice, where, interrupt)
    code = main(["plan", TINY, "--mesh", "2", "--pin", "layers.0.up.weight=R", "--price-pins", "--json", "--quiet"])
    out, err = capsys.readouterr()
    assert code == 0 and err == "" and json.loads(out)["status"] == "optimal"


def plan(**options):
    module, inputs = mlp.tiny()
    return api.plan(module, inputs, fast_mesh((2,)), **options)


def test_ctrl_c_in_the_search_gives_the_best_plan_so_far(monkeypatch):
    monkeypatch.setattr(advice, "padding_offers", pytest.fail)  # nothing more is searched for
    best, real = plan(baselines=False), solving.solve_instance

    def early(*args, **more) -> Answer:
        found = real(*args, **more)
        return Answer(Status.FEASIBLE, found.choice, found.cost, 0.0, "auto", peak=found.peak, interrupted=True)

    monkeypatch.setattr(solving, "solve_instance", early)
    found = plan()
    assert found.cost == best.cost and found.status == "feasible"


def test_ctrl_c_in_the_search_without_a_plan_ends_it(monkeypatch):
    none = Answer(Status.UNKNOWN, None, float("inf"), 0.0, "auto", interrupted=True)
    monkeypatch.setattr(solving, "solve_instance", lambda *_, **__: none)
    with pytest.raises(KeyboardInterrupt):
        plan()


def test_an_answer_in_passing_ends_what_it_is_for():
    answer = Answer(Status.FEASIBLE, (0,), 1.0, 0.0, "auto")
    assert answer.in_passing() is answer
    with pytest.raises(KeyboardInterrupt):
        Answer(Status.FEASIBLE, (0,), 1.0, 0.0, "auto", interrupted=True).in_passing()


def test_processes_that_plan_stages_do_not_hear_ctrl_c():
    with pipeline_verb._workers(1) as executor:
        assert isinstance(executor, Executor) and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
        assert executor.submit(signal.pthread_sigmask, signal.SIG_BLOCK, set()).result() == {signal.SIGINT}  # while they start
        assert executor.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN


# -- words while one waits -------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_until(end: float, stages: dict[float, str]) -> list[tuple[float, str]]:
    """What is said until `end`; stages: by when they begin, the first at 0."""
    clock, said = Clock(), []
    lines = Lines(lambda line: said.append((clock.now, line)), clock)
    while clock.now <= end:
        if clock.now in stages:
            lines.update(stages[clock.now], 0.0)
        lines.look()
        clock.now += 0.5
    return said


def test_no_verb_is_silent_for_ten_seconds():
    said = lines_until(100.0, {0.0: "capturing the model", 30.0: "solving"})
    times = [0.0, *(at for at, _ in said), 100.0]
    assert max(b - a for a, b in zip(times, times[1:])) < 10 and SILENCE < 10
    assert said[0][1] == "capturing the model, 9 s so far; Ctrl-C ends it without an answer" and (30.0, "solving ...") in said
    assert said[-1][1] == "solving, 93 s so far; Ctrl-C ends the search: the best plan so far, if there is one, is the answer"


def test_nothing_is_said_where_a_line_was():
    clock, said = Clock(), []
    lines = Lines(said.append, clock)
    for clock.now in range(60):
        lines.update(f"step {clock.now // 5}: solving", 0.0)
        lines.look()
    assert said == [f"step {k} ..." for k in range(12)]


def test_nothing_is_said_when_it_is_over():
    clock, said = Clock(), []
    lines = Lines(said.append, clock)
    lines.stop()
    clock.now = 60.0
    lines.look()
    assert said == []


def test_each_stage_says_what_ctrl_c_gives():
    assert interrupt_effect("solving: best 3 ms") == INTERRUPT_EFFECTS["solving"] != interrupt_effect("solving the baselines")
    assert interrupt_effect("solving the baselines") == interrupt_effect("capturing the model")
    assert interrupt_effect("mesh 2x4, 1 of 5: solving") == INTERRUPT_EFFECTS["mesh "]


# -- what a process that ends early leaves ----------------------------------------------------------------------------------------------


def test_a_plan_is_on_disk_before_what_is_beside_it_is_worked_out(tmp_path, monkeypatch):
    out = tmp_path / "plan.json"

    def killed(*_) -> None:
        known = api.load(out)
        assert known.status == "optimal" and known.cost > 0
        raise SystemExit(137)

    monkeypatch.setattr(advice, "modules_of", killed)
    with pytest.raises(SystemExit):
        main(["plan", TINY, "--mesh", "2", "--out", str(out), "--quiet"])
    assert api.load(out).status == "optimal"


def test_of_several_meshes_the_file_always_has_the_best_plan_so_far(tmp_path, monkeypatch):
    written: list[float] = []
    monkeypatch.setattr(Solution, "save", lambda plan, _: written.append(plan.objective_seconds))
    words = ["plan", TINY, "--mesh", "auto", "--devices", "4", "--devices-per-node", "2", "--out", str(tmp_path / "p.json"), "--quiet"]
    assert main(words) == 0
    assert written[:-1] == sorted(written[:-1], reverse=True) and written[-1] == min(written) and len(written) > 1


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_sigterm_is_as_good_as_ctrl_c(number):
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from importlib import import_module\n"
        "search = import_module('autoshard.planning.search')\n"
        f"search.solve_baselines = lambda *_: os.kill(os.getpid(), {int(number)})\n"
        "from autoshard.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "plan", TINY, "--mesh", "2", "--quiet"], capture_output=True, text=True, cwd=ROOT)
    said = [line for line in done.stderr.partition("nanobind: ")[0].splitlines() if "triton not found" not in line]  # of triton's own
    assert (done.returncode, done.stdout, said) == (130, "", ["autoshard: interrupted"])


def test_ctrl_c_in_the_search_for_places_of_tables_gives_the_best_plan_so_far(monkeypatch):
    real, slices = planner.anneal_slice, []

    def third(*args):
        slices.append(args)
        if len(slices) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(planner, "anneal_slice", third)
    monkeypatch.setattr(planner.Planner, "done", False)
    tables = [Table(f"t{i}", 10**5 + 7919 * i, 32 << i % 3, pooling=1 + i) for i in range(12)]
    plan = plan_tables(tables, 4, hbm=8e9, effort=1e9)
    assert len(slices) == 3 and len(plan.tables) == 12 and plan.bound_seconds <= plan.slowest_device_seconds


def test_ctrl_c_before_any_place_of_tables_is_known_ends_it(monkeypatch):
    monkeypatch.setattr(planner.Planner, "search", interrupt)
    with pytest.raises(KeyboardInterrupt):
        plan_tables([Table("t", 10**5, 32)], 2)
