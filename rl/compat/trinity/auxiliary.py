"""Auxiliary models of Trinity-style workflows: untrained judges, called by the OpenAI SDK or as a `ModelWrapper`."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from archon.generation.types import GenerationHyperparameters
from archon.rl.compat.trinity.model import ModelWrapper, openai_client
from archon.rl.workflows.agent import SharedServer
from archon.schema.config import ComputeDtype, StrictModel
from archon.schema.errors import RolloutError

if TYPE_CHECKING:
    from archon.generation import InProcessEngine
    from archon.serve.server import AgentServer


class AuxiliaryConfig(StrictModel):
    """Auxiliary model: a checkpoint that this process serves on loopback, or an OpenAI endpoint."""

    model_path: str | None = Field(None, description="checkpoint to serve; with base_url, the endpoint's model name")
    base_url: str | None = Field(None, description="OpenAI endpoint ending in /v1; null: serve model_path")
    api_key: str = Field("EMPTY", description="key of the endpoint")
    api_key_env: str | None = Field(None, description="environment variable with the key")
    name: str | None = Field(None, description="model name for clients; null: model_path")
    temperature: float = Field(1.0, ge=1e-3, description="default of requests to a served checkpoint")
    top_p: float = Field(1.0, gt=0, le=1, description="default of requests to a served checkpoint")
    top_k: int | None = Field(None, description="default of requests; -1: all tokens")
    max_response_tokens: int = Field(512, ge=1, description="length limit of an answer, in tokens")
    max_model_len: int | None = Field(None, ge=2, description="limit of prompt plus answer; null: the model's limit")
    enable_thinking: bool | None = Field(None, description="the chat template's switch; null leaves it to the template")
    trust_remote_code: Literal[False] = Field(False, description="archon never runs code of a checkpoint")
    dtype: ComputeDtype = Field("bfloat16", description="dtype of the served weights")
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    max_slots: int = Field(32, ge=1, description="number of answers decoded concurrently")
    seed: int = Field(0, ge=0, lt=2**63, description="default seed of requests")

    @model_validator(mode="after")
    def _check_model(self) -> AuxiliaryConfig:
        if self.model_path is None and self.base_url is None:
            raise ValueError("name a checkpoint (model_path) or an OpenAI endpoint (base_url)")
        if self.base_url is not None and not (self.name or self.model_path):
            raise ValueError("base_url needs the model's name on that endpoint: set name or model_path")
        return self

    @property
    def display_name(self) -> str:
        """Model name for clients."""
        return self.name or self.model_path or ""

    @property
    def sampling(self) -> GenerationHyperparameters:
        """Default sampling parameters of requests."""
        top_k = self.top_k if self.top_k and self.top_k > 0 else None
        return GenerationHyperparameters(
            temperature=self.temperature, top_p=self.top_p, top_k=top_k, max_new_tokens=self.max_response_tokens
        )


class _ModelServing(SharedServer):
    """Server of a checkpoint that is loaded once and served while runs need it."""

    def __init__(self, config: AuxiliaryConfig) -> None:
        self.config = config
        self.key = secrets.token_urlsafe()
        self.engine, tokenizer = _load(config)
        super().__init__(tokenizer)
        self.tokenizer = tokenizer

    async def _start(self) -> tuple[AgentServer, str]:
        from archon.serve.server import AgentServer

        server = AgentServer(
            self.tokenizer, self.engine, self.config.sampling, model=self.config.display_name, token=self.key
        )
        return server, await server.start()


class AuxiliaryModel(ModelWrapper):
    """Auxiliary model of one run at a time; a served checkpoint also has `chat`, `generate` and `logprobs`.

    Args:
        config: the model.
        serving: server of the checkpoint; None for an external endpoint.
    """

    def __init__(self, config: AuxiliaryConfig, serving: _ModelServing | None) -> None:
        super().__init__(None if serving is None else serving.tokenizer)
        self.config, self.model_path = config, config.display_name
        self._serving = serving

    def connect(self, base_url: str, run: int) -> None:
        """Open the model for run `run` of the current episode at the endpoint `base_url`."""
        self._base_url = base_url
        for client in self._clients:  # a reused workflow keeps its clients
            client.base_url = base_url
        if self._serving is not None:
            self.open(self._serving.engine, self.config.sampling, run)

    def _require_open(self) -> None:
        if self._serving is None:
            raise RolloutError(
                f"the auxiliary model {self.model_path} is an external endpoint; call it by get_openai_client()"
            )
        super()._require_open()

    def close(self) -> None:
        """End the run."""
        if self._serving is not None:
            super().close()

    def _client(self, kind: str) -> Any:
        config = self.config
        key = os.environ.get(config.api_key_env or "", config.api_key) if self._serving is None else self._serving.key
        client = openai_client(kind, self._base_url, key, self.model_path, max_retries=2)
        self._clients.append(client)
        return client


class AuxiliaryModels:
    """Auxiliary models of a training run; the first use loads their checkpoints."""

    def __init__(self, configs: Sequence[AuxiliaryConfig]) -> None:
        self._configs = configs
        self._servings: list[_ModelServing | None] | None = None

    def models(self) -> list[AuxiliaryModel]:
        """Return new, unconnected auxiliary models for a workflow."""
        return [AuxiliaryModel(*pair) for pair in zip(self._configs, self._loaded(), strict=True)]

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[list[str]]:
        """Serve the models inside the block and yield their base URLs."""
        async with AsyncExitStack() as stack:
            urls: list[str] = []
            for config, serving in zip(self._configs, self._loaded(), strict=True):
                if serving is None:
                    urls.append(config.base_url or "")
                else:
                    urls.append((await stack.enter_async_context(serving.lease()))[1])
            yield urls

    def _loaded(self) -> list[_ModelServing | None]:
        if self._servings is None:
            self._servings = [None if config.base_url else _ModelServing(config) for config in self._configs]
        return self._servings


def with_thinking(tokenizer: Any, enabled: bool | None) -> Any:
    """Return a tokenizer with `enable_thinking` fixed in its chat template; None changes nothing."""
    template = getattr(tokenizer, "chat_template", None)
    if enabled is None or not isinstance(template, str):
        return tokenizer
    changed = copy.copy(tokenizer)
    changed.chat_template = f"{{%- set enable_thinking = {str(enabled).lower()} -%}}{template}"
    return changed


def _load(config: AuxiliaryConfig) -> tuple[InProcessEngine, Any]:
    """Load the checkpoint and return its generator and tokenizer."""
    import torch

    from archon.checkpoint.hf_io import load_model
    from archon.checkpoint.tokenizer import load_tokenizer
    from archon.engine.build import resolve_device
    from archon.generation import InProcessEngine

    assert config.model_path is not None
    tokenizer = with_thinking(load_tokenizer(config.model_path), config.enable_thinking)
    device = str(resolve_device(config.device))
    model = load_model(config.model_path, device=device, dtype=getattr(torch, config.dtype))
    engine = InProcessEngine.from_model(
        model, tokenizer, max_slots=config.max_slots, max_seq_len=config.max_model_len, seed=config.seed
    )
    return engine, tokenizer
