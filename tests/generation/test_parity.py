"""The generator against transformers and against the trainer's own forward."""

from __future__ import annotations

import pytest
import torch

from archon.generation import InProcessEngine
from archon.models.qwen3 import Qwen3Model
from tests.generation.models import (
    greedy_reference,
    make_engine,
    make_model,
    make_pair,
    prompts,
    request,
    trainer_logprobs,
)
from tests.tolerances import GENERATED_LOGPROB_BF16, GENERATED_LOGPROB_FP32, GENERATED_LOGPROB_FP64

RAGGED = prompts(1, 2, 3, 4, 5, 8, 9, 17, 33)

FAMILIES = {
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", {"layer_types": ("sliding_attention", "full_attention", "sliding_attention")}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-wide": ("deepseek_v3", {"q_lora_rank": None, "v_head_dim": 20, "attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "hy_v3": ("hy_v3", {}),
    "kimi_k2": ("kimi_k2", {}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 6}),
    "gemma3_text-uncapped": ("gemma3_text", {"sliding_window": 6, "final_logit_softcapping": None}),
    "granite": ("granite", {}),
    "granite_swa": ("granite_swa", {"sliding_window": 6}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "glm4_moe": ("glm4_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "llama": ("llama", {"attention_bias": True}),
    "ministral3": ("ministral3", {}),
    "minimax_m2": ("minimax_m2", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "nemotron_h": ("nemotron_h", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 6, "layer_types": ("sliding_attention", "full_attention", "sliding_attention")},
    ),
    "phi3": ("phi3", {"sliding_window": 6, "partial_rotary_factor": 2 / 3, "pad_token_id": None}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "mixtral-window": ("mixtral", {"sliding_window": 6}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-window": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 6}),
    "qwen3": ("qwen3", {}),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": (1, 0, 1), "use_sliding_window": True, "sliding_window": 6}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen2-mha": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6, "norm_topk_prob": False}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers_generate_whatever_the_pages(name: str) -> None:
    family, options = FAMILIES[name]
    # float64: a near tie of two tokens must not decide the test.
    hf, model = make_pair(family, torch.float64, **options)
    expected = [greedy_reference(hf, prompt, 13) for prompt in RAGGED]
    for page_size in (1, 3, 4, 64):
        engine = make_engine(model, page_size=page_size, n_pages=400, max_slots=4, prefill_tokens=11)
        answers = engine.generate([request(prompt, greedy=True, max_new_tokens=13) for prompt in RAGGED])
        assert [answer.output_tokens for answer in answers] == expected, f"pages of {page_size}"
        assert {answer.stop_reason for answer in answers} == {"length"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gemma3_text", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
)
def test_first_step_ratio_is_one(family: str, temperature: float) -> None:
    """The trainer's forward gives every generated token the logprob it was sampled with."""
    model = make_model(family=family)
    engine = make_engine(model, page_size=4)
    wanted = [request(prompt, temperature=temperature, max_new_tokens=24) for prompt in RAGGED * 3]
    for answer in engine.generate(wanted):
        trained = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, temperature)
        given = torch.tensor(answer.output_logprobs)
        torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP32)


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_of_a_float64_model_are_float64(name: str) -> None:
    family, options = FAMILIES[name]
    model = make_model(torch.float64, family, **options)
    engine = make_engine(model, page_size=3, prefill_tokens=7)
    for answer in engine.generate([request(prompt, temperature=0.7, max_new_tokens=24) for prompt in RAGGED]):
        trained = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, 0.7)
        given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP64)


def test_rows_beside_a_sequence_do_not_disturb_its_experts() -> None:
    """An answer does not depend on who decodes next to it, nor on the padding of a step up to a round number of
    rows."""
    model = make_model(torch.float64, "qwen3_moe")
    wanted = request(RAGGED[4], seed=3, max_new_tokens=20)
    (alone,) = make_engine(model, max_slots=1).generate([wanted])
    for others in (1, 16):
        crowd = [request(prompt, seed=9, max_new_tokens=20 - n) for n, prompt in enumerate((RAGGED * 2)[:others])]
        answer, *_ = make_engine(model, max_slots=20).generate([wanted, *crowd])
        assert answer.output_tokens == alone.output_tokens
        given, wanted_logprobs = torch.tensor(answer.output_logprobs), torch.tensor(alone.output_logprobs)
        torch.testing.assert_close(given, wanted_logprobs, rtol=0, atol=GENERATED_LOGPROB_FP64)


def test_a_bfloat16_replica_follows_a_bfloat16_model() -> None:
    """Score and logprobs are float32 inside: what differs is the rounding of hidden states, not more."""
    engine = make_engine(make_model(), dtype=torch.bfloat16)
    model = make_model(torch.bfloat16)
    differences = []
    for answer in engine.generate([request(prompt, max_new_tokens=24) for prompt in RAGGED]):
        trained = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, 1.0)
        differences.append(torch.tensor(answer.output_logprobs) - trained)
    assert torch.cat(differences).abs().mean() < GENERATED_LOGPROB_BF16


@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
@pytest.mark.parametrize("prefill_tokens", [1, 6, 1000])
def test_pages_and_chunks_do_not_change_the_answer(page_size: int, prefill_tokens: int) -> None:
    model = make_model(torch.float64, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    whole = make_engine(model, page_size=128, n_pages=20, max_slots=1)
    paged = make_engine(model, page_size=page_size, n_pages=600, prefill_tokens=prefill_tokens)
    wanted = [request(prompt, seed=5, max_new_tokens=20) for prompt in RAGGED]
    for one, other in zip(whole.generate(wanted), paged.generate(wanted), strict=True):
        assert one.output_tokens == other.output_tokens
        torch.testing.assert_close(
            torch.tensor(one.output_logprobs), torch.tensor(other.output_logprobs), rtol=0, atol=GENERATED_LOGPROB_FP64
        )


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 32),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": 24,
            },
            24,
        ),
    ],
)
def test_rope_that_would_turn_cached_keys_is_refused(scaling: dict[str, object], limit: int) -> None:
    def engine_with(dtype: torch.dtype) -> tuple[Qwen3Model, InProcessEngine]:
        from archon.models.qwen3 import Qwen3ModelArgs
        from tests.generation.models import VOCAB

        config = {"model_type": "qwen3", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "vocab_size": VOCAB}
        config |= {"max_position_embeddings": 32, "rope_parameters": {"rope_theta": 1e4, **scaling}}
        model = Qwen3Model(Qwen3ModelArgs.from_hf_config(config | {"initializer_range": 0.3})).to(dtype)
        model.init_weights()
        return model, make_engine(model, max_seq_len=64, prefill_tokens=10)

    model, engine = engine_with(torch.float64)
    short, long = prompts(limit - 12, limit + 4)
    (answer,) = engine.generate([request(short, max_new_tokens=12)])
    trained = trainer_logprobs(model, short, answer.output_tokens, 1.0)
    given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
    torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP64)

    with pytest.raises(ValueError, match=f"beyond {limit} the {scaling['rope_type']} RoPE"):
        engine.generate([request(short, max_new_tokens=13)])
    if scaling["rope_type"] == "dynamic":
        with pytest.raises(ValueError, match="changes the keys already cached"):
            engine.generate([request(long, max_new_tokens=4)])
    else:  # long from its first token on: nothing changes any more
        (answer,) = engine.generate([request(long, max_new_tokens=12)])
        trained = trainer_logprobs(model, long, answer.output_tokens, 1.0)
        given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP64)
