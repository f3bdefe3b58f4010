"""Weights between Hugging Face, `native` and megatron-core: bitwise both ways, every key accounted for."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from archon.checkpoint import tensor_reader
from archon.checkpoint.convert import convert, detect_format
from archon.checkpoint.formats.megatron.rank_files import MANIFEST_FILE, RANK_FILE
from archon.checkpoint.formats.megatron.sharding import MegatronLayout
from archon.checkpoint.native import model_fingerprint, save_state
from archon.checkpoint.safetensors_file import Region, SafetensorsFile, TensorEntry
from archon.engine.engine import ArchonEngine
from archon.models.qwen3_moe import Qwen3MoEModelArgs, Qwen3MoEStateDictAdapter
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, ConfigError, LayoutError
from tests.checkpoint.conversions import FAMILIES, LAYOUTS, SIZES, edit, read_back
from tests.checkpoint.tiny_checkpoints import assert_bitwise, config_with, make_checkpoint


@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_through_megatron_and_back_is_bitwise(
    tmp_path: Path, family: str, layout: MegatronLayout, tied: bool, dtype: torch.dtype
) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", dtype=dtype, tie_word_embeddings=tied, **FAMILIES[family])
    if layout.ep > 1 and family != "moe":
        with pytest.raises(LayoutError, match="the model has no experts"):
            convert(folder, tmp_path / "ranks", "megatron", layout=layout)
        return

    convert(folder, tmp_path / "ranks", "megatron", layout=layout)
    convert(tmp_path / "ranks", tmp_path / "back", "hf")

    assert_bitwise(read_back(tmp_path / "back"), weights)

    # The other way round: Megatron's files, whoever wrote them, come back as they were.
    (tmp_path / "ranks" / MANIFEST_FILE).unlink()
    convert(tmp_path / "ranks", tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "again", "megatron", layout=layout, like=folder)

    files = [path.relative_to(tmp_path / "ranks") for path in (tmp_path / "ranks").glob(f"mp_rank_*/{RANK_FILE}")]
    assert len(files) == layout.tp * layout.pp * layout.ep
    for file in files:
        assert_bitwise(load_file(tmp_path / "again" / file), load_file(tmp_path / "ranks" / file))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_through_native_and_megatron_and_back_is_bitwise(tmp_path: Path, family: str, tied: bool) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", shards=3, tie_word_embeddings=tied, **FAMILIES[family])

    convert(folder, tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "out", "hf", like=folder)
    convert(tmp_path / "native", tmp_path / "ranks", "megatron", like=folder, layout=MegatronLayout(tp=2, pp=2))
    convert(tmp_path / "ranks", tmp_path / "others", "megatron", layout=MegatronLayout(tp=4, spec="te"))
    convert(tmp_path / "others", tmp_path / "again", "native")
    convert(tmp_path / "again", tmp_path / "back", "hf", like=folder)

    assert [detect_format(tmp_path / name) for name in ("hf", "native", "ranks")] == ["hf", "native", "megatron"]
    assert_bitwise(read_back(tmp_path / "out"), weights)
    assert_bitwise(read_back(tmp_path / "back"), weights)


def test_a_critic_goes_to_native_and_back_but_not_to_megatron(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **SIZES)
    edit(
        folder / "model.safetensors", lambda t: (t.pop("lm_head.weight"), t.update({"score.weight": torch.ones(1, 24)}))
    )
    weights = load_file(folder / "model.safetensors")

    convert(folder, tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "back", "hf", like=folder)

    assert_bitwise(read_back(tmp_path / "back"), weights)
    with pytest.raises(CheckpointError, match=r"'score.weight' has no counterpart in megatron-core"):
        convert(folder, tmp_path / "ranks", "megatron")


def test_tensors_to_be_fused_must_have_one_dtype(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **FAMILIES["moe"])
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    edit(folder / "model.safetensors", lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    with pytest.raises(CheckpointError, match=rf"linear_fc1.weight' is one tensor .* '{name}' is torch.bfloat16"):
        convert(folder, tmp_path / "ranks", "megatron")
    with pytest.raises(CheckpointError, match=rf"'{name}' torch.bfloat16, but both are part of parameter"):
        convert(folder, tmp_path / "native", "native")


def engine(path: Path, **changes: Any) -> ArchonEngine:
    made = ArchonEngine(EngineConfig(path=str(path), dtype="float32", max_tokens_per_mb=64, **changes))
    made.initialize(total_steps=1)
    return made


def test_a_native_of_the_engine_is_read_and_one_that_was_made_is_loaded(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **FAMILIES["moe"])
    engine(folder).save(tmp_path / "saved", format="native")
    other, _ = make_checkpoint(tmp_path / "other", seed=1, **FAMILIES["moe"])

    convert(tmp_path / "saved", tmp_path / "out", "hf", like=folder)
    convert(folder, tmp_path / "made", "native")
    loaded = engine(other)
    loaded.load(tmp_path / "made")
    loaded.save(tmp_path / "back", format="hf")

    assert_bitwise(read_back(tmp_path / "out"), weights)
    assert_bitwise(read_back(tmp_path / "back"), weights)


def test_a_native_of_another_model(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    other, _ = make_checkpoint(tmp_path / "other", **SIZES | {"intermediate_size": 40})
    convert(folder, tmp_path / "native", "native")
    with pytest.raises(CheckpointError, match="it was written by another model: hidden_dim is 36 there and 40 here"):
        convert(tmp_path / "native", tmp_path / "out", "hf", like=other)
    with pytest.raises(ConfigError, match=r"it holds no config.json; set like"):
        convert(tmp_path / "native", tmp_path / "out", "hf")


def test_balancing_biases_are_not_dropped(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **FAMILIES["moe"])
    args = Qwen3MoEModelArgs.from_hf_config(config_with(**FAMILIES["moe"]), balance_by_bias=True)
    adapter = Qwen3MoEStateDictAdapter(config_with(**FAMILIES["moe"]))
    model = adapter.from_hf(weights) | {"layers.1.moe.router.expert_bias": torch.zeros(4)}
    save_state(tmp_path / "even", 3, {"engine": {"model": model}}, fingerprint=model_fingerprint(args))
    model["layers.1.moe.router.expert_bias"][2] = 0.1
    save_state(tmp_path / "moved", 3, {"engine": {"model": model}}, fingerprint=model_fingerprint(args))

    convert(tmp_path / "even", tmp_path / "out", "hf", like=folder)

    assert_bitwise(read_back(tmp_path / "out"), weights)
    with pytest.raises(CheckpointError, match="1 balancing biases are not 0"):
        convert(tmp_path / "moved", tmp_path / "lost", "hf", like=folder)


@pytest.mark.parametrize("to", ["hf", "native", "megatron"])
def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    read = tensor_reader.read_region

    def failing(file: SafetensorsFile, entry: TensorEntry, region: Region) -> Tensor:
        if entry.name == "model.norm.weight":
            raise OSError(28, "No space left on device")
        return read(file, entry, region)

    monkeypatch.setattr(tensor_reader, "read_region", failing)
    with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device"):
        convert(folder, tmp_path / "out", to)
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("to", ["hf", "native", "megatron"])
def test_nothing_is_replaced(tmp_path: Path, to: Any) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    with pytest.raises(CheckpointError, match="hf: it exists and is not empty; expected a new folder"):
        convert(folder, folder, to)
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty", to)
    assert [*(tmp_path / "empty").iterdir()]


@pytest.mark.parametrize("to", ["native", "megatron"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **FAMILIES["moe"] | {"num_hidden_layers": 6})
    read, alive, most = tensor_reader.read_region, [0], [0]

    def counted(file: SafetensorsFile, entry: TensorEntry, region: Region) -> Tensor:
        part = read(file, entry, region)
        alive[0] += part.nbytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(part, lambda size: alive.__setitem__(0, alive[0] - size), part.nbytes)
        return part

    monkeypatch.setattr(tensor_reader, "read_region", counted)
    convert(folder, tmp_path / "out", to)

    largest = max(tensor.nbytes for tensor in weights.values())
    assert 0 < most[0] <= 3 * largest < sum(tensor.nbytes for tensor in weights.values()) / 3
