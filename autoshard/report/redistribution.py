"""A redistribution route as a table, as LaTeX, and as a drawing of what each rank holds before and after each step.

All take plain records: `BlockRoute.to_dict()`; the drawing takes panels of 0 and 1, by rank and index.
"""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from autoshard.units import seconds, size

from .figures import blank, save
from .terminal import shown
from .values import ReportTable, numbers

COLUMNS = ("Step #", "Operation", "Distribution", "Cost [s]", "Memory Usage [MB]")
COLORS = 20
RAISE = {"infeasible": ": no route within the memory limit, raise it"}  # advice after a status


def rows(route: Mapping) -> list[tuple[str, str, str, str, str]]:
    """The rows of the published table: the source, then each step with the layout after it."""
    steps = [("0", "", route["source"], "", _megabytes(route["source_bytes"]))]
    for i, step in enumerate(route["steps"], start=1):
        steps.append((str(i), operation(step), step["layout"], f"{step['seconds']:.6g}", _megabytes(step["held_bytes"])))
    return steps


def operation(step: Mapping) -> str:
    """`all_to_all(axes 0,1: dims 0 -> 2)`, the words of a step."""
    axes, dims = (",".join(map(str, step[key])) for key in ("axes", "dims"))
    arrow = dims.replace(",", " -> ") if step["collective"] == "all_to_all" else dims
    return f"{step['collective']}(axes {axes}{f': dims {arrow}' if dims else ''})"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.6g}"


def route_table(routes: Sequence[Mapping]) -> RenderableType:
    """One table per route."""
    parts: list[ReportTable | str] = []
    for route in routes:
        title = (
            f"{route['id'] or 'route'}: {route['status']}{RAISE.get(route['status'], '')}, {seconds(route['cost_seconds'])}, "
            f"peak {size(route['peak_bytes'])} ({route['counted']}), run by {route['executable_by']}, {route['explored']} states"
        )
        parts += [title, ReportTable("", (*COLUMNS[:3], *numbers(*COLUMNS[3:])), rows(route), "open"), ""]
    return shown(*parts[:-1])


def latex(routes: Sequence[Mapping]) -> str:
    """A tabular per route, as the published one."""
    parts = []
    for route in routes:
        lines = [r"\begin{tabular}{rllrr}", " & ".join(COLUMNS).replace("#", r"\#") + r" \\ \hline"]
        for number, what, layout, cost, held in rows(route):
            words = what.replace("_", r"\_").replace("->", r"$\to$")
            lines.append(" & ".join([number, words, _latex(layout), cost, held]) + r" \\")
        parts.append("\n".join([f"% {route['id']}: {route['cost_seconds']:.6g} s", *lines, r"\end{tabular}"]))
    return "\n\n".join(parts)


def _latex(layout: str) -> str:
    """`D_[4,2]⊥{(0,1),∅}(100,∅)` -> $T_{\\perp\\{(0,1),\\emptyset\\}(100,\\emptyset)}$"""
    written = layout.partition("⊥")[2]
    for text, command in (("{", r"\{"), ("}", r"\}"), ("∅", r"\emptyset "), ("chunk", r"\mathrm{chunk}")):
        written = written.replace(text, command)
    return "$T_{\\perp" + written + "}$"


def draw(path: str, title: str, names: Sequence[str], panels: Sequence[Sequence[Sequence[Sequence[int]]]]) -> None:
    """Write a picture. panels[layout][dim][rank][sample]: 1 where the rank holds that index of the dim."""
    from matplotlib import colormaps  # here: it takes a second to import, which other output need not pay
    from matplotlib.colors import ListedColormap

    colors = ListedColormap([(1.0, 1.0, 1.0, 1.0), *(colormaps["tab20"](i) for i in range(COLORS))])
    dims = len(panels[0])
    figure = blank(1.5 + 2.6 * dims, 1.0 + 1.6 * len(panels))
    axes = figure.subplots(len(panels), dims, squeeze=False)
    for row, (name, layout) in enumerate(zip(names, panels, strict=True)):
        for d, ranks in enumerate(layout):
            cells = [[cell * (1 + rank % COLORS) for cell in line] for rank, line in enumerate(ranks)]
            axis = axes[row][d]
            axis.imshow(cells, aspect="auto", interpolation="nearest", cmap=colors, vmin=0, vmax=COLORS)
            axis.set(xticks=[], yticks=range(len(ranks)) if len(ranks) <= 16 else [], xlabel=f"dim {d}" if row == len(panels) - 1 else "")
            axis.tick_params(labelsize=6, length=0)
        axes[row][0].set_ylabel("rank", fontsize=7)
        axes[row][0].set_title(name, fontsize=8, loc="left")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    save(figure, path, dpi=120)
