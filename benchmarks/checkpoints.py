"""Hugging Face checkpoints of Qwen3 and Qwen3-MoE with random weights, and PEFT LoRAs for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Fields of config.json by the name used in records. `26M` is the model of the CPU figures; the others have the shapes
# of the released Qwen3 models, `30B-A3B-4L` with 4 of its 48 layers, `8B-8L` with 8 of 36; `2.43GB` is a model that is
# 2.43 GB in bfloat16.
# In `26M-experts` a token uses 2 of 8 experts, each half as wide as the feed-forward of `26M`.
SHAPES: dict[str, dict[str, Any]] = {
    "26M": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "30B-A3B-4L": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "2.43GB": {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 32, "num_attention_heads": 16},
}
SHAPES["8B-8L"] = SHAPES["8B"] | {"num_hidden_layers": 8}
SHAPES["26M-experts"] = SHAPES["26M"] | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
    "norm_topk_prob": True,
}
SHAPES["tiny-moe"] = SHAPES["tiny"] | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
_COMMON = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    # No end-of-text token: each benchmark sets its answer lengths.
    "bos_token_id": None,
    "eos_token_id": None,
}


def shape(name: str) -> dict[str, Any]:
    """Return all fields of the config that differ from transformers' defaults."""
    return {**_COMMON, **SHAPES[name]}


def make_checkpoint(
    folder: Path,
    name: str,
    *,
    fields: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    shards: int = 1,
) -> Path:
    """Write the model `name` of `SHAPES` with random weights into `folder` and return it; `fields` override its config.

    Embeddings are normal(0, 0.02) as before pre-training. Norms vary around 1, and the layer matrices are large enough
    to
    matter: with 0.02 everywhere, a tied model repeats its last token forever.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**shape(name) | dict(fields or {}))
    config.dtype = dtype
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.05)
            elif ".layers." in name:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    # A shard is closed before the tensor that would overflow it, so aim a little above an equal share.
    model.save_pretrained(folder, max_shard_size=int(size / shards * 1.05) if shards > 1 else size + 1)
    return folder


def make_lora(
    folder: Path, checkpoint: Path, *, rank: int, seed: int = 0, dtype: str = "float32", device: str = "cpu"
) -> Path:
    """Write a LoRA of all linear layers in PEFT's format into `folder` and return it.

    B is small and random instead of 0, so that A also has a gradient from the first step.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    adapted.save_pretrained(folder)
    return folder
