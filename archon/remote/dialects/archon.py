"""Protocol of `archon serve --push-root FOLDER`, which answers exactly like the in-process generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archon.generation.types import GenerationHyperparameters
from archon.remote.answer_checks import Fields, RawAnswer
from archon.remote.dialects.base import Dialect, Sampling, ServerFacts, Transport
from archon.remote.http import KEY, Http, RefusedError
from archon.schema.errors import ConfigError

ROUTES = "/v1/rollout"
POLICY = "policy"
"""Name of the pushed LoRA."""


class Archon(Dialect):
    """An archon server."""

    version_route = (ROUTES, "version")
    token_bytes = 128  # an id, a logprob of up to 25 characters, and a version

    @classmethod
    def connect(cls, http: Http) -> Archon | None:
        """Return the dialect with the server's facts, or None for another kind of server."""
        try:
            owner = Fields(http.url, http.get("/v1/models")).find("data", 0, "owned_by")
            if owner is None or owner.value != "archon":
                return None
            info = Fields(http.url, http.get(ROUTES))
        except RefusedError as error:
            if error.status in (401, 403):
                raise ConfigError(
                    f"{http.url} rejects the trainer's key; set {KEY} to the server's token, and start archon serve "
                    f"with --push-root ({error})"
                ) from None
            return None
        facts = ServerFacts(
            kind="archon",
            release=info.at("release").text(),
            model=info.at("model").path_text(),
            max_seq_len=info.at("max_seq_len").integer(2),
            logprobs_mode="processed",
            dtype=info.at("dtype").text(),
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

    def answer(self, response: Fields) -> RawAnswer:
        """Return the fields of the answer in a response."""
        return RawAnswer(
            tokens=response.at("output_ids"),
            logprobs=response.at("logprobs"),
            reason=response.at("stop_reason"),
            token_versions=response.at("versions"),
        )

    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        """Return the logprobs of tokens 1 to L − 1 at temperature 1."""
        asked = {"input_ids": list(tokens), "policy": model == POLICY}
        body = http.post(f"{ROUTES}/score", asked, seconds, self.answer_bytes(len(tokens)))
        return self._fields(body).at("logprobs").logprobs(len(tokens) - 1)

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        """Return the server's token ids of a text."""
        return self._fields(http.post(f"{ROUTES}/tokenize", {"text": text}, 60)).at("tokens").token_ids()

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

    def start_for(self, transport: Transport) -> str:
        """Return the options that enable pushes."""
        if transport not in ("disk", "lora"):
            return "nothing: archon serve supports only disk and lora; set rollout.push.transport"
        return "--push-root, a folder above rollout.push.folder, and --token"
