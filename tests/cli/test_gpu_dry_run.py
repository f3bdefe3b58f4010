"""`--dry-run --gpu NAME` checks a run for an absent GPU, and predicts its memory and time."""

from __future__ import annotations

from pathlib import Path

import pytest

from archon.tools.planner.hardware import read_hardware

RECIPES = Path(__file__).parents[2] / "rl" / "recipes"
H100 = ("--dry-run", "--gpu", "h100-80gb")


@pytest.fixture
def recipe(archon, checkpoint, tmp_path):
    """Run the dry run of a recipe with a tiny checkpoint and generated data in place of its downloads."""

    def run(command: str, name: str, *arguments: object):
        model = "actor" if command == "rl" else "model"
        data = {"path": "arithmetic", "max_length": 64}
        changes = [f"{model}.path={checkpoint}", f"run_dir={tmp_path / 'run'}", f"train_data={data}", "eval_data=null"]
        return archon(command, "--config", RECIPES / name, *changes, *arguments)

    return run


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("sft", "gsm8k_sft_gpu.yaml"),
        ("sft", "gsm8k_lora_gpu.yaml"),
        ("sft", "gsm8k_8b_gpu.yaml"),
        ("rl", "gsm8k_rl_gpu.yaml"),
    ],
)
def test_the_gpu_recipes_are_accepted_without_a_gpu(recipe, command, name):
    done = recipe(command, name, *H100)
    assert done.code == 0, done.err
    model = "actor" if command == "rl" else "model"
    assert f"# {model}: activation_checkpoint auto: recompute no block" in done.out
    assert f"# {model}: h100-80gb, predicted: " in done.out and "tok/s of one GPU" in done.out


def test_a_gpu_that_is_too_small_is_refused(recipe, tmp_path):
    small = tmp_path / "small.yaml"
    small.write_text(read_hardware("h100-80gb").model_copy(update={"memory_bytes": 1 << 30}).to_yaml())
    complaint = recipe("sft", "gsm8k_sft_gpu.yaml", "--dry-run", "--gpu", small).complaint
    assert "h100-80gb has 1.0 GiB, and a rank needs 2." in complaint and "lower max_tokens_per_mb" in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--gpu", "h100-80gb"), "--gpu h100-80gb needs --dry-run"),
        ((*H100, "model.device=cpu"), "model.device is cpu, and --gpu h100-80gb predicts a run on a GPU"),
        (("--dry-run", "--gpu", "h300"), "gpu is 'h300'; expected one of 4090"),
        (("--dry-run",), "PyTorch sees 0 CUDA devices"),
    ],
)
def test_what_cannot_be_predicted(recipe, arguments, complaint):
    assert complaint in recipe("sft", "gsm8k_sft_gpu.yaml", *arguments).complaint


@pytest.mark.slow
def test_a_dry_run_prints_what_auto_chooses_here(recipe):
    done = recipe("sft", "gsm8k_sft_gpu.yaml", "--dry-run", "model.device=cpu")
    assert done.code == 0, done.err
    assert "# model: activation_checkpoint auto: recompute no block" in done.out and "predicted: " not in done.out
    tight = "model.activation_checkpoint={mode: auto, memory_budget: 0.0001}"
    told = recipe("sft", "gsm8k_sft_gpu.yaml", "--dry-run", "model.device=cpu", tight).out
    assert "auto: recompute every block, predicted" in told and "this does not fit" in told
