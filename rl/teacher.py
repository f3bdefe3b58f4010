"""Teachers of on-policy distillation: an in-process checkpoint or an OpenAI endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archon.checkpoint.tokenizer import load_tokenizer
from archon.engine.engine import ArchonEngine
from archon.remote.answer_checks import Fields
from archon.remote.http import run_blocking
from archon.rl.config import RLConfig, TeacherServerConfig
from archon.rl.endpoint import Endpoint
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError, RolloutError

Documents = dict[str, Tensor]


def open_teacher(
    teacher: EngineConfig | TeacherServerConfig, config: RLConfig, tokenizer: Any
) -> Callable[[Documents], Tensor]:
    """Return a function from padded documents to the teacher's logprobs of trained tokens, [B, S].

    The logprobs are at the rollout's temperature. Raises `ConfigError` if the vocabulary differs from the actor's
    `tokenizer`.
    """
    if isinstance(teacher, TeacherServerConfig):
        return TeacherServer(teacher)
    if load_tokenizer(teacher.path).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"teacher.path {teacher.path}: its vocabulary differs from the actor's; choose a teacher with the same "
            "vocabulary"
        )
    engine, temperature = ArchonEngine(teacher), config.gconfig.temperature
    engine.initialize()
    return lambda documents: engine.forward_batch(documents, temperature, only_trained=True)


class TeacherServer:
    """Teacher server that scores whole documents as prompts, at temperature 1; see `Endpoint`."""

    def __init__(self, config: TeacherServerConfig) -> None:
        self._config = config

    def __call__(self, documents: Documents) -> Tensor:
        """Return the logprobs of trained tokens, float64 [B, S]."""
        if any(documents.get("images", ())):
            raise RolloutError(f"teacher.url {self._config.url}: a teacher server takes tokens only, got images")
        rows = zip(documents["input_ids"], documents["attention_mask"], strict=True)
        prompts = [ids[attended.bool()].tolist() for ids, attended in rows]
        scored = run_blocking(self._score_all(prompts))
        logprobs = torch.zeros(documents["input_ids"].shape, dtype=torch.float64)
        for row, attended in enumerate(documents["attention_mask"].bool()):
            logprobs[row, attended] = torch.tensor(scored[row], dtype=torch.float64)
        return logprobs.where(documents["loss_mask"] > 0, 0.0)

    async def _score_all(self, prompts: list[list[int]]) -> list[list[float]]:
        """Return the logprob of each token of each prompt."""
        endpoint = Endpoint(self._config.url, f"teacher.url {self._config.url}")
        slots = asyncio.Semaphore(self._config.max_concurrent)

        async def score(prompt: list[int]) -> list[float]:
            async with slots:
                return await self._score(endpoint, prompt)

        tasks = [asyncio.create_task(score(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await endpoint.close()

    async def _score(self, endpoint: Endpoint, prompt: list[int]) -> list[float]:
        """Return the logprob of each token, with 0 for the first."""
        completion = await endpoint.complete(
            len(prompt),
            model=self._config.model,
            prompt=prompt,
            max_tokens=0,
            echo=True,
            logprobs=0,
            temperature=1.0,
        )
        found = completion.find("choices", 0, "logprobs", "token_logprobs")
        values = [] if found is None else found.items()[: len(prompt)]
        if len(values) != len(prompt) or None in values[1:]:
            raise RolloutError(
                f"teacher.url {self._config.url}: got {len(values)} logprobs for a prompt of {len(prompt)} tokens; use "
                "a server that supports `echo`"
            )
        assert found is not None
        return [0.0, *Fields(found.url, values[1:], found.path).logprobs(len(prompt) - 1)]
