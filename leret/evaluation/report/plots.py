"""The report's plots, as SVG with the colours and font of the page.

Placeholder colours are replaced by the page's CSS variables, so one drawing works in light and dark
mode. The same data always produce the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VARIABLES: Final = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--grid",
    "#040404": "--card",
    "#050505": "--s-baseline",
    "#060606": "--s-base",
    "#070707": "--s-prompt",
    "#080808": "--s-policy",
    "#090909": "--s-second",
}
_INK, _MUTED, _GRID, _CARD, _BASELINE, _BASE, _PROMPT, _POLICY, _SECOND = _VARIABLES
_KIND_COLOURS: Final = {"baseline": _BASELINE, "base": _BASE, "prompt": _PROMPT, "policy": _POLICY}

_LINES: Final = (_POLICY, _BASE, _SECOND, _PROMPT, _BASELINE)
_FEW_POINTS, _MANY_POINTS = 12, 500

_SETTINGS: Final[Any] = {
    "svg.hashsalt": "leret",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "text.color": _INK,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _INK,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": _MUTED,
    "legend.fontsize": 9,
}


def dumbbells(rows: Sequence[Mapping[str, Any]], measure: str, label: str) -> str:
    """Draw a row per system with a dot and interval per hop.

    The last dot is filled; baselines get dashed lines.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            _dumbbell(axes, place, row, measure)
        for row in rows:
            value = row["hops"][-1][measure]
            if row["kind"] == "baseline" and value is not None:
                dashes = (0, (3, 3))
                axes.axvline(value, color=_BASELINE, linewidth=1, linestyle=dashes, zorder=1)
        axes.set_yticks(range(len(rows)), [row["system"] for row in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel(label)
        axes.grid(axis="x")

    values = "; ".join(f"{row['system']} {_say(row['hops'][-1][measure])}" for row in rows)
    description = f"{label}, after the last hop: {values}"
    return _svg(f"dumbbells-{measure}", description, (6.2, 0.62 + 0.38 * len(rows)), draw)


def bars_by_step(name: str, label: str, by_step: Mapping[int, Sequence[float]]) -> str:
    """Draw a histogram with a bar per step in each bin.

    The range is [0, 1], widened to include all values.
    """
    steps = sorted(by_step)
    values = [0.0, 1.0]
    for step in steps:
        values += by_step[step]
    low, high = min(values), max(values)
    edges = np.linspace(low, high, 11)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        bin_width = (high - low) / 10
        width = 0.86 * bin_width / len(steps)
        for i, step in enumerate(steps):
            n = len(by_step[step])
            share = np.histogram(by_step[step], edges)[0] / max(1, n)
            left = edges[:-1] + 0.07 * bin_width + i * width
            colour = (_BASE, _POLICY, _SECOND, _PROMPT)[i % 4]
            text = f"step {step} (n = {n:,})"
            axes.bar(left, share, width, align="edge", color=colour, label=text)
        axes.set_xlim(low, high)
        axes.set_xlabel(label)
        axes.set_ylabel("share")
        axes.grid(axis="y")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderpad=0)

    means = []
    for step in steps:
        if by_step[step]:
            mean = float(np.mean(by_step[step]))
            means.append(f"step {step}: mean {_say(mean)}")
    return _svg(name, f"Histogram of {label}. {'; '.join(means)}", (4.6, 2.7), draw)


Panel = tuple[str, Mapping[str, Sequence[tuple[float, float]]]]
"""(title, lines), where each line's name maps to its (x, y) points."""


def curves(name: str, subject: str, panels: Sequence[Panel], marks: Sequence[float] = ()) -> str:
    """Draw a grid of line plots, with a dotted vertical line at each of ``marks``.

    The x axis has whole numbers.
    """
    n_columns = 2 if len(panels) > 1 else 1
    n_rows = -(-len(panels) // n_columns)

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        for i, (title, lines) in enumerate(panels):
            axes = figure.add_subplot(n_rows, n_columns, i + 1)
            _draw_lines(axes, lines)
            if "percentile" not in title:  # percentiles are not steps
                for mark in marks:
                    axes.axvline(mark, color=_SECOND, linewidth=1, linestyle=":")
            axes.set_title(title)
            axes.grid(axis="y")
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            axes.tick_params(labelsize=8.5, labelcolor=_MUTED)
            if len(lines) > 1:
                axes.legend()

    ends = []
    for title, lines in panels:
        for line, points in lines.items():
            ends.append(f"{title}: {line} ends at {_say(points[-1][1])}")
    return _svg(name, f"{subject}. {'; '.join(ends)}", (3.9 * n_columns, 2.1 * n_rows), draw)


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for (line, points), colour in zip(lines.items(), cycle(_LINES), strict=False):
        marker = "o" if len(points) < _FEW_POINTS else None
        # limits the size of the page; includes the last
        x, y = zip(*points[:: -1 - len(points) // _MANY_POINTS], strict=True)
        axes.plot(x, y, color=colour, linewidth=1.6, label=line, marker=marker, ms=4)


def _dumbbell(axes: Axes, place: int, row: Mapping[str, Any], measure: str) -> None:
    values = []
    bounds = []
    for hop in row["hops"]:
        if hop[measure] is not None:
            values.append(hop[measure])
            bounds.append(hop[f"{measure}_ci"])
    if not values:
        return
    colour = _KIND_COLOURS[row["kind"]]
    style: dict[str, Any] = {"color": colour, "clip_on": False}
    axes.plot(values, [place] * len(values), linewidth=2, alpha=0.45, zorder=2, **style)
    band = {"linewidth": 5.5, "alpha": 0.28, "solid_capstyle": "round", **style}
    for i, (value, interval) in enumerate(zip(values, bounds, strict=True), start=1):
        if None not in interval:
            axes.plot(interval, [place] * 2, zorder=3, **band)
        face = colour if i == len(values) else _CARD
        axes.plot([value], [place], "o", markersize=8, markerfacecolor=face, zorder=4, **style)
    low, high = bounds[-1]
    top = max(*values, high or 0.0)
    # label right of the marks, or left of the interval if the marks are near the right edge
    if top < 0.9:
        x, side = top + 0.025, "left"
    else:
        x, side = (values[-1] if low is None else low) - 0.025, "right"
    box = {"facecolor": _CARD, "edgecolor": "none", "pad": 1.2}
    text: dict[str, Any] = {"va": "center", "ha": side, "fontsize": 9.5, "color": _INK}
    axes.text(x, place, f"{values[-1]:.2f}", bbox=box, zorder=5, **text)


def _say(value: float | None) -> str:
    return "not scored" if value is None else f"{value:.3f}"


def _svg(
    name: str, description: str, size: tuple[float, float], draw: Callable[[Figure], None]
) -> str:
    """Draw a figure as an SVG element; ``name`` must be unique on the page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        draw(figure)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # the figure's style would affect the page
    text = re.sub(r"<(metadata|style)[ >].*?</\1>", "", text, flags=re.DOTALL)
    for side in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"""(font:(?: \d+)? [\d.]+px) [^;"]+""", r"\1 var(--font)", text)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1).strip()
