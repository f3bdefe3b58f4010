"""Inspection of a checkpoint from its config: family, parameters, FLOPs, memory of training and serving."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archon.models import get_model_spec
from archon.models.args.base import BaseModelArgs
from archon.models.flops import Flops, MatmulShape, StateBytes, training_state_bytes
from archon.models.hf.config import MAX_LAYERS
from archon.schema.errors import ConfigError, UnknownModelError

# Bytes of one parameter in bfloat16 for inference, and of a float32 master weight in training.
SERVED_BYTES, MASTER_BYTES = 2, 4
# Maximum number of config errors listed.
MAX_ERRORS = 50


@dataclass(frozen=True)
class ModelPart:
    """Part of a model."""

    name: str
    parameters: int

    @property
    def served_bytes(self) -> int:
        """Bytes of the bfloat16 weights for inference."""
        return self.parameters * SERVED_BYTES

    @property
    def state(self) -> StateBytes:
        """Bytes of the training state with float32 masters."""
        return training_state_bytes(self.parameters, MASTER_BYTES)


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection; fields that the config does not determine are None or empty.

    Attributes:
        flops: training FLOPs per token in documents of `seq_len` tokens.
        image_flops: FLOPs of encoding an image of `IMAGE_PATCHES` patches.
        kv_bytes: bytes of one token in a bfloat16 key-value cache.
        refused: reasons why archon cannot load the checkpoint.
        is_reward_model: the model has a value head `score`.
    """

    path: Path
    model_type: str
    family: str | None = None
    args: BaseModelArgs | None = None
    parts: list[ModelPart] = field(default_factory=list)
    seq_len: int = 4096
    flops: Flops | None = None
    image_flops: int | None = None
    kv_bytes: int | None = None
    refused: list[str] = field(default_factory=list)
    is_reward_model: bool = False

    @property
    def parameters(self) -> int:
        """Parameters of all parts."""
        return sum(part.parameters for part in self.parts)


def inspect_checkpoint(path: str | Path, config: Mapping[str, Any], seq_len: int = 4096) -> Inspection:
    """Return the inspection of a parsed `config.json`, with all of its errors."""
    common: dict[str, Any] = {"path": Path(path), "model_type": str(config.get("model_type")), "seq_len": seq_len}
    try:
        spec = get_model_spec(common["model_type"])
    except UnknownModelError as error:
        return Inspection(**common, flops=_flops(config, seq_len), refused=[str(error)])
    if refused := config_errors(spec.model_args_class, config):
        return Inspection(**common, family=spec.name, flops=_flops(config, seq_len), refused=refused)
    is_reward_model, problem = _head(config)
    if problem is not None:
        return Inspection(**common, family=spec.name, flops=_flops(config, seq_len), refused=[problem])
    args = spec.model_args_class.from_hf_config(config, is_critic=is_reward_model)
    return Inspection(
        **common,
        family=spec.name,
        args=args,
        parts=_parts(spec.state_dict_adapter_class(config, is_critic=is_reward_model).native_shapes),
        is_reward_model=is_reward_model,
        flops=MatmulShape.from_args(args).per_token(seq_len),
        image_flops=args.image_flops(IMAGE_PATCHES),
        kv_bytes=sum(layer.mixer.cache.token_features for layer in args.layer_specs) * SERVED_BYTES,
    )


# Suffixes of architectures whose heads archon does not read.
_OTHER_HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "ForMultipleChoice", "RewardModel")


def _head(config: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Return whether the architecture is a reward model, and why archon cannot load its head, or None."""
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    is_reward_model, labels = name.endswith("ForSequenceClassification"), config.get("id2label")
    problem = f" with {len(labels)} labels" if is_reward_model and isinstance(labels, dict) and len(labels) != 1 else ""
    if not problem and not name.endswith(_OTHER_HEADS):
        return is_reward_model, None
    expected = "a language model, or a reward model (ForSequenceClassification) with one label"
    return is_reward_model, f"architectures is {architectures}{problem}; expected {expected}"


def config_errors(args_class: type[BaseModelArgs], config: Mapping[str, Any]) -> list[str]:
    """Return all errors of a config, one line per field, by removing each wrong field and parsing again."""
    remaining, errors = dict(config), list[str]()
    while len(errors) < MAX_ERRORS:
        try:
            args_class.from_hf_config(remaining)
            break
        except ConfigError as error:
            name = (error.field or "").partition(".")[0]
            # A removed required field would raise a second error, for being missing.
            if not name or name not in remaining:
                return errors or [str(error)]
            errors.append(str(error))
            del remaining[name]
    return errors


def _flops(config: Mapping[str, Any], seq_len: int) -> Flops | None:
    """Return FLOPs per token, or None if the config lacks the fields to compute them."""
    try:
        if config.get("num_hidden_layers", 0) > MAX_LAYERS:
            return None
        return MatmulShape.from_hf_config(config).per_token(seq_len)
    except (ConfigError, TypeError, ValueError, ArithmeticError, LookupError):  # fields of unexpected types or values
        return None


IMAGE_PATCHES = 1024
"""Patches of the image for `image_flops`; published models have patches of 16 x 16 pixels."""
PARTS = {
    "embedding": r"tok_embeddings\..*",
    "vision encoder": r"visual\..*",
    "attention": r"layers\.\d+\.attention\..*",
    "feed-forward": r"layers\.\d+\.(feed_forward|moe)\..*",
    "norms": r"(layers\.\d+\.)?\w*norm\..*",
    "head": r"(output|score)\..*",
    "other mixers": r"layers\.\d+\..*",
}


def _parts(shapes: Mapping[str, tuple[int, ...]]) -> list[ModelPart]:
    """Return parameter counts by part of the model; tied parameters count once, empty parts are omitted."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        part = next(part for part, pattern in PARTS.items() if re.fullmatch(pattern, name))
        counts[part] += math.prod(shape)
    return [ModelPart(name, count) for name, count in counts.items() if count]
