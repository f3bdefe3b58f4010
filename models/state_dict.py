"""Conversion between the tensors of Hugging Face checkpoints and parameters, by a map that each family declares.

Every Hugging Face key and every parameter is used exactly once; anything else raises CheckpointError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from archon.models.base import BaseArchonModel
from archon.schema.errors import CheckpointError

# Names that all dense decoders of Llama's architecture share. `{}` stands for the layer's index; None marks keys of old
# exports that hold no weight.
DENSE_HF_MAP: dict[str, str | None] = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.wq.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.wk.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.wv.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
    "model.layers.{}.self_attn.q_proj.bias": "layers.{}.attention.wq.bias",
    "model.layers.{}.self_attn.k_proj.bias": "layers.{}.attention.wk.bias",
    "model.layers.{}.self_attn.v_proj.bias": "layers.{}.attention.wv.bias",
    "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attention.wo.bias",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.w1.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.w3.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "score.weight": "score.weight",
    "model.rotary_emb.inv_freq": None,
    "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
}
QK_NORM_HF_MAP: dict[str, str | None] = {
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
}
# Hugging Face has one matrix per expert, archon one stacked parameter; the second `{}` is the expert's index.
EXPERTS_HF_MAP: dict[str, str | None] = {
    "model.layers.{}.mlp.gate.weight": "layers.{}.moe.router.gate.weight",
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.moe.experts.w1",
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.moe.experts.w2",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.moe.experts.w3",
}


@dataclass(frozen=True)
class NativeTarget:
    """The parameter that a Hugging Face tensor fills.

    Attributes:
        name: of the parameter; None for a key to skip.
        index: the row of a stacked parameter that it fills (an expert's); None for the full parameter.
        must_equal: it is a copy of a tied parameter: not loaded, and an error unless bitwise equal to it.
    """

    name: str | None
    index: int | None = None
    must_equal: bool = False


def _matcher(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{\}", r"(0|[1-9]\d*)"))


class BaseStateDictAdapter:
    """Maps the tensors of a Hugging Face checkpoint to the parameters of a model and back; stores no tensors.

    Args:
        hf_config: the checkpoint's config, an object or a dictionary.
        hf_assets_path: folder of the checkpoint, for error messages only.
        is_critic: the model has a value head `score` in place of the language-model head.
        init_score: the critic is built from an actor's checkpoint: its `lm_head` is skipped, `score` is not expected.

    Subclasses set `model_class` and, where they differ, `from_hf_map`.
    """

    model_class: ClassVar[type[BaseArchonModel]]
    from_hf_map: ClassVar[Mapping[str, str | None]] = DENSE_HF_MAP

    def __init__(
        self, hf_config: Any, hf_assets_path: str | None = None, *, is_critic: bool = False, init_score: bool = False
    ) -> None:
        self.args = self.model_class.args_class.from_hf_config(hf_config, is_critic=is_critic)
        self.hf_assets_path = hf_assets_path
        self.init_score = is_critic and init_score

    @cached_property
    def to_hf_map(self) -> dict[str, str]:
        """The Hugging Face template of each native template."""
        return {native: hf for hf, native in self.from_hf_map.items() if native is not None}

    @cached_property
    def _hf_patterns(self) -> list[tuple[re.Pattern[str], str | None]]:
        return [(_matcher(hf), native) for hf, native in self.from_hf_map.items()]

    @cached_property
    def _native_patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_matcher(native), hf) for native, hf in self.to_hf_map.items()]

    @cached_property
    def native_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name, tied ones once, in the model's order."""
        with torch.device("meta"):
            model = self.model_class(self.args)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    @property
    def is_tied(self) -> bool:
        """Whether the language-model head and the token embedding are one parameter."""
        return self.args.tie_word_embeddings and not self.args.is_critic

    def loadable_names(self) -> list[str]:
        """Returns the parameters that a checkpoint must fill: all but the `score` of a critic built from an actor."""
        return [name for name in self.native_shapes if not (self.init_score and name == "score.weight")]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor in a checkpoint of this config, by Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.loadable_names():
            shape = self.native_shapes[name]
            for hf_name, index in self._hf_names(name, shape):
                shapes[hf_name] = shape if index is None else shape[1:]
        return shapes

    def hf_to_native(self, hf_name: str) -> NativeTarget:
        """Returns the parameter that a Hugging Face key fills. Raises CheckpointError for an unknown key."""
        for pattern, template in self._hf_patterns:
            match = pattern.fullmatch(hf_name)
            if match is None:
                continue
            if template is None:
                return NativeTarget(None)
            n_named, indices = template.count("{}"), match.groups()
            name = template.format(*indices[:n_named])
            index = int(indices[n_named]) if len(indices) > n_named else None
            if name == "output.weight" and self.init_score:
                return NativeTarget(None)
            if name == "output.weight" and self.is_tied:
                return NativeTarget("tok_embeddings.weight", must_equal=True)
            shape = self.native_shapes.get(name)
            if shape is None or (self.init_score and name == "score.weight") or (index or 0) >= shape[0]:
                break
            return NativeTarget(name, index)
        raise CheckpointError(
            f"unknown key {hf_name!r}{self._where()}: this {'critic' if self.args.is_critic else 'model'} of "
            f"{self.args.n_layers} layers has no such parameter; is it the config of another checkpoint?"
        )

    def _hf_names(self, name: str, shape: tuple[int, ...]) -> Iterable[tuple[str, int | None]]:
        """Returns a parameter's Hugging Face names, each with its row of a stacked parameter or None."""
        for pattern, template in self._native_patterns:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if template.count("{}") == len(match.groups()):
                return [(template.format(*match.groups()), None)]
            return [(template.format(*match.groups(), row), row) for row in range(shape[0])]
        raise CheckpointError(f"parameter {name!r} has no Hugging Face name in {type(self).__name__}")

    def convert_single_to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Returns (name, view) of a parameter's Hugging Face tensors; none for the head of a tied model."""
        if name == "output.weight" and self.is_tied:
            return []
        if name not in self.native_shapes:
            raise CheckpointError(f"parameter {name!r} is not part of this model; expected the names in native_shapes")
        if tuple(tensor.shape) != self.native_shapes[name]:
            raise CheckpointError(
                f"parameter {name!r} has shape {tuple(tensor.shape)}, expected {self.native_shapes[name]}"
            )
        return [(hf, tensor if row is None else tensor[row]) for hf, row in self._hf_names(name, tuple(tensor.shape))]

    def to_hf(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a native state dict as Hugging Face's. Raises CheckpointError for missing or extra parameters."""
        if missing := {*self.native_shapes} - {*state}:
            raise CheckpointError(f"parameters missing from the export: {_shorten(missing)}")
        return {hf: part for name, tensor in state.items() for hf, part in self.convert_single_to_hf(name, tensor)}

    def from_hf(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a Hugging Face state dict as a native one.

        Raises CheckpointError for an unknown or missing key, and for another shape.
        """
        expected = self.hf_shapes()
        native: dict[str, Tensor] = {}
        rows: dict[str, dict[int, Tensor]] = {}
        for hf_name, tensor in state.items():
            target = self.hf_to_native(hf_name)
            if target.name is None or target.must_equal:
                continue
            if tuple(tensor.shape) != expected[hf_name]:
                raise CheckpointError(
                    f"{hf_name!r}{self._where()} has shape {tuple(tensor.shape)}, expected {expected[hf_name]}"
                )
            if target.index is None:
                native[target.name] = tensor
            else:
                rows.setdefault(target.name, {})[target.index] = tensor
        if missing := {*expected} - {*state}:
            raise CheckpointError(f"keys missing{self._where()}: {_shorten(missing)}")
        for name, by_row in rows.items():
            native[name] = torch.stack([by_row[row] for row in sorted(by_row)])
        for hf_name, tensor in state.items():
            target = self.hf_to_native(hf_name)
            if target.must_equal and target.name is not None and not torch.equal(tensor, native[target.name]):
                raise CheckpointError(
                    f"{hf_name!r}{self._where()} differs from the embedding it is tied to; "
                    "set tie_word_embeddings to false or remove it"
                )
        return native

    def _where(self) -> str:
        return f" in {self.hf_assets_path}" if self.hf_assets_path else ""


def _shorten(names: Iterable[str], limit: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(map(repr, ordered[:limit])) + more
