"""Bitwise, both ways: checkpoint to model, model to checkpoint."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import archon
from archon.checkpoint.convert import convert
from archon.checkpoint.hf_reader import load_hf_weights
from archon.checkpoint.safetensors_file import CHUNK_BYTES, chunks
from archon.models import get_model_spec
from archon.schema.errors import CheckpointError
from tests.checkpoint.tiny_checkpoints import (
    CONFIG,
    MOE,
    QWEN2,
    assert_bitwise,
    config_with,
    hf_state,
    make_checkpoint,
    random_weights,
    write_checkpoint,
)


def read_back(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [{}, QWEN2, MOE], ids=["qwen3", "qwen2", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("shards", "max_shard_bytes"), [(1, 10**9), (3, 6000)], ids=["single", "sharded"])
def test_round_trip_is_bitwise_both_ways(
    tmp_path: Path, family: dict[str, Any], tied: bool, dtype: torch.dtype, shards: int, max_shard_bytes: int
) -> None:
    folder, weights = make_checkpoint(tmp_path / "in", shards, dtype, tie_word_embeddings=tied, **family)
    model = archon.load_model(folder)
    assert_bitwise(hf_state(model, folder), weights)
    assert {p.dtype for p in model.parameters()} == {dtype}
    archon.save_model(model, tmp_path / "out", like=folder, max_shard_bytes=max_shard_bytes)
    assert_bitwise(read_back(tmp_path / "out"), weights)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1 if shards == 1 else 3
    assert_bitwise(hf_state(archon.load_model(tmp_path / "out"), folder), weights)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tied_parameters_stay_one_parameter(tmp_path: Path, tied: bool) -> None:
    folder, weights = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    model = archon.load_model(folder)
    assert model.output is not None
    assert (model.output.weight is model.tok_embeddings.weight) is tied
    assert ("lm_head.weight" in weights) is not tied


def test_load_model_recomputes_buffers_and_leaves_nothing_on_meta(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    model = archon.load_model(folder, dtype=torch.float64)
    logits = model(torch.arange(5), torch.arange(5), torch.tensor([0, 5], dtype=torch.int32), 5)
    assert logits.shape == (5, 61)
    assert torch.isfinite(logits).all()
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_loading_into_another_dtype_converts_as_torch_does(
    tmp_path: Path, source: torch.dtype, target: torch.dtype
) -> None:
    folder, weights = make_checkpoint(tmp_path, dtype=source)
    model = archon.load_model(folder, dtype=target)
    assert_bitwise(hf_state(model, folder), {name: t.to(target) for name, t in weights.items()})


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
def test_transposed_storage_is_kept_and_filled(tmp_path: Path, target: torch.dtype) -> None:
    """Decoding keeps weights [in, out] in memory; loading must write through the view, not replace it."""
    folder, weights = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    spec = get_model_spec("qwen3")
    model = spec.model_class(spec.model_args_class.from_hf_config(config)).to(target)
    for block in model.layers.values():
        for linear in (block.attention.wq, block.feed_forward.w2):
            linear.weight.data = torch.empty_like(linear.weight.t().contiguous()).t()
    places = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    load_hf_weights(model, spec.state_dict_adapter_class(config), folder)
    assert_bitwise(hf_state(model, folder), {name: t.to(target) for name, t in weights.items()})
    assert {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()} == places
    archon.save_model(model, tmp_path / "out", like=folder)
    assert_bitwise(read_back(tmp_path / "out"), {name: t.to(target) for name, t in weights.items()})


def test_tensors_of_several_chunks_are_read_and_written_whole(tmp_path: Path) -> None:
    """One row larger than a piece, many rows to a piece, and a ragged last piece."""
    vocab = CHUNK_BYTES // 24 // 4 * 2 + 77
    folder, weights = make_checkpoint(tmp_path / "in", vocab_size=vocab)
    for dtype in (torch.float32, torch.float64):
        model = archon.load_model(folder, dtype=dtype)
        assert_bitwise(hf_state(model, folder), {name: t.to(dtype) for name, t in weights.items()})
    archon.save_model(archon.load_model(folder), tmp_path / "out", like=folder)
    assert_bitwise(read_back(tmp_path / "out"), weights)


@pytest.mark.parametrize("limit", [4, 7, 8, 24, 100, 10_000])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "scalar", "empty"])
def test_chunks_cover_a_tensor_once_in_row_major_order(layout: str, limit: int) -> None:
    tensor = {
        "contiguous": torch.zeros(3, 4, 5),
        "transposed": torch.zeros(5, 4, 3).permute(2, 1, 0),
        "strided": torch.zeros(6, 8)[::2, ::3],
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 4),
    }[layout]
    expected = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    offset = 0
    for start, piece in chunks(tensor, 4, limit):
        assert start == offset
        assert piece.numel() == 1 or piece.numel() * 4 <= limit
        piece.copy_(torch.arange(start // 4, start // 4 + piece.numel()).view(piece.shape))
        offset += piece.numel() * 4
    assert offset == tensor.numel() * 4
    assert torch.equal(tensor, expected)


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    """The format does not ask for alignment: an odd number of bytes may come first."""
    folder, weights = make_checkpoint(tmp_path)
    mixed = {name: t.half() if name.endswith("norm.weight") else t for name, t in weights.items()}
    ordered = dict(sorted(mixed.items(), key=lambda item: item[1].dtype.itemsize))
    header: dict[str, Any] = {}
    data = b""
    for name, t in ordered.items():
        raw = t.view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": {torch.float16: "F16", torch.float32: "F32"}[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * ((1 - len(text)) % 4)
    assert (8 + len(text)) % 4 == 1
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    model = archon.load_model(folder, dtype=torch.float32)
    assert_bitwise(hf_state(model, folder), {name: t.float() for name, t in mixed.items()})


def test_loading_leaves_the_number_of_threads_alone(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        archon.load_model(folder, dtype=torch.float64)
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# Critics


def test_critic_from_an_actor_needs_init_score(tmp_path: Path) -> None:
    for tied in (False, True):
        folder, weights = make_checkpoint(tmp_path / str(tied), tie_word_embeddings=tied)
        with pytest.raises(CheckpointError, match=r"'score.weight' missing.*init_score=True"):
            archon.load_model(folder, is_critic=True)
        critic = archon.load_model(folder, is_critic=True, init_score=True)
        assert critic.output is None
        assert critic.score is not None
        assert 0 < critic.score.weight.std() < 0.1
        state = hf_state(critic, folder, is_critic=True)
        assert "lm_head.weight" not in state
        assert all(torch.equal(state[name], t) for name, t in weights.items() if name != "lm_head.weight")


def test_init_score_without_a_critic_is_refused(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is_critic=True"):
        archon.load_model(folder, init_score=True)


def test_score_round_trips(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "actor")
    critic = archon.load_model(folder, is_critic=True, init_score=True)
    archon.save_model(critic, tmp_path / "critic", like=folder)
    again = archon.load_model(tmp_path / "critic", is_critic=True)
    assert_bitwise(hf_state(again, folder, is_critic=True), hf_state(critic, folder, is_critic=True))


def test_init_score_on_a_checkpoint_that_has_one_is_refused(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "actor")
    critic = archon.load_model(folder, is_critic=True, init_score=True)
    archon.save_model(critic, tmp_path / "critic", like=folder)
    with pytest.raises(CheckpointError, match=r"model.safetensors: unknown key 'score.weight'"):
        archon.load_model(tmp_path / "critic", is_critic=True, init_score=True)


def test_actor_from_a_critic_is_refused(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "actor")
    critic = archon.load_model(folder, is_critic=True, init_score=True)
    archon.save_model(critic, tmp_path / "critic", like=folder)
    with pytest.raises(CheckpointError, match=r"'score.weight'|'lm_head.weight'"):
        archon.load_model(tmp_path / "critic")


# Tied checkpoints that ship the head as well


def test_tied_checkpoint_with_an_equal_head_is_accepted(tmp_path: Path) -> None:
    config = config_with(tie_word_embeddings=True)
    folder, weights = make_checkpoint(tmp_path, tie_word_embeddings=True)
    write_checkpoint(folder, config, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert_bitwise(hf_state(archon.load_model(folder), folder), weights)


@pytest.mark.parametrize("how", ["one bit", "dtype", "shape", "sign of zero"])
def test_tied_checkpoint_with_another_head_is_refused(tmp_path: Path, how: str) -> None:
    config = config_with(tie_word_embeddings=True)
    folder, weights = make_checkpoint(tmp_path, tie_word_embeddings=True)
    weights["model.embed_tokens.weight"][-1, -1] = 0.0
    head = weights["model.embed_tokens.weight"].clone()
    if how == "one bit":
        head.view(torch.int32)[30, 7] ^= 1
    elif how == "dtype":
        head = head.double()
    elif how == "shape":
        head = head[:-1].clone()
    else:
        head[-1, -1] = -0.0
    write_checkpoint(folder, config, weights | {"lm_head.weight": head})
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: key 'lm_head.weight' differs from 'model.embed_tokens.weight'"
    ):
        archon.load_model(folder)


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
def test_loading_onto_a_gpu(tmp_path: Path, target: torch.dtype) -> None:
    vocab = CHUNK_BYTES // 24 // 2 + 77
    folder, weights = make_checkpoint(tmp_path / "in", 3, torch.bfloat16, vocab_size=vocab)
    model = archon.load_model(folder, device="cuda", dtype=target)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    state = {name: t.cpu() for name, t in hf_state(model, folder).items()}
    assert_bitwise(state, {name: t.to(target) for name, t in weights.items()})
    archon.save_model(model, tmp_path / "out", like=folder)
    assert_bitwise(read_back(tmp_path / "out"), {name: t.to(target) for name, t in weights.items()})


@pytest.mark.parametrize("family", [{}, MOE], ids=["qwen3", "moe"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_saved_without_its_head_has_keys_without_model(
    tmp_path: Path, family: dict[str, Any], shards: int
) -> None:
    config = config_with(tie_word_embeddings=True, **family)
    weights = random_weights(config)
    stripped = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    folder = write_checkpoint(tmp_path / "base", config, stripped, shards)
    model = archon.load_model(folder)
    assert_bitwise(hf_state(model, folder), weights)
    archon.save_model(model, tmp_path / "out", like=folder)
    assert_bitwise(read_back(tmp_path / "out"), weights)
    convert(folder, tmp_path / "converted", "hf")
    assert_bitwise(read_back(tmp_path / "converted"), weights)


def test_an_untied_model_saved_without_its_head_trains_as_a_critic_only(tmp_path: Path) -> None:
    weights = {k.removeprefix("model."): t for k, t in random_weights(CONFIG).items() if k != "lm_head.weight"}
    folder = write_checkpoint(tmp_path / "base", CONFIG, weights)
    with pytest.raises(CheckpointError, match=r"key 'lm_head.weight' missing"):
        archon.load_model(folder)
    critic = archon.load_model(folder, is_critic=True, init_score=True)
    torch.testing.assert_close(critic.tok_embeddings.weight, weights["embed_tokens.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("rows", [60, 64])
def test_a_vocabulary_of_another_size_names_the_field_to_change(tmp_path: Path, rows: int) -> None:
    weights = random_weights(config_with(vocab_size=rows))
    write_checkpoint(tmp_path, CONFIG, weights)
    with pytest.raises(CheckpointError, match=rf"has shape \[{rows}, 24\].*set vocab_size of config.json to {rows}"):
        archon.load_model(tmp_path)
    write_checkpoint(tmp_path, CONFIG | {"vocab_size": rows}, weights)
    assert_bitwise(hf_state(archon.load_model(tmp_path), tmp_path), weights)
