"""Keys of what a model does not compute: copied from the source by an export, bit for bit, or an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import archon
from archon.checkpoint.convert import convert
from archon.checkpoint.hf_export import save_hf
from archon.checkpoint.safetensors_file import CHUNK_BYTES, SafetensorsFile
from archon.engine.engine import ArchonEngine
from archon.models import get_model_spec
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError
from tests.checkpoint.killing import digest
from tests.checkpoint.tiny_checkpoints import write_checkpoint
from tests.models import fused_family
from tests.models.fused_family import FUSED_TYPE, SPARSE, FusedMoEAdapter

CONFIG = SPARSE | {"model_type": FUSED_TYPE, "mlp_only_layers": [1]}


@pytest.fixture
def adapter() -> BaseStateDictAdapter:
    fused_family.register()
    return get_model_spec(FUSED_TYPE).state_dict_adapter_class(CONFIG)


@pytest.fixture
def source(tmp_path: Path, adapter: BaseStateDictAdapter) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with carried keys, and its tensors."""
    state = adapter.to_hf(fused_family.random_native(adapter)) | fused_family.passthrough_tensors(adapter.args.n_layers)
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    return write_checkpoint(tmp_path / "source", CONFIG, state, shards=2), state


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def assert_bitwise(folder: Path, expected: dict[str, Tensor]) -> None:
    found = tensors_of(folder)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert digest(found[key]) == digest(tensor), key


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_a_model_is_saved_with_the_carried_keys(
    tmp_path: Path, source: tuple[Path, dict[str, Tensor]], max_shard_bytes: int
) -> None:
    folder, state = source
    model = archon.load_model(folder)
    archon.save_model(model, tmp_path / "out", folder, max_shard_bytes=max_shard_bytes)
    assert_bitwise(tmp_path / "out", state)
    index = tmp_path / "out" / "model.safetensors.index.json"
    if max_shard_bytes < 10**9:
        assert json.loads(index.read_text())["weight_map"].keys() == state.keys()
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(x.nbytes for x in state.values())
    else:
        assert not index.exists()
    archon.save_model(archon.load_model(tmp_path / "out"), tmp_path / "out", tmp_path / "out")  # in place
    assert_bitwise(tmp_path / "out", state)


def test_keys_without_model_are_exported_with_it(tmp_path: Path, source: tuple[Path, dict[str, Tensor]]) -> None:
    _, state = source
    stripped = {key.removeprefix("model."): tensor for key, tensor in state.items()}
    folder = write_checkpoint(tmp_path / "stripped", CONFIG, stripped)
    archon.save_model(archon.load_model(folder), tmp_path / "out", folder)
    assert_bitwise(tmp_path / "out", state)


def test_a_wider_export_leaves_the_carried_keys_as_they_are(
    tmp_path: Path, source: tuple[Path, dict[str, Tensor]]
) -> None:
    folder, state = source
    archon.save_model(archon.load_model(folder), tmp_path / "out", folder, dtype=torch.float64)
    kept = {key for key in state if key.endswith("correction_bias")} | fused_family.passthrough_tensors(2).keys()
    assert_bitwise(tmp_path / "out", {key: x if key in kept else x.double() for key, x in state.items()})


def test_the_native_format_and_back_keeps_them(tmp_path: Path, source: tuple[Path, dict[str, Tensor]]) -> None:
    folder, state = source
    convert(folder, tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "out", "hf", like=folder)
    assert_bitwise(tmp_path / "out", state)


def test_an_export_without_a_source_says_so(
    tmp_path: Path, source: tuple[Path, dict[str, Tensor]], adapter: BaseStateDictAdapter
) -> None:
    folder, state = source
    weights = {key: state[key] for key in adapter.hf_shapes()}
    with pytest.raises(CheckpointError, match=r"copied from the loaded checkpoint; name that checkpoint by like"):
        save_hf(tmp_path / "out", weights.items(), CONFIG)
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"source holds no weights; name the checkpoint by like"):
        save_hf(tmp_path / "out", weights.items(), CONFIG, like=folder)
    assert not (tmp_path / "out").exists()
    save_hf(tmp_path / "out", weights.items(), CONFIG, like=folder, passthrough=False)
    assert_bitwise(tmp_path / "out", weights)


def test_what_no_pattern_names_is_refused(tmp_path: Path, source: tuple[Path, dict[str, Tensor]]) -> None:
    folder, state = source
    for key in ("model.language_model.layers.3.norm.weight", "xmtp.fc.weight", "model.vision.w"):
        write_checkpoint(folder, CONFIG, state | {key: torch.ones(1)}, shards=2)
        with pytest.raises(CheckpointError, match=f"unknown key '{key}'"):
            archon.load_model(folder)


def test_a_pattern_does_not_hide_what_the_model_computes(adapter: BaseStateDictAdapter) -> None:
    greedy = type("Greedy", (FusedMoEAdapter,), {"passthrough": ("model.*",)})(CONFIG)
    computed = adapter.hf_shapes()
    assert not any(greedy.is_passthrough(key) for key in computed)
    assert all(greedy.hf_to_native(key) == adapter.hf_to_native(key) for key in computed)
    assert greedy.is_passthrough("model.language_model.layers.1.more")


def test_a_carried_tensor_is_never_in_memory_at_once(
    tmp_path: Path, adapter: BaseStateDictAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {key: torch.ones(shape) for key, shape in adapter.hf_shapes().items()}
    state["mtp.fc.weight"] = torch.randn(5000, 300)
    folder = write_checkpoint(tmp_path / "source", CONFIG, state)
    model, sizes, read_into = archon.load_model(folder), list[int](), SafetensorsFile.read_into

    def recorded(file: SafetensorsFile, view: memoryview, offset: int, what: str) -> None:
        sizes.append(len(view))
        read_into(file, view, offset, what)

    monkeypatch.setattr(SafetensorsFile, "read_into", recorded)
    archon.save_model(model, tmp_path / "out", folder)
    assert max(sizes) <= CHUNK_BYTES < state["mtp.fc.weight"].nbytes < sum(sizes)
    assert_bitwise(tmp_path / "out", state)


def test_an_engine_carries_what_it_has_loaded_last(
    tmp_path: Path, source: tuple[Path, dict[str, Tensor]], adapter: BaseStateDictAdapter
) -> None:
    """A fresh model has no such keys; one that loaded another checkpoint has those of that one."""
    folder, state = source
    config = EngineConfig.model_validate(
        {"path": str(folder), "device": "cpu", "dtype": "float32", "init_from_scratch": True, "optimizer": None}
    )
    engine = ArchonEngine(config)
    engine.initialize()
    engine.save(tmp_path / "fresh")
    assert tensors_of(tmp_path / "fresh").keys() == adapter.hf_shapes().keys()
    other = state | {"mtp.fc.weight": torch.randn(3, 4)}
    engine.load(write_checkpoint(tmp_path / "other", CONFIG, other))
    engine.save(tmp_path / "out")
    assert_bitwise(tmp_path / "out", other)
