"""OpenAI's completions: text or tokens in, text or tokens out, and prompt logprobs with `echo`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from archon.generation.prompt_scores import PromptScores
from archon.generation.types import GenerationHyperparameters, ModelResponse, TopLogprobs
from archon.schema.errors import RolloutError
from archon.serve import protocol
from archon.serve.answer_text import AnswerFormat, Delta
from archon.serve.openai_base import MAX_CHOICES, CompletionsHandler, FinishReason, OpenAISampling, Usage
from archon.serve.prompts import PromptReader, Prompts
from archon.serve.request_limits import MAX_VALUES, RequestLimitError
from archon.serve.sessions import Caller, ModelChoice
from archon.serve.token_bytes import TokenBytes

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(OpenAISampling):
    """`POST /v1/completions`."""

    prompt: (
        str
        | protocol.TokenIds
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[protocol.TokenIds], Field(fail_fast=True)]
    ) = Field(description="text, tokens, or a list of these")
    max_tokens: protocol.Integer | None = Field(None, ge=0, description="by default 16; 0, with echo: no answer")
    logprobs: protocol.Integer | None = Field(
        None, ge=0, le=20, description="logprobs of the tokens, and of this many of the most likely ones at each place"
    )
    echo: bool | None = Field(None, description="prepend the prompt to the answer, with its logprobs")
    add_special_tokens: bool | None = Field(None, description="false: a text prompt starts without special tokens")
    suffix: Literal[""] | None = None
    prompt_embeds: protocol.Unsupported = None

    @model_validator(mode="after")
    def _check_supported(self) -> CompletionBody:
        if self.echo and self.stream:
            raise ValueError("echo is not streamed; leave out stream or echo")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: got 0, which needs echo; ask for at least one token")
        if self.echo and (self.logprobs or 0) > 1:
            raise ValueError(f"logprobs: got {self.logprobs}; with echo at most 1, the most likely token, is returned")
        return self

    def gconfig(self, base: GenerationHyperparameters) -> GenerationHyperparameters:
        """Return the sampling values as `Body.gconfig` does; without an answer its length does not matter."""
        body = self if self.max_tokens else self.model_copy(update={"max_tokens": DEFAULT_MAX_TOKENS})
        top_logprobs = 0 if self.echo else self.logprobs or 0  # echoed answers are scored again with their prompt
        return super(CompletionBody, body).gconfig(base).new(top_logprobs=top_logprobs)

    def prompts(self, reader: PromptReader) -> Prompts:
        """Return the prompts in tokens; text prompts start with the tokenizer's special tokens."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or not any(isinstance(item, str | list) for item in prompt):
            prompt = [prompt]
        answers = len(prompt) * (self.n or 1)
        if answers > MAX_CHOICES:
            raise RolloutError(
                f"{len(prompt)} prompts with n = {self.n or 1} are {answers} answers; one request may ask for "
                f"{MAX_CHOICES}"
            )

        def encode(text: str) -> list[int]:
            if self.add_special_tokens is False:
                return reader.tokenize(text, "prompt")
            return reader.encode_prompt(text, "prompt")

        tokens: list[list[int]] = []
        for item in prompt:
            tokens.append(encode(item) if isinstance(item, str) else item)
            if sum(map(len, tokens)) > MAX_VALUES:
                raise RequestLimitError(
                    f"the first {len(tokens)} of {len(prompt)} prompts have {sum(map(len, tokens)):,} tokens; expected "
                    f"at most {MAX_VALUES:,} in one request"
                )
        return Prompts(tokens)


class CompletionLogprobs(protocol.ResponseModel):
    """The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[protocol.Count]


class CompletionChoice(protocol.ResponseModel):
    """One answer."""

    index: protocol.Count
    finish_reason: FinishReason
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[protocol.Count] | None = protocol.optional()
    prompt_token_ids: list[protocol.Count] | None = protocol.optional()


class Completion(protocol.ResponseModel):
    """With `return_token_ids` each choice has `token_ids` and `prompt_token_ids`, as from vLLM."""

    id: str
    object: Literal["text_completion"]
    created: protocol.Count
    model: str
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: Usage


class CompletionApi(CompletionsHandler):
    """`POST /v1/completions`; choice i answers prompt i // n."""

    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        caller: Caller,
        tokenizer: Any,
        model: ModelChoice,
        format: AnswerFormat,
        prompts: Prompts,
    ) -> None:
        super().__init__(body, caller, tokenizer, model, format, prompts)
        self._offsets: Counter[int] = Counter()  # characters of each choice so far, special tokens included
        self._echoed: dict[int, PromptScores] = {}  # of prompt and answer

    async def generate(self) -> AsyncGenerator[Delta | protocol.Choice, None]:
        """Yield deltas and finished answers."""
        if self.body.max_tokens == 0:
            n = self.gconfig.n_samples
            for index in range(n * len(self.prompts)):
                response = ModelResponse(self.prompts[index // n], stop_reason="length")
                yield await self._echo(protocol.Choice(index, [], None, response))
            return
        async with aclosing(super().generate()) as items:
            async for item in items:
                if self.body.echo and isinstance(item, protocol.Choice):
                    item = await self._echo(item)
                yield item

    async def _echo(self, choice: protocol.Choice) -> protocol.Choice:
        """Return the choice with prompt and answer scored at the answer's temperature."""
        score: Callable[..., Awaitable[PromptScores]] | None
        score = getattr(self._caller.engine, "ascore_prompt", None)
        if score is None:
            raise RolloutError("echo: answers of a session that is trained are sampled only; leave echo out")
        tokens = choice.response.input_tokens + choice.response.output_tokens
        lora = {} if self._lora is None else {"lora": self._lora}
        self._echoed[choice.index] = await score(tokens, self.gconfig.temperature, **lora)
        return choice

    def _content(self, choice: protocol.Choice) -> dict[str, Any]:
        prompt = {"prompt_token_ids": choice.response.input_tokens} if self.body.return_token_ids else {}
        text = choice.text
        if self.body.echo:
            text = str(self._tokenizer.decode(choice.response.input_tokens, skip_special_tokens=True)) + text
        return {"text": text, **prompt}

    def _format_logprobs(
        self,
        token_bytes: TokenBytes,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[TopLogprobs],
    ) -> dict[str, Any]:
        token_logprobs, tops = list[float | None](logprobs), list[TopLogprobs | None](top_logprobs)
        if index in self._echoed:
            scores, tokens = self._echoed[index], [*self.prompts[index // self.gconfig.n_samples], *tokens]
            token_logprobs = [None, *scores.logprobs][: len(tokens)]
            if self.body.logprobs:
                best = zip(scores.top_tokens, scores.top_logprob_values, strict=True)
                tops = [None, *([pair] for pair in best)][: len(tokens)]
        sampled = zip(tokens, token_logprobs, strict=True)
        named = [
            None if top is None else {token_bytes.name(token): value for token, value in [*top, pair]}
            for pair, top in zip(sampled, tops, strict=False)
        ]
        lengths = (len(str(self._tokenizer.decode([token]))) for token in tokens)
        *offsets, self._offsets[index] = accumulate(lengths, initial=self._offsets[index])
        return {
            "tokens": list(map(token_bytes.name, tokens)),
            "token_logprobs": token_logprobs,
            "top_logprobs": named or None,
            "text_offset": offsets,
        }

    def on_delta(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of a delta."""
        if self._has_chunk(delta):
            text = "".join(part for part in delta.parts if isinstance(part, str))
            choice = {"index": delta.index, "text": text, "finish_reason": None}
            yield self._chunk(self._add_tokens(choice, delta.tokens, delta.logprobs, delta.top_logprobs))

    def on_choice(self, choice: protocol.Choice) -> Iterable[bytes]:
        """Return the events of a finished answer."""
        end = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}
        yield self._chunk(end)
