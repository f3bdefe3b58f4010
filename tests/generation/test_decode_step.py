"""The decode step of CUDA, run on a CPU, against the generator that reads every token at once."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.decode_step import DecodeStep, UnreadTokens, round_up_rows
from archon.generation.lora import ServedMultiLoRALayer
from archon.generation.replica import named_weights
from archon.generation.sampler import (
    DeviceSamplingParams,
    SamplingParams,
    _sample_torch,
    counter_uniform,
    sample_on_device,
)
from archon.generation.sequence import Sequence
from archon.generation.types import ModelRequest, ModelResponse
from archon.models.base import BaseArchonModel
from archon.schema.errors import NotFiniteError
from tests.generation.models import VOCAB, make_engine, make_model, prompts, request, trainer_logprobs
from tests.generation.test_adapters import FAMILIES as LORA_FAMILIES
from tests.generation.test_adapters import asks, random_lora, serving
from tests.generation.test_engine import other_weights, until_tokens
from tests.generation.test_parity import FAMILIES
from tests.lora.test_generation import lora_model
from tests.tolerances import GENERATED_LOGPROB_FP64

SAMPLING: tuple[dict[str, Any], ...] = (
    {"greedy": True},
    {"seed": 1},
    {"seed": 2, "temperature": 0.6, "top_p": 0.8},
    {"seed": 3, "temperature": 1.4, "top_k": 9},
    {"seed": 4, "min_new_tokens": 6, "stop_token_ids": [*range(0, 48, 3)]},
    {"seed": 5, "stop_token_ids": [*range(0, VOCAB, 2)]},
)
"""One for each branch of the sampler; the last ones ban stop ids at first, or stop early."""


def mixed_requests(*lengths: int, new: int = 13) -> list[ModelRequest]:
    """Every kind of sampling for prompts of these lengths."""
    return [
        request(prompt, max_new_tokens=new, **SAMPLING[number % len(SAMPLING)])
        for number, prompt in enumerate(prompts(*lengths))
    ]


def assert_same(answers: list[ModelResponse], expected: list[ModelResponse]) -> None:
    assert [a.output_tokens for a in answers] == [a.output_tokens for a in expected]
    assert [a.stop_reason for a in answers] == [a.stop_reason for a in expected]
    for answer, reference in zip(answers, expected, strict=True):
        logprobs, wanted = (torch.tensor(a.output_logprobs, dtype=torch.float64) for a in (answer, reference))
        torch.testing.assert_close(logprobs, wanted, rtol=0, atol=GENERATED_LOGPROB_FP64)


def both(model: BaseArchonModel, requests: list[ModelRequest], **options: Any) -> InProcessEngine:
    """Check that both generators give the same answers; return the engine with the decode step."""
    engine = make_engine(model, static_decode=True, **options)
    assert_same(engine.generate(requests), make_engine(model, **options).generate(requests))
    return engine


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_of_every_family(name: str) -> None:
    family, options = FAMILIES[name]
    requests = mixed_requests(1, 2, 4, 9, 9, 17, 33, 8, 5)
    model = make_model(torch.float64, family, **options)
    both(model, requests, page_size=4, max_slots=5, prefill_tokens=11)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "deepseek_v3"])
@pytest.mark.parametrize("max_slots", [3, 12])
def test_preemption_and_forks(family: str, max_slots: int) -> None:
    """Few pages: answers to one prompt share them, part, and are preempted."""
    short, long = prompts(3, 10)
    requests = [
        request(prompt, max_new_tokens=20, **SAMPLING[seed % 4] | {"seed": seed})
        for seed in range(6)
        for prompt in (short, long)
    ]
    model = make_model(torch.float64, family)
    tight = both(model, requests, max_slots=max_slots, n_pages=13, prefill_tokens=9)
    roomy = both(model, requests, max_slots=max_slots, prefill_tokens=9)
    assert roomy.stats.shared_prompts
    if max_slots == 12:
        assert tight.stats.prefill_tokens > roomy.stats.prefill_tokens, "nothing was preempted"
    pool = tight._generator.scheduler.pool
    assert pool.n_free == pool.n_pages


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
async def test_tokens_in_flight_belong_to_the_weights_that_sampled_them(family: str) -> None:
    old = make_model(torch.float64, family)
    weights = other_weights(old)
    new = type(old)(old.args).double()
    new.load_state_dict(weights, strict=False)
    new.tie_weights()
    engine = make_engine(old, static_decode=True, version=3, prefill_tokens=6, weights="snapshot")
    tasks = [
        asyncio.create_task(engine.agenerate(request(p, seed=i, max_new_tokens=20)))
        for i, p in enumerate(prompts(5, 5, 9) + prompts(9))
    ]
    await until_tokens(engine, 7)
    engine.pause()
    assert any(sequence.unread for sequence in engine._generator.unfinished)
    engine.update_weights(iter(weights.items()), version=4)
    assert not any(sequence.unread for sequence in engine._generator.unfinished)
    engine.resume()
    for answer in await asyncio.gather(*tasks):
        assert set(answer.output_versions) == {3, 4} and answer.output_versions == sorted(answer.output_versions)
        logprobs = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        for version, model in ((3, old), (4, new)):
            mine = torch.tensor(answer.output_versions) == version
            expected = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, 1.0)
            torch.testing.assert_close(logprobs[mine], expected[mine], rtol=0, atol=GENERATED_LOGPROB_FP64)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_recorded_experts_are_those_of_the_computed_tokens(family: str) -> None:
    """With preemption, forks, and weights that change in between."""
    model = make_model(torch.float64, family)
    records = []
    for static_decode in (True, False):
        engine = make_engine(model, static_decode=static_decode, n_pages=22, prefill_tokens=5, weights="snapshot")
        engine.record_experts()
        requests = [request(p, seed=i, max_new_tokens=9) for i, p in enumerate(prompts(3, 9, 1, 14) * 2)]
        first = engine.generate(requests)
        engine.update_weights(iter((dict(named_weights(model)) | other_weights(model)).items()))
        records.append([answer.routed_experts for answer in (*first, *engine.generate(requests))])
    for record, expected in zip(*records, strict=True):
        assert record is not None and expected is not None
        assert np.array_equal(np.sort(record, -1), np.sort(expected, -1))


async def test_an_abort_leaves_other_answers_and_all_pages() -> None:
    model = make_model(torch.float64)
    kept_request = request(prompts(5)[0], seed=1, max_new_tokens=25)
    (alone,) = make_engine(model).generate([kept_request])
    engine = make_engine(model, static_decode=True)
    kept = asyncio.create_task(engine.agenerate(kept_request))
    gone = [asyncio.create_task(engine.agenerate(request(p, rid="b", max_new_tokens=40))) for p in prompts(4, 9)]
    await until_tokens(engine, 5)
    assert engine.abort("b") == 2
    # Pages of the aborted answers, which their last step still wrote to, serve the next requests.
    later = asyncio.create_task(engine.agenerate(request(prompts(12)[0], seed=2, max_new_tokens=9)))
    assert {answer.stop_reason for answer in await asyncio.gather(*gone)} == {"abort"}
    assert_same([await kept], [alone])
    (fresh,) = make_engine(model).generate([request(prompts(12)[0], seed=2, max_new_tokens=9)])
    assert_same([await later], [fresh])
    pool = engine._generator.scheduler.pool
    assert not engine._generator.scheduler.has_work and pool.n_free == pool.n_pages


def test_other_sequences_are_decoded_next_to_the_step() -> None:
    """Changed logits, likely tokens and many banned ids."""
    model = make_model(torch.float64)
    special: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"top_logprobs": 2},
        {"min_new_tokens": 4, "stop_token_ids": [*range(40)]},
    ]
    requests = [
        *mixed_requests(4, 9, 2, 6, 7, 7),
        *(
            request(p, seed=7, max_new_tokens=9, **gconfig)
            for p, gconfig in zip(prompts(5, 6, 7), special, strict=True)
        ),
    ]
    answers = [
        make_engine(model, static_decode=static_decode, max_slots=20).generate(requests)
        for static_decode in (True, False)
    ]
    assert_same(*answers)
    assert [len(a.output_top_logprobs) for a in answers[0]] == [len(a.output_top_logprobs) for a in answers[1]]


@pytest.mark.parametrize("family", LORA_FAMILIES)
def test_loras_of_several_requests(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Three LoRAs of different ranks and none, with preemption and forks."""
    launched = set[int | None]()
    launch = DecodeStep.launch

    def watched(self: DecodeStep, sequences: list[Sequence], *args: Any) -> UnreadTokens:
        launched.update(None if s.lora is None else s.lora.slot for s in sequences)
        return launch(self, sequences, *args)

    monkeypatch.setattr(DecodeStep, "launch", watched)
    model = make_model(torch.float64, family)
    loras = {f"a{seed}": random_lora(model, seed, rank=2 + 2 * seed) for seed in range(3)}
    requests = [
        asks(name, prompt, max_new_tokens=9, **SAMPLING[seed] | {"seed": seed})
        for prompt in prompts(3, 10)
        for name in (*loras, None)
        for seed in range(2)
    ]
    answers = []
    for static_decode in (True, False):
        engine = serving(model, loras, static_decode=static_decode, page_size=4, n_pages=20, max_slots=7)
        answers.append(engine.generate(requests))
    assert_same(*answers)
    assert launched == {0, 1, 2, None}
    assert engine.stats.shared_prompts
    assert engine.stats.prefill_tokens > sum(len(asked.input_ids) for asked in requests[::2]), "nothing was preempted"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_loras_that_come_and_go_leave_running_answers_as_they_are(family: str) -> None:
    """Loading moves the matrices of all slots, to more slots or to a higher rank; a free slot is used again."""
    model = make_model(torch.float64, family)
    loras = {name: random_lora(model, seed, rank=2 + seed) for seed, name in enumerate("abcd")}
    requests = [asks(name, p, seed=4, max_new_tokens=30) for p in prompts(3, 6) for name in ("a", None)]
    engine = serving(model, {"a": loras["a"]}, static_decode=True, max_slots=12)
    manager = engine._generator.lora_manager
    tasks = [asyncio.create_task(engine.agenerate(asked)) for asked in requests]
    counts, finished = list[int](), list[ModelResponse]()
    for tokens, names in ((3, "b"), (8, "cd")):
        await until_tokens(engine, tokens)
        for name in names:
            engine.load_lora(name, loras[name])
        requests += [asks(name, p, seed=4, max_new_tokens=5) for p in prompts(2, 5) for name in names]
        new = [asyncio.create_task(engine.agenerate(asked)) for asked in requests[-2 * len(names) :]]
        while len(engine._generator.scheduler.running) < len(tasks + new):  # noqa: ASYNC110
            await asyncio.sleep(0)
        for name in names:
            engine.unload_lora(name)
        counts.append(manager.slots.count)
        finished += await asyncio.gather(*new)
    assert counts == [2, 4]
    answers = [*await asyncio.gather(*tasks), *finished]
    assert_same(answers, serving(model, loras, max_slots=12).generate(requests))
    engine.unload_lora("a")
    assert manager.slots.count == 1
    layers = [module for module in engine.model.modules() if isinstance(module, ServedMultiLoRALayer)]
    assert layers and all(layer.stacked is None for layer in layers)


def test_a_slot_is_empty_for_a_lora_of_a_lower_rank() -> None:
    model = make_model(torch.float64)
    kept, before, after = (random_lora(model, seed, rank) for seed, rank in enumerate((6, 6, 2)))
    requests = [asks(name, p, greedy=True, max_new_tokens=6) for p in prompts(3, 6) for name in ("a", "b")]
    engine = serving(model, {"a": kept, "b": before}, static_decode=True)
    engine.update_lora("b", after)
    assert_same(engine.generate(requests), serving(model, {"a": kept, "b": after}).generate(requests))


@pytest.mark.parametrize(("family", "part"), [("qwen3", ""), ("qwen3", "1.attention.wv"), ("deepseek_v3", "")])
def test_a_lora_that_computes_no_numbers_fails_its_own_answers_alone(family: str, part: str) -> None:
    model = make_model(torch.float32, family)
    loras = {name: random_lora(model, seed) for seed, name in enumerate(("good", "bad"))}
    requests = [asks(name, p, seed=5, max_new_tokens=9) for p in prompts(3, 6, 9) for name in (None, "bad", "good")]
    engine = serving(model, loras, static_decode=True, max_slots=9, prefill_tokens=99)
    done: list[Sequence] = []
    generator = engine._generator
    for asked in requests:
        generator.submit(asked, done.append)
    generator.step()
    for name, layer in engine.model.named_modules():
        if isinstance(layer, ServedMultiLoRALayer) and part in name:
            layer.part("1").a.mul_(1e30)
            layer.part("1").b.mul_(1e30)
    while generator.scheduler.has_work:
        generator.step()
        assert all(x.isfinite().all() for group in generator.cache.groups for x in group.stored)
    expected = {
        id(asked): answer for asked, answer in zip(requests, serving(model, loras).generate(requests), strict=True)
    }
    assert len(done) == len(requests)
    for sequence in done:
        if sequence.lora is not None and sequence.lora.name == "bad":
            assert "LoRA 'bad' produces non-finite values; check its weights" in str(sequence.error)
        else:
            assert sequence.error is None and sequence.output == expected[id(sequence.request)].output_tokens


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_model_in_lora_training(family: str) -> None:
    """The step computes the replica's LoRA, unmerged."""
    model, plain = lora_model(family), make_model(torch.float64, family)
    requests = mixed_requests(2, 9, 9, 17)
    engine = both(model, requests, prefill_tokens=7)
    answers = [[a.output_tokens for a in e.generate(requests)] for e in (engine, make_engine(plain))]
    assert answers[0] != answers[1], "the LoRA changes nothing"


def test_the_host_reads_a_step_after_it_started_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    launch, read = DecodeStep.launch, UnreadTokens.read
    monkeypatch.setattr(DecodeStep, "launch", lambda *args: (calls.append("start"), launch(*args))[1])
    monkeypatch.setattr(UnreadTokens, "read", lambda self: (calls.append("read"), read(self))[1])
    make_engine(make_model(), static_decode=True).generate([request([1, 2], greedy=True, max_new_tokens=5)])
    # The first token is sampled with the prompt, and no step follows the token that reaches the limit.
    assert calls == ["start", "start", "read", "start", "read", "start", "read", "read"]


def test_padding_rows_write_to_the_scratch_page_and_state_only() -> None:
    model = make_model(torch.float64, "qwen3_5_text")
    engine = make_engine(model, static_decode=True, n_pages=30, max_slots=9)
    generator = engine._generator
    for seed, prompt in enumerate(prompts(3, 6, 9, 5, 7)):
        generator.submit(request(prompt, seed=seed, max_new_tokens=9), lambda _: None)
    generator.step()
    cache, sequences = generator.cache, generator.scheduler.running
    tensors = [tensor for group in cache.groups for tensor in group.stored]
    states = [tensor for layer in cache.states.layers.values() for tensor in layer]
    before = [x.clone() for x in (*tensors, *states)]
    generator.step()  # 5 sequences in 6 rows
    written = {sequence.pages[(sequence.computed - 1) // 4] for sequence in sequences}
    for x, old in zip(tensors, before[: len(tensors)], strict=True):
        pages = (x != old).transpose(0, 1).flatten(1).any(1)
        assert {*pages.nonzero().flatten().tolist()} == written | {cache.n_pages}
    for x, old in zip(states, before[len(tensors) :], strict=True):
        slots = (x != old).flatten(1).any(1)
        assert {*slots.nonzero().flatten().tolist()} == {s.state for s in sequences} | {cache.states.n_slots}


def test_weights_that_are_not_finite_fail_the_requests_and_leave_no_trace() -> None:
    model = make_model()
    wanted = request(prompts(9)[0], seed=1, max_new_tokens=9)
    (good,) = make_engine(model).generate([wanted])
    engine = make_engine(model, static_decode=True, weights="snapshot")
    generator = engine._generator
    generator.submit(request(prompts(3)[0], max_new_tokens=9), lambda _: None)
    generator.step()
    for parameter in engine.model.parameters():
        parameter.fill_(torch.nan)
    generator.step()
    with pytest.raises(NotFiniteError, match="rows \\[0\\] of 1 are not finite"):
        generator.step()
    generator.fail(NotFiniteError("planted"))
    engine.update_weights(model)
    assert engine.generate([wanted])[0].output_tokens == good.output_tokens


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_sampler_on_the_device_equals_that_of_the_host(sampling: str, dtype: torch.dtype) -> None:
    rows, vocab = 40, 300
    rng = np.random.default_rng(3)
    filtered = sampling == "filtered"
    params = SamplingParams(
        temperature=rng.uniform(0.3, 2, rows),
        greedy=np.ones(rows, dtype=bool) if sampling == "greedy" else rng.random(rows) < 0.2,
        top_p=rng.choice([1.0, 0.4, 0.9], rows) if filtered else np.ones(rows),
        top_k=rng.choice([0, 1, 7, 1000], rows) if filtered else np.zeros(rows, dtype=np.int64),
        seed=rng.integers(0, 2**63, rows).astype(np.uint64),
        index=rng.integers(0, 99, rows).astype(np.uint64),
        banned=[(row, sorted({*rng.integers(0, vocab, 3).tolist()})) for row in range(0, rows, 3)],
    )
    banned = torch.zeros(rows, 4, dtype=torch.int64)
    for row, ids in params.banned:
        banned[row] = torch.tensor(ids + ids[-1:] * (4 - len(ids)))
    on_device = DeviceSamplingParams(
        **{name: torch.from_numpy(getattr(params, name)) for name in ("temperature", "greedy", "top_p", "top_k")},
        uniform=torch.from_numpy(counter_uniform(params.seed, params.index)),
        bans=torch.arange(rows) % 3 == 0,
        banned=banned,
    )
    logits = torch.randn(rows, vocab, dtype=torch.float64).to(dtype) * 3
    tokens, logprobs = sample_on_device(logits, on_device, sampling)  # type: ignore[arg-type]
    expected_tokens, expected_logprobs = _sample_torch(logits, params)
    assert torch.equal(tokens, expected_tokens) and torch.equal(logprobs, expected_logprobs)


def test_few_numbers_of_rows_serve_all() -> None:
    assert [round_up_rows(count) for count in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 100, 192, 193, 256)] == [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 128, 192, 256, 256,
    ]  # fmt: skip
