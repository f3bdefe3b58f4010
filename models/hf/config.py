"""Strict reader of Hugging Face configs: every field is mapped, known to have no effect, or rejected.

Ignoring unknown fields can build a different model: an ignored YaRN, window, bias or activation causes errors of 0.3 %
to 145 %. Unknown fields and unsupported values therefore raise ConfigError, which names the field.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from archon.models.hf.checks import check_kind, reject_field
from archon.models.hf.quantization import FIELD as QUANTIZATION_FIELD
from archon.models.hf.quantization import quantization_field, read_quantization
from archon.schema.errors import ConfigError

logger = logging.getLogger(__name__)

REQUIRED: Any = object()


@dataclass(frozen=True)
class Field:
    """Config field that becomes a model argument.

    Attributes:
        native: Name in `BaseModelArgs`; empty for a field that is checked but has no effect.
        kind: `int`, `float` (accepts integers), `bool`, `str`, or `list` for a list of nonnegative integers.
        default: Default of the family's config class in transformers; REQUIRED if there is none.
        null: Value that null stands for, which may differ from the default; REQUIRED if null is rejected.
        minimum: Smallest accepted integer; floats must not be negative.
        maximum: Largest accepted integer, since PyTorch counts tensor bytes in 64 bits; floats end at `MAX_FLOAT`.
    """

    native: str
    kind: type
    default: Any = REQUIRED
    null: Any = REQUIRED
    minimum: int = 1
    maximum: int = 2**40


# float32 and bfloat16 end at 3.4e38; larger values overflow or raise inside the forward.
MAX_FLOAT = 1e30

# No real model has more layers (Llama-3.1-405B has 126); building 1,000 on the meta device takes seconds.
MAX_LAYERS = 1_000


DENSE_FIELDS = {
    "hidden_size": Field("dim", int),
    "num_hidden_layers": Field("n_layers", int, maximum=MAX_LAYERS),
    "num_attention_heads": Field("n_heads", int),
    "num_key_value_heads": Field("n_kv_heads", int, null=0),
    "intermediate_size": Field("hidden_dim", int),
    "vocab_size": Field("vocab_size", int),
    "rms_norm_eps": Field("norm_eps", float, 1e-6),
    "max_position_embeddings": Field("max_seq_len", int, maximum=2**63 - 1),
    "hidden_act": Field("hidden_act", str, "silu"),
    "tie_word_embeddings": Field("tie_word_embeddings", bool, False),
    "initializer_range": Field("initializer_range", float, 0.02),
    "pad_token_id": Field("pad_token_id", int, None, null=None, minimum=0),
}
# 0 means hidden_size / num_attention_heads. Many families of transformers use `head_dim`, which their config classes do
# not declare; some of them accept null.
HEAD_DIM = {"head_dim": Field("head_dim", int, 0)}
NULLABLE_HEAD_DIM = {"head_dim": Field("head_dim", int, 0, null=0)}
MLP_BIAS = {"mlp_bias": Field("mlp_bias", bool, False)}
ATTENTION_BIAS = {"attention_bias": Field("attention_bias", bool, False)}


def dense_fields(*groups: Mapping[str, Field], **defaults: Any) -> dict[str, Field]:
    """Return the config fields of Llama-style dense decoders and of `groups`, with a family's defaults.

    Every family sets the defaults of `num_key_value_heads` (0 means the number of attention heads) and
    `max_position_embeddings`.
    """
    fields = {name: field for group in (DENSE_FIELDS, *groups) for name, field in group.items()}
    return with_defaults(fields, **defaults)


def with_defaults(fields: Mapping[str, Field], **defaults: Any) -> dict[str, Field]:
    """Return config fields with a family's defaults, by config name."""
    return {**fields, **{name: replace(fields[name], default=default) for name, default in defaults.items()}}


Windows = tuple[int | None, tuple[int | None, ...]]
"""(window in tokens, window of each layer); None for full attention."""


@dataclass(frozen=True)
class WindowPolicy:
    """Rule that derives sliding windows from a family's config.

    Attributes:
        fields: Config fields that `read` uses; other window fields are unknown and rejected.
        read: Maps the config and the number of layers to `Windows`.
    """

    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any], int], Windows]


# Fields that change the computation unless they have this value. A family overrides them with a `Field` or in its
# `hf_fixed_values`.
FIXED_VALUES: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "per_layer_config": None,
    "auto_map": None,
    "pretraining_tp": 1,
    "mlp_bias": False,
    "rope_interleaved": False,
    "qk_layernorm": False,
    "use_qk_norm": False,
}

# Dropout of transformers' training. archon trains without dropout, which changes neither weights nor inference.
DROPOUTS = frozenset(
    """
    dropout attention_dropout hidden_dropout residual_dropout embedding_dropout classifier_dropout embd_pdrop
    resid_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob
    """.split()  # noqa: SIM905 - a table is easier to read than quoted names
)

# Fields without effect on weights or computation: names, metadata, generation and training options.
NO_EFFECT = frozenset(
    """
    model_type cache_implementation architectures transformers_version torch_dtype dtype use_cache return_dict
    return_dict_in_generate output_hidden_states output_attentions output_scores output_router_logits
    torchscript use_bfloat16 tf_legacy_loss name_or_path _name_or_path _model_name_or_path _commit_hash
    attn_implementation
    _attn_implementation _attn_implementation_autoset experts_implementation _experts_implementation
    tie_last_hidden_states bos_token_id eos_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id id2label label2id num_labels problem_type finetuning_task
    task_specific_params tokenizer_class prefix max_length min_length max_new_tokens do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    cross_attention_hidden_size ignore_keys_at_rope_validation keys_to_ignore_at_inference
    model_name model_max_length max_sequence_length max_seq_length tokenizer_model_max_length tokenizer_padding_side
    bos_token eos_token pad_token unk_token chat_template gradient_checkpointing use_gradient_checkpointing
    neftune_noise_alpha use_flash_attn use_flash_attention _flash_attn_2_enabled is_llama_config transformers.js_config
    """.split()  # noqa: SIM905 - a table is easier to read than quoted names
)


def as_dict(hf_config: Any) -> dict[str, Any]:
    """Convert a transformers config object or a parsed `config.json` to a plain dictionary.

    A mock config, with a `to_dict` that returns no dictionary, is read from its attributes.
    """
    if isinstance(hf_config, Mapping):
        return dict(hf_config)
    if hasattr(hf_config, "to_dict"):
        values = hf_config.to_dict()
        if isinstance(values, Mapping):
            return dict(values)
        attributes = vars(hf_config).items()
        return {name: value for name, value in attributes if not name.startswith("_") and name != "method_calls"}
    raise ConfigError(f"expected a transformers config or a dictionary, got {type(hf_config).__name__}")


@dataclass(frozen=True)
class CompositePolicy:
    """Rule that reads the config of a composite model for its text decoder alone.

    Attributes:
        ignored: Top-level fields without effect on the decoder: the encoders' configs and placeholder tokens.
        ties: Default of `tie_word_embeddings`.
        unset: Fields of the text config that only a decoder alone may have: transformers' composite model ignores them.
        may_be_flat: Published configs have the decoder's fields at the top level, and the text config may tie too.
    """

    ignored: tuple[str, ...] = (
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    )
    ties: bool = False
    unset: tuple[str, ...] = ()
    may_be_flat: bool = False

    def nested(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with the decoder's fields in `text_config`, and `tie_word_embeddings` at the top level."""
        if not self.may_be_flat:
            return {**config}
        tied, outer = "tie_word_embeddings", {"model_type", "tie_word_embeddings", QUANTIZATION_FIELD, *self.ignored}
        if config.get("text_config") is None:
            text = {name: value for name, value in config.items() if name not in {*outer, "text_config"}}
            config = {name: value for name, value in config.items() if name in outer} | {"text_config": text}
        text = config["text_config"]
        ties = isinstance(text, Mapping) and not config.get(tied) and text.get(tied)
        return {**config, tied: ties} if ties else {**config}

    def text_config(self, config: Mapping[str, Any], text_types: Sequence[str]) -> dict[str, Any]:
        """Return the text-decoder config of a composite model; `text_types` are the model types that it may have."""
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            reject_field("text_config", text, "expected the config of the text decoder")
        read = {"text_config", "tie_word_embeddings", QUANTIZATION_FIELD, *self.ignored}
        check_fields(config, read, FIXED_VALUES)
        text_type = text.get("model_type", text_types[0] if len(text_types) == 1 else None)
        if text_type not in text_types:
            reject_field("text_config.model_type", text_type, f"expected {' or '.join(map(repr, text_types))}")
        for name in self.unset:
            if text.get(name) is not None:
                reject_field(name, text[name], "expected null in a composite config, whose model does not apply it")
        # transformers ties by the top-level field. Files without it that tie by default may have an untied head, which
        # only the text config declares: transformers then compares head and embedding.
        name = "tie_word_embeddings"
        tied = config.get(name, self.ties and text.get(name, True))
        return {**text, "model_type": text_type, name: tied, QUANTIZATION_FIELD: quantization_field(config)}


def read_config(config: Mapping[str, Any], family: Any) -> dict[str, Any]:
    """Read model arguments, by native name, from a config.

    `family` is a subclass of `BaseModelArgs`. Null is accepted for `hf_fixed_values`, and a field may be missing.
    """
    model_type, model_types = config.get("model_type"), family.model_types | {*family.composite_types.values()}
    if not isinstance(model_type, str) or model_type not in model_types:
        reject_field("model_type", model_type, f"expected {' or '.join(sorted(model_types))} in this family")
    read = {*family.hf_fields, *family.hf_ropes.known_fields, *family.hf_windows.fields}
    fixed_values = FIXED_VALUES | family.hf_fixed_values
    fixed_values = {name: value for name, value in fixed_values.items() if name not in read}
    check_fields(config, {*read, QUANTIZATION_FIELD}, fixed_values)
    read_quantization(config.get(QUANTIZATION_FIELD))
    args = {field.native: read_field(config, name, field) for name, field in family.hf_fields.items()}
    args.pop("", None)
    args["sliding_window"], args["layer_windows"] = family.hf_windows.read(config, args["n_layers"])
    return args | family.hf_ropes.read(config, args)


def check_fields(
    config: Mapping[str, Any], read: Collection[str], fixed_values: Mapping[str, Any], prefix: str = ""
) -> None:
    """Raise ConfigError, naming the field after `prefix`, for an unknown field or another value than the fixed one."""
    known = {*read, *fixed_values, *NO_EFFECT, *DROPOUTS}
    for name, value in config.items():
        # A null of an unknown field, like a note of unsloth, selects nothing.
        if name not in known and value is not None and not name.startswith("unsloth_"):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? Else " if close else ""
            reject_field(
                f"{prefix}{name}", value, f"archon does not know this field; {hint}remove it if it has no effect"
            )
        if name in DROPOUTS and value:
            _warn_of_dropout(f"{prefix}{name}", repr(value))
        if name in fixed_values and value is not None and value != fixed_values[name]:
            reject_field(f"{prefix}{name}", value, f"archon supports only {fixed_values[name]!r}")


@functools.cache
def _warn_of_dropout(name: str, value: str) -> None:
    logger.warning("config field %r is %s; archon trains without dropout", name, value)


def read_field(config: Mapping[str, Any], name: str, field: Field) -> Any:
    """Return the argument of a config field."""
    value = config.get(name, field.default)
    if value is REQUIRED:
        raise ConfigError(f"config field {name!r} is missing; a {config['model_type']} config must give it")
    if name not in config:
        return field.default
    if value is None and field.null is not REQUIRED:
        return field.null
    value = check_kind(name, value, field.kind)
    if field.kind is list and any(type(item) is not int or item < 0 for item in value):
        reject_field(name, value, "expected a list of nonnegative integers")
    if field.kind is int and value < field.minimum:
        reject_field(name, value, f"expected at least {field.minimum}")
    if field.kind is int and value > field.maximum:
        reject_field(name, value, f"expected at most {field.maximum}")
    if field.kind is float and value < 0:
        reject_field(name, value, "expected a number of at least 0")
    if field.kind is float and value > MAX_FLOAT:
        reject_field(name, value, f"expected at most {MAX_FLOAT:g}, which bfloat16 and float32 can represent")
    return value


def _read_window(config: Mapping[str, Any], default: int | None) -> int | None:
    window = config.get("sliding_window", default)
    if window is not None and check_kind("sliding_window", window, int) < 1:
        reject_field("sliding_window", window, "expected at least 1, or null")
    return window


def read_layer_types(config: Mapping[str, Any], n_layers: int) -> list[bool] | None:
    """Return which layers have a sliding window by `layer_types`; None without that field."""
    layer_types, known = config.get("layer_types"), ("full_attention", "sliding_attention")
    if layer_types is None:
        return None
    is_list = isinstance(layer_types, list | tuple)
    if not is_list or len(layer_types) != n_layers or any(t not in known for t in layer_types):
        reject_field("layer_types", layer_types, f"expected {' or '.join(known)} for each of {n_layers} layers")
    return [layer_type == "sliding_attention" for layer_type in layer_types]


def _from_layer(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Return a flag per layer: whether its index is at least `max_window_layers`."""
    first = check_kind("max_window_layers", config.get("max_window_layers", 28), int)
    return [layer >= first for layer in range(n_layers)]


def read_switched_window(
    config: Mapping[str, Any], n_layers: int, default: int | None, candidates: Sequence[bool]
) -> Windows:
    """Return the windows of a config with the switch `use_sliding_window`.

    `layer_types` selects the sliding layers; without it all `candidates` slide if the switch is on.
    """
    is_on = check_kind("use_sliding_window", config.get("use_sliding_window") or False, bool)
    # Some config classes write 0 for a disabled window.
    window = None if not is_on and config.get("sliding_window") == 0 else _read_window(config, default)
    window = window if is_on else None
    slides = read_layer_types(config, n_layers)
    if slides is None:
        slides = [window is not None and candidate for candidate in candidates]
    if any(slides) and window is None:
        expected = "some layers slide, but use_sliding_window or sliding_window is off"
        reject_field("layer_types", config.get("layer_types"), expected)
    return window, tuple(window if slide else None for slide in slides)


def uniform_window(default: int | None) -> WindowPolicy:
    """Return the policy that applies `sliding_window` to every layer; null disables it."""

    def read(config: Mapping[str, Any], n_layers: int) -> Windows:
        window = _read_window(config, default)
        return window, (window,) * n_layers

    return WindowPolicy(("sliding_window",), read)


def layer_type_windows(
    default: int | None, pattern: int, pattern_field: str | None = None, *, first_is_full: bool = False
) -> WindowPolicy:
    """Return the policy that applies `sliding_window` to the sliding layers of `layer_types`.

    Without `layer_types`, all layers but the last of every `pattern` layers slide, or all but the first if
    `first_is_full`; `pattern_field` names a config field that overrides `pattern`.
    """

    def read(config: Mapping[str, Any], n_layers: int) -> Windows:
        window, period = _read_window(config, default), pattern
        if pattern_field is not None:
            period = check_kind(pattern_field, config.get(pattern_field, pattern), int)
            if period < 1:
                reject_field(pattern_field, period, "expected at least 1")
        slides = read_layer_types(config, n_layers)
        if slides is None:
            slides = [(layer + (not first_is_full)) % period != 0 for layer in range(n_layers)]
        if any(slides) and window is None:
            reject_field("sliding_window", None, "expected the window of the sliding layers")
        return window, tuple(window if slide else None for slide in slides)

    return WindowPolicy(
        ("sliding_window", "layer_types", *(() if pattern_field is None else (pattern_field, f"_{pattern_field}"))),
        read,
    )


NO_WINDOWS = WindowPolicy((), lambda _, n_layers: (None, (None,) * n_layers))
"""Policy of families without sliding windows."""

SWITCHED_WINDOW = WindowPolicy(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    lambda config, n_layers: read_switched_window(config, n_layers, 4096, _from_layer(config, n_layers)),
)
"""Qwen's policy: `use_sliding_window` enables the window in the layers of `layer_types` or `max_window_layers`."""
