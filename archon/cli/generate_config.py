"""Configuration of `archon generate`, in a separate module because the generator's types import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from archon.generation.types import GenerationHyperparameters
from archon.schema.config import EXPANDED, ComputeDtype

_SAMPLING = {"n_samples", "temperature", "top_p", "top_k", "seed"}


class GenerateConfig(GenerationHyperparameters):
    """Prompts, sampling and model of `archon generate`."""

    greedy: bool = Field(
        True,
        description="choose the most likely token; false by default if n_samples, temperature, top_p, top_k or seed is "
        "set; temperature=0 is greedy too",
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="random stream of all answers; null: a new one each time"
    )
    prompts: list[str] = Field(default_factory=list, description="prompts to answer; also --prompt, repeatable")
    prompts_file: Annotated[Path | None, EXPANDED] = Field(None, description="one prompt per line; also --prompts-file")
    chat: bool | Literal["auto"] = Field("auto", description="use the chat template; auto: if the tokenizer has one")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as enable_thinking"
    )
    tokenizer: Annotated[str | None, EXPANDED] = Field(None, description="tokenizer folder; null: the checkpoint's")
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    dtype: ComputeDtype = Field("float32", description="dtype of the weights and the KV cache")
    max_slots: int = Field(32, ge=1, le=2**20, description="answers decoded concurrently")

    @model_validator(mode="before")
    @classmethod
    def _set_greedy(cls, data: Any) -> Any:
        """Set `greedy`, unless it is set: true for temperature 0, and false if a sampling parameter is set."""
        if not isinstance(data, dict):
            return data
        temperature = data.get("temperature")
        if type(temperature) in (int, float) and temperature == 0 and data.get("greedy", True) is True:
            return {name: value for name, value in data.items() if name != "temperature"} | {"greedy": True}
        return {"greedy": False, **data} if _SAMPLING & data.keys() else data
