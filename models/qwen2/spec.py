"""The family's entry in the registry."""

from __future__ import annotations

from archon.models.qwen2.args import Qwen2ModelArgs
from archon.models.qwen2.model import Qwen2Model
from archon.models.qwen2.parallelize import parallelize_qwen2
from archon.models.qwen2.state_dict_adapter import Qwen2StateDictAdapter
from archon.models.spec import ModelSpec

SPEC = ModelSpec(
    name="qwen2",
    model_class=Qwen2Model,
    model_args_class=Qwen2ModelArgs,
    state_dict_adapter_class=Qwen2StateDictAdapter,
    parallelize_fn=parallelize_qwen2,
    supported_model_types=Qwen2ModelArgs.model_types,
)
