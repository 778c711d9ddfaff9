"""Pictures of results: one style, 800 pixels wide, and the machine, commit and date under each title."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Folio's colours, from the main one to lighter variants; rivals', limits' and aims' colours.
OURS = ("#0b4f7d", "#3d8fc4", "#9cc9e6")
RIVALS = ("#8a8f98", "#c98a2b", "#5b8c5a", "#9a6fb0", "#b5b9c0", "#d9b779")
LIMIT = "#b3261e"
WIDTH_INCHES, PIXELS_PER_INCH, SCALE = 8.0, 100, 1.6  # 800 pixels, and sharp on a fine screen
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.color": "#1c1f23",
    "axes.labelcolor": "#1c1f23",
    "axes.edgecolor": "#5f656d",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


def is_possible() -> bool:
    """Whether matplotlib is installed; GPU machines may lack it."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def picture(
    result: Mapping[str, Any],
    path: Path,
    title: str,
    *,
    rows: int = 1,
    columns: int = 1,
    height: float = 3.6,
    **layout: Any,
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """A figure and its plots, row by row, to be drawn into within this context; then it is saved.

    Args:
        result: content of a result's JSON; its machine, commit and date go under the title.
        title: what is shown, in a reader's words.
        height: inches, of 8 inches of width.
        layout: of pyplot's `subplots`.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    with matplotlib.rc_context(STYLE):
        figure, plots = pyplot.subplots(
            rows, columns, figsize=(WIDTH_INCHES, height), layout="constrained", squeeze=False, **layout
        )
        try:
            yield figure, [plot for row in plots for plot in row]
            figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=12, fontweight="bold")
            figure.text(0.012, 1 - 0.33 / height, origin(result), ha="left", va="center", fontsize=8, color="#5f656d")
            figure.savefig(path, dpi=PIXELS_PER_INCH * SCALE)
        finally:
            pyplot.close(figure)


def origin(result: Mapping[str, Any]) -> str:
    """Machine, commit and date of a result, in a line."""
    quick = "quick run, " if result["quick"] else ""
    return f"{quick}{result['device']}, commit {result['commit']}, {result['date'][:10]}"


def bars(plot: Any, values: Mapping[str, float], colours: Sequence[str], label: str = "%.3g", **text: Any) -> None:
    """Horizontal bars from top to bottom, each with its value at its end."""
    drawn = plot.barh(list(values), list(values.values()), color=list(colours), height=0.7)
    plot.bar_label(drawn, fmt=label, padding=3, fontsize=9, **text)
    plot.invert_yaxis()
    plot.grid(axis="y", visible=False)
    plot.margins(x=0.18)


def plain_numbers(plot: Any) -> None:
    """Numbers of the vertical axis as 1,000 instead of powers of ten."""
    plot.yaxis.set_major_formatter("{x:,g}")


def legend_below(figure: Any, plot: Any, columns: int) -> None:
    """One legend for all plots, below them."""
    figure.legend(*plot.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
