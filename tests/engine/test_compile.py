"""Each kind of block is compiled once, for all layers and batches."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.attention.meta import AttentionMeta
from archon.models.attention.packed.fa4 import FlashAttention4
from archon.models.attention.registry import available_backends
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.layers.attention import AttentionLayer
from archon.parallel.compile import apply_compile
from archon.parallel.torch_private import compile_without_duck_shapes
from archon.schema.config import EngineConfig
from tests.cuda_traced.models import family_config
from tests.engine.test_shared_prefixes import answers
from tests.engine.tiny import sft_batch
from tests.models.test_fa4 import package as package

BATCHES = ((13, 5, 1, 21, 8), (7, 7, 7, 30), (100,), (2, 2))
WINDOWS = ["sliding_attention", "full_attention"]
# The family, changes of its config, and the graphs of one block of each kind. Delta nets and Mamba-2 are interrupted by
# their scan.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": ("llama", {}, 1),
    "windows": ("gemma3_text", {"layer_types": WINDOWS * 2}, 2),
    "experts": ("qwen3_moe", {"mlp_only_layers": []}, 1),
    "experts and dense blocks": ("qwen3_moe", {"mlp_only_layers": [0, 2]}, 2),
    "experts, sinks and windows": ("gpt_oss", {"layer_types": WINDOWS * 2}, 2),
    "latent attention and experts": ("deepseek_v3", {}, 1),
    "delta nets": ("qwen3_5_text", {"full_attention_interval": 4}, 5),
    "Mamba-2": (
        "granitemoehybrid",
        {"layer_types": ["mamba", "mamba", "mamba", "attention"], "num_local_experts": 0},
        5,
    ),
    "mixers and networks alone": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "moe_latent_size": None},
        7,
    ),
}

FAST = ("dense", "experts, sinks and windows")


def compiled_engine(folder: Path, hf: dict[str, Any], **config: Any) -> ArchonEngine:
    """A compiled engine in bfloat16 with float32 masters, as on a GPU, and a backend that counts graphs."""
    torch._dynamo.reset()
    counters.clear()
    available_backends.cache_clear()
    (folder / "config.json").write_text(json.dumps(hf))
    common = {
        "device": "cpu",
        "dtype": "bfloat16",
        "compile": True,
        "init_from_scratch": True,
        "max_tokens_per_mb": 256,
    }
    with mock.patch("archon.parallel.decoder.apply_compile", partial(apply_compile, backend="eager")):
        engine = ArchonEngine(EngineConfig.parse({"path": str(folder)} | common | config))
        engine.initialize(9)
    return engine


@pytest.mark.parametrize(
    ("backend", "family", "changes", "graphs"),
    [pytest.param("sdpa", *MODELS["dense"], id="dense-sdpa")]
    + [
        pytest.param("fa4", *model, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, model in MODELS.items()
    ],
)
def test_a_kind_of_block_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, family: str, changes: dict[str, Any], graphs: int
) -> None:
    monkeypatch.setattr(FlashAttention4, "unsupported_reason", lambda *_: None)
    hf = family_config(family, vocab_size=104) | {"num_hidden_layers": 4} | changes
    engine = compiled_engine(tmp_path, hf, attn_type=backend)
    compiled = []
    for lengths in BATCHES:
        engine.train_batch(sft_batch(lengths), CrossEntropyLoss(), loss_token_count)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [graphs] * len(BATCHES)


class CachedAttention(AttentionMeta):
    """Attention that finds the cache of a layer in code that is not compiled."""

    def __init__(self) -> None:
        self.layers: list[LayerIndex] = []

    def attend(self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return attend_uncompiled(self.layers, layer, q)


@torch.compiler.disable
def attend_uncompiled(seen: list[LayerIndex], layer: LayerIndex, q: Tensor) -> Tensor:
    seen.append(layer)
    return q.clone()


def test_the_index_of_a_layer_is_not_compiled_in() -> None:
    torch._dynamo.reset()
    counters.clear()
    attention, compiled = CachedAttention(), []
    for layer in range(5):
        module = AttentionLayer(4, 2, 8).build(layer, 32)
        compile_without_duck_shapes(module, "eager")
        module(torch.randn(layer + 3, 32), None, attention)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [compiled[0]] * 5
    assert attention.layers == [LayerIndex(layer) for layer in range(5)]


@pytest.mark.slow
def test_layers_with_shared_prefixes_are_compiled_once(tmp_path: Path) -> None:
    """Attention is not compiled: it interrupts the block and its mixer."""
    engine = compiled_engine(tmp_path, family_config("llama", vocab_size=104) | {"num_hidden_layers": 4})
    compiled = []
    for prompts, per_prompt in ((4, 5), (3, 6)):
        metrics = engine.train_batch(answers(prompts, per_prompt), CrossEntropyLoss(), loss_token_count)
        assert metrics["tokens_computed"] < 0.8 * metrics["tokens"]
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [4, 4]
