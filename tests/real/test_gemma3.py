"""Gemma 3 270M, a second real model: norms before and after, sliding windows, and a quarter of a million tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import archon
from tests.real.compare import NEW_TOKENS, QUESTIONS, answers, greedy_answers, perplexities, require_bitwise_export

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.xdist_group("gemma3")]
# As Gemma's chat template writes a turn; this checkpoint was pretrained only and has no template.
TURN = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def tokenizer(gemma3: Path) -> Any:
    return AutoTokenizer.from_pretrained(gemma3)


@pytest.fixture(scope="module")
def reference(gemma3: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(gemma3: Path) -> Any:
    return archon.load_model(gemma3, dtype=torch.float32).requires_grad_(False)


def test_greedy_answers_to_twenty_prompts_are_transformers_token_for_token(
    model: Any, reference: Any, tokenizer: Any, write_figures: Callable[..., None]
) -> None:
    prompts = [tokenizer(TURN.format(question))["input_ids"] for question in QUESTIONS]
    continued = tokenizer("The capital of France is")["input_ids"]
    found, expected = greedy_answers(model, reference, tokenizer, [continued, *prompts])
    assert found == expected
    assert "the capital of the country" in tokenizer.decode(found[0]), "the model is a fluent one"
    write_figures(prompts=len(found), tokens=sum(map(len, found)), equal=sum(map(len, expected)), limit=NEW_TOKENS)


@pytest.mark.data
def test_the_perplexity_of_a_hundred_answers_is_transformers(
    model: Any, reference: Any, tokenizer: Any, data_dir: Path, write_figures: Callable[..., None]
) -> None:
    documents = answers(data_dir, tokenizer, 100)
    found, expected = perplexities(model, reference, documents)
    write_figures(documents=len(documents), perplexity=found, transformers=expected, relative=abs(found / expected - 1))
    assert 3 < expected < 100
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_export_is_bitwise_the_checkpoint(
    model: Any, gemma3: Path, tmp_path: Path, write_figures: Callable[..., None]
) -> None:
    tensors = require_bitwise_export(model, gemma3, tmp_path / "out")
    write_figures(tensors=tensors, parameters=sum(parameter.numel() for parameter in model.parameters()))
