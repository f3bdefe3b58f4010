"""Interface to one kind of inference server; each kind has a file, such as `vllm.py`.

A dialect maps every field of `GenerationHyperparameters` or refuses it, because servers ignore unknown fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from archon.generation.types import GenerationHyperparameters
from archon.remote.answer_checks import Fields, RawAnswer
from archon.remote.http import MAX_BYTES, Http
from archon.remote.weight_stream import Bucket
from archon.schema.errors import ConfigError

LogprobsMode = Literal["raw", "processed"]
Transport = Literal["disk", "delta", "lora", "gloo", "nccl"]
SleepTag = Literal["weights", "kv_cache"]
"""Parts of a sleeping server's device memory, which wakes in this order."""
BROADCAST_TRANSPORTS: tuple[Transport, ...] = ("gloo", "nccl")
"""Transports without a folder: the trainer broadcasts to the server's workers."""


@dataclass(frozen=True)
class ServerFacts:
    """Facts that a server reports when it is connected.

    Attributes:
        kind: `vllm`, `archon` or `sglang`.
        release: release of the server software.
        model: model name in requests.
        max_seq_len: maximum tokens of prompt and answer together.
        logprobs_mode: `raw`: logprobs at temperature 1; `processed`: logprobs of the sampling distribution.
        dtype: compute dtype, such as `bfloat16`.
        transports: supported push transports.
        can_sleep: the server can free its device memory and take it back.
    """

    kind: str
    release: str
    model: str
    max_seq_len: int
    logprobs_mode: LogprobsMode
    dtype: str
    transports: frozenset[Transport]
    can_sleep: bool = False


@dataclass
class Sampling:
    """One request. Stop ids, token limit and seed are explicit, so no server default applies."""

    prompt: list[int]
    gconfig: GenerationHyperparameters
    limit: int
    stop_token_ids: list[int]
    seed: int
    rid: str
    model: str

    def common_params(self) -> dict[str, Any]:
        """Return the parameters that have the same names in vLLM and SGLang.

        All are explicit, because a server may take other defaults from the model's generation_config.json.
        """
        return {
            "n": 1,
            "temperature": 0.0 if self.gconfig.greedy else self.gconfig.temperature,
            "top_p": 1.0 if self.gconfig.greedy else self.gconfig.top_p,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop": self.gconfig.stop,
            "stop_token_ids": self.stop_token_ids,
            "skip_special_tokens": False,
        }


class Dialect(ABC):
    """Wire protocol of one server. Methods with `http` send requests; the others translate.

    Attributes:
        facts: facts about the connected server.
        unverified: warning if the dialect was never run against its real server.
        version_route: path of the weights' version, and its key in the response.
        token_bytes: limit of an answer's bytes for each token of prompt and answer, beyond `MAX_BYTES`.
        reserved_tokens: tokens of the context length that prompt and answer cannot use.
    """

    unverified: ClassVar[str] = ""
    version_route: ClassVar[tuple[str, str]]
    token_bytes: ClassVar[int]
    reserved_tokens: ClassVar[int] = 0

    def __init__(self, facts: ServerFacts, url: str) -> None:
        self.facts, self._url = facts, url

    @classmethod
    @abstractmethod
    def connect(cls, http: Http) -> Dialect | None:
        """Return the dialect with the server's facts, or None for another kind of server.

        Raises ConfigError for a server of this kind that is unsuitable for training.
        """

    @abstractmethod
    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Raise ConfigError for sampling values that the server ignores or cannot report logprobs for."""

    @abstractmethod
    def request(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """Return path and body of a generation request."""

    @abstractmethod
    def answer(self, response: Fields) -> RawAnswer:
        """Return the fields of the answer in a response. Raises ServerError if one is missing."""

    @abstractmethod
    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        """Return the logprobs of tokens 1 to L − 1 at temperature 1."""

    @abstractmethod
    def token_ids(self, http: Http, text: str) -> list[int] | None:
        """Return the server's token ids of a text, without special tokens; None if it has no tokenizer."""

    def pause(self, http: Http, *, abort: bool) -> None:
        """Stop sampling; `abort` ends unfinished answers with their current tokens."""
        raise self._unsupported("pauses")

    def resume(self, http: Http) -> None:
        """Continue sampling."""
        raise self._unsupported("pauses")

    def sleep(self, http: Http, seconds: float) -> None:
        """End unfinished answers with their current tokens, and free the device; the weights move to host memory."""
        raise self._unsupported("sleep mode")

    def wake(self, http: Http, tag: SleepTag, seconds: float) -> None:
        """Take back a part of the device memory. With its last part the server samples again."""
        raise self._unsupported("sleep mode")

    def abort(self, http: Http, rid: str) -> None:
        """End a request with its current tokens."""
        raise self._unsupported("aborted requests")

    def load(
        self, http: Http, transport: Transport, folder: str, version: int, seconds: float, since: int | None
    ) -> str:
        """Load weights from a folder, and clear caches of the old ones. Return the model name for requests.

        `folder` contains a checkpoint, a LoRA, or the elements that changed since version `since`.
        """
        raise self._unsupported("pushes of weights")

    def receive(self, http: Http, transport: Transport, buckets: Iterable[Bucket], version: int, seconds: float) -> str:
        """Load weights that are broadcast to the server's workers. Return the model name for requests."""
        raise self._unsupported(f"pushes by {transport}")

    def version(self, http: Http) -> str:
        """Return the version of the server's weights."""
        path, key = self.version_route
        return self._fields(http.get(path)).at(key).version()

    async def current_version(self, http: Http) -> str:
        """Return the version of the server's weights; a request on the running event loop."""
        path, key = self.version_route
        return self._fields(await http.fetch(path)).at(key).version()

    def start_for(self, transport: Transport) -> str:
        """Return the options and environment that enable pushes by `transport`."""
        raise self._unsupported(f"pushes by {transport}")

    def _unsupported(self, feature: str) -> ConfigError:
        return ConfigError(f"{self.facts.kind} {self.facts.release} has no {feature}")

    def answer_bytes(self, tokens: int) -> int:
        """Return the limit of the bytes of a response about `tokens` tokens."""
        return MAX_BYTES + tokens * self.token_bytes

    def _fields(self, body: Any) -> Fields:
        return Fields(self._url, body)
