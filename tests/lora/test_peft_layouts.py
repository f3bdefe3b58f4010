"""PEFT's files of stacked experts and fused matrices, with the real `peft`: both ways, exactly, of any version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.schema.errors import CheckpointError, ConfigError
from tests.engine.tiny import sft_batch
from tests.lora.oracle import TOKENS, TOLERANCE, base_of, difference, engine_of, logits_of, their_logits, theirs

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANDOM: dict[str, Any] = {"rank": 4, "alpha": 6, "init": "random"}
MODULE = "base_model.model.model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("bases")

    class Bases(dict[str, Path]):
        def __missing__(self, model_type: str) -> Path:
            self[model_type] = base_of(model_type, folder / model_type)
            return self[model_type]

    return Bases()


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.lora_weights()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], tensor) for name, tensor in b.items())


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("phi3", {"rslora": True, "rank_pattern": {"down_proj": 3, "layers.0.self_attn.qkv_proj": 2}}),
        ("qwen3_moe", {"alpha_pattern": {"experts.down_proj": 9, r"layers\.\d+\.self_attn\.o_proj": 3}}),
        ("qwen3_moe", {"alpha": 10, "export_experts": "per_expert"}),
        pytest.param("mixtral", {"rslora": True, "targets": ["q_proj", "w1", "w2"]}, marks=pytest.mark.slow),
        ("gpt_oss", {"rank_pattern": {r".*\.gate_up_proj": 2}}),
        ("deepseek_v3", {}),
        pytest.param("qwen3_next", {"rslora": True}, marks=pytest.mark.slow),
    ],
)
def test_peft_computes_with_archons_adapters_what_archon_does(
    bases: dict[str, Path], tmp_path: Path, model_type: str, options: dict[str, Any]
) -> None:
    """Two of them in one model of PEFT's; archon reads back their sizes and every number."""
    base = bases[model_type]
    lora = RANDOM | options
    engines = [engine_of(base, lora=lora | {"seed": seed}) for seed in (0, 1)]
    engines[0].train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    for seed, engine in enumerate(engines):
        engine.save(tmp_path / str(seed), "peft")
    model = theirs(base, tmp_path / "0")
    model.load_adapter(tmp_path / "1", "second")
    found = []
    for name, engine, seed in zip(("default", "second"), engines, (0, 1), strict=True):
        model.set_adapter(name)
        found.append(their_logits(model))
        assert difference(found[-1], logits_of(engine)) <= TOLERANCE
        again = engine_of(base, lora={"path": str(tmp_path / str(seed))})
        assert again.lora == engine.lora
        assert same(weights(again), weights(engine))
    assert difference(*found) > 0.05


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "rank_pattern": {"qkv_proj": 5}}),
        (
            "qwen3_moe",
            {
                "target_modules": r".*\.self_attn\.(q|o)_proj",
                "target_parameters": EXPERTS,
                "rank_pattern": {r".*\.down_proj": 2},
                "alpha_pattern": {"layers.0.mlp.experts.gate_up_proj": 11},
            },
        ),
        ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
        ("gpt_oss", {"target_modules": ["k_proj"], "target_parameters": EXPERTS, "use_rslora": True}),
        pytest.param("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS[:1]}, marks=pytest.mark.slow),
        ("deepseek_v3", {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa"], "target_parameters": EXPERTS[1:]}),
        ("qwen3_next", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "q_proj"], "target_parameters": EXPERTS}),
    ],
)
def test_archon_computes_with_pefts_adapters_what_peft_does(
    bases: dict[str, Path], tmp_path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    """Matrices that share an A have a copy of it, and what archon writes again is the same numbers."""
    base = bases[model_type]
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **fields)
    model = peft.get_peft_model(theirs(base), config).eval()
    model.save_pretrained(tmp_path / "theirs")
    engine = engine_of(base, lora={"path": str(tmp_path / "theirs")})
    assert difference(logits_of(engine), their_logits(model)) <= TOLERANCE
    assert difference(their_logits(theirs(base)), their_logits(model)) > 0.02
    engine.save(tmp_path / "ours", "peft")
    written, given = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert same(written, given)
    again = engine_of(base, lora={"path": str(tmp_path / "ours")})
    assert again.lora == engine.lora
    assert same(weights(again), weights(engine))


def test_a_composite_models_adapters_are_of_it_or_of_its_text_decoder(bases: dict[str, Path], tmp_path: Path) -> None:
    """Archon writes those of the whole model, as its checkpoint has names, and reads both."""
    base = bases["qwen3_5_moe"]
    engine = engine_of(base, lora=RANDOM)
    engine.save(tmp_path / "whole", "peft")
    whole = theirs(base, tmp_path / "whole", AutoModelForImageTextToText)
    assert difference(their_logits(whole), logits_of(engine)) <= TOLERANCE
    assert same(weights(engine_of(base, lora={"path": str(tmp_path / "whole")})), weights(engine))
    config = peft.LoraConfig(
        r=3, target_modules=["in_proj_qkv", "o_proj"], target_parameters=EXPERTS, init_lora_weights=False
    )
    text = peft.get_peft_model(theirs(base), config).eval()
    text.save_pretrained(tmp_path / "text")
    found = engine_of(base, lora={"path": str(tmp_path / "text")})
    assert difference(logits_of(found), their_logits(text)) <= TOLERANCE


def as_old(tensor: Tensor, other: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """A and B as an older PEFT wrote them, expert by expert: A of the outputs, B of the inputs."""
    rank = len(tensor) // experts
    a = torch.cat([other[:, e::experts].T for e in range(experts)])
    b = torch.stack([tensor[e * rank + r] for r in range(rank) for e in range(experts)], dim=1)
    return a, b.contiguous()


@pytest.mark.parametrize(
    ("model_type", "version", "is_old"),
    [
        ("qwen3_moe", None, True),
        pytest.param("qwen3_moe", "0.18.1", True, marks=pytest.mark.slow),
        ("qwen3_moe", "0.19.0", True),
        ("qwen3_moe", "0.19.1", False),
        ("gpt_oss", "0.18.2.dev0@UNKNOWN", False),
        ("gpt_oss", "0.19.0", True),
        pytest.param("gpt_oss", "0.20", False, marks=pytest.mark.slow),
    ],
)
def test_files_of_older_versions_of_peft(
    bases: dict[str, Path], tmp_path: Path, model_type: str, version: str | None, is_old: bool
) -> None:
    base = bases[model_type]
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=EXPERTS, init_lora_weights=False)
    peft.get_peft_model(theirs(base), config).save_pretrained(tmp_path)
    new = engine_of(base, lora={"path": str(tmp_path)})
    file, fields = tmp_path / "adapter_model.safetensors", json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(file)
    experts = new.adapter.native_shapes["layers.0.moe.experts.w1"][0]
    for key in [key for key in tensors if ".experts." in key and "lora_A" in key] if is_old else []:
        other = key.replace("lora_A", "lora_B")
        tensors[key], tensors[other] = as_old(tensors[key], tensors[other], experts)
    save_file(tensors, file)
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields | {"peft_version": version}))
    assert same(weights(engine_of(base, lora={"path": str(tmp_path)})), weights(new))
    wrong = "0.21.0" if is_old else "0.19.0" if model_type == "gpt_oss" else "0.18.0"
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields | {"peft_version": wrong}))
    with pytest.raises(CheckpointError, match=rf"has shapes .*, expected .*, as PEFT {wrong} stacks experts"):
        engine_of(base, lora={"path": str(tmp_path)})


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "phi3"])
def test_gradients_of_fused_and_stacked_adapters_are_pefts(
    bases: dict[str, Path], tmp_path: Path, model_type: str
) -> None:
    """PEFT's one adapter of two matrices has theirs as the blocks of its diagonal; its other blocks archon lacks."""
    targets = ["gate_up_proj", "down_proj"]
    engine = engine_of(bases[model_type], lora=RANDOM | {"targets": targets})
    engine.save(tmp_path, "peft")
    batch = {"input_ids": TOKENS[None], "attention_mask": torch.ones(1, len(TOKENS), dtype=torch.bool)}
    batch["loss_mask"] = batch["attention_mask"].long()
    found, _ = engine.gradients(batch, CrossEntropyLoss(), loss_token_count)
    model = peft.PeftModel.from_pretrained(theirs(bases[model_type]), tmp_path, is_trainable=True)
    model(TOKENS[None], labels=TOKENS[None]).loss.backward()
    expected = {name.replace(".default.", "."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    if model_type == "phi3":
        prefix, owner = "base_model.model.model.layers.1.mlp.gate_up_proj", "layers.1.feed_forward"
        a, b = expected[f"{prefix}.lora_A.weight"], expected[f"{prefix}.lora_B.weight"]
        parts = {f"{owner}.{w}.lora": i for i, w in enumerate(("w1", "w3"))}
    else:
        prefix, owner = MODULE.replace("layers.0", "layers.1"), "layers.1.moe.experts"
        experts = engine.adapter.native_shapes[f"{owner}.w1"][0]
        a, b = expected[f"{prefix}.base_layer.lora_A.weight"], expected[f"{prefix}.base_layer.lora_B.weight"]
        a, b = a.unflatten(0, (experts, 8)), b.unflatten(1, (8, experts)).permute(2, 0, 1)
        parts = {f"{owner}.lora.{w}": i for i, w in enumerate(("w1", "w3"))}
        down = expected[f"{prefix}.lora_A.weight"].unflatten(0, (experts, 4))
        torch.testing.assert_close(found[f"{owner}.lora.w2.a"], down, rtol=1e-4, atol=1e-6)
        down = expected[f"{prefix}.lora_B.weight"].unflatten(1, (4, experts)).permute(2, 0, 1)
        torch.testing.assert_close(found[f"{owner}.lora.w2.b"], down, rtol=1e-4, atol=1e-6)
    for name, part in parts.items():
        ranks = slice(4 * part, 4 * part + 4)
        half = b.shape[-2] // 2
        rows = b[..., part::2, ranks] if model_type == "gpt_oss" else b[..., part * half : part * half + half, ranks]
        torch.testing.assert_close(found[f"{name}.a"], a[..., ranks, :], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found[f"{name}.b"], rows, rtol=1e-4, atol=1e-6)
        assert found[f"{name}.b"].abs().max() > 1e-4


@pytest.mark.parametrize(
    ("model_type", "lora", "complaint"),
    [
        ("qwen3_moe", {"rank_pattern": {"gate_proj": 2}}, r"scales differ \('layers.0.moe.experts.w1' 3, 'layers"),
        ("qwen3_moe", {"alpha_pattern": {"experts.1.up_proj": 2}}, "alpha_pattern differs between .* of one size"),
        ("qwen3_moe", {"targets": ["experts.1.up_proj"]}, "targets differs between .* of one size, or none"),
        ("gpt_oss", {"export_experts": "per_expert"}, "export_experts is per_expert, but the checkpoint stacks"),
    ],
)
def test_adapters_that_peft_cannot_hold_are_refused(
    bases: dict[str, Path], tmp_path: Path, model_type: str, lora: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        engine_of(bases[model_type], lora=RANDOM | lora).save(tmp_path, "peft")


def test_experts_of_other_ranks_for_gate_and_up_are_written_one_by_one(bases: dict[str, Path], tmp_path: Path) -> None:
    lora = RANDOM | {"rank_pattern": {"gate_proj": 2}, "export_experts": "per_expert"}
    engine = engine_of(bases["qwen3_moe"], lora=lora)
    engine.save(tmp_path, "peft")
    shapes = {key: tuple(x.shape) for key, x in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert shapes[f"{MODULE}.3.gate_proj.lora_A.weight"] == (2, 60)
    assert shapes[f"{MODULE}.3.up_proj.lora_B.weight"] == (8, 4)
    assert same(weights(engine_of(bases["qwen3_moe"], lora={"path": str(tmp_path)})), weights(engine))
