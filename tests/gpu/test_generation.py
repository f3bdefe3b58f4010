"""The generator on a GPU: greedy answers of every family are the CPU's, and logprobs those of a whole forward."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.generation.models import make_engine, make_model, prompts, request, trainer_logprobs
from tests.generation.test_engine import other_weights
from tests.generation.test_parity import FAMILIES
from tests.lora.random_lora import merged, random_lora
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


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3", "qwen3_5_text"])
def test_captured_steps_follow_updates_in_place(family: str) -> None:
    """Experts in float32 run without graphs: their grouped matmuls read sizes on the host."""
    model = copy.deepcopy(make_model(family=family)).cuda()
    engine = make_engine(model, page_size=4, weights="snapshot")
    wanted = [request(p, seed=seed, max_new_tokens=24) for seed, p in enumerate(RAGGED * 3)]
    engine.generate(wanted)
    step = engine._generator._decode_step
    assert step is not None
    graphs = dict(step._graphs)
    assert bool(graphs) == (family in ("qwen3", "qwen3_5_text"))
    new = copy.deepcopy(model)
    new.load_state_dict(other_weights(model), strict=False)
    new.tie_weights()
    engine.update_weights(new)
    for answer in engine.generate(wanted):
        trained = trainer_logprobs(new, answer.input_tokens, answer.output_tokens, 1.0)
        torch.testing.assert_close(
            torch.tensor(answer.output_logprobs), trained, rtol=0, atol=4 * GENERATED_LOGPROB_FP32
        )
    assert all(step._graphs[key] is graph for key, graph in graphs.items())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_graphs_of_a_bfloat16_replica_give_the_answers_of_operators(family: str) -> None:
    model, differences = copy.deepcopy(make_model(torch.bfloat16, family)).cuda(), []
    wanted = [request(p, seed=1, max_new_tokens=24, temperature=0.8, top_p=0.9) for p in RAGGED]
    engines = [make_engine(model, page_size=16, static_decode=static_decode) for static_decode in (True, False)]
    for one, other in zip(*(engine.generate(wanted) for engine in engines), strict=True):
        pairs = zip(one.output_tokens, other.output_tokens, strict=False)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), 24)
        differences += [
            abs(a - b) for a, b in zip(one.output_logprobs[:same], other.output_logprobs[:same], strict=True)
        ]
    assert len(differences) > 50 and sum(differences) / len(differences) <= GENERATED_LOGPROB_BF16


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_text"])
def test_steps_with_loras_follow_updates_in_place(family: str) -> None:
    model = copy.deepcopy(make_model(family=family)).cuda()
    loras = {f"a{seed}": random_lora(model, seed, rank=2 + seed) for seed in range(3)}
    engine = make_engine(model, page_size=4)
    for name, lora in loras.items():
        engine.load_lora(name, lora)
    wanted = [request(p, seed=seed, max_new_tokens=24) for seed, p in enumerate(RAGGED * 3)]
    for asked, name in zip(wanted, (*loras, None) * len(wanted), strict=False):
        asked.lora = name
    step = engine._generator._decode_step
    assert step is not None
    for _ in range(2):
        graphs = dict(step._graphs)
        models = {None: model} | {name: merged(model, lora) for name, lora in loras.items()}
        for asked, answer in zip(wanted, engine.generate(wanted), strict=True):
            trained = trainer_logprobs(models[asked.lora], answer.input_tokens, answer.output_tokens, 1.0)
            torch.testing.assert_close(
                torch.tensor(answer.output_logprobs), trained, rtol=0, atol=4 * GENERATED_LOGPROB_FP32
            )
        assert graphs.items() <= step._graphs.items()
        loras["a1"] = random_lora(model, 9, rank=3)
        engine.update_lora("a1", loras["a1"])
