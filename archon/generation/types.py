"""The interface between workflows, inference engines and the trainer: requests, responses, engine protocol.

Names follow AReaL's documented rollout interface, so that a workflow written for it needs only other imports.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import Field, model_validator

from archon.checkpoint.chat_template import stop_token_ids
from archon.models.vision.images import ProcessedImage
from archon.schema.config import MAX_SAMPLES, StrictModel
from archon.schema.errors import RolloutError

StopReason = Literal["stop", "length", "abort", "tool_calls"]
TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one place, with their logprobs."""


class GenerationHyperparameters(StrictModel):
    """How one answer is sampled. All defaults are defined here; a checkpoint's generation config is not used."""

    n_samples: int = Field(
        1, ge=1, le=MAX_SAMPLES, description="answers per prompt; a request to an engine asks for one"
    )
    max_new_tokens: int = Field(512, ge=1, description="maximum tokens of the answer")
    min_new_tokens: int = Field(0, ge=0, description="no stop id, stop string or end of text before this many tokens")
    max_tokens: int | None = Field(None, ge=2, description="maximum tokens of prompt and answer together")
    temperature: float = Field(1.0, ge=1e-3, description="divides the logits; for the most likely token set greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the smallest set of tokens with this probability")
    top_k: int | None = Field(None, ge=1, lt=2**63, description="sample from the k most likely tokens; null for all")
    min_p: float = Field(0.0, ge=0, le=1, description="sample tokens of at least this part of the highest probability")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted from logits of tokens of the answer")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted once for each occurrence in the answer")
    repetition_penalty: float = Field(
        1.0,
        ge=0.01,
        le=100,
        description="divides logits above 0, and multiplies others, of tokens in prompt or answer",
    )
    logit_bias: dict[int, float] = Field(default_factory=dict, description="added to the logits of these token ids")
    greedy: bool = Field(False, description="choose the most likely token")
    stop_token_ids: list[int] = Field(default_factory=list, description="ids that end the answer; they are kept in it")
    stop: list[str] = Field(default_factory=list, description="strings that end the answer; needs a tokenizer")
    ignore_eos: bool = Field(False, description="do not stop at the engine's end-of-text ids")
    top_logprobs: int = Field(0, ge=0, le=20, description="also return this many of the most likely tokens")
    seed: int | None = Field(None, ge=0, lt=2**63, description="random stream of the answer; null: by order of arrival")

    @model_validator(mode="before")
    @classmethod
    def _wrap_stop_string(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("stop"), str):
            return {**data, "stop": [data["stop"]]}
        return data

    @model_validator(mode="after")
    def _check_limits(self) -> GenerationHyperparameters:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}")
        if any(i < 0 for i in self.stop_token_ids):
            raise ValueError(f"stop_token_ids: got {self.stop_token_ids}, expected ids from 0 on")
        if "" in self.stop:
            raise ValueError("stop: got an empty string, expected strings of at least one character")
        return self

    @property
    def changes_logits(self) -> bool:
        """Whether `logit_bias`, a penalty or `min_p` changes the distribution, which logprobs do not include."""
        penalties = (self.min_p, self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalties) or bool(self.logit_bias)

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a validated copy with some fields changed."""
        return type(self)(**{**self.model_dump(), **changes})

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """Return a copy that also stops at the ids of `stop_token_ids(tokenizer)` and at the padding id."""
        ids = [*self.stop_token_ids, tokenizer.pad_token_id, *stop_token_ids(tokenizer)]
        return self.new(stop_token_ids=list(dict.fromkeys(token_id for token_id in ids if token_id is not None)))


class GeneratorConfig(StrictModel):
    """The in-process inference engine."""

    max_slots: int = Field(256, ge=1, le=2**20, description="answers decoded together")
    page_size: int = Field(32, ge=1, le=2**20, description="tokens in a page of the key-value cache")
    memory_gib: float | None = Field(
        None, gt=0, description="GiB of key-value cache; null: enough for max_slots, at most a quarter of free memory"
    )
    max_seq_len: int | None = Field(None, ge=2, description="tokens of prompt and answer; null: the model's limit")
    prefill_tokens: int = Field(8192, ge=1, description="prompt tokens read in one step")
    record_experts: bool = Field(
        False, description="of a mixture of experts: record the experts of each token; RL trains with the same ones"
    )


class Constraint(Protocol):
    """Stateful restriction of the tokens of one answer, for example to a grammar."""

    def allowed(self, vocab_size: int) -> np.ndarray:
        """Return a mask of the tokens that may come next, bool [vocab_size]."""

    def accept(self, token: int) -> None:
        """Append a sampled token; raise RolloutError if it is not allowed, which happens if the mask is all False."""


@dataclass
class ModelRequest:
    """One prompt and its sampling parameters.

    Attributes:
        input_ids: token ids. Other types raise RolloutError, in particular the mapping that transformers 5 returns from
            `apply_chat_template` by default.
        lora: name of the loaded LoRA; None for the base model.
        image_data: images of the prompt in the order of their placeholders; `archon.data.images.ImageReader` makes
            images and `input_ids` with one placeholder per image token.
        rid: request id for `abort`; several requests may share one.
        on_token: called with each token and its logprob when it is sampled, by engines that support it; if
            `top_logprobs` is set, also with the most likely tokens.
        sampling_checked: whether a server has already applied the trainer's sampling policy.
        constraint: restriction of the answer's tokens; only the in-process generator supports it.
    """

    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: secrets.token_hex(16))
    tokenizer: Any = None
    lora: str | None = None
    image_data: Sequence[ProcessedImage] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    on_token: Callable[..., None] | None = None
    sampling_checked: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        self.input_ids = integer_ids(self.input_ids)


def integer_ids(ids: Any) -> list[int]:
    """Return `ids` as a list of Python integers. Raises RolloutError unless it is a flat sequence of integers."""
    expected = "expected a flat list of integer token ids"
    if isinstance(ids, Mapping):
        raise RolloutError(
            f"ModelRequest.input_ids: got a {type(ids).__name__} with keys {sorted(ids)}, {expected};"
            " call apply_chat_template with return_dict=False, or pass its 'input_ids'"
        )
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise RolloutError(f"ModelRequest.input_ids: got a {type(ids).__name__}, {expected}")
    if isinstance(ids, torch.Tensor):
        raise RolloutError(
            f"ModelRequest.input_ids: got a tensor of shape {tuple(ids.shape)}, {expected}; use .tolist()"
        )
    ids = list(ids)
    if {int}.issuperset(map(type, ids)):
        return ids
    for index, item in enumerate(ids):
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise RolloutError(f"ModelRequest.input_ids[{index}]: got {item!r} ({type(item).__name__}), {expected}")
    return [int(i) for i in ids]


@dataclass
class ModelResponse:
    """One answer. `output_tokens`, `output_logprobs` and `output_versions` have one entry per generated token.

    A logprob is `log_softmax(logits / temperature)` over the full vocabulary, independent of top_p, top_k, min_p,
    penalties, logit_bias and the constraint. `output_top_logprobs` are the same of the `top_logprobs` most likely
    tokens at each place, the most likely first; empty unless they were asked for. A stop token is part of the answer.
    `latency` and `ttft` (time to first token) are in seconds since submission. `lora` and `images` are the request's.
    `routed_experts`, if the engine records them, cover the first tokens of prompt and answer, uint8 or uint16 [n, L, k]
    (see `archon.models.layers.routed_experts`); the last token was never an input and has none.
    """

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: StopReason = "stop"
    latency: float = 0.0
    ttft: float = 0.0
    lora: str | None = None
    routed_experts: np.ndarray | None = None
    images: Sequence[ProcessedImage] = ()
    output_top_logprobs: list[TopLogprobs] = field(default_factory=list)

    @property
    def input_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Number of answer tokens."""
        return len(self.output_tokens)


@runtime_checkable
class InferenceEngine(Protocol):
    """The methods that workflows and the trainer call on an inference engine."""

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""

    def get_version(self) -> int:
        """Return `version`; the name of AReaL's interface."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return the answer to a request; raise RolloutError if it can never be answered."""

    def pause(self) -> None:
        """Stop between two tokens; unfinished answers are kept."""

    def resume(self) -> None:
        """Continue after `pause`."""

    def abort(self, rid: str | None = None) -> int:
        """End the requests named `rid`, or all of them, with stop reason `abort`. Returns their number."""

    def update_weights(self, meta: Any, *, version: int | None = None) -> None:
        """Replace the weights; tokens sampled from then on have the new version."""
