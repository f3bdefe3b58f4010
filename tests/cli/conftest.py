"""The command as a user meets it, and a small checkpoint for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from archon.cli import main

ALPHABET = "0123456789+= "
TINY_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of a user's mistake; fails unless that is all there is on stderr."""
        assert self.code == 2, f"exit code {self.code}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("archon: ")
        return lines[0]


@pytest.fixture
def archon(capsys):
    """Run `archon ARGUMENTS…` in this process."""

    def run(*arguments) -> Outcome:
        capsys.readouterr()  # what the test itself has printed so far
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(left.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def _tiny_checkpoint(tmp_path_factory) -> Path:
    """A Qwen3 of 20 thousand parameters, written by transformers, with a tokenizer of one token a character."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from archon.rl.bootstrap import make_tokenizer
    from archon.training.config import TokenizerRecipe

    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet=ALPHABET, chat_template="plain"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **TINY_CONFIG,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(_tiny_checkpoint, tmp_path) -> Path:
    """A copy of the small checkpoint that a test may damage."""
    return Path(shutil.copytree(_tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def dataset(tmp_path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(8) for b in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sft_overrides(checkpoint, dataset, tmp_path) -> list[str]:
    return [
        f"run_dir={tmp_path / 'run'}",
        f"model.path={checkpoint}",
        f"train_data.path={dataset}",
        "train_data.prompt_key=prompt",
        "train_data.response_key=response",
        "total_steps=2",
        "batch_size=4",
        "model.optimizer.lr=1e-3",
    ]


@pytest.fixture
def rl_overrides(checkpoint, dataset, tmp_path) -> list[str]:
    return [
        f"run_dir={tmp_path / 'run'}",
        f"actor.path={checkpoint}",
        f"train_data.path={dataset}",
        "train_data.prompt_key=prompt",
        "train_data.response_key=response",
        "reward=exact_match",
        "algorithm.kl.coef=0",
        "total_steps=2",
        "rollout.prompts_per_step=4",
        "rollout.workers.rewards=1",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=4",
        "generator.max_slots=16",
    ]
