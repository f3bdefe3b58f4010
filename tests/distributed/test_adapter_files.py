"""A folder of PEFT's is the same adapters in every layout: read by ranks and written by them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from archon.engine.engine import ArchonEngine
from archon.schema.config import EngineConfig
from archon.tools.check.rank_pool import Pool
from tests.engine.tiny import make_engine

pytestmark = pytest.mark.xdist_group("ranks")
LORA = {"rank": 3, "alpha": 5.0, "init": "random", "alpha_pattern": {"down_proj": 2.0}}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "vocab_size": 104,
}


def rewrite(base: str, folder: str, layout: str, experts: str) -> None:
    """Read the adapters in `folder` in a layout, and writes them to `folder`-`layout`."""
    lora = {"path": folder, "export_experts": experts}
    engine = ArchonEngine(EngineConfig.parse({"path": base, "device": "cpu", "layout": layout, "lora": lora}))
    engine.initialize()
    engine.save(f"{folder}-{layout}", "peft")


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["stacked", "per_expert"])
def test_experts_adapters_are_the_same_file_in_every_layout(
    tmp_path: Path, ranks: Callable[[int], Pool], experts: str
) -> None:
    make_engine(tmp_path / "made", hf=EXPERTS | {"norm_topk_prob": True}).save(tmp_path / "base")
    base, folder = str(tmp_path / "base"), tmp_path / experts
    engine = ArchonEngine(
        EngineConfig.parse({"path": base, "device": "cpu", "lora": LORA | {"export_experts": experts}})
    )
    engine.initialize()
    engine.save(folder, "peft")
    for layout in ("d2", "t2", "d2e2", "p2"):
        ranks(2).run(rewrite, base, str(folder), layout, experts)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            assert Path(f"{folder}-{layout}", file).read_bytes() == (folder / file).read_bytes(), (layout, file)
