"""Protocol of SGLang 0.5, written from the source of 0.5.23 and never run against SGLang, which needs CUDA.

The tests use a test double of the same routes. `/generate` takes token ids and reports one version per answer, which is
exact because a push ends unfinished answers. Weights go through a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archon.generation.types import GenerationHyperparameters, StopReason
from archon.remote.dialects.base import Answer, Dialect, Sampling, ServerFacts, Transport, finite_logprobs
from archon.remote.http import CONNECT_SECONDS, Http, RefusedError, ServerError
from archon.schema.errors import ConfigError

RELEASES = ("0.5.",)
"""Supported releases; other releases are refused."""
GENERATE = "/generate"
_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLang(Dialect):
    """An SGLang server."""

    unverified = (
        "support for SGLang follows its source and was never run against a real server; every push and the logprobs "
        "of the first batch are verified"
    )

    @classmethod
    def connect(cls, http: Http) -> SGLang | None:
        """Return the dialect with the server's facts, or None for another kind of server."""
        try:
            info = http.get("/get_server_info")
            release, model = info["version"], info["model_path"]
        except (RefusedError, KeyError, TypeError):
            return None
        if not str(release).startswith(RELEASES):
            raise ConfigError(
                f"{http.url} runs SGLang {release}, but routes change between releases; install "
                f"{' or '.join(release + 'x' for release in RELEASES)}"
            )
        if info.get("dtype") in (None, "auto"):
            raise ConfigError(f"{http.url} reports dtype {info.get('dtype')}; start SGLang with --dtype bfloat16")
        if int(info.get("dp_size") or 1) > 1:
            raise ConfigError(
                f"{http.url} runs with --dp-size {info['dp_size']}, but a push cannot be verified on every replica; "
                "start one server per replica"
            )
        length = info.get("context_length") or info.get("max_req_input_len")
        if not length:
            raise ConfigError(f"{http.url} reports no context length; start SGLang with --context-length")
        facts = ServerFacts(
            kind="sglang",
            release=str(release),
            model=str(model),
            max_seq_len=int(length),
            logprobs_mode="processed",
            dtype=str(info["dtype"]),
            transports=frozenset({"disk"}),
        )
        return cls(facts, http.url)

    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Raise ConfigError if SGLang's logprobs differ from the definition in `ModelResponse`.

        SGLang returns logprobs after temperature scaling and before top_p and top_k. Greedy answers have logprobs at
        temperature 1. Seeds only have an effect with --enable-deterministic-inference.
        """
        if gconfig.greedy and gconfig.temperature != 1:
            raise ConfigError(
                f"gconfig.temperature is {gconfig.temperature} with greedy, but SGLang returns greedy logprobs at "
                "temperature 1; set temperature to 1"
            )

    def request(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """Return path and body of a generation request."""
        g = sampling.gconfig
        params: dict[str, Any] = sampling.common_params() | {
            "max_new_tokens": sampling.limit,
            "min_new_tokens": min(g.min_new_tokens, sampling.limit),
            "top_k": -1 if g.greedy or g.top_k is None else g.top_k,
            "sampling_seed": sampling.seed % 2**31,
            # The server's end-of-text ids may differ from the tokenizer's; stop_token_ids has the right ones.
            "ignore_eos": True,
            "no_stop_trim": True,
        }
        body = {"rid": _delimited_rid(sampling.rid), "input_ids": sampling.prompt, "sampling_params": params}
        return GENERATE, body | {"return_logprob": True, "logprob_start_len": -1, "stream": False}

    def answer(self, body: Any) -> Answer:
        """Return the answer in a response."""
        meta = self._field(body, "meta_info")
        tokens = list(self._field(body, "output_ids"))
        items = self._field(meta, "output_token_logprobs")
        logprobs, ids = ([self._field(item, index) for item in items] for index in (0, 1))
        if ids != tokens:
            raise ServerError(f"{self._url} sent {len(ids)} logprobs that do not match its {len(tokens)} tokens")
        reason = self._field(meta, "finish_reason", "type")
        if reason not in _REASONS:
            raise ServerError(f"{self._url}: finish_reason is {reason!r}; expected one of {', '.join(_REASONS)}")
        version = str(self._field(meta, "weight_version"))
        return Answer(tokens, finite_logprobs(logprobs, self._url), _REASONS[reason], [(version, 0, len(tokens))])

    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        """Return the logprobs of tokens 1 to L − 1 at temperature 1."""
        # Logprobs are computed after temperature scaling, and an answer has at least one token.
        params = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        items = self._field(http.post(GENERATE, body | {"stream": False}, seconds), "meta_info", "input_token_logprobs")
        if [self._field(item, 1) for item in items] != list(tokens):
            raise ServerError(f"{self._url} scored other tokens than requested")
        return finite_logprobs([self._field(item, 0) for item in items[1:]], self._url)

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        """Return the server's token ids of a text; None if it has no tokenizer."""
        try:
            body = http.post("/tokenize", {"prompt": text, "add_special_tokens": False}, 60)
        except RefusedError:
            return None
        return list(self._field(body, "tokens"))

    def pause(self, http: Http, *, abort: bool) -> None:
        """Stop sampling; `abort` ends unfinished answers."""
        http.command("/pause_generation", {"mode": "abort" if abort else "in_place"}, 60)

    def resume(self, http: Http) -> None:
        """Continue sampling."""
        http.command("/continue_generation", {})

    def abort(self, http: Http, rid: str) -> None:
        """End a request."""
        http.command("/abort_request", {"rid": _delimited_rid(rid), "abort_all": False})

    def load(
        self, http: Http, transport: Transport, folder: str, version: int, seconds: float, since: int | None
    ) -> str:
        """Load a checkpoint from a folder."""
        body = {"model_path": folder, "weight_version": str(version), "abort_all_requests": True, "keep_pause": True}
        loaded = http.post("/update_weights_from_disk", body | {"flush_cache": True}, seconds)
        if self._field(loaded, "success") is not True:
            raise ServerError(f"{self._url} did not load version {version}: {loaded.get('message')}")
        http.command("/flush_cache", seconds=seconds)  # status 400 while requests use it
        return self.facts.model

    def version(self, http: Http) -> str:
        """Return the version of the server's weights."""
        return str(self._field(http.get("/get_server_info", CONNECT_SECONDS), "weight_version"))

    def start_for(self, transport: Transport) -> str:
        """Return that no option enables another transport than disk."""
        return "nothing: SGLang supports only disk; set rollout.push.transport to disk"


def _delimited_rid(rid: str) -> str:
    """Return a request id that is no prefix of another id: SGLang aborts all requests with a matching prefix."""
    return f"{rid}/"
