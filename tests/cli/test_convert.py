"""`archon convert` as a user meets it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file


def test_from_hf_to_megatron_to_native_and_back(archon, checkpoint, tmp_path):
    ranks, state, back = tmp_path / "ranks", tmp_path / "state", tmp_path / "back"

    done = archon("convert", checkpoint, ranks, "--to", "megatron", "--tp", "2", "--pp", "2", "--spec", "te")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"qwen3, 24 tensors: hf {checkpoint} -> megatron {ranks}, 0.0")
    assert done.out.endswith(" GB in 4 files\n")
    assert archon("convert", ranks, state, "--to", "native", "--from", "megatron").code == 0
    assert archon("convert", state, back, "--to", "hf", "--like", checkpoint).code == 0

    before, after = load_file(checkpoint / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert (back / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


def test_an_export_in_another_dtype(archon, checkpoint, tmp_path):
    assert archon("convert", checkpoint, tmp_path / "out", "--to", "hf", "--dtype", "bfloat16").code == 0
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--to megatron --tp 3", "tp is 3; expected a divisor or a multiple of the number of key-value heads, 2"),
        ("--to megatron --pp 3", "pp is 3; expected a divisor of the 2 layers"),
        ("--to megatron --ep 2", "ep is 2, but the model has no experts"),
        ("--to hf --tp 2", "--tp requires --to megatron; got hf"),
        ("--to native --spec te", "--spec requires --to megatron; got native"),
        ("--to native --dtype bfloat16", "--dtype requires --to hf; got native"),
        ("--to native --gguf-type f16", "--gguf-type requires --to gguf; got native"),
        ("--to native --drop-padding", "--drop-padding requires --from megatron; got hf"),
        ("--to native --like elsewhere", "like (--like) is set for a hf checkpoint"),
        ("--to native --from native", "holds no step-* folder"),
        ("--to hf --from megatron", "no mp_rank_* directory"),
    ],
)
def test_options_that_cannot_be(archon, checkpoint, tmp_path, options, reason):
    assert reason in archon("convert", checkpoint, tmp_path / "out", *options.split()).complaint
    assert [*tmp_path.iterdir()] == [checkpoint]


def test_a_format_that_nobody_knows(archon, checkpoint, tmp_path):
    done = archon("convert", checkpoint, tmp_path / "out", "--to", "ggml")
    assert done.code == 2 and "'ggml' is not one of" in done.err
    done = archon("convert", checkpoint, tmp_path / "out", "--to", "hf", "--from", "gguf")
    assert done.code == 2 and "'gguf' is not one of" in done.err


def test_folders_that_are_no_checkpoint(archon, checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "does not exist" in archon("convert", tmp_path / "nowhere", tmp_path / "out", "--to", "native").complaint
    assert "it is not a checkpoint" in archon("convert", tmp_path / "empty", tmp_path / "out", "--to", "hf").complaint
    assert "expected a new folder" in archon("convert", checkpoint, checkpoint, "--to", "native").complaint


def test_a_state_needs_the_config_it_belongs_to(archon, checkpoint, tmp_path):
    assert archon("convert", checkpoint, tmp_path / "state", "--to", "native").code == 0
    complaint = archon("convert", tmp_path / "state", tmp_path / "out", "--to", "hf").complaint
    assert f"{tmp_path / 'state'}: it holds no config.json" in complaint and "--like" in complaint
