"""The models with a vision tower that the tests of data, RL and serving use, over lower-case letters and digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.engine.engine import ArchonEngine
from archon.rl.bootstrap import write_blank
from archon.schema.config import EngineConfig
from archon.training.config import BootstrapConfig, TokenizerRecipe

SMALL_VISION: dict[str, Any] = {
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 20,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 9,
        "initializer_range": 0.2,
    },
}
_QWEN3_5 = (
    "layer_types",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
VISION_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": SMALL_VISION,
    "qwen3_vl": SMALL_VISION
    | {
        "text_config": {name: value for name, value in SMALL_VISION["text_config"].items() if name not in _QWEN3_5}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            }
        },
        "vision_config": SMALL_VISION["vision_config"] | {"depth": 2, "deepstack_visual_indexes": [0, 1]},
    },
}
_QWEN3_VL = VISION_MODELS["qwen3_vl"]
VISION_MODELS["qwen2_5_vl"] = SMALL_VISION | {
    "text_config": {name: value for name, value in _QWEN3_VL["text_config"].items() if name != "head_dim"}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}},
    "vision_config": {
        name: value for name, value in SMALL_VISION["vision_config"].items() if name != "num_position_embeddings"
    }
    | {"depth": 2, "window_size": 32, "fullatt_block_indexes": [1]},
}
RECIPE = TokenizerRecipe(alphabet="abcdefghijklmnopqrstuvwxyz0123456789 ?\n", images=True)
# With the tags of tool responses, which transformers' own tokenizer of Qwen3.5 leaves out where it does not know them.
_TAGGED = RECIPE.model_copy(update={"alphabet": RECIPE.alphabet + "</_>"})
RECIPES = {"qwen2_5_vl": _TAGGED, "qwen3_5": RECIPE, "qwen3_vl": _TAGGED}


def write_vision_model(folder: Path, model_type: str = "qwen3_5") -> Path:
    """Write a checkpoint with random weights, the same every time. Returns its folder."""
    config = BootstrapConfig(model_type=model_type, hf_config=VISION_MODELS[model_type], tokenizer=RECIPES[model_type])
    write_blank(config, folder / "blank")
    engine = ArchonEngine(EngineConfig(path=str(folder / "blank"), init_from_scratch=True, device="cpu"))
    engine.initialize()
    engine.save(folder / "made")
    return folder / "made"
