"""How a Qwen3-MoE is laid out: the dense plan and the router's."""

from __future__ import annotations

from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn

parallelize_qwen3_moe = make_parallelize_fn(MOE_TP_PLAN)
