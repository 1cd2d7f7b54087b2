"""Verbs of earlier versions: their words are rewritten to those of today before anything reads them, and one line says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from autoshard.cli.output import complain

Words = list[str]


def _page(words: Words) -> Words:
    """The model was an argument, and the page's file had a default."""
    now = ["show"]
    for k, word in enumerate(words):
        is_model = (".py:" in word or word.startswith("hf:")) and not word.startswith("-") and words[k - 1 : k] != ["--set"]
        now += ["--model"] if is_model else []
        now.append(re.sub("^--out(?=$|=)", "--html", word))
    return now if any(word.startswith("--html") for word in now) else [*now, "--html", "report.html"]


# verb: a command line as it was written, as it is written now, and the function that makes the new words of those after the verb
OLD_VERBS: dict[str, tuple[str, str, Callable[[Words], Words]]] = {
    "programs": (
        "programs TARGET",
        "plan FILE.py:FUNCTION, or show PLAN",
        lambda words: ["plan" if any(".py:" in word for word in words) else "show", *words],
    ),
    "report": ("report PLAN MODEL --out PAGE.html", "show PLAN --html PAGE.html --model MODEL", _page),
    "show-prices": ("show-prices", "calibrate show", lambda words: ["calibrate", "show", *words]),
    "diff": ("diff A B", "show A B", lambda words: ["show", *words]),
}


def rewritten(argv: Sequence[str]) -> Words:
    """The same command line with a verb of today."""
    words = list(argv)
    place = next((k for k, word in enumerate(words) if word[:1] != "-" and words[k - 1 : k] != ["--log-level"]), None)
    if place is None or words[place] not in OLD_VERBS:
        return words
    before, now, rewrite = OLD_VERBS[words[place]]
    complain(f"autoshard: `{before}` is now `{now}`")
    return [*words[:place], *rewrite(words[place + 1 :])]
