"""The family's entry in the registry."""

from __future__ import annotations

from archon.models.qwen3.args import Qwen3ModelArgs
from archon.models.qwen3.model import Qwen3Model
from archon.models.qwen3.parallelize import parallelize_qwen3
from archon.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from archon.models.spec import ModelSpec

SPEC = ModelSpec(
    name="qwen3",
    model_class=Qwen3Model,
    model_args_class=Qwen3ModelArgs,
    state_dict_adapter_class=Qwen3StateDictAdapter,
    parallelize_fn=parallelize_qwen3,
    supported_model_types=Qwen3ModelArgs.model_types,
)
