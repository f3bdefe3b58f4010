"""Quantized checkpoints are read as the weights they stand for: transformers' own dequantization, and plain loops."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import archon
from archon.checkpoint.convert import convert
from archon.checkpoint.hf_reader import HFCheckpoint, ReadTarget, load_hf_weights, loadable_tensors
from archon.checkpoint.quantized import StoredTensor, stored_tensors
from archon.checkpoint.safetensors_file import CHUNK_BYTES
from archon.models.hf.quantization import Quantization, read_quantization
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError, ConfigError
from archon.tools.check.oracle import (
    checkpoint_tensors,
    family_config,
    hf_model,
    pack,
    random_config,
    reference_logits,
    relative_error,
)
from archon.tools.check.parity import FP32_TOLERANCE
from tests.checkpoint.quantizing import BLOCK, blocks_of, dequantized, packed, quantize, random_fp8, random_scales
from tests.checkpoint.tiny_checkpoints import config_with, random_weights, write_checkpoint
from tests.models.fused_family import WAYS, adapter_of, checkpoint_by_hand, random_native

FP8 = {"quant_method": "fp8", "weight_block_size": [*BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
SCALE_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8]
SEED = 2
GENERATOR = torch.Generator().manual_seed(1)


def read(checkpoint: HFCheckpoint, tensor: StoredTensor, region: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    out = torch.full([part.stop - part.start for part in region], torch.nan, dtype=dtype)
    checkpoint.read([ReadTarget(tensor.entry.name, out, region, tensor.shape, tensor.decoder)])
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
def test_fp8_is_what_transformers_makes_of_it(tmp_path: Path, scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    data = random_fp8((256, 384), GENERATOR)
    scales = random_scales((2, 3), scale_dtype, GENERATOR)
    save_file({"w": data, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    wanted = Fp8Dequantize(None)._dequantize_one(data, scales, dtype)
    with HFCheckpoint(tmp_path) as checkpoint:
        tensors = stored_tensors(
            checkpoint.entries, checkpoint.files, Quantization("fp8", (128, 128)), {"w": (256, 384)}
        )
        assert tensors.keys() == {"w"}
        for region in ((slice(0, 256), slice(0, 384)), (slice(37, 171), slice(5, 300)), (slice(255, 256), slice(0, 1))):
            assert torch.equal(read(checkpoint, tensors["w"], region, dtype), wanted[region])


@pytest.mark.parametrize("shape", [(300, 200), (3, 70, 90)], ids=str)
def test_blocks_at_the_edges_are_smaller_and_rows_count_from_the_first_of_their_matrix(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    block = (128, 128) if len(shape) == 2 else (32, 48)
    data = random_fp8(shape, GENERATOR)
    scales = random_scales(blocks_of(shape, block), torch.float32, GENERATOR)
    save_file({"w": data, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    wanted = dequantized(data, scales, block)
    with HFCheckpoint(tmp_path) as checkpoint:
        tensors = stored_tensors(checkpoint.entries, checkpoint.files, Quantization("fp8", block), {"w": shape})
        for first, stop in ((0, shape[-2]), (13, 61), (64, 65), (shape[-2] - 1, shape[-2])):
            region = (*(slice(1, size) for size in shape[:-2]), slice(first, stop), slice(first // 4, shape[-1]))
            assert torch.equal(read(checkpoint, tensors["w"], region, torch.float32), wanted[region])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_matrix_with_a_single_scale_is_read_without_the_scale_of_its_inputs(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Ministral 3's instruction-tuned checkpoints."""
    options = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    config = config_with() | {"quantization_config": options | {"modules_to_not_convert": ["lm_head"]}}
    state = random_weights(config)
    name = "model.layers.0.self_attn.q_proj"
    data, scale = random_fp8(tuple(state[f"{name}.weight"].shape), GENERATOR), torch.full(shape, 0.37)
    stored = state | {f"{name}.weight": data, f"{name}.weight_scale_inv": scale, f"{name}.activation_scale": scale + 1}
    model = archon.load_model(write_checkpoint(tmp_path / "fp8", config, stored), dtype=torch.float32)
    assert torch.equal(model.layers["0"].attention.wq.weight, data.float() * 0.37)
    lone = stored | {"model.layers.0.self_attn.k_proj.activation_scale": scale + 2}
    with pytest.raises(CheckpointError, match=r"unknown key 'model.layers.0.self_attn.k_proj.activation_scale'"):
        archon.load_model(write_checkpoint(tmp_path / "lone", config, lone))


@pytest.mark.parametrize("name", WAYS)
def test_a_model_of_fp8_blocks_is_loaded_whatever_its_tensors_hold(tmp_path: Path, name: str) -> None:
    plain = adapter_of(WAYS[name])
    adapter = type(plain)(WAYS[name].config | {"quantization_config": FP8})
    state, expected = quantize(checkpoint_by_hand(WAYS[name], random_native(adapter)))
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / "model.safetensors")
    model = adapter.model_class(adapter.args)
    load_hf_weights(model, adapter, tmp_path)
    native, loaded = plain.from_hf(expected), loadable_tensors(model, adapter)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in native.items())


# MXFP4


def sparse(dim: int = 64, hidden: int = 32) -> tuple[BaseStateDictAdapter, dict[str, Any]]:
    """An adapter of experts stored as gpt-oss stores them; with the defaults w2's transpose has another shape."""
    way = WAYS["experts of alternating columns"]
    config = way.config | {
        "hidden_size": dim,
        "head_dim": 4,
        "moe_intermediate_size": hidden,
        "mlp_only_layers": [1],
        "quantization_config": MXFP4,
    }
    return type(adapter_of(way))(config), config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 32], ids=["rectangular", "square"])
def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path, dim: int, dtype: torch.dtype) -> None:
    adapter, _ = sparse(dim)
    state, expected = packed(adapter.to_hf(random_native(adapter)))
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / "model.safetensors")
    model = adapter.model_class(adapter.args).to(dtype)
    load_hf_weights(model, adapter, tmp_path)
    for key, tensor in adapter.from_hf(expected).items():
        assert torch.equal(loadable_tensors(model, adapter)[key].float(), tensor.to(dtype).float()), key


def test_every_byte_and_a_part_of_a_large_stack(tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(2 * 700 * 20 * 16 // 256 + 1)[: 2 * 700 * 20 * 16]
    blocks = blocks.view(2, 700, 20, 16)
    scales = torch.randint(0, 255, (2, 700, 20), generator=GENERATOR, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
    assert wanted[0].numel() // 2 < CHUNK_BYTES < blocks.numel() * 4
    with HFCheckpoint(tmp_path) as checkpoint:
        tensors = stored_tensors(
            checkpoint.entries, checkpoint.files, Quantization("mxfp4"), {"w": tuple(wanted.mT.shape)}
        )
        for region in ((slice(0, 2), slice(0, 700), slice(0, 640)), (slice(1, 2), slice(333, 600), slice(31, 640))):
            assert torch.equal(read(checkpoint, tensors["w"], region, torch.float32), wanted[region])
        lazy = tensors["w"].lazy(torch.bfloat16, transposed=True)
        assert (lazy.shape, lazy.dtype) == ((2, 640, 700), torch.bfloat16)
        part = (slice(1, 2), slice(3, 40), slice(100, 300))
        assert torch.equal(lazy.read(part), wanted.mT[part].bfloat16())


# Exports


def test_an_export_is_not_quantized(tmp_path: Path) -> None:
    config = config_with(torch_dtype="bfloat16") | {"quantization_config": FP8}
    state, expected = quantize(random_weights(config, torch.bfloat16))
    folder = write_checkpoint(tmp_path / "in", config, state, shards=2)
    model = archon.load_model(folder)
    archon.save_model(model, tmp_path / "saved", folder)
    convert(folder, tmp_path / "converted", "hf")
    convert(folder, tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "back", "hf", like=folder)
    convert(folder, tmp_path / "dcp", "dcp")
    assert "quantization_config" not in json.loads((tmp_path / "dcp" / "config.json").read_text())
    convert(tmp_path / "dcp", tmp_path / "from_dcp", "hf")
    for out in ("saved", "converted", "back", "from_dcp"):
        assert "quantization_config" not in json.loads((tmp_path / out / "config.json").read_text())
        found = load_file(tmp_path / out / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor.bfloat16()) for key, tensor in expected.items()), out
        archon.load_model(tmp_path / out)


def test_converted_experts_lie_as_the_family_declares(tmp_path: Path) -> None:
    adapter, _ = sparse()
    state, expected = packed(adapter.to_hf(random_native(adapter)))
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint:
        for key, tensor in checkpoint.tensors(adapter).items():
            is_transposed = adapter.hf_to_native(key)[0].is_transposed
            assert torch.equal(tensor.lazy(torch.float32, transposed=is_transposed).read(), expected[key]), key


# Defects

Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm"
SCALE = f"{Q}_scale_inv"
Edit = Callable[[dict[str, Tensor]], Any]


def put(key: str, tensor: Tensor) -> Edit:
    return lambda state: state.update({key: tensor})


def cast(key: str, dtype: torch.dtype) -> Edit:
    return lambda state: state.update({key: state[key].to(dtype)})


def swap(state: dict[str, Tensor]) -> None:
    state |= {Q: state[Q].t().contiguous(), SCALE: torch.ones(5, 5)}


def quantize_norm(state: dict[str, Tensor]) -> None:
    state |= {f"{NORM}.weight": torch.ones(24).to(torch.float8_e4m3fn), f"{NORM}.weight_scale_inv": torch.ones(1)}


DEFECTS: dict[str, tuple[Edit, str]] = {
    "no scale": (lambda state: state.pop(SCALE), f"'{Q}', but '{SCALE}', the other half of '{Q}', is missing"),
    "no data": (lambda state: state.pop(Q), f"holds '{SCALE}', but '{Q}', the other half"),
    "scale of a wide tensor": (cast(Q, torch.float32), f"'{Q}' is torch.float32 and has the scale"),
    "scale of nothing": (
        put("model.layers.7.x_scale_inv", torch.ones(1, 1)),
        "unknown key 'model.layers.7.x_scale_inv'",
    ),
    "scale of a norm": (put(f"{NORM}.weight_scale_inv", torch.ones(1)), "'model.norm.weight' is torch.float32 and has"),
    "fewer scales": (put(SCALE, torch.ones(1, 4)), r"has shape \[1, 4\], expected \[6, 4\]"),
    "transposed scales": (put(SCALE, torch.ones(4, 6)), r"has shape \[4, 6\], expected"),
    "scales of integers": (cast(SCALE, torch.int32), "is torch.int32; expected scales of"),
    "NaN scales": (lambda state: state[SCALE].fill_(torch.nan), "holds scales that are NaN or infinite"),
    "infinite scales": (lambda state: state[SCALE].fill_(torch.inf), "holds scales that are NaN or infinite"),
    "negative scales": (lambda state: state[SCALE][5].neg_(), "holds negative scales, which would change signs"),
    "NaN exponents": (put(SCALE, torch.full((6, 4), 255, dtype=torch.uint8)), "scales that are NaN"),
    "e5m2": (cast(Q, torch.float8_e5m2), f"'{Q}' is torch.float8_e5m2 and has the scale"),
    "another shape": (swap, r"'.*q_proj.weight' has shape"),
    "a vector": (quantize_norm, r"of shape \[24\]; expected a matrix"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_fp8_is_named(tmp_path: Path, defect: str) -> None:
    edit, match = DEFECTS[defect]
    config = config_with() | {"quantization_config": FP8}
    state, _ = quantize(random_weights(config))
    edit(state)
    with pytest.raises(CheckpointError, match=match):
        archon.load_model(write_checkpoint(tmp_path, config, state))


@pytest.mark.parametrize(
    "kept",
    [
        {"modules_to_not_convert": ["lm_head", "q_proj"]},
        {"ignored_layers": ["lm_head", "q_proj"]},
        {"modules_to_not_convert": ["lm_head"], "ignored_layers": ["q_proj"]},
        {"modules_to_not_convert": None, "ignored_layers": ["model.layers.*.self_attn.q_proj"]},
    ],
    ids=str,
)
def test_a_module_that_is_not_to_be_quantized_is_not(tmp_path: Path, kept: dict[str, list[str] | None]) -> None:
    config = config_with() | {"quantization_config": FP8 | kept}
    state, _ = quantize(random_weights(config))
    with pytest.raises(CheckpointError, match=r"q_proj.weight' is quantized, but quantization_config says"):
        archon.load_model(write_checkpoint(tmp_path, config, state))


def test_8_bit_floats_need_a_quantization_config(tmp_path: Path) -> None:
    state, _ = quantize(random_weights(config_with()))
    with pytest.raises(CheckpointError, match=r"unknown key '.*_scale_inv'|is torch.float8_e4m3fn; weights must be"):
        archon.load_model(write_checkpoint(tmp_path, config_with(), state))


UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"
BLOCKS, SCALES = f"{UP}_blocks", f"{UP}_scales"


def cut(state: dict[str, Tensor]) -> None:
    state |= {key: state[key][:4].clone() for key in (BLOCKS, SCALES)}


PACKED_DEFECTS: dict[str, tuple[Edit, str]] = {
    "no scales": (lambda state: state.pop(SCALES), f"holds '{BLOCKS}', but '{SCALES}', the other half"),
    "no blocks": (lambda state: state.pop(BLOCKS), f"holds '{SCALES}', but '{BLOCKS}', the other half"),
    "both": (put(UP, torch.ones(5, 64, 64)), f"it holds '{BLOCKS}', and '{UP}' is in model"),
    "fewer scales": (put(SCALES, torch.ones(5, 64, 1, dtype=torch.uint8)), r"expected \[5, 64, 2\]"),
    "half blocks": (lambda s: s.update({BLOCKS: s[BLOCKS][..., :8].clone()}), r"expected uint8 \[\.\.\."),
    "wide blocks": (cast(BLOCKS, torch.int32), r"is torch.int32 .* expected uint8"),
    "NaN exponents": (lambda state: state[SCALES].fill_(255), "scales that are NaN"),
    "other experts": (cut, r"gate_up_proj_blocks' stands for shape \[4, 64, 64\], expected \[5, 64, 64\]"),
}


@pytest.mark.parametrize("defect", PACKED_DEFECTS)
def test_a_defect_of_mxfp4_is_named(tmp_path: Path, defect: str) -> None:
    edit, match = PACKED_DEFECTS[defect]
    adapter, _ = sparse()
    state, _ = packed(adapter.to_hf(random_native(adapter)))
    edit(state)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        load_hf_weights(adapter.model_class(adapter.args), adapter, tmp_path)


def test_gpt_oss_with_4_bit_experts_computes_what_transformers_does(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = random_config(SEED, "gpt_oss", head_dim=16, **sizes)
    reference = hf_model(config)
    # Weights of ordinary size: with larger ones the rounding of float32 is as large as the tolerance.
    state, expected = packed(dict(reference.state_dict()), (118, 126))
    reference.load_state_dict(expected, strict=False)
    own = family_config(config) | {"quantization_config": MXFP4, "torch_dtype": "float32"}
    folder = write_checkpoint(tmp_path, own, {key: tensor.contiguous() for key, tensor in state.items()}, shards=2)
    tokens, positions, cu_seqlens, longest = pack([9, 1, 5], config.vocab_size, SEED)
    with torch.no_grad():
        ours = archon.load_model(folder)(tokens, positions, cu_seqlens, longest)
        assert relative_error(ours, reference_logits(reference, tokens, [9, 1, 5])) <= FP32_TOLERANCE


def test_deepseek_v3_of_fp8_blocks_computes_what_transformers_does(tmp_path: Path) -> None:
    """With a further layer that predicts tokens, which the export holds dequantized too."""
    config = random_config(SEED, "deepseek_v3")
    reference = hf_model(config)
    state, expected = quantize({key: tensor.clone() for key, tensor in checkpoint_tensors(reference).items()})
    layer = f"model.layers.{config.num_hidden_layers}."
    key, data, scale = f"{layer}eh_proj.weight", random_fp8((8, 9), GENERATOR), torch.rand(2, 2)
    norm = {f"{layer}enorm.weight": torch.rand(9).bfloat16()}
    extra = {key: data, f"{key}_scale_inv": scale} | norm
    carried = {key: dequantized(data, scale, BLOCK)} | norm
    own = family_config(config) | {"quantization_config": FP8, "torch_dtype": "float32"}
    folder = write_checkpoint(tmp_path / "in", own, {key: x.contiguous() for key, x in (state | extra).items()})
    save_file({key: x.contiguous() for key, x in expected.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(family_config(config)))
    reference = type(reference).from_pretrained(tmp_path, attn_implementation="eager", experts_implementation="eager")
    tokens, positions, cu_seqlens, longest = pack([9, 1, 5], config.vocab_size, SEED)
    model = archon.load_model(folder)
    with torch.no_grad():
        ours = model(tokens, positions, cu_seqlens, longest)
        assert relative_error(ours, reference_logits(reference, tokens, [9, 1, 5])) <= FP32_TOLERANCE
    archon.save_model(model, tmp_path / "out", folder)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == expected.keys() | carried.keys()
    assert all(exported[key].dtype == tensor.dtype for key, tensor in carried.items())
    assert all(torch.equal(exported[key], tensor) for key, tensor in (expected | carried).items())


# 4-bit integers of compressed-tensors, as in Kimi K2 Thinking and K2.5


INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": INT4_WEIGHTS | {"actorder": None, "observer": "minmax", "observer_kwargs": {}},
        }
    },
}


def int4(shape: torch.Size) -> tuple[dict[str, Tensor], Tensor]:
    """A packed matrix of random values, as tensors by the ends of their names, and what it stands for."""
    rows, columns = shape
    values = torch.randint(-8, 8, (rows, columns), generator=GENERATOR)
    scales = torch.rand(rows, columns // 32, generator=GENERATOR).bfloat16()
    packed_values = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):  # the first value is in the lowest bits
        packed_values |= (values[:, place::8] + 8) << 4 * place
    packed_values = torch.where(packed_values >= 2**31, packed_values - 2**32, packed_values).to(torch.int32)
    sizes = torch.tensor([rows, columns], dtype=torch.int32)
    tensors = {"_packed": packed_values, "_scale": scales, "_shape": sizes}
    return tensors, values * scales.float().repeat_interleave(32, dim=1)


def int4_checkpoint(
    folder: Path, edit: Callable[[dict[str, Tensor]], object] = lambda state: None
) -> tuple[Path, Tensor]:
    """A checkpoint with one packed matrix, and what it stands for."""
    config = config_with(hidden_size=64, intermediate_size=96) | {"quantization_config": INT4 | {"ignore": ["lm_head"]}}
    state, key = random_weights(config), "model.layers.0.mlp.down_proj.weight"
    tensors, expected = int4(state.pop(key).shape)
    state |= {f"{key}{end}": tensor for end, tensor in tensors.items()}
    edit(state)
    return write_checkpoint(folder, config, state), expected


def test_4_bit_integers_are_dequantized_and_exported_as_weights(tmp_path: Path) -> None:
    folder, expected = int4_checkpoint(tmp_path / "int4")
    model = archon.load_model(folder, dtype=torch.float32)
    assert torch.equal(model.layers["0"].feed_forward.w2.weight, expected)
    archon.save_model(model, tmp_path / "out", like=folder)
    assert torch.equal(
        archon.load_model(tmp_path / "out", dtype=torch.float32).layers["0"].feed_forward.w2.weight, expected
    )
    with HFCheckpoint(folder) as checkpoint:
        key = "model.layers.0.mlp.down_proj.weight"
        quantization = read_quantization(INT4 | {"ignore": None})
        stored = stored_tensors(checkpoint.entries, checkpoint.files, quantization, {key})
        region = (slice(5, 23), slice(11, 70))
        assert torch.equal(read(checkpoint, stored[key], region, torch.float32), expected[region])


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda state: state.pop(f"{DOWN}_scale"), f"'{DOWN}_scale', the other half of '{DOWN}', is missing"),
        (lambda state: state.pop(f"{DOWN}_shape"), f"'{DOWN}_shape', the other half of '{DOWN}', is missing"),
        (
            put(f"{DOWN}_shape", torch.tensor([64, 95], dtype=torch.int32)),
            r"_shape' holds \[64, 95\]; expected \[64, 96\]",
        ),
        (put(f"{DOWN}_scale", torch.ones(64, 2)), r"_scale' has shape \[64, 2\], expected \[64, 3\]"),
        (cast(f"{DOWN}_packed", torch.int64), r"_packed' is torch.int64 of shape \[64, 12\]; expected int32"),
    ],
)
def test_a_defect_of_4_bit_integers_is_named(tmp_path: Path, edit: Edit, match: str) -> None:
    folder, _ = int4_checkpoint(tmp_path / "int4", edit)
    with pytest.raises(CheckpointError, match=match):
        archon.load_model(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_bits": 8}, "weights.num_bits' is 8; expected 4"),
        ({"symmetric": False}, "weights.symmetric' is False; expected True"),
        ({"actorder": "group"}, "weights.actorder' is 'group'; expected None"),
        ({"group_size": -1}, "weights.group_size' is -1; expected the columns"),
    ],
)
def test_other_integers_are_refused(change: dict[str, Any], match: str) -> None:
    group = {"targets": ["Linear"], "weights": INT4_WEIGHTS | change}
    with pytest.raises(ConfigError, match=match):
        read_quantization(INT4 | {"config_groups": {"group_0": group}})


@pytest.mark.parametrize("name", ["re:a|b", "re:(a|b)_(c|d)", "re:(a|.)", "re:(a", "re:[ab]", "re:a(b|c)?"])
def test_an_ignored_expression_that_is_more_than_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"ignore' is {re.escape(repr(name))}; archon reads module names"):
        read_quantization(INT4 | {"ignore": [name]})


def test_the_ignored_names_of_kimi_k2_leave_the_experts_alone_in_4_bits() -> None:
    quantization = read_quantization(INT4)
    assert quantization is not None
    layer = "language_model.model.layers.0"
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.shared_experts.up_proj", "self_attn.o_proj"):
        assert quantization.is_unquantized(f"{layer}.{name}.weight"), name
    for name in ("mlp.experts.11.gate_proj", "mlp.experts.0.down_proj", "mlp.gate"):
        assert not quantization.is_unquantized(f"{layer}.{name}.weight"), name


def test_experts_of_4_bits_in_a_composite_checkpoint_are_read_and_exported_as_weights(tmp_path: Path) -> None:
    """As Kimi K2.5: the quantization is in the config of the text part, and the encoder is bfloat16."""
    folder = tmp_path / "kimi"
    text = {"hidden_size": 32, "moe_intermediate_size": 64, "vocab_size": 37, "first_k_dense_replace": 1}
    theirs = hf_model(random_config(0, "kimi_k25", tie_word_embeddings=False, **text)).bfloat16()
    theirs.save_pretrained(folder)
    written = load_file(folder / "model.safetensors")
    state, expected = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in written.items():
        if ".experts." not in name:
            state[name] = tensor
            continue
        packed_expert, expected[name] = int4(tensor.shape)
        state |= {f"{name}{end}": part for end, part in packed_expert.items()}
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = INT4
    write_checkpoint(tmp_path / "int4", config, state)
    model = archon.load_model(tmp_path / "int4", text_only=True, dtype=torch.float32)
    archon.save_model(model, tmp_path / "out", like=tmp_path / "int4")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert len(out) == len(written) and len(expected) >= 12
    for name, tensor in expected.items():
        assert torch.equal(out[name.replace(".blocks.", ".layers.")], tensor), name
    kept = [name for name in written if name.startswith("vision_tower.")]
    assert len(kept) >= 10 and all(torch.equal(out[name], written[name]) for name in kept)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
