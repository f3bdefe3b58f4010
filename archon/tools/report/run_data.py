"""Data of a report, read from a run directory: series by step, panels of series, groups of trajectories."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archon.schema.errors import ConfigError
from archon.tools.report.sampled_trajectories import SampledTrajectories, sample
from archon.training.metrics import IMAGES_FOLDER, METRICS_FILE, TRAJECTORIES_FILE, read_jsonl

NOT_SERIES = {"step", "time"}
MAX_DRAWN_VALUE = 1e300  # larger values overflow the length of an axis


@dataclass(frozen=True)
class Panel:
    """Chart of all series with names that match `pattern`.

    Attributes:
        unit: label of the vertical axis.
        hide_zero: omit the panel while all its values are 0.
        fleet: only for runs on inference servers.
    """

    name: str
    title: str
    pattern: str
    unit: str = ""
    hide_zero: bool = False
    fleet: bool = False


# A series belongs to the first matching panel; series without a panel are shown as further metrics.
PANELS = (
    Panel("reward", "Reward", r"(.*/)?(greedy_)?reward"),
    Panel("accuracy", "Accuracy", r"(eval/)?accuracy", "share"),
    Panel("margin", "Margin", r"(eval/)?margin", "chosen minus rejected"),
    Panel("loss", "Loss", r"(.*/)?loss"),
    Panel("kl", "KL and ratio drift", r"(.*/)?(approx_kl|kl_ref|kl)", "nats a token"),
    Panel("length", "Answer length", r"(.*/)?(greedy_)?length", "tokens"),
    Panel("throughput", "Throughput", r"(.*/)?(tokens|samples|rows)_per_second", "a second"),
    Panel("entropy", "Entropy", r"(.*/)?entropy", "nats a token"),
    Panel("advantage", "Advantage", r"advantage_(mean|std|max)"),
    Panel("seconds", "Time of each phase", r"seconds/.*", "seconds"),
    Panel("clip", "Clipped, or corrected", r"(value_)?clip_fraction.*|(correction|m2_masked)_fraction", "share", True),
    Panel("staleness", "Staleness", r"staleness_(mean|max)", "versions", True),
    Panel("lost", "Truncated, or of zero variance", r".*truncated|(zero_variance|overlong)_fraction", "share", True),
    Panel("failures", "Failures", r"rollout/(dropped|failed)/.*|rollout/rejected", "a step", True),
    Panel("servers", "Servers in the fleet", r"push/servers", "servers", fleet=True),
    Panel("server_load", "Answers of each server", r"servers/\d+/answers", "a step", fleet=True),
    Panel(
        "server_losses",
        "Servers lost, requests retried",
        r"servers/(lost|returned|retried|resumed)",
        "a step",
        fleet=True,
    ),
    Panel("push_seconds", "Time of a push", r"push/(write_)?seconds", "seconds", fleet=True),
    Panel("push_bytes", "Size of a push", r"push/bytes", "bytes", fleet=True),
    Panel("push_difference", "Verified |Δ logprob| of a push", r"push/difference", "nats", fleet=True),
)
FLEET_SERIES = "push/servers"
"""Series of runs on inference servers only."""


@dataclass
class Series:
    """Metric by step; `values[i]` belongs to `steps[i]`, and NaN is drawn as a gap."""

    name: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class RunData:
    """Data of a report."""

    path: Path
    series: dict[str, Series]
    sampled: SampledTrajectories
    seconds: float
    config: str

    def panels(self) -> list[tuple[Panel, list[Series]]]:
        """Return the visible panels, in order, with their series."""
        panels = [(panel, [s for s in self.series.values() if find_panel(s.name) is panel]) for panel in PANELS]
        fleet = FLEET_SERIES in self.series
        shown = [(panel, series) for panel, series in panels if fleet or not panel.fleet]
        return [(p, series) for p, series in shown if any(not p.hide_zero or any(s.values) for s in series)]

    def remaining_series(self) -> list[Series]:
        """Return the series that have no panel and are not constant."""
        drawn = {s.name for _, series in self.panels() for s in series}
        # Panels with values of 0 only are hidden, and so are their series.
        panels = {s.name: find_panel(s.name) for s in self.series.values() if s.name not in drawn}
        names = [name for name, panel in panels.items() if panel is None or panel.fleet]
        return [self.series[name] for name in names if len(set(self.series[name].values)) > 1]


def load_run(run_dir: str | Path, *, trajectories: bool = True) -> RunData:
    """Return the data of a finished or running run, with its sampled trajectories unless that is False.

    Raises:
        ConfigError: the folder is missing or has no metrics.
        DatasetError: a line is malformed.
    """
    path = Path(run_dir)
    metrics = path / METRICS_FILE
    if not metrics.is_file():
        if path.is_dir():
            raise ConfigError(f"{path} has no metrics.jsonl; expected the folder of a run")
        raise ConfigError(f"{path} is not a folder; expected the folder of a run or a record of archon bench")
    records = read_jsonl(metrics)
    series = _series(records)
    if not series:
        raise ConfigError(f"{metrics} has no numbers yet; wait for the run's first step")
    times = [time for record in records if math.isfinite(time := read_number(record.get("time")) or math.nan)]
    sampled = path / TRAJECTORIES_FILE
    groups = read_jsonl(sampled) if trajectories and sampled.is_file() else []
    config = path / "config.yaml"
    return RunData(
        path=path,
        series=series,
        sampled=sample(groups, path / IMAGES_FOLDER),
        seconds=times[-1] - times[0] if times else 0.0,
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
    )


def _series(records: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    by_name: dict[str, Series] = {}
    for record in records:
        for name, value in record.items():
            number = read_number(value)
            if name not in NOT_SERIES and number is not None:
                series = by_name.setdefault(name, Series(name))
                series.steps.append(record["step"])
                series.values.append(number)
    return by_name


def read_number(value: Any) -> float | None:
    """Return a metric as a float (NaN if too large to draw, or for the strings NaN and ±Infinity), else None."""
    if isinstance(value, int | float):
        return float(value) if abs(value) <= MAX_DRAWN_VALUE else math.nan
    return math.nan if value in ("NaN", "Infinity", "-Infinity") else None


def find_panel(name: str) -> Panel | None:
    """Return the panel of a metric; None for a further metric."""
    return next((panel for panel in PANELS if re.fullmatch(panel.pattern, name)), None)
