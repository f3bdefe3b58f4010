"""The states of delta nets while sequences fork from a prompt, wait for a slot, are preempted, and get new weights."""

from __future__ import annotations

import pytest
import torch

from archon.generation.sequence import Sequence
from archon.models.base import BaseArchonModel
from tests.generation.models import (
    greedy_reference,
    make_engine,
    make_model,
    make_pair,
    prompts,
    request,
    trainer_logprobs,
)
from tests.tolerances import GENERATED_LOGPROB_FP64

FAMILY = "qwen3_5_text"
LONG, SHORT = prompts(21, 6)


@pytest.mark.parametrize("max_slots", [2, 4, 12])
@pytest.mark.parametrize("n_pages", [13, 400])
@pytest.mark.parametrize("prefill_tokens", [5, 100])
def test_forks_of_a_prompt_answer_as_alone(max_slots: int, n_pages: int, prefill_tokens: int) -> None:
    """Sampled answers differ from token to token, so each fork's state soon is its own."""
    model = make_model(torch.float64, FAMILY)
    wanted = [request(prompt, seed=seed, max_new_tokens=15) for seed in range(5) for prompt in (LONG, SHORT)]
    engine = make_engine(model, max_slots=max_slots, n_pages=n_pages, page_size=4, prefill_tokens=prefill_tokens)
    answers = engine.generate(wanted)
    if n_pages == 400 and max_slots > 2:
        assert engine.stats.shared_prompts > 0
    assert len({tuple(answer.output_tokens) for answer in answers}) > 5
    for answer in answers:
        trained = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, 1.0)
        given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP64)


@pytest.mark.parametrize("family", [FAMILY, "granitemoehybrid"])
def test_greedy_forks_are_transformers_answers(family: str) -> None:
    hf, model = make_pair(family, torch.float64)
    engine = make_engine(model, max_slots=3, page_size=4)
    answers = engine.generate([request(LONG, greedy=True, max_new_tokens=13) for _ in range(8)])
    assert {tuple(answer.output_tokens) for answer in answers} == {tuple(greedy_reference(hf, LONG, 13))}
    assert engine.stats.shared_prompts == 7


def test_an_answer_that_was_anothers_duplicate_goes_on_from_a_state_of_its_own() -> None:
    """While greedy forks agree only one of them is computed; the shortest comes first, and the others outlive it."""
    hf, model = make_pair(FAMILY, torch.float64)
    engine = make_engine(model, max_slots=4, page_size=4)
    lengths = (4, 13, 8)
    answers = engine.generate([request(LONG, greedy=True, max_new_tokens=length) for length in lengths])
    assert engine.stats.duplicate_tokens > 0
    wanted = greedy_reference(hf, LONG, max(lengths))
    for answer, length in zip(answers, lengths, strict=True):
        assert answer.output_tokens == wanted[:length]
        trained = trainer_logprobs(model, LONG, answer.output_tokens, 1.0)
        given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP64)


def test_a_prompt_asked_for_again_after_its_first_step_starts_from_its_state() -> None:
    """Its first answer had no followers when its prompt was computed, so only the prompt's own state was copied."""
    model = make_model(torch.float64, FAMILY)
    engine = make_engine(model, max_slots=4, page_size=4)
    generator, done = engine._generator, list[Sequence]()
    for seed in range(3):
        generator.submit(request(LONG, seed=seed, max_new_tokens=8), done.append)
        generator.step()
    while len(done) < 3:
        generator.step()
    assert engine.stats.shared_prompts == 2
    for sequence in done:
        trained = trainer_logprobs(model, LONG, sequence.output, 1.0)
        given = torch.tensor(sequence.response().output_logprobs, dtype=torch.float64)
        torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP64)


def check_answers(model: BaseArchonModel, done: list[Sequence]) -> None:
    """Sampled logprobs are those of a packed forward."""
    for sequence in done:
        trained = trainer_logprobs(model, sequence.prompt, sequence.output, 1.0)
        given = torch.tensor(sequence.response().output_logprobs, dtype=torch.float64)
        torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP64)


def test_a_prompt_that_is_read_again_with_its_answer_gives_its_own_state() -> None:
    """After a restart the leader has answered tokens; others start from the state after the prompt, not after those."""
    model = make_model(torch.float64, FAMILY)
    engine = make_engine(model, max_slots=4, page_size=4)
    generator, done = engine._generator, list[Sequence]()
    generator.submit(request(LONG, seed=0, max_new_tokens=8), done.append)
    for _ in range(4):
        generator.step()
    generator.restart(1)
    for seed in (1, 2):
        generator.submit(request(LONG, seed=seed, max_new_tokens=8), done.append)
    while len(done) < 3:
        generator.step()
    assert engine.stats.shared_prompts == 2
    check_answers(model, done)


def test_a_prompt_of_one_token_starts_without_a_state() -> None:
    """It is read as a decoding row, in the slot of an answer that has ended."""
    model = make_model(torch.float64, FAMILY)
    engine = make_engine(model, max_slots=1, page_size=4)
    done = list[Sequence]()
    for prompt in (LONG, LONG[:1], SHORT, SHORT[:1]):
        engine._generator.submit(request(prompt, seed=3, max_new_tokens=6), done.append)
    while len(done) < 4:
        engine._generator.step()
    check_answers(model, done)


def test_a_cleared_cache_has_no_states() -> None:
    model = make_model(torch.float64, FAMILY)
    cache = make_engine(model, max_slots=2, page_size=4)._generator.cache
    for states in cache.states.layers.values():
        for state in states:
            state.fill_(torch.nan)
    cache.clear()
    assert cache.states.layers
    assert not any(state.any() for states in cache.states.layers.values() for state in states)
