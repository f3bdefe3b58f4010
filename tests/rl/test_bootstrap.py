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
import yaml

from archon.checkpoint.hf_io import load_model
from archon.checkpoint.tokenizer import load_tokenizer
from archon.cli import main
from archon.cli.config import load_config, read_bootstrap
from archon.data import encode_prompt, get_custom_dataset
from archon.data.config import DatasetConfig
from archon.rl import RLTrainer, SFTTrainer
from archon.rl.bootstrap import bootstrap_engine, ensure_checkpoint, make_tokenizer, warm_up, write_blank
from archon.rl.config import RLConfig
from archon.rl.export import LOGIT_TOLERANCE, export_difference
from archon.schema.config import EngineConfig, LoRAConfig, StrictModel
from archon.schema.errors import ConfigError
from archon.training.config import BootstrapConfig, TokenizerRecipe
from archon.training.metrics import read_jsonl
from tests.small_vision import SMALL_VISION

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
def archon() -> Callable[..., int]:
    """Run `archon ARGUMENTS…` in this process; gives its exit code."""

    def run(*arguments: str | Path) -> int:
        with pytest.raises(SystemExit) as left:
            main(list(map(str, arguments)))
        assert isinstance(left.value.code, int)
        return left.value.code

    return run


def written(config: StrictModel, path: Path) -> Path:
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def test_character_tokenizer_is_one_token_a_character_and_refuses_others() -> None:
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    tokenizer = make_tokenizer(recipe)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12+34=")["input_ids"]) == list("12+34=")
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="
    assert len(tokenizer) == 3 + 12
    with pytest.raises(Exception, match="UNK"):
        tokenizer("a")


def test_the_default_tokenizer_takes_a_conversation_of_its_alphabet() -> None:
    tokenizer = make_tokenizer(TokenizerRecipe())
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "1+1="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


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
    bootstrap: Callable[..., BootstrapConfig], tmp_path: Path
) -> None:
    target = tmp_path / "model"
    assert ensure_checkpoint(bootstrap(), target) == 0
    made = load_model(target)
    names = {file.name for file in target.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not (tmp_path / "model.making").exists()
    stamp = (target / "model.safetensors").stat().st_mtime_ns
    assert ensure_checkpoint(bootstrap(), target) == 0
    assert (target / "model.safetensors").stat().st_mtime_ns == stamp
    again = tmp_path / "again"
    assert ensure_checkpoint(bootstrap(), again) == 0
    for a, b in zip(made.parameters(), load_model(again).parameters(), strict=True):
        assert a.equal(b)
    cold = tmp_path / "cold"
    assert ensure_checkpoint(bootstrap(warmup=None), cold) == 0
    assert any(not a.equal(b) for a, b in zip(made.parameters(), load_model(cold).parameters(), strict=True))


@pytest.mark.parametrize("warm", [True, False])
def test_a_kill_before_the_last_rename_does_not_stop_the_next_attempt(
    bootstrap: Callable[..., BootstrapConfig],
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
        ensure_checkpoint(config, target)
    monkeypatch.undo()
    assert not target.exists()
    assert ensure_checkpoint(config, target) == 0
    assert load_model(target)


def test_checkpoint_that_bootstrap_did_not_make_is_left_alone(
    bootstrap: Callable[..., BootstrapConfig], tmp_path: Path
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    with pytest.raises(ConfigError, match="exists and was not created by a bootstrap"):
        ensure_checkpoint(bootstrap(), target)
    target.rmdir()
    ensure_checkpoint(bootstrap(warmup=None), target)
    with pytest.raises(ConfigError, match="was created with other bootstrap settings"):
        ensure_checkpoint(bootstrap(warmup=None, seed=1), target)


def test_run_from_nothing_ends_with_an_export_that_transformers_computes_alike(
    bootstrap: Callable[..., BootstrapConfig], rl_config: MakeConfig, tmp_path: Path
) -> None:
    config = rl_config(
        actor={"path": str(tmp_path / "model"), "optimizer": {"lr": 1e-3}},
        verify_export=True,
        total_steps=2,
    )
    assert ensure_checkpoint(bootstrap(), config.actor.path, like=config.actor) == 0
    trainer = RLTrainer(config)
    trainer.train()
    export = tmp_path / "run" / "export"
    tokenizer = load_tokenizer(export)
    documents = [tokenizer(text)["input_ids"] for text in ("1+1=", "98+76=174")]
    outputs: list[torch.Tensor] = []
    trainer.engine.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    assert export_difference(trainer.engine.model, export, documents) <= LOGIT_TOLERANCE
    with torch.no_grad():
        next(trainer.engine.model.parameters()).mul_(1.001)
    assert export_difference(trainer.engine.model, export, documents) > LOGIT_TOLERANCE
    assert not any(output.requires_grad for output in outputs), "the comparison needs no gradients"


def test_bpe_without_a_dataset_names_the_missing_field(tmp_path: Path) -> None:
    config = BootstrapConfig.parse({"tokenizer": {"kind": "bpe"}})
    with pytest.raises(ConfigError, match=r"bootstrap: tokenizer.train_data is not set"):
        ensure_checkpoint(config, tmp_path / "model")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"hf_config": {"hidden_size": 2**24}},
            r"a model of [\d,]+ parameters .* set hidden_size",
        ),
        ({"hf_config": {"vocab_size": 5}}, r"vocab_size is 5, but the tokenizer has [0-9]+ tokens; leave it out"),
        ({"tokenizer": {"kind": "bpe", "vocab_size": 10**9}}, "vocab_size"),
    ],
    ids=["hidden_size", "vocab_size", "bpe"],
)
def test_a_model_that_cannot_be_created_is_refused_before_its_weights(
    tmp_path: Path, values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ensure_checkpoint(BootstrapConfig.parse(values), tmp_path / "model")


def test_bpe_is_trained_on_the_questions_of_a_dataset_with_pictures(tmp_path: Path) -> None:
    """Its size is that of the model's embeddings, and no token is spent on what stands for a picture in a text."""
    data = DatasetConfig(path="shapes", subset="count+color")
    recipe = TokenizerRecipe(kind="bpe", vocab_size=340, chat_template="plain", images=True, train_data=data)
    write_blank(BootstrapConfig(model_type="qwen3_5", hf_config=SMALL_VISION, tokenizer=recipe), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.tokenize("how many yellow?") == ["how", "Ġmany", "Ġyellow", "?"]
    assert tokenizer.tokenize("yellow") == ["yellow"] and len(tokenizer.tokenize("<image>")) > 3
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == len(tokenizer) > 262
    assert config["image_token_id"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")


def test_warm_up_ends_where_the_target_reward_is_reached(
    bootstrap: Callable[..., BootstrapConfig], tmp_path: Path
) -> None:
    """`constant` pays 1.0 for anything: reached at the first measurement, at step 2 of 5; 1.5 is never reached."""
    for target_reward, steps in ((1.0, 2), (1.5, 5)):
        warmup = bootstrap().model_dump()["warmup"]
        warmup["target"] = {
            "reward": "tests.rl.rewards_for_tests.constant",
            "target_reward": target_reward,
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


@pytest.mark.parametrize("command", ["rl", "bootstrap"])
def test_signal_in_the_warm_up_ends_the_command_and_the_next_one_goes_on(
    bootstrap: Callable[..., BootstrapConfig],
    rl_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    archon: Callable[..., int],
    command: str,
) -> None:
    """The same of a run that begins with a bootstrap and of the bootstrap by itself."""
    file = written(bootstrap(path=str(tmp_path / "model")), tmp_path / "bootstrap.yaml")
    if command == "rl":
        actor = {"path": str(tmp_path / "model"), "optimizer": {"lr": 1e-3}}
        file = written(rl_config(actor=actor, bootstrap=file.name, total_steps=1), tmp_path / "run.yaml")
    train_step, taken = SFTTrainer.train_step, []

    def signaled(trainer: SFTTrainer) -> dict[str, float]:
        taken.append(trainer.step)
        if len(taken) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(trainer)

    monkeypatch.setattr(SFTTrainer, "train_step", signaled)
    assert archon(command, "--config", file) == 128 + signal.SIGTERM
    assert not (tmp_path / "model").exists()
    assert archon(command, "--config", file) == 0
    assert taken == [0, 1, 2, 3, 4]
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "export").exists() == (command == "rl")


def test_the_file_of_a_bootstrap_is_found_beside_the_configuration_that_names_it(
    bootstrap: Callable[..., BootstrapConfig], rl_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    written(bootstrap(), tmp_path / "recipes" / "mine.yaml")
    run = written(rl_config(bootstrap="mine.yaml"), tmp_path / "recipes" / "run.yaml")
    monkeypatch.chdir(tmp_path)
    relative = Path("recipes") / run.name
    assert load_config(RLConfig, relative, []).bootstrap == str(tmp_path / "recipes" / "mine.yaml")
    assert load_config(RLConfig, relative, ["bootstrap=recipes/mine.yaml"]).bootstrap == str(
        tmp_path / "recipes" / "mine.yaml"
    )
    assert read_bootstrap(load_config(RLConfig, relative, []).bootstrap) == bootstrap()
    assert load_config(RLConfig, relative, ["bootstrap=null"]).bootstrap is None
    with pytest.raises(ConfigError, match=r"bootstrap: its keys \(model_type, seed\) belong in a separate file"):
        rl_config(bootstrap={"model_type": "qwen3", "seed": 1})


def test_the_engine_of_a_bootstrap_is_the_runs_but_for_what_it_says(
    bootstrap: Callable[..., BootstrapConfig],
) -> None:
    run = EngineConfig(path="actor", layout="d2", dtype="bfloat16", max_tokens_per_mb=512, lora=LoRAConfig())
    made = bootstrap_engine(bootstrap(engine={"dtype": "float32"}, seed=7), run, "blank")
    assert (made.path, made.layout, made.dtype, made.max_tokens_per_mb) == ("blank", "d2", "float32", 512)
    assert made.init_from_scratch and made.seed == 7 and made.lora is None
    with pytest.raises(ConfigError, match="bootstrap: engine: unknown key 'layuot', did you mean 'layout'"):
        bootstrap_engine(bootstrap(engine={"layuot": "d2"}), run, "blank")
