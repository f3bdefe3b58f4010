"""Draws the rewards of the record over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLORS = {"grpo": "tab:blue", "shuffled": "tab:gray", "full": "tab:orange"}


def draw(lines: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Write a PNG of the curves of all GRPO runs among the record's lines. Returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for name, line in lines.items():
        kind, _, which = name.partition("-")
        if kind not in COLORS or not line.get("curve"):
            continue
        steps, _, values = zip(*line["curve"], strict=True)
        style = {"grpo": "-", "shuffled": ":", "full": "--"}[kind]
        label = {"grpo": "rank 16", "shuffled": "rank 16, shuffled rewards", "full": "all weights"}[kind]
        axes.plot(steps, values, style, color=COLORS[kind], marker="o", markersize=3, label=f"{label}, {which}")
    axes.set(xlabel="step", ylabel="held-out reward", ylim=(0, 1), title="SmolLM2-135M-Instruct, two-digit sums")
    if axes.lines:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
