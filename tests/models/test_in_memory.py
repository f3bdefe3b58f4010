"""Models of transformers in memory, whose names differ from their checkpoints' where experts are stacked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import archon
from archon.models import get_model_spec
from archon.models.spec import FAMILIES
from archon.schema.errors import CheckpointError, ConfigError
from archon.tools.check.oracle import (
    build_pair,
    family_config,
    has_reference,
    hf_model,
    pack,
    random_config,
    reference_logits,
    relative_error,
)
from archon.tools.check.parity import FP32_TOLERANCE

SEED = 3


@pytest.mark.parametrize("family", [*filter(has_reference, FAMILIES)])
def test_a_model_in_memory_is_the_model_of_its_checkpoint(family: str) -> None:
    config = random_config(SEED, family)
    reference, ours, _ = build_pair(config)
    loaded = archon.load_model(reference, text_only=True)
    assert loaded.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    lengths = [7, 1, 12]
    tokens, positions, cu_seqlens, longest = pack(lengths, ours.args.vocab_size, SEED)
    with torch.no_grad():
        expected = reference_logits(reference, tokens, lengths)
        assert relative_error(loaded(tokens, positions, cu_seqlens, longest), expected) <= FP32_TOLERANCE


@pytest.mark.parametrize("family", [*filter(has_reference, FAMILIES)])
def test_parameters_become_the_state_of_a_model_in_memory(family: str) -> None:
    reference, ours, adapter = build_pair(random_config(SEED + 1, family))
    state = adapter.in_memory.to_hf({name: ours.state_dict()[name] for name in adapter.stored_shapes})
    theirs = {
        name: tensor for name, tensor in reference.state_dict().items() if not adapter.in_memory.is_passthrough(name)
    }
    assert theirs.keys() - state.keys() <= {"lm_head.weight"}
    for name, tensor in state.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_dtype_is_that_of_the_weights_or_the_one_asked_for() -> None:
    reference = hf_model(random_config(SEED, "qwen3_moe")).to(torch.bfloat16)
    assert {p.dtype for p in archon.load_model(reference).parameters()} == {torch.bfloat16}
    wide = archon.load_model(reference, dtype=torch.float64)
    stacked = reference.state_dict()["model.layers.1.mlp.experts.gate_up_proj"].double()
    gate, up = (wide.get_parameter(f"layers.1.moe.experts.{name}") for name in ("w1", "w3"))
    assert torch.equal(torch.cat([gate, up], 1), stacked)


def test_a_missing_or_unknown_name_is_an_error() -> None:
    config = random_config(SEED, "qwen3_moe")
    state = hf_model(config).state_dict()
    adapter = get_model_spec("qwen3_moe").state_dict_adapter_class(family_config(config))
    key = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError, match=f"keys missing: '{key}'"):
        adapter.from_hf({name: tensor for name, tensor in state.items() if name != key})
    with pytest.raises(CheckpointError, match=r"unknown key 'model.layers.1.mlp.experts.gate_up_proj_bias'"):
        adapter.from_hf(state | {f"{key}_bias": torch.ones(1)})
    with pytest.raises(CheckpointError, match=rf"'{key}' has shape"):
        adapter.from_hf(state | {key: state[key].mT})


def test_what_is_no_model_of_transformers_is_refused() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="expected a transformers config or a dictionary, got NoneType"):
        archon.load_model(module)
    module.config = {}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="Linear has no config with a model_type"):
        archon.load_model(module)
