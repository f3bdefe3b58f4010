"""Completions that begin with their prompt, whose logprobs come with it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.models.base import BaseArchonModel
from tests.serve.scripted import Start
from tests.tolerances import FORMULA_FP32

PROMPT = "12+30="


def logits_of(model: BaseArchonModel, tokens: list[int]) -> torch.Tensor:
    n = len(tokens)
    with torch.no_grad():
        found: Any = model(torch.tensor(tokens), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echoed_logprobs_are_those_of_whole_logits(
    serve: Start, model: BaseArchonModel, tokenizer: Any, max_tokens: int, temperature: float
) -> None:
    _, url = await serve()
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "m", "prompt": PROMPT, "echo": True, "temperature": temperature, "seed": 3}
        answer = await client.completions.create(**ask, max_tokens=max_tokens, logprobs=1, n=2)
    prompt = tokenizer.encode(PROMPT)
    for choice in answer.choices:
        found = choice.logprobs
        assert found is not None and found.tokens is not None and found.token_logprobs is not None
        tokens = [tokenizer.convert_tokens_to_ids(token) for token in found.tokens]
        assert tokens[: len(prompt)] == prompt and len(tokens) <= len(prompt) + max_tokens
        assert choice.text == tokenizer.decode(tokens, skip_special_tokens=True) and choice.text.startswith(PROMPT)
        log_p = (logits_of(model, tokens)[:-1] / temperature).log_softmax(-1)
        expected = log_p.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
        assert found.token_logprobs[0] is None
        torch.testing.assert_close(torch.tensor(found.token_logprobs[1:]), expected, rtol=FORMULA_FP32, atol=1e-5)
        best = log_p.max(-1)
        assert found.top_logprobs is not None and found.top_logprobs[0] is None
        for place, top in enumerate(found.top_logprobs[1:]):
            assert top is not None and top[found.tokens[place + 1]] == found.token_logprobs[place + 1]
            assert max(top, key=lambda token: top[token]) == tokenizer.decode([int(best.indices[place])])
        assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(len(tokens))]
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(c.logprobs.tokens) - len(prompt) for c in answer.choices)  # type: ignore[union-attr,arg-type]


async def test_several_prompts_are_each_scored_and_logprobs_can_be_left_out(serve: Start, tokenizer: Any) -> None:
    _, url = await serve()
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        prompts = [tokenizer.encode(text) for text in ("1+1=", "2+2=4")]
        both = await client.completions.create(model="m", prompt=prompts, echo=True, max_tokens=0, logprobs=0)
        bare = await client.completions.create(model="m", prompt="1+1=", echo=True, max_tokens=0)
    assert [choice.text for choice in both.choices] == ["1+1=", "2+2=4"]
    assert [len(choice.logprobs.token_logprobs) for choice in both.choices] == [4, 5]  # type: ignore[union-attr,arg-type]
    assert all(choice.logprobs is not None and choice.logprobs.top_logprobs is None for choice in both.choices)
    assert both.choices[0].finish_reason == "length" and bare.choices[0].logprobs is None


async def test_what_cannot_be_echoed_is_refused(
    serve: Start, client: httpx.AsyncClient, engine: InProcessEngine
) -> None:
    server, url = await serve()
    for body, told in (
        ({"prompt": "1", "echo": True, "stream": True}, "echo is not streamed"),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens: got 0, which needs echo"),
        ({"prompt": "1", "echo": True, "logprobs": 2}, "logprobs: got 2; with echo at most 1"),
        ({"prompt": [], "echo": True, "max_tokens": 0}, "the prompt is empty"),
        ({"prompt": [5] * 2000, "echo": True, "max_tokens": 0}, "longer than the 1024 that the model reads"),
        ({"prompt": [10**6], "echo": True, "max_tokens": 0}, "token id 1000000 is not below the vocabulary size"),
    ):
        answer = await client.post(f"{url}/completions", json=body)
        assert answer.status_code == 400 and told in answer.json()["error"]["message"], answer.text

    class Sampling:
        """What a training session's generator offers."""

        version = 0

        async def agenerate(self, request: ModelRequest) -> Any:
            return await engine.agenerate(request)

    session = server.sessions.open(Sampling(), GenerationHyperparameters(max_new_tokens=2))  # type: ignore[arg-type]
    headers = {"Authorization": f"Bearer {session.key}"}
    answer = await client.post(f"{url}/completions", json={"prompt": "1", "echo": True}, headers=headers)
    assert answer.status_code == 400 and "are sampled only" in answer.json()["error"]["message"]
