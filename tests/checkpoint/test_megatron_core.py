"""What is converted, in megatron-core's real GPTModel: every rank takes it, and it computes what archon computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import archon
from archon.tools.check.oracle import relative_error
from archon.tools.check.parity import ROUNDING
from tests.checkpoint.tiny_checkpoints import MOE, QWEN2, make_checkpoint
from tests.tolerances import PARITY_FP32

ROOT = Path(__file__).resolve().parents[2]
TOKENS = torch.arange(3, 59, 5)
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 36}
EXPERTS: dict[str, Any] = MOE | {"num_experts": 4, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": SIZES | QWEN2,
    "qwen3": SIZES,
    "qwen3 tied": SIZES | {"tie_word_embeddings": True},
    "moe": SIZES | EXPERTS,
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 4, "rope_theta": 1000.0},
    "moe normalized": SIZES | EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": []},
}


def start(*arguments: object) -> subprocess.Popen[str]:
    """`tests.checkpoint.megatron_ranks` in a process of its own: what it needs of torch for a CPU stays there."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.megatron_ranks", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, error = process.communicate()
        assert process.returncode == 0, error


@torch.no_grad()
def archon_logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    length = len(TOKENS)
    model = archon.load_model(folder, dtype=dtype)
    return model(TOKENS[None], torch.arange(length)[None], torch.tensor([0, length], dtype=torch.int32), length)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=PARITY_FP32 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_logits_are_archons(tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / name, **changes)[0] for name, changes in MODELS.items()]

    finish(start("logits", tmp_path / "out.pt", *folders))

    theirs = torch.load(tmp_path / "out.pt", weights_only=True)
    for folder, logits in zip(folders, theirs, strict=True):
        ours = archon_logits(folder)
        if (
            relative_error(logits, ours) > PARITY_FP32
        ):  # a model that rounding moves farther: as near to float64 as theirs
            exact = archon_logits(folder, torch.float64)
            assert relative_error(ours.double(), exact) <= ROUNDING * relative_error(logits.double(), exact)
            assert relative_error(logits.double(), exact) <= 10 * PARITY_FP32


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("groups", "tp"), [(2, 2), (1, 2)], ids=["heads divided", "fewer heads than ranks"])
def test_logits_of_tensor_parallel_ranks_are_archons(tmp_path: Path, groups: int, tp: int) -> None:
    changes = SIZES | QWEN2 | {"num_key_value_heads": groups, "vocab_size": 64}
    folder, _ = make_checkpoint(tmp_path / "hf", **changes)

    finish(*(start("tensor", folder, tmp_path / "out.pt", rank, tp, tmp_path / "store") for rank in range(tp)))

    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), archon_logits(folder))


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_every_rank_has_the_tensors_that_it_is_given(tmp_path: Path) -> None:
    """Loading ends in an error for a name that is missing or unknown, and for a shape that differs."""
    layouts = {"qwen2": ["4:1:1"], "qwen3": ["1:2:1"], "qwen3 tied": ["2:2:1"], "moe": ["2:2:2", "1:1:4"]}
    for name in layouts:
        make_checkpoint(tmp_path / name, **MODELS[name])

    finish(start("ranks", *(f"{tmp_path / name}:{layout}" for name, found in layouts.items() for layout in found)))
