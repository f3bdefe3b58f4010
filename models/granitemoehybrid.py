"""Granite 4 (IBM 2025): Mamba-2 layers (arXiv:2405.21060) and attention, dense or with experts."""

from dataclasses import dataclass
from typing import Any

from archon.models.args.mamba import MAMBA_EXAMPLES, MAMBA_FIELDS, ExpandedMambaModelArgs, mamba_map
from archon.models.args.moe import LOCAL_EXPERT_FIELDS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.granite import GraniteModelArgs
from archon.models.granitemoe import EXPERTS_MAP
from archon.models.hf.checks import reject_field
from archon.models.hf.config import Field
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.feed_forward import DenseLayer
from archon.models.layers.rope import RopeUse
from archon.models.layers.spec import FeedForwardSpec
from archon.models.spec import define_family


@dataclass
class GraniteMoEHybridModelArgs(ExpandedMambaModelArgs, MoEModelArgs):
    """Arguments of Granite 4, see `MambaModelArgs` and `MoEModelArgs`.

    Attributes:
        shared_hidden_dim: Inner width of the shared expert; without experts, of the dense feed-forward network.
        has_positions: Attention layers have RoPE.
    """

    norm_topk_prob: bool = True
    has_positions: bool = False

    model_types = frozenset({"granitemoehybrid"})
    biases_all_projections = True
    has_no_dense_layers = True
    hf_fields = GraniteModelArgs.hf_fields | {
        **LOCAL_EXPERT_FIELDS,
        **MAMBA_FIELDS,
        "num_local_experts": Field("n_experts", int, 8, minimum=0),
        "num_experts_per_tok": Field("n_experts_per_token", int, 2, minimum=0),
        "shared_intermediate_size": Field("shared_hidden_dim", int, 1024),
    }
    hf_aliases = {"layers_block_type": "layer_types"}
    hf_fixed_values = {"normalization_function": "rmsnorm", "init_method": "mup"}
    hf_examples = GraniteModelArgs.hf_examples | MAMBA_EXAMPLES | {"shared_intermediate_size": (12, 28)}

    def __post_init__(self) -> None:
        unrotated: RopeUse = "none"
        if not self.has_positions:
            self.layer_ropes = (unrotated,) * self.n_layers
        super().__post_init__()

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """See `BaseModelArgs.feed_forward`."""
        return self.experts() if self.n_experts else DenseLayer(self.shared_hidden_dim, self.hidden_act, False)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `BaseModelArgs.decoder_config`."""
        config, extra = super().decoder_config(config)
        positions = config.pop("position_embedding_type", None)
        if positions not in (None, "rope", "nope"):
            reject_field("position_embedding_type", positions, "expected rope, or nope or null for no positions")
        return config, extra | {"has_positions": positions == "rope"}


def _shared(module: str) -> dict[str, str | Fused | None]:
    """Return the names of the network that every token uses, which is `module` of the block."""
    hf, native = "model.layers.{}.shared_mlp.", f"layers.{{}}.{module}."
    gated = Fused((f"{native}w1.weight", f"{native}w3.weight"))
    return {f"{hf}input_linear.weight": gated, f"{hf}output_linear.weight": f"{native}w2.weight"}


class _Adapter(BaseStateDictAdapter):
    """Adapter whose checkpoints name the shared expert and the dense network alike."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.args.expert_layers:
            self.__dict__["from_hf_map"] = {**self.from_hf_map, **_shared("feed_forward")}


GraniteMoEHybridModel = BaseArchonModel[GraniteMoEHybridModelArgs]
GraniteMoEHybridStateDictAdapter, parallelize_granitemoehybrid, SPEC = define_family(
    "granitemoehybrid",
    GraniteMoEHybridModel,
    {**DENSE_HF_MAP, **mamba_map("model.layers.{}.mamba."), **EXPERTS_MAP, **_shared("moe.shared_experts")},
    adapter=_Adapter,
)
