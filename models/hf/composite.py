"""Text decoders of composite checkpoints, whose encoders of images or audio are passthrough tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import HFMap, rename_prefix, replace_prefix, transformers_map
from archon.models.hf.state_dict import WITHOUT_HEAD, BaseStateDictAdapter

DECODER = "model.language_model."
"""Prefix of the decoder's keys in transformers' models in memory."""


class CompositeStateDictAdapter(BaseStateDictAdapter):
    """Adapter of a text decoder, alone or inside a composite checkpoint.

    Encoders, projectors and multi-token-prediction layers are passthrough tensors. The names of the attributes are
    those of transformers' models in memory, where the decoder has the prefix `DECODER`.

    Attributes:
        composite_names: The namings of a composite checkpoint: prefixes in files by prefixes in memory. An export has
            the first one.
        encoders: Further patterns of `passthrough` in a composite checkpoint.
        encoder_map: Names of the encoders that the model computes.
    """

    passthrough: tuple[str, ...] = ("mtp.*", "model.visual.*")
    composite_names: ClassVar[tuple[Mapping[str, str], ...]] = ({}, WITHOUT_HEAD)
    encoders: ClassVar[tuple[str, ...]] = ()
    encoder_map: ClassVar[HFMap] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.args.is_composite:
            return
        in_memory = self._with_map({**replace_prefix(self.from_hf_map, "model.", DECODER), **self.encoder_map})
        layers = {"model.layers.": f"{DECODER}layers."}  # further layers for multi-token prediction
        in_memory.passthrough = tuple(rename_prefix(x, layers) for x in self.passthrough) + self.encoders
        first, *others = (in_memory.renamed(names) for names in self.composite_names)
        self.from_hf_map, self.passthrough = first.from_hf_map, first.passthrough  # type: ignore[misc]
        self.__dict__["namings"] = (self, *others)
        self.__dict__["in_memory"] = in_memory.stacked

    @cached_property
    def stacked(self) -> BaseStateDictAdapter:
        """See `BaseStateDictAdapter.stacked`; expert matrices that the map transposes are [E, out, in].

        transformers 5 writes them so. An export is as released, [E, in, out], which older versions and servers expect.
        """
        hf_map = transformers_map(self.from_hf_map)
        experts = {hf: entry for hf, entry in hf_map.items() if ".experts." in hf and isinstance(entry, Fused)}
        return self._with_map({**hf_map, **{hf: replace(entry, transposed=False) for hf, entry in experts.items()}})

    def for_keys(self, tensors: Mapping[str, Any]) -> BaseStateDictAdapter:
        """See `BaseStateDictAdapter.for_keys`; a shape shows whether expert matrices are transposed."""
        adapter = super().for_keys(tensors)
        for key, (experts, *sizes) in adapter.hf_shapes().items():
            if key.endswith(".experts.down_proj") and key in tensors and adapter.hf_to_native(key)[0].is_transposed:
                return adapter.stacked if tuple(tensors[key].shape) == (experts, *reversed(sizes)) else adapter
        return adapter


class LlavaStateDictAdapter(CompositeStateDictAdapter):
    """Adapter for the names of LLaVA's checkpoints, which transformers 5 writes; 4.52 to 4.57 write those in memory."""

    passthrough = ()
    composite_names = (
        {
            DECODER: "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        },
        {},
    )
    encoders = ("model.vision_tower.*", "model.multi_modal_projector.*")
