"""DeepSeek-V3, Kimi K2 and GLM-4.7-Flash: carried keys, published sizes, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.models import get_model_spec, is_supported_model
from archon.models.spec import UNSUPPORTED
from archon.schema.errors import CheckpointError, ConfigError, UnknownModelError
from archon.tools.check.family import REFERENCES
from archon.tools.check.oracle import family_config, hf_classes, random_config

LATENT = ("deepseek_v3", "glm4_moe_lite", "kimi_k2")
CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi_k2": {  # Kimi-K2-Instruct, in the fields of its config.json
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    },
    "glm4_moe_lite": {  # GLM-4.7-Flash
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "vocab_size": 154880,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "topk_method": "noaux_tc",
    },
}


def config_of(family: str, seed: int) -> dict[str, Any]:
    return family_config(random_config(seed, family, REFERENCES.get(family)), family)


@pytest.mark.parametrize("family", LATENT)
def test_layers_that_predict_further_tokens_are_carried(family: str) -> None:
    config = config_of(family, 1)
    adapter = get_model_spec(family).state_dict_adapter_class(config)
    layers = config["num_hidden_layers"]
    for name in ("eh_proj.weight", "self_attn.kv_b_proj.weight", "mlp.experts.3.up_proj.weight"):
        assert adapter.is_passthrough(f"model.layers.{layers}.{name}")
        assert adapter.hf_to_native(f"model.layers.{layers}.{name}") == ()
    with pytest.raises(CheckpointError, match="unknown key"):
        adapter.hf_to_native(f"model.layers.{layers - 1}.eh_proj.weight")


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "num_mtp_layers"])
@pytest.mark.parametrize("family", [*LATENT, "glm4_moe"])
def test_as_many_further_layers_are_carried_as_the_config_says(family: str, field: str) -> None:
    config = config_of(family, 1)
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        config.pop(name, None)
    layers, spec = config["num_hidden_layers"], get_model_spec(family)
    for given, carried in (({}, 1), ({field: 0}, 1), ({field: 1}, 1), ({field: 3}, 3)):
        adapter = spec.state_dict_adapter_class(config | given)
        for number in range(4):
            key = f"model.layers.{layers + number}.eh_proj.weight"
            assert adapter.is_passthrough(key) == adapter.in_memory.is_passthrough(key) == (number < carried)
        with pytest.raises(CheckpointError, match="unknown key"):
            adapter.hf_to_native(f"model.layers.{layers + carried}.enorm.weight")
    with pytest.raises(ConfigError, match=field if family != "glm4_moe" else "num_nextn_predict_layers"):
        spec.state_dict_adapter_class(config | {field: 10**7})


def test_the_published_deepseek_v3_has_a_bias_in_each_router_and_caches_latents() -> None:
    config = json.loads((CONFIGS / "DeepSeek-V3" / "config.json").read_text())
    adapter = get_model_spec("deepseek_v3").state_dict_adapter_class(config)
    assert adapter.buffer_shapes.keys() == {f"layers.{i}.moe.router.expert_bias" for i in range(3, 61)}
    specs = adapter.args.layer_specs
    assert sum(spec.mixer.cache.token_features for spec in specs) == 61 * 576


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_parameters_of_transformers(name: str) -> None:
    config = PUBLISHED[name]
    adapter = get_model_spec(name).state_dict_adapter_class(config)
    config_class, model_class = hf_classes(REFERENCES.get(name, name))
    fields = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    with torch.device("meta"):
        reference = model_class._from_config(config_class(**fields))
    counted = sum(parameter.numel() for parameter in reference.parameters())
    assert sum(map(math.prod, adapter.native_shapes.values())) == counted


@pytest.mark.parametrize(
    ("family", "field", "value", "complaint"),
    [
        ("deepseek_v3", "scoring_func", "softmax", "scoring_func"),
        ("deepseek_v3", "topk_method", "greedy", "topk_method"),
        ("kimi_k2", "moe_layer_freq", 2, "moe_layer_freq"),
        ("deepseek_v3", "num_key_value_heads", 1, "n_kv_heads is 1; expected n_heads"),
        ("deepseek_v3", "head_dim", 6, "head_dim"),
        ("deepseek_v3", "qk_head_dim", 1, "qk_head_dim"),
        ("deepseek_v3", "index_topk", 2048, "index_topk"),
        ("glm4_moe_lite", "mlp_layer_types", ["dense", "hash"], "mlp_layer_types"),
        ("glm4_moe_lite", "mlp_layer_types", ["dense"], "mlp_layer_types"),
        ("glm4_moe_lite", "first_k_dense_replace", 3, "first_k_dense_replace"),
        ("glm4_moe_lite", "first_k_dense_replace", "1", "first_k_dense_replace"),
    ],
)
def test_what_contradicts_the_computation_is_refused(family: str, field: str, value: Any, complaint: str) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = config_of(family, 0) | heads
    if family == "glm4_moe_lite":
        config["mlp_layer_types"] = None
    get_model_spec(family).model_args_class.from_hf_config(config)
    with pytest.raises(ConfigError, match=complaint):
        get_model_spec(family).model_args_class.from_hf_config(config | {field: value})


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_what_is_not_computed_is_refused_with_the_reason_and_the_nearest_family(model_type: str) -> None:
    reason, nearest = UNSUPPORTED[model_type]
    with pytest.raises(UnknownModelError) as error:
        get_model_spec(model_type)
    assert f"{model_type!r} is not supported: {reason}; the nearest" in str(error.value)
    assert f"family is {nearest}; supported are" in str(error.value)
    assert not is_supported_model(model_type)
