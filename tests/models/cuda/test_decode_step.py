"""The decode step with its CUDA kernels, from prompts to answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archon.models.attention.decode.static import StaticPagedAttention
from archon.models.cpu import fused
from archon.models.layers import moe
from tests.generation.models import make_engine, make_model, prompts, request
from tests.models.cuda.conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("tests/gpu runs the generator on a GPU", allow_module_level=True)

# float32 sums in another order, in every layer.
LOGPROB = 2e-5


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"sliding_window": 6}, marks=pytest.mark.slow),
        ("deepseek_v3", {}),
        pytest.param("qwen3_next", {}, marks=pytest.mark.slow),
    ],
)
def test_answers_equal_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]) -> None:
    model = make_model(family=family, **options)
    requests = [request(prompt, seed=seed, max_new_tokens=5) for seed, prompt in enumerate(prompts(1, 3, 7, 12, 12))]
    expected = make_engine(model).generate(requests)
    kernels = StaticPagedAttention._attend_by_kernels
    monkeypatch.setattr(StaticPagedAttention, "_attend_on_cpu", kernels)
    monkeypatch.setattr(fused, "_has_cuda_kernel", lambda *_, **__: not torch.is_grad_enabled())
    monkeypatch.setattr(moe, "_has_kernels", lambda _: True)
    for answer, reference in zip(make_engine(model, static_decode=True).generate(requests), expected, strict=True):
        assert answer.output_tokens == reference.output_tokens
        logprobs, wanted = torch.tensor(answer.output_logprobs), torch.tensor(reference.output_logprobs)
        torch.testing.assert_close(logprobs, wanted, rtol=0, atol=LOGPROB)
