"""SGLang's routes, as its 0.5.23 has them in its source. Never run against SGLang itself, whose kernels need CUDA: a
twin that was written from the same source answers in the tests.

`/generate` takes token ids and names one version for a whole answer; pushes end what is unfinished, so that one is
enough. Weights go through a folder, or as adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archon.generation.types import GenerationHyperparameters, StopReason
from archon.remote.dialects.base import Answer, Dialect, Sampling, ServerFacts, Transport, finite_logprobs, get_path
from archon.remote.http import CONNECT_SECONDS, Http, RefusedError, ServerError
from archon.schema.errors import ConfigError

RELEASES = ("0.5.",)
"""The releases whose routes were read; others are refused."""
GENERATE = "/generate"
_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLang(Dialect):
    """A server of SGLang's."""

    unverified = (
        "archon speaks to SGLang by its documented routes and was never run against SGLang itself; every push is "
        "verified, and so are the first batch's logprobs"
    )

    def __init__(self, facts: ServerFacts, url: str) -> None:
        self.facts, self._url = facts, url

    @classmethod
    def connect(cls, http: Http) -> SGLang | None:
        try:
            info = http.get("/get_server_info")
            release, model = info["version"], info["model_path"]
        except (RefusedError, KeyError, TypeError):
            return None
        if not str(release).startswith(RELEASES):
            raise ConfigError(
                f"{http.url} is SGLang {release}; its routes change between releases, and those of "
                f"{', '.join(release + 'x' for release in RELEASES)} were read: install one of these"
            )
        if info.get("dtype") in (None, "auto"):
            raise ConfigError(f"{http.url}: its dtype is {info.get('dtype')}; start SGLang with --dtype bfloat16")
        if int(info.get("dp_size") or 1) > 1:
            raise ConfigError(
                f"{http.url}: its --dp-size is {info['dp_size']}, and a push that reaches one replica alone would not "
                "be seen; start a server for each replica"
            )
        length = info.get("context_length") or info.get("max_req_input_len")
        if not length:
            raise ConfigError(f"{http.url}: it does not say its context length; start SGLang with --context-length")
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
        """Raise ConfigError where SGLang's logprobs would not be those of `ModelResponse`.

        They are of the logits divided by the temperature, before top_p and top_k; of a greedy answer those of
        temperature 1. Seeds have an effect with --enable-deterministic-inference alone.
        """
        if gconfig.greedy and gconfig.temperature != 1:
            raise ConfigError(
                f"gconfig.temperature: got {gconfig.temperature} with greedy, of which SGLang gives logprobs of "
                "temperature 1; leave it at 1"
            )

    def request(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        g = sampling.gconfig
        params: dict[str, Any] = sampling.common_params() | {
            "max_new_tokens": sampling.limit,
            "min_new_tokens": min(g.min_new_tokens, sampling.limit),
            "top_k": -1 if g.greedy or g.top_k is None else g.top_k,
            "sampling_seed": sampling.seed % 2**31,
            # The server's own ids may be others than the tokenizer's; those that end an answer are named above.
            "ignore_eos": True,
            "no_stop_trim": True,
        }
        body = {"rid": _delimited_rid(sampling.rid), "input_ids": sampling.prompt, "sampling_params": params}
        return GENERATE, body | {"return_logprob": True, "logprob_start_len": -1, "stream": False}

    def answer(self, body: Any) -> Answer:
        meta = self._field(body, "meta_info")
        tokens = list(self._field(body, "output_ids"))
        found = self._field(meta, "output_token_logprobs")
        logprobs, named = ([self._field(item, place) for item in found] for place in (0, 1))
        if named != tokens:
            raise ServerError(f"{self._url}: {len(tokens)} tokens came with {len(named)} logprobs, or those of others")
        reason = self._field(meta, "finish_reason", "type")
        if reason not in _REASONS:
            raise ServerError(f"{self._url}: finish_reason is {reason!r}; expected one of {', '.join(_REASONS)}")
        version = str(self._field(meta, "weight_version"))
        return Answer(tokens, finite_logprobs(logprobs, self._url), _REASONS[reason], [(version, 0, len(tokens))])

    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        # Temperature 1, since the logprobs are of the divided logits; an answer has at least one token.
        params = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        found = self._field(http.post(GENERATE, body | {"stream": False}, seconds), "meta_info", "input_token_logprobs")
        if [self._field(item, 1) for item in found] != list(tokens):
            raise ServerError(f"{self._url}: it scored other tokens than were asked for")
        return finite_logprobs([self._field(item, 0) for item in found[1:]], self._url)

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        try:
            found = http.post("/tokenize", {"prompt": text, "add_special_tokens": False}, 60)
        except RefusedError:
            return None
        return list(self._field(found, "tokens"))

    def pause(self, http: Http, *, abort: bool) -> None:
        http.command("/pause_generation", {"mode": "abort" if abort else "in_place"}, 60)

    def resume(self, http: Http) -> None:
        http.command("/continue_generation", {})

    def abort(self, http: Http, rid: str) -> None:
        http.command("/abort_request", {"rid": _delimited_rid(rid), "abort_all": False})

    def load(
        self, http: Http, transport: Transport, folder: str, version: int, seconds: float, since: int | None
    ) -> str:
        body = {"model_path": folder, "weight_version": str(version), "abort_all_requests": True, "keep_pause": True}
        loaded = http.post("/update_weights_from_disk", body | {"flush_cache": True}, seconds)
        if self._field(loaded, "success") is not True:
            raise ServerError(f"{self._url} did not load version {version}: {loaded.get('message')}")
        http.command("/flush_cache", seconds=seconds)  # status 400 while requests use it
        return self.facts.model

    def version(self, http: Http) -> str:
        return str(self._field(http.get("/get_server_info", CONNECT_SECONDS), "weight_version"))

    def start_for(self, transport: Transport) -> str:
        return "nothing: archon pushes to SGLang by disk alone; set rollout.push.transport to disk"

    def _field(self, body: Any, *path: str | int) -> Any:
        return get_path(body, self._url, *path)


def _delimited_rid(rid: str) -> str:
    """Return a name that is the beginning of no other: SGLang aborts all requests whose names begin with the given."""
    return f"{rid}/"
