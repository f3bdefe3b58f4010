"""Arguments and checkpoint names of families with latent attention and DeepSeek-V3's router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from archon.models.args.moe import GroupRoutedArgs
from archon.models.hf.checks import reject_field, require
from archon.models.hf.config import ATTENTION_BIAS, MAX_LAYERS, Field, as_dict
from archon.models.hf.names import DENSE_HF_MAP, GROUP_ROUTED_HF_MAP, HFMap
from archon.models.layers.latent_attention import LatentLayer
from archon.models.layers.norm import NormSpec

# transformers normalizes latents with this epsilon and ignores `rms_norm_eps`.
LATENT_NORM = NormSpec(1e-6)

# Config fields of `LatentModelArgs`, with DeepSeek-V3's defaults for attention.
LATENT_FIELDS = {
    **ATTENTION_BIAS,
    "q_lora_rank": Field("q_rank", int, 1536, null=0),
    "kv_lora_rank": Field("kv_rank", int, 512),
    "qk_rope_head_dim": Field("rotary_dim", int, 64),
    "qk_nope_head_dim": Field("key_dim", int, 128),
    "v_head_dim": Field("value_dim", int, 128),
    "rope_interleave": Field("rope_interleaved", bool, True, null=False),
    # Multi-token-prediction layers are passthrough tensors: exports copy them, archon does not run them.
    "num_nextn_predict_layers": Field("", int, 1, minimum=0, maximum=MAX_LAYERS),
    "num_mtp_layers": Field("", int, 1, minimum=0, maximum=MAX_LAYERS),
    # Settings from the training of the published models.
    "aux_loss_alpha": Field("", float, 0.0),
    "seq_aux": Field("", bool, True),
    "ep_size": Field("", int, 1),
}


@dataclass
class LatentModelArgs(GroupRoutedArgs):
    """Arguments of a decoder with latent attention (see `LatentLayer`) and DeepSeek-V3's router.

    `head_dim` is the width of a head's query; RoPE rotates its last `rotary_dim` features.

    Attributes:
        q_rank, kv_rank: Features of the query latent (0 for none) and of the key-value latent.
        key_dim: Features of a head's query and key that are not rotated.
        value_dim: Features of a head's value.
    """

    q_rank: int = 1536
    kv_rank: int = 512
    rotary_dim: int = 64
    key_dim: int = 128
    value_dim: int = 128
    rope_interleaved: bool = True

    hf_fixed_values: ClassVar[dict[str, Any]] = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "pretraining_tp": 1,
    }

    def __post_init__(self) -> None:
        self.head_dim = self.key_dim + self.rotary_dim
        super().__post_init__()
        expected = f"expected n_heads, {self.n_heads}: each head expands the latent to its own keys and values"
        require(self.n_kv_heads == self.n_heads, f"n_kv_heads is {self.n_kv_heads}; {expected}")

    def mixer(self, layer: int) -> LatentLayer:
        """See `BaseModelArgs.mixer`."""
        rope = self.rope(layer)
        assert rope is not None
        return LatentLayer(
            self.n_heads,
            self.kv_rank,
            self.key_dim,
            self.value_dim,
            rope,
            LATENT_NORM,
            q_rank=self.q_rank,
            bias=self.attention_bias,
        )

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Self:
        """See `BaseModelArgs.from_hf_config`; `head_dim` and `qk_head_dim` must match the other widths."""
        config = text = as_dict(hf_config)
        if isinstance(config.get("text_config"), Mapping):
            config["text_config"] = text = dict(config["text_config"])
        for part in (config, text):
            part.pop("auto_map", None)  # names the published code, which this family implements
        widths = {name: text.pop(name) for name in ("head_dim", "qk_head_dim") if text.get(name) is not None}
        args = super().from_hf_config(config, is_critic, **kwargs)
        for name, expected in (("head_dim", args.rotary_dim), ("qk_head_dim", args.head_dim)):
            if widths.get(name, expected) != expected:
                reject_field(name, widths[name], f"expected {expected}, from qk_nope_head_dim and qk_rope_head_dim")
        return args


_HF, _NATIVE = "model.layers.{}.self_attn.", "layers.{}.attention."
LATENT_HF_MAP: HFMap = {
    **DENSE_HF_MAP,
    f"{_HF}q_a_proj.weight": f"{_NATIVE}wq_a.weight",
    f"{_HF}q_a_proj.bias": f"{_NATIVE}wq_a.bias",
    f"{_HF}q_a_layernorm.weight": f"{_NATIVE}q_a_norm.weight",
    f"{_HF}q_b_proj.weight": f"{_NATIVE}wq_b.weight",
    f"{_HF}kv_a_proj_with_mqa.weight": f"{_NATIVE}wkv_a.weight",
    f"{_HF}kv_a_proj_with_mqa.bias": f"{_NATIVE}wkv_a.bias",
    f"{_HF}kv_a_layernorm.weight": f"{_NATIVE}kv_a_norm.weight",
    f"{_HF}kv_b_proj.weight": f"{_NATIVE}wkv_b.weight",
    **GROUP_ROUTED_HF_MAP,
}
