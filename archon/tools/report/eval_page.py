"""Page of an evaluation: scores with intervals, and answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from archon.checkpoint.atomic import write_text
from archon.tools.report.page import EVAL_SCRIPTS, render
from archon.tools.report.sampled_trajectories import sample


def write_eval_page(folder: Path, result: Mapping[str, Any], records: Iterable[dict[str, Any]]) -> Path:
    """Write `report.html` to `folder`; return its path.

    Args:
        folder: folder of the evaluation, with its `config.yaml`.
        result: contents of `results.json`.
        records: answers as in `answers.jsonl`, in the order of their prompts.
    """
    sampled = sample(records)
    lost = sum(result["lost"].values())
    name = f"Evaluation of {result['model'] or Path(str(result['who'])).name}"
    data = {
        "name": name,
        "facts": [
            str(result["who"]),
            f"{result['prompts']} prompts, {result['answers']} answers" + (f", {lost} lost" if lost else ""),
            f"intervals: {result['intervals']}",
            f"written {time.strftime('%Y-%m-%d %H:%M')}",
        ],
        "bars": [_bars("Reward", ["reward"], result), _bars("pass@k", list(result["scores"])[1:], result)],
        "groups": sampled.groups,
        "selection": sampled.selection.replace("trajectories.jsonl", "answers.jsonl"),
        "config": (folder / "config.yaml").read_text(encoding="utf-8"),
    }
    page = folder / "report.html"
    write_text(page, render(name, data, EVAL_SCRIPTS))
    return page


def _bars(title: str, names: list[str], result: Mapping[str, Any]) -> dict[str, Any]:
    bars = []
    for name in names:
        score = result["scores"][name]
        # A single prompt has no bounds.
        low, high = (score["mean"] if score[end] is None else score[end] for end in ("low", "high"))
        bars.append({"name": name, "value": score["mean"], "min": low, "max": high})
    return {"title": title, "unit": "with 95 % intervals", "bars": bars}
