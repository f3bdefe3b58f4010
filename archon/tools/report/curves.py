"""Curves of a run as PNG files, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from archon.checkpoint.atomic import named_errors
from archon.schema.errors import UserError
from archon.tools.report.run_data import Panel, RunData, Series

# Color-blind safe palette (Okabe and Ito 2008), darkest first; also used by the page.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def draw_curves(run: RunData, folder: Path) -> list[Path]:
    """Draw each panel of `run` as `folder/<name>.png`; return the paths.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise UserError(
            "curves as PNG need matplotlib, which is not installed: pip install 'archon-engine[plots]'"
        ) from None

    written = []
    with plt.rc_context({"backend": "Agg", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        for panel, series in run.panels():
            path = folder / f"{panel.name}.png"
            figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
            _draw(axes, panel, series)
            with named_errors(path):
                figure.savefig(path, dpi=150)
            plt.close(figure)
            written.append(path)
    return written


def _draw(axes, panel: Panel, all_series: Sequence[Series]) -> None:  # type: ignore[no-untyped-def]
    for index, series in enumerate(all_series):
        color = COLORS[index % len(COLORS)]
        smooth = moving_average(series.values)
        if smooth is None:
            axes.plot(series.steps, series.values, color=color, marker="o", markersize=4, label=series.name)
        else:
            axes.plot(series.steps, series.values, color=color, alpha=0.25, linewidth=1)
            axes.plot(series.steps, smooth, color=color, linewidth=1.8, label=series.name)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.2)
    if len(all_series) > 1 or all_series[0].name != panel.name:
        axes.legend(frameon=False, fontsize=8)


def moving_average(values: Sequence[float], fraction: float = 0.05, fewest: int = 40) -> list[float] | None:
    """Return the moving average over `fraction` of the series; None for a series of fewer than `fewest` values."""
    if len(values) < fewest:
        return None
    reach = max(2, int(len(values) * fraction / 2))
    smooth = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if v == v]
        smooth.append(sum(near) / len(near) if near else float("nan"))
    return smooth
