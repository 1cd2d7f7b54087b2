"""For tests of pages: what an HTML text is made of, a plan full of hostile names, a frontier."""

from dataclasses import replace
from html.parser import HTMLParser

from autoshard.solution import Solution
from tests.helpers_solutions import linear_solution

HOSTILE = "h.0.<script>alert(1)</script>\"onload='x' {{ 7*7 }}&amp;</style><!--"
VOID = {"meta", "input", "br", "hr", "img", "link"}


class Elements(HTMLParser):
    """Start tags with their attributes, text, and tags that are closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.crossed: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open[-1:]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def frontier(*points: tuple, model: str = "tiny") -> dict:
    keys = ("memory_bytes", "seconds", "bound_seconds", "status")
    described = {"format": "autoshard.frontier/1", "model": model, "mesh": [2, 2], "training": True, "planning_seconds": 1.0}
    return {**described, "points": [{**dict(zip(keys, point)), "gap": None, "limit_bytes": point[0]} for point in points]}


def hostile_solution() -> Solution:
    """The name stands wherever a plan has free words."""
    row = {"layout": "R,S(1)", "shape": [8, 8], "dtype": HOSTILE, "local_bytes": 64}
    offer = {"parameter": HOSTILE, "saves_seconds": 1.0}
    usual = {HOSTILE: {"cost_seconds": 1.0, "peak_bytes": 1e9, "status": HOSTILE, "matched": HOSTILE}}
    return replace(
        linear_solution(),
        parameters={HOSTILE: row, HOSTILE.replace("0", "1", 1): row, "x": {**row, "tied_to": HOSTILE}},
        baselines=usual,
        breakdown={"compute": {HOSTILE: 1.0}, "communication": {f"all_reduce {HOSTILE}": 1.0}, "blocks": {HOSTILE: 1.0}},
        replicated_ops=({"target": HOSTILE, "count": 1, "seconds": 1.0, "bytes": 1},),
        assumptions={"model": HOSTILE, "set": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE, "padding": [offer]},
        peak={"op": HOSTILE, "module": HOSTILE, "parts": {HOSTILE: 1.0}, "largest": [{"name": HOSTILE, "bytes": 1}]},
        fingerprint={"graph": HOSTILE},
        counts={HOSTILE: 1},
        solver=HOSTILE,
    )
