"""Shared parts of the protocols: field types, sampling fields, prompts, tools, and generation."""

from __future__ import annotations

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Required

from fastapi.sse import format_sse_event
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict

from archon.checkpoint.chat_template import has_chat_template, render_calls, unknown_variable
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, ModelRequest, ModelResponse, TopLogprobs
from archon.schema.config import StrictModel
from archon.schema.errors import ConfigError, RolloutError
from archon.serve.answer_text import THINK, AnswerFormat, AnswerParser, Delta
from archon.serve.call_syntax import ToolCall, load_json
from archon.serve.constraints import AnswerGrammar, GrammarConstraint, choice_grammar, json_grammar, regex_grammar
from archon.serve.images import pop_image_sources
from archon.serve.prompts import PromptReader, Prompts
from archon.serve.sessions import Caller, ModelChoice
from archon.serve.tool_calls import CHANNEL, FORMATS, HARMONY, MESSAGE, Part, Reasoning, template_text, tool_schemas

# Names of `GenerationHyperparameters` for the protocols' fields; other sampling fields have the same name in both.
ENGINE_NAMES = {
    "n": "n_samples",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_sequences": "stop",
}


def _float_to_int(value: Any) -> Any:
    """Return 1 for 1.0: the two are one number in JSON, and some clients write the latter."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Thinking = bool | Effort
"""Whether, or how much, a model is to think."""

Integer = Annotated[int, BeforeValidator(_float_to_int)]
Positive = Annotated[Integer, Field(ge=1)]
# The engine checks the limits in these two schemas; its errors are clearer.
TokenId = Annotated[Integer, WithJsonSchema({"type": "integer", "minimum": 0})]
# An error for each of many invalid items would take seconds; the first says enough.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]
Count = Annotated[int, Field(ge=0)]


def optional(**constraints: Any) -> Any:
    """Declares a field of a response that is left out if it is None."""
    return Field(None, exclude_if=lambda value: value is None, **constraints)


class ResponseModel(BaseModel):
    """A JSON object that the server sends. JSON has no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class RequestModel(StrictModel):
    """A JSON object that a client sends, without type coercion: "5" is not a number, and 5 is not a string."""

    model_config = ConfigDict(strict=True)


def only(value: float) -> Any:
    """Declares a field that may have one value."""
    return Field(None, ge=value, le=value)


def _refuse(value: Any) -> None:
    if value is not None:
        raise ValueError("this server does not support the field; leave it out")


Unsupported = Annotated[None, BeforeValidator(_refuse)]
"""A field that must be absent or null."""


class NeutralFields(RequestModel):
    """Fields of OpenAI, vLLM and SGLang that are not supported, with the values that change nothing.

    Clients send these values by default. Any other value is an error that names the field.
    """

    best_of: Integer | None = only(1)
    use_beam_search: Literal[False] | None = None
    early_stopping: Literal[False] | None = None
    length_penalty: float | None = only(1)
    typical_p: float | None = only(1)
    priority: Integer | None = only(0)
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="without effect")
    no_stop_trim: Literal[False] | None = None
    return_hidden_states: Literal[False] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    include_reasoning: Literal[True] | None = None
    safe_prompt: Literal[False] | None = None
    request_id: str | None = Field(None, description="without effect")
    cache_salt: str | None = Field(None, description="without effect")
    extra_body: dict[str, Any] | None = Field(None, max_length=0)
    bad_words: list[str] | None = Field(None, max_length=0)
    allowed_token_ids: Unsupported = None
    logits_processors: Unsupported = None
    prompt_logprobs: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    guided_grammar: Unsupported = None
    json_schema: Unsupported = None
    regex: Unsupported = None
    ebnf: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    kv_transfer_params: Unsupported = None
    vllm_xargs: Unsupported = None
    lora_path: Unsupported = None


# Typed dictionaries, because fields `json` and `schema` would hide methods of a pydantic model.
_STRICT = ConfigDict(extra="forbid", strict=True)
Choices = Annotated[list[StopString], Field(min_length=1)]


class StructuredOutputs(TypedDict, total=False):
    """vLLM's constraint of the answer's text."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    json: dict[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    choice: Choices | None


class JsonSchema(TypedDict, total=False):
    """A JSON schema of the answer's text."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    name: str | None
    description: str | None
    schema: dict[str, Any] | None
    strict: bool | None  # without effect: the answer always matches


class TextFormat(JsonSchema, total=False):
    """The format of the answer's text; the type `json_schema` needs a schema."""

    type: Required[Literal["text", "json_object", "json_schema"]]


class Body(NeutralFields):
    """Fields of every protocol. A field that could change the answer but is not supported is an error."""

    model: str = Field("", description="a name from /v1/models; any name if the server has a single model")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0 is the most likely token")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, lt=2**63, description="0 or -1: all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    metadata: dict[str, Any] | None = Field(None, description="without effect")
    service_tier: str | None = Field(None, description="without effect")
    structured_outputs: StructuredOutputs | None = Field(None, description="constrains the answer's text, as in vLLM")
    guided_json: dict[str, Any] | str | None = Field(None, description="structured_outputs.json")
    guided_regex: str | None = Field(None, description="structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="structured_outputs.choice")

    def text_format(self) -> TextFormat | None:
        """Return the format of the answer's text in the protocol's own field, if it has one."""
        return None

    def text_grammar(self) -> str | None:
        """Return the grammar of the answer's text, or None for any text.

        Raises:
            RolloutError: a constraint is invalid, or there are several.
        """
        options = self.structured_outputs or {}
        schemas = [self.guided_json, options.get("json"), {"type": "object"} if options.get("json_object") else None]
        text = self.text_format()
        if text is not None and text["type"] == "json_object":
            schemas.append({"type": "object"})
        elif text is not None and text["type"] == "json_schema":
            if text.get("schema") is None:
                raise RolloutError("the answer's format json_schema has no schema; send one, or use json_object")
            schemas.append(text["schema"])
        grammars = [json_grammar(schema) for schema in schemas if schema is not None]
        patterns, choices = (self.guided_regex, options.get("regex")), (self.guided_choice, options.get("choice"))
        grammars += [regex_grammar(pattern) for pattern in patterns if pattern is not None]
        grammars += [choice_grammar(texts) for texts in choices if texts is not None]
        if len(grammars) > 1:
            raise RolloutError(f"the request constrains its answer in {len(grammars)} ways; send one constraint")
        return grammars[0] if grammars else None

    def gconfig(self, base: GenerationHyperparameters) -> GenerationHyperparameters:
        """Return `base` with the values of this body.

        Raises:
            ConfigError: a value is out of range.
        """
        names = {ENGINE_NAMES.get(name, name): value for name, value in self if value is not None}
        fields = {name: value for name, value in names.items() if name in GenerationHyperparameters.model_fields}
        if "logit_bias" in fields:
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        if fields.get("seed") == -1:
            del fields["seed"]
        if "top_k" in fields:
            fields["top_k"] = fields["top_k"] if fields["top_k"] > 0 else None
        if "temperature" in fields:
            fields["greedy"] = fields["temperature"] == 0
            if fields["greedy"]:
                del fields["temperature"]
        if "stop_token_ids" in fields:  # in addition to the end-of-turn tokens
            fields["stop_token_ids"] = [*base.stop_token_ids, *fields["stop_token_ids"]]
        return GenerationHyperparameters.parse({**base.model_dump(), "n_samples": 1, **fields}, source="request")


class OpenAIHints(RequestModel):
    """Fields of OpenAI's protocols that do not affect sampling."""

    user: str | None = Field(None, description="without effect")
    safety_identifier: str | None = Field(None, description="without effect")
    store: bool | None = Field(None, description="without effect: nothing is stored")
    parallel_tool_calls: bool | None = Field(None, description="false: calls after the first are left out")
    prompt_cache_key: str | None = Field(None, description="without effect")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="without effect")
    prompt_cache_retention: str | None = Field(None, description="without effect")

    def single_call(self) -> bool:
        """Return whether calls after the first are left out."""
        return self.parallel_tool_calls is False


class Conversation(RequestModel):
    """A body with a prompt for the model's chat template."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the model's chat template, for example enable_thinking, as in vLLM"
    )

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them."""
        raise NotImplementedError

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call, as chat templates expect them."""
        raise NotImplementedError

    def forced_tool(self) -> str | bool:
        """Return the name of the forced tool; True if any call is forced."""
        return False

    def single_call(self) -> bool:
        """Return whether calls after the first are left out."""
        return False

    def called_tools(self) -> list[dict[str, Any]]:
        """Return the tools that a forced call may use; empty if no call is forced.

        Raises:
            RolloutError: the forced tool is not among the tools of the request.
        """
        forced, tools = self.forced_tool(), self.template_tools()
        called = [tool for tool in tools if forced in (True, tool["function"]["name"])]
        if forced and not called:
            names = ", ".join(repr(tool["function"]["name"]) for tool in tools) or "none"
            what = "any tool" if forced is True else f"{forced!r:.80}"
            raise RolloutError(f"tool_choice forces a call of {what}, but the tools of the request are: {names}")
        return called

    def thinking_mode(self) -> Thinking | None:
        """Return whether, or how much, the model is to think; None leaves it to the template."""
        return None

    def render_options(self) -> dict[str, bool]:
        """Return how the prompt ends: by default with the start of a new answer."""
        return {"add_generation_prompt": True}

    def template_options(self, tokenizer: Any) -> dict[str, Any]:
        """Return the variables that the request sets; raises `RolloutError` for one that the template does not use."""
        template = template_text(tokenizer)
        options = dict(self.chat_template_kwargs or {})
        if (name := unknown_variable(template, options)) is not None:
            raise RolloutError(f"chat_template_kwargs: the model's chat template has no variable {name!r:.80}")
        thinking = self.thinking_mode()
        if thinking is None:
            return options
        if "reasoning_effort" in template and isinstance(thinking, str):
            return {"reasoning_effort": thinking} | options
        if "enable_thinking" in template:
            return {"enable_thinking": thinking not in (False, "none")} | options
        if thinking in (False, "none") and THINK[1] not in template:
            return options  # the model never thinks
        raise RolloutError("the model's chat template cannot switch thinking, or set how much; leave it to the model")

    def prompts(self, reader: PromptReader) -> Prompts:
        """Return the conversation with the generation prompt, in tokens, and its images.

        Raises:
            RolloutError: there is no template, it ignores tools or images, or it lacks a variable that is set.
            DatasetError: the template rejects the conversation.
            ImageError: an image cannot be used.
            ContextOverflowError: the conversation cannot fit the context.
        """
        tokenizer, image_reader = reader.tokenizer, reader.image_reader
        if not has_chat_template(tokenizer):
            raise RolloutError("the model's tokenizer has no chat template; send the whole prompt to /v1/completions")
        messages, tools = self.template_messages(), self.template_tools()
        images = reader.read_images(pop_image_sources(messages))
        options = {**self.render_options(), **self.template_options(tokenizer)}
        text = render_calls(tokenizer, messages, "messages", **options)
        if tools:
            without, text = text, render_calls(tokenizer, messages, "messages", **options, tools=tools)
            if text == without:
                raise RolloutError("the model's chat template does not support tools; remove them")
        tokens = reader.tokenize(text, "messages")
        return Prompts([tokens if image_reader is None else image_reader.expand(tokens, images)], images)


class TextPart(RequestModel):
    """A text content part. Clients that send back an earlier response include the optional fields; they are ignored."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    citations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


def content_text(content: str | Sequence[TextPart] | None) -> str:
    """Return a content as one string; None is an empty one."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class FunctionSpec(RequestModel):
    """A tool, as its caller describes it."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="no effect: forced calls always match the schema, and other calls are as sampled"
    )

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function = self.model_dump(exclude_none=True, include={"name", "description", "parameters"})
        return {"type": "function", "function": function}


def template_call(call_id: str, name: str, arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call of an earlier turn for a chat template; `RolloutError` unless `arguments` is an object."""
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments or "{}")
        except ValueError as error:
            raise RolloutError(f"{where}: the arguments of {name!r:.80} are not JSON ({error})") from None
        if not isinstance(arguments, dict):
            raise RolloutError(f"{where}: the arguments of {name!r:.80} are not a JSON object")
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


@dataclass
class Choice:
    """A finished answer: its text and tool calls, and the engine's response."""

    index: int
    parts: list[Part]
    stop_sequence: str | None
    response: ModelResponse

    @property
    def text(self) -> str:
        """Visible text of the answer."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        """Tool calls of the answer."""
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def reasoning(self) -> str:
        """Thinking of the answer."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def finish_reason(self) -> str:
        """Returns `stop`, `length` or `tool_calls`: the engine's reason, unless the answer calls tools.

        The engine matches stop strings in text with special tokens, and so may miss one in the client's text.
        """
        reason = "stop" if self.stop_sequence is not None else self.response.stop_reason
        return "tool_calls" if self.calls and reason == "stop" else reason


class ProtocolHandler(ABC):
    """Handler of one request of a protocol: parses its body, samples, and formats a response or a stream of events.

    A stream consists of the results of `on_start`, `on_delta` (more of an answer), `on_choice` (an answer is finished)
    and `on_end` (all are finished), or `on_error` if it fails.

    Args:
        body: request body, a `Conversation` or one with a method `prompts`.
        caller: provides default sampling values.
        tokenizer: renders prompts.
        model: generator, and the model name for the response.
        format: answer format of the model.
        prompts: prompts of the body, from its method `prompts`.

    Raises:
        UserError: the body cannot be answered.
    """

    id_prefix: ClassVar[str]

    def __init__(
        self,
        body: Any,
        caller: Caller,
        tokenizer: Any,
        model: ModelChoice,
        format: AnswerFormat,
        prompts: Prompts,
    ) -> None:
        self.body, self._caller, self._tokenizer = body, caller, tokenizer
        self._model, self._lora = model
        self.gconfig = caller.sampling(body.gconfig(caller.gconfig))
        self.prompts, self._images = prompts.tokens, prompts.images
        self.tools, self._format, self._inside_thinking = [], None, False
        if isinstance(body, Conversation):
            self.tools, self._format = body.template_tools(), format
            if self.tools and format.tools is None:
                raise RolloutError(
                    "this server cannot parse the tool calls of the model's chat template; start it with "
                    f"tool_call_parser={' | '.join(known.name for known in FORMATS)} if the model writes such calls"
                )
            end = str(tokenizer.decode(self.prompts[0][-8:], skip_special_tokens=False))
            self._inside_thinking = end.rstrip().endswith(THINK[0])
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.constraint: GrammarConstraint | None = None  # of the answers, compiled from `grammar`

    def grammar(self) -> str | None:
        """Return the grammar of the answers, or None if nothing constrains them.

        Thinking is not constrained. Text matches the requested format, and tool calls have the chat template's syntax.

        Raises:
            RolloutError: answers of this model, or in training, cannot be constrained.
        """
        body, text = self.body, self.body.text_grammar()
        called = body.called_tools() if self._format is not None else []
        if text is None and not called:
            return None
        if self._caller.policy is not None:
            raise RolloutError(
                "training samples from the model's whole distribution, so answers cannot be constrained; remove the "
                "constraint (response_format or similar), and set tool_choice to 'auto'"
            )
        grammar = AnswerGrammar(self._tokenizer)
        answers = [] if text is None or called else [grammar.rule(text)]
        if self._format is None:
            return grammar.write(*answers)
        if not body.render_options()["add_generation_prompt"]:
            raise RolloutError(
                "the last message is an assistant message, which the answer continues, but a forced tool_choice or a "
                "response_format constrains a whole answer; remove one of them"
            )
        is_harmony = self._format.tools is HARMONY
        if is_harmony:
            answers = [f"{grammar.literal(f'{CHANNEL}final{MESSAGE}')} {answer}" for answer in answers]
        # 1. Tool calls: forced, or as an alternative to text
        if self.tools:
            assert self._format.tools is not None
            form = self._format.tools.form(template_text(self._tokenizer))
            if form is None:
                raise RolloutError(
                    f"tool calls of the format {self._format.tools.name} cannot be constrained; set tool_choice to "
                    "'auto' and remove response_format, or remove the tools"
                )
            single = body.single_call() or isinstance(body.forced_tool(), str)
            answers.append(grammar.calls(form, tool_schemas(called or self.tools), single=single))
        answer = grammar.rule(" | ".join(answers))
        # 2. Optional thinking before the answer
        if is_harmony:
            start, end = f"{CHANNEL}analysis{MESSAGE}", "<|end|><|start|>assistant"
            return grammar.write(f"({grammar.literal(start)} {grammar.text_until(end)})? {answer}")
        if not self._format.has_thinking:
            return grammar.write(answer)
        thought = f"{grammar.text_until(THINK[1])} /\\n{{0,2}}/"
        return grammar.write(
            f"{thought if self._inside_thinking else f'({grammar.literal(THINK[0])} {thought})?'} {answer}"
        )

    async def generate(self) -> AsyncGenerator[Delta | Choice, None]:
        """Yield the deltas of every answer (of a stream), and each answer once it is finished and recorded.

        Closing the generator, or canceling the task that iterates, aborts unfinished answers. Raises the first failure.
        """
        self._caller.admit(len(self.prompts) * self.gconfig.n_samples)
        items: asyncio.Queue[Delta | Choice | Exception] = asyncio.Queue()
        one = self.gconfig.model_copy(update={"n_samples": 1})

        async def sample(index: int, request: ModelRequest) -> None:
            try:
                parser = AnswerParser(
                    self._tokenizer,
                    one.stop,
                    self.tools,
                    index,
                    self._format,
                    self._inside_thinking,
                    single_call=bool(self.tools) and self.body.single_call(),
                )

                def on_token(token: int, logprob: float, top_logprobs: TopLogprobs | None = None) -> None:
                    delta = parser.feed(token, logprob, top_logprobs)
                    if delta is not None:
                        items.put_nowait(delta)

                if self.body.stream:
                    request.on_token = on_token
                response = await self._caller.engine.agenerate(request)
                self._caller.record(self.id, index, response, one)
                remaining = parser.finish(
                    response.output_tokens, response.output_logprobs, response.output_top_logprobs
                )
                if self.body.stream:
                    items.put_nowait(remaining)
                items.put_nowait(Choice(index, parser.parts, parser.stop_sequence, response))
            except Exception as error:  # noqa: BLE001 (raised in the consumer)
                if isinstance(error, ConfigError) and self._caller.refusal is None:
                    self._caller.refusal = error
                items.put_nowait(error)
            self._caller.unfinished -= 1  # not reached when canceled: the client has gone

        tasks = []
        for index, prompt in enumerate(prompt for prompt in self.prompts for _ in range(self.gconfig.n_samples)):
            seed = self._caller.next_seed()
            if one.seed is not None:  # the client's seed; further answers differ from the first
                seed = derive_seed(one.seed, index) if index else one.seed
            request = ModelRequest(
                prompt,
                one.model_copy(update={"seed": seed}),
                tokenizer=self._tokenizer,
                lora=self._lora,
                image_data=self._images,
                sampling_checked=self._caller.policy is not None,
                constraint=None if self.constraint is None else self.constraint.copy(),
            )
            tasks.append(asyncio.create_task(sample(index, request), name=f"archon-{self.id}-{index}"))
        self._caller.unfinished += len(tasks)
        failed = False
        try:
            left = len(tasks)
            while left:
                item = await items.get()
                if isinstance(item, Exception):
                    failed = True
                    raise item
                left -= isinstance(item, Choice)
                yield item
        finally:
            for task in tasks:
                canceled = task.cancel()
                self._caller.unfinished -= failed and canceled  # another answer failed; the client is still there
            await asyncio.gather(*tasks, return_exceptions=True)

    def count_tokens(self, choices: Sequence[Choice]) -> tuple[int, int]:
        """Return the tokens of all prompts, each counted once, and of these answers."""
        return sum(map(len, self.prompts)), sum(choice.response.output_len for choice in choices)

    def response_values(self, choices: Sequence[Choice]) -> int:
        """Return about how many values the response to a request without `stream` has."""
        return sum(self.count_tokens(choices)) * (1 + self.gconfig.top_logprobs)

    @abstractmethod
    def response(self, choices: list[Choice]) -> Any:
        """Return the response to a request without `stream`."""

    def on_start(self) -> Iterable[bytes]:
        """Return the first events."""
        return ()

    @abstractmethod
    def on_delta(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of a delta."""

    @abstractmethod
    def on_choice(self, choice: Choice) -> Iterable[bytes]:
        """Return the events of a finished answer."""

    def on_end(self, choices: list[Choice]) -> Iterable[bytes]:
        """Return the last events."""
        return ()

    def on_error(self, error: dict[str, Any]) -> Iterable[bytes]:
        """Return the events of an error."""
        return [sse(error)]


def sse(data: dict[str, Any] | str, event: str | None = None) -> bytes:
    """Return a server-sent event; models in `data` become JSON."""
    text = data if isinstance(data, str) else json.dumps(data, default=BaseModel.model_dump)
    return format_sse_event(event=event, data_str=text)
