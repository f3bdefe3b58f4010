"""Strict reading of a Hugging Face config: a field is mapped, known to have no effect, or rejected by name and value.

A reader that ignores unknown fields may build a different model (an ignored YaRN, window, bias or activation gives
errors of 0.3 % to 145 %); here an unknown field raises ConfigError.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from archon.models.layers.rope import RopeConfig
from archon.schema.errors import ConfigError

REQUIRED: Any = object()


@dataclass(frozen=True)
class Field:
    """A config field that becomes an argument of the model.

    Attributes:
        native: the name in `BaseModelArgs`; empty for a field that is checked but has no effect here.
        kind: `int`, `float` (an integer is accepted), `bool`, `str`, or `list` for a list of nonnegative integers.
        default: the default of the family's config class in transformers; REQUIRED for a field without one.
        null: what null stands for, which need not be the default; REQUIRED for a field that null is rejected for.
        minimum: the smallest integer accepted; floats must not be negative.
        maximum: the largest integer accepted; PyTorch counts the bytes of a tensor in 64 bits.
    """

    native: str
    kind: type
    default: Any = REQUIRED
    null: Any = REQUIRED
    minimum: int = 1
    maximum: int = 2**40


# No real model has more layers, and lists with one entry per layer would fill the memory.
MAX_LAYERS = 10_000


def dense_fields(
    *,
    num_key_value_heads: int,
    max_position_embeddings: int,
    rms_norm_eps: float = 1e-6,
    hidden_act: str = "silu",
    tie_word_embeddings: bool = False,
    pad_token_id: int | None = None,
) -> dict[str, Field]:
    """Returns the fields that all dense decoders of Llama's architecture share, with a family's own defaults.

    `num_key_value_heads` is that of a config that lacks the field; 0 and null stand for as many as attention heads.
    """
    return {
        "hidden_size": Field("dim", int),
        "num_hidden_layers": Field("n_layers", int, maximum=MAX_LAYERS),
        "num_attention_heads": Field("n_heads", int),
        "num_key_value_heads": Field("n_kv_heads", int, num_key_value_heads, null=0),
        "intermediate_size": Field("hidden_dim", int),
        "vocab_size": Field("vocab_size", int),
        "rms_norm_eps": Field("norm_eps", float, rms_norm_eps),
        "max_position_embeddings": Field("max_seq_len", int, max_position_embeddings, maximum=2**63 - 1),
        "hidden_act": Field("hidden_act", str, hidden_act),
        "tie_word_embeddings": Field("tie_word_embeddings", bool, tie_word_embeddings),
        "initializer_range": Field("initializer_range", float, 0.02),
        "pad_token_id": Field("pad_token_id", int, pad_token_id, null=None, minimum=0),
    }


Windows = tuple[int | None, tuple[int | None, ...]]
"""The sliding window in tokens, and that of each layer; None for full attention."""


@dataclass(frozen=True)
class WindowPolicy:
    """How a family's config says which layers have a sliding window.

    Attributes:
        fields: the config fields that `read` reads; a family's other window fields are unknown, so rejected.
        read: from the config and the number of layers to `Windows`.
    """

    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any], int], Windows]


_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")

# Fields that change the computation unless they have this value. A family overrides them by a field of its own, or in
# its `hf_must_be`.
MUST_BE: dict[str, Any] = {
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "quantization_config": None,
    "per_layer_config": None,
    "auto_map": None,
}

# Fields without effect on the weights or on the model's computation: names, metadata, generation, training.
NO_EFFECT = frozenset(
    """
    model_type architectures transformers_version torch_dtype dtype use_cache return_dict
    return_dict_in_generate output_hidden_states output_attentions output_scores output_router_logits
    torchscript use_bfloat16 tf_legacy_loss name_or_path _name_or_path _commit_hash attn_implementation
    _attn_implementation _attn_implementation_autoset experts_implementation _experts_implementation
    tie_last_hidden_states bos_token_id eos_token_id sep_token_id cls_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id id2label label2id num_labels problem_type finetuning_task
    task_specific_params tokenizer_class prefix max_length min_length max_new_tokens do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    cross_attention_hidden_size
    """.split()  # noqa: SIM905 - a table is easier to read than quoted names
)

# Type of each RoPE field, and the RoPE types that use it (transformers' `_validate_*_rope_parameters`). A tuple is read
# from a list of numbers.
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_ROPE_SCALING_FIELDS: dict[str, tuple[type, set[str]]] = {
    "factor": (float, {"linear", "dynamic", "yarn", "llama3", "longrope"}),
    _ORIGINAL_LENGTH: (int, {"yarn", "llama3", "longrope"}),
    "attention_factor": (float, {"yarn", "longrope"}),
    "beta_fast": (float, {"yarn"}),
    "beta_slow": (float, {"yarn"}),
    "mscale": (float, {"yarn"}),
    "mscale_all_dim": (float, {"yarn"}),
    "truncate": (bool, {"yarn"}),
    "low_freq_factor": (float, {"llama3"}),
    "high_freq_factor": (float, {"llama3"}),
    "short_factor": (tuple, {"longrope"}),
    "long_factor": (tuple, {"longrope"}),
}
_ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
DEFAULT_THETA = 10_000.0


def reject_field(name: str, value: Any, expected: str) -> NoReturn:
    """Raise ConfigError with a field, its value, and what was expected."""
    raise ConfigError(f"config field {name!r} is {value!r}; {expected}", field=name)


def as_dict(hf_config: Any) -> dict[str, Any]:
    """Returns a transformers config object or a parsed `config.json` as a plain dictionary."""
    if isinstance(hf_config, Mapping):
        return dict(hf_config)
    if hasattr(hf_config, "to_dict"):
        return dict(hf_config.to_dict())
    raise ConfigError(f"expected a transformers config or a dictionary, got {type(hf_config).__name__}")


def check_kind(name: str, value: Any, kind: type) -> Any:
    """Returns `value` as `kind`; an integer is accepted as a float, a bool is not a number.

    Raises ConfigError, naming the field, for another type, NaN or infinity.
    """
    wanted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if isinstance(value, wanted) and (kind is bool or not isinstance(value, bool)):
        converted = kind(value)
        if kind is not float or abs(converted) < float("inf"):
            return converted
    reject_field(name, value, f"expected {'a number' if kind is float else 'type ' + kind.__name__}")


def read_config(
    hf_config: Any,
    fields: Mapping[str, Field],
    model_types: frozenset[str],
    windows: WindowPolicy,
    must_be: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the arguments of a model, by native name, from a config of one of `model_types`.

    Args:
        hf_config: object or dictionary.
        fields: those that become arguments, by name.
        windows: how the config says which layers have a sliding window.
        must_be: further fields, which change the computation unless they have this value (or null, or are missing).

    Raises ConfigError, naming field and value, for anything unsupported.
    """
    config = as_dict(hf_config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_types:
        reject_field("model_type", model_type, f"expected {' or '.join(sorted(model_types))} in this family")
    must_be = {name: value for name, value in (MUST_BE | dict(must_be)).items() if name not in fields}
    known = {*fields, *_ROPE_FIELDS, *windows.fields, *must_be, *NO_EFFECT}
    for name, value in config.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "remove it if it has no effect"
            reject_field(name, value, f"archon does not know this field; {hint}")
        if name in must_be and value is not None and value != must_be[name]:
            reject_field(name, value, f"archon supports only {must_be[name]!r}")
    args = {field.native: _read_field(config, name, field) for name, field in fields.items()}
    args.pop("", None)
    args["rope_theta"], args["rope_scaling"] = _read_rope(config, args["max_seq_len"])
    args["sliding_window"], args["layer_windows"] = windows.read(config, args["n_layers"])
    return args


def _read_field(config: Mapping[str, Any], name: str, field: Field) -> Any:
    value = config.get(name, field.default)
    if value is REQUIRED:
        raise ConfigError(f"config field {name!r} is missing; a {config['model_type']} config must give it")
    if name not in config:
        return field.default
    if value is None and field.null is not REQUIRED:
        return field.null
    value = check_kind(name, value, field.kind)
    if field.kind is list and any(type(item) is not int or item < 0 for item in value):
        reject_field(name, value, "expected a list of integers, none negative")
    if field.kind is int and value < field.minimum:
        reject_field(name, value, f"expected at least {field.minimum}")
    if field.kind is int and value > field.maximum:
        reject_field(name, value, f"expected at most {field.maximum}")
    if field.kind is float and value < 0:
        reject_field(name, value, "expected no negative number")
    return value


def _read_rope(config: Mapping[str, Any], max_seq_len: int) -> tuple[float, RopeConfig]:
    """Returns theta and scaling, from the old fields (`rope_theta`, `rope_scaling`) or the new `rope_parameters`."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        reject_field("rope_scaling", old, f"it contradicts rope_parameters {new!r}; keep one")
    source = "rope_scaling" if old else "rope_parameters"
    parameters = old or new or {}
    if not isinstance(parameters, Mapping):
        reject_field(source, parameters, "expected a dictionary or null")
    scaling = dict(parameters)
    kinds = [scaling.pop(key) for key in ("rope_type", "type") if key in scaling] or ["default"]
    kind = kinds[0]
    if kind != kinds[-1] or not isinstance(kind, str) or kind not in _ROPE_REQUIRED:
        reject_field(f"{source}.rope_type", kind, f"expected one of {', '.join(_ROPE_REQUIRED)}, given once")
    outer, inner = config.get("rope_theta"), scaling.pop("rope_theta", None)
    if outer is not None and inner is not None and outer != inner:
        reject_field("rope_theta", outer, f"it contradicts the {inner!r} of {source}; keep one")
    theta = inner if inner is not None else outer
    theta = DEFAULT_THETA if theta is None else check_kind("rope_theta", theta, float)
    if theta <= 1:
        reject_field("rope_theta", theta, "expected a number above 1")
    if (partial := scaling.pop("partial_rotary_factor", None)) not in (None, 1, 1.0):
        reject_field(f"{source}.partial_rotary_factor", partial, "archon supports only 1.0")

    values: dict[str, Any] = {"kind": kind}
    for name, value in scaling.items():
        value_kind, used_by = _ROPE_SCALING_FIELDS.get(name, (float, set()))
        if kind not in used_by:
            reject_field(f"{source}.{name}", value, f"RoPE of type {kind!r} has no such field; remove it")
        values[name] = None if value is None else _rope_value(f"{source}.{name}", value, value_kind)
    for name in _ROPE_REQUIRED[kind]:
        nullable = kind == "yarn"
        if name not in scaling or (scaling[name] is None and not nullable):
            raise ConfigError(f"config field {source!r} lacks {name!r}, which RoPE of type {kind!r} needs")
    if values.get("truncate", True) is None:
        reject_field(f"{source}.truncate", None, "expected true or false")
    if kind in _ROPE_SCALING_FIELDS[_ORIGINAL_LENGTH][1]:
        # The top-level field, else the inner one, else max_position_embeddings.
        inner, outer = values.pop(_ORIGINAL_LENGTH, None), config.get(_ORIGINAL_LENGTH)
        length = max_seq_len if inner is None else inner
        values["original_max_seq_len"] = length if outer is None else check_kind(_ORIGINAL_LENGTH, outer, int)
    return theta, RopeConfig(**values)


def _rope_value(name: str, value: Any, kind: type) -> Any:
    if kind is not tuple:
        return check_kind(name, value, kind)
    if not isinstance(value, (list, tuple)):
        reject_field(name, value, "expected a list of numbers")
    return tuple(check_kind(name, item, float) for item in value)


def _read_window(config: Mapping[str, Any], default: int | None) -> int | None:
    window = config.get("sliding_window", default)
    if window is not None and check_kind("sliding_window", window, int) < 1:
        reject_field("sliding_window", window, "expected at least 1, or null")
    return window


def _read_switched_window(config: Mapping[str, Any], n_layers: int) -> Windows:
    """Returns the window, and each layer's: by `layer_types`, else that of layers from `max_window_layers` on."""
    window = _read_window(config, 4096)
    if not check_kind("use_sliding_window", config.get("use_sliding_window") or False, bool):
        window = None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = check_kind("max_window_layers", config.get("max_window_layers", 28), int)
        slides = [window is not None and layer >= first for layer in range(n_layers)]
    else:
        known = ("full_attention", "sliding_attention")
        is_list = isinstance(layer_types, list | tuple)
        if not is_list or len(layer_types) != n_layers or any(t not in known for t in layer_types):
            reject_field("layer_types", layer_types, f"expected {' or '.join(known)} for each of {n_layers} layers")
        slides = [layer_type == "sliding_attention" for layer_type in layer_types]
    if any(slides) and window is None:
        reject_field(
            "layer_types", layer_types, "it has sliding layers, but use_sliding_window or sliding_window is off"
        )
    return window, tuple(window if slide else None for slide in slides)


def uniform_window(default: int | None) -> WindowPolicy:
    """Returns the policy of families whose `sliding_window` applies to every layer; null switches it off."""

    def read(config: Mapping[str, Any], n_layers: int) -> Windows:
        window = _read_window(config, default)
        return window, (window,) * n_layers

    return WindowPolicy(("sliding_window",), read)


NO_WINDOWS = WindowPolicy((), lambda _, n_layers: (None, (None,) * n_layers))
"""The policy of families without sliding windows."""

SWITCHED_WINDOW = WindowPolicy(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), _read_switched_window
)
"""Qwen's policy: `use_sliding_window` switches the window on, in the layers that `layer_types` or `max_window_layers`
names."""
