"""An export as text, which `export` prints without --out."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from autoshard.layout import text
from autoshard.solution import json_text


def exported(value: Any) -> Any:
    """Plain data; a DTensorSpec becomes the text of its layout."""
    if isinstance(value, dict):
        return {key: exported(item) for key, item in value.items()}
    if isinstance(value, list):
        return [exported(item) for item in value]
    return text(value.placements) if hasattr(value, "placements") else value


def exported_text(value: Any) -> Text:
    """JSON over several lines."""
    return Text(json_text(exported(value)), no_wrap=True, overflow="ignore")
