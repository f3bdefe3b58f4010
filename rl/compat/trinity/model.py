"""The model as a Trinity-style workflow sees it: messages in, answers out, exact tokens kept."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from archon.data.encoding import encode_prompt, next_turn_ids, plain_prompt
from archon.generation.record import TokenRecord, UnusableAnswerError, check_answer
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse
from archon.rl.compat.trinity.types import Experience
from archon.rl.episode_context import workflow_context
from archon.schema.config import nearest
from archon.schema.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    import openai

    from archon.serve.server import AgentServer
    from archon.serve.sessions import Session

    Endpoint = tuple[AgentServer, str]  # and its base URL

T = TypeVar("T")

# The names that workflows use, and what archon calls them. (Its own max_tokens counts the prompt too.)
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "seed")}
_SAMPLING |= {"max_tokens": "max_new_tokens", "max_new_tokens": "max_new_tokens"}


class ModelWrapper:
    """The model that is trained, for one run of a workflow at a time.

    `chat` and `generate` wait for their answers, and belong into a synchronous `run`; a `run_async` awaits
    `chat_async` and `generate_async`. What a call does not say about sampling is the run's configuration's.

    A conversation stays in token space: where a call's messages are those of an earlier one, its answer's
    `response_text` unchanged, and one message more, the prompt is the tokens so far and those of that message.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._clients: list[Any] = []
        self._closed = True

    def open(
        self,
        engine: InferenceEngine,
        gconfig: GenerationHyperparameters,
        run: int,
        endpoint: Endpoint | None = None,
    ) -> None:
        """Make it that of run `run` of the episode that the calling task belongs to. `endpoint` is where clients may
        ask it over HTTP."""
        self._engine, self._gconfig = engine, gconfig
        self._seed = derive_seed(workflow_context.get().seed, run)
        self._endpoint = endpoint
        self._session: Session | None = None
        if endpoint is not None:
            one = gconfig.model_copy(update={"n_samples": 1})
            self._session = endpoint[0].sessions.open(engine, one, derive_seed(self._seed, 0))
            for client in self._clients:  # of a workflow that is used again
                client.base_url, client.api_key = endpoint[1], self._session.key
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self._closed = False
        self._waiting: set[Future[Any]] = set()
        self._talks: dict[tuple[tuple[str, str], ...], TokenRecord] = {}
        self._records: dict[tuple[int, ...], TokenRecord] = {}

    def close(self) -> None:
        """End the run: what a thread of it still waits for is cancelled, and it can ask for nothing more."""
        self._closed = True
        for future in list(self._waiting):
            future.cancel()
        if self._endpoint is not None and self._session is not None:
            self._endpoint[0].sessions.close(self._session)

    @property
    def model_version(self) -> int:
        """Version of the weights."""
        return self._engine.version

    def chat(self, messages: Sequence[dict[str, Any]], n: int = 1, **sampling: Any) -> list[Experience]:
        """`n` answers to a conversation, as experiences that lack only their reward.

        Args:
            messages: `{"role": …, "content": text}`.
            sampling: `temperature` (0: the likeliest tokens), `top_p`, `top_k`, `max_tokens` of an answer, `stop`,
                `stop_token_ids`, `ignore_eos`, `seed`; None leaves one as it is.

        Answers that cannot be trained on are left out and counted. Raises `RolloutError` where none is left, for an
        unknown argument, and on the event loop's own thread, which it would block.
        """
        return self.wait(self.chat_async(messages, n, **sampling))

    async def chat_async(self, messages: Sequence[dict[str, Any]], n: int = 1, **sampling: Any) -> list[Experience]:
        """As `chat`, awaited."""
        talk = _talk(messages)
        return await self._answers(self._beginning(talk, messages), n, sampling, list(messages))

    def generate(self, prompts: Sequence[str] | str, n: int = 1, **sampling: Any) -> list[Experience]:
        """`n` continuations of each text, those of one text behind another; arguments and errors as those of `chat`."""
        return self.wait(self.generate_async(prompts, n, **sampling))

    async def generate_async(self, prompts: Sequence[str] | str, n: int = 1, **sampling: Any) -> list[Experience]:
        """As `generate`, awaited."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        prefixes = [self._observed(encode_prompt(self._tokenizer, {"prompt": text})) for text in texts]
        groups = await asyncio.gather(*(self._answers(prefix, n, sampling, None) for prefix in prefixes))
        return [answer for group in groups for answer in group]

    def get_openai_client(self) -> openai.OpenAI:
        """A client that speaks to the model for this run, and waits for its answers: for a synchronous `run`.

        `client.model_path` names the model. What it was answered, `extract_experience_from_history` gives. Raises
        `RolloutError` where the run's configuration does not set enable_openai_api, or openai is not installed.
        """
        return self._client("OpenAI")

    def get_openai_async_client(self) -> openai.AsyncOpenAI:
        """As `get_openai_client`, awaited."""
        return self._client("AsyncOpenAI")

    def _client(self, kind: str) -> Any:
        self._require_open()
        if self._endpoint is None or self._session is None:
            raise RolloutError(
                "this run has no OpenAI endpoint; set explorer.rollout_model.enable_openai_api: true, or give the "
                "workflow enable_openai_api=True"
            )
        try:
            module: Any = importlib.import_module("openai")
        except ImportError as error:
            raise RolloutError(f"the OpenAI client needs the package openai ({error}): pip install openai") from None
        import httpx

        from archon.rl.clients import tls_context

        # It goes by no proxy, and waits as long as an answer takes.
        plain = httpx.Client if kind == "OpenAI" else httpx.AsyncClient
        http_client = plain(trust_env=False, timeout=None, verify=tls_context())
        server, base_url = self._endpoint
        client = getattr(module, kind)(
            base_url=base_url, api_key=self._session.key, http_client=http_client, timeout=None, max_retries=0
        )
        client.model_path = server.model
        self._clients.append(client)
        return client

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """What the clients of this run were answered since the last call: an experience for each conversation, from its
        first prompt to its last answer, in which every answer is trained. They lack their rewards.

        `clear_history` leaves them out of the next call.
        """
        self._require_open()
        if self._session is None:
            return []
        found = []
        for record in self._session.branches():
            start = record.loss_mask.index(1)
            self._records[tuple(record.input_ids)] = record
            found.append(
                Experience(
                    tokens=torch.tensor(record.input_ids),
                    prompt_length=start,
                    logprobs=torch.tensor(record.logprobs[start:]),
                    action_mask=torch.tensor(record.loss_mask[start:]),
                    prompt_text=self._tokenizer.decode(record.input_ids[:start], skip_special_tokens=True),
                    response_text=self._tokenizer.decode(record.input_ids[start:], skip_special_tokens=True),
                    truncate_status="response_truncated" if record.truncated else None,
                )
            )
        if clear_history:
            self._session.interactions.clear()
        return found

    def convert_messages_to_experience(self, messages: Sequence[dict[str, Any]]) -> Experience:
        """A conversation that ends with an answer of this run as one experience: every answer whose tokens were kept is
        trained. Raises `RolloutError` where the last one is not, word for word, what the model said."""
        record = self._talks.get(_talk(messages))
        if record is None:
            raise RolloutError(
                "the conversation does not end with an answer that the model gave to these messages in this run; keep "
                "`response_text` and the messages before it as they are, and leave out what was said behind it"
            )
        start = record.loss_mask.index(1)
        return Experience(
            tokens=torch.tensor(record.input_ids),
            prompt_length=start,
            logprobs=torch.tensor(record.logprobs[start:]),
            action_mask=torch.tensor(record.loss_mask[start:]),
            response_text=messages[-1]["content"],
            messages=list(messages),
            truncate_status="response_truncated" if record.truncated else None,
        )

    def recorded(self, tokens: Sequence[int]) -> TokenRecord | None:
        """What is known of exactly these tokens: which the model generated in this run, with logprobs and versions."""
        return self._records.get(tuple(tokens))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which the event loop does while the calling thread waits."""
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if self._closed or here is self._loop:
            work.close()
            self._require_open()
            raise RolloutError(
                "this would block the event loop that answers it: in run_async, await chat_async or generate_async"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        if self._has_ended():  # meanwhile
            future.cancel()
        return future.result()

    def _has_ended(self) -> bool:
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            raise RolloutError("the run that this model belonged to has ended; a workflow must not ask it later")

    async def _answers(
        self, prefix: TokenRecord, n: int, sampling: dict[str, Any], messages: list[dict[str, Any]] | None
    ) -> list[Experience]:
        self._require_open()
        if not isinstance(n, int) or n < 1:
            raise RolloutError(f"n is {n!r}, expected the number of answers, at least 1")
        gconfig = self._sampled_with(sampling)
        # Of this call's own streams, whatever other runs do meanwhile.
        seed = derive_seed(self._seed, self._calls) if gconfig.seed is None else gconfig.seed
        self._calls += 1
        requests = [
            ModelRequest(
                prefix.input_ids,
                gconfig.model_copy(update={"seed": derive_seed(seed, index)}),
                tokenizer=self._tokenizer,
            )
            for index in range(n)
        ]
        responses = await asyncio.gather(*(self._engine.agenerate(request) for request in requests))
        answers, lost = list[Experience](), list[UnusableAnswerError]()
        prompt = self._tokenizer.decode(prefix.input_ids, skip_special_tokens=True)
        for response in responses:
            try:
                check_answer(response)
                answers.append(self._experience(response, prefix, prompt, messages))
            except UnusableAnswerError as error:
                lost.append(error)
        for failure in lost if answers else lost[1:]:
            workflow_context.drop(failure.kind, failure)
        if not answers:
            raise lost[0]
        return answers

    def _sampled_with(self, sampling: dict[str, Any]) -> GenerationHyperparameters:
        changes: dict[str, Any] = {"n_samples": 1}
        for name, value in sampling.items():
            if name == "logprobs" or value is None:
                continue  # logprobs always come
            if name not in _SAMPLING:
                raise RolloutError(f"the model has no argument {name!r}{nearest(name, list(_SAMPLING))}")
            changes[_SAMPLING[name]] = value
        if changes.get("temperature") == 0:
            del changes["temperature"]
            changes["greedy"] = True
        if changes.get("top_k", 1) in (-1, 0):
            changes["top_k"] = None
        if "stop_token_ids" in changes:
            changes["stop_token_ids"] = [*self._gconfig.stop_token_ids, *changes["stop_token_ids"]]
        try:
            return self._gconfig.new(**changes)
        except ConfigError as error:
            raise RolloutError(f"the model's arguments: {error}") from None

    def _beginning(self, talk: tuple[tuple[str, str], ...], messages: Sequence[dict[str, Any]]) -> TokenRecord:
        """What the model is given for a conversation."""
        known = self._talks.get(talk[:-1])
        if known is None:
            row = {"messages": list(messages), "prompt": plain_prompt(messages)}
            return self._observed(encode_prompt(self._tokenizer, row))
        prefix = _copied(known)
        prefix.observe(next_turn_ids(self._tokenizer, messages[-1], known.input_ids))
        return prefix

    @staticmethod
    def _observed(ids: list[int]) -> TokenRecord:
        record = TokenRecord()
        record.observe(ids)
        return record

    def _experience(
        self, response: ModelResponse, prefix: TokenRecord, prompt: str, messages: list[dict[str, Any]] | None
    ) -> Experience:
        record = _copied(prefix)
        record.answer(response)
        self._records[tuple(record.input_ids)] = record
        text = self._tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        if messages is not None:
            self._talks[_talk([*messages, {"role": "assistant", "content": text}])] = record
        return Experience(
            tokens=torch.tensor(record.input_ids),
            prompt_length=len(prefix.input_ids),
            logprobs=torch.tensor(response.output_logprobs),
            prompt_text=prompt,
            response_text=text,
            messages=messages,
            truncate_status="response_truncated" if record.truncated else None,
        )


def _copied(record: TokenRecord) -> TokenRecord:
    return replace(
        record,
        input_ids=[*record.input_ids],
        loss_mask=[*record.loss_mask],
        logprobs=[*record.logprobs],
        versions=[*record.versions],
        turn_ids=[*record.turn_ids],
    )


def _talk(messages: Any) -> tuple[tuple[str, str], ...]:
    """What identifies a conversation; `RolloutError` where it is none."""
    for index, message in enumerate(messages):
        parts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise RolloutError(f"messages[{index}] is {message!r:.80}, expected {{'role': …, 'content': text}}")
    if isinstance(messages, str) or not messages:
        raise RolloutError(f"messages is {messages!r:.80}, expected a list of {{'role': …, 'content': text}}")
    return tuple((message["role"], message["content"]) for message in messages)
