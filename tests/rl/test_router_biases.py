"""Balancing biases of a run are exported where the family's checkpoints store them, and refused elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from archon.models.layers.moe import expert_biases
from archon.rl import RLTrainer
from archon.rl.bootstrap import write_blank
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError
from archon.training.config import BootstrapConfig, PreferenceConfig, SFTConfig, TokenizerRecipe
from archon.training.sft import SFTTrainer
from tests.rl.conftest import small_run
from tests.small_qwen3 import SMALL_QWEN3
from tests.tolerances import FIRST_RATIO_FP32

RATE = 0.01
MoE = dict[str, Any]
SMALL: MoE = SMALL_QWEN3 | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: MoE = {
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPED: MoE = SMALL | {"n_routed_experts": 8, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
FAMILIES: dict[str, MoE] = {
    "deepseek_v3": {name: value for name, value in (GROUPED | LATENT).items() if name != "head_dim"},
    "glm4_moe": GROUPED,
    "minimax_m2": SMALL_QWEN3 | {"num_experts_per_tok": 2, "num_local_experts": 8},
    "mixtral": SMALL_QWEN3 | {"num_experts_per_tok": 2, "num_local_experts": 8},
    "qwen3_moe": SMALL | {"num_experts": 8},
}
STORED, LOST = ("deepseek_v3", "glm4_moe", "minimax_m2"), ("mixtral", "qwen3_moe")


def blank_of(family: str, folder: Path) -> Path:
    """config.json and tokenizer of a small model."""
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    path = folder / family
    write_blank(BootstrapConfig(model_type=family, hf_config=FAMILIES[family], tokenizer=recipe), path)
    return path


def balanced(path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "init_from_scratch": True,
        "optimizer": {"lr": 1e-3},
        "router_bias_update_rate": RATE,
    }


def sft_config(family: str, folder: Path) -> SFTConfig:
    rows = [{"prompt": f"{i}=", "response": str(i)[::-1]} for i in range(32)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SFTConfig.parse(
        {
            "run_dir": str(folder / "run"),
            "total_steps": 3,
            "batch_size": 8,
            "model": balanced(blank_of(family, folder)),
            "train_data": {"path": str(folder)},
        }
    )


def check_export(model: torch.nn.Module, folder: Path) -> None:
    """The export stores the biases that the run moved, in float32, and transformers reads them."""
    found = {name: bias.clone() for name, bias in expert_biases(model).items()}
    assert found
    for bias in found.values():
        steps = bias / RATE
        assert bias.count_nonzero() and torch.allclose(steps, steps.round(), atol=1e-4)
    stored = {key: x for key, x in load_file(folder / "model.safetensors").items() if "correction_bias" in key}
    assert {x.dtype for x in stored.values()} == {torch.float32}
    read = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    theirs = [tensor for key, tensor in read.items() if key.endswith("e_score_correction_bias")]
    for tensors in ([*stored.values()], theirs):
        assert len(tensors) == len(found)
        assert all(any(torch.equal(bias, tensor) for tensor in tensors) for bias in found.values())


@pytest.mark.parametrize("family", STORED)
def test_sft_moves_the_biases_and_exports_them(family: str, tmp_path: Path) -> None:
    trainer = SFTTrainer(sft_config(family, tmp_path))
    trainer.train()
    check_export(trainer.engine.full_model, tmp_path / "run" / "export")


def test_rl_moves_the_biases_keeps_the_generator_in_step_and_exports_them(tmp_path: Path) -> None:
    """With a reference, which moves none, and logits of the export as transformers computes them."""
    run = small_run(blank_of("glm4_moe", tmp_path), tmp_path / "run")
    run |= {
        "actor": balanced(tmp_path / "glm4_moe"),
        "ref": {},
        "algorithm": {"kl": {"coef": 0.01}},
        "verify_export": True,
    }
    trainer = RLTrainer(RLConfig.parse(run))
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [row["first_logprob_diff"] for row in records if "first_logprob_diff" in row]
    assert len(differences) == run["total_steps"] and max(differences) < FIRST_RATIO_FP32
    check_export(trainer.engine.full_model, tmp_path / "run" / "export")


@pytest.mark.parametrize("family", LOST)
def test_what_the_export_cannot_hold_is_refused_before_the_run(family: str, tmp_path: Path) -> None:
    refused = r"router_bias_update_rate = 0\.01 moves balancing biases, and an exported " + family
    with pytest.raises(ConfigError, match=rf"model\.{refused}"):
        SFTTrainer(sft_config(family, tmp_path)).train()
    run = small_run(tmp_path / family, tmp_path / "rl") | {"actor": balanced(tmp_path / family)}
    with pytest.raises(ConfigError, match=rf"actor\.{refused}"):
        RLTrainer(RLConfig.parse(run)).train()
    assert not (tmp_path / "run" / "export").exists() and not (tmp_path / "rl" / "export").exists()


def test_the_reference_of_preference_training_has_no_rate(tmp_path: Path) -> None:
    config = sft_config("glm4_moe", tmp_path)
    resolved = PreferenceConfig.parse(config.model_dump() | {"loss": "dpo"}).resolve()
    assert resolved.ref is not None and resolved.ref.router_bias_update_rate == 0
    assert resolved.model.router_bias_update_rate == RATE
