"""Golden tables of refusals: a call, and the sentence with which it is refused."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def refusals(*rows: tuple[Callable[[], Any], str]) -> Callable:
    """A test with a case per row: the call raises ValueError with one sentence, in which the row's pattern is found."""

    @pytest.mark.parametrize(("call", "sentence"), rows, ids=_names(sentence for _, sentence in rows))
    def test(call: Callable[[], Any], sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence) as caught:
            call()
        assert "\n" not in str(caught.value)

    return test


def assert_refused(sentence: str, call: Callable, *args: Any, **options: Any) -> None:
    """That a call is refused with this sentence, a pattern as `pytest.raises` has it."""
    with pytest.raises(ValueError, match=sentence):
        call(*args, **options)


def assert_file_refused(sentence: str, reader: Callable, path: Path) -> None:
    """That a file is refused in one short sentence, which begins with its path and in which the pattern is found."""
    with pytest.raises(ValueError, match=sentence) as caught:
        reader(path)
    said = str(caught.value)
    assert said.startswith(str(path)) and "\n" not in said and len(said) < 400 + len(str(path))


def _names(sentences: Iterable[str]) -> list[str]:
    return [f"{k}-{sentence[:40]}" for k, sentence in enumerate(sentences)]
