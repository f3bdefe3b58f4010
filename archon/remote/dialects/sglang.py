"""Protocol of SGLang 0.5, written from the source of 0.5.23 and never run against SGLang, which needs CUDA.

The tests use a test double of the same routes. `/generate` takes token ids and reports one version per answer, which is
exact because a push ends unfinished answers. Weights go through a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archon.generation.types import GenerationHyperparameters
from archon.remote.answer_checks import Fields, RawAnswer
from archon.remote.dialects.base import Dialect, Sampling, ServerFacts, Transport
from archon.remote.http import Http, RefusedError, ServerError, one_line
from archon.schema.errors import ConfigError

RELEASES = ("0.5.",)
"""Supported releases; other releases are refused."""
GENERATE = "/generate"


class SGLang(Dialect):
    """An SGLang server."""

    unverified = (
        "support for SGLang follows its source and was never run against a real server; every push and the logprobs "
        "of the first batch are verified"
    )
    version_route = ("/get_server_info", "weight_version")
    token_bytes = 1024  # the id twice, a logprob, and the text: up to 128 characters, each up to 6 bytes in JSON
    reserved_tokens = 2  # SGLang's scheduler subtracts one from the context length, and one from the rest

    @classmethod
    def connect(cls, http: Http) -> SGLang | None:
        """Return the dialect with the server's facts, or None for another kind of server."""
        try:
            info = Fields(http.url, http.get("/get_server_info"))
        except RefusedError:
            return None
        if info.find("version") is None or info.find("model_path") is None:
            return None
        release = info.at("version").text()
        if not release.startswith(RELEASES):
            raise ConfigError(
                f"{http.url} runs SGLang {release}, but routes change between releases; install "
                f"{' or '.join(release + 'x' for release in RELEASES)}"
            )
        dtype = None if (found := info.find("dtype")) is None else found.text()
        if dtype in (None, "auto"):
            raise ConfigError(f"{http.url} reports dtype {dtype}; start SGLang with --dtype bfloat16")
        replicas = info.find("dp_size")
        if replicas is not None and replicas.integer() > 1:
            raise ConfigError(
                f"{http.url} runs with --dp-size {replicas.value}, but a push cannot be verified on every replica; "
                "start one server per replica"
            )
        length = info.find("context_length") or info.find("max_req_input_len")
        if length is None:
            raise ConfigError(f"{http.url} reports no context length; start SGLang with --context-length")
        facts = ServerFacts(
            kind="sglang",
            release=release,
            model=info.at("model_path").path_text(),
            max_seq_len=length.integer(2),
            logprobs_mode="processed",
            dtype=dtype,
            transports=frozenset({"disk"}),
        )
        return cls(facts, http.url)

    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Raise ConfigError if SGLang's logprobs differ from the definition in `ModelResponse`.

        SGLang returns logprobs after temperature scaling and before top_p and top_k. Greedy answers have logprobs at
        temperature 1. Seeds only have an effect with --enable-deterministic-inference. `ignore_eos` also disables
        `stop_token_ids`.
        """
        if gconfig.ignore_eos and gconfig.stop_token_ids:
            raise ConfigError(
                f"gconfig.ignore_eos is set with stop_token_ids {gconfig.stop_token_ids}, but SGLang ignores both ends "
                "together; unset ignore_eos, or remove stop_token_ids"
            )
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
            # ignore_eos would disable stop_token_ids, too (Req._check_token_based_finish). Without it, an answer may
            # end with an end-of-text id that only the server knows; `check_answer` refuses such an answer.
            "ignore_eos": not sampling.stop_token_ids,
            "no_stop_trim": True,
        }
        body = {"rid": _delimited_rid(sampling.rid), "input_ids": sampling.prompt, "sampling_params": params}
        return GENERATE, body | {"return_logprob": True, "logprob_start_len": -1, "stream": False}

    def answer(self, response: Fields) -> RawAnswer:
        """Return the fields of the answer in a response."""
        items = response.at("meta_info", "output_token_logprobs")
        return RawAnswer(
            tokens=response.at("output_ids"),
            logprobs=items.column(0),
            logprob_ids=items.column(1),
            reason=response.at("meta_info", "finish_reason", "type"),
            version=response.at("meta_info", "weight_version"),
        )

    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        """Return the logprobs of tokens 1 to L − 1 at temperature 1."""
        # Logprobs are computed after temperature scaling, and an answer has at least one token.
        params = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        asked = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        body = http.post(GENERATE, asked | {"stream": False}, seconds, self.answer_bytes(len(tokens)))
        items = self._fields(body).at("meta_info", "input_token_logprobs")
        if (ids := items.column(1)).value != list(tokens):
            raise ids.wrong("the ids of the request")
        return Fields(self._url, items.column(0).value[1:], f"{items.path}.*.0").logprobs(len(tokens) - 1)

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        """Return the server's token ids of a text; None if it has no tokenizer."""
        try:
            body = http.post("/tokenize", {"prompt": text, "add_special_tokens": False}, 60)
        except RefusedError:
            return None
        return self._fields(body).at("tokens").token_ids()

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
        loaded = self._fields(http.post("/update_weights_from_disk", body | {"flush_cache": True}, seconds))
        if loaded.at("success").value is not True:
            message = loaded.find("message")
            shown = "" if message is None else one_line(str(message.value))
            raise ServerError(f"{self._url} did not load the pushed weights: {shown}")
        http.command("/flush_cache", seconds=seconds)  # status 400 while requests use it
        return self.facts.model

    def start_for(self, transport: Transport) -> str:
        """Return that no option enables another transport than disk."""
        return "nothing: SGLang supports only disk; set rollout.push.transport to disk"


def _delimited_rid(rid: str) -> str:
    """Return a request id that is no prefix of another id: SGLang aborts all requests with a matching prefix."""
    return f"{rid}/"
