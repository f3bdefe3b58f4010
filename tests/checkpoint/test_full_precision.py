"""Parameters in full precision, the decays of delta nets, in checkpoints of a narrower dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from archon.checkpoint.hf_io import load_model, save_model
from archon.checkpoint.hf_reader import read_hf_config
from archon.tools.check.oracle import build_pair, random_config
from archon.tools.check.round_trip import folder_tensors

FAMILY = "qwen3_5_text"


def test_an_export_in_bfloat16_is_what_transformers_writes(tmp_path: Path) -> None:
    theirs, _, _ = build_pair(random_config(0, FAMILY))
    theirs.save_pretrained(tmp_path / "wide")
    save_model(load_model(tmp_path / "wide"), tmp_path / "ours", like=tmp_path / "wide", dtype=torch.bfloat16)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "theirs")
    ours, wanted = (folder_tensors(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype == torch.bfloat16 and torch.equal(ours[name], tensor), name


def test_a_bfloat16_model_keeps_its_decays_and_its_dtype(tmp_path: Path) -> None:
    """Without a dtype of the export decays stay float32, which does not make the checkpoint one of float32."""
    theirs, ours, _ = build_pair(random_config(0, FAMILY))
    theirs.save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source", dtype=torch.bfloat16)
    save_model(model, tmp_path / "copy", like=tmp_path / "source")
    config = read_hf_config(tmp_path / "copy")
    assert {config.get("dtype", "bfloat16"), config.get("torch_dtype", "bfloat16")} == {"bfloat16"}
    wide = {name for name, tensor in folder_tensors(tmp_path / "copy").items() if tensor.dtype == torch.float32}
    assert wide and all(name.endswith((".A_log", ".dt_bias")) for name in wide)
    again, before = load_model(tmp_path / "copy"), dict(ours.named_parameters())
    for name, parameter in again.named_parameters():
        kept = name in again.full_precision_names()
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(parameter, before[name].to(parameter.dtype)), name
