"""Page of two runs: their facts, settings that differ, curves in one chart, prompts that got better and worse."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from archon.checkpoint.atomic import write_text
from archon.schema.errors import ConfigError
from archon.tools.report.curves import COLORS
from archon.tools.report.metric_titles import metric_title
from archon.tools.report.page import COMPARE_SCRIPTS, render, series_data
from archon.tools.report.run_data import PANELS, RunData, Series, find_panel, load_run, read_number
from archon.tools.report.sampled_trajectories import MAX_CHARACTERS
from archon.tools.report.summary import RESULTS, run_config, summarize
from archon.training.metrics import TRAJECTORIES_FILE, read_jsonl

MAX_PROMPTS = 50
"""Shown prompts that got better, and as many that got worse. Each has an answer of both runs."""
PREVIEW = MAX_CHARACTERS // 10  # characters of a prompt or an answer


class PromptScore(NamedTuple):
    """Answers to a prompt at the last step that has it: their mean reward, their number, and the first of them."""

    prompt: str
    step: int
    reward: float
    answers: int
    answer: str


def write_comparison(first: str | Path, second: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of two runs to `out`, by default the report folder of `first`; return its path.

    Raises:
        ConfigError: a run has no metrics, or both are the same folder.
    """
    paths = Path(first), Path(second)
    if paths[0].resolve() == paths[1].resolve():
        raise ConfigError(f"{first} and {second} are the same run; expected two run directories")
    runs = [load_run(path, trajectories=False) for path in paths]
    folder = Path(out) if out is not None else paths[0] / "report"
    page = folder / f"compare-{paths[1].resolve().name}.html"
    data = comparison_data(*runs)
    text = render(data["name"], data, COMPARE_SCRIPTS)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(page, text)
    return page


def comparison_data(first: RunData, second: RunData) -> dict[str, Any]:
    """Return the data for the page's script."""
    runs = first, second
    names = [run.path.resolve().name for run in runs]
    if names[0] == names[1]:
        names = [str(run.path.resolve()) for run in runs]
    summaries = [summarize(run) for run in runs]
    titles = [title for title in summaries[0] | summaries[1] if title != "Use it"]
    common = sorted(first.series.keys() & second.series.keys(), key=_rank)
    return {
        "name": f"{names[0]} and {names[1]}",
        "runs": names,
        "paths": [str(run.path.resolve()) for run in runs],
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "colors": COLORS,
        "facts": [[title, *(summary.get(title, "–") for summary in summaries)] for title in titles],
        "settings": different_settings(*map(run_config, runs)),
        "panels": [_panel(name, names, runs) for name in common if any(_values(run.series[name]) for run in runs)],
        "alone": [sorted(run.series.keys() - set(common)) for run in runs],
        **compare_prompts(*(_scores(run.path / TRAJECTORIES_FILE) for run in runs)),
    }


def different_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[list[str]]:
    """Return [dotted key, value, value] of each setting that differs, `run_dir` aside; "–" for a missing one."""
    flat = [dict(_leaves(config, "")) for config in (first, second)]
    keys = [key for key in flat[0] | flat[1] if key != "run_dir" and flat[0].get(key) != flat[1].get(key)]
    return [[key, *(values.get(key, "–")[:PREVIEW] for values in flat)] for key in keys]


def compare_prompts(
    first: Mapping[tuple[str, str], PromptScore], second: Mapping[tuple[str, str], PromptScore]
) -> dict[str, Any]:
    """Return the prompts with a higher reward in `second`, those with a lower one, and how many both have.

    Args:
        first: scores by (split, prompt).
        second: the same of the other run.
    """
    both = [(key[0], score, second[key]) for key, score in first.items() if key in second]
    changed = sorted((pair for pair in both if pair[1].reward != pair[2].reward), key=lambda pair: _gain(*pair[1:]))
    better, worse = ([pair for pair in changed if sign * _gain(*pair[1:]) > 0] for sign in (1, -1))
    return {
        "prompts": len(both),
        "better": [_prompt(*pair) for pair in better[: -MAX_PROMPTS - 1 : -1]],
        "n_better": len(better),
        "worse": [_prompt(*pair) for pair in worse[:MAX_PROMPTS]],
        "n_worse": len(worse),
    }


def _gain(before: PromptScore, after: PromptScore) -> float:
    return after.reward - before.reward


def _prompt(split: str, *scores: PromptScore) -> dict[str, Any]:
    answers = [
        {"reward": score.reward, "count": score.answers, "step": score.step, "text": score.answer} for score in scores
    ]
    return {"split": split, "prompt": scores[0].prompt, "answers": answers}


def _scores(file: Path) -> dict[tuple[str, str], PromptScore]:
    """Return the score of each prompt at the last step that has it, by (split, prompt)."""
    last: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in read_jsonl(file) if file.is_file() else []:
        key = str(record.get("split", "train")), _text(record.get("prompt", ""))
        reward = read_number(record.get("reward"))
        if reward is not None and math.isfinite(reward):
            answers = last.setdefault(key, [])
            if answers and answers[0]["step"] != record["step"]:
                answers.clear()
            answers.append(record | {"reward": reward})
    return {key: _score(key[1], answers) for key, answers in last.items()}


def _score(prompt: str, answers: list[dict[str, Any]]) -> PromptScore:
    reward = sum(answer["reward"] for answer in answers) / len(answers)
    answer = _text(answers[0].get("completion", ""))[:PREVIEW]
    return PromptScore(prompt[:PREVIEW], answers[0]["step"], round(reward, 6), len(answers), answer)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _leaves(value: Any, key: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(value, ensure_ascii=False, default=str)


def _rank(name: str) -> tuple[int, int, str]:
    """Order of charts: results, then the panels of a run's page, then other metrics."""
    panel = find_panel(name)
    place = list(RESULTS).index(name) if name in RESULTS else len(RESULTS)
    return place, PANELS.index(panel) if panel else len(PANELS), name


def _values(series: Series) -> bool:
    """Return whether a metric has values other than 0."""
    return any(value != 0 for value in series.values)


def _panel(metric: str, names: list[str], runs: Iterable[RunData]) -> dict[str, Any]:
    panel = find_panel(metric)
    title, meaning = metric_title(metric)
    title = RESULTS.get(metric, title)
    series = [series_data(run.series[metric]) for run in runs]
    return {
        "title": title[:1].upper() + title[1:],
        "about": f"{metric}: {meaning}" if meaning else metric,
        "unit": panel.unit if panel else "",
        "series": [part | {"name": name, "title": name} for part, name in zip(series, names, strict=True)],
    }
