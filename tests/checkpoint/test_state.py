"""Full-state checkpoints: what comes back, what is refused, what is kept. Kills are in `test_kill`."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file

from archon.checkpoint.native import latest_checkpoint, load_latest, load_state, model_fingerprint, save_state
from archon.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from archon.checkpoint.state_file import build_index, open_tensors
from archon.models import get_model_spec
from archon.schema.errors import CheckpointError
from tests.checkpoint.tiny_checkpoints import QWEN2, config_with


def same(a: Any, b: Any) -> bool:
    """Equality that tells 0.0 from -0.0, 1 from True and 1.0, a tuple from a list, and takes NaN for NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))
        )
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.keys(), b.keys())) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


STATE: dict[str, Any] = {
    "engine": {
        "model": {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5], dtype=torch.bfloat16)},
        "optimizer": {"a.weight": {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 1e-30)}},
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": []},
        "step": 3,
    },
    "lr": 0.1 + 0.2,
    "flag": True,
    "nothing": None,
    "text": "naïve \ud800 \0",
}


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_state(tmp_path, 3, STATE)
    found = load_latest(tmp_path)
    assert found is not None
    assert found[0] == 3
    assert same(found[1], STATE)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**53 - 2, 2**130)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["$tensor", "$float", "nan"])
)
tensors = arrays("uint8", st.integers(0, 5)).map(torch.from_numpy)
states = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.sampled_from(["$tensor", "$dict", "a.b", "a"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=3), states, max_size=3))
@settings(max_examples=40, deadline=None)
def test_any_state_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    root = tmp_path_factory.mktemp("any")
    assert same(load_state(save_state(root, 0, state)), (0, state))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "scalar", "empty"])
def test_tensors_of_every_dtype_and_layout(tmp_path: Path, dtype: torch.dtype, layout: str) -> None:
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = raw.view(dtype).view(2, 3)
    tensor = {"contiguous": tensor, "transposed": tensor.t(), "scalar": tensor[0, 1], "empty": tensor[:0]}[layout]
    _, state = load_state(save_state(tmp_path, 0, {"x": [tensor, torch.ones(3, dtype=torch.uint8)]}))
    assert same(state["x"][0], tensor.contiguous())


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    """Readers that map the file, as safetensors' own does, cannot view a tensor that begins between two items."""
    state = {"flag": torch.ones(3, dtype=torch.bool), "half": torch.ones(3).half(), "wide": torch.ones(3).double()}
    path = save_state(tmp_path, 0, state) / "tensors.safetensors"
    with SafetensorsFile(path) as file:
        assert all(entry.start % entry.dtype.itemsize == 0 for entry in file.entries.values())
    assert load_file(path).keys() == state.keys()


def test_names_that_would_collide_are_kept_apart(tmp_path: Path) -> None:
    state = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "a'": {"b": torch.tensor(3)}, "a.b'": torch.tensor(4)}
    assert same(load_state(save_state(tmp_path, 0, state))[1], state)


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), 1j, print], ids=lambda value: type(value).__name__)
def test_what_would_need_pickle_is_refused_with_its_place(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"state 'a\.1' is a .*, which a checkpoint cannot hold without pickle"):
        save_state(tmp_path / "run", 0, {"a": [1, value]})
    assert not (tmp_path / "run").exists()


def test_nothing_saved_yet(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None
    assert load_latest(tmp_path / "nowhere") is None


# Tensors whose regions are in several files


def test_a_tensor_of_which_a_rank_wrote_no_shard_is_refused() -> None:
    half = {"file": "tensors-00000.safetensors", "boxes": {"w": ["F32", (4, 2), [0, 0], (2, 2)]}}
    other = {"file": "tensors-00001.safetensors", "boxes": {"w": ["F32", (4, 2), [2, 0], (2, 2)]}}
    assert len(build_index([half, other])["w"]["boxes"]) == 2
    with pytest.raises(CheckpointError, match=r"the ranks wrote 4 elements of tensor w, expected 8; a rank did not"):
        build_index([half, {"file": None}])
    with pytest.raises(CheckpointError, match=r"the ranks wrote 12 elements of tensor w, expected 8"):
        build_index([half, other, half])
    another = {"file": "tensors-00001.safetensors", "boxes": {"w": ["BF16", (4, 2), [2, 0], (2, 2)]}}
    with pytest.raises(CheckpointError, match=r"tensor w is F32 .* on one rank and BF16 .* on another"):
        build_index([half, another])


def test_a_region_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    name, rows = "tensors-00000.safetensors", torch.arange(4.0).view(2, 2)
    save_file({"w": rows}, tmp_path / name)
    boxes = [{"file": name, "start": [2, 0], "shape": [2, 2]}]
    (tmp_path / "index.json").write_text(json.dumps({"w": {"dtype": "F32", "shape": [4, 2], "boxes": boxes}}))
    with open_tensors(tmp_path, {name, "index.json"}) as tensors:
        assert torch.equal(tensors["w"].read((slice(3, 4), slice(0, 2))), rows[1:])
        with pytest.raises(CheckpointError, match=r"the regions it lists for tensor 'w' do not cover it"):
            tensors["w"].read()
        with pytest.raises(CheckpointError, match=r"the regions it lists for tensor 'w' do not cover it"):
            tensors["w"].read((slice(1, 3), slice(0, 2)))


# `latest`, and what is kept


def test_latest_is_the_last_saved_even_of_an_earlier_step(tmp_path: Path) -> None:
    for step in (1, 2, 30, 4):
        save_state(tmp_path, step, {"n": step})
        assert load_latest(tmp_path) == (step, {"n": step})


def test_without_a_pointer_latest_is_the_newest_step(tmp_path: Path) -> None:
    for step in (9, 10, 8):
        save_state(tmp_path, step, {"n": step})
    (tmp_path / "latest").unlink()
    assert load_latest(tmp_path) == (10, {"n": 10})


@pytest.mark.parametrize("content", ["step-00000009", "../other/step-00000001", "", "\xff", "step-1"])
def test_pointer_to_nowhere_is_an_error(tmp_path: Path, content: str) -> None:
    save_state(tmp_path, 1, {})
    (tmp_path / "latest").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"latest: (it names|invalid name) "):
        load_latest(tmp_path)


def names(root: Path) -> list[str]:
    return sorted(file.name for file in root.iterdir())


def test_keep_leaves_the_newest(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_state(tmp_path, step, {}, keep=2)
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005"]
    save_state(tmp_path, 6, {}, keep=None)
    assert len(names(tmp_path)) == 4
    save_state(tmp_path, 7, {}, keep=1)
    assert names(tmp_path) == ["latest", "step-00000007"]


def test_keep_never_removes_the_one_just_saved(tmp_path: Path) -> None:
    for step in (10, 20, 5):
        save_state(tmp_path, step, {"n": step}, keep=2)
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000020"]
    assert load_latest(tmp_path) == (5, {"n": 5})


def test_the_same_step_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    for n in range(3):
        save_state(tmp_path, 7, {"n": n})
        assert load_latest(tmp_path) == (7, {"n": n})
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (0, 0)])
def test_step_and_keep_are_checked(tmp_path: Path, step: int, keep: int) -> None:
    with pytest.raises(CheckpointError, match=f"step={step}, keep={keep}"):
        save_state(tmp_path, step, {}, keep=keep)


def test_leftovers_of_killed_saves_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.partial-0a").mkdir()
    (tmp_path / ".step-00000001.partial-0a" / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.partial-new").write_text("step-0")
    save_state(tmp_path, 2, {})
    assert names(tmp_path) == ["latest", "step-00000002"]


def test_failed_save_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, 1, {"n": 1})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device"):
            save_state(tmp_path, 2, {"n": 2, "x": torch.ones(3)})
    assert load_latest(tmp_path) == (1, {"n": 1})
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, syncs: list[str]) -> None:
    save_state(tmp_path, 1, {"x": torch.ones(3)})
    hidden = [name for name in syncs if ".step-00000001.partial-" in name]
    assert {Path(name).name for name in hidden} >= {"tensors.safetensors", "state.json", "manifest.json"}
    renamed = syncs.index(str(tmp_path))
    assert Path(syncs[renamed - 1]).name.startswith(".step-00000001.partial-")
    assert syncs[renamed + 1 :] == [str(tmp_path / ".latest.partial-new"), str(tmp_path)]


def test_removal_cut_short_leaves_no_checkpoint_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, 1, {"x": torch.ones(3)})

    def remove_one_file(folder: Path, **_: Any) -> None:
        if (folder / "tensors.safetensors").exists():
            (folder / "tensors.safetensors").unlink()
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_one_file)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_state(tmp_path, 2, {"x": torch.ones(3)}, keep=1)
    for folder in tmp_path.glob("step-*"):
        load_state(folder)
    save_state(tmp_path, 3, {}, keep=1)
    assert names(tmp_path) == ["latest", "step-00000003"]


def test_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/run"):
        save_state(tmp_path / "file" / "run", 1, {})


# Refusals


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(content: bytes) -> bytes:
        manifest = json.loads(content)
        change(manifest)
        return json.dumps(manifest).encode()

    return edit("manifest.json", damage)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tensors truncated": (edit("tensors.safetensors", lambda b: b[:-1]), r"tensors.safetensors: .* truncated\?"),
    "tensors altered": (
        edit("tensors.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
        "tensors.safetensors: it was altered",
    ),
    "tensors header altered": (
        edit("tensors.safetensors", lambda b: b[:20] + bytes([b[20] ^ 1]) + b[21:]),
        "tensors.safetensors: ",
    ),
    "tensors missing": (lambda f: (f / "tensors.safetensors").unlink(), "tensors.safetensors: it is missing"),
    "state truncated": (edit("state.json", lambda b: b[:-1]), "state.json: .* bytes"),
    "state altered": (edit("state.json", flip), "state.json: it was altered"),
    "state missing": (lambda f: (f / "state.json").unlink(), "state.json: it is missing"),
    "state is a pickle": (
        edit("state.json", lambda b: pickle.dumps({"a": 1}).ljust(len(b), b"\0")),
        "state.json: it was altered",
    ),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "it is not a checkpoint to resume from"),
    "manifest truncated": (edit("manifest.json", lambda b: b[:-9]), "manifest.json: it is damaged or was altered"),
    "manifest altered": (edit("manifest.json", flip), "manifest.json: it is damaged or was altered"),
    "step altered": (
        edit_manifest(lambda m: m["content"].update(step=4)),
        "manifest.json: it is damaged or was altered",
    ),
    "manifest is a list": (edit("manifest.json", lambda b: b"[]"), "manifest.json: it is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_truncated_or_altered_checkpoint_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    folder = save_state(tmp_path, 3, {"x": torch.arange(100.0), "text": "abc" * 50})
    act, match = DAMAGE[damage]
    act(folder)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_latest(tmp_path)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_checkpoint_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("archon.checkpoint.native.FORMATS", (99, 100))
        save_state(tmp_path, 3, {})
    with pytest.raises(CheckpointError, match="its format is 99; this version of archon reads formats"):
        load_latest(tmp_path)


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is not a checkpoint to resume from"):
        load_state(tmp_path)


# Whose checkpoint it is


def fingerprint(**changes: Any) -> dict[str, Any]:
    config = config_with(**changes)
    args_class = get_model_spec(config["model_type"]).model_args_class
    return model_fingerprint(args_class.from_hf_config(config))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"hidden_size": 48}, "dim is 24 there and 48 here"),
        ({"rope_theta": 5e5}, "rope_theta is 10000.0 there and 500000.0 here"),
        (QWEN2, "family is 'Qwen3ModelArgs' there and 'Qwen2ModelArgs' here"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"rope_scaling\.kind is 'default' there and 'linear' here",
        ),
    ],
)
def test_resume_from_another_models_checkpoint_is_one_clear_error(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    save_state(tmp_path, 3, {}, fingerprint=fingerprint())
    assert load_latest(tmp_path, fingerprint()) == (3, {})
    with pytest.raises(CheckpointError, match=f"it was written by another model: {difference}") as caught:
        load_latest(tmp_path, fingerprint(**changes))
    assert "\n" not in str(caught.value)


def test_an_argument_that_archon_added_later_may_be_off(tmp_path: Path) -> None:
    save_state(tmp_path, 3, {}, fingerprint=fingerprint())
    assert load_latest(tmp_path, fingerprint() | {"new_bias": False, "new_blocks": ()}) == (3, {})
    with pytest.raises(CheckpointError, match="new_bias is None there and True here"):
        load_latest(tmp_path, fingerprint() | {"new_bias": True})


def test_checkpoint_without_a_fingerprint_is_refused_where_one_is_asked_for(tmp_path: Path) -> None:
    save_state(tmp_path, 3, {})
    with pytest.raises(CheckpointError, match="family is None there"):
        load_latest(tmp_path, fingerprint())


def test_latest_checkpoint_is_a_path(tmp_path: Path) -> None:
    folder = save_state(tmp_path, 3, {})
    assert latest_checkpoint(tmp_path) == folder
