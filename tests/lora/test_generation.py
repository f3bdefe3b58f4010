"""A generator of a model with adapters: the trainer's policy, a base that is shared, and pushes of adapters alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from archon.engine.engine import ArchonEngine
from archon.generation import InProcessEngine
from archon.models.base import BaseArchonModel
from archon.models.lora.model import add_lora, initializers, is_lora
from archon.models.lora.targets import LoRASize
from archon.rl.logprob_check import mismatch_limit
from archon.rl.weight_sync import build_inprocess_engine, engine_weights
from archon.schema.errors import RolloutError
from archon.tools.check.rank_pool import Pool
from tests.generation.models import make_engine as make_generator
from tests.generation.models import make_model, prompts, request, trainer_logprobs
from tests.lora.random_lora import matrices
from tests.lora.tiny import LORA, RANDOM, engine_of, train
from tests.tolerances import GENERATED_LOGPROB_FP32, GENERATED_LOGPROB_FP64

RAGGED = prompts(1, 3, 8, 17)


def lora_model(family: str, dtype: torch.dtype = torch.float64) -> BaseArchonModel:
    """A model with random adapters on every matrix."""
    model = copy.deepcopy(make_model(dtype, family))
    add_lora(model, dict.fromkeys(matrices(model), LoRASize(3, 5.0, False)), dtype)
    parameters = dict(model.named_parameters())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for name, fill in initializers(model, "random"):
            fill(parameters[name])
    return model.requires_grad_(False)


def worst_difference(generator: InProcessEngine, model: BaseArchonModel, temperature: float = 1.0) -> float:
    """The largest |Δ logprob| of sampled tokens between generator and trainer."""
    wanted = [request(prompt, temperature=temperature, max_new_tokens=12) for prompt in RAGGED]
    differences = []
    for answer in generator.generate(wanted):
        expected = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, temperature)
        given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        differences.append((given - expected.double()).abs().max())
    return float(torch.stack(differences).max())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_the_generator_computes_the_trainers_policy(family: str) -> None:
    """deepseek_v3 decodes with matrices that are absorbed in queries and values."""
    model = lora_model(family)
    generator = make_generator(model, page_size=3)
    assert worst_difference(generator, model, 0.7) < GENERATED_LOGPROB_FP64
    assert worst_difference(generator, make_model(torch.float64, family), 0.7) > 0.01


def test_the_base_is_the_trainers_memory_and_a_push_copies_adapters_alone(base: str) -> None:
    engine = engine_of(base)
    generator = build_inprocess_engine(engine, None, page_size=4, n_pages=100, eos_token_ids=())
    theirs, ours = dict(generator.model.named_parameters()), dict(engine.model.named_parameters())
    assert theirs.keys() == ours.keys()
    assert {name for name, p in theirs.items() if p.data_ptr() != ours[name].data_ptr()} == set(filter(is_lora, ours))
    train(engine, 3)
    assert worst_difference(generator, engine.full_model) > 0.01, "the trainer has moved on"
    generator.update_weights(engine_weights(engine), version=1)
    assert worst_difference(generator, engine.full_model) < GENERATED_LOGPROB_FP32
    loras = sum(p.numel() * 4 for name, p in ours.items() if is_lora(name))
    assert generator.stats.pushed_bytes == loras
    assert theirs.keys() == dict(generator.model.named_parameters()).keys()


def test_a_bfloat16_base_is_shared_too(base: str) -> None:
    engine = engine_of(base, dtype="bfloat16", lora=RANDOM)
    generator = build_inprocess_engine(engine, None, page_size=4, n_pages=100, eos_token_ids=(), dtype=torch.bfloat16)
    theirs, ours = dict(generator.model.named_parameters()), dict(engine.base_weights())
    assert all(theirs[name].data_ptr() == tensor.data_ptr() for name, tensor in ours.items())
    generator.update_weights(engine_weights(engine), version=1)
    assert generator.stats.pushed_bytes == sum(2 * tensor.numel() for _, tensor in engine.lora_weights())
    assert differences(engine, generator).mean() < mismatch_limit("bfloat16", 1.0)


def test_a_push_of_the_base_or_of_other_adapters_is_refused(base: str) -> None:
    engine = engine_of(base)

    def push(weights: Any) -> None:
        build_inprocess_engine(engine, None, page_size=4, n_pages=100, eos_token_ids=()).update_weights(weights)

    with pytest.raises(RolloutError, match=r"'tok_embeddings\.weight' is frozen"):
        push(engine.weights())
    with pytest.raises(RolloutError, match=r"1 weights are missing, for example 'layers\.0\.attention\.wq\.lora\.a'"):
        push(pair for pair in engine.lora_weights() if pair[0] != "layers.0.attention.wq.lora.a")
    other = engine_of(base, lora=LORA | {"rank": 2})
    with pytest.raises(RolloutError, match=r"is \(2, 48\), expected \(4, 48\)"):
        push(other.lora_weights())


def test_an_alias_gets_memory_of_its_own_for_adapters_that_are_sent(base: str) -> None:
    engine = engine_of(base, lora=RANDOM)
    generator = InProcessEngine.from_model(engine.full_model, page_size=4, n_pages=100)
    generator.update_weights(engine.lora_weights())
    assert worst_difference(generator, engine.full_model) < GENERATED_LOGPROB_FP32


def differences(engine: ArchonEngine, generator: InProcessEngine) -> torch.Tensor:
    """|Δ logprob| of sampled tokens between generator and engine; every rank of the layout calls it."""
    found = []
    for answer in generator.generate([request(prompt, seed=1, max_new_tokens=12) for prompt in RAGGED]):
        ids = torch.tensor([[*answer.input_tokens, *answer.output_tokens]])
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids).bool(), "loss_mask": torch.ones_like(ids)}
        expected = engine.forward_batch(batch)[0, len(answer.input_tokens) :]
        found.append((torch.tensor(answer.output_logprobs) - expected).abs())
    return torch.cat(found)


def pushed(base: str, layout: str) -> tuple[int, float]:
    """The bytes of a push, and the largest |Δ logprob| after it; every rank of the layout calls it."""
    engine: ArchonEngine = engine_of(base, layout=layout, dtype="float64")
    generator = build_inprocess_engine(engine, None, page_size=4, n_pages=100, eos_token_ids=(), dtype=torch.float64)
    train(engine, 2)
    generator.update_weights(engine_weights(engine), version=1)
    return generator.stats.pushed_bytes, float(differences(engine, generator).max())


@pytest.mark.slow
def test_every_layouts_generator_computes_the_trainers_policy(base: str, ranks: Pool) -> None:
    alone, _ = pushed(base, "d1")
    for layout in ("d2", "t2", "p2"):
        for bytes_of_push, difference in ranks.run(pushed, base, layout):
            assert bytes_of_push == alone
            assert difference < GENERATED_LOGPROB_FP32, layout
