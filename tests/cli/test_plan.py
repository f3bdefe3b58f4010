"""`archon plan` as a user meets it."""

from __future__ import annotations

import json

import pytest
import yaml


def test_the_configuration_is_one_that_sft_accepts(archon, checkpoint, tmp_path, monkeypatch):
    file = tmp_path / "run.yaml"
    planned = archon("plan", checkpoint, "--gpus", 2, "--tokens", 1024, "--seq", 32, "--output", file)
    assert planned.code == 0, planned.err
    layout = yaml.safe_load(file.read_text())["model"]["layout"]
    assert f"\n{layout} " in planned.out
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+2=", "response": "3"}) + "\n")
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # a test before may have joined a group
    data = (f"train_data.path={tmp_path / 'train.jsonl'}", f"run_dir={tmp_path / 'run'}")
    checked = archon("sft", "--config", file, *data, "--dry-run")
    assert checked.code == 0, checked.err
    assert f"layout {layout} on 2 processes" in checked.out


def test_the_plan_as_json(archon, checkpoint):
    found = json.loads(archon("plan", checkpoint, "--gpus", 4, "--tokens", 1024, "--seq", 32, "--json").out)
    assert found["question"]["gpus"] == 4 and found["config"]["model"]["layout"] == found["best"][0]["layout"]


def test_a_plan_that_cannot_be_written_is_not_made(archon, checkpoint, tmp_path):
    for option in ("--output", "--calibrate"):
        complaint = archon("plan", checkpoint, "--gpus", 1, option, tmp_path / "none" / "a.yaml").complaint
        assert f"{tmp_path / 'none'} is not a folder" in complaint


def test_documents_beyond_the_models_positions_are_told(archon, checkpoint):
    told = "documents are longer than the model's maximum of 64 positions"
    for seq, expected in ((64, False), (128, True)):
        done = archon("plan", checkpoint, "--gpus", 1, "--tokens", 1024, "--seq", seq)
        assert done.code == 0 and (told in done.out) is expected


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "there is no model to plan for"),
        (("--gpu", "h300"), "expected one of 4090, a100-80gb"),
        (("--tokens", 8, "--seq", 32), "expected at least seq, the 32 tokens"),
    ],
)
def test_what_cannot_be_planned(archon, checkpoint, arguments, complaint):
    model = (checkpoint,) if arguments else ()
    assert complaint in archon("plan", *model, *arguments).complaint


def test_calibration_measures_this_machine(archon, tmp_path, checkpoint):
    file = tmp_path / "here.yaml"
    done = archon("plan", "--calibrate", file, "--dtype", "float32")
    assert done.code == 0, done.err
    measured = yaml.safe_load(file.read_text())
    assert measured["fp32_flops"] > 0 and measured["memory_bandwidth"] > 0
    planned = archon("plan", checkpoint, "--gpus", 1, "--tokens", 64, "--seq", 32, "--gpu", file, "--dtype", "float32")
    assert planned.code == 0, planned.err


def test_adapters_are_planned_only_where_they_are_asked_for(archon, checkpoint, tmp_path):
    asked = ("plan", checkpoint, "--gpus", 2, "--tokens", 1024, "--seq", 32)
    full = archon(*asked)
    assert "LoRA: weights are frozen" not in full.out and "  lora  " not in full.out and "lora:" not in full.out
    file = tmp_path / "run.yaml"
    planned = archon(*asked, "--lora", "rank=2", "--lora", "targets=[q_proj]", "--output", file)
    assert planned.code == 0, planned.err
    assert "LoRA: weights are frozen" in planned.out and "  lora  " in planned.out
    run = yaml.safe_load(file.read_text())
    assert run["model"]["lora"] == {"rank": 2, "targets": ["q_proj"]}
    again = archon("plan", "--config", file, "--gpus", 2)
    assert again.out.splitlines()[0] == planned.out.splitlines()[0], "the question is that of the configuration"
    found = json.loads(archon(*asked, "--lora", "rank=2", "--json").out)
    memory = found["best"][0]["memory"]
    assert 0 < memory["lora"] < memory["parameters"] and memory["moments"] == 2 * memory["lora"]
    assert found["question"]["lora"] == {"rank": 2}
    stored = json.loads(archon(*asked, "--lora", "rank=2", "--lora", "quantize_base=fp8", "--json").out)
    assert stored["best"][0]["memory"]["parameters"] < memory["parameters"]
    assert "none of this model's linear layers" in archon(*asked, "--lora", "targets=[qkv]").complaint
    assert "unknown key 'rnk'" in archon(*asked, "--lora", "rnk=2").complaint


def test_inner_blocks_in_8_bits_are_planned_so(archon, checkpoint, tmp_path):
    model, file, asked = tmp_path / "model", tmp_path / "run.yaml", ("--gpus", 2, "--gpu", "h100-80gb")
    model.mkdir()
    deeper = json.loads((checkpoint / "config.json").read_text()) | {"num_hidden_layers": 4, "layer_types": None}
    (model / "config.json").write_text(json.dumps(deeper))
    inner = ("--fp8", "rowwise_inner")
    made = archon("plan", model, *asked, "--tokens", 1024, "--seq", 32, *inner, "--output", file)
    assert made.code == 0, made.err
    assert "FP8 matmuls in blocks (rowwise_inner)" in made.out
    assert "the first and last blocks run in bfloat16" in made.out
    assert yaml.safe_load(file.read_text())["model"]["fp8"] == "rowwise_inner"
    again = archon("plan", "--config", file, *asked)
    assert "the first and last blocks run in bfloat16" in again.out and "fp8: rowwise_inner" in again.out
    plain = archon("plan", "--config", file, *asked, "--fp8", "none")
    assert plain.code == 0 and "FP8 matmuls" not in plain.out and "fp8" not in plain.out
    told = archon("plan", checkpoint, *asked, *inner).complaint
    assert "fp8 = rowwise_inner leaves none of 2 blocks in FP8" in told


def test_several_adapters_are_not_planned_as_one_of_another_rank(archon, checkpoint):
    ranks = ("--lora", "loras.a.rank=4", "--lora", "loras.b.rank=8")
    told = archon("plan", checkpoint, "--gpus", 1, "--tokens", 1024, "--seq", 32, *ranks).complaint
    assert "lora.loras has several LoRAs, but a plan supports one" in told and "--lora rank=12" in told
