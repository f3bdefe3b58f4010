"""Metrics in Prometheus' text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """A named metric; `samples` are (labels, value)."""

    name: str
    help: str
    samples: list[tuple[Mapping[str, str], float]]
    kind: Literal["counter", "gauge"] = "gauge"


def gauge(name: str, help: str, value: float) -> Metric:
    """Return a metric that may go up and down."""
    return Metric(name, help, [({}, value)])


def counter(name: str, help: str, value: float) -> Metric:
    """Return a metric that only grows; its name ends in `_total`."""
    return Metric(name, help, [({}, value)], "counter")


def render(metrics: Iterable[Metric]) -> str:
    """Return the response to a scrape; characters that are invalid in a name become underscores."""
    lines: list[str] = []
    for metric in metrics:
        name = re.sub(r"[^a-zA-Z0-9_:]", "_", metric.name)
        help_text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {metric.kind}"]
        for labels, value in metric.samples:
            inner = ",".join(f'{label}="{_quoted(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{inner}}} {_number(value)}" if inner else f"{name} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
