"""Adapters in the commands: `--lora` of one that the real `peft` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Outcome, _tiny_checkpoint, archon, checkpoint, dataset

__all__ = ["_tiny_checkpoint", "archon", "checkpoint", "dataset"]  # pytest finds fixtures by their names here


def peft_adapter(base: Path, folder: Path, **options: Any) -> Any:
    """Write an adapter that changes answers. Returns its model."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    config = peft.LoraConfig(r=4, lora_alpha=24, target_modules="all-linear", init_lora_weights=False, **options)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return adapted


@pytest.fixture
def lora(checkpoint: Path, tmp_path: Path) -> Path:
    peft_adapter(checkpoint, tmp_path / "adapter", rank_pattern={"o_proj": 2})
    return tmp_path / "adapter"


def answers(done: Outcome) -> list[str]:
    return [line for line in done.out.splitlines() if not line.startswith("# ")]


def test_generate_answers_as_peft_does(archon, checkpoint, tmp_path):
    model = peft_adapter(checkpoint, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = torch.tensor([tokenizer.encode("1+2=")])
    with torch.no_grad():
        theirs = model.generate(input_ids=prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
    wanted = tokenizer.decode(theirs, skip_special_tokens=True)
    asked = ("generate", checkpoint, "--prompt", "1+2=", "greedy=true", "chat=false", "max_new_tokens=24")
    assert answers(archon(*asked, "--lora", tmp_path / "adapter")) == [wanted]
    assert answers(archon(*asked)) != [wanted]


def test_inspect_shows_an_adapter(archon, checkpoint, lora):
    done = archon("inspect", checkpoint, "--lora", lora)
    assert done.code == 0, done.err
    tensors = load_file(lora / "adapter_model.safetensors").values()
    count = sum(tensor.numel() for tensor in tensors)
    assert f"  base         {checkpoint}; it fits this checkpoint" in done.out
    assert "  rank         4, alpha 24, scale 6, 12 matrices" in done.out
    assert "  rank         2, alpha 24, scale 12, 2 matrices" in done.out
    assert "  targets      down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in done.out
    assert f"  parameters   {count:,}, {100 * count / 16064:.2g} % of the checkpoint's" in done.out
    assert f"  size         {4 * count:,} bytes of float32" in done.out
    assert archon("inspect", lora).out == done.out, "the folder names its base"
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "gone/away"}))
    assert f"archon inspect BASE --lora {lora}" in archon("inspect", lora).complaint


@pytest.mark.slow
def test_eval_asks_the_checkpoint_with_its_adapter(archon, checkpoint, lora, dataset, tmp_path):
    asked = ("--data", dataset, "--reward", "exact_match", "--temperature", 0)
    keys = ("data.prompt_key=prompt", "data.response_key=response", "data.split=train", "max_new_tokens=4")
    scored = {}
    for name, given in (("base", ()), ("adapted", ("--lora", lora))):
        done = archon("eval", checkpoint, *keys, *asked, *given, "--out", tmp_path / name)
        assert done.code == 0, done.err
        scored[name] = (tmp_path / name / "answers.jsonl").read_text()
    assert json.loads((tmp_path / "adapted" / "results.json").read_text())["who"] == f"{checkpoint} with {lora}"
    assert scored["base"] != scored["adapted"]
    refused = archon("eval", "--url", "http://127.0.0.1:9/v1", *keys, *asked, "--lora", lora)
    assert "--lora requires a checkpoint" in refused.complaint


@pytest.mark.slow
def test_doctor_trains_the_adapter(archon, checkpoint, lora):
    done = archon("doctor", checkpoint, "--lora", lora, "--tokens", 64, "--dtype", "float32")
    assert done.code == 0, done.err
    assert "layers.*.attention.wq.lora.a × 2: [4, 32]" in done.out and "bitwise equal" in done.out
    predicted = archon("doctor", checkpoint, "--lora", lora, "--layout", "d2t2", "--rank", 0, "--tokens", 64)
    assert predicted.code == 0, predicted.err
    count = sum(tensor.numel() for tensor in load_file(lora / "adapter_model.safetensors").values())
    trained = int(predicted.out.split("parameters  ")[1].split(",")[0].replace(",", ""))
    assert 0 < trained < count, "a rank holds a part of the adapters, and the base is not trained"


MISTAKES = {
    "no adapter": ("adapter_config.json", None, "it has no adapter_config.json"),
    "a rank": ("adapter_config.json", {"r": 3}, "has rank 4, but adapter_config.json says 3"),
    "dora": ("adapter_config.json", {"use_dora": True}, "is missing, and use_dora of adapter_config.json is true"),
}


@pytest.mark.parametrize(
    ("command", "mistake"), [("generate", "no adapter"), ("inspect", "a rank"), ("doctor", "dora")]
)
def test_a_folder_that_is_no_adapter_of_the_checkpoint_is_one_line(archon, checkpoint, lora, command, mistake):
    file, change, complaint = MISTAKES[mistake]
    if change is None:
        (lora / file).unlink()
    else:
        (lora / file).write_text(json.dumps(json.loads((lora / file).read_text()) | change))
    options = {"generate": ("--prompt", "1+2="), "inspect": (), "doctor": ("--tokens", 64)}[command]
    assert complaint in archon(command, checkpoint, *options, "--lora", lora).complaint


def test_values_that_are_not_finite_are_one_line(archon, checkpoint, lora):
    file = lora / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    complaint = archon("generate", checkpoint, "--prompt", "1+2=", "--lora", lora).complaint
    assert "has values that are not finite" in complaint
