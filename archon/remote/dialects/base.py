"""What a kind of inference server must be asked, and what its answers mean. One file a kind, such as `vllm.py`.

A dialect maps every field of `GenerationHyperparameters`, or refuses it: servers ignore fields that they do not know.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from archon.generation.types import GenerationHyperparameters, StopReason
from archon.remote.http import Http, ServerError
from archon.remote.weight_stream import Bucket
from archon.schema.errors import ConfigError

LogprobsMode = Literal["raw", "processed"]
Transport = Literal["disk", "delta", "lora", "gloo", "nccl"]
BROADCAST_TRANSPORTS: tuple[Transport, ...] = ("gloo", "nccl")
"""The transports without a folder: the trainer broadcasts to the server's workers."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself when it is connected.

    Attributes:
        kind: `vllm`, `archon` or `sglang`.
        release: the server's version, as it says it.
        model: the name that requests give.
        max_seq_len: tokens of prompt and answer together.
        logprobs_mode: `raw`: of the logits at temperature 1; `processed`: of the distribution that was sampled from.
        dtype: that it computes in, such as `bfloat16`.
        transports: how its weights can be pushed.
    """

    kind: str
    release: str
    model: str
    max_seq_len: int
    logprobs_mode: LogprobsMode
    dtype: str
    transports: frozenset[Transport]


@dataclass
class Sampling:
    """One request, with all that the server must not decide: token ids that end the answer, its limit, its seed."""

    prompt: list[int]
    gconfig: GenerationHyperparameters
    limit: int
    stop_token_ids: list[int]
    seed: int
    rid: str
    model: str

    def common_params(self) -> dict[str, Any]:
        """Return the parameters that vLLM and SGLang name alike.

        Said in full, since a server may have other defaults, from the model's generation_config.json.
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


@dataclass
class Answer:
    """A server's answer. `versions` are (version, first token, last token + 1), or empty where it names none.

    `experts` are those that the tokens of prompt and answer used, integers [n, L, k], of all layers or of those with
    experts; None where the server does not report them.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    experts: np.ndarray | None = None


class Dialect(ABC):
    """How one server is spoken to. Methods with `http` send requests; the others translate."""

    facts: ServerFacts
    unverified: ClassVar[str] = ""
    """What a user is told of a dialect that was never run against its server."""

    @classmethod
    @abstractmethod
    def connect(cls, http: Http) -> Dialect | None:
        """Return the dialect of the server with its facts, or None where the server is of another kind.

        Raises ConfigError for a server of this kind that answers could not be trained on.
        """

    @abstractmethod
    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Raise ConfigError for sampling values that the server would ignore or whose logprobs it cannot give."""

    @abstractmethod
    def request(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """Return path and body."""

    @abstractmethod
    def answer(self, body: Any) -> Answer:
        """Return the answer in a response; raises ServerError for one that is not of the dialect."""

    @abstractmethod
    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        """Return the logprobs of tokens 1 to L − 1 at temperature 1, each given those before it."""

    @abstractmethod
    def token_ids(self, http: Http, text: str) -> list[int] | None:
        """Return the server's tokens of a text without special ones; None where it has no tokenizer."""

    def pause(self, http: Http, *, abort: bool) -> None:
        """Stop sampling; unfinished answers end with what they have, or are kept."""
        raise self._unsupported("pauses")

    def resume(self, http: Http) -> None:
        raise self._unsupported("pauses")

    def abort(self, http: Http, rid: str) -> None:
        """End the requests of that name with what they have."""
        raise self._unsupported("aborted requests")

    def load(
        self, http: Http, transport: Transport, folder: str, version: int, seconds: float, since: int | None
    ) -> str:
        """Replace the weights, and forgets what is cached of the old ones. Returns the model's name for requests.

        `folder` holds a checkpoint or adapters, or the elements that changed since the version `since`.
        """
        raise self._unsupported("pushes of weights")

    def receive(self, http: Http, transport: Transport, buckets: Iterable[Bucket], version: int, seconds: float) -> str:
        """Same as `load`, of weights that are broadcast to the server's workers while they load them."""
        raise self._unsupported(f"pushes by {transport}")

    def version(self, http: Http) -> str:
        """Return the version of the server's weights."""
        raise self._unsupported("versions of weights")

    def start_for(self, transport: Transport) -> str:
        """Return with what the server must be started so that it takes weights by `transport`."""
        raise self._unsupported(f"pushes by {transport}")

    def _unsupported(self, what: str) -> ConfigError:
        return ConfigError(f"{self.facts.kind} {self.facts.release} has no {what}")


def finite_logprobs(values: Sequence[Any], where: str) -> list[float]:
    """Return `values` as numbers; raises ServerError where one is missing, NaN or infinite."""
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ServerError(f"{where}: a logprob is missing, or no finite number")
    return [float(value) for value in values]


def get_path(body: Any, where: str, *path: str | int) -> Any:
    """Return what is at a path of keys and indices; raises ServerError where there is nothing."""
    for key in path:
        try:
            body = body[key]
        except (KeyError, IndexError, TypeError):
            raise ServerError(f"{where} answered without {'.'.join(map(str, path))}") from None
    return body
