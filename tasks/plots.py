"""PNG plots of a run: learning curves, Pass@K and Maj@K against K, a reward model's calibration, the data's checks. Equal inputs give equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

STYLES = {
    "base": {"color": "#6b7280", "marker": "o", "linestyle": ":"},
    "sft": {"color": "#0072b2", "marker": "s", "linestyle": "--"},
    "dpo": {"color": "#7c3aed", "marker": "^", "linestyle": "-."},
    "rl": {"color": "#c2410c", "marker": "D", "linestyle": "-"},
}
"""Colour, marker and dashes of each model: legible without colour too."""
REWARD_COLOR = "#0f766e"
BAD_COLOR = "#b91c1c"
SIZE_INCHES = (4.4, 2.7)
DPI = 180
GRID = "#e5e7eb"
INK = "#374151"


def plot_at_k(
    path: Path, title: str, curves: Mapping[str, tuple[str, Sequence[tuple[int, float, float, float]]]]
) -> None:
    """One line a model against K, with its interval as a band.

    `curves` maps a model to its label and its points (K, value, low, high), values between 0 and 1.
    """
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    ticks: set[int] = set()
    for model, (label, points) in curves.items():
        ks, values, lows, highs = zip(*points, strict=True)
        style = STYLES[model]
        axes.fill_between(ks, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(ks, values, label=label, linewidth=2, markersize=5, **style)  # type: ignore[arg-type]
        ticks |= set(ks)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("K (samples a problem)")
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "ncols": len(curves), "columnspacing": 1.2}
    _finish(figure, axes, title, path, place if len(curves) > 1 else None)


def plot_steps(
    path: Path, title: str, history: Sequence[Mapping[str, Any]], names: Mapping[str, str], color: str
) -> None:
    """Metrics of a training stage against its step; `names` maps metric names to legend labels."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for dashes, (name, label) in zip(("-", "--", ":", "-."), names.items(), strict=False):
        points = [(row["step"], row[name]) for row in history if row.get(name) is not None]
        steps, values = zip(*points, strict=True)
        marker = "o" if len(points) <= 30 else None
        axes.plot(steps, values, dashes, color=color, label=label, linewidth=1.8, marker=marker, markersize=3)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes, title, path, {"loc": "best"} if len(names) > 1 else None)


def plot_calibration(path: Path, title: str, bins: Sequence[Mapping[str, float]]) -> None:
    """Accuracy against confidence, a dot a bin (see training.reward_model.calibration), beside the line of perfect calibration.

    A dot's area grows with its pairs.
    """
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    confidence, accuracy = [b["confidence"] for b in bins], [b["accuracy"] for b in bins]
    largest = max(b["pairs"] for b in bins)
    axes.plot([0.5, 1.0], [0.5, 1.0], ":", color=INK, linewidth=1.2, label="perfectly calibrated")
    axes.plot(confidence, accuracy, color=REWARD_COLOR, linewidth=1.2)
    areas = [12 + 80 * b["pairs"] / largest for b in bins]
    axes.scatter(confidence, accuracy, s=areas, color=REWARD_COLOR, label="held-out pairs")
    axes.set_xlim(0.48, 1.02)
    axes.set_ylim(-0.02, 1.04)
    axes.set_xlabel("P(preferred > other), predicted")
    _finish(figure, axes, title, path, {"loc": "lower right"})


def plot_checks(path: Path, title: str, rows: Sequence[tuple[str, float, float]]) -> None:
    """One bar a check, its failing share, with a mark at the largest share allowed; shares between 0 and 1.

    `rows` are (label, share, limit), drawn from the top. Bars beyond their limit are of another colour.
    """
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    labels, shares, limits = zip(*rows, strict=True)
    places = range(len(rows))
    colors = [
        BAD_COLOR if share > limit else REWARD_COLOR for share, limit in zip(shares, limits, strict=True)
    ]
    axes.barh(places, [100 * share for share in shares], color=colors, height=0.6)
    axes.plot([100 * limit for limit in limits], places, "|", color=INK, markersize=11)
    for place, share in zip(places, shares, strict=True):
        axes.annotate(
            f"{100 * share:.1f}", (100 * share, place), xytext=(3, -3), textcoords="offset points", fontsize=8
        )
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("% of the rows (mark: limit)")
    _finish(figure, axes, title, path, None)


def plot_lengths(path: Path, title: str, edges: Sequence[float], counts: Mapping[str, Sequence[int]]) -> None:
    """Histograms of lengths in tokens: the share of each split's rows in bins with these edges."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    drawn = {split: numbers for split, numbers in counts.items() if sum(numbers)}
    for dashes, (split, numbers) in zip(("-", "--", ":"), drawn.items(), strict=False):
        shares = [number / sum(numbers) for number in numbers]
        axes.stairs(shares, edges, label=split, linestyle=dashes, color=INK, linewidth=1.5)
        axes.stairs(shares, edges, fill=True, color=REWARD_COLOR, alpha=0.15)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes, title, path, {"loc": "best"} if len(drawn) > 1 else None)


def _finish(figure: Figure, axes: Any, title: str, path: Path, legend: dict[str, Any] | None) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.xaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    if legend:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, **legend)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})
