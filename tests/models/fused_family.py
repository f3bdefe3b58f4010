"""Families of the tests' own: Qwen3 and Qwen3-MoE whose checkpoints fuse, transpose, interleave and stack parameters.

For each way there is the map that declares it, and the tensors of a checkpoint made from parameters by plain indexing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from archon.models import BaseArchonModel, BaseStateDictAdapter, get_model_spec, is_supported_model, register_model_spec
from archon.models.args.base import BaseModelArgs
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import replace_prefix
from archon.models.layers.moe import ExpertsLayer
from archon.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter
from archon.models.qwen3_moe import Qwen3MoEModelArgs, Qwen3MoEStateDictAdapter
from archon.models.spec import MOE_TP_PLAN, family_spec, make_parallelize_fn

LAYERS = 2
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,  # so that o_proj is square
    "intermediate_size": 10,
    "vocab_size": 29,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
SPARSE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,  # so that the experts' matrices are square
}
ATTENTION, NETWORK, EXPERTS = "layers.{}.attention.", "layers.{}.feed_forward.", "layers.{}.moe.experts."
HF_ATTENTION, HF_NETWORK = "model.layers.{}.self_attn.", "model.layers.{}.mlp."

# Checkpoints with stacked experts, [E, 2F, dim] and [E, dim, F].
STACKED_EXPERTS_HF_MAP = {
    f"{HF_NETWORK}gate.weight": "layers.{}.moe.router.gate.weight",
    f"{HF_NETWORK}experts.gate_up_proj": Fused((f"{EXPERTS}w1", f"{EXPERTS}w3"), dim=1),
    f"{HF_NETWORK}experts.down_proj": f"{EXPERTS}w2",
}

Native = dict[str, Tensor]


@dataclass
class BiasedMoEArgs(Qwen3MoEModelArgs):
    """Qwen3-MoE whose routers have a bias that checkpoints store."""

    balance_by_bias: bool = True


class BiasedMoEModel(BaseArchonModel):
    args_class: ClassVar[type[BaseModelArgs]] = BiasedMoEArgs


def qkv(**how: Any) -> dict[str, Fused]:
    """Weights and biases of queries, keys and values in one tensor each."""
    return {
        f"{HF_ATTENTION}qkv_proj.{kind}": Fused(
            tuple(f"{ATTENTION}{name}.{kind}" for name in ("wq", "wk", "wv")), **how
        )
        for kind in ("weight", "bias")
    }


def gate_up(**how: Any) -> dict[str, Fused]:
    return {f"{HF_NETWORK}gate_up_proj": Fused((f"{NETWORK}w1.weight", f"{NETWORK}w3.weight"), **how)}


def qkv_of(native: Native, layer: int, join: Callable[[list[Tensor]], Tensor]) -> Native:
    prefix, hf = ATTENTION.format(layer), HF_ATTENTION.format(layer)
    return {
        f"{hf}qkv_proj.{kind}": join([native[f"{prefix}{name}.{kind}"] for name in ("wq", "wk", "wv")])
        for kind in ("weight", "bias")
    }


def by_heads(parts: list[Tensor]) -> Tensor:
    """For each key head: its three query heads, its key, its value."""
    q, k, v = (part.unflatten(0, (-1, 4)) for part in parts)
    return torch.cat([torch.cat([q[3 * h], q[3 * h + 1], q[3 * h + 2], k[h], v[h]]) for h in range(2)])


def alternate_rows(gate: Tensor, up: Tensor) -> Tensor:
    out = gate.new_empty(2 * gate.shape[0], *gate.shape[1:])
    out[0::2], out[1::2] = gate, up
    return out


def network_of(native: Native, layer: int, join: Callable[[Tensor, Tensor], Tensor]) -> Native:
    prefix = NETWORK.format(layer)
    whole = join(native[f"{prefix}w1.weight"], native[f"{prefix}w3.weight"])
    return {f"{HF_NETWORK.format(layer)}gate_up_proj": whole}


def experts_of(native: Native, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    prefix = EXPERTS.format(layer)
    return native[f"{prefix}w1"], native[f"{prefix}w2"], native[f"{prefix}w3"]


def alternate_columns_of_experts(native: Native, layer: int) -> Native:
    """As in gpt-oss: [E, dim, 2F] with the gate in even columns, and [E, F, dim]."""
    w1, w2, w3 = experts_of(native, layer)
    fused, hf = w1.new_empty(5, 24, 48), HF_NETWORK.format(layer)
    for expert in range(5):
        for row in range(24):
            fused[expert, :, 2 * row], fused[expert, :, 2 * row + 1] = w1[expert, row], w3[expert, row]
    return {f"{hf}experts.gate_up_proj": fused, f"{hf}experts.down_proj": w2.transpose(1, 2)}


def stacked_experts(native: Native, layer: int) -> Native:
    w1, w2, w3 = experts_of(native, layer)
    hf = HF_NETWORK.format(layer)
    gate = native[f"layers.{layer}.moe.router.gate.weight"]
    stacks = {f"{hf}experts.gate_up_proj": torch.cat([w1, w3], 1), f"{hf}experts.down_proj": w2}
    return stacks | {f"{hf}gate.weight": gate}


def fused_experts(native: Native, layer: int) -> Native:
    w1, _, w3 = experts_of(native, layer)
    hf = HF_NETWORK.format(layer)
    return {f"{hf}experts.{e}.gate_up_proj": torch.cat([w1[e], w3[e]]) for e in range(5)}


def router_bias(native: Native, layer: int) -> Native:
    key = f"{HF_NETWORK.format(layer)}gate.e_score_correction_bias"
    return {key: native[f"layers.{layer}.moe.router.expert_bias"]}


@dataclass(frozen=True)
class Way:
    """A way to store parameters: config, map entries, and the same tensors made by hand for a layer."""

    config: dict[str, Any]
    entries: dict[str, Any]
    by_hand: Callable[[Native, int], Native]


def transposed_projections(native: Native, layer: int) -> Native:
    wo, w2 = native[f"layers.{layer}.attention.wo.weight"], native[f"layers.{layer}.feed_forward.w2.weight"]
    hf = f"model.layers.{layer}."
    return {f"{hf}self_attn.o_proj.weight": wo.t(), f"{hf}mlp.down_proj.weight": w2.t()}


WAYS = {
    "ranges of rows": Way(
        DENSE,
        {**qkv(), **gate_up()},
        lambda native, i: qkv_of(native, i, torch.cat) | network_of(native, i, lambda *two: torch.cat(two)),
    ),
    "blocks of heads": Way(DENSE, qkv(blocks=lambda args: args.n_kv_heads), lambda n, i: qkv_of(n, i, by_heads)),
    "ranges of columns": Way(
        DENSE, gate_up(dim=1), lambda native, i: network_of(native, i, lambda *two: torch.cat(two, 1))
    ),
    "alternating rows": Way(DENSE, gate_up(interleaved=True), lambda native, i: network_of(native, i, alternate_rows)),
    "alternating columns": Way(
        DENSE,
        gate_up(interleaved=True, transposed=True),
        lambda native, i: network_of(native, i, lambda *two: alternate_rows(*two).t()),
    ),
    "transposed": Way(
        DENSE,
        {
            f"{HF_ATTENTION}o_proj.weight": Fused((f"{ATTENTION}wo.weight",), transposed=True),
            f"{HF_NETWORK}down_proj.weight": Fused((f"{NETWORK}w2.weight",), transposed=True),
        },
        transposed_projections,
    ),
    "stacked experts": Way(SPARSE, STACKED_EXPERTS_HF_MAP, stacked_experts),
    "experts of alternating columns": Way(
        SPARSE,
        {
            f"{HF_NETWORK}experts.gate_up_proj": Fused(
                (f"{EXPERTS}w1", f"{EXPERTS}w3"), dim=1, interleaved=True, transposed=True
            ),
            f"{HF_NETWORK}experts.down_proj": Fused((f"{EXPERTS}w2",), transposed=True),
        },
        alternate_columns_of_experts,
    ),
    "fused matrices of each expert": Way(
        SPARSE, {f"{HF_NETWORK}experts.{{}}.gate_up_proj": Fused((f"{EXPERTS}w1", f"{EXPERTS}w3"))}, fused_experts
    ),
    "a router's bias": Way(
        SPARSE, {f"{HF_NETWORK}gate.e_score_correction_bias": "layers.{}.moe.router.expert_bias"}, router_bias
    ),
}


def adapter_of(way: Way) -> BaseStateDictAdapter:
    """An adapter of this way, and the prefix of a composite model."""
    sparse = way.config["model_type"] == "qwen3_moe"
    base = Qwen3MoEStateDictAdapter if sparse else Qwen3StateDictAdapter
    entries = replace_prefix({**base.from_hf_map, **way.entries}, "model.", "model.language_model.")
    names = {"model_class": BiasedMoEModel if sparse else Qwen3Model, "from_hf_map": entries}
    return type("FusedAdapter", (base,), names)(way.config)


def random_native(adapter: BaseStateDictAdapter, dtype: torch.dtype = torch.float32, seed: int = 0) -> Native:
    """A random tensor for every parameter, and for every buffer that checkpoints hold."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in adapter.stored_shapes.items()}


def checkpoint_by_hand(way: Way, native: Native) -> Native:
    """The tensors of a checkpoint: those of the way by hand, the others as the plain family stores them."""
    plain = get_model_spec(way.config["model_type"]).state_dict_adapter_class(way.config)
    state = plain.to_hf({name: native[name] for name in plain.native_shapes})
    parts = {part for entry in way.entries.values() for part in (entry.parts if isinstance(entry, Fused) else (entry,))}
    for template, entry in plain.from_hf_map.items():
        if entry in parts:
            pattern = re.escape(template).replace(r"\{\}", r"\d+")
            state = {key: tensor for key, tensor in state.items() if re.fullmatch(pattern, key) is None}
    for layer in range(LAYERS):
        state |= way.by_hand(native, layer)
    return {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in state.items()}


# All ways at once, as a registered family.
FUSED_TYPE = "archon_test_fused_moe"


@dataclass
class FusedMoEArgs(Qwen3MoEModelArgs):
    """Qwen3-MoE whose routers have a bias that checkpoints store."""

    model_types: ClassVar[frozenset[str]] = frozenset({FUSED_TYPE})

    def experts(self) -> ExpertsLayer:
        """See `MoEModelArgs.experts`."""
        return replace(super().experts(), correction_bias=True)


class FusedMoEModel(BaseArchonModel):
    args_class: ClassVar[type[BaseModelArgs]] = FusedMoEArgs


class FusedMoEAdapter(BaseStateDictAdapter):
    """A composite model's checkpoint: every way to fuse, and keys of what is not computed here."""

    model_class = FusedMoEModel
    from_hf_map: ClassVar = replace_prefix(
        Qwen3MoEStateDictAdapter.from_hf_map
        | WAYS["blocks of heads"].entries
        | WAYS["alternating columns"].entries
        | WAYS["transposed"].entries
        | WAYS["experts of alternating columns"].entries
        | WAYS["a router's bias"].entries,
        "model.",
        "model.language_model.",
    )
    passthrough: ClassVar = ("model.language_model.layers.{n_layers}.*", "mtp.*", "model.visual.*")


def register() -> None:
    """Make the family known in this process."""
    if not is_supported_model(FUSED_TYPE):
        register_model_spec(family_spec(FUSED_TYPE, FusedMoEAdapter, make_parallelize_fn(MOE_TP_PLAN)))


def passthrough_tensors(n_layers: int) -> Native:
    """What such a checkpoint holds besides, of any dtype and shape."""
    layer = f"model.language_model.layers.{n_layers}."
    return {
        f"{layer}self_attn.q_proj.weight": torch.randn(8, 6).to(torch.float8_e4m3fn),
        f"{layer}self_attn.q_proj.weight_scale_inv": torch.rand(1, 1),
        f"{layer}mlp.gate.e_score_correction_bias": torch.tensor([float("nan"), 1.0]),
        "mtp.fc.weight": torch.randn(2, 600, 300, dtype=torch.float64),
        "mtp.scale": torch.tensor(3, dtype=torch.int64),
        "model.visual.empty": torch.empty(0, 4),
    }
