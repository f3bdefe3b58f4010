"""Qwen3.5 whole: the decoder of `qwen3_5_text.py`, and a tower whose rows replace the placeholders of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from archon.models.args import ImageFormat
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.delta_net_args import QWEN3_5_HF_MAP, CompositeStateDictAdapter
from archon.models.hf_checks import reject_field
from archon.models.hf_config import Field, as_dict, read_field
from archon.models.layers.rope import RopeSpec
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.qwen3_5_text import Qwen35TextModelArgs
from archon.models.spec import family_spec
from archon.models.vision.config import read_vision_config
from archon.models.vision.images import PackedImages, Picture
from archon.models.vision.names import VISION_HF_MAP
from archon.models.vision.tower import VisionSpec
from archon.schema.errors import ConfigError


@dataclass
class Qwen35ModelArgs(Qwen35TextModelArgs):
    """See `Qwen35TextModelArgs`.

    Attributes:
        vision: the tower.
        image_token_id: the placeholder of a merged patch.
        mrope_section: see `RopeSpec.sections`.
    """

    vision: VisionSpec = field(default_factory=VisionSpec)
    image_token_id: int = 248056
    mrope_section: tuple[int, int, int] = (11, 11, 10)

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3_5"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision.out_dim != self.dim:
            raise ConfigError(
                f"out_hidden_size of the vision tower is {self.vision.out_dim}; expected the decoder's hidden_size "
                f"{self.dim}"
            )
        if self.rope_depends_on_length:
            raise ConfigError(
                f"RoPE of type {self.rope_scaling.kind!r} depends on a document's length, which is not defined by the "
                "positions of images; expected another type"
            )

    @property
    def image_format(self) -> ImageFormat:
        """See `BaseModelArgs.image_format`."""
        tower = self.vision
        return ImageFormat(
            self.image_token_id, tower.merge_size, tower.channels, tower.temporal_patch_size, tower.patch_size
        )

    def image_flops(self, patches: int) -> int:
        """See `BaseModelArgs.image_flops`."""
        return self.vision.forward_flops(patches)

    def rope(self, layer: int) -> RopeSpec | None:
        """See `BaseModelArgs.rope`."""
        rope = super().rope(layer)
        return None if rope is None else replace(rope, sections=self.mrope_section)

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Self:
        """See `BaseModelArgs.from_hf_config`; the config is that of a composite model."""
        config = as_dict(hf_config)
        if config.get("model_type") not in cls.composite_types:
            expected = f"expected {' or '.join(cls.composite_types)}, a model with a vision tower"
            reject_field("model_type", config.get("model_type"), expected)
        own = {
            "vision": read_vision_config(config.get("vision_config")),
            "image_token_id": read_field(config, "image_token_id", Field("", int, 248056, minimum=0)),
            "mrope_section": _mrope_section(config.get("text_config")),
        }
        return super().from_hf_config(config, is_critic, **(own | kwargs))


def _mrope_section(text: Any) -> tuple[int, int, int]:
    text = text if isinstance(text, Mapping) else {}
    parameters = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        return 11, 11, 10  # refused where the decoder's fields are read
    if parameters.get("mrope_interleaved", True) is not True:
        reject_field("mrope_interleaved", parameters["mrope_interleaved"], "archon supports only true")
    sections = parameters.get("mrope_section", (11, 11, 10))
    is_list = isinstance(sections, list | tuple) and len(sections) == 3
    if not is_list or any(type(size) is not int or size < 0 for size in sections):
        reject_field("mrope_section", sections, "expected three numbers of frequencies: of time, row and column")
    return sections[0], sections[1], sections[2]


class Qwen35Model(BaseArchonModel):
    """See `BaseArchonModel`.

    Attributes:
        visual: the tower; None on a pipeline stage without embeddings.
    """

    args_class: ClassVar[type[BaseModelArgs]] = Qwen35ModelArgs

    def __init__(self, args: Qwen35ModelArgs) -> None:
        super().__init__(args)
        self.image_token_id = args.image_token_id
        self.visual = args.vision.build(args.attn_type)

    def embed(self, tokens: Tensor, images: PackedImages | None) -> Tensor:
        """Returns the embeddings [T, dim] of tokens [T], with the tower's rows at the placeholders of images."""
        hidden = self.tok_embeddings(tokens)
        if images is None:
            return hidden
        computed = self.visual(images.patches, images.grids) if images.computed is None else images.computed
        merged = computed.to(hidden.dtype)
        merged = merged if images.merged is None else merged.index_select(0, images.merged)
        return hidden.index_copy(0, images.rows, merged)

    def see(self, pictures: Sequence[Picture], device: torch.device) -> list[Tensor]:
        """See `BaseArchonModel.see`."""
        patches = torch.cat([picture.pixel_values for picture in pictures]).to(device)
        merged = self.visual(patches, tuple(picture.size for picture in pictures))
        square = self.visual.spec.merge_size**2
        return list(merged.split([len(picture.pixel_values) // square for picture in pictures]))

    def initializers(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """See `BaseArchonModel.initializers`."""
        yield from ((name, fill) for name, fill in super().initializers() if not name.startswith("visual."))
        yield from self.visual.initializers("visual")


class Qwen35StateDictAdapter(CompositeStateDictAdapter):
    """Maps the names of the decoder and of the tower; the layers that predict further tokens are carried."""

    model_class = Qwen35Model
    from_hf_map = QWEN3_5_HF_MAP
    carried = ("mtp.*",)

    def __init__(
        self, hf_config: Any, hf_assets_path: str | None = None, *, is_critic: bool = False, init_score: bool = False
    ) -> None:
        super().__init__(hf_config, hf_assets_path, is_critic=is_critic, init_score=init_score)
        self.from_hf_map = {**self.from_hf_map, **VISION_HF_MAP}  # type: ignore[misc]


parallelize_qwen3_5 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("qwen3_5", Qwen35StateDictAdapter, parallelize_qwen3_5)
