"""What a checkpoint is, and what training or serving it would take, from its config alone; no weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archon.models import get_model_spec
from archon.models.args import BaseModelArgs
from archon.models.flops import Flops, MatmulShape, StateBytes, training_state_bytes
from archon.models.hf_config import MAX_LAYERS
from archon.schema.errors import ConfigError, UnknownModelError

# Bytes of one parameter: what a decoder reads, and what a trainer keeps.
SERVED_BYTES, MASTER_BYTES = 2, 4
# A config of thousands of strange fields is not a model's; the list of refusals ends here.
MAX_REFUSALS = 50


@dataclass(frozen=True)
class Part:
    """A part of the model, and the bytes of state it takes in training with float32 masters."""

    name: str
    parameters: int

    @property
    def served_bytes(self) -> int:
        return self.parameters * SERVED_BYTES

    @property
    def state(self) -> StateBytes:
        return training_state_bytes(self.parameters, MASTER_BYTES)


@dataclass(frozen=True)
class Inspection:
    """The findings. What an unsupported or refused config cannot tell is None or empty.

    `flops` are of training, a token, in documents of `seq_len` tokens. `kv_bytes` is the key-value cache of one token
    in bfloat16.
    """

    path: Path
    model_type: str
    family: str | None = None
    args: BaseModelArgs | None = None
    parts: list[Part] = field(default_factory=list)
    seq_len: int = 4096
    flops: Flops | None = None
    kv_bytes: int | None = None
    refused: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)


def inspect_checkpoint(path: str | Path, config: Mapping[str, Any], seq_len: int = 4096) -> Inspection:
    """Inspect the parsed `config.json` of a checkpoint; every reason to refuse it is listed, not just the first."""
    common: dict[str, Any] = {"path": Path(path), "model_type": str(config.get("model_type")), "seq_len": seq_len}
    try:
        spec = get_model_spec(common["model_type"])
    except UnknownModelError as error:
        return Inspection(**common, flops=_flops(config, seq_len), refused=[str(error)])
    if refused := refusals(spec.model_args_class, config):
        return Inspection(**common, family=spec.name, flops=_flops(config, seq_len), refused=refused)
    args = spec.model_args_class.from_hf_config(config)
    return Inspection(
        **common,
        family=spec.name,
        args=args,
        parts=_parts(spec.state_dict_adapter_class(config).native_shapes),
        flops=MatmulShape.from_args(args).per_token(seq_len),
        kv_bytes=2 * args.n_layers * args.n_kv_heads * args.head_dim * SERVED_BYTES,
    )


def refusals(args_class: type[BaseModelArgs], config: Mapping[str, Any]) -> list[str]:
    """Why a family refuses a config, one line a field: each field refused is left out and the rest is read again."""
    left, found = dict(config), list[str]()
    while len(found) < MAX_REFUSALS:
        try:
            args_class.from_hf_config(left)
        except ConfigError as error:
            name = (error.field or "").partition(".")[0]
            # A field that must be there is refused once for its value, and would be again for being left out.
            if not name or name not in left:
                return found or [str(error)]
            found.append(str(error))
            del left[name]
        else:
            return found
    return found


def _flops(config: Mapping[str, Any], seq_len: int) -> Flops | None:
    """FLOPs a token where the config's names allow counting them."""
    try:
        if config.get("num_hidden_layers", 0) > MAX_LAYERS:
            return None
        return MatmulShape.from_hf_config(config).per_token(seq_len)
    except (ConfigError, TypeError, ValueError, ArithmeticError, LookupError):  # whatever a strange value leads to
        return None


PARTS = {
    "embedding": r"tok_embeddings\..*",
    "attention": r"layers\.\d+\.attention\..*",
    "feed-forward": r"layers\.\d+\.(feed_forward|moe)\..*",
    "norms": r"(layers\.\d+\.)?\w*norm\..*",
    "head": r"(output|score)\..*",
}


def _parts(shapes: Mapping[str, tuple[int, ...]]) -> list[Part]:
    """Parameters by part of the model, tied ones once; parts without any are left out."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        part = next(part for part, pattern in PARTS.items() if re.fullmatch(pattern, name))
        counts[part] += math.prod(shape)
    return [Part(name, count) for name, count in counts.items() if count]
