"""What transformers makes of an export: its held-out reward, from greedy answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

BATCH = 50


def greedy_reward(
    model: Path, export: Path, rows: Sequence[dict[str, Any]], reward: Callable[..., float], max_new_tokens: int
) -> float:
    """Returns the mean reward of greedy answers to rows with `prompt`, a conversation, and what the reward reads.

    Args:
        model: the checkpoint that an export of adapters is of; its tokenizer is the policy's.
        export: adapters in PEFT's format, or a whole checkpoint.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if (export / "adapter_config.json").exists():
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        policy: Any = PeftModel.from_pretrained(base, str(export))
    else:
        policy = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    rewards = list[float]()
    for start in range(0, len(rows), BATCH):
        asked = rows[start : start + BATCH]
        prompts = tokenizer.apply_chat_template(
            [row["prompt"] for row in asked],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            answers = policy.generate(**prompts, do_sample=False, max_new_tokens=max_new_tokens)
        texts = tokenizer.batch_decode(answers[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += [reward(None, text, None, None, **row) for text, row in zip(texts, asked, strict=True)]
    return sum(rewards) / len(rewards)
