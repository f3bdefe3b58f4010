"""What an export answers in archon and in transformers, each by its own generation, to the same held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from archon.generation.types import GenerationHyperparameters, ModelRequest

BATCH = 50
Rows = Sequence[dict[str, Any]]
"""With `prompt`, a conversation, and what the reward reads."""


def is_adapter(export: Path) -> bool:
    """Whether it has adapters in PEFT's format, and not a whole checkpoint."""
    return (export / "adapter_config.json").exists()


def compared(model: Path, export: Path, generator: Any, tokenizer: Any, rows: Rows, **options: Any) -> dict[str, Any]:
    """Returns the mean rewards of greedy and of sampled answers to the rows, one each, and how many greedy ones differ.

    Args:
        model: the checkpoint that adapters are of; its tokenizer is the policy's.
        export: of a run from that checkpoint.
        generator: archon's in-process one, with the export's weights.
        options: `reward`, a function of answers, and `max_new_tokens`.
    """
    policy, found = _policy(model, export), dict[str, Any](prompts=len(rows))
    for name, greedy in (("greedy", True), ("sampled", False)):
        theirs = of_transformers(policy, model, rows, options["max_new_tokens"], greedy=greedy)
        ours = of_archon(generator, tokenizer, rows, options["max_new_tokens"], greedy=greedy)
        found[name] = {"archon": _mean(ours, rows, **options), "transformers": _mean(theirs, rows, **options)}
        if greedy:
            found["differing"] = sum(own != other for own, other in zip(ours, theirs, strict=True))
    return found


def standard_error(found: dict[str, Any]) -> float:
    """Returns that of the difference of the two means of sampled answers, whose rewards are 0 or 1."""
    share = sum(found["sampled"].values()) / 2
    return math.sqrt(2 * share * (1 - share) / found["prompts"])


def of_archon(generator: Any, tokenizer: Any, rows: Rows, max_new_tokens: int, *, greedy: bool) -> list[str]:
    """Returns an answer to each row, from archon's generator."""
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens, greedy=greedy)
    gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
    prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True) for row in rows]
    requests = [ModelRequest(prompt, gconfig.new(seed=seed)) for seed, prompt in enumerate(prompts)]
    return tokenizer.batch_decode(
        [answer.output_tokens for answer in generator.generate(requests)], skip_special_tokens=True
    )


def of_transformers(policy: Any, model: Path, rows: Rows, max_new_tokens: int, *, greedy: bool) -> list[str]:
    """Returns an answer to each row, from transformers' generate: greedy, or sampled from all of the distribution."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    sampling: dict[str, Any] = {"do_sample": False}
    if not greedy:
        torch.manual_seed(0)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    texts = list[str]()
    for start in range(0, len(rows), BATCH):
        prompts = tokenizer.apply_chat_template(
            [row["prompt"] for row in rows[start : start + BATCH]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            answers = policy.generate(**prompts, max_new_tokens=max_new_tokens, **sampling)
        texts += tokenizer.batch_decode(answers[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def _policy(model: Path, export: Path) -> Any:
    """Returns the export as transformers, and for adapters PEFT, load it."""
    from transformers import AutoModelForCausalLM

    if not is_adapter(export):
        return AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(export))


def _mean(answers: Sequence[str], rows: Rows, reward: Callable[..., float], **options: Any) -> float:
    del options
    rewards = [reward(None, text, None, None, **row) for text, row in zip(answers, rows, strict=True)]
    return sum(rewards) / len(rewards)
