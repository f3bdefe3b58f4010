"""`archon report A B`: one page of two runs."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from archon.schema.errors import ConfigError
from archon.tools.report import write_comparison
from archon.training.metrics import MetricsWriter, TrajectoryWriter

HOSTILE = "</script><img src=x onerror=alert(1)>"


def make_run(folder: Path, rewards: dict[str, list[float]], config: str, **metrics: float) -> Path:
    """Write a run whose prompts have one answer at each step, with these rewards."""
    folder.mkdir(parents=True)
    with (
        closing(MetricsWriter(folder / "metrics.jsonl")) as writer,
        closing(TrajectoryWriter(folder / "trajectories.jsonl")) as trajectories,
    ):
        for step in range(1, 4):
            writer.write(step, {"reward": step / 4, "eval/reward": step / 5, "unused": 0.0} | metrics)
        for prompt, per_step in rewards.items():
            for step, reward in enumerate(per_step, start=1):
                trajectories.write(step, step, prompt, f"answer {step} {HOSTILE}", reward)
    (folder / "config.yaml").write_text(config)
    return folder


def comparison(first: Path, second: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    page = write_comparison(first, second, **options)
    text = page.read_text()
    assert "<img" not in text and text.count("<script") == 2 and "default-src 'none'" in text
    return page, json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    first = {"up": [1.0, 0.0], "down": [0.0, 1.0], "down a little": [0.5], "same": [1.0], "first only": [1.0]}
    second = {"up": [0.0, 1.0], "down": [0.25], "down a little": [0.25], "same": [0.0, 1.0], HOSTILE: [1.0]}
    return (
        make_run(tmp_path / "one", first, "run_dir: one\nactor: {path: m, lora: {rank: 8}}\nseed: 0\n", kl=0.1),
        make_run(tmp_path / "two", second, "run_dir: two\nactor: {path: m, lora: {rank: 16}}\n", entropy=1.0),
    )


def test_settings_that_differ_are_listed(runs: tuple[Path, Path]) -> None:
    page, data = comparison(*runs)
    assert page == runs[0] / "report" / "compare-two.html"
    assert data["runs"] == ["one", "two"]
    assert data["settings"] == [["actor.lora.rank", "8", "16"], ["seed", "0", "–"]]
    assert ["Model", "m", "m"] in data["facts"]


def test_metrics_of_both_runs_share_a_chart_results_first(runs: tuple[Path, Path]) -> None:
    data = comparison(*runs)[1]
    assert [panel["title"] for panel in data["panels"]] == ["Held-out reward of sampled answers", "Reward"]
    assert [series["name"] for series in data["panels"][1]["series"]] == ["one", "two"]
    assert data["panels"][1]["series"][1]["values"] == [0.25, 0.5, 0.75]
    assert data["alone"] == [["kl"], ["entropy"]]


def test_a_metric_without_a_name_is_drawn(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, {}, "", **{"": 1.0}) for name in ("a", "b")]
    assert "" in [panel["title"] for panel in comparison(*runs)[1]["panels"]]


def test_prompts_are_compared_at_their_last_step(runs: tuple[Path, Path]) -> None:
    data = comparison(*runs)[1]
    assert data["prompts"] == 4 and data["n_better"] == 1 and data["n_worse"] == 2
    assert [entry["prompt"] for entry in data["better"]] == ["up"]
    assert [entry["prompt"] for entry in data["worse"]] == ["down", "down a little"]
    assert [answer["reward"] for answer in data["worse"][0]["answers"]] == [1.0, 0.25]
    assert data["better"][0]["answers"][1]["text"] == f"answer 2 {HOSTILE}"


def test_runs_of_one_name_are_named_by_their_paths(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / folder / "run", {}, "seed: 0\n") for folder in ("a", "b")]
    page, data = comparison(*runs, out=tmp_path / "out")
    assert data["runs"] == [str(run) for run in runs] and page == tmp_path / "out" / "compare-run.html"
    assert data["settings"] == [] and data["prompts"] == 0


def test_a_run_is_not_compared_with_itself_or_with_a_folder_without_metrics(runs: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="are the same run"):
        write_comparison(runs[0], runs[0] / ".")
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        write_comparison(runs[0], runs[0].parent)
    assert not (runs[0] / "report").exists()
