"""Quantized checkpoints of the published forms in small, and what the ranks of a layout make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.tools.check.layouts import LENGTHS, VOCAB, rank_rows
from archon.tools.check.oracle import checkpoint_tensors, family_config, hf_model, random_config, randomize_vectors
from tests.checkpoint.killing import digest
from tests.checkpoint.quantizing import packed, rounded_to_fp8
from tests.checkpoint.tiny_checkpoints import write_checkpoint
from tests.distributed.cases import Case, batch, engine_config

BLOCK = (128, 128)
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [*BLOCK],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
# Matrices of more than a block, whose last blocks are smaller, and of less than one.
DEEPSEEK_V3: dict[str, Any] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "hidden_size": 160,
    "intermediate_size": 136,
    "moe_intermediate_size": 136,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 136,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "vocab_size": VOCAB,
    "pad_token_id": None,
}
GPT_OSS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "pad_token_id": None,
}
STATE = dict[str, Tensor]


def config_of(family: str) -> Any:
    return random_config(0, family, rope_kind="yarn", **{"deepseek_v3": DEEPSEEK_V3, "gpt_oss": GPT_OSS}[family])


def fresh_state(config: Any) -> STATE:
    """Random weights of transformers' model, in bfloat16, but the routers' biases."""
    torch.manual_seed(0)
    model = hf_model(config)
    randomize_vectors(model)
    tensors = checkpoint_tensors(model)
    return {
        name: tensor.clone() if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in tensors.items()
    }


def further_layer(state: STATE, config: Any) -> STATE:
    """The keys of a layer that predicts a further token, as DeepSeek-V3 publishes it."""
    last, dim, generator = config.num_hidden_layers - 1, config.hidden_size, torch.Generator().manual_seed(1)
    old, new = f"model.layers.{last}.", f"model.layers.{last + 1}."

    def like(tensor: Tensor) -> Tensor:
        return (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)

    found = {new + name.removeprefix(old): like(tensor) for name, tensor in state.items() if name.startswith(old)}
    found |= {
        f"{new}{name}.weight": like(torch.empty(dim)).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")
    }
    found[f"{new}eh_proj.weight"] = like(torch.empty(dim, 2 * dim)).bfloat16()
    found[f"{new}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    found[f"{new}shared_head.head.weight"] = state["lm_head.weight"].clone()
    return found


def fp8_checkpoint(folder: Path) -> tuple[Path, STATE]:
    """A folder as DeepSeek publishes V3, and the weights it stands for, in float32 where they were quantized."""
    config = config_of("deepseek_v3")
    state = fresh_state(config)
    whole = state | further_layer(state, config)
    stored, expected = dict(whole), dict(whole)
    for key, tensor in whole.items():
        is_linear = ".layers." in key and tensor.dim() == 2 and (".mlp." in key or ".self_attn." in key)
        if is_linear and ".gate.weight" not in key:
            data, scales = rounded_to_fp8(tensor.float(), BLOCK)
            stored |= {key: data, f"{key}_scale_inv": scales}
            rows, columns = (torch.arange(size) // step for size, step in zip(tensor.shape, BLOCK, strict=True))
            expected[key] = data.float() * scales[rows][:, columns]
    hf_config = family_config(config) | {"quantization_config": FP8, "num_nextn_predict_layers": 1}
    return write(folder, hf_config, stored), expected


def mxfp4_checkpoint(folder: Path) -> tuple[Path, STATE]:
    """A folder as OpenAI publishes gpt-oss, and the weights it stands for."""
    config = config_of("gpt_oss")
    stored, expected = packed(fresh_state(config), exponents=(118, 122))
    return write(folder, family_config(config) | {"quantization_config": MXFP4}, stored), expected


def write(folder: Path, hf_config: dict[str, Any], stored: STATE) -> Path:
    contiguous = {key: tensor.contiguous() for key, tensor in stored.items()}
    return write_checkpoint(folder, hf_config | {"torch_dtype": "bfloat16"}, contiguous, shards=3)


def train_and_export(case: Case, path: str, out: str) -> tuple[dict[str, str], dict[str, float]]:
    """Load, export, train for a step and export again; the digests of what was loaded, and the step's metrics."""
    engine = ArchonEngine(engine_config(case, path, case.layout))
    engine.initialize()
    loaded = {name: digest(tensor) for name, tensor in engine.weights()}
    engine.save(f"{out}/loaded", dtype=torch.bfloat16)
    ranks = engine.ranks
    rows = rank_rows(batch(LENGTHS, seed=1), ranks.dp.rank, ranks.dp.size)
    metrics = engine.train_batch(rows, CrossEntropyLoss(), loss_token_count)
    engine.save(f"{out}/trained", dtype=torch.bfloat16)
    return loaded, {name: metrics[name] for name in ("loss", "grad_norm")}
