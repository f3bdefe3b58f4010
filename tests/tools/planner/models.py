"""Small models whose parts are in the proportions of real ones, and layouts × policies to try them in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from archon.checkpoint.hf_reader import read_hf_config
from archon.engine.memory.memory_model import MemoryEstimate, MemoryModel
from archon.engine.memory.weight_shards import ModelWeights
from archon.models import get_model_spec
from archon.models.lora.saved_modules import resolve_saved_modules
from archon.models.lora.targets import resolve_lora_sizes
from archon.parallel.layout import parse_layout
from archon.schema.config import EngineConfig

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
MODELS = {
    "dense": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True},
    # No norm over queries and keys, biases instead; fewer key heads.
    "bias": DENSE | {"model_type": "qwen2", "num_key_value_heads": 2},
    "norms_both": DENSE | {"model_type": "gemma3_text", "sliding_window": 64, "query_pre_attn_scalar": 32},
    "norms_after": DENSE | {"model_type": "olmo3", "sliding_window": 64, "rope_theta": 500000.0},
    "parallel": DENSE | {"model_type": "cohere2", "rms_norm_eps": None, "sliding_window": 64},
    "layer_norms": DENSE | {"model_type": "starcoder2", "rms_norm_eps": None},
    "ungated": DENSE | {"model_type": "arcee", "hidden_act": "silu"},
    "squared": DENSE | {"model_type": "arcee", "hidden_act": "relu2"},
    "moe": MOE,
    "gated": MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 256},
    "grouped": DENSE
    | {
        "model_type": "glm4_moe",
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "n_group": 4,
        "topk_group": 2,
        "use_qk_norm": True,
    },
    "mixed": MOE | {"mlp_only_layers": [0], "tie_word_embeddings": True},
}
MODELS["latent"] = DENSE | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "head_dim": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 4,
}
MODELS["mamba"] = DENSE | {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 768,
    "mamba_n_heads": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 32,
}
MODELS["one_part"] = DENSE | {
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "layer_norm_epsilon": 1e-6,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 256,
    "moe_latent_size": 128,
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "n_groups": 4,
    "ssm_state_size": 32,
}
MODELS["delta"] = DENSE | {
    "model_type": "qwen3_5_text",
    "full_attention_interval": 4,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_value_head_dim": 32,
    "linear_key_head_dim": 32,
}
FULL = {"activation_checkpoint": {"mode": "full"}}
OFFLOAD = {"activation_checkpoint": {"mode": "offload"}}
OPS = {"activation_checkpoint": {"mode": "selective", "selective": "op"}}
SECOND = {"activation_checkpoint": {"mode": "selective", "selective": 2}}
LORA = {"lora": {"rank": 16}}
DORA = {"lora": {"rank": 16, "dora": True}}
NF4 = {"lora": {"rank": 16, "quantize_base": "nf4"}}
FP8_BASE = {"lora": {"rank": 16, "quantize_base": "fp8"}}
SAVED = {"lora": {"rank": 16, "modules_to_save": ["lm_head", "embed_tokens", "norm"]}}
MUON: dict[str, Any] = {"optimizer": {"kind": "muon"}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}


class Case(NamedTuple):
    """A rank of a layout in steps on `micro_batches` of `tokens`."""

    model: str
    layout: str
    options: Mapping[str, Any] = MappingProxyType({})
    rank: int = 0
    tokens: int = 4096
    micro_batches: int = 1

    @property
    def name(self) -> str:
        options = json.dumps(dict(self.options)).translate(str.maketrans("", "", '{}": ,')) if self.options else "none"
        return f"{self.model}-{self.layout}-{options}-rank{self.rank}-{self.micro_batches}x{self.tokens}"

    def config(self, folder: Path) -> EngineConfig:
        (folder / "config.json").write_text(json.dumps(MODELS[self.model]))
        fields = {"path": str(folder), "layout": self.layout, "dtype": "bfloat16"}
        if "lora" not in self.options:
            fields |= {"init_from_scratch": True}
        return EngineConfig.model_validate(fields | dict(self.options))

    def predicted(self, config: EngineConfig) -> MemoryEstimate:
        """By the formulas, for the CPU that the traced step runs on."""
        hf_config = read_hf_config(config.path)
        spec = get_model_spec(hf_config["model_type"])
        args = spec.model_args_class.from_hf_config(hf_config)
        names = spec.state_dict_adapter_class(hf_config)
        lora = {} if config.lora is None else resolve_lora_sizes(names, config.lora)
        saved = () if config.lora is None else resolve_saved_modules(names, config.lora.modules_to_save, lora)
        stored = "none" if config.lora is None else config.lora.quantize_base
        model = MemoryModel(args, ModelWeights.from_spec(spec, args, lora, saved, stored), None)
        return model.estimate_rank(config, parse_layout(self.layout), self.rank, self.tokens, self.micro_batches)
