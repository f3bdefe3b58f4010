"""What a real model must compute as transformers does: greedy answers, perplexity, and an export bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import archon
from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.tools.check.round_trip import folder_tensors

QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 3?",
    "Name three colors.",
    "Write a haiku about rain.",
    "Who wrote Hamlet?",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
    "Is 17 a prime number?",
    "Count from one to five.",
    "What is the opposite of hot?",
    "Give me a recipe for toast.",
    "How many legs has a spider?",
    "What is photosynthesis?",
    "Say hello in German.",
    "What is 12 times 12?",
    "Which planet is the largest?",
    "Explain gravity to a child.",
    "Complete: the quick brown fox",
    "What is a gradient?",
    "Write a Python function that adds two numbers.",
)
NEW_TOKENS = 16


def greedy_answers(
    model: Any, reference: Any, tokenizer: Any, prompts: Sequence[list[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of archon's greedy answers, and of transformers'."""
    settings = GenerationHyperparameters(greedy=True, max_new_tokens=NEW_TOKENS)
    engine = InProcessEngine.from_model(model, tokenizer, max_slots=8, page_size=16, max_seq_len=256)
    found = [answer.output_tokens for answer in engine.generate([ModelRequest(ids, settings) for ids in prompts])]
    expected = []
    for ids in prompts:
        out = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)
        expected.append(out[0, len(ids) :].tolist())
    return found, expected


def answers(data_dir: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """The shortest answers of GSM8K's test split, as documents of their own."""
    lines = (data_dir / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    texts = sorted((json.loads(line)["answer"] for line in lines), key=lambda text: (len(text), text))
    return [tokenizer(text)["input_ids"] for text in texts[:count]]


def packs(documents: Sequence[list[int]], size: int = 20) -> Iterator[tuple[Tensor, Tensor, Tensor, int, Tensor]]:
    """Tokens, positions, boundaries, the longest length, and labels of several documents at a time."""
    for first in range(0, len(documents), size):
        part = documents[first : first + size]
        lengths = torch.tensor([len(ids) for ids in part])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
        tokens = torch.tensor([token for ids in part for token in ids])
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        labels = torch.tensor([label for ids in part for label in (*ids[1:], -100)])
        yield tokens, positions, bounds, int(lengths.max()), labels


@torch.no_grad()
def perplexities(model: Any, reference: Any, documents: Sequence[list[int]]) -> tuple[float, float]:
    """archon's perplexity of documents that are packed, and transformers' of each alone."""
    predictions = sum(len(ids) - 1 for ids in documents)
    theirs = ours = 0.0
    for ids in documents:
        tokens = torch.tensor(ids)
        logits = reference(tokens[None], use_cache=False).logits[0, :-1]
        # In float32 its sum over 262,144 tokens is off by 2e-5, whoever computed the logits.
        theirs += float(F.cross_entropy(logits.double(), tokens[1:], reduction="sum"))
    for tokens, positions, bounds, longest, labels in packs(documents):
        ours -= float(model(tokens, positions, bounds, longest, labels=labels, entropy=False).logprobs.sum())
    return math.exp(ours / predictions), math.exp(theirs / predictions)


def require_bitwise_export(model: Any, source: Path, target: Path) -> int:
    """Export the model and read it again: neither changes a bit. Returns the number of tensors."""
    archon.save_model(model, target, like=source)
    ours, theirs = folder_tensors(target), folder_tensors(source)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = archon.load_model(target, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    return len(ours)
