"""Qwen3-MoE: the Qwen3 decoder with mixtures of experts."""

from archon.models.qwen3_moe.args import Qwen3MoEModelArgs
from archon.models.qwen3_moe.model import Qwen3MoEModel
from archon.models.qwen3_moe.parallelize import parallelize_qwen3_moe
from archon.models.qwen3_moe.spec import SPEC
from archon.models.qwen3_moe.state_dict_adapter import Qwen3MoEStateDictAdapter

__all__ = ["SPEC", "Qwen3MoEModel", "Qwen3MoEModelArgs", "Qwen3MoEStateDictAdapter", "parallelize_qwen3_moe"]
