"""Configuration of `archon serve`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from archon.schema.config import EXPANDED, MAX_SECONDS, ComputeDtype, StrictModel


class ServeConfig(StrictModel):
    """Model and limits of the server."""

    model_name: str | None = Field(None, description="model name for clients; null: the checkpoint folder's")
    tokenizer: Annotated[str | None, EXPANDED] = Field(
        None, description="tokenizer folder; null: the single --lora folder if it has a tokenizer, else the checkpoint"
    )
    tool_call_parser: str | None = Field(
        None,
        description="tool-call format: hermes | qwen3_coder | llama3_json | glm45 | deepseek_v3 | mistral | lfm2 | "
        "harmony; null: from the chat template",
    )
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    dtype: ComputeDtype = Field("float32", description="dtype of the weights and the KV cache")
    max_slots: int = Field(32, ge=1, le=2**20, description="answers decoded concurrently")
    max_tokens: int | None = Field(None, ge=2, description="maximum prompt plus answer tokens; null: the model's limit")
    max_new_tokens: int = Field(1024, ge=1, description="default length limit of an answer, in tokens")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of requests without one")
    max_loras: int = Field(64, ge=1, le=2**16, description="maximum LoRAs in memory")
    max_body_bytes: int = Field(8 << 20, ge=1, description="maximum size of a request body")
    max_sessions: int = Field(1024, ge=1, description="maximum open sessions")
    max_calls_per_session: int = Field(1000, ge=1, description="maximum answers recorded per session")
    max_requests: int = Field(256, ge=1, description="maximum concurrent requests; further ones get status 429")
    session_idle_seconds: float = Field(
        3600.0, gt=0, le=MAX_SECONDS, description="idle seconds before a session closes"
    )
    request_seconds: float = Field(
        60.0, gt=0, le=MAX_SECONDS, description="timeout for the headers of a request, and again for its body"
    )
