"""Teachers of on-policy distillation: an in-process checkpoint or an OpenAI endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from archon.checkpoint.tokenizer import load_tokenizer
from archon.engine.engine import ArchonEngine
from archon.remote.clients import require_package
from archon.rl.config import RLConfig, TeacherServerConfig
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
    """Teacher server that scores whole documents as prompts, at temperature 1.

    The environment variable OPENAI_API_KEY holds its key.
    """

    def __init__(self, config: TeacherServerConfig) -> None:
        openai = require_package("openai")
        self._config = config
        self._client = openai.OpenAI(base_url=config.url, **_key())

    def __call__(self, documents: Documents) -> Tensor:
        """Return the logprobs of trained tokens, float64 [B, S]."""
        if any(documents.get("images", ())):
            raise RolloutError(f"teacher.url {self._config.url}: a teacher server takes tokens only, got images")
        rows = zip(documents["input_ids"], documents["attention_mask"], strict=True)
        prompts = [ids[attended.bool()].tolist() for ids, attended in rows]
        with ThreadPoolExecutor(self._config.max_concurrent) as pool:
            scored = list(pool.map(self._score, prompts))
        logprobs = torch.zeros(documents["input_ids"].shape, dtype=torch.float64)
        for row, attended in enumerate(documents["attention_mask"].bool()):
            logprobs[row, attended] = torch.tensor(scored[row], dtype=torch.float64)
        return logprobs.where(documents["loss_mask"] > 0, 0.0)

    def _score(self, prompt: list[int]) -> list[float]:
        """Return the logprob of each token, with 0 for the first."""
        url = self._config.url
        try:
            completion = self._client.completions.create(
                model=self._config.model, prompt=prompt, max_tokens=0, echo=True, logprobs=0, temperature=1.0
            )
        except require_package("openai").OpenAIError as error:
            raise RolloutError(f"teacher.url {url}: {error}") from None
        choice = completion.choices[0].logprobs
        logprobs = [] if choice is None else list(choice.token_logprobs or [])[: len(prompt)]
        if len(logprobs) != len(prompt) or None in logprobs[1:]:
            raise RolloutError(
                f"teacher.url {url}: got {len(logprobs)} logprobs for a prompt of {len(prompt)} tokens; use a server "
                "that supports `echo`"
            )
        return [0.0, *logprobs[1:]]


def _key() -> dict[str, str]:
    """Return a dummy key if there is none: the client requires one."""
    return {} if os.environ.get("OPENAI_API_KEY") else {"api_key": "none"}
