"""`autoshard demo`: GPT-2 small planned for 2 nodes of 4 devices, beside the usual plans, and verified on eight simulated ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from autoshard.cli.app import OK, app
from autoshard.cli.output import complain
from autoshard.cli.verbs import Asked

MODEL = ["models/gpt2.py:small", "--set", "vocab=50304"]


@app.command()
def demo(asked: Asked, _: None) -> int:
    """Plan GPT-2 small on 2x4 devices, show the plan beside the usual ones, and verify it; no GPU and no download.

    \b
    autoshard demo
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = asked.out or str(Path(folder) / "gpt2-small-2x4.json")
        return _verb("plan", *MODEL, "--set", "batch=512", "--mesh", "2x4", "--train", "--out", plan) or _verb(
            "verify", plan, *MODEL, "--set", "batch=8", "--set", "seq=16"
        )


def _verb(*arguments: str) -> int:
    complain(f"autoshard {' '.join(arguments)}")
    return app(args=list(arguments), prog_name="autoshard", standalone_mode=False) or OK
