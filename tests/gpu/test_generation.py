"""The generator on a GPU: greedy answers of every family are the CPU's, and logprobs those of a whole forward."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.generation.models import make_engine, make_model, prompts, request, trainer_logprobs
from tests.generation.test_parity import FAMILIES
from tests.tolerances import GENERATED_LOGPROB_BF16, GENERATED_LOGPROB_FP32

pytestmark = pytest.mark.gpu

RAGGED = prompts(1, 2, 3, 4, 5, 8, 9, 17, 33)


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_the_cpu(name: str) -> None:
    family, options = FAMILIES[name]
    model = make_model(torch.float64, family, **options)
    wanted = [request(prompt, greedy=True, max_new_tokens=13) for prompt in RAGGED * 2]
    found = [
        make_engine(own, page_size=4, n_pages=400, max_slots=6, prefill_tokens=11).generate(wanted)
        for own in (copy.deepcopy(model).cuda(), model)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.output_tokens == theirs.output_tokens
        assert ours.output_logprobs == pytest.approx(theirs.output_logprobs, abs=GENERATED_LOGPROB_FP32)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3", "qwen3_moe", "qwen3_5_text"])
def test_first_step_ratio_is_one(family: str) -> None:
    model = copy.deepcopy(make_model(family=family)).cuda()
    for answer in make_engine(model, page_size=4).generate([request(p, max_new_tokens=24) for p in RAGGED * 3]):
        trained = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, 1.0)
        given = torch.tensor(answer.output_logprobs)
        torch.testing.assert_close(given, trained, rtol=0, atol=2 * GENERATED_LOGPROB_FP32)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_a_bfloat16_replica(family: str) -> None:
    """Its prompts are read by `varlen`."""
    model, differences = copy.deepcopy(make_model(torch.bfloat16, family)).cuda(), []
    for answer in make_engine(model, page_size=16).generate([request(p, max_new_tokens=24) for p in RAGGED * 3]):
        trained = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, 1.0)
        differences.append((torch.tensor(answer.output_logprobs) - trained).abs())
    assert torch.cat(differences).mean() <= GENERATED_LOGPROB_BF16
