"""Draw the figures at the top of benchmarks/README.md from the records.

    python -m benchmarks.readme      # writes them too

An SVG file holds the digest of its data, so that a test can detect an outdated file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.growth import AXES, read_growth
from benchmarks.record import Record

FOLDER = Path(__file__).resolve().parent / "figures"
# Benchmarks with ratios of speed.
RATIOS = ("train_step", "lora", "generate", "time_to_reward")
COLORS = {"archon": "tab:blue", "transformers": "tab:orange", "torchtitan": "tab:green", "megatron-core": "tab:red"}


class Figure(NamedTuple):
    """A figure.

    Attributes:
        path: SVG file.
        what: caption.
        data: JSON-compatible input data.
        paint: function that draws the data.
    """

    path: Path
    what: str
    data: Any
    paint: Callable[[Any], Any]

    @property
    def is_current(self) -> bool:
        """Whether the file was drawn from these data."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return self._origin in text

    def draw(self) -> None:
        """Write the file."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        plt.rcParams["svg.hashsalt"] = "archon"  # equal files of equal data
        plt.rcParams["svg.fonttype"] = "none"  # text as text
        figure = self.paint(self.data)
        self.path.parent.mkdir(exist_ok=True)
        figure.savefig(self.path, metadata={"Date": None, "Description": self._origin})
        plt.close(figure)

    @property
    def _origin(self) -> str:
        return f"drawn from {hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()}"


def figures(records: Sequence[Record], folder: Path = FOLDER) -> list[Figure]:
    """Return the figures for which there are records."""
    ratios, growth = bars(records), read_growth()
    found = [
        Figure(folder / "ratios.svg", "how many times as fast as each peer", ratios, paint_ratios),
        Figure(folder / "growth.svg", "speed and memory of a training step as its work grows", growth, paint_growth),
    ]
    return [figure for figure in found if figure.data]


def bars(records: Sequence[Record]) -> list[tuple[str, float, float, float]]:
    """Return (label, ratio, smallest round, largest round) of every speed ratio to a peer that has an aim."""
    found = []
    for record in records:
        for name, ratio in record.ratios.items():
            if record.benchmark in RATIOS and (ratio.aim or "").startswith(">="):
                peer = name.removeprefix("archon / ").removesuffix(" / archon, time to TRL's best reward")
                if not peer.startswith("archon"):
                    found.append((f"{record.benchmark}, {record.case}: {peer}", ratio.value, ratio.min, ratio.max))
    return sorted(found, key=lambda bar: bar[1])


def paint_ratios(found: Sequence[tuple[str, float, float, float]]) -> Any:
    """Return the figure of how many times as fast as each peer archon is, with the spread over rounds; see `bars`."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.26 * len(found)), layout="constrained")
    values = [value for _, value, _, _ in found]
    spread = [[value - low for _, value, low, _ in found], [high - value for _, value, _, high in found]]
    axes.barh([what for what, *_ in found], values, xerr=[[max(0.0, side) for side in sides] for sides in spread])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="times as fast as the peer (median; smallest and largest round)")
    axes.tick_params(axis="y", labelsize=7)
    return figure


def paint_growth(lines: Sequence[Mapping[str, Any]]) -> Any:
    """Return the figure of speed and memory over each axis that the lines of `read_growth` have."""
    import matplotlib.pyplot as plt

    there = [name for name in AXES if any(line["axis"] == name for line in lines)]
    figure, rows = plt.subplots(2, len(there), figsize=(3.1 * len(there), 5), layout="constrained", squeeze=False)
    for column, name in enumerate(there):
        for side in dict.fromkeys(line["side"] for line in lines):
            points = [line for line in lines if (line["axis"], line["side"]) == (name, side) and "missing" not in line]
            if not points:
                continue
            x, color = [line["value"] for line in points], COLORS.get(side)
            speed = [line["tokens_per_second"] for line in points]
            spread = [[v - line["min"] for v, line in zip(speed, points, strict=True)]]
            spread += [[line["max"] - v for v, line in zip(speed, points, strict=True)]]
            rows[0][column].errorbar(x, speed, yerr=spread, marker="o", markersize=3, color=color, label=side)
            memory = [line["peak_bytes"] / 1e9 for line in points]
            rows[1][column].plot(x, memory, marker="o", markersize=3, color=color, label=side)
        rows[0][column].set(title=name, ylabel="tokens per second" if column == 0 else None)
        rows[1][column].set(xlabel=AXES[name].label, ylabel="peak memory, GB" if column == 0 else None)
        for row in rows:
            row[column].set_xscale("log", base=2)
            row[column].set_yscale("log")
            row[column].tick_params(labelsize=7)
            row[column].grid(alpha=0.3)
    rows[0][0].legend(fontsize="small")
    figure.suptitle("; ".join(sorted({line["cpu"] for line in lines})), fontsize="small")
    return figure
