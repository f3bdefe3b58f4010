"""What crosses the boundary between workflows, the generator and the trainer: requests, responses, trajectories.

Shapes and names follow AReaL's documented rollout interface, so that a workflow moves over by changing its imports.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field, model_validator

from archon.schema.config import StrictModel
from archon.schema.errors import RolloutError

StopReason = Literal["stop", "length", "abort", "tool_calls"]


class GenerationHyperparameters(StrictModel):
    """How one answer is sampled. Every default is explicit; nothing is taken from a checkpoint's generation config."""

    n_samples: int = Field(1, ge=1, description="answers per prompt; a request to an engine asks for one")
    max_new_tokens: int = Field(512, ge=1, description="upper limit of the answer, in tokens")
    min_new_tokens: int = Field(0, ge=0, description="no stop id, stop string or end of text before this many tokens")
    max_tokens: int | None = Field(None, ge=2, description="upper limit of prompt and answer together, in tokens")
    temperature: float = Field(1.0, ge=1e-3, description="divides the logits; for the most likely token set greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="smallest set of tokens that holds this probability")
    top_k: int | None = Field(
        None, ge=1, lt=2**63, description="sample among the k most likely tokens; null for all of them"
    )
    greedy: bool = Field(False, description="take the most likely token")
    stop_token_ids: list[int] = Field(default_factory=list, description="ids that end the answer; they are kept in it")
    stop: list[str] = Field(default_factory=list, description="strings that end the answer; needs a tokenizer")
    ignore_eos: bool = Field(False, description="do not stop at the engine's end-of-text ids")
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="random stream of this answer; null: by order of arrival"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_stop_string_is_a_list_of_one(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("stop"), str):
            return {**data, "stop": [data["stop"]]}
        return data

    @model_validator(mode="after")
    def _limits_agree(self) -> GenerationHyperparameters:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}")
        if any(i < 0 for i in self.stop_token_ids):
            raise ValueError(f"stop_token_ids: got {self.stop_token_ids}, expected ids from 0 on")
        if "" in self.stop:
            raise ValueError("stop: got an empty string, expected strings of at least one character")
        return self

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A validated copy with some fields changed."""
        return type(self)(**{**self.model_dump(), **changes})

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """A copy that also stops at the tokenizer's end-of-text and padding ids."""
        ids = list(self.stop_token_ids)
        for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
        return self.new(stop_token_ids=ids)


@dataclass
class ModelRequest:
    """One prompt, and how to answer it.

    `input_ids` are token ids. Anything else is refused, in particular the mapping that transformers 5 returns from
    `apply_chat_template` by default. `rid` names the request for `abort`; several requests may share one.
    `on_token` is called with each token and its logprob as soon as it is sampled, by engines that can.
    """

    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokenizer: Any = None
    image_data: list[Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    on_token: Callable[[int, float], None] | None = None

    def __post_init__(self) -> None:
        self.input_ids = integer_ids(self.input_ids)


def integer_ids(ids: Any) -> list[int]:
    """`ids` as a list of Python integers; `RolloutError` for anything that is not a flat sequence of integers."""
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
    if all(type(i) is int for i in ids):
        return ids
    for index, item in enumerate(ids):
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise RolloutError(f"ModelRequest.input_ids[{index}]: got {item!r} ({type(item).__name__}), {expected}")
    return [int(i) for i in ids]


@dataclass
class ModelResponse:
    """One answer. `output_tokens`, `output_logprobs` and `output_versions` have one entry per generated token.

    A logprob is `log_softmax(logits / temperature)` over the full vocabulary, whatever top_p and top_k were. A stop
    token is part of the answer. `latency` and `ttft` (time to first token) are seconds since submission.
    """

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: StopReason = "stop"
    latency: float = 0.0
    ttft: float = 0.0

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


@runtime_checkable
class InferenceEngine(Protocol):
    """What a workflow and the trainer may ask of whatever generates."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    def get_version(self) -> int:
        """The same."""
        ...

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Answer one request; `RolloutError` when it can never be honoured."""
        ...

    def pause(self) -> None:
        """Stop between two tokens; unfinished answers are kept."""
        ...

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        ...

    def abort(self, rid: str | None = None) -> int:
        """End the requests named `rid`, or all of them, with stop reason `abort`; returns how many."""
        ...

    def update_weights(self, meta: Any, *, version: int | None = None) -> None:
        """Replace the weights; tokens sampled from then on carry the new version."""
        ...


# Trajectories: what a workflow returns. Per-token fields are [B, S], those of rows [B]. Rows with the same trajectory
# id are parts of one trajectory; without these each row is one.
_TOKEN_FIELDS: dict[str, torch.dtype] = {
    "input_ids": torch.int64,
    "attention_mask": torch.bool,
    "loss_mask": torch.int64,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "turn_ids": torch.int64,
}
_ROW_FIELDS: dict[str, torch.dtype] = {"rewards": torch.float32, "trajectory_ids": torch.int64}
_OPTIONAL_FIELDS = frozenset({"turn_ids", "trajectory_ids"})
_PAD_VALUES = {"versions": -1, "turn_ids": -1}


def concat_padded_tensors(trajectories: Sequence[Mapping[str, Any]], pad_value: float = 0) -> dict[str, Any]:
    """Join dictionaries of batch-first fields along the batch, padding per-token fields on the right.

    A field is per-token when its second dimension equals that of its own `attention_mask`. Padding is `pad_value`,
    but 0 (False) in `attention_mask` and −1 in `versions` and `turn_ids`. Lists (images) are joined.
    Raises `RolloutError` naming the first dictionary that lacks a key the others have.
    """
    if not trajectories:
        raise RolloutError("concat_padded_tensors: got no dictionaries, expected at least one")
    keys = list(dict.fromkeys(key for trajectory in trajectories for key in trajectory))
    for index, trajectory in enumerate(trajectories):
        for key in ["attention_mask", *keys]:
            if key not in trajectory:
                has = next((i for i, other in enumerate(trajectories) if key in other), None)
                seen = "" if has is None else f", which dictionary {has} has"
                raise RolloutError(f"concat_padded_tensors: dictionary {index} lacks key {key!r}{seen}")
    lengths = [trajectory["attention_mask"].shape[1] for trajectory in trajectories]
    joined: dict[str, Any] = {}
    for key in keys:
        values = [trajectory[key] for trajectory in trajectories]
        if all(isinstance(value, list) for value in values):
            joined[key] = [item for value in values for item in value]
            continue
        for index, value in enumerate(values):
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                raise RolloutError(
                    f"concat_padded_tensors: {key!r} of dictionary {index} is a {type(value).__name__},"
                    " expected a tensor with a batch dimension or a list"
                )
        if all(v.ndim >= 2 and v.shape[1] == length for v, length in zip(values, lengths, strict=True)):
            fill = 0 if key == "attention_mask" else _PAD_VALUES.get(key, pad_value)
            values = [_pad_right(value, max(lengths), fill) for value in values]
        shapes = [tuple(value.shape[1:]) for value in values]
        if len(set(shapes)) > 1:
            raise RolloutError(f"concat_padded_tensors: {key!r} has shapes {shapes} after the batch dimension")
        joined[key] = torch.cat(values)
    return joined


def _pad_right(value: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    missing = length - value.shape[1]
    if missing == 0:
        return value
    padding = value.new_full((value.shape[0], missing, *value.shape[2:]), fill)
    return torch.cat([value, padding], dim=1)


def validate_trajectory(trajectory: Mapping[str, Any], source: str = "trajectory") -> dict[str, Any]:
    """Check a workflow's result and return it with the documented dtypes; other keys pass through unchanged.

    `source` opens the message. Raises `RolloutError` naming the key and its shape when a key is missing, a shape
    differs from that of `input_ids` [B, S] (or [B] for `rewards` and `trajectory_ids`), a number is not finite where
    it is used, a mask holds anything but 0 and 1, or a token is trained that is not attended to.
    """
    if not isinstance(trajectory, Mapping):
        raise RolloutError(f"{source}: got a {type(trajectory).__name__}, expected a dictionary of tensors")
    checked = dict(trajectory)
    fields = _TOKEN_FIELDS | _ROW_FIELDS
    for key in fields:
        if key not in trajectory:
            if key in _OPTIONAL_FIELDS:
                continue
            raise RolloutError(f"{source} lacks key {key!r}; it has {sorted(map(str, trajectory))}")
        if not isinstance(trajectory[key], torch.Tensor):
            raise RolloutError(f"{source}: {key!r} is a {type(trajectory[key]).__name__}, expected a tensor")
    shape = tuple(trajectory["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        raise RolloutError(f"{source}: 'input_ids' has shape {shape}, expected [B, S] with both at least 1")
    for key, dtype in fields.items():
        if key not in trajectory:
            continue
        value = trajectory[key]
        expected = shape[:1] if key in _ROW_FIELDS else shape
        if tuple(value.shape) != expected:
            raise RolloutError(
                f"{source}: {key!r} has shape {tuple(value.shape)}, expected {expected} as input_ids is {shape}"
            )
        if not dtype.is_floating_point and value.is_floating_point():
            raise RolloutError(f"{source}: {key!r} of shape {expected} is {value.dtype}, expected integers")
        if key.endswith("_mask") and value.dtype != torch.bool and not bool(((value == 0) | (value == 1)).all()):
            raise RolloutError(f"{source}: {key!r} of shape {expected} holds values other than 0 and 1")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            where = tuple((~value.isfinite()).nonzero()[0].tolist())
            raise RolloutError(f"{source}: {key!r} of shape {expected} is {value[where].item()} at {where}")
        # A float64 run keeps float64 numbers.
        checked[key] = value.to(torch.promote_types(value.dtype, dtype) if dtype.is_floating_point else dtype)
    if bool((checked["loss_mask"].bool() & ~checked["attention_mask"]).any()):
        raise RolloutError(f"{source}: 'loss_mask' of shape {shape} is 1 where 'attention_mask' is 0")
    return checked
