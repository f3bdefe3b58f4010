"""How a Qwen3 is laid out: a plan over the roles its layers declare."""

from __future__ import annotations

from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn

parallelize_qwen3 = make_parallelize_fn(DENSE_TP_PLAN)
