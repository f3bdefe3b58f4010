"""`archon serve --push-root FOLDER`: the generator of a trainer's own process behind HTTP, so that every sampling value
means the same, and an answer is the one that it would have given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, get_args

from archon.generation.types import GenerationHyperparameters, StopReason
from archon.remote.dialects.base import Answer, Dialect, Sampling, ServerFacts, Transport, finite_logprobs
from archon.remote.http import CONNECT_SECONDS, KEY, Http, RefusedError, ServerError
from archon.schema.errors import ConfigError

ROUTES = "/v1/rollout"
POLICY = "policy"
"""The name of the pushed adapter."""


class Archon(Dialect):
    """A server of archon's."""

    def __init__(self, facts: ServerFacts, url: str) -> None:
        self.facts, self._url = facts, url

    @classmethod
    def connect(cls, http: Http) -> Archon | None:
        try:
            served = http.get("/v1/models")["data"][0]
            if served.get("owned_by") != "archon":
                return None
            found = http.get(ROUTES)
        except RefusedError as error:
            if error.status in (401, 403):
                raise ConfigError(
                    f"{http.url} refuses this trainer; set {KEY} to the server's token, and start archon serve with "
                    f"--push-root ({error})"
                ) from None
            return None
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
        facts = ServerFacts(
            kind="archon",
            release=found["release"],
            model=found["model"],
            max_seq_len=int(found["max_seq_len"]),
            logprobs_mode="processed",
            dtype=found["dtype"],
            transports=frozenset({"disk", "lora"}),
        )
        return cls(facts, http.url)

    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Accept all: the server's generator is the trainer's."""

    def request(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        # The tokenizer's end-of-text id is among the stop ids.
        own: dict[str, Any] = {"n_samples": 1, "max_new_tokens": sampling.limit, "max_tokens": None, "ignore_eos": True}
        own |= {"stop_token_ids": sampling.stop_token_ids, "seed": sampling.seed}
        own["min_new_tokens"] = min(sampling.gconfig.min_new_tokens, sampling.limit)
        body = {"rid": sampling.rid, "input_ids": sampling.prompt, "policy": sampling.model == POLICY}
        return f"{ROUTES}/generate", body | {"sampling": sampling.gconfig.model_dump() | own}

    def answer(self, body: Any) -> Answer:
        tokens, logprobs, versions = (self._list(body, name) for name in ("output_ids", "logprobs", "versions"))
        reason = body.get("stop_reason")
        if not len(logprobs) == len(versions) == len(tokens):
            raise ServerError(
                f"{self._url}: {len(tokens)} tokens came with {len(logprobs)} logprobs and {len(versions)} versions"
            )
        if reason not in get_args(StopReason):
            raise ServerError(f"{self._url}: stop_reason is {reason!r}; expected one of {get_args(StopReason)}")
        spans, start = [], 0
        for version, run in groupby(versions):
            end = start + len(list(run))
            spans.append((str(version), start, end))
            start = end
        return Answer(tokens, finite_logprobs(logprobs, self._url), reason, spans)

    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        body = http.post(f"{ROUTES}/score", {"input_ids": list(tokens), "policy": model == POLICY}, seconds)
        scores = finite_logprobs(self._list(body, "logprobs"), self._url)
        if len(scores) != len(tokens) - 1:
            raise ServerError(f"{self._url}: {len(tokens)} tokens came with {len(scores)} scores; expected one less")
        return scores

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        return self._list(http.post(f"{ROUTES}/tokenize", {"text": text}, 60), "tokens")

    def pause(self, http: Http, *, abort: bool) -> None:
        http.command(f"{ROUTES}/pause", {"mode": "abort" if abort else "keep"})

    def resume(self, http: Http) -> None:
        http.command(f"{ROUTES}/resume")

    def abort(self, http: Http, rid: str) -> None:
        http.command(f"{ROUTES}/abort", {"rid": rid})

    def load(
        self, http: Http, transport: Transport, folder: str, version: int, seconds: float, since: int | None
    ) -> str:
        body = {"transport": transport, "folder": folder, "version": version}
        http.command(f"{ROUTES}/weights", body, seconds)
        return POLICY if transport == "lora" else self.facts.model

    def version(self, http: Http) -> str:
        try:
            return str(http.get(ROUTES, CONNECT_SECONDS)["version"])
        except (KeyError, TypeError):
            raise ServerError(f"{self._url}{ROUTES} answered without version") from None

    def start_for(self, transport: Transport) -> str:
        if transport not in ("disk", "lora"):
            return "nothing: archon serve takes them by disk or lora only; set rollout.push.transport"
        return "--push-root, a folder above rollout.push.folder, and --token"

    def _list(self, body: Any, name: str) -> list[Any]:
        found = body.get(name) if isinstance(body, dict) else None
        if not isinstance(found, list):
            raise ServerError(f"{self._url} answered without {name}")
        return found
