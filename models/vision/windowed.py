"""Config and checkpoint names of Qwen2.5-VL's vision encoder, whose blocks attend within windows of an image."""

from __future__ import annotations

from typing import Any

from archon.models.hf.checks import reject_field
from archon.models.hf.config import Field, with_defaults
from archon.models.vision.encoder import VisionSpec
from archon.models.vision.language_model import COMMON_VISION_FIELDS, read_vision_fields, vision_map

_FIELDS = with_defaults(
    COMMON_VISION_FIELDS, depth=32, hidden_size=3584, intermediate_size=3420, hidden_act="silu", patch_size=14
) | {
    "window_size": Field("window", int, 112),
    "fullatt_block_indexes": Field("full_attention", list, (7, 15, 23, 31)),
    "tokens_per_second": Field("", int, 4),  # of videos
    "spatial_patch_size": Field("", int, 14),  # transformers reads patch_size
}
# transformers reads in_channels, whose default is 3.
_FIXED_VALUES = {"in_chans": 3}

WINDOWED_HF_MAP = vision_map(
    {
        "blocks.{}.attn.qkv": "blocks.{}.attention.wqkv",
        "blocks.{}.attn.proj": "blocks.{}.attention.wo",
        "blocks.{}.mlp.gate_proj": "blocks.{}.feed_forward.w1",
        "blocks.{}.mlp.down_proj": "blocks.{}.feed_forward.w2",
        "blocks.{}.mlp.up_proj": "blocks.{}.feed_forward.w3",
        "merger.mlp.0": "merger.feed_forward.w1",
        "merger.mlp.2": "merger.feed_forward.w2",
    }
) | vision_map(
    {
        "patch_embed.proj": "patch_embedding",
        "blocks.{}.norm1": "blocks.{}.attention_norm",
        "blocks.{}.norm2": "blocks.{}.ffn_norm",
        "merger.ln_q": "merger.norm",
    },
    ("weight",),
)


def read_windowed_vision(config: Any) -> VisionSpec:
    """Read a `vision_config`; null means the defaults of transformers' class."""
    values = read_vision_fields(config, _FIELDS, _FIXED_VALUES)
    values.pop("")
    pixels, row = values.pop("window"), values["merge_size"] * values["patch_size"]
    if pixels < row:
        expected = f"expected at least {row} pixels, spatial_merge_size times patch_size: the size of one decoder row"
        reject_field("vision_config.window_size", pixels, expected)
    full_attention = tuple(values.pop("full_attention"))
    options: dict[str, Any] = {"n_positions": 0, "rms_norm": True, "gated": True, "patch_bias": False}
    return VisionSpec(**values, **options, window=pixels // row, full_attention=full_attention)
