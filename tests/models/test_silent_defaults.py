"""No config field is ignored: removed or changed, it alters the outputs as transformers' do, or is rejected by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from archon.models import get_model_spec
from archon.models.spec import FAMILIES
from archon.schema.errors import ConfigError
from tests.models.reference import HF_CLASSES, build_pair, pack, random_config, reference_logits, relative
from tests.tolerances import PARITY_FP32

# A document longer than every window and original context that is drawn.
LENGTHS = [41]
SEED = 3
# Fields whose removal builds a published model of billions of parameters; archon rejects it by name.
CLASS_SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
OTHER_VALUES: dict[type, Any] = {
    bool: lambda value: [not value],
    int: lambda value: [value + 1, value * 2],
    float: lambda value: [value * 3 + 0.25, value / 2],
    str: lambda value: ["gelu", "other"],
    type(None): lambda value: [True, 1, 3, 0.5],
    list: lambda value: [value[::-1], value[:1]],
    dict: lambda value: [],
}


def hub_style(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as published before transformers 5: theta at the top level, scaling with `type` or null."""
    rope = dict(config["rope_parameters"])
    outer = {name: value for name, value in config.items() if name != "rope_parameters"}
    outer["rope_theta"] = rope.pop("rope_theta")
    return outer | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


def variants(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each field with the config in which it is missing or has another value, fields of RoPE included."""
    for name, value in config.items():
        if name in ("model_type", "transformers_version", "architectures"):
            continue
        yield name, {key: other for key, other in config.items() if key != name}
        for other in OTHER_VALUES[type(value)](value):
            yield name, config | {name: other}
    for outer in ("rope_parameters", "rope_scaling"):
        for name, value in (config.get(outer) or {}).items():
            for other in [None] if name == "rope_type" else OTHER_VALUES[type(value)](value):
                changed = copy.deepcopy(config)
                changed[outer][name] = other
                yield name, changed


def outcome(name: str, config: dict[str, Any], removed: bool) -> str:
    """Returns `rejected`, `unusable` (for transformers itself) or `equal`. Raises where the outputs differ."""
    adapter_class = get_model_spec(config["model_type"]).state_dict_adapter_class
    try:
        adapter_class(config)
    except ConfigError as error:
        field = adapter_class.model_class.args_class.hf_fields.get(name)
        names = (name, field.native if field else name, "layer_types")  # which counts the layers
        if not any(other in str(error) for other in names):
            raise AssertionError(f"rejected without its name: {error}") from error
        return "rejected"
    if removed and name in CLASS_SIZES:
        raise AssertionError(f"{name} is missing and was not rejected")
    try:
        reference_config = HF_CLASSES[config["model_type"]][0](**config)
        reference, model, _ = build_pair(reference_config, seed=SEED)
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(f"{name}: transformers builds other parameters: {error}") from error
    except Exception:  # noqa: BLE001 - whatever transformers' own checks raise
        return "unusable"
    ours = get_model_spec(config["model_type"]).model_class(adapter_class(config).args)
    ours.load_state_dict(model.state_dict())
    tokens, positions, cu_seqlens, longest = pack(LENGTHS, reference_config.vocab_size, SEED)
    with torch.no_grad():
        try:
            expected = reference_logits(reference, tokens, LENGTHS)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return "unusable"
        assert relative(ours(tokens, positions, cu_seqlens, longest), expected) <= PARITY_FP32, name
    return "equal"


@pytest.mark.parametrize("style", ["transformers 5", "hub"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_counts_as_in_transformers_or_is_rejected(family: str, style: str) -> None:
    config = random_config(SEED, family).to_dict()
    config = config if style == "transformers 5" else hub_style(config)
    wrong, outcomes = [], []
    for name, changed in variants(config):
        try:
            outcomes.append(outcome(name, changed, removed=name not in changed))
        except AssertionError as error:
            wrong.append(f"{name} = {changed.get(name, 'missing')!r}: {error}")
    assert wrong == []
    assert outcomes.count("equal") >= 20 and outcomes.count("rejected") >= 10, "the variants say little"
