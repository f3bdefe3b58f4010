"""OLMo 2 (Ai2 2024, arXiv:2501.00656): norms after attention and feed-forward network, and full-width QK norms."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel
from archon.models.hf.config import NO_WINDOWS
from archon.models.hf.names import DENSE_HF_MAP, POST_NORMS_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.olmo3 import Olmo3ModelArgs
from archon.models.spec import define_family


@dataclass
class Olmo2ModelArgs(Olmo3ModelArgs):
    """Arguments of OLMo 2, see `Olmo3ModelArgs`; every layer has full attention."""

    model_types = frozenset({"olmo2"})
    hf_windows = NO_WINDOWS
    hf_ropes = RopePolicy()


Olmo2Model = BaseArchonModel[Olmo2ModelArgs]
Olmo2StateDictAdapter, parallelize_olmo2, SPEC = define_family(
    "olmo2", Olmo2Model, DENSE_HF_MAP | QK_NORM_HF_MAP | POST_NORMS_HF_MAP
)
