"""Qwen2 and Qwen2.5 (dense): biases on queries, keys and values."""

from archon.models.qwen2.args import Qwen2ModelArgs
from archon.models.qwen2.model import Qwen2Model
from archon.models.qwen2.parallelize import parallelize_qwen2
from archon.models.qwen2.spec import SPEC
from archon.models.qwen2.state_dict_adapter import Qwen2StateDictAdapter

__all__ = ["SPEC", "Qwen2Model", "Qwen2ModelArgs", "Qwen2StateDictAdapter", "parallelize_qwen2"]
