"""Qwen3 (dense): RMS norms over the queries and keys of each head."""

from archon.models.qwen3.args import Qwen3ModelArgs
from archon.models.qwen3.model import Qwen3Model
from archon.models.qwen3.parallelize import parallelize_qwen3
from archon.models.qwen3.spec import SPEC
from archon.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

__all__ = ["SPEC", "Qwen3Model", "Qwen3ModelArgs", "Qwen3StateDictAdapter", "parallelize_qwen3"]
