"""The family's entry in the registry."""

from __future__ import annotations

from archon.models.qwen3_moe.args import Qwen3MoEModelArgs
from archon.models.qwen3_moe.model import Qwen3MoEModel
from archon.models.qwen3_moe.parallelize import parallelize_qwen3_moe
from archon.models.qwen3_moe.state_dict_adapter import Qwen3MoEStateDictAdapter
from archon.models.spec import ModelSpec

SPEC = ModelSpec(
    name="qwen3_moe",
    model_class=Qwen3MoEModel,
    model_args_class=Qwen3MoEModelArgs,
    state_dict_adapter_class=Qwen3MoEStateDictAdapter,
    parallelize_fn=parallelize_qwen3_moe,
    supported_model_types=Qwen3MoEModelArgs.model_types,
)
