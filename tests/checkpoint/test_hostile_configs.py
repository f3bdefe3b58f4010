"""Configs that claim other sizes than the weights have: one line, and no memory for the claim."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import archon
from archon.checkpoint.hf_io import load_spec
from archon.engine.engine import ArchonEngine
from archon.models.hf.config import MAX_LAYERS
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, UserError
from tests.checkpoint.tiny_checkpoints import MOE, config_with, make_checkpoint, random_weights, write_checkpoint

CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "a terabyte wide": ({"hidden_size": 2**40}, "expected .* by its config"),
    "wide": ({"hidden_size": 2**20}, "expected .* by its config"),
    "a large vocabulary": ({"vocab_size": 2**33}, r"has shape \[61, 24\], expected \[8589934592, 24\] by its config"),
    "large enough to be swapped": ({"vocab_size": 2**28}, "expected .* by its config"),
    "a large feed-forward network": ({"intermediate_size": 2**36}, "expected .* by its config"),
    "many heads": ({"num_attention_heads": 2**24, "num_key_value_heads": 2**23}, "expected .* by its config"),
    "more layers than tensors": ({"num_hidden_layers": 999, "layer_types": None}, "claims 999 layers, but the weights"),
    "too many layers": ({"num_hidden_layers": MAX_LAYERS + 1, "layer_types": None}, "expected at most 1000"),
    "no vocabulary": ({"vocab_size": 0}, "'vocab_size' is 0; expected at least 1"),
    "negative": ({"hidden_size": -1}, "'hidden_size' is -1; expected at least 1"),
    "heads that do not divide": (
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        "expected a divisor of n_heads 3",
    ),
    "integers": ({"dtype": "int8", "torch_dtype": None}, "'dtype' is 'int8'; expected float64, float32"),
    "FP8 without scales": ({"dtype": "float8_e4m3fn"}, "'dtype' is 'float8_e4m3fn'; expected float64, float32"),
    "powers of two": ({"dtype": "float8_e8m0fnu"}, "'dtype' is 'float8_e8m0fnu'; expected float64, float32"),
    "a list of dtypes": ({"dtype": ["float32"]}, r"'dtype' is \['float32'\]; expected float64, float32"),
}


@pytest.fixture
def claiming(tmp_path: Path) -> Any:
    folder, _ = make_checkpoint(tmp_path)

    def change(fields: dict[str, Any]) -> Path:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return folder

    return change


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Any:
    """Refuse address space for the claims: what is reserved counts, even if it is not touched."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_refused_before_memory_is_allocated(name: str, claiming: Any) -> None:
    fields, expected = CLAIMS[name]
    folder = claiming(fields)
    engine = ArchonEngine(EngineConfig.parse({"path": str(folder), "device": "cpu", "optimizer": None}))
    # An engine has a dtype of its own and reads the config's only to export.
    loads = [lambda: archon.load_model(folder)] + ([] if "dtype" in fields else [engine.initialize])
    start = time.process_time()
    for load in loads:
        with pytest.raises(UserError, match=expected) as error:
            load()
        assert "\n" not in str(error.value)
    assert time.process_time() - start < 5


def test_experts_are_counted_by_the_weights(tmp_path: Path) -> None:
    config = config_with(**MOE)
    folder = write_checkpoint(tmp_path, config, random_weights(config))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"moe_intermediate_size": 2**33}))
    with pytest.raises(CheckpointError, match=r"expected .* by its config"):
        archon.load_model(folder)


def test_the_work_of_layers_is_linear(claiming: Any) -> None:
    """Each layer once computed the RoPE specs of all layers: 400 layers took minutes."""
    loaded = load_spec(claiming({"num_hidden_layers": 100, "layer_types": None}))
    calls = 0
    kind = type(loaded.adapter.args)
    original = kind.layer

    def layer(self: Any, index: int) -> Any:
        nonlocal calls
        calls += 1
        return original(self, index)

    with pytest.MonkeyPatch.context() as patched, torch.device("meta"):
        patched.setattr(kind, "layer", layer)
        loaded.spec.model_class(loaded.adapter.args)
    assert calls <= 10 * 100
