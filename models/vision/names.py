"""Names of the vision encoder's tensors in Hugging Face checkpoints."""

from __future__ import annotations

from archon.models.hf.fused_tensors import Fused

_MODULES = {
    "patch_embed.proj": "patch_embedding",
    "blocks.{}.norm1": "blocks.{}.attention_norm",
    "blocks.{}.attn.qkv": "blocks.{}.attention.wqkv",
    "blocks.{}.attn.proj": "blocks.{}.attention.wo",
    "blocks.{}.norm2": "blocks.{}.ffn_norm",
    "blocks.{}.mlp.linear_fc1": "blocks.{}.feed_forward.w1",
    "blocks.{}.mlp.linear_fc2": "blocks.{}.feed_forward.w2",
    "merger.norm": "merger.norm",
    "merger.linear_fc1": "merger.feed_forward.w1",
    "merger.linear_fc2": "merger.feed_forward.w2",
    "deepstack_merger_list.{}.norm": "deepstack_mergers.{}.norm",
    "deepstack_merger_list.{}.linear_fc1": "deepstack_mergers.{}.feed_forward.w1",
    "deepstack_merger_list.{}.linear_fc2": "deepstack_mergers.{}.feed_forward.w2",
}
VISION_HF_MAP: dict[str, str | Fused | None] = {
    "model.visual.pos_embed.weight": "visual.position_grid.weight",
    **{
        f"model.visual.{hf}.{part}": f"visual.{native}.{part}"
        for hf, native in _MODULES.items()
        for part in ("weight", "bias")
    },
}
