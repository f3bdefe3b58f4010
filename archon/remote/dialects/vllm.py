"""vLLM's routes, as of 0.32: `/inference/v1/generate`, which names the versions of an answer's tokens, or
`/v1/completions` where the server was started without `--enable-scale-out`.

The control routes exist only with VLLM_SERVER_DEV_MODE=1, so such a server listens on loopback or in a private network.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from archon.generation.types import GenerationHyperparameters, StopReason
from archon.remote.dialects.base import (
    Answer,
    Dialect,
    LogprobsMode,
    Sampling,
    ServerFacts,
    Transport,
    finite_logprobs,
    get_path,
)
from archon.remote.http import CONNECT_SECONDS, Http, RefusedError, ServerError
from archon.remote.weight_stream import Bucket, Sender
from archon.schema.errors import ConfigError

RELEASES = ("0.32.",)
"""The releases whose routes were tested; others are refused."""
EXTENSION_BACKEND = "archon"
"""The weight-transfer backend of `archon.serve.vllm_extension`."""
LORA_NAME = "policy"
"""The adapter's name on the server."""
MIN_TEMPERATURE = 0.01
"""vLLM samples lower temperatures at this one."""
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_MODES: dict[str, LogprobsMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VLLM(Dialect):
    """A server of vLLM's."""

    def __init__(self, facts: ServerFacts, url: str, *, generates: bool) -> None:
        self.facts, self._url = facts, url
        self._has_generate_route = generates

    @classmethod
    def connect(cls, http: Http) -> VLLM | None:
        try:
            release = http.get("/version")["version"]
            served = http.get("/v1/models")["data"][0]
        except (RefusedError, KeyError, IndexError, TypeError):
            return None
        if served.get("owned_by") != "vllm":
            return None
        if not release.startswith(RELEASES):
            raise ConfigError(
                f"{http.url} is vLLM {release}; its routes change between releases, and those of "
                f"{', '.join(release + 'x' for release in RELEASES)} were tested: install one of these"
            )
        try:
            config = http.get("/server_info?config_format=json", seconds=60)["vllm_config"]
        except RefusedError:
            raise ConfigError(
                f"{http.url}: this vLLM has no control routes; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from None
        http.command("/resume")  # a trainer that died may have left it paused, and what comes now waits for an answer
        mode = config["model_config"]["logprobs_mode"]
        if mode not in _MODES:
            raise ConfigError(f"{http.url}: --logprobs-mode is {mode}; expected {' or '.join(_MODES)}")
        transports: set[Transport] = set()
        if (config.get("weight_transfer_config") or {}).get("backend") == EXTENSION_BACKEND:
            transports |= {"disk", "delta", "gloo", "nccl"}
        if config.get("lora_config"):
            transports.add("lora")
        facts = ServerFacts(
            kind="vllm",
            release=release,
            model=served["id"],
            max_seq_len=int(config["model_config"]["max_model_len"]),
            logprobs_mode=_MODES[mode],
            dtype=str(config["model_config"]["dtype"]).removeprefix("torch."),
            transports=frozenset(transports),
        )
        return cls(facts, http.url, generates=_has_generate_route(http))

    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Raise ConfigError where vLLM's logprobs would not be those of `ModelResponse`.

        Raw ones are those of temperature 1. Processed ones are those of what was sampled from: of the temperature, but
        also without the tokens that top_p, top_k and min_new_tokens cut; of a greedy answer those of temperature 1.
        """
        url = f"vLLM {self.facts.release}"
        if not gconfig.greedy and gconfig.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"gconfig.temperature: got {gconfig.temperature}, and {url} samples below {MIN_TEMPERATURE} at that; "
                "set greedy, or a higher one"
            )
        scaled = gconfig.temperature != 1
        if scaled and (self.facts.logprobs_mode == "raw" or gconfig.greedy):
            fix = "leave it at 1 for greedy" if gconfig.greedy else "start it with --logprobs-mode processed_logprobs"
            raise ConfigError(
                f"gconfig.temperature: got {gconfig.temperature}, and this {url} gives logprobs of temperature 1 for "
                f"it; {fix}, or sample at temperature 1"
            )
        cut = {"top_p": gconfig.top_p < 1, "top_k": gconfig.top_k is not None, "min_new_tokens": gconfig.min_new_tokens}
        for name, is_cut in cut.items():
            if is_cut and self.facts.logprobs_mode == "processed" and not gconfig.greedy:
                raise ConfigError(
                    f"gconfig.{name}: got {getattr(gconfig, name)}, and this {url} (--logprobs-mode "
                    "processed_logprobs) gives logprobs without the tokens that it cuts; start it with raw_logprobs"
                )

    def request(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        g = sampling.gconfig
        params: dict[str, Any] = sampling.common_params() | {
            "max_tokens": sampling.limit,
            "min_tokens": min(g.min_new_tokens, sampling.limit),
            "top_k": 0 if g.greedy or g.top_k is None else g.top_k,
            "seed": sampling.seed,
            # The server's own ids may be others than the tokenizer's; those that end an answer are named above.
            "ignore_eos": True,
            "logprobs": 0,
        }
        if self._has_generate_route:
            params["detokenize"] = bool(g.stop)
            body = {
                "request_id": sampling.rid,
                "model": sampling.model,
                "token_ids": sampling.prompt,
                "sampling_params": params,
            }
            return GENERATE, body
        body = {"request_id": sampling.rid, "model": sampling.model, "prompt": sampling.prompt, **params}
        return COMPLETIONS, body | {"return_token_ids": True}

    def answer(self, body: Any) -> Answer:
        where, choice = self._url, self._field(body, "choices", 0)
        tokens, reason = list(self._field(choice, "token_ids") or []), self._field(choice, "finish_reason")
        spans: list[tuple[str, int, int]] = []
        if self._has_generate_route:
            content = self._field(choice, "logprobs", "content") or []
            logprobs = [self._field(item, "logprob") for item in content]
            named = [self._field(item, "token_id") for item in content]
            for span in self._field(choice, "weight_versions") or []:
                spans.append((self._field(span, "version"), self._field(span, "start"), self._field(span, "end")))
        else:
            logprobs, named = self._field(choice, "logprobs", "token_logprobs"), tokens
        if len(logprobs) != len(tokens) or named != tokens:
            raise ServerError(f"{where}: {len(tokens)} tokens came with {len(logprobs)} logprobs, or those of others")
        if reason not in _REASONS:
            raise ServerError(f"{where}: finish_reason is {reason!r}; expected one of {', '.join(_REASONS)}")
        return Answer(tokens, finite_logprobs(logprobs, where), _REASONS[reason], spans, self._experts(choice))

    def _experts(self, choice: dict[str, Any]) -> np.ndarray | None:
        """Return the experts in an answer's choice, of a server with --enable-return-routed-experts."""
        text = choice.get("routed_experts")
        if text is None:
            return None
        try:
            experts: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        except (ValueError, TypeError, EOFError) as error:
            raise ServerError(f"{self._url}: routed_experts is not an array in base64: {error}") from None
        return experts

    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0}
        if self._has_generate_route:
            params |= {"detokenize": False}
            body = http.post(GENERATE, {"model": model, "token_ids": list(tokens), "sampling_params": params}, seconds)
            found = self._field(body, "prompt_logprobs")
        else:
            body = http.post(COMPLETIONS, {"model": model, "prompt": list(tokens), **params}, seconds)
            found = self._field(body, "choices", 0, "prompt_logprobs")
        return finite_logprobs(
            [self._field(found, place, str(token), "logprob") for place, token in enumerate(tokens) if place], http.url
        )

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        try:
            found = http.post("/tokenize", {"model": self.facts.model, "prompt": text, "add_special_tokens": False}, 60)
        except RefusedError:
            return None
        return list(self._field(found, "tokens"))

    def pause(self, http: Http, *, abort: bool) -> None:
        http.command(f"/pause?mode={'abort' if abort else 'keep'}", seconds=60)

    def resume(self, http: Http) -> None:
        http.command("/resume")

    def abort(self, http: Http, rid: str) -> None:
        name = f"generate-tokens-{rid}" if self._has_generate_route else f"cmpl-{rid}-0"
        http.command("/abort_requests", {"request_ids": [name]})

    def load(
        self, http: Http, transport: Transport, folder: str, version: int, seconds: float, since: int | None
    ) -> str:
        if transport == "lora":
            lora = {"lora_name": LORA_NAME, "lora_path": folder, "load_inplace": True}
            http.command("/v1/load_lora_adapter", lora, seconds)
            http.command("/update_weight_version", {"new_version": str(version)}, seconds)
            return self._reset_prefix_cache(http, seconds, LORA_NAME)
        info: dict[str, Any] = {"folder": folder}
        if transport == "delta":
            info |= {"version": str(version), "since": None if since is None else str(since)}
        http.command("/start_weight_update", seconds=seconds)
        http.command("/update_weights", {"update_info": info}, seconds)
        http.command("/finish_weight_update", {"weight_version": str(version)}, seconds)
        return self._reset_prefix_cache(http, seconds, self.facts.model)

    def receive(self, http: Http, transport: Transport, buckets: Iterable[Bucket], version: int, seconds: float) -> str:
        workers = int(self._field(http.get("/get_world_size"), "world_size"))
        sender = Sender(urlsplit(http.url).hostname or "", workers, transport, seconds)
        info = {"address": sender.address, "port": sender.port, "workers": workers, "backend": transport}
        http.command("/start_weight_update", seconds=seconds)
        with ThreadPoolExecutor(1) as pool:
            update = {"update_info": info | {"seconds": seconds}}
            _broadcast(sender, buckets, pool.submit(http.command, "/update_weights", update, seconds), http.url)
        http.command("/finish_weight_update", {"weight_version": str(version)}, seconds)
        return self._reset_prefix_cache(http, seconds, self.facts.model)

    def version(self, http: Http) -> str:
        return str(self._field(http.get("/weight_info", CONNECT_SECONDS), "weight_version"))

    def _reset_prefix_cache(self, http: Http, seconds: float, model: str) -> str:
        """Empty the prefix cache; returns `model`."""
        if not self._field(http.post("/reset_prefix_cache", seconds=seconds), "success"):
            raise ServerError(f"{http.url}: the prefix cache is in use and keeps what the old weights computed")
        return model

    def start_for(self, transport: Transport) -> str:
        if transport == "lora":
            return "--enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        extension = "--worker-extension-cls archon.serve.vllm_extension.Extension"
        return f'{extension} --weight-transfer-config \'{{"backend": "{EXTENSION_BACKEND}"}}\''

    def _field(self, body: Any, *path: str | int) -> Any:
        return get_path(body, self._url, *path)


def _broadcast(sender: Sender, buckets: Iterable[Bucket], loading: Future[None], url: str) -> None:
    """Send while the request `loading` runs, whose error says more than that of a connection that it broke."""
    failure: Exception | None = None
    try:
        if sender.connect(loading.done):
            sender.send(buckets)
    except (RuntimeError, TimeoutError) as error:
        failure = error
    finally:
        sender.close()
    loading.result()
    if failure is not None:
        raise ServerError(f"{url}: the broadcast of weights failed: {failure}")


def _has_generate_route(http: Http) -> bool:
    """Return whether the server has `GENERATE`; without `--enable-scale-out` its status is 403 or 404."""
    try:
        http.post(GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}, seconds=60)
    except RefusedError as error:
        return error.status not in (403, 404)
    return True
