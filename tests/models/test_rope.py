"""Rotary frequencies are transformers' own, bit by bit, for each document's own length."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from archon.models.layers.rope import RotaryEmbedding
from archon.models.qwen3 import Qwen3ModelArgs
from archon.tools.check.oracle import build_pair, pack, random_config
from archon.tools.check.random_configs import ROPE_KINDS

SEEDS = range(51)


def build(config: Any) -> RotaryEmbedding:
    (spec,) = Qwen3ModelArgs.from_hf_config(config).ropes
    return RotaryEmbedding(spec)


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_cos_and_sin_equal_transformers_bitwise_at_any_position(kind: str) -> None:
    configs = [random_config(seed, "qwen3") for seed in SEEDS]
    chosen = [config for config in configs if config.rope_parameters["rope_type"] == kind]
    assert len(chosen) >= 8
    rng = random.Random(0)
    for config in chosen:
        rope = build(config)
        for length in (1, 7, 16, 17, 33, 64, 65, rng.randrange(66, 40_000)):
            positions = torch.arange(length)
            cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
            ours = rope(positions, torch.float32, torch.full((length,), length))
            half = config.head_dim // 2
            assert torch.equal(ours[0].squeeze(1), cos[0, :, :half])
            assert torch.equal(ours[1].squeeze(1), sin[0, :, :half])


@pytest.mark.parametrize("fields", [{}, {"partial_rotary_factor": 0.4}, {"partial_rotary_factor": 0.0, "factor": 2.0}])
def test_proportional_frequencies_equal_transformers_bitwise(fields: dict[str, float]) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1000.0, **fields}
    config = random_config(1, "qwen3", rope_parameters=rope)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(50).unsqueeze(0))
    ours, half = build(config)(torch.arange(50), torch.float32), config.head_dim // 2
    assert torch.equal(ours.cos.squeeze(1), cos[0, :, :half])
    assert torch.equal(ours.sin.squeeze(1), sin[0, :, :half])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_each_packed_document_is_scaled_by_its_own_length(kind: str) -> None:
    config = random_config(1, "qwen3", rope_kind=kind)
    rope, lengths = build(config), (5, 100, 16, 65, 100, 300)
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = rope(positions, torch.float32, torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths)))
    alone = [rope(torch.arange(length), torch.float32, torch.full((length,), length)) for length in lengths]
    for ours, parts in zip(packed[:2], zip(*(rotation[:2] for rotation in alone), strict=True), strict=True):
        assert torch.equal(ours, torch.cat(parts))
    assert not torch.equal(alone[0][0], alone[5][0][:5]), "the lengths are meant to matter"


def test_frequencies_survive_a_change_of_dtype_of_the_model() -> None:
    rope = build(random_config(1, "qwen3"))
    before = rope(torch.arange(50), torch.float32)
    after = rope.to(torch.bfloat16).to_empty(device="cpu")(torch.arange(50), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_bf16_compute_gets_float32_angles_rounded_once(kind: str) -> None:
    """In bfloat16 the positions beyond 256 are not even whole numbers."""
    rope = build(random_config(1, "qwen3", rope_kind=kind))
    positions, lengths = torch.arange(5000), torch.full((5000,), 5000)
    narrow, wide = rope(positions, torch.bfloat16, lengths), rope(positions, torch.float32, lengths)
    for ours, exact in zip(narrow[:2], wide[:2], strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, exact.to(torch.bfloat16))


def test_a_float64_model_gets_float64_angles() -> None:
    rope = build(random_config(1, "qwen3"))
    cos, sin, _ = rope(torch.arange(1000), torch.float64)
    assert cos.dtype == torch.float64
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos), rtol=0, atol=1e-15)


class Operators(TorchDispatchMode):
    """Counts the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_tables_are_made_once_a_forward_and_shared_by_all_layers(family: str) -> None:
    config = random_config(1, family)
    _, model, _ = build_pair(config)
    tables: list[tuple[int, ...]] = []
    for block in model.layers.values():
        block.register_forward_pre_hook(
            lambda _block, args: tables.append((args[1].cos.data_ptr(), args[1].sin.data_ptr()))
        )
    operators = Operators()
    with operators:
        model(*pack([9, 4, 6], config.vocab_size, 1)).sum().backward()
    assert (operators.counts["cos"], operators.counts["sin"]) == (1, 1)
    assert len(tables) == config.num_hidden_layers > 1 and len(set(tables)) == 1


def test_length_dependent_kinds_say_so() -> None:
    for seed in SEEDS[:12]:
        config = random_config(seed, "qwen3")
        kind = config.rope_parameters["rope_type"]
        assert build(config).config.depends_on_length == (kind in ("dynamic", "longrope"))
