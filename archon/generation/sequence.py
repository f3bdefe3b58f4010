"""State of one request: the tokens sampled for it so far, and when its answer ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from archon.generation.detokenizer import Detokenizer
from archon.generation.expert_record import ExpertRecord
from archon.generation.images import PromptImages
from archon.generation.lora import ServedLoRA
from archon.generation.sampler import LogitChanges
from archon.generation.types import ModelRequest, ModelResponse, StopReason, TopLogprobs
from archon.schema.errors import RolloutError


@dataclass(eq=False)
class SharedPrompt:
    """A prompt of several sequences: its pages, and the hidden state that the first answer token is sampled from."""

    leader: Sequence | None = None  # the sequence that computes the prompt
    users: int = 0  # sequences with this prompt, waiting or running
    followers: list[Sequence] = field(default_factory=list)  # admitted, waiting for the leader
    pages: list[int] = field(default_factory=list)  # with a reference of this entry, once computed
    state: int = -1  # slot of the state after its last token, in models that have one, once computed
    last_hidden: Any = None  # [dim] hidden state of the prompt's last token, once computed
    experts: ExpertRecord | None = None  # of its tokens, where they are recorded


@dataclass(eq=False)
class Sequence:
    """A request, the tokens sampled for it so far, and the pages that hold their keys and values."""

    request: ModelRequest
    limit: int  # maximum tokens of the answer
    seed: int  # of the request's random stream
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    on_done: Callable[[Sequence], None]
    lora: ServedLoRA | None = None
    images: PromptImages | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # of each token, if the request asks for them
    stop_reason: StopReason | None = None
    error: BaseException | None = None

    slot: int = -1  # row of the scheduler's tables, −1 while waiting
    pages: list[int] = field(default_factory=list)
    state: int = -1  # slot of its state in layers that have one, −1 while waiting
    computed: int = 0  # tokens with cached keys and values
    unread: int = 0  # sampled tokens after `output` that are still on the device, see `DecodeStep`
    shared: SharedPrompt | None = None  # the prompt this sequence may share with others
    waits_for_prompt: bool = False  # another sequence is computing it
    # (step, row of that step's hidden states, token) of the newest token; equal only where all tokens are equal.
    drawn: tuple[int, int, int] | None = None
    experts: ExpertRecord | None = None  # of its tokens, where they are recorded

    prompt_key: tuple[ServedLoRA | None, tuple[int | str, ...]] = field(init=False)  # of prompts that are the same
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    ended: float | None = None

    def __post_init__(self) -> None:
        self.prompt = self.request.input_ids
        # Keys and values depend on images and LoRA; a later LoRA of the same name is another object.
        self.prompt_key = (self.lora, tuple(self.prompt))
        if self.images is not None:
            self.prompt_key = (self.lora, (*self.prompt, *self.images.key))
        self.total = len(self.prompt)  # tokens so far, prompt and answer
        self.max_cached = self.total + self.limit - 1  # the last token of the longest answer is never cached
        g = self.request.gconfig
        self.min_new_tokens = g.min_new_tokens
        self.n_top_logprobs = g.top_logprobs
        self.constraint = self.request.constraint
        changes_logits = g.changes_logits or self.constraint is not None
        self.changes = LogitChanges(g, self.prompt, self.output, self.constraint) if changes_logits else None
        self.sampling = (g.temperature, g.greedy, g.top_p, g.top_k or 0, self.seed)  # as in SamplingParams

    @property
    def is_leader(self) -> bool:
        """Whether this sequence is computing a prompt that others may share."""
        return self.shared is not None and self.shared.leader is self

    @property
    def ends_unread(self) -> bool:
        """Whether an unread token is the last one that `limit` allows."""
        return self.unread > 0 and len(self.output) + self.unread >= self.limit

    def record(self, start: int, experts: Any) -> None:
        """Record the experts [n, L, k] of tokens from `start` on, which were computed for the next token."""
        assert self.experts is not None
        self.experts.add(start, experts, kept=self.total - 1 if self.output else 0)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return tokens start … stop − 1 of prompt and answer."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.output[max(start - split, 0) : stop - split]

    def append(self, token: int, logprob: float, version: int, top_logprobs: TopLogprobs | None = None) -> None:
        """Append a sampled token, and set `stop_reason` if it is the last.

        If the constraint rejects the token, it is dropped and the request fails with `error`.
        """
        if self.constraint is not None:
            try:
                self.constraint.accept(token)
            except RolloutError as error:
                self.stop_reason, self.error = "abort", error
                return
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.total += 1
        self.output.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if top_logprobs is not None:
            self.top_logprobs.append(top_logprobs)
        if self.request.on_token is not None:
            self.request.on_token(token, logprob, *(() if top_logprobs is None else (top_logprobs,)))
        stopped = self.stop_strings is not None and self.stop_strings.feed(token)
        if (stopped or token in self.stop_ids) and len(self.output) > self.request.gconfig.min_new_tokens:
            self.stop_reason = "stop"
        elif len(self.output) >= self.limit:
            self.stop_reason = "length"

    def response(self) -> ModelResponse:
        """Return the answer. Raises the error of a request that failed."""
        if self.error is not None:
            raise self.error
        assert self.stop_reason is not None
        now = self.ended or time.perf_counter()
        return ModelResponse(
            input_tokens=list(self.prompt),
            output_tokens=self.output,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            output_top_logprobs=self.top_logprobs,
            stop_reason=self.stop_reason,
            latency=now - self.submitted,
            ttft=(self.first_token or now) - self.submitted,
            lora=self.request.lora,
            routed_experts=None if self.experts is None or not self.experts.length else self.experts.first(self.total),
            images=self.images.images if self.images else (),
        )


class StopStrings:
    """Searches an answer's growing text, which includes special tokens, for the strings `stops`."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self._text = Detokenizer(tokenizer, skip_special_tokens=False)
        self._stops = stops
        self._tail = ""  # end of the complete text, one character shorter than the longest stop string
        self._keep = max(map(len, stops)) - 1

    def feed(self, token: int) -> bool:
        """Add a token. Returns whether the text now contains a stop string."""
        seen = self._tail + self._text.feed(token)
        self._tail = seen[-self._keep :] if self._keep else ""
        seen += self._text.pending()
        return any(stop in seen for stop in self._stops)
