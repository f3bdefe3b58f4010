"""The runs with SmolLM2: their data, their configurations, and what is made of their records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archon.cli.config import load_config
from archon.rl.bootstrap import ensure_checkpoint
from archon.rl.config import RLConfig
from archon.schema.config import EngineConfig
from archon.training.config import BootstrapConfig, PreferenceConfig, SFTConfig
from benchmarks.harness import ROOT
from benchmarks.lora_learning.__main__ import RUNS, measured, named, reward_of, run, verdicts
from benchmarks.lora_learning.figure import draw
from benchmarks.lora_learning.record import append, read_record
from tests.small_qwen3 import SMALL_QWEN3

SCHEMAS: dict[str, Any] = {"rl": RLConfig, "sft": SFTConfig, "preference": PreferenceConfig}


@pytest.mark.parametrize("name", RUNS)
def test_runs_differ_in_what_their_names_say_alone(name: str, tmp_path: Path) -> None:
    task = RUNS[name]
    given, plain = (
        load_config(SCHEMAS[task.command], task.config, [f"run_dir={tmp_path}", *changes]).model_dump()
        for changes in (task.changes, ())
    )
    different = {key for key in given if given[key] != plain[key]}
    kind = name.partition("-")[0]
    kinds = {
        "grpo": {"seed", "actor"},
        "shuffled": {"control"},
        "full": {"seed", "actor"},
        "letters": {"seed", "actor"},
        "syllogism": {"seed", "actor"},
    }
    expected = {"control"} if "shuffled" in name else kinds.get(kind, set())
    assert different <= expected
    if kind == "full":
        assert given["actor"]["lora"] is None and given["ref"] == {}


def test_a_line_has_the_curve_over_the_time_that_passed() -> None:
    rows = [
        {"step": 0, "eval/reward": 0.2, "seconds/evaluate": 3.0},
        {"step": 1, "seconds/update": 5.0, "seconds/push": 1.0, "push/bytes": 10.0, "first_logprob_diff": 1e-6},
        {"step": 2, "seconds/update": 5.0, "seconds/push": 2.0, "push/bytes": 10.0, "eval/reward": 0.6},
    ]
    line = measured(rows, "eval/reward", 20.0)
    assert line["curve"] == [[0, 7.0, 0.2], [2, 20.0, 0.6]]
    assert (line["before"], line["after"], line["steps"]) == (0.2, 0.6, 2)
    assert (line["push_bytes"], line["push_seconds"]) == (10.0, 1.5)
    assert measured([], "eval/reward", 1.0)["curve"] == []


def line(name: str, after: float, seconds: float = 600.0, push_bytes: float = 1.0) -> dict[str, Any]:
    curve = [[0, 1.0, 0.2], [60, seconds, after]]
    return {"run": name, "code": 0, "curve": curve, "before": 0.2, "after": after, "push_bytes": push_bytes}


def exported(greedy: float, sampled: float) -> dict[str, Any]:
    rewards = {"greedy": {"archon": 0.8, "transformers": greedy}, "sampled": {"archon": 0.8, "transformers": sampled}}
    return {"prompts": 200, "differing": 2} | rewards


def test_what_is_found_of_an_export_joins_the_line_of_its_run(tmp_path: Path) -> None:
    record, run = tmp_path / "record.jsonl", line("grpo-seed0", 0.8)
    append(record, run)
    append(record, {"run": "grpo-seed0", "exported": exported(0.8, 0.8)})
    assert read_record(record) == {"grpo-seed0": run | {"exported": exported(0.8, 0.8)}}
    append(record, run)
    assert read_record(record) == {"grpo-seed0": run}, "a later run has another export"


def test_runs_are_chosen_by_their_names_or_by_what_several_begin_with() -> None:
    assert named(["full-lr1.0e-5", "dpo"]) == ["full-lr1.0e-5", "dpo-seed0"]
    assert named(["grpo"]) == [f"grpo-seed{seed}" for seed in range(3)] and named([""]) == list(RUNS)
    assert named(["no-such"]) == []


def test_expectations_are_those_of_the_runs() -> None:
    good = [line("grpo-seed0", 0.8), line("shuffled-seed0", 0.25), line("full-lr3.0e-5", 0.82, push_bytes=30.0)]

    def failed(*changed: dict[str, Any]) -> list[str]:
        lines = {each["run"]: each for each in [*good, *changed]}
        return [what for what, fine in verdicts(lines).items() if not fine]

    assert failed() == []
    assert "rises by +0.200" in failed(line("grpo-seed1", 0.4))[0]
    assert "rises by +0.000" in failed(line("grpo-seed1", 0.8, seconds=1300.0))[0]
    assert "rises by +0.200" in failed(line("letters-seed1", 0.4))[0]
    assert "letters-shuffled-seed0 moves by +0.150" in failed(line("letters-shuffled-seed0", 0.35))[0]
    assert "moves by +0.150" in failed(line("shuffled-seed0", 0.35))[0]
    assert "at most 0.03 apart" in failed(line("full-lr1.0e-4", 0.84, push_bytes=30.0))[0]
    assert "10.0% of a full one" in failed(line("full-lr3.0e-5", 0.82, push_bytes=10.0))[0]
    of_two_seeds = line("full-lr1.0e-5", 0.82, push_bytes=30.0), line("full-lr1.0e-5-seed1", 0.86)
    assert "at 0.840 (full-lr1.0e-5, 2 seeds), at most 0.03 apart" in failed(*of_two_seeds)[0]
    assert "have the best rate (full-lr3.0e-5)" in failed(line("full-lr1.0e-5-seed1", 0.7))[0]
    unequal = line("grpo-seed0", 0.8) | {"exported": exported(0.79, 0.85)}
    assert "earns 0.800 greedily, in transformers 0.790 (2 of 200 answers differ)" in failed(unequal)[0]
    unequal["exported"] = exported(0.8, 0.65)
    assert "earns -0.150 in transformers, sampled (at most 0.134)" in failed(unequal)[0]
    assert failed({"run": "dpo-seed0", "code": 1}) == ["dpo-seed0 did not end well"]


@pytest.mark.slow
def test_a_picture_is_made_of_a_record(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text(json.dumps(line("grpo-seed0", 0.8)) + "\n")
    lines = {"grpo-seed0": line("grpo-seed0", 0.8), "sft-seed0": line("sft-seed0", 0.8)}
    assert draw(lines, tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    call = [sys.executable, "-m", "benchmarks.lora_learning", "--record", str(record), "--figure"]
    out = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0 and record.with_suffix(".png").exists(), out.stderr


@pytest.mark.slow
def test_a_run_from_its_first_step_to_its_line(tmp_path: Path) -> None:
    """With a small model in place of the real one."""
    letters = "".join(sorted({*"Add.What is + = ?0123456789systemuserassistant"}))
    tokenizer = {"kind": "characters", "alphabet": letters, "chat_template": "chatml"}
    hf_config = SMALL_QWEN3 | {"max_position_embeddings": 256}
    ensure_checkpoint(
        BootstrapConfig.parse(
            {"path": "x", "model_type": "qwen3", "hf_config": hf_config, "tokenizer": tokenizer, "warmup": None}
        ),
        tmp_path / "model",
        like=EngineConfig(path="x", device="cpu"),
    )
    small = ["total_steps=2", "batch_size=4", "model.scheduler.warmup_steps=0"]
    found = run("dpo-seed0", tmp_path / "model", tmp_path, 1, [*small, "eval_data.limit=4"])
    assert found["code"] == 0 and found["steps"] == 2 and len(found["curve"]) == 1
    assert 0 <= found["before"] <= 1 and 0 <= found["after"] <= 1
    rl = ["total_steps=2", "gconfig.n_samples=2", "rollout.prompts_per_step=2", "evaluation.max_prompts=4"]
    rl += ["actor.scheduler.warmup_steps=0", "algorithm.zero_variance_groups=keep", "generator.max_seq_len=200"]
    found = run("grpo-seed0", tmp_path / "model", tmp_path, 1, rl)
    assert found["code"] == 0 and found["steps"] == 2 and found["push_bytes"] > 0
    assert found["largest_first_logprob_diff"] < 1e-4
    assert found["exported"]["differing"] == 0 and found["exported"]["prompts"] == 200
    assert reward_of(tmp_path / "model", tmp_path / "grpo-seed0" / "export", tmp_path) >= 0
