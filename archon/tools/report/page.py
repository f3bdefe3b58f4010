"""Page of a run: one HTML file without network access that treats all text of the run as untrusted.

The data are embedded as JSON; the page's script draws the charts and inserts every text as text, never as markup. A
content security policy allows only this script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from archon.tools.bench.bench_record import BenchRecord
from archon.tools.report.bench_page import bench_data
from archon.tools.report.curves import COLORS, moving_average
from archon.tools.report.metric_titles import metric_title
from archon.tools.report.run_data import RunData, Series
from archon.tools.report.summary import summarize

# Concatenated in this order to one script; the first file defines functions for all others.
SCRIPTS = ("common.js", "charts.js", "trajectories.js", "page.js")
BENCH_SCRIPTS = ("common.js", "charts.js", "bars.js", "bench.js")
EVAL_SCRIPTS = ("common.js", "charts.js", "bars.js", "trajectories.js", "eval.js")
COMPARE_SCRIPTS = ("common.js", "charts.js", "compare.js")


def render_page(run: RunData) -> str:
    """Return the page of a run as HTML."""
    return render(run.path.resolve().name, _page_data(run), SCRIPTS)


def render_bench(record: BenchRecord, path: Path) -> str:
    """Return the page of a sweep's record in file `path` as HTML."""
    return render(path.name, bench_data(record, path), BENCH_SCRIPTS)


def render(title: str, data: dict[str, Any], scripts: Sequence[str]) -> str:
    """Return an HTML page with scripts that draw `data`."""
    assets = resources.files("archon.tools.report") / "assets"
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fields = {
        "title": html.escape(title),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "data": _json_for_html(data),
        "script": script,
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    head, *parts = page.split("{{")
    text = head + "".join(fields[name] + text_after for name, _, text_after in (part.partition("}}") for part in parts))
    # A lone surrogate, which UTF-8 cannot encode, becomes a question mark.
    return text.encode("utf-8", "replace").decode("utf-8")


def _page_data(run: RunData) -> dict[str, Any]:
    return {
        "name": run.path.resolve().name,
        "path": str(run.path.resolve()),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "steps": max(series.steps[-1] for series in run.series.values()),
        "seconds": round(run.seconds),
        "colors": COLORS,
        "panels": _panels_data(run, fleet=False),
        "fleet": _panels_data(run, fleet=True),
        "further": [
            {"title": series.name, "unit": "", "series": [series_data(series)]} for series in run.remaining_series()
        ],
        "groups": run.sampled.groups,
        "selection": run.sampled.selection,
        "config": run.config,
        "summary": list(summarize(run).items()),
    }


def _panels_data(run: RunData, *, fleet: bool) -> list[dict[str, Any]]:
    return [
        {"title": panel.title, "unit": panel.unit, "series": [series_data(s) for s in series]}
        for panel, series in run.panels()
        if panel.fleet == fleet
    ]


def series_data(series: Series) -> dict[str, Any]:
    """Return a metric for the page's script, with its moving average if it is long."""
    smooth = moving_average(series.values)
    title, meaning = metric_title(series.name)
    return {
        "name": series.name,
        "title": title,
        "about": f"{series.name}: {meaning}" if meaning else series.name,
        "steps": series.steps,
        "values": [_round_significant(value) for value in series.values],
        "smooth": None if smooth is None else [_round_significant(value) for value in smooth],
    }


def _round_significant(value: float) -> float | None:
    """Return the value with six significant digits; None for NaN and infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _json_for_html(data: Any) -> str:
    """Return JSON that cannot end or comment out its script element: it contains no `<`."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
