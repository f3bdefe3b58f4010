"""Vision-language models: a text decoder of a composite checkpoint and a vision encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from archon.models.args.base import BaseModelArgs, ImageFormat
from archon.models.base import BaseArchonModel
from archon.models.hf.checks import check_kind, reject_field, require
from archon.models.hf.composite import CompositeStateDictAdapter
from archon.models.hf.config import FIXED_VALUES, MAX_LAYERS, Field, check_fields, read_field
from archon.models.hf.fused_tensors import Fused
from archon.models.layers.rope import RopeSpec
from archon.models.vision.encoder import VisionEncoder, VisionSpec
from archon.models.vision.images import Grid
from archon.parallel.layout import ModelSizes

_VISION_MODULES = {
    "patch_embed.proj": "patch_embedding",
    "blocks.{}.norm1": "blocks.{}.attention_norm",
    "blocks.{}.attn.qkv": "blocks.{}.attention.wqkv",
    "blocks.{}.attn.proj": "blocks.{}.attention.wo",
    "blocks.{}.norm2": "blocks.{}.ffn_norm",
    "blocks.{}.mlp.linear_fc1": "blocks.{}.feed_forward.w1",
    "blocks.{}.mlp.linear_fc2": "blocks.{}.feed_forward.w2",
    "merger.norm": "merger.norm",
    "merger.linear_fc1": "merger.feed_forward.w1",
    "merger.linear_fc2": "merger.feed_forward.w2",
    "deepstack_merger_list.{}.norm": "deepstack_mergers.{}.norm",
    "deepstack_merger_list.{}.linear_fc1": "deepstack_mergers.{}.feed_forward.w1",
    "deepstack_merger_list.{}.linear_fc2": "deepstack_mergers.{}.feed_forward.w2",
}


def vision_map(
    modules: Mapping[str, str], parts: tuple[str, ...] = ("weight", "bias")
) -> dict[str, str | Fused | None]:
    """Return the names of an encoder's parameters from the names of its modules."""
    return {f"model.visual.{hf}.{part}": f"visual.{ours}.{part}" for hf, ours in modules.items() for part in parts}


VISION_HF_MAP = vision_map(_VISION_MODULES) | vision_map({"pos_embed": "position_grid"}, ("weight",))

# Config fields of all vision encoders, with the defaults of Qwen3-VL and Qwen3.5, and the field that only theirs have.
COMMON_VISION_FIELDS = {
    "depth": Field("depth", int, 27, maximum=MAX_LAYERS),
    "hidden_size": Field("dim", int, 1152),
    "intermediate_size": Field("hidden_dim", int, 4304),
    "num_heads": Field("n_heads", int, 16),
    "hidden_act": Field("hidden_act", str, "gelu_pytorch_tanh"),
    "in_channels": Field("channels", int, 3),
    "patch_size": Field("patch_size", int, 16),
    "temporal_patch_size": Field("temporal_patch_size", int, 2),
    "spatial_merge_size": Field("merge_size", int, 2),
    "out_hidden_size": Field("out_dim", int, 3584),
    "initializer_range": Field("initializer_range", float, 0.02),
}
_VISION_FIELDS = COMMON_VISION_FIELDS | {"num_position_embeddings": Field("n_positions", int, 2304)}
_DEEPSTACK = "deepstack_visual_indexes"


def _read_vision_config(config: Any, deepstack: tuple[int, ...] | None) -> VisionSpec:
    """Read a `vision_config`; null means the defaults of transformers' class.

    `deepstack` is the default of `VisionSpec.deepstack`; None for families without it.
    """
    fields = _VISION_FIELDS | ({} if deepstack is None else {_DEEPSTACK: Field("deepstack", list, deepstack)})
    values = read_vision_fields(config, fields, {_DEEPSTACK: []} if deepstack is None else {})
    values["deepstack"] = tuple(values.get("deepstack", ()))
    return VisionSpec(**values)


def read_vision_fields(config: Any, fields: Mapping[str, Field], fixed_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `VisionSpec` from the `fields` of a `vision_config`, and `rope_theta`."""
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        reject_field("vision_config", config, "expected a dictionary or null")
    check_fields(config, {*fields, "rope_parameters"}, {**FIXED_VALUES, **fixed_values}, "vision_config.")
    values = {field.native: read_field(config, name, field) for name, field in fields.items()}
    return values | {"rope_theta": _read_theta(config.get("rope_parameters"))}


def _read_theta(parameters: Any) -> float:
    name = "vision_config.rope_parameters"
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, Mapping) or parameters.keys() - {"rope_type", "rope_theta"}:
        reject_field(name, parameters, "expected a dictionary with rope_type and rope_theta, or null")
    if parameters.get("rope_type", "axial") != "axial":
        reject_field(f"{name}.rope_type", parameters["rope_type"], "expected 'axial'")
    theta = check_kind(f"{name}.rope_theta", parameters.get("rope_theta", 10_000.0), float)
    if theta <= 1:
        reject_field(f"{name}.rope_theta", theta, "expected a number above 1")
    return float(theta)


@dataclass
class VisionLanguageModelArgs(BaseModelArgs):
    """Arguments of a decoder with a vision encoder; a mixin after the decoder's argument class.

    A family's defaults are the values of configs without the field.

    Attributes:
        vision: The vision encoder.
        image_token_id: Placeholder token of a merged patch.
        mrope_section: See `RopeSpec.sections`.
        hf_deepstack: Default of `VisionSpec.deepstack`; None for families without it.
        mrope_interleaved: See `RopeSpec.sections` and `RopeSpec.consecutive_sections`.
    """

    vision: VisionSpec = field(default_factory=VisionSpec)
    image_token_id: int = 0
    mrope_section: tuple[int, int, int] = (0, 0, 0)

    hf_deepstack: ClassVar[tuple[int, ...] | None] = None
    mrope_interleaved: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        out_dim, deepstack, kind = self.vision.out_dim, [*self.vision.deepstack], self.rope_scaling.kind
        problem = f"out_hidden_size of the vision encoder is {out_dim}"
        require(out_dim == self.dim, f"{problem}; expected the decoder's hidden_size {self.dim}")
        problem = f"deepstack_visual_indexes is {deepstack}, one entry per decoder layer from the first"
        require(len(deepstack) <= self.n_layers, f"{problem}; expected at most {self.n_layers}")
        pairs, sections = self.rotary_dim // 2, [*self.mrope_section]
        problem = f"mrope_section is {sections}, consecutive counts of frequencies"
        require(self.mrope_interleaved or sum(sections) == pairs, f"{problem}; expected {pairs} in total")
        problem = f"RoPE of type {kind!r} depends on the document length, which image positions do not define"
        require(not self.rope_scaling.depends_on_length, f"{problem}; expected another type")

    @property
    def image_format(self) -> ImageFormat:
        """See `BaseModelArgs.image_format`."""
        vision = self.vision
        return ImageFormat(
            self.image_token_id, vision.merge_size, vision.channels, vision.temporal_patch_size, vision.patch_size
        )

    def image_flops(self, patches: int) -> int:
        """See `BaseModelArgs.image_flops`."""
        return self.vision.forward_flops(patches)

    @property
    def sizes(self) -> ModelSizes:
        """See `BaseModelArgs.sizes`."""
        return replace(super().sizes, deepstack_layers=len(self.vision.deepstack))

    def rope(self, layer: int) -> RopeSpec | None:
        """See `BaseModelArgs.rope`."""
        rope = super().rope(layer)
        if rope is None:
            return None
        return replace(rope, sections=self.mrope_section, consecutive_sections=not self.mrope_interleaved)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `BaseModelArgs.decoder_config`; expects the config of a composite model."""
        if config.get("model_type") not in cls.composite_types:
            expected = f"expected {' or '.join(cls.composite_types)}, a model with a vision encoder"
            reject_field("model_type", config.get("model_type"), expected)
        config = cls.hf_composite.nested(config)
        extra = {
            "vision": cls.read_vision(config.get("vision_config")),
            "image_token_id": read_field(config, "image_token_id", Field("", int, cls.image_token_id, minimum=0)),
            "mrope_section": cls._read_sections(config.get("text_config")),
        }
        text, decoder_extra = super().decoder_config(config)
        return text, extra | decoder_extra

    @classmethod
    def read_vision(cls, config: Any) -> VisionSpec:
        """Read a `vision_config`; families with another encoder override this."""
        return _read_vision_config(config, cls.hf_deepstack)

    @classmethod
    def _read_sections(cls, text: Any) -> tuple[int, int, int]:
        text = text if isinstance(text, Mapping) else {}
        parameters = text.get("rope_scaling") or text.get("rope_parameters") or {}
        if not isinstance(parameters, Mapping):
            return cls.mrope_section  # reading the decoder's fields rejects it
        interleaved = cls.mrope_interleaved
        if parameters.get("mrope_interleaved", interleaved) is not interleaved:
            expected = f"archon supports only {str(interleaved).lower()}"
            reject_field("mrope_interleaved", parameters["mrope_interleaved"], expected)
        sections = parameters.get("mrope_section", cls.mrope_section)
        is_list = isinstance(sections, list | tuple) and len(sections) == 3
        if not is_list or any(type(size) is not int or size < 0 for size in sections):
            reject_field("mrope_section", sections, "expected three numbers of frequencies: time, row and column")
        return sections[0], sections[1], sections[2]


VisionArgs = TypeVar("VisionArgs", bound=VisionLanguageModelArgs)


class VisionLanguageModel(BaseArchonModel[VisionArgs]):
    """Decoder with a vision encoder, see `BaseArchonModel`.

    Attributes:
        visual: The vision encoder; None on a pipeline stage without embeddings.
    """

    def __init__(self, args: VisionArgs) -> None:
        super().__init__(args)
        self.visual = VisionEncoder(args.vision, args.attn_type)

    def encode_images(self, patches: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """See `BaseArchonModel.encode_images`."""
        features: Tensor = self.visual(patches, grids)
        return features

    def initializers(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """See `BaseArchonModel.initializers`."""
        yield from ((name, fill) for name, fill in super().initializers() if not name.startswith("visual."))
        yield from self.visual.initializers("visual")


class VisionLanguageStateDictAdapter(CompositeStateDictAdapter):
    """Adapter of decoder and vision encoder; multi-token-prediction layers are passthrough tensors."""

    passthrough = ("mtp.*",)
    encoder_map = VISION_HF_MAP
