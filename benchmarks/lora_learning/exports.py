"""Compare the answers of an export in archon and in transformers, each with its native generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from archon.data.encoding import encode_prompt
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.rl.rewards import get_reward_fn
from archon.rl.trainer import RLTrainer

Rows = Sequence[dict[str, Any]]

BATCH = 50


def is_lora(export: Path) -> bool:
    """Return whether the export is a PEFT LoRA instead of a whole checkpoint."""
    return (export / "adapter_config.json").exists()


def compared(model: Path, export: Path, trainer: RLTrainer) -> dict[str, Any]:
    """Return the mean rewards of greedy and of sampled answers to the held-out rows, one each, in archon and in
    transformers, and how many greedy ones differ.

    Args:
        model: the checkpoint that the run began with; its tokenizer is the policy's.
        export: of the run.
        trainer: opened, with the export's weights; it answers for archon.
    """
    rows, policy = trainer.section_rows("eval_data"), _policy(model, export)
    found: dict[str, Any] = {"prompts": len(rows)}
    for name, greedy in (("greedy", True), ("sampled", False)):
        gconfig = trainer.config.gconfig.new(n_samples=1, greedy=greedy, temperature=1.0)
        ours = of_archon(trainer.generator, trainer.tokenizer, rows, gconfig)
        theirs = of_transformers(policy, model, rows, gconfig)
        reward = get_reward_fn(str(trainer.config.reward))
        found[name] = {"archon": _mean(ours, rows, reward), "transformers": _mean(theirs, rows, reward)}
        if greedy:
            found["differing"] = sum(own != other for own, other in zip(ours, theirs, strict=True))
    return found


def standard_error(found: dict[str, Any]) -> float:
    """Return the standard error of the difference between two mean rewards that are nearly all 0 or 1."""
    share = sum(found["sampled"].values()) / 2
    return math.sqrt(2 * share * (1 - share) / found["prompts"])


def of_archon(generator: Any, tokenizer: Any, rows: Rows, gconfig: GenerationHyperparameters) -> list[str]:
    """Return an answer to each row, from archon's generator."""
    ended = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
    requests = [ModelRequest(encode_prompt(tokenizer, row), ended.new(seed=seed)) for seed, row in enumerate(rows)]
    tokens = [answer.output_tokens for answer in generator.generate(requests)]
    return list(tokenizer.batch_decode(tokens, skip_special_tokens=True))


def of_transformers(policy: Any, model: Path, rows: Rows, gconfig: GenerationHyperparameters) -> list[str]:
    """Return an answer to each row, from transformers' generate: greedy, or sampled from all of the distribution."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    sampling = {"do_sample": False} if gconfig.greedy else sampled
    # Padding too ends an answer, as it does in training.
    ends = list(gconfig.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids)
    torch.manual_seed(0)
    texts = list[str]()
    for start in range(0, len(rows), BATCH):
        prompts = tokenizer.apply_chat_template(
            [row["messages"] for row in rows[start : start + BATCH]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            answers = policy.generate(**prompts, max_new_tokens=gconfig.max_new_tokens, eos_token_id=ends, **sampling)
        texts += tokenizer.batch_decode(answers[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def _policy(model: Path, export: Path) -> Any:
    """Load the export with transformers, and PEFT for a LoRA."""
    from transformers import AutoModelForCausalLM

    if not is_lora(export):
        return AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(export))


def _mean(answers: Sequence[str], rows: Rows, reward: Callable[..., float]) -> float:
    rewards = []
    for text, row in zip(answers, rows, strict=True):
        others = {name: value for name, value in row.items() if name != "prompt"}
        rewards.append(float(reward(None, text, None, None, **others)))
    return sum(rewards) / len(rewards)
