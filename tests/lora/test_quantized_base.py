"""QLoRA: a frozen base in NF4 or FP8 trains as LoRA on the dequantized weights does, in less memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

from archon.checkpoint.convert import convert
from archon.checkpoint.hf_io import load_model
from archon.checkpoint.peft.export import export_lora
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.memory.recompute import memory_model
from archon.models.lora.quantized_base import (
    FP8_BLOCK,
    NF4_BLOCK,
    NF4_VALUES,
    SCALE_BLOCK,
    QuantizedWeight,
    StoredMatrix,
    dynamic_map,
    quantized_weights,
)
from archon.parallel.layout import parse_layout
from archon.rl.weight_sync import build_inprocess_engine, engine_weights
from archon.schema.config import EngineConfig, LoRAConfig
from archon.schema.errors import CheckpointError, ConfigError, LayoutError, UserError
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import whole_gradients
from tests.engine.tiny import make_engine, sft_batch
from tests.lora.test_generation import worst_difference
from tests.lora.tiny import LORA, MOE, RANDOM, engine_of, train
from tests.tolerances import GENERATED_LOGPROB_FP32

BLOCKS = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": 640, "vocab_size": 102}
FORMATS = ("nf4", "fp8")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose matrices have whole blocks, and more of them than one scale of scales has."""
    folder = tmp_path_factory.mktemp("blocks")
    make_engine(folder / "made", hf=BLOCKS).save(folder / "base")
    return str(folder / "base")


def quantized(weight: Tensor, format: Any) -> QuantizedWeight:
    stored = QuantizedWeight(*weight.shape, format)
    stored.quantize_(weight, "weight")
    return stored


def test_nf4_is_the_algorithm_of_bitsandbytes() -> None:
    """Against bitsandbytes 0.50.2, quantize_4bit(weight, quant_type="nf4", compress_statistics=True) of a formula."""
    index = torch.arange(300 * 64)
    weight = (((index * 7919) % 1009 - 504) / 1024 * (1 + index // 64 % 7) / 8).view(300, 64)
    stored = quantized(weight, "nf4")
    assert stored.scales is not None
    digests = [hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16] for x in (stored.codes, stored.scales)]
    assert digests == ["7ac7ddb28117363b", "f8cfac9a8145b4f0"]
    rows = stored.dequantized(torch.float32)[::75, :4]
    assert rows.tolist() == [
        [-0.06147874891757965, 0.04444648325443268, 0.027094289660453796, 0.004892497323453426],
        [-0.25659608840942383, 0.3685704469680786, 0.2664605379104614, 0.16243262588977814],
        [-0.09692862629890442, -0.1708737015724182, 0.24544019997119904, 0.17744266986846924],
        [-0.011130975559353828, -0.048279136419296265, -0.08511040359735489, 0.12225119769573212],
    ]


def test_nf4_is_its_definition() -> None:
    """The loops of the paper in float64, with a last block of scales that is not full."""
    weight = torch.randn(50, 448, generator=torch.Generator().manual_seed(0))
    weight[3, 64:128] = 0
    blocks = weight.double().flatten().split(NF4_BLOCK)
    scales = [float(block.abs().max()) for block in blocks]
    mean = sum(scales) / len(scales)
    table = dynamic_map().tolist()
    rounded = []
    for start in range(0, len(scales), SCALE_BLOCK):
        centered = [scale - mean for scale in scales[start : start + SCALE_BLOCK]]
        largest = max(map(abs, centered))
        rounded += [min(table, key=lambda value: abs(value - x / largest)) * largest + mean for x in centered]
    expected = [
        min(NF4_VALUES, key=lambda value: abs(value - x / scale if scale else value)) * stored
        for block, scale, stored in zip(blocks, scales, rounded, strict=True)
        for x in block.tolist()
    ]
    found = quantized(weight, "nf4").dequantized(torch.float64)
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7)
    assert not found[3, 64:128].any()


def test_torchaos_nf4_has_the_same_codes() -> None:
    """torchao rounds the 16 values to four digits, and its scales linearly; so it is near, and no reference."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    stored, torchaos = quantized(weight, "nf4"), NF4Tensor.from_tensor(weight, NF4_BLOCK, SCALE_BLOCK)
    assert (torchaos.quantized_data.view_as(stored.codes) == stored.codes).float().mean() > 0.999
    error = (torchaos.get_original_weight() - stored.dequantized(torch.float32)).norm() / weight.norm()
    assert error < 0.02


def test_fp8_is_its_definition() -> None:
    weight = torch.randn(150, 200, generator=torch.Generator().manual_seed(2)) * 3
    expected = torch.empty(150, 200)
    for row in range(0, 150, FP8_BLOCK):
        for column in range(0, 200, FP8_BLOCK):
            block = weight[row : row + FP8_BLOCK, column : column + FP8_BLOCK]
            scale = block.abs().max() / 448
            expected[row : row + FP8_BLOCK, column : column + FP8_BLOCK] = (block / scale).to(
                torch.float8_e4m3fn
            ).float() * scale
    assert torch.equal(quantized(weight, "fp8").dequantized(torch.float32), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_a_part_of_a_matrix_dequantizes_to_the_part_of_the_whole(format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, of columns, and in chunks of rows."""
    stored = quantized(torch.randn(300, 256, generator=torch.Generator().manual_seed(3)), format)
    whole = stored.dequantized(torch.float32)
    x = torch.randn(5, 256)
    torch.testing.assert_close(stored.linear(x, None, slice(130, 280)), x @ whole[130:280].t())
    codes, scales, *tables = stored._parts(stored.codes, stored.scales)
    half = (slice(None), slice(codes.shape[1] // 2, None))
    if format == "nf4":
        scales = scales[:, scales.shape[1] // 2 :]
    part = StoredMatrix(format, 256, 0, 128).dequantize((codes[half], scales, *tables), torch.float32)
    assert torch.equal(part, whole[:, 128:])
    monkeypatch.setattr("archon.models.lora.quantized_base.CHUNK", 7 * 256)
    assert torch.equal(stored.dequantized(torch.float32), whole)


def dequantized_copy(engine: ArchonEngine, base: str, folder: Path) -> str:
    """A checkpoint in float32 of the dequantized base of `engine`."""
    plain = engine_of(base, lora=None, optimizer=None)
    weights = dict(engine.base_weights())
    with torch.no_grad():
        for name, parameter in plain.model.named_parameters():
            parameter.copy_(weights[name])
    plain.save(folder, dtype=torch.float32)
    return str(folder)


@pytest.mark.parametrize("recompute", ["none", "full", "op"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_step_is_that_of_lora_on_the_dequantized_base(
    blocks: str, tmp_path: Path, format: str, recompute: str
) -> None:
    checkpointing = {"mode": "selective", "selective": "op"} if recompute == "op" else {"mode": recompute}
    options = {"dtype": "float64", "activation_checkpoint": checkpointing}
    engine = engine_of(blocks, lora=RANDOM | {"quantize_base": format}, **options)
    assert len(quantized_weights(engine.model)) == 21
    plain = engine_of(dequantized_copy(engine, blocks, tmp_path / "plain"), lora=RANDOM, **options)
    batch = sft_batch()
    grads, metrics = whole_gradients(engine, batch, CrossEntropyLoss())
    expected, expected_metrics = whole_gradients(plain, batch, CrossEntropyLoss())
    assert grads.keys() == expected.keys() == {n for n, p in engine.model.named_parameters() if p.requires_grad}
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-12)
    for name, grad in expected.items():
        assert (grads[name] - grad).abs().max() <= 1e-10 * grad.abs().max(), name
    train(engine, 2), train(plain, 2)
    for (name, found), (_, whole) in zip(engine.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12, msg=name)


def test_a_bfloat16_step_is_that_of_lora_on_the_dequantized_base(blocks: str, tmp_path: Path) -> None:
    engine = engine_of(blocks, lora=RANDOM | {"quantize_base": "nf4"}, dtype="bfloat16")
    assert {p.dtype for p in engine.model.parameters()} == {torch.uint8, torch.bfloat16, torch.float32}
    plain = engine_of(dequantized_copy(engine, blocks, tmp_path / "plain"), lora=RANDOM, dtype="bfloat16")
    # Each bfloat16 value is rounded by up to 0.4 %, and the rounding of four steps adds up.
    assert train(engine, 4) == pytest.approx(train(plain, 4), rel=2e-2)


@pytest.mark.parametrize("format", FORMATS)
def test_memory_of_the_base_is_as_planned(blocks: str, format: str) -> None:
    config = {"path": blocks, "device": "cpu", "dtype": "bfloat16"}
    engine = engine_of(blocks, lora=LORA | {"quantize_base": format}, dtype="bfloat16")
    frozen = sum(p.nbytes for p in engine.model.parameters() if not p.requires_grad)
    frozen += sum(x.nbytes for weight in quantized_weights(engine.model).values() for x in weight.buffers())
    built = engine.built
    model = memory_model(engine.config, built.spec, built.args, built.lora_sizes, built.device)
    assert model.estimate_rank(engine.config, parse_layout("d1"), 0, 64, 1).parameters == frozen
    wide = memory_model(
        EngineConfig.parse(config | {"lora": LORA}), built.spec, built.args, built.lora_sizes, built.device
    )
    elements = sum(weight.shape[0] * weight.shape[1] for weight in quantized_weights(engine.model).values())
    saved = wide.estimate_rank(engine.config, parse_layout("d1"), 0, 64, 1).parameters - frozen
    per_weight = 2 - saved / elements  # bytes; 21 small matrices have 21 tables of 3 KiB
    assert per_weight - 21 * 3076 / elements * (format == "nf4") == pytest.approx(
        0.516 if format == "nf4" else 1, rel=1e-3
    )


def test_exports_are_pefts_and_merge_into_the_original_base(blocks: str, tmp_path: Path) -> None:
    """`save` merges into what was trained, the dequantized base; `archon export --merge` into the checkpoint."""
    engine = engine_of(blocks, lora=RANDOM | {"quantize_base": "nf4"})
    train(engine, 1)
    engine.save(tmp_path / "adapter", format="peft")
    engine.save(tmp_path / "trained")
    trained = dict(load_model(tmp_path / "trained").named_parameters())
    assert all(torch.equal(trained[name], weight) for name, weight in engine.weights())
    convert(blocks, tmp_path / "merged", "hf", lora=tmp_path / "adapter")
    merged, original = (dict(load_model(path).named_parameters()) for path in (tmp_path / "merged", blocks))
    loras, name = dict(engine.lora_weights()), "layers.1.feed_forward.w2"
    expected = original[f"{name}.weight"] + 2.0 * loras[f"{name}.lora.b"] @ loras[f"{name}.lora.a"]
    torch.testing.assert_close(merged[f"{name}.weight"], expected)
    # A training checkpoint is exported and merged as well.
    engine.save(tmp_path / "state", format="native")
    export_lora(tmp_path / "state", tmp_path / "exported", blocks)
    file = "adapter_model.safetensors"
    assert (tmp_path / "exported" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    convert(blocks, tmp_path / "from state", "hf", lora=tmp_path / "state")
    from_state = dict(load_model(tmp_path / "from state").named_parameters())
    assert all(torch.equal(tensor, from_state[name]) for name, tensor in merged.items())
    # A folder continues on a quantized base.
    again = engine_of(blocks, lora={"path": str(tmp_path / "adapter"), "quantize_base": "nf4"})
    assert all(torch.equal(tensor, loras[name]) for name, tensor in again.lora_weights())


def test_the_generator_computes_the_trainers_policy(blocks: str) -> None:
    engine = engine_of(blocks, lora=RANDOM | {"quantize_base": "nf4"})
    generator = build_inprocess_engine(engine, None, page_size=4, n_pages=100, eos_token_ids=())
    train(engine, 2)
    generator.update_weights(engine_weights(engine), version=1)
    assert worst_difference(generator, engine.full_model) < GENERATED_LOGPROB_FP32


def test_several_loras_train_on_one_quantized_base(blocks: str) -> None:
    config = {"quantize_base": "nf4", "loras": {"x": RANDOM, "y": RANDOM | {"rank": 2}}}
    engine = engine_of(blocks, lora=config)
    batch = sft_batch()
    batch["lora"] = torch.arange(len(batch["input_ids"])) % 2
    losses = [train_on(engine, batch) for _ in range(4)]
    assert losses[-1] < losses[0]


def train_on(engine: ArchonEngine, batch: dict[str, Any]) -> float:
    return engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)["loss"]


def test_a_run_resumes_on_the_same_quantized_base_alone(blocks: str, tmp_path: Path) -> None:
    engine = engine_of(blocks, lora=RANDOM | {"quantize_base": "nf4"})
    train(engine, 1)
    engine.save(tmp_path / "state", format="native")
    again = engine_of(blocks, lora=RANDOM | {"quantize_base": "nf4"})
    again.load(tmp_path / "state")
    assert train(again, 1, 1) == train(engine, 1, 1)
    with pytest.raises(CheckpointError, match="quantize_base"):
        engine_of(blocks, lora=RANDOM).load(tmp_path / "state")


def split_columns(base: str) -> str:
    try:
        engine_of(base, lora=LORA | {"quantize_base": "nf4"}, layout="t2")
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_tensor_parallelism_inside_a_block_is_refused(tmp_path: Path, ranks: Pool) -> None:
    narrow = BLOCKS | {"num_attention_heads": 4}
    make_engine(tmp_path / "made", hf=narrow).save(tmp_path / "base")
    (message, _) = ranks.run(split_columns, str(tmp_path / "base"))
    assert "tp = 2 splits the 64 input features of layers.0.attention.wo inside a block of 64" in message


def test_what_is_not_supported_is_refused(base: str, blocks: str, tmp_path: Path) -> None:
    nf4 = LORA | {"quantize_base": "nf4"}
    with pytest.raises(ConfigError, match="no linear layer of this model can be stored so: nf4 needs input features"):
        engine_of(base, lora=nf4)
    with pytest.raises(ConfigError, match="quantize_base is nf4, and DoRA divides by the norms of the whole weights"):
        engine_of(blocks, lora=nf4 | {"dora": True})
    with pytest.raises(UserError, match=r"fp8 = rowwise rounds weights in each matmul, and lora\.quantize_base = nf4"):
        engine_of(blocks, lora=nf4, fp8="rowwise")
    make_engine(tmp_path / "made", hf=MOE | {"hidden_size": 64}).save(tmp_path / "moe")
    with pytest.raises(ConfigError, match="this model has experts, which hold most of its weights and are not"):
        engine_of(str(tmp_path / "moe"), lora=nf4)
    with pytest.raises(ConfigError, match=r"weight has values that are not finite, and cannot be quantized"):
        quantized(torch.full((4, 64), torch.inf), "nf4")
    with pytest.raises(UserError, match="quantize_base"):
        LoRAConfig.parse({"quantize_base": "int4"}, source="lora")
