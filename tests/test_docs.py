"""Every code block of README and docs runs as it stands, page by page, and every link leads somewhere.

In a fence's first line: `file=NAME` writes the block to a file instead, `slow` leaves it to `make test-all`, `skip` says that it needs
what a test hasn't got. In a console block each line `$ autoshard ...` is run; `# exit code: N` says which one is expected if not 0.
"""

import re
import shlex
from pathlib import Path

import pytest

from autoshard.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(python|console)([^\n]*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)#\s]+)\)")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(kind, words.strip(), text) for kind, words, text in FENCE.findall(page.read_text())]


def run_page(page: Path) -> int:
    """Runs the page's blocks in order in this process; Python blocks share their names. Returns how many ran."""
    names: dict = {"__name__": page.stem}
    count = 0
    for kind, words, text in blocks(page):
        if "skip" in words.split():
            continue
        count += 1
        if words.startswith("file="):
            Path(words.removeprefix("file=")).write_text(text)
        elif kind == "python":
            exec(compile(text, str(page), "exec"), names)
        else:
            for line in text.splitlines():
                command, _, expected = line.partition("# exit code: ")
                assert command.startswith("$ autoshard "), f"{page.name}: {line!r} is no autoshard command"
                assert main(shlex.split(command)[2:]) == int(expected or 0), f"{page.name}: {line}"
    return count


def is_slow(page: Path) -> bool:
    return any("slow" in words.split() for _, words, _ in blocks(page))


@pytest.fixture
def beside_the_models(tmp_path, monkeypatch):
    for folder in ("models", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("page", [page for page in PAGES if not is_slow(page)], ids=lambda page: page.stem)
def test_every_block_of_the_page_runs(page, beside_the_models):
    run_page(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if is_slow(page)], ids=lambda page: page.stem)
def test_every_block_of_a_slow_page_runs(page, beside_the_models):
    assert run_page(page) > 0


def test_a_block_that_fails_is_seen(tmp_path, beside_the_models):
    for block in ("```python\nassert 1 == 2\n```", "```console\n$ autoshard show nothing.json\n```", "```console\n$ rm -r x\n```"):
        (tmp_path / "page.md").write_text(block + "\n")
        with pytest.raises(AssertionError):
            run_page(tmp_path / "page.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text()) if "://" not in link and not (page.parent / link).exists()]
    assert not missing
