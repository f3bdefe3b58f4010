"""Teachers of on-policy distillation: another checkpoint in this process, or a model behind an OpenAI endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from archon.checkpoint.hf_io import load_tokenizer
from archon.engine.engine import ArchonEngine
from archon.remote.clients import require_package
from archon.rl.config import RLConfig, TeacherServerConfig
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError, RolloutError

Documents = dict[str, Tensor]


def open_teacher(
    teacher: EngineConfig | TeacherServerConfig, config: RLConfig, tokenizer: Any
) -> Callable[[Documents], Tensor]:
    """Return a function from padded documents to the teacher's logprobs of their trained tokens, [B, S].

    They are computed at the rollout's temperature. Raises `ConfigError` for a checkpoint with other tokens than
    `tokenizer`, the actor's.
    """
    if isinstance(teacher, TeacherServerConfig):
        return TeacherServer(teacher)
    if load_tokenizer(teacher.path).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"teacher.path {teacher.path}: its tokenizer has other tokens than the actor's, so that it cannot judge "
            "the actor's answers; choose a teacher with the same vocabulary"
        )
    engine, temperature = ArchonEngine(teacher), config.gconfig.temperature
    engine.initialize()
    return lambda documents: engine.forward_batch(documents, temperature, only_trained=True)


class TeacherServer:
    """Asks a server for the logprobs of whole documents, as prompts of tokens, at temperature 1.

    The environment variable OPENAI_API_KEY is its key, where it asks for one.
    """

    def __init__(self, config: TeacherServerConfig) -> None:
        openai = require_package("openai")
        self._config = config
        self._client = openai.OpenAI(base_url=config.url, **_key())

    def __call__(self, documents: Documents) -> Tensor:
        if any(documents.get("images", ())):
            raise RolloutError(f"teacher.url {self._config.url}: only tokens are sent to servers, not images")
        rows = zip(documents["input_ids"], documents["attention_mask"], strict=True)
        prompts = [ids[attended.bool()].tolist() for ids, attended in rows]
        with ThreadPoolExecutor(self._config.max_concurrent) as pool:
            scored = list(pool.map(self._score, prompts))
        logprobs = torch.zeros(documents["input_ids"].shape, dtype=torch.float64)
        for row, attended in enumerate(documents["attention_mask"].bool()):
            logprobs[row, attended] = torch.tensor(scored[row], dtype=torch.float64)
        return logprobs.where(documents["loss_mask"] > 0, 0.0)

    def _score(self, prompt: list[int]) -> list[float]:
        """Return the logprob of each token; 0 for the first, which nothing predicts."""
        url = self._config.url
        try:
            completion = self._client.completions.create(
                model=self._config.model, prompt=prompt, max_tokens=0, echo=True, logprobs=0, temperature=1.0
            )
        except require_package("openai").OpenAIError as error:
            raise RolloutError(f"teacher.url {url}: {error}") from None
        found = completion.choices[0].logprobs
        logprobs = [] if found is None else list(found.token_logprobs or [])[: len(prompt)]
        if len(logprobs) != len(prompt) or None in logprobs[1:]:
            raise RolloutError(
                f"teacher.url {url}: a prompt of {len(prompt)} tokens came back with {len(logprobs)} logprobs; "
                "expected one for each, as a server that supports `echo` returns them"
            )
        return [0.0, *logprobs[1:]]


def _key() -> dict[str, str]:
    """Return the key argument of the client, which insists on one."""
    return {} if os.environ.get("OPENAI_API_KEY") else {"api_key": "none"}
