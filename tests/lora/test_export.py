"""Adapters merged into a copy of their base, and a run's checkpoint as a folder of PEFT's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor

from archon.checkpoint.convert import convert
from archon.checkpoint.hf_io import load_model, save_model
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.base import BaseArchonModel
from archon.schema.errors import CheckpointError, ConfigError
from tests.checkpoint.quantizing import BLOCK, quantize
from tests.cli.conftest import archon
from tests.engine.tiny import sft_batch
from tests.lora.oracle import TOKENS, base_of, difference, engine_of, logits_of, their_logits, theirs

__all__ = ["archon"]  # pytest finds fixtures by their names here
TOLERANCE = 1e-6
MODELS = ("gemma3_text", "qwen3_moe", "gpt_oss", "phi3", "deepseek_v3", "qwen3_next")
LORA = {"rank": 3, "alpha": 1.5, "init": "random", "rslora": True, "rank_pattern": {"down_proj": 2}}


def logits(folder: Path) -> Tensor:
    """Of a checkpoint's weights as they are stored, computed in float64: what rounding the merged weights changes, and
    not what another order of float32 sums does."""
    model: BaseArchonModel = load_model(folder, dtype=torch.float64)
    ends = torch.tensor([0, len(TOKENS)], dtype=torch.int32)
    with torch.no_grad():
        return model(TOKENS, torch.arange(len(TOKENS)), ends, len(TOKENS))


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def trained(base: Path, run: Path, **lora: Any) -> ArchonEngine:
    """An engine whose adapters a step has changed, and its checkpoint in `run`."""
    engine = engine_of(base, lora=LORA | lora, optimizer={"lr": 1e-2})
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    engine.save(run, "native")
    return engine


def unmerged(base: Path, run: Path) -> Tensor:
    """Logits of a base and the adapters of a run's checkpoint, in float64."""
    engine = engine_of(base, lora=LORA, dtype="float64")
    engine.load(run)
    return logits_of(engine)


@pytest.mark.parametrize("model_type", MODELS)
def test_merged_computes_what_unmerged_does(model_type: str, tmp_path: Path) -> None:
    """From a run's checkpoint, of dense matrices, tied heads, experts, fused tensors, latents and delta nets."""
    base = base_of(model_type, tmp_path / "base")
    engine = engine_of(base, lora=LORA, optimizer={"lr": 1e-2})
    engine.save(tmp_path / "run", "native")
    convert(base, tmp_path / "merged", "hf", lora=tmp_path / "run")
    expected = unmerged(base, tmp_path / "run")
    assert difference(logits(tmp_path / "merged"), expected) <= TOLERANCE
    assert difference(logits(base), expected) > 1e-3
    before, after = stored(base), stored(tmp_path / "merged")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {hf for name in engine.lora for hf in engine.adapter.hf_names(name)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, ArchonEngine]:
    """A base, the checkpoints of a run that trained adapters on it, and its engine."""
    folder = tmp_path_factory.mktemp("run")
    base = base_of("qwen3", folder / "base")
    return base, folder / "run", trained(base, folder / "run")


def test_a_runs_checkpoint_becomes_a_folder_that_peft_loads(archon, run, tmp_path: Path) -> None:
    base, checkpoint, engine = run
    done = archon("export", checkpoint, tmp_path / "adapter", "--base", base)
    assert done.code == 0, done.err
    assert f"LoRAs of {len(engine.lora)} matrices" in done.out
    engine.save(tmp_path / "direct", "peft")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "adapter" / file).read_bytes() == (tmp_path / "direct" / file).read_bytes()
    assert difference(their_logits(theirs(base, tmp_path / "adapter")), logits_of(engine)) <= 1e-5


def test_experts_are_written_one_by_one_and_stacked_again(archon, tmp_path: Path) -> None:
    base = base_of("qwen3_moe", tmp_path / "base")
    engine = engine_of(base, lora=LORA)
    engine.save(tmp_path / "stacked", "peft")
    for source, target in (("stacked", "per_expert"), ("per_expert", "again")):
        experts = "per_expert" if target == "per_expert" else "stacked"
        done = archon("export", tmp_path / source, tmp_path / target, "--experts", experts)
        assert done.code == 0, done.err
    names = {key.removeprefix("base_model.model.model.layers.0.mlp.") for key in stored(tmp_path / "per_expert")}
    assert {f"experts.{row}.{name}_proj.lora_B.weight" for row in range(4) for name in ("gate", "up", "down")} <= names
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "stacked" / file).read_bytes()
    assert (
        "is already in PEFT format; add --merge" in archon("export", tmp_path / "stacked", tmp_path / "out").complaint
    )
    merge = ("export", tmp_path / "stacked", tmp_path / "out", "--merge", "--experts", "stacked")
    assert "--merge writes no LoRA" in archon(*merge).complaint


def test_a_folder_of_pefts_is_merged_into_the_base_that_it_names(archon, run, tmp_path: Path) -> None:
    base, checkpoint, engine = run
    engine.save(tmp_path / "adapter", "peft")
    done = archon("export", tmp_path / "adapter", tmp_path / "merged", "--merge")
    assert done.code == 0, done.err
    assert difference(logits(tmp_path / "merged"), unmerged(base, checkpoint)) <= TOLERANCE
    assert difference(their_logits(theirs(tmp_path / "merged")), logits_of(engine)) <= 1e-5
    assert archon("export", checkpoint, tmp_path / "same", "--merge", "--base", base).code == 0
    assert archon("convert", base, tmp_path / "also", "--to", "hf", "--lora", tmp_path / "adapter").code == 0
    merged = stored(tmp_path / "merged")
    for folder in ("same", "also"):
        assert all(torch.equal(tensor, merged[name]) for name, tensor in stored(tmp_path / folder).items())


def test_a_bfloat16_base_keeps_its_dtype_or_is_merged_in_a_wider_one(archon, run, tmp_path: Path) -> None:
    """Sum are rounded once: where all weights are written as float32, not at all."""
    base, _, engine = run
    engine.save(tmp_path / "adapter", "peft")
    convert(base, tmp_path / "half", "hf", dtype=torch.bfloat16)
    assert archon("export", tmp_path / "adapter", tmp_path / "kept", "--merge", "--base", tmp_path / "half").code == 0
    wide = ("--merge", "--dtype", "float32", "--base", tmp_path / "half")
    assert archon("export", tmp_path / "adapter", tmp_path / "wide", *wide).code == 0
    half, kept, widened = (stored(tmp_path / name) for name in ("half", "kept", "wide"))
    lora = stored(tmp_path / "adapter")
    matrix = "model.layers.0.mlp.up_proj"
    a, b = (lora[f"base_model.model.{matrix}.lora_{part}.weight"] for part in "AB")
    exact = half[f"{matrix}.weight"].float() + engine.lora["layers.0.feed_forward.w3.weight"].scale * (b @ a)
    torch.testing.assert_close(widened[f"{matrix}.weight"], exact, rtol=1e-6, atol=1e-7)
    assert torch.equal(kept[f"{matrix}.weight"], widened[f"{matrix}.weight"].bfloat16())
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in widened.values()} == {torch.float32}
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def test_a_quantized_base_is_dequantized_with_a_word(archon, run, tmp_path: Path) -> None:
    base, _, engine = run
    engine.save(tmp_path / "adapter", "peft")
    state, meant = quantize(stored(base))
    config = json.loads((base / "config.json").read_text())
    for name, tensors in (("fp8", state), ("plain", meant)):
        (tmp_path / name).mkdir()
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / name / "model.safetensors")
        method = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [*BLOCK]}}
        (tmp_path / name / "config.json").write_text(json.dumps(config | (method if name == "fp8" else {})))
    done = archon("export", tmp_path / "adapter", tmp_path / "merged", "--merge", "--base", tmp_path / "fp8")
    assert done.code == 0, done.err
    assert "the base is fp8; all weights were dequantized" in done.out
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    convert(tmp_path / "plain", tmp_path / "expected", "hf", lora=tmp_path / "adapter")
    expected = stored(tmp_path / "expected")
    assert all(torch.equal(tensor, expected[key]) for key, tensor in stored(tmp_path / "merged").items())


def test_adapters_are_merged_into_other_formats_too(run, tmp_path: Path) -> None:
    base, checkpoint, engine = run
    engine.save(tmp_path / "adapter", "peft")
    convert(base, tmp_path / "native", "native", lora=tmp_path / "adapter")
    plain = engine_of(base, dtype="float64")
    plain.load(tmp_path / "native")
    assert difference(logits_of(plain), unmerged(base, checkpoint)) <= TOLERANCE
    with pytest.raises(CheckpointError, match=r"it holds only LoRAs; archon export writes them"):
        convert(checkpoint, tmp_path / "out", "hf", like=base)
    with pytest.raises(ConfigError, match=r"its LoRA fits only the base that it was trained on"):
        convert(tmp_path / "native", tmp_path / "out", "hf", like=base, lora=checkpoint)


def test_what_has_no_adapter_or_no_base_is_one_line(
    archon, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    base, checkpoint, engine = run
    out = tmp_path / "out"
    assert "it does not name its base; set --base" in archon("export", checkpoint, out).complaint
    engine.save(tmp_path / "adapter", "peft")
    assert "is already in PEFT format; add --merge" in archon("export", tmp_path / "adapter", out).complaint
    assert "--dtype requires --merge" in archon("export", checkpoint, out, "--dtype", "float32").complaint
    assert "it holds no LoRA" in archon("export", base, out, "--base", base).complaint
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(base), "org/absent"))
    complaint = archon("export", tmp_path / "adapter", out, "--merge").complaint
    assert "its base is not available (org/absent: no such folder" in complaint and "set --base" in complaint
    full = engine_of(base, optimizer={"lr": 1e-3})
    full.save(tmp_path / "full", "native")
    assert "it holds all weights of a model and no LoRA" in (
        archon("export", tmp_path / "full", out, "--base", base).complaint
    )
    other = base_of("llama", tmp_path / "other")
    assert "written by another model" in archon("export", checkpoint, out, "--base", other).complaint
    assert not out.exists()


def test_adapters_of_a_run_are_for_its_base_alone(run, tmp_path: Path) -> None:
    """Another checkpoint of the same model, one tensor of which differs."""
    base, checkpoint, _ = run
    tensors = stored(base)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    shutil.copytree(base, tmp_path / "other")
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="its LoRAs were trained on another base"):
        convert(tmp_path / "other", tmp_path / "out", "hf", lora=checkpoint)


def test_one_of_several_adapters_of_a_run_is_chosen_by_its_name(archon, run, tmp_path: Path) -> None:
    base, _, _ = run
    loras = {"sums": {"rank": 3, "init": "random"}, "words": {"rank": 2, "init": "random", "seed": 1}}
    engine = engine_of(base, lora={"loras": loras}, optimizer={"lr": 1e-2})
    engine.save(tmp_path / "several", "native")
    for name in loras:
        engine.save(tmp_path / f"direct_{name}", "peft", lora=name)
        done = archon("export", tmp_path / "several", tmp_path / name, "--base", base, "--name", name)
        assert done.code == 0, done.err
        written, expected = stored(tmp_path / name), stored(tmp_path / f"direct_{name}")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[key], tensor) for key, tensor in expected.items())
    asked = ("export", tmp_path / "several", tmp_path / "out", "--base", base)
    assert "it holds LoRAs sums, words; choose one with archon export --name" in archon(*asked).complaint
    assert "it holds LoRAs sums, words, and no 'verse'" in archon(*asked, "--name", "verse").complaint


def test_a_model_with_an_adapter_is_not_saved_without_it(run, tmp_path: Path) -> None:
    base, _, engine = run
    engine.save(tmp_path / "adapter", "peft")
    model = load_model(base, lora=tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"which an export of its weights would lose"):
        save_model(model, tmp_path / "out", like=base)
