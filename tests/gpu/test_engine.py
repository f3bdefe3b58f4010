"""The engine on a GPU: steps, shared beginnings, compiled blocks, 8-bit products, adapters, pictures and critics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models import get_model_spec
from archon.parallel.activation_offload import MAX_DEVICE_INPUTS
from archon.schema.config import EngineConfig
from archon.tools.check.oracle import EXPERT_FIELDS
from tests.cuda_traced.test_engine import EVEN, LORA, MODELS
from tests.engine.test_host_waits import scored
from tests.engine.test_shared_prefixes import answers, histories
from tests.engine.tiny import sft_batch
from tests.gpu.models import distance
from tests.models.vision_language import image_rows, vision_language_config
from tests.tolerances import GPU_FP32, GPU_STEPS, TIMES_BF16

pytestmark = pytest.mark.gpu

models = pytest.mark.parametrize("hf", MODELS.values(), ids=MODELS)
PLAIN = {"compile": False, "optimizer": {"lr": 1e-3}, "max_tokens_per_mb": 128}


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def engine(folder: Path, hf: dict[str, Any], device: str, **config: Any) -> ArchonEngine:
    """An engine for a config.json with the same fresh weights on every device, or for a checkpoint in `folder`."""
    if "init_from_scratch" not in config:
        config["init_from_scratch"] = True
        (folder / "config.json").write_text(json.dumps(hf))
    made = ArchonEngine(EngineConfig.parse({"path": str(folder), "device": device} | PLAIN | config))
    made.initialize(9)
    return made


def gradients(engine: ArchonEngine, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Every gradient in float64 on the CPU, and the metrics."""
    grads, metrics = engine.gradients(batch, CrossEntropyLoss(), loss_token_count)
    return {name: x.double().cpu() for name, x in grads.items()}, metrics


@pytest.mark.parametrize("loss_fn", [CrossEntropyLoss(), scored], ids=["fused", "scores"])
@models
def test_steps_are_those_of_the_cpu(tmp_path: Path, hf: dict[str, Any], loss_fn: Any) -> None:
    found = []
    for device in ("cuda", "cpu"):
        own = engine(tmp_path, hf, device, dtype="float32", attn_type="sdpa")
        metrics = [own.train_batch(sft_batch(seed=seed), loss_fn, loss_token_count) for seed in range(3)]
        found.append([(step["loss"], step["grad_norm"]) for step in metrics])
        if loss_fn is scored:
            found[-1].extend((float(x.sum()), 1.0) for x in own.forward_with_entropy(sft_batch()))
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=GPU_STEPS)


@pytest.mark.parametrize("batch", [answers(), histories(8, 2, 20)], ids=["answers", "histories"])
@models
def test_common_beginnings_change_nothing_but_the_work(
    tmp_path: Path, hf: dict[str, Any], batch: dict[str, Tensor]
) -> None:
    """Merged by log-sum-exp, with the backward of the kernels: as near to float64 as without sharing."""
    wide = {"max_tokens_per_mb": 4096}
    exact, _ = gradients(engine(tmp_path, hf, "cpu", dtype="float64", share_prefixes=False, **wide), batch)
    far = {}
    for share in (True, False):
        own = engine(tmp_path, hf, "cuda", dtype="bfloat16", attn_type="varlen", share_prefixes=share, **wide)
        grads, metrics = gradients(own, batch)
        far[share] = distance(grads, exact)
        if share and "linear_num_key_heads" not in hf:
            assert metrics["tokens_computed"] < 0.8 * metrics["tokens"]
    assert far[True] <= TIMES_BF16 * far[False]


def n_experts(hf: dict[str, Any]) -> Any:
    return next((hf[name] for name in EXPERT_FIELDS if name in hf), None)


@models
def test_compiled_blocks(tmp_path: Path, hf: dict[str, Any]) -> None:
    """What `auto` does on a GPU: the gradient of eager code, and no compilation after the first of ragged batches."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if experts := n_experts(hf):  # all of them, so that rounding chooses no others
        hf = hf | {"num_experts_per_tok": experts} | ({"topk_group": hf["n_group"]} if "n_group" in hf else {})
    exact, _ = gradients(engine(tmp_path, hf, "cpu", dtype="float64"), sft_batch())
    sides = [engine(tmp_path, hf, "cuda", dtype="bfloat16", compile=choice) for choice in ("auto", False)]
    ours, theirs = (distance(gradients(own, sft_batch())[0], exact) for own in sides)
    assert ours <= TIMES_BF16 * theirs
    compiled = []
    for lengths in ((13, 5, 21, 8), (40, 2, 9), (7, 7, 7, 30), (64, 3)):
        sides[0].train_batch(sft_batch(lengths), CrossEntropyLoss(), loss_token_count)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[1:] == [compiled[1]] * 3


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_offloaded_activations(tmp_path: Path, compile_blocks: bool) -> None:
    """The gradients of `full`, bitwise, and less memory by the inputs of all blocks but three."""
    hf = next(iter(MODELS.values())) | {"num_hidden_layers": 24}
    sizes, rows = {"max_tokens_per_mb": 8192, "dtype": "bfloat16", "attn_type": "varlen"}, sft_batch((4096, 4096))
    found = {}
    for mode in ("full", "offload"):
        own = engine(tmp_path, hf, "cuda", compile=compile_blocks, activation_checkpoint={"mode": mode}, **sizes)
        gradients(own, rows)  # compiles
        torch.cuda.reset_peak_memory_stats()
        found[mode] = gradients(own, rows)[0], torch.cuda.max_memory_allocated()
    (expected, more), (actual, less) = found["full"], found["offload"]
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    inputs = 8192 * hf["hidden_size"] * 2
    assert more - less > 0.8 * (24 - MAX_DEVICE_INPUTS) * inputs


@pytest.mark.parametrize("compile_blocks", [False, True])
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("hf", EVEN.values(), ids=EVEN)
def test_8_bit_products(tmp_path: Path, hf: dict[str, Any], fp8: str, compile_blocks: bool) -> None:
    """As near to the gradient without 8 bits as the emulation on a CPU is."""
    exact, _ = gradients(engine(tmp_path, hf, "cpu", dtype="float64"), sft_batch())
    emulated, _ = gradients(engine(tmp_path, hf, "cpu", dtype="bfloat16", fp8=fp8), sft_batch())
    ours, _ = gradients(engine(tmp_path, hf, "cuda", dtype="bfloat16", fp8=fp8, compile=compile_blocks), sft_batch())
    assert 0.01 < distance(ours, exact) <= 1.3 * distance(emulated, exact)


@models
def test_an_adapter(tmp_path: Path, hf: dict[str, Any]) -> None:
    engine(tmp_path, hf, "cpu", dtype="float32").save(tmp_path / "base")
    options = {"dtype": "float32", "attn_type": "sdpa", "lora": LORA, "init_from_scratch": False}
    found = []
    for device in ("cuda", "cpu"):
        own = engine(tmp_path / "base", hf, device, **options)
        metrics = [own.train_batch(sft_batch(seed=seed), CrossEntropyLoss(), loss_token_count) for seed in range(3)]
        found.append([(step["loss"], step["grad_norm"]) for step in metrics])
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=GPU_STEPS)


@pytest.mark.parametrize("attn_type", ["varlen", "sdpa"])
def test_pictures(tmp_path: Path, attn_type: str) -> None:
    hf = vision_language_config()
    hf["text_config"].pop("partial_rotary_factor", None)  # some versions of transformers write the default too
    image = get_model_spec("qwen3_5").model_args_class.from_hf_config(hf).image_format
    assert image is not None
    dtype = "bfloat16" if attn_type == "varlen" else "float32"
    batch, common = image_rows([1, 0, 2, 1], image), {"vision": "trained", "max_tokens_per_mb": 100}
    exact, _ = gradients(engine(tmp_path, hf, "cpu", dtype="float64", **common), batch)
    rounded, _ = gradients(engine(tmp_path, hf, "cpu", dtype=dtype, **common), batch)
    ours, _ = gradients(engine(tmp_path, hf, "cuda", dtype=dtype, attn_type=attn_type, **common), batch)
    assert distance(ours, exact) <= max(TIMES_BF16 * distance(rounded, exact), GPU_FP32)


def test_values_of_a_critic(tmp_path: Path) -> None:
    ours, theirs = (
        engine(tmp_path, MODELS["dense"], device, dtype="float32", is_critic=True).forward_batch(sft_batch())
        for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(ours, theirs, rtol=GPU_STEPS, atol=GPU_STEPS)
