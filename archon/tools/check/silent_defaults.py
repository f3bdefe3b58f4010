"""No config field is ignored: a removed or changed field has the effect of transformers, or is rejected by name."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

import torch

from archon.models import get_model_spec
from archon.models.hf.config import DROPOUTS, REQUIRED
from archon.models.hf.rope import GLOBAL, LOCAL, RopePolicy
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import (
    ContractError,
    build_pair,
    family_config,
    hf_classes,
    is_composite,
    pack,
    random_config,
    reference_logits,
    relative_error,
)
from archon.tools.check.parity import FP32_TOLERANCE
from archon.tools.check.random_configs import draw_fields

Style = Literal["transformers 5", "hub"]
STYLES: tuple[Style, ...] = ("transformers 5", "hub")
# A document longer than every drawn window and original context.
LENGTHS = [41]
SEED = 3
# Scale of the weights, regardless of `initializer_range`: large weights saturate the attention.
WEIGHT_SCALE = 0.13
# Without these fields, transformers builds a model of billions of parameters; archon rejects them by name.
CLASS_SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
ALTERNATIVE_VALUES: dict[type, Any] = {
    bool: lambda value: [not value],
    int: lambda value: [value + 1, value * 2],
    float: lambda value: [value * 3 + 0.25, value / 2],
    str: lambda value: ["gelu", "other"],
    type(None): lambda value: [True, 1, 3, 0.5],
    list: lambda value: [value[::-1], value[:1]],
    dict: lambda value: [],
}


def hub_style(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config in the form before transformers 5: theta at the top level, `rope_scaling` or null."""
    policy = get_model_spec(config["model_type"], text_only=True).model_args_class.hf_ropes
    if is_composite(config["model_type"]):
        return config | {"text_config": _with_outer_rope(config["text_config"], policy)}
    return _with_outer_rope(config, policy)


def _with_outer_rope(config: dict[str, Any], policy: RopePolicy) -> dict[str, Any]:
    outer = {name: value for name, value in config.items() if name != "rope_parameters"}
    rope = dict(config["rope_parameters"].get(GLOBAL, config["rope_parameters"]))
    outer["rope_theta"] = rope.pop("rope_theta")
    if policy.local_theta_field is not None:
        outer[policy.local_theta_field] = config["rope_parameters"][LOCAL]["rope_theta"]
    elif policy.local_theta is not None:  # the old form cannot change it
        outer["rope_theta"] = policy.theta
    return outer | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


def variants(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (field, config without it or with another value), RoPE fields included.

    A composite config yields its top-level fields and the fields of its text decoder.
    """
    if text := config.get("text_config"):
        yield from ((name, config | {"text_config": changed}) for name, changed in variants(text))
    for name, value in config.items():
        if name in ("model_type", "transformers_version", "architectures", "text_config", "vision_config"):
            continue
        if name in DROPOUTS:  # read with a warning, as archon trains without dropout
            continue
        yield name, {key: other for key, other in config.items() if key != name}
        for other in ALTERNATIVE_VALUES[type(value)](value):
            yield name, config | {name: other}
    for path in (("rope_parameters",), ("rope_scaling",), ("rope_parameters", GLOBAL), ("rope_parameters", LOCAL)):
        for name, value in _inner(config, path).items():
            for other in [None] if name == "rope_type" else ALTERNATIVE_VALUES[type(value)](value):
                changed = copy.deepcopy(config)
                _inner(changed, path)[name] = other
                yield name, changed


def _inner(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        config = config.get(name) or {}
    return config


def restyled_fields(config: dict[str, Any]) -> set[str]:
    """Return the fields that `hub_style` rewrites, and the fields that RoPE depends on."""
    dependencies = {"head_dim", "layer_types", "max_position_embeddings", "partial_rotary_factor", "sliding_window"}
    text = config.get("text_config", config)
    rope = text["rope_parameters"]
    inner = {name for part in (rope, rope.get(GLOBAL, {}), rope.get(LOCAL, {})) for name in part}
    restyled = hub_style(config).get("text_config", hub_style(config))
    return {name for name in restyled if "rope" in name} | inner | (dependencies & text.keys())


def outcome(name: str, config: dict[str, Any], reference: str, removed: bool) -> str:
    """Return `rejected`, `unusable` (in transformers) or `equal`.

    Raises:
        ContractError: the outputs differ, or the field is rejected without its name.
    """
    model_type = config["model_type"]
    spec = get_model_spec(model_type, text_only=True)
    try:
        args = spec.model_args_class.from_hf_config(config)
    except ConfigError as error:
        field = spec.model_args_class.hf_fields.get(name)
        # A handwritten reader may report any argument; layer_types determines the number of layers.
        natives = [field.native] if field else [argument.name for argument in fields(spec.model_args_class)]
        names = (name, "layer_types", *natives)
        if not any(other in str(error) for other in names):
            raise ContractError(f"rejected, but the error does not name it: {error}") from error
        return "rejected"
    if removed and name in CLASS_SIZES and spec.model_args_class.hf_fields[name].default is REQUIRED:
        raise ContractError(f"{name} is missing and was not rejected")
    try:
        reference_config = hf_classes(reference)[0](**config | {"model_type": reference})
        text = reference_config.get_text_config()
        scale, text.initializer_range = text.initializer_range, WEIGHT_SCALE
        hf_model, model, _ = build_pair(reference_config, seed=SEED, model_type=model_type)
    except (ContractError, RuntimeError) as error:
        raise ContractError(f"transformers builds other parameters: {error}") from error
    except Exception:  # noqa: BLE001 - transformers' checks may raise anything
        return "unusable"
    if args.initializer_range != scale:
        raise ContractError(f"initializer_range is {args.initializer_range}, in transformers {scale}")
    changed = spec.model_class(args)
    changed.load_state_dict(model.state_dict())
    tokens, positions, cu_seqlens, longest = pack(LENGTHS, args.vocab_size, SEED)
    with torch.no_grad():
        try:
            expected = reference_logits(hf_model, tokens, LENGTHS)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return "unusable"
        if (difference := relative_error(changed(tokens, positions, cu_seqlens, longest), expected)) > FP32_TOLERANCE:
            raise ContractError(f"the logits differ by {difference:.1e}")
    return "equal"


def field_outcomes(
    model_type: str, style: Style, reference: str | None = None, *, restyled_only: bool = False
) -> tuple[Counter[str], list[str]]:
    """Remove or change each field; return the count of each `outcome` and a line for each violation.

    Args:
        model_type: type of the family.
        style: style of `config.json`; `hub` has the RoPE fields at the top level.
        reference: equivalent type in transformers; by default `model_type`.
        restyled_only: skip the fields that are equal in both styles.
    """
    config = family_config(random_config(SEED, model_type, reference), model_type)
    chosen = restyled_fields(config) if restyled_only else None
    config = config if style == "transformers 5" else hub_style(config)
    outcomes, wrong = Counter[str](), []
    for name, changed in variants(config):
        if chosen is not None and name not in chosen:
            continue
        try:
            removed = name not in changed.get("text_config", changed)
            outcomes[outcome(name, changed, reference or model_type, removed)] += 1
        except ContractError as error:
            wrong.append(f"{name} = {changed.get(name, 'missing')!r} ({style}): {error}")
    return outcomes, wrong


def unread_fields(model_type: str) -> list[str]:
    """Return a line for each mapped field, or field of `hf_examples`, that does not change the model's arguments.

    A weaker check, for families that transformers does not have.
    """
    args_class = get_model_spec(model_type, text_only=True).model_args_class
    config = {"model_type": model_type} | draw_fields(SEED, model_type)
    args, lines = args_class.from_hf_config(config), []
    tried: dict[str, tuple[Any, Any]] = {
        name: (config.get(name), [other for other in values if other != config.get(name)])
        for name, values in args_class.hf_examples.items()
    }
    for name, field in args_class.hf_fields.items():
        value = config.get(name, field.default)
        if field.native:
            tried[name] = value, ALTERNATIVE_VALUES[list if isinstance(value, tuple) else type(value)](value)
    for name, (value, others) in tried.items():
        changes = []
        for other in others:
            try:
                changes.append(args_class.from_hf_config(config | {name: other}) != args)
            except ConfigError:
                changes.append(True)
        if changes and not any(changes):
            lines.append(f"{name}: no value other than {value!r} changes the model")
    return lines
