"""Every code block of README and docs runs as it stands, page by page, and every link leads somewhere.

In a fence's first line: `file=NAME` writes the block to a file instead, `slow` leaves its page to `make test-all`, `slow-block` the block
alone, of whose names and files no other block of the page may need any; `skip` says that it needs what a test hasn't got. In a console
block each line `$ autoshard ...` is run; `# exit code: N` says which one is expected if not 0.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from autoshard.cli import main
from autoshard.cost.compute import PRICES
from autoshard.strategies.register import REGISTERED
from autoshard.strategies.rows import EVEN_ONLY, RULES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(python|console|csv)([^\n]*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(kind, words.strip(), text) for kind, words, text in FENCE.findall(page.read_text())]


def run_page(page: Path, left_out: tuple[str, ...] = ("skip",)) -> int:
    """Runs the page's blocks in order in this process, but for those with one of these words; Python blocks share their names. Returns how
    many ran."""
    names: dict = {"__name__": page.stem}
    count = 0
    for kind, words, text in blocks(page):
        if not set(words.split()).isdisjoint(left_out):
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
    """Pages about other tools use what other pages use."""
    return page.parent.name == "rivals" or any("slow" in words.split() for _, words, _ in blocks(page))


def anchors(page: Path) -> set[str]:
    """What GitHub calls the page's headings; of equal ones the later are numbered."""
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(page.read_text())]
    return {name + (f"-{plain[:k].count(name)}" if name in plain[:k] else "") for k, name in enumerate(plain)}


def broken_links(page: Path) -> list[str]:
    """Links to a file that isn't there, or to a heading that its page lacks."""
    found = []
    for link in LINK.findall(page.read_text()):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and (not target.exists() or (heading and heading not in anchors(target))):
            found.append(link)
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


@pytest.fixture
def beside_the_models(tmp_path, monkeypatch):
    for folder in ("models", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registered = RULES, PRICES, REGISTERED, EVEN_ONLY
    kept = [table.copy() for table in registered]
    yield
    for table, before in zip(registered, kept):  # what a page registers is another page's to register
        table.clear()
        table.update(before)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and not is_slow(page)], ids=name)
def test_every_block_of_the_page_runs(page, beside_the_models):
    run_page(page, ("skip", "slow-block"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and (is_slow(page) or "slow-block" in page.read_text())], ids=name)
def test_every_block_of_a_slow_page_runs(page, beside_the_models):
    assert run_page(page) > 0


def test_a_block_that_fails_is_seen(tmp_path, beside_the_models):
    for block in ("```python\nassert 1 == 2\n```", "```console\n$ autoshard show nothing.json\n```", "```console\n$ rm -r x\n```"):
        (tmp_path / "page.md").write_text(block + "\n")
        with pytest.raises(AssertionError):
            run_page(tmp_path / "page.md")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    assert not broken_links(page)


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n## `a.b`\n\n## `A.B`\n\n[1](page.md) [2](#ab) [3](page.md#ab-1) [4](gone.md) [5](page.md#no) [6](#ab-2)\n")
    assert broken_links(page) == ["gone.md", "page.md#no", "#ab-2"]


# -- the site ----------------------------------------------------------------------------------------------------------------------------


def pages(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]


def test_every_page_is_in_the_navigation_once():
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(written)
