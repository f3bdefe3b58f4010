"""The checkpoint made from nothing: tokenizers, real Hugging Face files, the warm-up and what may go wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.checkpoint.hf_io import load_model, load_tokenizer
from archon.data import encode_prompt, get_custom_dataset
from archon.rl import RLTrainer, SFTTrainer
from archon.rl.bootstrap import ensure_checkpoint, make_tokenizer, warm_up, write_blank
from archon.rl.config import RLConfig
from archon.rl.export import LOGIT_TOLERANCE, export_difference
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.training.bootstrap_config import BootstrapConfig, TokenizerRecipe
from archon.training.config import SFTConfig
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner

MakeConfig = Callable[..., RLConfig]

BOOTSTRAP = {
    "hf_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "tokenizer": {"kind": "characters", "alphabet": "0123456789+=", "chat_template": "plain"},
    "warmup": {"total_steps": 5, "batch_size": 16, "optimizer": {"lr": 1e-2}, "train_data": {"path": "sums.jsonl"}},
}


@pytest.fixture
def bootstrap(tmp_path: Path) -> Callable[..., BootstrapConfig]:
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**changes: Any) -> BootstrapConfig:
        config: dict[str, Any] = json.loads(json.dumps(BOOTSTRAP))
        config["warmup"]["train_data"]["path"] = str(tmp_path / "sums.jsonl")
        return BootstrapConfig.parse(config | changes)

    return make


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    config = SFTConfig.parse({"run_dir": "x", "model": {"path": "x"}, "train_data": {"path": "x"}})
    with Runner(tmp_path / "run", config) as opened:
        yield opened


def test_character_tokenizer_is_one_token_a_character_and_refuses_others() -> None:
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    tokenizer = make_tokenizer(recipe)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12+34=")["input_ids"]) == list("12+34=")
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="
    assert len(tokenizer) == 3 + 12
    with pytest.raises(Exception, match="UNK"):
        tokenizer("a")


def test_bpe_tokenizer_round_trips_anything_and_splits_numbers_into_digits() -> None:
    recipe = TokenizerRecipe(kind="bpe", vocab_size=400)
    tokenizer = make_tokenizer(recipe, ["the apples and the pears, 12 and 345"] * 50)
    for text in ("the apples cost $1,234.50", "naïve 中文 🙂\n\ttabs"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("the")["input_ids"]) == 1
    digits = tokenizer.convert_ids_to_tokens(tokenizer("12345")["input_ids"])
    assert digits == list("12345")


def test_prompt_of_rl_is_the_beginning_of_the_sft_example() -> None:
    """Or the policy would be asked in a way it never saw in its warm-up."""
    recipes = [
        TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain"),
        TokenizerRecipe(kind="bpe", vocab_size=300),
    ]
    for recipe in recipes:
        tokenizer = make_tokenizer(recipe, ["12+34="])
        sft = get_custom_dataset("arithmetic", kind="sft", split="test", tokenizer=tokenizer)[0]
        row = get_custom_dataset("arithmetic", kind="rl", split="test")[0]
        prompt = encode_prompt(tokenizer, row)
        assert sft["input_ids"][: len(prompt)] == prompt
        trained = [i for i, mask in enumerate(sft["loss_mask"]) if mask]
        assert trained == list(range(len(prompt), trained[-1] + 1))
        assert sft["input_ids"][trained[-1]] == tokenizer.eos_token_id


def test_made_checkpoint_is_warmed_up_recorded_and_made_once(
    bootstrap: Callable[..., BootstrapConfig], runner: Runner, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    assert ensure_checkpoint(bootstrap(), target, runner)
    made = load_model(target)
    names = {file.name for file in target.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not (tmp_path / "model.making").exists()
    stamp = (target / "model.safetensors").stat().st_mtime_ns
    assert ensure_checkpoint(bootstrap(), target, runner)
    assert (target / "model.safetensors").stat().st_mtime_ns == stamp
    again = tmp_path / "again"
    assert ensure_checkpoint(bootstrap(), again, runner)
    for a, b in zip(made.parameters(), load_model(again).parameters(), strict=True):
        assert a.equal(b)
    cold = tmp_path / "cold"
    assert ensure_checkpoint(bootstrap(warmup=None), cold, runner)
    assert any(not a.equal(b) for a, b in zip(made.parameters(), load_model(cold).parameters(), strict=True))


@pytest.mark.parametrize("warm", [True, False])
def test_a_kill_before_the_last_rename_does_not_stop_the_next_attempt(
    bootstrap: Callable[..., BootstrapConfig],
    runner: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm: bool,
) -> None:
    config, target = bootstrap() if warm else bootstrap(warmup=None), tmp_path / "model"
    rename = Path.rename

    def refuse(self: Path, to: Path) -> Path:
        if to == target:
            raise OSError("as if killed")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="as if killed"):
        ensure_checkpoint(config, target, runner)
    monkeypatch.undo()
    assert not target.exists()
    assert ensure_checkpoint(config, target, runner)
    assert load_model(target)


def test_checkpoint_that_bootstrap_did_not_make_is_left_alone(
    bootstrap: Callable[..., BootstrapConfig], runner: Runner, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    with pytest.raises(ConfigError, match="exists and was not made by `bootstrap`"):
        ensure_checkpoint(bootstrap(), target, runner)
    target.rmdir()
    ensure_checkpoint(bootstrap(warmup=None), target, runner)
    with pytest.raises(ConfigError, match="was made with other `bootstrap` values"):
        ensure_checkpoint(bootstrap(warmup=None, seed=1), target, runner)


def test_run_from_nothing_ends_with_an_export_that_transformers_computes_alike(
    bootstrap: Callable[..., BootstrapConfig], rl_config: MakeConfig, tmp_path: Path
) -> None:
    config = rl_config(
        actor={"path": str(tmp_path / "model"), "optimizer": {"lr": 1e-3}},
        bootstrap=bootstrap().model_dump(),
        verify_export=True,
        total_steps=2,
    )
    trainer = RLTrainer(config)
    trainer.train()
    export = tmp_path / "run" / "export"
    tokenizer = load_tokenizer(export)
    documents = [tokenizer(text)["input_ids"] for text in ("1+1=", "98+76=174")]
    assert export_difference(trainer.engine.model, export, documents) <= LOGIT_TOLERANCE
    with torch.no_grad():
        next(trainer.engine.model.parameters()).mul_(1.001)
    assert export_difference(trainer.engine.model, export, documents) > LOGIT_TOLERANCE


def test_bpe_without_a_dataset_names_the_missing_field(runner: Runner, tmp_path: Path) -> None:
    config = BootstrapConfig.parse({"tokenizer": {"kind": "bpe"}})
    with pytest.raises(ConfigError, match=r"bootstrap.tokenizer.train_data is not set"):
        ensure_checkpoint(config, tmp_path / "model", runner)


def test_warm_up_ends_where_the_target_reward_is_reached(
    bootstrap: Callable[..., BootstrapConfig], runner: Runner, tmp_path: Path
) -> None:
    """`constant` pays 1.0 for anything: reached at the first measurement, at step 2 of 5; 1.5 is never reached."""
    for at_least, steps in ((1.0, 2), (1.5, 5)):
        warmup = bootstrap().model_dump()["warmup"]
        warmup["target"] = {
            "reward": "tests.rl.rewards_for_tests.constant",
            "at_least": at_least,
            "every": 2,
            "eval_data": {"path": "arithmetic", "split": "test", "limit": 5},
        }
        config = bootstrap(warmup=warmup)
        assert config.warmup is not None
        blank = tmp_path / f"blank {steps}"
        write_blank(config, blank)
        model = EngineConfig(path=str(blank), init_from_scratch=True)
        run = tmp_path / f"run {steps}"
        assert warm_up(config.warmup, model, run) == 0
        rows = read_jsonl(run / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        assert [row["step"] for row in rows if "eval/reward" in row] == [step for step in (2, 4) if step <= steps]
        assert warm_up(config.warmup, model, run) == 0  # finished: nothing is trained again
        assert read_jsonl(run / "metrics.jsonl") == rows


def test_signal_in_the_warm_up_ends_the_run_and_the_next_one_goes_on(
    bootstrap: Callable[..., BootstrapConfig], rl_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rl_config(
        actor={"path": str(tmp_path / "model"), "optimizer": {"lr": 1e-3}},
        bootstrap=bootstrap().model_dump(),
        total_steps=1,
    )
    train_step, taken = SFTTrainer.train_step, []

    def signalled(trainer: SFTTrainer) -> dict[str, float]:
        taken.append(trainer.step)
        if len(taken) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(trainer)

    monkeypatch.setattr(SFTTrainer, "train_step", signalled)
    with Runner(config.run_dir, config) as outer:
        assert RLTrainer(config, outer).train() == {}
        assert outer.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "model").exists()
    RLTrainer(config).train()
    assert taken == [0, 1, 2, 3, 4]
    assert (tmp_path / "model" / "model.safetensors").is_file()
