"""Tensors of several parameters in files: whole models, and any part that a rank may hold, through bounded reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import archon
from archon.checkpoint import tensor_reader
from archon.checkpoint.hf_io import save_model
from archon.checkpoint.hf_reader import HFCheckpoint, ReadTarget, load_hf_weights, loadable_tensors
from archon.checkpoint.safetensors_file import CHUNK_BYTES
from archon.models import get_model_spec
from archon.models.hf.fused_tensors import Fused, place_parts
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError
from tests.checkpoint.tiny_checkpoints import write_checkpoint
from tests.models import fused_family
from tests.models.fused_family import SPARSE, WAYS, Way, adapter_of, checkpoint_by_hand, random_native


def write(folder: Path, way: Way, dtype: torch.dtype) -> tuple[BaseStateDictAdapter, dict[str, Tensor]]:
    """A checkpoint, its adapter, and the parameters that were stored."""
    adapter = adapter_of(way)
    native = random_native(adapter, dtype)
    state = {key: tensor.contiguous() for key, tensor in checkpoint_by_hand(way, native).items()}
    save_file(state, folder / "model.safetensors")
    return adapter, native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_a_model_is_loaded_bitwise(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    adapter, native = write(tmp_path, WAYS[name], dtype)
    model = adapter.model_class(adapter.args)
    load_hf_weights(model, adapter, tmp_path)
    loaded = loadable_tensors(model, adapter)
    assert loaded.keys() == native.keys()
    for key, tensor in native.items():
        assert torch.equal(loaded[key], tensor.to(loaded[key].dtype)), key


def test_a_square_matrix_is_not_read_in_the_other_orientation(tmp_path: Path) -> None:
    """Only the declaration says which it is, so a file of the other orientation is read as what it says."""
    adapter, native = write(tmp_path, WAYS["transposed"], torch.float32)
    wo = native["layers.0.attention.wo.weight"]
    assert wo.shape[0] == wo.shape[1]
    plain = adapter_of(Way(WAYS["transposed"].config, {}, lambda native, layer: {}))
    model = plain.model_class(plain.args)
    with pytest.raises(CheckpointError, match=r"down_proj.weight' has shape \[10, 24\], expected \[24, 10\]"):
        load_hf_weights(model, plain, tmp_path)
    model = adapter.model_class(adapter.args)
    load_hf_weights(model, adapter, tmp_path)
    assert torch.equal(model.get_parameter("layers.0.attention.wo.weight"), wo)
    assert not torch.equal(model.get_parameter("layers.0.attention.wo.weight"), wo.t())


LARGE = {
    "rows of a stack": (Fused(("a", "b"), dim=1), (3, 700, 500)),
    "columns in turns": (Fused(("a", "b"), dim=1, interleaved=True, transposed=True), (3, 700, 500)),
    "blocks of heads": (Fused(("a", "b"), blocks=3), (1500, 400)),
    "transposed": (Fused(("a", "b"), transposed=True), (900, 700)),
}
SHARES = [(0.0, 1.0), (0.37, 0.74), (0.74, 1.0)]


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_a_part_of_a_large_tensor_is_read_with_a_buffer_of_one_piece(
    tmp_path: Path, name: str, share: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, shape = LARGE[name]
    placements = place_parts(fused, [shape, shape], None)
    parameters = [torch.randn(shape), torch.randn(shape)]
    whole = torch.empty(placements[0].hf_shape(shape))
    assert whole[0].nbytes > CHUNK_BYTES or whole.dim() == 2
    for placement, parameter in zip(placements, parameters, strict=True):
        placement.insert(parameter, whole)
    save_file({"before": torch.ones(3), "fused": whole}, tmp_path / "model.safetensors")
    sizes, read_into = list[int](), tensor_reader.RegularFile.read_into

    def recorded(self: object, view: memoryview, offset: int, what: str) -> None:
        sizes.append(len(view))
        read_into(self, view, offset, what)  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_reader.RegularFile, "read_into", recorded)
    for axis in range(len(shape)):
        own = [slice(0, size) for size in shape]
        own[axis] = slice(int(shape[axis] * share[0]), int(shape[axis] * share[1]))
        for placement, parameter in zip(placements, parameters, strict=True):
            local = torch.full_like(parameter[tuple(own)], torch.nan, dtype=torch.float64)
            selected = placement.selections(shape, tuple(own), local, transposed=fused.transposed)
            with HFCheckpoint(tmp_path) as checkpoint:
                checkpoint.read([ReadTarget("fused", part.target, part.region, part.shape) for part in selected])
            assert torch.equal(local, parameter[tuple(own)].double()), axis
    assert max(sizes) <= CHUNK_BYTES


def test_a_stored_bias_keeps_its_dtype_and_does_not_widen_the_config(tmp_path: Path) -> None:
    """A router's bias is float32 in a checkpoint of bfloat16, and chooses other experts when it is rounded."""
    fused_family.register()
    config = SPARSE | {"model_type": fused_family.FUSED_TYPE, "torch_dtype": "bfloat16"}
    adapter = get_model_spec(fused_family.FUSED_TYPE).state_dict_adapter_class(config)
    state = adapter.to_hf(random_native(adapter))
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    stored = {key: x if key.endswith("correction_bias") else x.bfloat16() for key, x in state.items()}
    folder = write_checkpoint(tmp_path / "in", config, stored)
    model = archon.load_model(folder)
    for name, dtype in (("same", None), ("narrow", torch.float16)):
        save_model(model, tmp_path / name, folder, dtype=dtype, passthrough=False)
        found = load_file(tmp_path / name / "model.safetensors")
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == (
            "bfloat16" if dtype is None else "float16"
        )
        for key, tensor in stored.items():
            expected = tensor if key.endswith("correction_bias") or dtype is None else tensor.to(dtype)
            assert found[key].dtype == expected.dtype and torch.equal(found[key], expected), key
