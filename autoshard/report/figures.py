"""Figures, and how they are written to files. Only what draws imports matplotlib: tables are printed where it is not installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.writing import replacement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


def blank(width: float, height: float, **options: Any) -> Figure:
    """An empty figure; sizes in inches. ModuleNotFoundError where matplotlib is not installed."""
    from matplotlib.figure import Figure  # here: it takes a second to import, and only pictures need it

    return Figure(figsize=(width, height), **options)


def legend_of(colors: Mapping[str, str]) -> list[Patch]:
    """Handles of a legend: label -> colour."""
    from matplotlib.patches import Patch  # here: as above

    return [Patch(color=color, label=label) for label, color in colors.items()]


def titled(axes: Axes, title: str) -> None:
    """A title above the left corner, and no lines above and to the right."""
    axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: str | os.PathLike[str], **options: Any) -> None:
    """Write a figure completely or not at all; the format by the file's ending (png without one). ValueError for an unknown one."""
    kind = Path(path).suffix[1:].lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{path} ends in .{kind}, which is no picture; expected a name that ends in .png, .svg or .pdf")
    with replacement(path) as beside:
        figure.savefig(beside, format=kind, **options)
