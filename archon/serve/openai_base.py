"""Shared parts of OpenAI's chat completions and completions: sampling fields, usage, choices, chunk streams."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from archon.generation.types import TopLogprobs
from archon.serve import protocol
from archon.serve.answer_text import AnswerFormat, Delta
from archon.serve.prompts import Prompts
from archon.serve.request_limits import MAX_LOGPROBS, RequestLimitError
from archon.serve.sessions import Caller, ModelChoice
from archon.serve.token_bytes import TokenBytes

MAX_CHOICES = 128

FinishReason = Literal["stop", "length", "tool_calls"]
LogitBias = dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]


class StreamOptions(protocol.RequestModel):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="without effect")


class OpenAISampling(protocol.Body, protocol.OpenAIHints):
    """Sampling fields of chat completions and completions, with vLLM's additions."""

    n: protocol.Integer | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: protocol.Positive | None = None
    stop: protocol.StopString | list[protocol.StopString] | None = None
    seed: protocol.Integer | None = Field(None, ge=-1, lt=2**63, description="-1: another answer every time")
    min_tokens: protocol.Integer | None = Field(None, ge=0)
    stop_token_ids: list[protocol.TokenId] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="return the tokens of prompt and answer as well")
    return_tokens_as_token_ids: bool | None = Field(None, description="name tokens of logprobs by their ids")
    logit_bias: LogitBias | None = Field(None, max_length=1024, description="token ids as text")


class Usage(protocol.ResponseModel):
    """Token counts."""

    prompt_tokens: protocol.Count
    completion_tokens: protocol.Count
    total_tokens: protocol.Count


class CompletionsHandler(protocol.ProtocolHandler):
    """Base of both completion endpoints: streams of chunks that end with `[DONE]`."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(
        self,
        body: Any,
        caller: Caller,
        tokenizer: Any,
        model: ModelChoice,
        format: AnswerFormat,
        prompts: Prompts,
    ) -> None:
        super().__init__(body, caller, tokenizer, model, format, prompts)
        logprobs = self.gconfig.max_new_tokens * self.gconfig.n_samples * len(self.prompts)
        logprobs *= 1 + self.gconfig.top_logprobs
        if self.gconfig.top_logprobs and not body.stream and logprobs > MAX_LOGPROBS:
            raise RequestLimitError(
                f"the answers may have {logprobs:,} logprobs; expected at most {MAX_LOGPROBS:,}: lower n, max_tokens "
                "or the number of likely tokens, or stream the answers"
            )
        self._logprobs = body.logprobs is not None and body.logprobs is not False  # a completion's 0 asks for them
        self._token_bytes = TokenBytes(tokenizer, body.return_tokens_as_token_ids is True) if self._logprobs else None
        self._created = int(time.time())

    def _envelope(self, name: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        return protocol.sse(self._envelope(self.chunk_name, list(choices), **more))

    def _usage(self, choices: Sequence[protocol.Choice]) -> dict[str, int]:
        """Return the numbers of tokens; each prompt counts once."""
        read, sampled = self.count_tokens(choices)
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}

    def _prompt(self) -> dict[str, Any]:
        """Return the prompt's fields in a response and in the first chunks."""
        return {}

    def response(self, choices: list[protocol.Choice]) -> dict[str, Any]:
        """Return the response of finished answers."""
        written = [
            self._add_tokens(
                {"index": choice.index, **self._content(choice), "finish_reason": choice.finish_reason},
                choice.response.output_tokens,
                choice.response.output_logprobs,
                choice.response.output_top_logprobs,
            )
            for choice in choices
        ]
        return self._envelope(self.object_name, written, usage=self._usage(choices), **self._prompt())

    def _add_tokens(
        self,
        choice: dict[str, Any],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[TopLogprobs],
    ) -> dict[str, Any]:
        """Return a choice with its tokens and their logprobs, if the client asked for them."""
        choice["logprobs"] = None
        if self._token_bytes is not None:
            choice["logprobs"] = self._format_logprobs(
                self._token_bytes, choice["index"], tokens, logprobs, top_logprobs
            )
        if self.body.return_token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    def on_end(self, choices: list[protocol.Choice]) -> Iterable[bytes]:
        """Return the last events."""
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._chunk(usage=self._usage(choices))
        yield protocol.sse("[DONE]")

    def _has_chunk(self, delta: Delta) -> bool:
        """Return whether a delta adds visible content."""
        return bool(delta.parts or (delta.tokens and (self._logprobs or self.body.return_token_ids)))

    @abstractmethod
    def _content(self, choice: protocol.Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _format_logprobs(
        self,
        token_bytes: TokenBytes,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[TopLogprobs],
    ) -> dict[str, Any]: ...
