"""What a real browser makes of a report: no error on the console, nothing wider than the window, a tree and a filter that work.

It needs Chromium (`apt-get install chromium`); without it these tests are skipped and say so.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.report import html, page_of_launch
from autoshard.report.page_of_plan import SECTIONS
from autoshard.solution import load
from tests.helpers_browser import Browser, Page, chromium
from tests.helpers_report import HOSTILE, Elements, hostile_solution

ROOT = Path(__file__).parent.parent
GPT2 = ROOT / "solutions" / "gpt2-small-2x4.json"


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory) -> tuple[Path, dict]:
    """A page with everything on it: a tiny model with its time line, a frontier, an op that nobody knows, a hostile parameter."""
    folder = tmp_path_factory.mktemp("report")
    model = ["plan", f"{ROOT}/models/gpt2.py:tiny", "--mesh", "2x2", "--train", "--quiet", "--out", str(folder / "first.json")]
    assert main(model) == 0
    solution = load(folder / "first.json")
    first = next(iter(solution.parameters.values()))
    row = {"target": "aten.<script>alert(2)</script>", "count": 1, "seconds": 1e-6, "bytes": 10}
    solution = replace(solution, replicated_ops=(row,), parameters={**solution.parameters, f"odd.{HOSTILE}": first})
    solution.save(folder / "plan.json")
    points = [
        {"memory_bytes": n, "limit_bytes": n, "seconds": seconds, "bound_seconds": least, "gap": seconds / least - 1, "status": status}
        for n, seconds, least, status in ((3e6, 3e-4, 3e-4, "optimal"), (2e6, 4e-4, 3.5e-4, "feasible"))
    ]
    described = {"format": "autoshard.frontier/1", "model": "tiny", "mesh": [2, 2], "training": True, "planning_seconds": 1.0}
    (folder / "frontier.json").write_text(json.dumps({**described, "points": points}))
    model, frontier = f"{ROOT}/models/gpt2.py:tiny", str(folder / "frontier.json")
    words = ["show", str(folder / "plan.json"), "--model", model, "--frontier", frontier, "--quiet"]
    assert main([*words, "--html", str(folder / "report.html")]) == 0
    return folder / "report.html", {"parameters": len(solution.parameters)}


@pytest.mark.slow
def test_with_its_model_a_page_has_the_time_line_memory_over_time_and_the_ops(whole_page):
    page = Elements(whole_page[0].read_text())
    assert page.crossed == [] and page.open == [] and "needs the model" not in page.text
    for words in ("critical path", "Stretch", "In that peak", "activations", "forward", "backward"):
        assert words in page.text, words
    assert any(int(count) > 100 for count in re.findall(r"(\d+) ops", page.text))
    assert whole_page[0].stat().st_size < 2e6


# window.innerWidth is no measure of what fits: a phone's grows with what sticks out
CHECK = """((wanted, width) => {
  const problems = [];
  for (const id of wanted) {
    const section = document.getElementById(id);
    if (!section) { problems.push("no section " + id); continue; }
    const box = section.getBoundingClientRect();
    if (!(box.width > 100 && box.height > 40)) problems.push("section " + id + " is " + box.width + " x " + box.height);
  }
  const root = document.documentElement;
  if (root.scrollWidth > width) problems.push("the page is " + root.scrollWidth + " wide in a window of " + width);
  for (const part of document.querySelectorAll("main *")) {
    const box = part.getBoundingClientRect(), inside = part.closest(".scroll, svg, .defs");
    if (box.right > width + 1 && !inside) problems.push(part.tagName + "." + part.className + " sticks out");
  }
  return problems;
})"""


def looks(page: Page, width: int, sections: Iterable[str] = SECTIONS) -> list[str]:
    """Errors of the console, sections that are missing or empty, what is wider than the window."""
    return page.errors + page.evaluate(f"{CHECK}({json.dumps(list(sections))}, {width})")


def problems(page: Page, width: int = 400) -> list[str]:
    """What is wrong with an open page; empty where all is well. Operates the tree and the filter as a user does."""
    found = looks(page, width)
    return found + (tree_problems(page) if page.evaluate("!!document.getElementById('tree')") else [])


SHOWN = "[...document.querySelectorAll('#tree .leaf')].filter(x => x.checkVisibility()).length"


def tree_problems(page: Page) -> list[str]:
    """By keyboard: a module opens and closes; the filter shows the leaves that match, opened, and gives back what was before."""
    said = []
    before = page.evaluate(SHOWN)
    page.evaluate("document.querySelector('#tree details:not([open]) > summary').focus()")
    page.press("Enter", 13, "\r")
    opened = page.evaluate(SHOWN)
    if opened <= before:
        said.append(f"opening a module showed {opened - before} more rows")
    page.press("Enter", 13, "\r")
    if page.evaluate(SHOWN) != before:
        said.append("closing the module did not hide its rows")
    page.evaluate("document.getElementById('filter').focus()")
    page.type("LN_1 weight")
    keys = [key.lower() for key in page.evaluate("[...document.querySelectorAll('#tree .leaf')].map(x => x.dataset.key)")]
    shown, expected = page.evaluate(SHOWN), sum("ln_1" in key and "weight" in key for key in keys)
    if shown != expected or not expected or f"{expected} of " not in page.evaluate("document.getElementById('found').textContent"):
        said.append(f"the filter shows {shown} rows of {expected} that match")
    page.evaluate("document.getElementById('filter').select()")
    page.press("Backspace", 8)
    if page.evaluate(SHOWN) != before:
        said.append("an empty filter does not give back what was open before")
    page.evaluate("document.getElementById('open-all').click()")
    if page.evaluate(SHOWN) != page.evaluate("document.querySelectorAll('#tree .leaf').length"):
        said.append("'Open all' leaves rows hidden")
    page.evaluate("document.getElementById('close-all').click()")
    if page.evaluate("document.querySelectorAll('#tree details[open]').length"):
        said.append("'Close all' leaves modules open")
    return said


@pytest.fixture(scope="module")
def browser():
    if chromium() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with Browser(chromium()) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_everything_at_every_width(browser, whole_page, width, dark):
    page = browser.open(whole_page[0], width=width, dark=dark)
    assert problems(page, width) == []
    assert page.requests == [whole_page[0].as_uri()]
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is dark


@pytest.mark.slow
def test_the_time_line_stretches_inside_its_own_box(browser, whole_page):
    page = browser.open(whole_page[0], width=400)
    page.evaluate("(() => { const zoom = document.getElementById('zoom'); zoom.value = 10; zoom.dispatchEvent(new Event('input')); })()")
    assert page.evaluate("document.getElementById('lanes').scrollWidth > 8 * document.getElementById('lanes').clientWidth")
    assert problems(page) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "hostile"])
def test_a_browser_shows_a_page_without_its_model(browser, tmp_path, name):
    (tmp_path / "r.html").write_text(html.html_report(load(GPT2) if name == "gpt2" else hostile_solution()))
    page = browser.open(tmp_path / "r.html", width=400)
    assert looks(page, 400) == []
    assert page.evaluate("document.scripts.length") == 1


LAUNCHES = {
    "check": ("check", f"{ROOT}/tests/data/launchers/torchtitan/llama3_70b.toml", "--devices", "64"),
    "fits": ("fits", f"{ROOT}/models/llama.py:llama3_8b", "--devices", "8", "--microbatch", "2"),
    "degrees": ("degrees", f"{ROOT}/models/llama.py:llama3_8b", *"--devices 8 --launcher nanotron --no-bound --device b200".split()),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("verb", LAUNCHES)
def test_a_browser_shows_the_page_of_a_launch(browser, tmp_path, verb, width):
    assert main([*LAUNCHES[verb], "--quiet", "--html", str(tmp_path / "page.html")]) in (0, 1)
    page = browser.open(tmp_path / "page.html", width=width)
    assert looks(page, width, page_of_launch.SECTIONS) == []
    page.evaluate("document.querySelector('h1').style.minWidth = '2000px'")
    assert looks(page, width, page_of_launch.SECTIONS) != []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"use strict";', '"use strict"; nothing.here;', "Content Security Policy"),  # another script has another hash
        ("<section id=\"prices\"", "<section id=\"price\"", "no section prices"),
        ("count += !leaf.hidden;", "", "the filter shows"),
        ("</header>", '<p style="min-width:500px">wide</p></header>', "wide in a window"),
        ('<div class="stack"', '<img src="http://localhost:9/x.png" alt=""><div class="stack"', "Content Security Policy"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(browser, whole_page, tmp_path, old, new, said):
    text = whole_page[0].read_text()
    assert old in text
    planted = text.replace(old, new, 1)
    if "filter shows" in said:  # with the policy out of the way, so that the planted script runs
        planted = re.sub(r"<meta http-equiv[^>]*>", "", planted)
    (tmp_path / "planted.html").write_text(planted)
    assert any(said in problem for problem in problems(browser.open(tmp_path / "planted.html", width=400)))


@pytest.mark.slow
def test_a_planted_error_of_the_script_is_found(browser, whole_page, tmp_path):
    text = re.sub(r"<meta http-equiv[^>]*>", "", whole_page[0].read_text())
    (tmp_path / "planted.html").write_text(text.replace('"use strict";', '"use strict"; nothing.here();', 1))
    assert any("nothing is not defined" in problem for problem in problems(browser.open(tmp_path / "planted.html", width=400)))


@pytest.mark.slow
def test_in_print_every_parameter_is_shown_or_its_block_is_as_one_before(browser, whole_page, tmp_path):
    page = browser.open(whole_page[0], width=1000)
    before = page.evaluate(SHOWN)
    alike = page.evaluate("document.querySelectorAll('.like .leaf:not(.op)').length")
    page.evaluate(f"window.addEventListener('beforeprint', () => {{ window.printed = {SHOWN}; }})")
    page.pdf(tmp_path / "r.pdf")
    assert page.evaluate("window.printed") == whole_page[1]["parameters"] - alike > before and alike
    assert page.evaluate(SHOWN) == before  # closed again
    assert (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF")
