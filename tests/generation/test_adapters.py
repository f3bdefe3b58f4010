"""Several adapters in one generator: each request is answered as if its own were the only one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from archon.checkpoint.peft.export import LoRAWeights
from archon.generation import InProcessEngine
from archon.generation.prompt_scores import PromptScores
from archon.generation.types import ModelRequest, ModelResponse
from archon.models.base import BaseArchonModel
from archon.models.layers.linear import Linear
from archon.models.lora.model import add_lora
from archon.models.lora.targets import LoRASize
from archon.schema.errors import NotFiniteError, RolloutError, UnknownLoRAError
from tests.generation.models import make_engine, make_model, prompts, request, trainer_logprobs
from tests.lora.random_lora import merged, random_lora
from tests.tolerances import GENERATED_LOGPROB_BF16, GENERATED_LOGPROB_FP32, GENERATED_LOGPROB_FP64

RAGGED = prompts(1, 2, 5, 9, 17, 33)
# A tied head, experts, latents, a state, and experts with biases next_to sliding windows.
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss")


def asks(lora: str | None, prompt: list[int], **gconfig: Any) -> ModelRequest:
    asked = request(prompt, **gconfig)
    asked.lora = lora
    return asked


def serving(model: BaseArchonModel, loras: Mapping[str, LoRAWeights], **options: Any) -> InProcessEngine:
    engine = make_engine(model, **{"page_size": 3, "n_pages": 400, "prefill_tokens": 7} | options)
    for name, lora in loras.items():
        engine.load_lora(name, lora)
    return engine


def worst_difference(answers: list[ModelResponse], models: list[BaseArchonModel], temperature: float) -> float:
    """The largest |Δ logprob| of sampled tokens between generator and the trainer's forward of each one's model."""
    differences = []
    for answer, model in zip(answers, models, strict=True):
        expected = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, temperature)
        given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        differences.append((given - expected.double()).abs().max())
    return float(torch.stack(differences).max())


# One operator after another, and the decode step of CUDA.
BOTH = pytest.mark.parametrize("static_decode", [False, True], ids=["operators", "step"])


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_served_together_each_answer_is_that_of_its_adapter_alone(family: str, count: int) -> None:
    """Rank differ, prompts are the same for all adapters, and fewer slots than requests make them arrive in turn."""
    model = make_model(torch.float64, family)
    loras = {f"a{seed}": random_lora(model, seed, rank=2 + seed % 3) for seed in range(count)}
    models = {None: model} | {name: merged(model, lora) for name, lora in loras.items()}
    chosen = RAGGED[1::2]
    together = [asks(name, prompt, greedy=True, max_new_tokens=6) for prompt in chosen for name in models]
    answers = serving(model, loras, max_slots=5).generate(together)
    whose = [models[asked.lora] for asked in together]
    assert worst_difference(answers, whose, 1.0) < GENERATED_LOGPROB_FP64
    for name, lora in [*loras.items()][-2:]:
        own = [asked for asked in together if asked.lora == name]
        alone = serving(model, {name: lora}).generate(own)
        assert [answer.output_tokens for answer in alone] == [
            answer.output_tokens for answer, asked in zip(answers, together, strict=True) if asked.lora == name
        ]
    assert len({tuple(answer.output_tokens) for answer in answers}) > len(chosen), "adapters change answers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_ratio_of_sampled_answers_is_one(dtype: torch.dtype) -> None:
    model = make_model()
    loras = {f"a{seed}": random_lora(model, seed) for seed in range(3)}
    engine = serving(model, loras, dtype=dtype)
    together = [asks(name, prompt, temperature=0.7, max_new_tokens=16) for prompt in RAGGED for name in loras]
    answers = engine.generate(together)
    whole = {name: merged(make_model(dtype), lora) for name, lora in loras.items()}
    differences = []
    for answer, asked in zip(answers, together, strict=True):
        assert asked.lora is not None
        expected = trainer_logprobs(whole[asked.lora], answer.input_tokens, answer.output_tokens, 0.7)
        differences.append((torch.tensor(answer.output_logprobs) - expected).abs())
    if dtype == torch.float32:
        assert torch.cat(differences).max() < GENERATED_LOGPROB_FP32
    else:
        assert torch.cat(differences).mean() < GENERATED_LOGPROB_BF16


def test_answers_of_one_prompt_share_its_pages_within_an_adapter_alone() -> None:
    model = make_model(torch.float64)
    loras = {f"a{seed}": random_lora(model, seed) for seed in range(2)}
    engine = serving(model, loras, page_size=4, prefill_tokens=100)
    owners = [None, "a0", "a1"]
    together = [asks(name, RAGGED[5], seed=n, max_new_tokens=6) for n in range(4) for name in owners]
    answers = engine.generate(together)
    assert engine.stats.shared_prompts == 3 * len(owners)
    assert engine.stats.prefill_tokens == len(owners) * len(RAGGED[5])
    models = {None: model} | {name: merged(model, lora) for name, lora in loras.items()}
    assert worst_difference(answers, [models[asked.lora] for asked in together], 1.0) < GENERATED_LOGPROB_FP64


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_scored_with_its_adapter(family: str) -> None:
    model = make_model(torch.float64, family)
    lora = random_lora(model, 1)
    engine = serving(model, {"one": lora})
    for name, whole in ((None, model), ("one", merged(model, lora))):
        expected = make_engine(whole).prompt_logprobs(RAGGED[5], 0.7)
        trained = trainer_logprobs(whole, RAGGED[5][:1], RAGGED[5][1:], 0.7)
        assert (torch.tensor(expected, dtype=torch.float64) - trained).abs().max() < GENERATED_LOGPROB_FP64
        given = engine.prompt_logprobs(RAGGED[5], 0.7, name)
        difference = torch.tensor(given, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
        assert difference.abs().max() < GENERATED_LOGPROB_FP64
    with pytest.raises(UnknownLoRAError, match="unknown LoRA 'two'; loaded: 'one'"):
        engine.prompt_logprobs(RAGGED[5], 0.7, "two")


async def test_scores_next_to_answers_are_of_one_set_of_weights() -> None:
    model = make_model()
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.norm.weight.mul_(1.5)
    lora, other = random_lora(model, 1), random_lora(model, 2)
    engine = serving(model, {"one": lora})
    tokens = RAGGED[5]

    async def begin(name: str | None = None) -> asyncio.Task[PromptScores]:
        scoring = asyncio.create_task(engine.ascore_prompt(tokens, lora=name))
        await asyncio.sleep(0)  # a thread computes now
        return scoring

    answer = asyncio.create_task(engine.agenerate(asks("one", RAGGED[4], max_new_tokens=100)))
    assert (await engine.ascore_prompt(tokens, lora="one")) == engine.score_prompt(tokens, lora="one")
    scoring = await begin("one")
    engine.update_lora("one", other)
    assert (await scoring) == serving(model, {"one": other}).score_prompt(tokens, lora="one")
    scoring = await begin()
    engine.update_weights(changed)
    assert (await scoring) == make_engine(changed).score_prompt(tokens)
    scoring = await begin("one")
    engine.abort()
    engine.unload_lora("one")
    with pytest.raises(UnknownLoRAError, match="unknown LoRA 'one'"):
        await scoring
    assert (await answer).stop_reason == "abort"


def test_requests_of_the_model_itself_are_bitwise_the_same_beside_loaded_adapters() -> None:
    model = make_model()
    wanted = [request(prompt, seed=3, max_new_tokens=12) for prompt in RAGGED]
    alone, next_to = make_engine(model), make_engine(model)
    before = next_to.fingerprint
    for seed in range(3):
        next_to.load_lora(f"a{seed}", random_lora(model, seed))
    for one, other in zip(alone.generate(wanted), next_to.generate(wanted), strict=True):
        assert (one.output_tokens, one.output_logprobs) == (other.output_tokens, other.output_logprobs)
    next_to.update_weights(model)
    assert next_to.fingerprint == before == alone.fingerprint


async def until_tokens(engine: InProcessEngine, count: int) -> None:
    """Let the loop turn until every running answer has `count` tokens."""
    running = engine._generator.scheduler.running
    while not running or any(len(sequence.output) < count for sequence in running):  # noqa: ASYNC110
        await asyncio.sleep(0)


@BOTH
async def test_an_adapter_updated_in_place_starts_its_own_answers_anew_and_no_others(static_decode: bool) -> None:
    model = make_model(torch.float64)
    old, new, other = (random_lora(model, seed) for seed in range(3))
    engine = serving(model, {"a": old, "b": other}, page_size=4, prefill_tokens=100, static_decode=static_decode)
    together = [asks(name, prompt, seed=1, max_new_tokens=20) for prompt in RAGGED[2:4] for name in (None, "a", "b")]
    tasks = [asyncio.create_task(engine.agenerate(asked)) for asked in together]
    await until_tokens(engine, 6)
    cached = {s.prompt_key: s.computed for s in engine._generator.scheduler.running}
    engine.update_lora("a", new, version=7)
    for sequence in engine._generator.unfinished:
        own = sequence.lora is not None and sequence.lora.name == "a"
        assert sequence.computed == (0 if own else cached[sequence.prompt_key])
    answers = await asyncio.gather(*tasks)
    untouched = serving(model, {"b": other}).generate([asked for asked in together if asked.lora != "a"])
    kept = [answer for answer, asked in zip(answers, together, strict=True) if asked.lora != "a"]
    assert [answer.output_tokens for answer in kept] == [answer.output_tokens for answer in untouched]
    assert {version for answer in kept for version in answer.output_versions} == {0}
    models = {0: merged(model, old), 7: merged(model, new)}
    for answer, asked in zip(answers, together, strict=True):
        if asked.lora != "a":
            continue
        assert {*answer.output_versions} == {0, 7}
        for version, whole in models.items():
            expected = trainer_logprobs(whole, answer.input_tokens, answer.output_tokens, 1.0)
            own = torch.tensor([given == version for given in answer.output_versions])
            given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
            assert (given - expected)[own].abs().max() < GENERATED_LOGPROB_FP64
    engine.update_lora("a", old)
    assert engine.loras["a"].version == 8


@BOTH
async def test_unloading_lets_unfinished_answers_end_with_the_weights_that_they_began_with(static_decode: bool) -> None:
    model = make_model(torch.float64)
    old, new = random_lora(model, 0), random_lora(model, 1)
    engine = serving(model, {"a": old}, page_size=4, prefill_tokens=100, max_slots=3, static_decode=static_decode)
    asked = [asks("a", prompt, greedy=True, max_new_tokens=12) for prompt in RAGGED[2:]]
    tasks = [asyncio.create_task(engine.agenerate(one)) for one in asked]
    await until_tokens(engine, 4)
    assert engine._generator.scheduler.waiting, "some have not begun"
    engine.unload_lora("a")
    assert not engine.loras
    with pytest.raises(UnknownLoRAError, match="unknown LoRA 'a'; loaded: none"):
        await engine.agenerate(asked[0])
    engine.load_lora("a", new)
    later = [asyncio.create_task(engine.agenerate(one)) for one in asked]
    before, after = await asyncio.gather(*tasks), await asyncio.gather(*later)
    for answers, lora in ((before, old), (after, new)):
        alone = serving(model, {"a": lora}).generate(asked)
        assert [answer.output_tokens for answer in answers] == [answer.output_tokens for answer in alone]
    engine.unload_lora("a")
    assert not held(engine), "weights of adapters that nobody uses are freed"
    with pytest.raises(UnknownLoRAError, match="'a'"):
        engine.unload_lora("a")


def held(engine: InProcessEngine) -> int:
    """How many parts of adapters the layers hold."""
    several = [m.lora for m in engine.model.modules() if isinstance(m, Linear) and m.lora is not None]
    return sum(len(loras.parts) for loras in several)  # type: ignore[arg-type]


@BOTH
async def test_aborted_and_failed_requests_let_go_of_their_adapter(static_decode: bool) -> None:
    model = make_model()
    engine = serving(model, {"a": random_lora(model, 0)}, static_decode=static_decode)
    task = asyncio.create_task(engine.agenerate(asks("a", RAGGED[3], max_new_tokens=50)))
    await until_tokens(engine, 2)
    engine.unload_lora("a")
    assert held(engine)
    engine.abort()
    await task
    assert not held(engine)
    engine.load_lora("a", random_lora(model, 0))
    task = asyncio.create_task(engine.agenerate(asks("a", RAGGED[3], max_new_tokens=50)))
    await until_tokens(engine, 2)
    engine.unload_lora("a")
    with pytest.raises(RolloutError):
        engine.update_weights({}.items())
    with pytest.raises(RolloutError, match="are missing"):
        await task
    assert not held(engine)


def test_what_cannot_be_loaded_is_refused_and_changes_nothing() -> None:
    model = make_model()
    lora = random_lora(model, 0)
    engine = serving(model, {"a": lora})
    parts = held(engine)
    with pytest.raises(RolloutError, match="LoRA 'a' is already loaded"):
        engine.load_lora("a", lora)
    engine.max_loras = 1
    with pytest.raises(RolloutError, match="1 LoRAs are loaded, the maximum; unload one"):
        engine.load_lora("b", lora)
    engine.max_loras = 9
    wrong = replace(lora, sizes={name: LoRASize(2, 6.0, False) for name in lora.sizes})
    other = random_lora(make_model(family="qwen3_moe"), 0)
    for weights, message in ((wrong, r"has shapes \(3, 24\) and \(32, 3\); expected \(2, 24\)"), (other, "not have")):
        with pytest.raises(RolloutError, match=message):
            engine.load_lora("b", weights)
        with pytest.raises(RolloutError, match=message):
            engine.update_lora("a", weights)
    (name, first), *_ = lora.tensors.items()
    for value in (torch.nan, torch.inf, 1e300):
        odd = replace(lora, tensors=lora.tensors | {name: first * value})
        with pytest.raises(RolloutError, match=r"has values that are not finite in torch\.float32"):
            engine.load_lora("b", odd)
        with pytest.raises(RolloutError, match=r"has values that are not finite in torch\.float32"):
            engine.update_lora("a", odd)
    assert [*engine.loras] == ["a"]
    assert held(engine) == parts


def test_a_model_with_an_adapter_of_its_own_takes_no_others() -> None:
    model = make_model()
    lora, engine = random_lora(model, 0), make_engine(model)
    add_lora(engine.model, lora.sizes, torch.float32)
    with pytest.raises(RolloutError, match="a model in LoRA training"):
        engine.load_lora("a", lora)


def test_counts_are_kept_by_adapter() -> None:
    model = make_model()
    engine = serving(model, {f"a{seed}": random_lora(model, seed) for seed in range(2)})
    engine.generate([asks(name, prompt, max_new_tokens=5) for prompt in RAGGED[:3] for name in ("a0", None)])
    busy, idle = engine.loras.values()
    assert (busy.requests, busy.prompt_tokens, busy.answer_tokens, busy.unfinished) == (3, 8, 15, 0)
    assert (idle.requests, idle.prompt_tokens, idle.answer_tokens, idle.unfinished) == (0, 0, 0, 0)


def broken(lora: LoRAWeights, part: str = "") -> LoRAWeights:
    """An adapter with finite weights, those of `part` so large that what they compute is not finite in float32."""
    tensors = {name: x * 1e30 if part in name else x for name, x in lora.tensors.items()}
    assert any(x.abs().max() > 1e28 for x in tensors.values())
    return replace(lora, tensors=tensors)


@BOTH
@pytest.mark.parametrize(
    ("family", "part"), [("qwen3", ""), ("qwen3", "1.attention.wv"), ("deepseek_v3", ""), ("qwen3_next", "")]
)
async def test_an_adapter_that_computes_no_numbers_fails_its_own_answers_alone(
    static_decode: bool, family: str, part: str
) -> None:
    """Its pages, with what it computed, pass to other sequences, and those read neighboring ones masked."""
    model = make_model(torch.float32, family)
    good, bad = random_lora(model, 0), broken(random_lora(model, 1), part)
    options: dict[str, Any] = {"max_slots": 6, "n_pages": 40, "prefill_tokens": 9}
    engine = serving(model, {"bad": bad, "good": good}, **options, static_decode=static_decode)
    names = ("bad", None, "good", "bad")
    together = [asks(name, prompt, seed=5, max_new_tokens=7) for prompt in RAGGED[:5] for name in names]
    for _ in range(2):
        answers = await asyncio.gather(*map(engine.agenerate, together), return_exceptions=True)
        assert {type(a) for a, asked in zip(answers, together, strict=True) if asked.lora == "bad"} == {NotFiniteError}
        kept = [asked for asked in together if asked.lora != "bad"]
        expected = iter(serving(model, {"good": good}, **options).generate(kept))
        for answer, asked in zip(answers, together, strict=True):
            if asked.lora == "bad":
                assert "LoRA 'bad' produces non-finite values" in str(answer)
            else:
                assert isinstance(answer, ModelResponse), answer
                assert answer.output_tokens == next(expected).output_tokens
    assert engine.loras["bad"].unfinished == 0
    assert all(tensors.keys.isfinite().all() for tensors in engine._generator.cache.layers.values())


async def test_unloaded_adapters_count_toward_the_limit_until_their_answers_end() -> None:
    model = make_model()
    engine = serving(model, {"a": random_lora(model, 0)})
    engine.max_loras = 1
    task = asyncio.create_task(engine.agenerate(asks("a", RAGGED[3], max_new_tokens=50)))
    await until_tokens(engine, 2)
    engine.unload_lora("a")
    message = "1 LoRAs are loaded, the maximum, 1 of them until the last answer with them ends"
    with pytest.raises(RolloutError, match=message):
        engine.load_lora("b", random_lora(model, 1))
    await task
    engine.load_lora("b", random_lora(model, 1))
    assert [*engine.loras] == ["b"]
