"""Model interface of Trinity-style workflows that keeps exact tokens."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from archon.data.encoding import encode_prompt, next_turn_ids, plain_prompt
from archon.generation.record import TokenRecord, UnusableAnswerError, check_answer
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest
from archon.rl.compat.trinity.experience import Experience
from archon.rl.episode_context import EpisodeEngine, workflow_context
from archon.schema.config import nearest
from archon.schema.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    import openai

    from archon.serve.server import AgentServer
    from archon.serve.sessions import Session

    Endpoint = tuple[AgentServer, str]  # server and its base URL

T = TypeVar("T")

# Workflow names of sampling parameters to archon names (archon's max_tokens includes the prompt).
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "seed")}
_SAMPLING |= {"max_tokens": "max_new_tokens", "max_new_tokens": "max_new_tokens"}


class ModelWrapper:
    """The trained model, for one run of a workflow at a time.

    A synchronous `run` calls the blocking `chat` and `generate`; `run_async` awaits `chat_async` and `generate_async`.
    The run's configuration provides defaults of sampling parameters.

    A conversation stays in token space: if the messages extend an earlier call by its unchanged `response_text` and one
    more message, the prompt is the earlier tokens plus the tokens of that message.

    Args:
        tokenizer: renders messages and decodes answers.
        enable_history: also keep the answers of `chat` and `generate` for `extract_experience_from_history`.
    """

    def __init__(self, tokenizer: Any, *, enable_history: bool = False) -> None:
        self._tokenizer = tokenizer
        self.enable_history = enable_history
        self.history: list[Experience] = []
        self._clients: list[Any] = []
        self._closed = threading.Event()
        self._closed.set()

    def open(
        self,
        engine: InferenceEngine,
        gconfig: GenerationHyperparameters,
        run: int,
        endpoint: Endpoint | None = None,
    ) -> None:
        """Open the wrapper for run `run` of the current episode; `endpoint` serves HTTP clients."""
        self._engine, self._gconfig = engine, gconfig
        self._seed = derive_seed(workflow_context.get().seed, run)
        self._endpoint = endpoint
        self._session: Session | None = None
        if endpoint is not None:
            single = gconfig.model_copy(update={"n_samples": 1})
            policy = engine.agent_sampling if isinstance(engine, EpisodeEngine) else None
            if policy is not None and policy.mode == "allow":
                policy = None  # experiences have no temperatures; the trainer rejects other values
            self._session = endpoint[0].sessions.open(engine, single, derive_seed(self._seed, 0), policy)
            for client in self._clients:  # a reused workflow keeps its clients
                client.base_url, client.api_key = endpoint[1], self._session.key
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self.history = []
        self._closed.clear()
        self._waiting: set[Future[Any]] = set()
        self._conversations: dict[tuple[tuple[str, str], ...], TokenRecord] = {}
        self._records: dict[tuple[int, ...], TokenRecord] = {}

    def close(self) -> None:
        """End the run: cancel waiting calls and reject further ones."""
        self._closed.set()
        for future in list(self._waiting):
            future.cancel()
        if self._endpoint is not None and self._session is not None:
            self._endpoint[0].sessions.close(self._session)

    @property
    def model_version(self) -> int:
        """Version of the weights."""
        return self._engine.version

    def chat(self, messages: Sequence[dict[str, Any]], n: int = 1, **sampling: Any) -> list[Experience]:
        """Return `n` answers to a conversation, as experiences without a reward.

        Untrainable answers are dropped and counted.

        Args:
            messages: `{"role": …, "content": text}`.
            n: number of answers.
            sampling: `temperature` (0: greedy), `top_p`, `top_k`, `max_tokens` of an answer, `stop`, `stop_token_ids`,
                `ignore_eos`, `seed`; None keeps the configured value.

        Raises:
            RolloutError: no usable answer, an unknown argument, or a call on the event loop's thread.
        """
        return self.wait(self.chat_async(messages, n, **sampling))

    async def chat_async(self, messages: Sequence[dict[str, Any]], n: int = 1, **sampling: Any) -> list[Experience]:
        """Do the same as `chat`, awaited."""
        known = self._conversations.get(conversation_key(messages)[:-1])
        if known is None:
            row = {"messages": list(messages), "prompt": plain_prompt(messages)}
            known, new_ids = TokenRecord(), encode_prompt(self._tokenizer, row)
        else:
            new_ids = next_turn_ids(self._tokenizer, messages[-1], known.input_ids)
        return await self._answers(known, new_ids, n, sampling, list(messages))

    def generate(self, prompts: Sequence[str] | str, n: int = 1, **sampling: Any) -> list[Experience]:
        """Return `n` continuations of each text, grouped by text; arguments and errors as in `chat`."""
        return self.wait(self.generate_async(prompts, n, **sampling))

    async def generate_async(self, prompts: Sequence[str] | str, n: int = 1, **sampling: Any) -> list[Experience]:
        """Do the same as `generate`, awaited."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        prompt_ids = [encode_prompt(self._tokenizer, {"prompt": text}) for text in texts]
        groups = await asyncio.gather(*(self._answers(TokenRecord(), ids, n, sampling, None) for ids in prompt_ids))
        return [answer for group in groups for answer in group]

    def logprobs(self, tokens: Sequence[int] | Tensor, temperature: float | None = None) -> Tensor:
        """Return logprobs of tokens 1 to L − 1, conditioned on their prefixes: float32 [L − 1].

        Args:
            tokens: L ids, a list or a tensor [L].
            temperature: divides the logits; None: the run's.
        """
        return self.wait(self.logprobs_async(tokens, temperature))

    async def logprobs_async(self, tokens: Sequence[int] | Tensor, temperature: float | None = None) -> Tensor:
        """Do the same as `logprobs`, awaited."""
        self._require_open()
        if temperature is None:
            temperature = self._gconfig.temperature
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        score = getattr(self._engine, "prompt_logprobs", None)
        if score is None:
            raise RolloutError(f"{type(self._engine).__name__} has no prompt_logprobs; use another engine")
        return torch.tensor(score(ids, temperature))

    def get_openai_client(self) -> openai.OpenAI:
        """Return an OpenAI client of the model for this run; `client.model_path` is the model's name.

        `extract_experience_from_history` returns its answers.

        Raises:
            RolloutError: `enable_openai_api` is not set, or the package openai is not installed.
        """
        return self._client("OpenAI")

    def get_openai_async_client(self) -> openai.AsyncOpenAI:
        """Return the asynchronous client for `run_async`."""
        return self._client("AsyncOpenAI")

    def _client(self, kind: str) -> Any:
        self._require_open()
        if self._endpoint is None or self._session is None:
            raise RolloutError(
                "this run has no OpenAI endpoint; set explorer.rollout_model.enable_openai_api: true, or "
                "workflow_args.enable_openai_api: true"
            )
        server, base_url = self._endpoint
        client = openai_client(kind, base_url, self._session.key, server.model, max_retries=0)
        self._clients.append(client)
        return client

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return the conversations of this run's clients since the last call, as experiences without a reward.

        Each conversation spans its first prompt to its last answer, and all answers are trained. With `enable_history`,
        the answers of `chat` and `generate` come first. `clear_history` empties the history.
        """
        self._require_open()
        experiences = list(self.history)
        if clear_history:
            self.history = []
        if self._session is None:
            return experiences
        for record in self._session.branches():
            experience = self._experience(record, record.loss_mask.index(1))
            start = experience.prompt_length
            experience.prompt_text = self._tokenizer.decode(record.input_ids[:start], skip_special_tokens=True)
            experience.response_text = self._tokenizer.decode(record.input_ids[start:], skip_special_tokens=True)
            experiences.append(experience)
        if clear_history:
            self._session.interactions.clear()
        return experiences

    def convert_messages_to_experience(self, messages: Sequence[dict[str, Any]]) -> Experience:
        """Return a conversation that ends with an answer of this run as one experience; all answers are trained.

        Raises:
            RolloutError: the last message is not an unchanged answer of the model.
        """
        record = self._conversations.get(conversation_key(messages))
        if record is None:
            raise RolloutError(
                "the conversation does not end with an unchanged answer of the model in this run; keep `response_text` "
                "and the messages before it, and remove messages after it"
            )
        experience = self._experience(record, record.loss_mask.index(1))
        experience.response_text, experience.messages = messages[-1]["content"], list(messages)
        return experience

    async def convert_messages_to_experience_async(self, messages: Sequence[dict[str, Any]]) -> Experience:
        """Do the same as `convert_messages_to_experience`, awaited."""
        return self.convert_messages_to_experience(messages)

    def _experience(self, record: TokenRecord, prompt_length: int) -> Experience:
        """Convert a record to an experience and store the record by its tokens."""
        self._records[tuple(record.input_ids)] = record
        return Experience(
            tokens=torch.tensor(record.input_ids),
            prompt_length=prompt_length,
            logprobs=torch.tensor(record.logprobs[prompt_length:]),
            action_mask=torch.tensor(record.loss_mask[prompt_length:]),
            truncate_status="response_truncated" if record.truncated else None,
        )

    def find_record(self, tokens: Sequence[int]) -> TokenRecord | None:
        """Return this run's record of exactly these tokens, with logprobs and versions, or None."""
        return self._records.get(tuple(tokens))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the event loop and block the calling thread until its result."""
        try:
            running_loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running_loop = None
        if self._closed.is_set() or running_loop is self._loop:
            work.close()
            self._require_open()
            raise RolloutError(
                "a blocking call on the event loop would never return; in run_async, await chat_async or generate_async"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        if self._closed.is_set():  # closed in the meantime
            future.cancel()
        return future.result()

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise RolloutError("the run of this model has ended; call the model during the run only")

    async def _answers(
        self,
        known: TokenRecord,
        new_ids: list[int],
        n: int,
        sampling: dict[str, Any],
        messages: list[dict[str, Any]] | None,
    ) -> list[Experience]:
        """Sample `n` answers after the tokens of `known` and `new_ids`; return the usable ones."""
        self._require_open()
        if not isinstance(n, int) or n < 1:
            raise RolloutError(f"n is {n!r}, expected the number of answers, at least 1")
        gconfig = self._request_gconfig(sampling)
        # Separate random streams per call: answers do not depend on concurrent runs.
        seed = derive_seed(self._seed, self._calls) if gconfig.seed is None else gconfig.seed
        self._calls += 1
        prompt_ids = known.input_ids + new_ids
        prompt_text = self._tokenizer.decode(prompt_ids, skip_special_tokens=True)
        configs = [gconfig.model_copy(update={"seed": derive_seed(seed, index)}) for index in range(n)]
        requests = [ModelRequest(prompt_ids, config, tokenizer=self._tokenizer) for config in configs]
        responses = await asyncio.gather(*map(self._engine.agenerate, requests))
        answers, lost = list[Experience](), list[UnusableAnswerError]()
        for response in responses:
            # A copy, because the answers share their prompt.
            columns: dict[str, Any] = {name: [*value] for name, value in vars(known).items() if isinstance(value, list)}
            record = replace(known, **columns)
            record.observe(new_ids)
            try:
                check_answer(response)
                record.answer(response)
            except UnusableAnswerError as error:
                lost.append(error)
                continue
            answer = self._experience(record, len(prompt_ids))
            answer.prompt_text, answer.messages = prompt_text, messages
            answer.response_text = self._tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            if messages is not None:
                reply = {"role": "assistant", "content": answer.response_text}
                self._conversations[conversation_key([*messages, reply])] = record
            answers.append(answer)
        if self.enable_history:
            self.history += answers
        for failure in lost if answers else lost[1:]:
            workflow_context.drop(failure.kind, failure)
        if not answers:
            raise lost[0]
        return answers

    def _request_gconfig(self, sampling: dict[str, Any]) -> GenerationHyperparameters:
        changes: dict[str, Any] = {"n_samples": 1}
        for name, value in sampling.items():
            if name == "logprobs" or value is None:
                continue  # every answer has logprobs
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


def openai_client(kind: str, base_url: str, api_key: str, model: str, *, max_retries: int) -> Any:
    """Return a client of class `kind` (OpenAI or AsyncOpenAI) without proxies and time limits.

    Raises:
        RolloutError: the package openai is not installed.
    """
    try:
        module: Any = importlib.import_module("openai")
    except ImportError as error:
        raise RolloutError(f"the OpenAI client needs the package openai ({error}): pip install openai") from None
    import httpx

    from archon.remote.clients import tls_context

    client_class = httpx.Client if kind == "OpenAI" else httpx.AsyncClient
    http_client = client_class(trust_env=False, timeout=None, verify=tls_context())
    client = getattr(module, kind)(
        base_url=base_url, api_key=api_key, http_client=http_client, timeout=None, max_retries=max_retries
    )
    client.model_path = model
    return client


def conversation_key(messages: Any) -> tuple[tuple[str, str], ...]:
    """Return the role and text of each message; raise `RolloutError` for invalid messages."""
    for index, message in enumerate(messages):
        parts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise RolloutError(f"messages[{index}] is {message!r:.80}, expected {{'role': …, 'content': text}}")
    if isinstance(messages, str) or not messages:
        raise RolloutError(f"messages is {messages!r:.80}, expected a list of {{'role': …, 'content': text}}")
    return tuple((message["role"], message["content"]) for message in messages)
