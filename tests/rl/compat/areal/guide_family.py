"""A package with a family as AReaL's guide to adding a model describes it; only the imports are archon's.

It computes what Llama computes, and overrides everything that the guide asks a family to write.
"""

from __future__ import annotations

from pathlib import Path

ARGS = '''\
from __future__ import annotations

from dataclasses import dataclass

from archon.rl.compat.areal import BaseModelArgs


@dataclass
class GuidedModelArgs(BaseModelArgs):
    """Default values are for the smallest variant."""

    dim: int = 64
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = 256
    head_dim: int = 16
    hidden_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_seq_len: int = 2048
    depth_init: bool = True
    eos_id: int = 2
    enable_weight_tying: bool = False
    is_critic: bool = False
    num_labels: int = 1

    @classmethod
    def from_hf_config(cls, hf_config, is_critic: bool = False, **kwargs) -> GuidedModelArgs:
        return cls(
            dim=hf_config.hidden_size,
            n_layers=hf_config.num_hidden_layers,
            n_heads=hf_config.num_attention_heads,
            n_kv_heads=getattr(hf_config, "num_key_value_heads", hf_config.num_attention_heads),
            vocab_size=hf_config.vocab_size,
            head_dim=getattr(hf_config, "head_dim", hf_config.hidden_size // hf_config.num_attention_heads),
            hidden_dim=hf_config.intermediate_size,
            norm_eps=hf_config.rms_norm_eps,
            rope_theta=getattr(hf_config, "rope_theta", 10000.0),
            max_seq_len=getattr(hf_config, "max_position_embeddings", 2048),
            eos_id=getattr(hf_config, "eos_token_id", 2),
            enable_weight_tying=getattr(hf_config, "tie_word_embeddings", False),
            is_critic=is_critic,
            attn_type=kwargs.get("attn_type", BaseModelArgs.attn_type),
        )
'''

MODEL = '''\
"""Guided: Llama's decoder, written by a guide."""

from __future__ import annotations

import torch
from torch import nn

from archon.rl.compat.areal import BaseArchonModel

from .args import GuidedModelArgs


class GuidedModel(BaseArchonModel):
    def __init__(self, model_args: GuidedModelArgs):
        super().__init__(model_args)
        self.model_args = model_args

    def init_weights(self):
        if self.tok_embeddings is not None:
            nn.init.normal_(self.tok_embeddings.weight, std=0.5)
        for layer in self.layers.values():
            for name, parameter in layer.named_parameters():
                if name.endswith("norm.weight"):
                    nn.init.ones_(parameter)
                else:
                    nn.init.trunc_normal_(parameter, mean=0.0, std=0.02)
        if self.norm is not None:
            nn.init.ones_(self.norm.weight)
        for head in (self.output, self.score):
            if head is not None:
                nn.init.trunc_normal_(head.weight, mean=0.0, std=self.model_args.dim**-0.5)

    def init_buffers(self, buffer_device: torch.device | str):
        super().init_buffers(buffer_device)

    def forward(self, tokens, positions, cu_seqlens, max_seqlen, tree_attn_meta=None) -> torch.Tensor:
        return super().forward(tokens, positions, cu_seqlens, max_seqlen, tree_attn_meta)
'''

ADAPTER = """\
from __future__ import annotations

import re
from typing import Any

import torch

from archon.rl.compat.areal import BaseStateDictAdapter


class GuidedStateDictAdapter(BaseStateDictAdapter):
    def __init__(self, model_config, hf_assets_path: str | None = None):
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map = {
            "model.embed_tokens.weight": "tok_embeddings.weight",
            "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.wq.weight",
            "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.wk.weight",
            "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.wv.weight",
            "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
            "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
            "model.layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.w1.weight",
            "model.layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.w3.weight",
            "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
            "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
            "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
            "model.norm.weight": "norm.weight",
            "lm_head.weight": "output.weight",
            "score.weight": "score.weight",
        }
        self.to_hf_map = {}
        for hf_key, archon_key in self.from_hf_map.items():
            if archon_key is not None:
                self.to_hf_map[archon_key] = hf_key
        self.enable_weight_tying = getattr(model_config, "tie_word_embeddings", False)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.enable_weight_tying and "lm_head.weight" not in hf_state_dict:
            hf_state_dict = dict(hf_state_dict)
            hf_state_dict["lm_head.weight"] = hf_state_dict["model.embed_tokens.weight"]
        state_dict = {}
        for key, value in hf_state_dict.items():
            archon_key = self._convert_key(key, self.from_hf_map)
            if archon_key is not None:
                state_dict[archon_key] = self.read(archon_key, value)
        return state_dict

    def to_hf(self, archon_state_dict: dict[str, Any]) -> dict[str, Any]:
        hf_state_dict = {}
        for key, value in archon_state_dict.items():
            hf_state_dict.update(self.convert_single_to_hf(key, value))
        return hf_state_dict

    def convert_single_to_hf(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        name = name.replace("._checkpoint_wrapped_module", "").replace("._orig_mod", "")
        if self.enable_weight_tying and name == "output.weight":
            return []
        hf_key = self._convert_key(name, self.to_hf_map)
        return [] if hf_key is None else [(hf_key, self.write(name, tensor))]

    def read(self, name, value):
        return value

    def write(self, name, value):
        return value

    def _convert_key(self, key, key_map):
        if key in key_map:
            return key_map[key]
        match = re.search(r"layers\\.(\\d+)\\.", key)
        abstract_key = re.sub(r"layers\\.\\d+\\.", "layers.{}.", key)
        if match and key_map.get(abstract_key) is not None:
            return key_map[abstract_key].replace("{}", match.group(1), 1)
        return None
"""

PARALLELIZE = """\
from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from archon.models.spec import DENSE_TP_PLAN
from archon.parallel.activation_checkpoint import apply_activation_checkpointing
from archon.parallel.compile import apply_compile
from archon.parallel.tensor import apply_tensor_parallel
from archon.rl.compat.areal import ArchonParallelDims


def parallelize_guided(
    model: nn.Module,
    parallel_dims: ArchonParallelDims,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    loss_parallel: bool = True,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
    ac_config=None,
    enable_compile: bool = True,
) -> nn.Module:
    if parallel_dims.tp_enabled:
        apply_tensor_parallel(model, parallel_dims.get_mesh("tp"), DENSE_TP_PLAN)
    if ac_config is not None and ac_config.mode != "none":
        apply_activation_checkpointing(list(model.layers.values()), ac_config, model.attention_ops)
    if enable_compile:
        apply_compile(model.layers)
    apply_fsdp(
        model,
        parallel_dims.get_mesh("dp_shard_cp"),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=cpu_offload,
        reshard_after_forward_policy=reshard_after_forward_policy,
    )
    if model.model_args.enable_weight_tying:
        if model.output is not None and model.tok_embeddings is not None:
            model.output.weight = model.tok_embeddings.weight
    return model


def apply_fsdp(model, dp_mesh, param_dtype, reduce_dtype, pp_enabled, cpu_offload, reshard_after_forward_policy):
    mp_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    fsdp_config = {"mesh": dp_mesh, "mp_policy": mp_policy}
    if cpu_offload:
        fsdp_config["offload_policy"] = CPUOffloadPolicy()
    reshard = {"always": True, "never": False, "default": not pp_enabled}[reshard_after_forward_policy]
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **fsdp_config, reshard_after_forward=reshard)
    for transformer_block in model.layers.values():
        fully_shard(transformer_block, **fsdp_config, reshard_after_forward=reshard)
    final_layers = [layer for layer in (model.norm, model.output, model.score) if layer is not None]
    if final_layers:
        fully_shard(final_layers, **fsdp_config, reshard_after_forward=reshard_after_forward_policy == "always")
    fully_shard(model, **fsdp_config)
"""

SPEC = '''\
"""Guided: Llama's decoder, written by a guide."""

from archon.rl.compat.areal import ModelSpec, pipeline_llm, register_model_spec

from .infra.parallelize import parallelize_guided
from .model.args import GuidedModelArgs
from .model.model import GuidedModel
from .model.state_dict_adapter import GuidedStateDictAdapter

SPEC = ModelSpec(
    name="Guided",
    model_class=GuidedModel,
    model_args_class=GuidedModelArgs,
    state_dict_adapter_class=GuidedStateDictAdapter,
    parallelize_fn=parallelize_guided,
    supported_model_types=frozenset({"guided"}),
    pipelining_fn=pipeline_llm,
)
register_model_spec(SPEC)
'''

FILES = {
    "__init__.py": "from guided.spec import SPEC as SPEC\n",
    "spec.py": SPEC,
    "model/__init__.py": "",
    "model/args.py": ARGS,
    "model/model.py": MODEL,
    "model/state_dict_adapter.py": ADAPTER,
    "infra/__init__.py": "",
    "infra/parallelize.py": PARALLELIZE,
}


def write_package(folder: Path, name: str, *changes: tuple[str, str, str]) -> None:
    """Write the package into a folder under a name, also its model type, with replacements (file, old, new)."""
    files = dict(FILES)
    for file, old, new in changes:
        assert files[file].count(old) == 1, (file, old)
        files[file] = files[file].replace(old, new)
    for file, text in files.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace('"guided"', f'"{name}"').replace("from guided.", f"from {name}."))
