"""A family from outside is a full citizen: planned, balanced and converted by what its layers are, not by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from archon.checkpoint.convert import convert
from archon.checkpoint.formats.megatron.rank_files import MANIFEST_FILE
from archon.checkpoint.formats.megatron.sharding import MegatronLayout
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.memory.memory_model import MemoryModel
from archon.engine.memory.weight_shards import ModelWeights
from archon.models import get_model_spec
from archon.parallel.layout import parse_layout
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from tests.checkpoint.outside_family import MODEL_TYPE, register
from tests.checkpoint.tiny_checkpoints import (
    assert_bitwise,
    config_with,
    make_checkpoint,
    random_weights,
    write_checkpoint,
)

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 36}
OUTSIDE = SIZES | {"model_type": MODEL_TYPE, "specialists": 4, "specialist_width": 8}
# The same model as one of the product's families.
TWIN = SIZES | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}


@pytest.fixture(autouse=True)
def known() -> None:
    register()


def estimate(tmp_path: Path, layout: str, config: dict[str, Any]) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = get_model_spec(config["model_type"])
    args = spec.model_args_class.from_hf_config(config)
    model = MemoryModel(args, ModelWeights.from_spec(spec, args), None)
    engine = EngineConfig(path=str(tmp_path), layout=layout, dtype="bfloat16", init_from_scratch=True)
    return model.estimate_rank(engine, parse_layout(layout), 0, 512, 1)


@pytest.mark.parametrize("layout", ["d1", "d2t2", "c2"])
def test_it_is_planned_with_the_memory_of_its_twin(tmp_path: Path, layout: str) -> None:
    """Whose estimates are those of traced steps (tests/tools/planner)."""
    outside, twin, dense = (estimate(tmp_path, layout, config_with(**config)) for config in (OUTSIDE, TWIN, SIZES))
    assert outside == twin
    assert outside != dense


@pytest.mark.parametrize("layout", [MegatronLayout(), MegatronLayout(tp=2), MegatronLayout(pp=2), MegatronLayout(ep=2)])
def test_it_is_converted_to_megatron_core_and_back_bitwise(tmp_path: Path, layout: MegatronLayout) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **OUTSIDE)
    convert(folder, tmp_path / "ranks", "megatron", layout=layout)
    manifest = json.loads((tmp_path / "ranks" / MANIFEST_FILE).read_text())["transformer_config"]
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_router_topk": 2, "moe_layer_freq": [0, 1]}
    assert experts.items() <= manifest.items()
    assert not manifest["moe_router_pre_softmax"]
    convert(tmp_path / "ranks", tmp_path / "back", "hf", like=folder, drop_padding=True)
    back = {name: x for file in (tmp_path / "back").glob("*.safetensors") for name, x in load_file(file).items()}
    assert_bitwise(back, weights)


def test_what_gpt_model_would_compute_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    config = config_with(**OUTSIDE | {"committees": 2})
    folder = write_checkpoint(tmp_path / "hf", config, random_weights(config))
    with pytest.raises(ConfigError, match="n_groups is 2; expected 1, the only value that archon converts"):
        convert(folder, tmp_path / "ranks", "megatron")
    assert [*tmp_path.iterdir()] == [folder]


def test_its_routers_are_balanced_where_the_user_asks(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **OUTSIDE)
    config = EngineConfig(path=str(folder), device="cpu", router_bias_update_rate=0.1, max_tokens_per_mb=64)
    engine = ArchonEngine(config)
    engine.initialize()
    bias = engine.model.get_buffer("layers.1.moe.router.expert_bias")
    assert not bias.any()
    ones = torch.ones(1, 20, dtype=torch.int64)
    batch = {"input_ids": torch.arange(20).unsqueeze(0), "attention_mask": ones, "loss_mask": ones}
    engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
    torch.testing.assert_close(bias.abs(), 0.1 * bias.sign().abs())
    assert bias.any()
