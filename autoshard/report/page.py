"""The frame of all pages: templates/ filled, with the page's style and script. Needs no torch.

Names in a plan may come from an untrusted file. So the page's Content-Security-Policy also forbids every request and every script but its
own (by its hash). The same plan yields the same bytes, since the page holds no date.
"""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from autoshard import units
from autoshard.report.values import Code, Number
from autoshard.version import VERSION


def page(template: str, sections: Mapping[str, str], content: Mapping[str, Any]) -> str:
    """A page with its style and script, and the hash of the script that the page allows."""
    script, style = _source("report.js.j2"), _source("report.css.j2")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    frame = {"script": script, "style": style, "script_hash": script_hash, "version": VERSION, "sections": sections}
    return environment().get_template(f"{template}.html.j2").render(**frame, **{"fingerprint": "", "what": "plan", **content})


@cache
def environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=units.seconds, size=units.size, count=_count)
    environment.filters["words"] = lambda text: str(text).replace("_", " ")
    environment.tests["number_column"] = lambda name: isinstance(name, Number)
    environment.tests["code_column"] = lambda name: isinstance(name, Code)
    return environment


def _count(value: int, noun: str) -> str:
    """`1 parameter`, `148 parameters`."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def _source(name: str) -> str:
    loader = environment().loader
    assert loader is not None
    return loader.get_source(environment(), name)[0]
