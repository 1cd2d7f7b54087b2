"""Figures written to files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.writing import replacement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: str | os.PathLike[str], **options: Any) -> None:
    """Write a figure completely or not at all; the format by the file's ending (png without one). ValueError for an unknown one."""
    kind = Path(path).suffix[1:].lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{path} ends in .{kind}, which is no picture; expected a name that ends in .png, .svg or .pdf")
    with replacement(path) as beside:
        figure.savefig(beside, format=kind, **options)
