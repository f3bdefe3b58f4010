"""Random small configurations of every family, and transformers run on packed documents one at a time."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from archon.models import BaseArchonModel, BaseStateDictAdapter, get_model_spec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
ACTIVATIONS = ("silu", "silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu")
HF_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
FIRST_MOE_SEED = 102
"""`random_config` gives mixtures of experts from here on, a multiple of the number of RoPE kinds."""


def random_rope(rng: random.Random, kind: str, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of one kind, with the optional fields there or not."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([10.0, 1_000.0, 1_000_000.0])}
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        rope["factor"] = rng.choice([1.5, 2.0, 4.0, 8.0])
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = rng.choice([8, 16])
    if kind == "yarn":
        rope |= rng.choice([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}])
        rope |= rng.choice([{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.1}])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "longrope":
        rope["short_factor"] = [1 + rng.random() for _ in range(head_dim // 2)]
        rope["long_factor"] = [1 + 5 * rng.random() for _ in range(head_dim // 2)]
        rope |= rng.choice([{}, {"factor": 4.0}, {"attention_factor": 1.2}])
    return rope


def random_config(seed: int, family: str | None = None) -> Any:
    """A transformers config. The seed walks through RoPE kinds, and Qwen's families where none is given; the rest is
    drawn."""
    rng = random.Random(seed)
    if family is not None or seed >= FIRST_MOE_SEED:
        family, kind = family or "qwen3_moe", ROPE_KINDS[seed % len(ROPE_KINDS)]
    else:
        family, kind = ("qwen2", "qwen3")[seed % 2], ROPE_KINDS[(seed // 2) % len(ROPE_KINDS)]
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 3, 4])
    head_dim = rng.choice([4, 6, 8, 16])
    layers = rng.choice([2, 3])
    dim = rng.choice([heads * head_dim, 24, 40])
    if family == "llama":  # whose config class wants a multiple of the heads
        dim = heads * rng.choice([head_dim, 6])
    fields: dict[str, Any] = {
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": rng.choice([32, 52]),
        "vocab_size": rng.choice([37, 61]),
        "hidden_act": rng.choice(ACTIVATIONS),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "tie_word_embeddings": rng.random() < 0.5,
        "max_position_embeddings": rng.choice([16, 32, 64]),
        "rope_parameters": random_rope(rng, kind, head_dim),
        # Large enough that attention is far from uniform, small enough that it does not saturate: at 0.2, a tensor
        # whose gradient cancels puts transformers itself 3e-5 away from its own float64 value.
        "initializer_range": 0.13,
    }
    if family not in ("qwen2", "mistral"):
        fields["attention_bias"] = rng.random() < 0.5
    if family == "mistral":
        fields["sliding_window"] = rng.choice([None, 2, 5, 11])
    elif family != "llama" and rng.random() < 0.5:
        fields |= {"use_sliding_window": True, "sliding_window": rng.choice([2, 5, 11])}
        windows = [
            {"max_window_layers": 1},
            {"layer_types": ["sliding_attention"] + ["full_attention"] * (layers - 1)},
        ]
        fields |= rng.choice(windows) if family != "qwen3_moe" else {}  # which slides in every layer or in none
    if family == "qwen3_moe":
        experts = rng.choice([4, 6, 8])
        fields |= {
            "num_experts": experts,
            "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
            "moe_intermediate_size": rng.choice([8, 20]),
            "norm_topk_prob": rng.random() < 0.5,
        }
        fields |= rng.choice([{}, {"mlp_only_layers": [rng.randrange(layers)]}, {"decoder_sparse_step": 2}])
    return HF_CLASSES[family][0](**fields)


def random_lengths(seed: int) -> list[int]:
    """Odd lengths, among them one, equals, and one beyond some of the context lengths that are drawn.

    Every fourth pack has a document long enough for attention in blocks without a window.
    """
    rng = random.Random(1000 + seed)
    lengths = [2 * rng.randrange(0, 23) + 1 for _ in range(3)] + [1, 7, 7, 47 if seed % 4 else 141]
    rng.shuffle(lengths)
    return lengths


def pack(lengths: list[int], vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Random tokens of documents, their positions, boundaries and the longest length."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return tokens, positions, cu_seqlens, max(lengths)


def hf_model(config: Any, **options: Any) -> Any:
    """A fresh transformers model; experts are run one at a time, the plainest way it has and the only one in
    float64."""
    if config.model_type == "qwen3_moe":
        options["experts_implementation"] = "eager"
    return HF_CLASSES[config.model_type][1]._from_config(config, **options)


def build_pair(
    config: Any, *, attention: str = "eager", seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Any, BaseArchonModel, BaseStateDictAdapter]:
    """A transformers model with every weight drawn at random (biases and norms too), and ours with the same weights."""
    torch.manual_seed(seed)
    reference = hf_model(config, attn_implementation=attention).to(dtype)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    spec = get_model_spec(config.model_type)
    adapter = spec.state_dict_adapter_class(config)
    model = spec.model_class(adapter.args).to(dtype)
    missing, unexpected = model.load_state_dict(adapter.from_hf(checkpoint_tensors(reference)), strict=False)
    assert not unexpected
    assert set(missing) <= {"output.weight"}
    return reference, model, adapter


def checkpoint_tensors(reference: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """Parameters of a transformers model, or their gradients, as its checkpoints name and shape them.

    In memory transformers stacks the experts, gate and up as one; in a file each has its matrices.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in reference.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        assert tensor is not None, name
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".mlp.experts"):
            tensors[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"gate_proj": 0, "up_proj": 1} if last == "gate_up_proj" else {last: 0}
            for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True):
                tensors[f"{prefix}.{expert}.{part}.weight"] = piece
    return tensors


def reference_logits(reference: Any, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Logits [T, V] of documents run one at a time, each with rotary state as in a fresh model.

    transformers remembers the longest document that dynamic RoPE has seen; a document's own length is what counts here.
    """
    rotary_class, logits = type(reference.model.rotary_emb), []
    for document in tokens.split(lengths):
        reference.model.rotary_emb = rotary_class(reference.config)
        logits.append(reference(input_ids=document.unsqueeze(0), use_cache=False).logits[0])
    return torch.cat(logits)


def relative(actual: Tensor, expected: Tensor) -> float:
    """max|a - b| / max|b|."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
