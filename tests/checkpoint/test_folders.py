"""Folders that are no checkpoint, configs that are none, and files made to do harm: one line each, and nothing run."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import archon
from archon.checkpoint.hf_reader import HFCheckpoint, match_parameters, read_hf_config
from archon.models import get_model_spec
from archon.schema.errors import CheckpointError, ConfigError, UnknownModelError, UserError
from tests.checkpoint.tiny_checkpoints import config_with, make_checkpoint, write_checkpoint

SHARD = "model-00002-of-00003.safetensors"


def assert_refused(match: str, path: Path | str, kind: type[UserError] = CheckpointError) -> None:
    with pytest.raises(kind, match=match) as caught:
        archon.load_model(path)
    assert "\n" not in str(caught.value)


def test_missing_path(tmp_path: Path) -> None:
    assert_refused("nowhere: it does not exist", tmp_path / "nowhere")


def test_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert_refused("it is a file; expected the folder", tmp_path / "file")


def test_not_a_checkpoint(tmp_path: Path) -> None:
    assert_refused("it is not a Hugging Face checkpoint: it holds no config.json", tmp_path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "config.json: it is not JSON"),
        ("[]", "config.json: expected a JSON object, got list"),
        ("{}", "config.json: model_type is None"),
        ('{"model_type": 3}', "config.json: model_type is 3"),
        ("\xff", "config.json: it is not JSON"),
    ],
)
def test_config_that_is_none(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert_refused(match, tmp_path)


def test_unknown_family(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config_with(model_type="gpt2"), {})
    assert_refused("model_type 'gpt2' is not supported; supported are", tmp_path, UnknownModelError)


def test_dtype_that_is_none(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path)
    write_checkpoint(folder, config_with(torch_dtype="int8"), weights)
    assert_refused("'dtype' is 'int8'", folder, ConfigError)


def test_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config_with(), {})
    (tmp_path / "model.safetensors").unlink()
    assert_refused("holds no weights: expected model.safetensors or", tmp_path)


def test_checkpoint_of_another_family(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path)
    write_checkpoint(folder, config_with(model_type="qwen2", head_dim=None), weights)
    assert_refused(r"model.safetensors: .*q_proj|k_norm|shape", folder)


# Hostile files


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt"])
def test_pickled_weights_are_refused_and_not_run(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "in", config_with(), {})
    (tmp_path / "in" / "model.safetensors").unlink()
    (tmp_path / "in" / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert_refused(
        "pickled" if name != "model.safetensors" else "model.safetensors: its header claims", tmp_path / "in"
    )
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_link_that_leads_out_of_the_checkpoint_is_refused(tmp_path: Path, shards: int) -> None:
    folder, _ = make_checkpoint(tmp_path / "in", shards)
    file = folder / ("model.safetensors" if shards == 1 else SHARD)
    (tmp_path / "elsewhere").mkdir()
    outside = shutil.move(file, tmp_path / "elsewhere" / "weights.safetensors")
    file.symlink_to(outside)
    assert_refused(f"{file.name}: it is a link to {outside}, outside the checkpoint", folder)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    """models--org--name/snapshots/<commit>/* are links to models--org--name/blobs/<hash>."""
    folder, _ = make_checkpoint(tmp_path / "snapshots" / "0123abc", 3)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, tmp_path / "blobs" / str(number))
        file.symlink_to(Path("..", "..", "blobs", str(number)))
    archon.load_model(folder)
    (tmp_path / "linked").symlink_to(folder)
    archon.load_model(tmp_path / "linked")


def test_dangling_link(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path, 3)
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(folder / "gone.safetensors")
    assert_refused(f"{SHARD}, which does not exist", folder)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gone", "it is a link to gone, which does not exist"),
        ("model.safetensors", "cannot be read: Too many levels of symbolic links"),
    ],
    ids=["broken", "loop"],
)
def test_a_weight_file_that_is_a_broken_link_is_named(tmp_path: Path, target: str, said: str) -> None:
    folder, _ = make_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    assert_refused(f"model.safetensors: {said}", folder)


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    config = read_hf_config(folder)
    spec = get_model_spec("qwen3")
    model = spec.model_class(spec.model_args_class.from_hf_config(config))
    with HFCheckpoint(folder) as checkpoint:
        targets = match_parameters(checkpoint, model, spec.state_dict_adapter_class(config))
        os.truncate(folder / "model.safetensors", 4000)
        with pytest.raises(CheckpointError, match=r"model.safetensors: it ends within key '.*'; was it changed"):
            checkpoint.read(targets)


def test_a_repeated_key_of_a_config_is_refused(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    file = folder / "config.json"
    file.write_text(file.read_text().rstrip().removesuffix("}") + ', "hidden_size": 4096}')
    assert_refused("config.json: it is not JSON .key 'hidden_size' appears twice", folder)
