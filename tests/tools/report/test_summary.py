"""The first lines of a report and the model card of an export say what was trained, and with which result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.tools.report import load_run, render_page
from archon.tools.report.summary import model_card, next_command, results, summarize
from archon.training.metrics import MetricsWriter

MODEL = {"path": "org/base@main", "layout": "d2", "dtype": "bfloat16", "lora": None}


def run_of(folder: Path, config: dict[str, Any], records: list[dict[str, float]]) -> Any:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step, record in enumerate(records):
        writer.write(step, record)
    writer.close()
    return load_run(folder)


RL = {
    "actor": MODEL | {"lora": {"rank": 16, "loras": None}},
    "reward": "gsm8k",
    "algorithm": {"preset": "gspo"},
    "train_data": {"path": "gsm8k", "split": "train"},
}
HELD_OUT = [
    {"eval/reward": 0.25, "eval/greedy_reward": 0.5},
    {"reward": 0.3},
    {"eval/reward": 0.75, "eval/greedy_reward": 1.0},
]


def test_a_run_is_summarized_with_its_held_out_results(tmp_path: Path) -> None:
    assert summarize(run_of(tmp_path / "run", RL, HELD_OUT)) == {
        "Model": "org/base@main",
        "Data": "gsm8k train",
        "Method": "reinforcement learning: algorithm gspo, reward gsm8k, LoRA of rank 16",
        "Training": "2 steps, layout d2, bfloat16",
        "Held-out reward of greedy answers": "0.5 → 1",
        "Held-out reward of sampled answers": "0.25 → 0.75",
    }


def test_without_evaluations_tenths_of_the_run_are_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {"model": MODEL}, [{"loss": float(step)} for step in range(20)])
    assert results(run.series) == {"training loss": "0.5 → 18.5"}
    assert summarize(run)["Method"] == "supervised fine-tuning: all weights"
    continued = {"model": MODEL | {"lora": {"rank": 16, "path": "adapter"}}}
    assert (
        summarize(run_of(tmp_path / "lora", continued, [{"loss": 1.0}]))["Method"]
        == "supervised fine-tuning: LoRA from adapter"
    )
    single = run_of(tmp_path / "single", {"model": MODEL}, [{"eval/loss": 2.0}])
    assert results(single.series) == {}


@pytest.mark.parametrize(
    ("config", "command"),
    [
        ({"model": {"path": "a b"}}, "archon generate out --prompt …"),
        ({"model": {"path": "a b", "lora": {"rank": 2}}}, "archon generate 'a b' --lora out --prompt …"),
        (
            {"actor": {"path": "a", "lora": {"loras": {"x": {}, "y z": {}}}}},
            "archon serve a --lora x=out/x --lora 'y z=out/y z'",
        ),
        ({"loss": "reward", "model": {"path": "a"}}, "archon rl reward.model=out …"),
    ],
)
def test_the_next_command_uses_the_export(config: dict[str, Any], command: str) -> None:
    assert next_command(config, Path("out")) == command


def test_a_card_names_the_base_and_equal_runs_have_equal_cards(tmp_path: Path) -> None:
    card = model_card(run_of(tmp_path / "run", RL, HELD_OUT))
    header = yaml.safe_load(card.split("---")[1])
    assert header == {"base_model": "org/base", "library_name": "peft", "tags": ["archon"]}
    assert "| Held-out reward of greedy answers | 0.5 → 1 |" in card
    first, second = (model_card(run_of(tmp_path / side / "run", RL, HELD_OUT)) for side in ("c", "d"))
    assert first == second


@pytest.mark.parametrize(
    "config", ["[1, 2]", "{actor: 3, model: [x]}", "a: [", "{model: {path: {x: 1}, lora: 3}}", "7"]
)
def test_strange_configurations_and_texts_are_only_text(tmp_path: Path, config: str) -> None:
    run = run_of(tmp_path / "run", {}, HELD_OUT)
    run.config = config
    assert "Held-out reward of greedy answers" in summarize(run)
    run.config = yaml.safe_dump({"model": {"path": "| </script>\n# x"}})
    assert "</script>\n#" not in render_page(run) and "| Model | \\| </script> # x |" in model_card(run)
