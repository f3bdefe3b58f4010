"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624) and Nemotron 3: Mamba-2, attention, a network or experts in a layer."""

from dataclasses import dataclass
from functools import cached_property

from archon.models.args.moe import GROUP_ROUTED_FIELDS
from archon.models.args.one_part import ONE_PART_EXAMPLES, ONE_PART_FIELDS, ONE_PART_HF_MAP, OnePartModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import HEAD_DIM, MLP_BIAS, dense_fields
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.spec import define_family

_FIELDS = dense_fields(
    HEAD_DIM,
    MLP_BIAS,
    GROUP_ROUTED_FIELDS,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=21504,
    vocab_size=131072,
    max_position_embeddings=4096,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=7688,
)
_ABSENT = ("hidden_act", "rms_norm_eps", "tie_word_embeddings", "n_shared_experts", "first_k_dense_replace")


@dataclass
class NemotronHModelArgs(OnePartModelArgs):
    """Arguments of Nemotron-H and Nemotron 3, see `OnePartModelArgs`."""

    model_types = frozenset({"nemotron_h"})
    hf_ropes = RopePolicy(kinds=("default",), positions=lambda config, n_layers: (False,) * n_layers)
    hf_aliases = {
        "num_local_experts": "n_routed_experts",
        "layer_types": "layers_block_type",
        "attention_head_dim": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_chunk_size": "chunk_size",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_min": "time_step_min",
        "mamba_dt_max": "time_step_max",
        "mamba_dt_limit": "time_step_limit",
        "mamba_dt_init_floor": "time_step_floor",
    }
    # transformers' model never ties weights, and ignores the other fields.
    hf_fixed_values = {
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mamba_proj_bias": False,
        "n_shared_experts": 1,
        "residual_in_fp32": False,
    }
    hf_fields = {name: field for name, field in _FIELDS.items() if name not in _ABSENT} | ONE_PART_FIELDS
    hf_examples = ONE_PART_EXAMPLES


class _Adapter(BaseStateDictAdapter):
    """Adapter for the names of released files; transformers' models in memory have `model.` in place of `backbone.`."""

    passthrough = ("mtp.*",)

    @cached_property
    def in_memory(self) -> BaseStateDictAdapter:
        """See `BaseStateDictAdapter.in_memory`."""
        return self.renamed({"backbone.": "model."}).stacked

    @cached_property
    def namings(self) -> tuple[BaseStateDictAdapter, ...]:
        """See `BaseStateDictAdapter.namings`."""
        return self, self.renamed({"backbone.": "model."}), self.renamed({"backbone.": ""})


NemotronHModel = BaseArchonModel[NemotronHModelArgs]
NemotronHStateDictAdapter, parallelize_nemotron_h, SPEC = define_family(
    "nemotron_h", NemotronHModel, ONE_PART_HF_MAP, adapter=_Adapter
)
