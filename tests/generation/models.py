"""Tiny models with random weights, in transformers and in archon, and an engine around one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from archon.generation import InProcessEngine
from archon.models import BaseArchonModel, get_model_spec
from archon.rl import GenerationHyperparameters, ModelRequest
from archon.tools.check.family import REFERENCES
from archon.tools.check.oracle import checkpoint_tensors, family_config, hf_classes, hf_model, randomize_buffers

VOCAB = 67
_SLIDING_FIRST = ["sliding_attention", "full_attention", "sliding_attention"]
_DELTA_NETS: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 6,
    "linear_key_head_dim": 8,
}
_GATED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 12,
}
# Where families differ: the fields each adds.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT | {"first_k_dense_replace": 1},
    "glm4_moe_lite": _LATENT,
    "kimi_k2": _LATENT | {"first_k_dense_replace": 1},
    "gemma3_text": {
        "head_dim": 8,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 2.0,
        "layer_types": _SLIDING_FIRST,
    },
    "cohere2": {"sliding_window": 6, "logit_scale": 0.5},
    "granite_swa": {
        "attention_multiplier": 0.5,
        "layer_types": _SLIDING_FIRST,
        "layer_rope_theta": [1000.0, 0, 100.0],
    },
    "hy_v3": {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "swiglu_limit": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "minimax_m2": {
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
    "mixtral": {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [1],
    },
    "ministral3": {
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 12,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "attention_multiplier": 0.5,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 12,
        "moe_latent_size": 14,
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 8,
        "time_step_min": 1e-9,
        "tie_word_embeddings": False,
    },
    "qwen3": {"head_dim": 8},
    "qwen3_5_text": _DELTA_NETS,
    "qwen3_5_moe_text": _DELTA_NETS | _GATED_EXPERTS,
    "qwen3_next": _DELTA_NETS | _GATED_EXPERTS,
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


@lru_cache(maxsize=32)
def _pair(
    family: str, dtype: torch.dtype, options: tuple[tuple[str, Any], ...]
) -> tuple[PreTrainedModel, BaseArchonModel]:
    config = hf_classes(REFERENCES.get(family, family))[0](
        **{
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 40,
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "tie_word_embeddings": family != "qwen2",
            # Large enough that attention matters and distributions are neither flat nor one-hot.
            "initializer_range": 0.12,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        | _OWN.get(family, {})
        | {key: list(value) if isinstance(value, tuple) else value for key, value in options}
    )
    with torch.random.fork_rng():
        torch.manual_seed(17)
        hf = hf_model(config).to(dtype).eval()
        randomize_buffers(hf)
    spec = get_model_spec(family)
    adapter = spec.state_dict_adapter_class(family_config(config, family))
    model = spec.model_class(adapter.args).to(dtype)
    model.load_state_dict(adapter.from_hf(checkpoint_tensors(hf)), strict=False)
    model.tie_weights()
    return hf, model.requires_grad_(False)


def make_pair(
    family: str = "qwen3", dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[PreTrainedModel, BaseArchonModel]:
    """The same weights in transformers and in archon; cached, so tests must not change them."""
    return _pair(family, dtype, tuple(sorted(options.items())))


def make_model(dtype: torch.dtype = torch.float32, family: str = "qwen3", **options: Any) -> BaseArchonModel:
    return make_pair(family, dtype, **options)[1]


def make_engine(model: BaseArchonModel | None = None, tokenizer: Any = None, **options: Any) -> InProcessEngine:
    options = {"max_slots": 8, "page_size": 4, "n_pages": 200} | options
    engine_class = type("Engine", (InProcessEngine,), {"static_decode": options.pop("static_decode", None)})
    return engine_class.from_model(make_model() if model is None else model, tokenizer, **options)


def request(prompt: list[int], rid: str | None = None, **gconfig: Any) -> ModelRequest:
    named = {} if rid is None else {"rid": rid}
    return ModelRequest(prompt, GenerationHyperparameters(**gconfig), **named)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def trainer_logprobs(model: BaseArchonModel, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
    """What the trainer's packed forward gives each token of `answer`; [len(answer)]."""
    ids, length = torch.tensor(prompt + answer), len(prompt + answer)
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    given = (ids, torch.arange(length), torch.tensor([0, length], dtype=torch.int32), labels)
    ids, positions, bounds, labels = (x.to(next(model.parameters()).device) for x in given)
    scores = model(ids, positions, bounds, length, labels=labels, temperature=temperature)
    return scores.logprobs[len(prompt) - 1 : -1].cpu()


@lru_cache(maxsize=256)
def _greedy(hf: PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def greedy_reference(hf: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy `generate`, one prompt at a time."""
    return _greedy(hf, tuple(prompt), count)
