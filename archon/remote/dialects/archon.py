"""Protocol of `archon serve --push-root FOLDER`, which answers exactly like the in-process generator."""

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
"""Name of the pushed LoRA."""


class Archon(Dialect):
    """An archon server."""

    @classmethod
    def connect(cls, http: Http) -> Archon | None:
        """Return the dialect with the server's facts, or None for another kind of server."""
        try:
            served = http.get("/v1/models")["data"][0]
            if served.get("owned_by") != "archon":
                return None
            info = http.get(ROUTES)
        except RefusedError as error:
            if error.status in (401, 403):
                raise ConfigError(
                    f"{http.url} rejects the trainer's key; set {KEY} to the server's token, and start archon serve "
                    f"with --push-root ({error})"
                ) from None
            return None
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
        facts = ServerFacts(
            kind="archon",
            release=info["release"],
            model=info["model"],
            max_seq_len=int(info["max_seq_len"]),
            logprobs_mode="processed",
            dtype=info["dtype"],
            transports=frozenset({"disk", "lora"}),
        )
        return cls(facts, http.url)

    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Accept all values: server and trainer have the same generator."""

    def request(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """Return path and body of a generation request."""
        params = sampling.gconfig.model_dump() | {
            "n_samples": 1,
            "max_new_tokens": sampling.limit,
            "max_tokens": None,
            "ignore_eos": True,  # stop_token_ids contains the end-of-text id
            "stop_token_ids": sampling.stop_token_ids,
            "seed": sampling.seed,
            "min_new_tokens": min(sampling.gconfig.min_new_tokens, sampling.limit),
        }
        body = {"rid": sampling.rid, "input_ids": sampling.prompt, "policy": sampling.model == POLICY}
        return f"{ROUTES}/generate", body | {"sampling": params}

    def answer(self, body: Any) -> Answer:
        """Return the answer in a response."""
        tokens, logprobs, versions = (self._list(body, name) for name in ("output_ids", "logprobs", "versions"))
        reason = body.get("stop_reason")
        if not len(logprobs) == len(versions) == len(tokens):
            raise ServerError(
                f"{self._url} sent {len(logprobs)} logprobs and {len(versions)} versions for {len(tokens)} tokens"
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
        """Return the logprobs of tokens 1 to L − 1 at temperature 1."""
        body = http.post(f"{ROUTES}/score", {"input_ids": list(tokens), "policy": model == POLICY}, seconds)
        scores = finite_logprobs(self._list(body, "logprobs"), self._url)
        if len(scores) != len(tokens) - 1:
            raise ServerError(f"{self._url} sent {len(scores)} scores for {len(tokens)} tokens; expected one less")
        return scores

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        """Return the server's token ids of a text."""
        return self._list(http.post(f"{ROUTES}/tokenize", {"text": text}, 60), "tokens")

    def pause(self, http: Http, *, abort: bool) -> None:
        """Stop sampling; `abort` ends unfinished answers."""
        http.command(f"{ROUTES}/pause", {"mode": "abort" if abort else "keep"})

    def resume(self, http: Http) -> None:
        """Continue sampling."""
        http.command(f"{ROUTES}/resume")

    def abort(self, http: Http, rid: str) -> None:
        """End a request."""
        http.command(f"{ROUTES}/abort", {"rid": rid})

    def load(
        self, http: Http, transport: Transport, folder: str, version: int, seconds: float, since: int | None
    ) -> str:
        """Load weights from a folder."""
        body = {"transport": transport, "folder": folder, "version": version}
        http.command(f"{ROUTES}/weights", body, seconds)
        return POLICY if transport == "lora" else self.facts.model

    def version(self, http: Http) -> str:
        """Return the version of the server's weights."""
        return str(self._field(http.get(ROUTES, CONNECT_SECONDS), "version"))

    def start_for(self, transport: Transport) -> str:
        """Return the options that enable pushes."""
        if transport not in ("disk", "lora"):
            return "nothing: archon serve supports only disk and lora; set rollout.push.transport"
        return "--push-root, a folder above rollout.push.folder, and --token"

    def _list(self, body: Any, name: str) -> list[Any]:
        value = body.get(name) if isinstance(body, dict) else None
        if not isinstance(value, list):
            raise ServerError(f"{self._url} answered without {name}")
        return value
