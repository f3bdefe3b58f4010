"""Multi-token prediction in layouts: gradients, clipped steps and exports are one process's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from archon.parallel.layout import parse_layout
from archon.tools.check.oracle import relative_error
from archon.tools.check.rank_pool import Pool
from tests.distributed.mtp import train
from tests.engine.test_mtp import FILE, checkpoint
from tests.tolerances import REORDER_FP32, REORDER_FP64, STEPS_FP64

pytestmark = pytest.mark.xdist_group("ranks")

FAMILIES = {
    "glm4_moe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "vocab_size": 102},
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("glm4_moe", "d2", {}),
    ("glm4_moe", "d2e2", {"activation_checkpoint": {"mode": "full"}}),
    ("glm4_moe", "t2", {}),
    ("glm4_moe", "t2e2", {"dtype": "float32"}),
    ("glm4_moe", "c2", {"context_parallel": "allgather"}),
    ("glm4_moe", "c2", {"context_parallel": "ulysses", "gradient_reduction": "per_microbatch"}),
    ("deepseek_v3", "d2e2", {"reshard_after_forward": "always"}),
    ("deepseek_v3", "t2", {}),
    ("deepseek_v3", "c2", {}),
    ("qwen3_next", "d2", {}),
    ("qwen3_next", "t2", {}),
    ("qwen3_next", "c2", {}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            sizes = FAMILIES[family] | {"vocab_size": 102}  # divisible by two ranks
            made[family] = checkpoint(tmp_path_factory.mktemp(family), family, 0, **sizes)
        return made[family]

    return find


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        pytest.param(*case, marks=() if case[:2] in (("glm4_moe", "d2e2"), ("glm4_moe", "t2")) else pytest.mark.slow)
        for case in CASES
    ],
    ids=str,
)
def test_a_layout_trains_as_one_process(
    family: str,
    layout: str,
    options: dict[str, Any],
    folders: Callable[[str], Path],
    ranks: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    folder, options = folders(family), {"dtype": "float64"} | options
    expected = train(str(folder), "d1", str(tmp_path / "one"), {"dtype": options["dtype"]})
    size = parse_layout(layout).world_size
    found = ranks(size).run(train, str(folder), layout, str(tmp_path / "ranks"), options)
    exact = options["dtype"] == "float64"
    for actual in found:
        assert actual.keys() == expected.keys()
        for name, x in expected.items():
            if not exact and name.startswith("weight."):
                continue  # Adam magnifies reordering near zero
            tolerance = REORDER_FP32 if not exact else STEPS_FP64 if name.startswith("weight.") else REORDER_FP64
            assert relative_error(actual[name], x) <= tolerance, name
    one, several = load_file(tmp_path / "one" / FILE), load_file(tmp_path / "ranks" / FILE)
    assert one.keys() == several.keys() == load_file(folder / FILE).keys()
    assert any(name.startswith(("mtp.", "model.layers.")) and x.numel() for name, x in several.items())
    assert all(x.isfinite().all() for x in several.values()) and torch.float64 in {x.dtype for x in several.values()}
