"""The experts that a generator records, and what a trainer computes with them."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from archon.generation import InProcessEngine
from archon.generation.record import TokenRecord
from archon.generation.types import ModelResponse
from archon.models import BaseArchonModel
from archon.models.layers.routed_experts import to_replay
from archon.schema.errors import ConfigError
from tests.generation.models import make_engine, make_model, prompts, request
from tests.generation.test_engine import other_weights, until_tokens
from tests.tolerances import FIRST_RATIO_FP64

FAMILIES = [
    *("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe_text"),
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("mixtral", "glm4_moe_lite", "minimax_m2")),
]


def recording(model: BaseArchonModel, **options: Any) -> InProcessEngine:
    engine = make_engine(model, **options)
    engine.record_experts()
    return engine


@torch.no_grad()
def chosen(model: BaseArchonModel, ids: list[int]) -> Tensor:
    """The experts [T, L, k] that a packed forward of one document uses, ascending."""
    model(torch.tensor(ids), torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
    return torch.stack([stats.experts for stats in model.router_stats], 1).sort(-1).values


def recorded(answer: ModelResponse) -> Tensor:
    """The experts of an answer, ascending."""
    assert answer.routed_experts is not None
    return torch.from_numpy(answer.routed_experts).long().sort(-1).values


def logprobs(model: BaseArchonModel, answer: ModelResponse, given: Tensor | None) -> Tensor:
    """What the trainer's forward gives the answer's tokens, with the experts of all tokens but the last `given`."""
    ids = torch.tensor(answer.input_tokens + answer.output_tokens)
    n, labels = len(ids), torch.cat([ids[1:], torch.tensor([-100])])
    if given is not None:
        given = torch.cat([given, given.new_full((1, *given.shape[1:]), -1)])
    bounds = torch.tensor([0, n], dtype=torch.int32)
    scores = model(ids, torch.arange(n), bounds, n, labels=labels, routed_experts=given)
    return scores.logprobs[answer.input_len - 1 : -1]


def answers_of(engine: InProcessEngine, *, together: int) -> list[ModelResponse]:
    """Answer to prompts of many lengths, three of which are asked several times."""
    wanted = [request(p, seed=i // 2, max_new_tokens=9) for p in prompts(3, 9, 1, 14, 6) for i in range(together)]
    return engine.generate(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_shared_prompts_decoding_and_preemption_record_what_a_plain_forward_chooses(family: str) -> None:
    model = make_model(torch.float64, family)
    # Prompts are read in pieces of 5 tokens, and 22 pages do not hold all answers at a time.
    engine = recording(model, prefill_tokens=5, n_pages=22)
    answers = answers_of(engine, together=3)
    assert engine.stats.shared_prompts and engine.stats.duplicate_tokens
    assert engine.stats.prefill_tokens > sum({tuple(a.input_tokens): a.input_len for a in answers}.values())
    for answer in answers:
        assert answer.routed_experts is not None and answer.routed_experts.dtype == np.uint8
        expected = chosen(model, answer.input_tokens + answer.output_tokens)
        assert torch.equal(recorded(answer), expected[:-1]), "a token's experts are not those that it used"


def near_ties(model: BaseArchonModel) -> tuple[BaseArchonModel, BaseArchonModel]:
    """Trainer and generator whose experts are pairs of nearly equal scores, of which one is ahead here, one there; a
    token uses an odd number of experts."""
    trainer, generator = copy.deepcopy(model), copy.deepcopy(model)
    random = torch.Generator().manual_seed(5)
    for side in (trainer, generator):
        for name, weight in side.named_parameters():
            if name.endswith("router.gate.weight"):
                weight[1::2] = weight[::2]
                weight.add_(1e-9 * torch.randn(weight.shape, generator=random, dtype=torch.float64))
    return trainer, generator


def test_the_first_ratio_is_1_where_rounding_would_choose_other_experts() -> None:
    trainer, generator = near_ties(make_model(torch.float64, "qwen3_moe", num_experts_per_tok=3))
    answers = answers_of(recording(generator), together=1)
    free, replayed, shifted = [], [], []
    for answer in answers:
        sampled = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        given = to_replay(torch.from_numpy(answer.routed_experts))
        with torch.no_grad():
            for found, experts in ((free, None), (replayed, given), (shifted, given.roll(1, 0))):
                found.append((logprobs(trainer, answer, experts) - sampled).exp().sub(1).abs().max())
    assert max(free) > 1e-3, "the scores are meant to be so close that rounding decides"
    assert max(replayed) <= FIRST_RATIO_FP64
    assert max(shifted) > 1e-3, "experts of the token before must not pass for a token's own"


def test_the_routers_gradient_is_that_of_live_scores_at_the_experts_given() -> None:
    """Where routers choose what they are given, replay changes no gradient; where not, it is not 0."""
    model = copy.deepcopy(make_model(torch.float64, "qwen3_moe")).requires_grad_(True)
    (answer,) = recording(model, weights="snapshot").generate([request(prompts(9)[0], seed=1, max_new_tokens=9)])
    given = to_replay(torch.from_numpy(answer.routed_experts))

    def gradients(experts: Tensor | None) -> dict[str, Tensor]:
        model.zero_grad()
        logprobs(model, answer, experts).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    free, same, other = gradients(None), gradients(given), gradients((given + 1) % 8)
    for name, grad in free.items():
        torch.testing.assert_close(same[name], grad, rtol=1e-10, atol=1e-12)
        if name.endswith("router.gate.weight"):
            assert other[name].abs().max() > 0 and not torch.allclose(other[name], grad)


async def test_after_a_change_of_weights_a_token_keeps_the_experts_that_its_next_token_was_sampled_with() -> None:
    old = make_model(torch.float64, "qwen3_moe")
    engine = recording(old, weights="snapshot", prefill_tokens=7)
    wanted = [request(prompts(11)[0], seed=seed, max_new_tokens=14) for seed in range(3)]
    tasks = [asyncio.create_task(engine.agenerate(r)) for r in wanted]
    await until_tokens(engine, 5)
    engine.update_weights(other_weights(old).items())
    late = asyncio.create_task(engine.agenerate(request(prompts(11)[0], seed=9, max_new_tokens=6)))
    for answer in await asyncio.gather(*tasks, late):
        ids = answer.input_tokens + answer.output_tokens
        before = [0] * (answer.input_len - 1)
        versions = torch.tensor([*(version := answer.output_versions)[:1] * len(before), *version])
        assert len({*version}) == (1 if answer.output_len == 6 else 2)
        by_version = torch.stack([chosen(old, ids)[:-1], chosen(engine.model, ids)[:-1]])
        expected = by_version[versions, torch.arange(len(versions))]
        assert not torch.equal(by_version[0], by_version[1])
        assert torch.equal(recorded(answer), expected)


def test_a_record_of_turns_keeps_the_experts_of_each_tokens_first_answer() -> None:
    record = TokenRecord.from_response(answered([5, 6], [7, 8], 1))  # 3 rows of ones
    record.observe([9])
    record.answer(answered([5, 6, 7, 8, 9], [4], 2))
    assert record.routed_experts is not None
    assert record.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2]
    assert len(record.input_ids) == 6, "the last token was not read"


def answered(prompt: list[int], output: list[int], expert: int) -> ModelResponse:
    experts = np.full((len(prompt) + len(output) - 1, 2, 1), expert, dtype=np.uint8)
    return ModelResponse(prompt, output, [-1.0] * len(output), [0] * len(output), routed_experts=experts)


def test_a_model_without_experts_has_none_to_record() -> None:
    with pytest.raises(ConfigError, match=r"no MoE layers.*leave generator.record_experts out"):
        recording(make_model())


def test_experts_are_recorded_only_where_it_is_asked_for() -> None:
    engine = make_engine(make_model(family="qwen3_moe"))
    assert engine.generate([request(prompts(3)[0], max_new_tokens=2)])[0].routed_experts is None
