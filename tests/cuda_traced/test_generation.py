"""The generator on the device: prompts in chunks, decoding from pages, shared prompts, states, adapters and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.models.spec import FAMILIES
from tests.cuda_traced.launches import count_decode
from tests.cuda_traced.models import build, family_config
from tests.cuda_traced.stand_ins import one_gpu
from tests.cuda_traced.trace import CudaTrace, cuda_trace, require_on_cuda
from tests.lora.random_lora import random_lora

pytestmark = pytest.mark.cuda_traced

SAMPLED = "archon.generation.sampler._sample_torch"
NEW = 3
REQUESTS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([5, 6, 7], {"greedy": True}),
    ([*range(30)], {"temperature": 0.7, "top_k": 5}),
    ([*range(9)], {"temperature": 1.3, "top_p": 0.9, "min_new_tokens": 2, "stop_token_ids": [3, 7]}),
    ([*range(9)], {}),
)
"""A prompt of two chunks, and one of two answers."""


def generate(config: dict[str, Any], attn_type: str = "auto", **options: Any) -> tuple[InProcessEngine, CudaTrace]:
    """Answer requests of every kind of sampling with few pages, so that prompts come in chunks and answers share."""
    with one_gpu(), cuda_trace() as trace:
        model = build(config, attn_type).requires_grad_(False)
        engine = InProcessEngine.from_model(
            model, max_slots=8, page_size=8, n_pages=40, prefill_tokens=16, eos_token_ids=(), **options
        )
        require_on_cuda([[group.keys, group.values] for group in engine._generator.cache.groups])
        trace.waits.clear()
        requests = [
            ModelRequest(list(prompt), GenerationHyperparameters(max_new_tokens=NEW, **settings))
            for prompt, settings in REQUESTS
        ]
        answers = engine.generate(requests)
        assert [len(answer.output_tokens) for answer in answers] == [NEW] * len(requests)
        require_on_cuda([[group.keys, group.values] for group in engine._generator.cache.groups])
        require_on_cuda(list(engine._generator.cache.states.layers.values()))
    return engine, trace


@pytest.mark.parametrize("family", FAMILIES)
def test_answers(traced: Callable[..., None], family: str) -> None:
    traced(family, "auto", "generator: prompts in chunks, decoding")
    engine, trace = generate(family_config(family))
    assert engine.stats.decode_tokens and engine.stats.shared_prompts
    # Only the first token of an answer makes the host wait; the decode step is a graph.
    assert set(trace.waits) == {SAMPLED} and trace.waits[SAMPLED] <= 2
    decode_step = engine._generator._decode_step
    assert decode_step is not None and decode_step.captures
    assert sum(graph.replays for graph in decode_step._graphs.values()) >= NEW - 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_answers_with_loras(traced: Callable[..., None], family: str) -> None:
    """One graph serves every mix of LoRAs, until loading one moves the others."""
    traced(family, "auto", "generator: several LoRAs in a decode step")
    with one_gpu(), cuda_trace() as trace:
        model = build(family_config(family), "auto").requires_grad_(False)
        loras = {name: random_lora(model, seed, rank=4 * seed + 4) for seed, name in enumerate("abc")}
        engine = InProcessEngine.from_model(model, max_slots=8, page_size=8, n_pages=40, eos_token_ids=())
        step = engine._generator._decode_step
        assert step is not None

        def answer(*names: str | None) -> dict[Any, Any]:
            trace.waits.clear()
            requests = [
                ModelRequest([5, 6, 7 + n], GenerationHyperparameters(max_new_tokens=NEW), lora=name)
                for n, name in enumerate(names)
            ]
            assert [len(answer.output_tokens) for answer in engine.generate(requests)] == [NEW] * len(names)
            assert trace.waits[SAMPLED] == 1
            return dict(step._graphs)

        plain = answer(None, None)
        for name in "ab":
            engine.load_lora(name, loras[name])
        graphs = answer("a", None)
        assert len(graphs) == 2 and plain.items() <= graphs.items()
        engine.update_lora("b", loras["b"])
        assert answer("b", "a") == graphs
        engine.load_lora("c", loras["c"])
        moved = answer("c", "a")
        assert plain.items() <= moved.items() and moved.keys() == graphs.keys() and moved != graphs


LAUNCHES = {
    "qwen3": (13, 45),
    "qwen3_moe": (42, 89),
    "gpt_oss": (62, 92),
    "deepseek_v3": (66, 134),
    "qwen3_next": (78.5, 141.5),
}
"""Kernels of a block in a decode step, without and with LoRAs of all matrices, the mean over its kinds of blocks.

Before the step, a block of Qwen3 had 104.
"""


@pytest.mark.parametrize("loras", [0, 3])
@pytest.mark.parametrize("family", LAUNCHES)
def test_kernels_of_a_block(family: str, loras: int) -> None:
    assert count_decode(family, loras) <= LAUNCHES[family][loras > 0]
