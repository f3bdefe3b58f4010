"""Protocol of vLLM 0.32.

With `--enable-scale-out`, requests go to `/inference/v1/generate`, which reports the weight version of each token.
Otherwise they go to `/v1/completions`. Control routes need VLLM_SERVER_DEV_MODE=1, so the server must listen on
loopback or in a private network.
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
    SleepTag,
    Transport,
    finite_logprobs,
)
from archon.remote.http import CONNECT_SECONDS, Http, RefusedError, ServerError
from archon.remote.weight_stream import Bucket, Sender
from archon.schema.errors import ConfigError

RELEASES = ("0.32.",)
"""Tested releases; other releases are refused."""
EXTENSION_BACKEND = "archon"
"""Name of the weight-transfer backend in `archon.serve.vllm_extension`."""
LORA_NAME = "policy"
"""Name of the pushed LoRA on the server."""
MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value."""
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_MODES: dict[str, LogprobsMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VLLM(Dialect):
    """A vLLM server."""

    def __init__(self, facts: ServerFacts, url: str, *, generates: bool) -> None:
        super().__init__(facts, url)
        self._has_generate_route = generates

    @classmethod
    def connect(cls, http: Http) -> VLLM | None:
        """Return the dialect with the server's facts, or None for another kind of server."""
        try:
            release = http.get("/version")["version"]
            served = http.get("/v1/models")["data"][0]
        except (RefusedError, KeyError, IndexError, TypeError):
            return None
        if served.get("owned_by") != "vllm":
            return None
        if not release.startswith(RELEASES):
            raise ConfigError(
                f"{http.url} runs vLLM {release}, but routes change between releases; install "
                f"{' or '.join(release + 'x' for release in RELEASES)}"
            )
        try:
            config = http.get("/server_info?config_format=json", seconds=60)["vllm_config"]
        except RefusedError:
            raise ConfigError(
                f"{http.url}: vLLM has no control routes; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from None
        http.command("/resume")  # a crashed trainer may have left it paused, which would block the next request
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
            can_sleep=bool(config["model_config"].get("enable_sleep_mode")),
        )
        return cls(facts, http.url, generates=_has_generate_route(http))

    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Raise ConfigError if vLLM's logprobs differ from the definition in `ModelResponse`.

        Raw logprobs are at temperature 1. Processed logprobs are at the sampling temperature, but renormalized after
        top_p, top_k and min_new_tokens. Greedy answers always have logprobs at temperature 1.
        """
        url = f"vLLM {self.facts.release}"
        if not gconfig.greedy and gconfig.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"gconfig.temperature is {gconfig.temperature}, but {url} raises it to {MIN_TEMPERATURE}; set greedy, "
                "or a higher temperature"
            )
        scaled = gconfig.temperature != 1
        if scaled and (self.facts.logprobs_mode == "raw" or gconfig.greedy):
            fix = "" if gconfig.greedy else "start it with --logprobs-mode processed_logprobs, or "
            raise ConfigError(
                f"gconfig.temperature is {gconfig.temperature}, but this {url} returns logprobs at temperature 1; "
                f"{fix}set temperature to 1"
            )
        cut = {"top_p": gconfig.top_p < 1, "top_k": gconfig.top_k is not None, "min_new_tokens": gconfig.min_new_tokens}
        for name, is_cut in cut.items():
            if is_cut and self.facts.logprobs_mode == "processed" and not gconfig.greedy:
                raise ConfigError(
                    f"gconfig.{name} is {getattr(gconfig, name)}, but this {url} renormalizes logprobs after it; start "
                    "it with --logprobs-mode raw_logprobs"
                )

    def request(self, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """Return path and body of a generation request."""
        g = sampling.gconfig
        params: dict[str, Any] = sampling.common_params() | {
            "max_tokens": sampling.limit,
            "min_tokens": min(g.min_new_tokens, sampling.limit),
            "top_k": 0 if g.greedy or g.top_k is None else g.top_k,
            "seed": sampling.seed,
            # The server's end-of-text ids may differ from the tokenizer's; stop_token_ids has the right ones.
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
        """Return the answer in a response."""
        where, choice = self._url, self._field(body, "choices", 0)
        tokens, reason = list(self._field(choice, "token_ids") or []), self._field(choice, "finish_reason")
        spans: list[tuple[str, int, int]] = []
        if self._has_generate_route:
            content = self._field(choice, "logprobs", "content") or []
            logprobs = [self._field(item, "logprob") for item in content]
            ids = [self._field(item, "token_id") for item in content]
            for span in self._field(choice, "weight_versions") or []:
                spans.append((self._field(span, "version"), self._field(span, "start"), self._field(span, "end")))
        else:
            logprobs, ids = self._field(choice, "logprobs", "token_logprobs"), tokens
        if len(logprobs) != len(tokens) or ids != tokens:
            raise ServerError(f"{where} sent {len(logprobs)} logprobs that do not match its {len(tokens)} tokens")
        if reason not in _REASONS:
            raise ServerError(f"{where}: finish_reason is {reason!r}; expected one of {', '.join(_REASONS)}")
        return Answer(tokens, finite_logprobs(logprobs, where), _REASONS[reason], spans, self._experts(choice))

    def _experts(self, choice: dict[str, Any]) -> np.ndarray | None:
        """Return the routed experts of a choice; None without --enable-return-routed-experts."""
        text = choice.get("routed_experts")
        if text is None:
            return None
        try:
            experts: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        except (ValueError, TypeError, EOFError) as error:
            raise ServerError(f"{self._url}: routed_experts is not a base64 array: {error}") from None
        return experts

    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        """Return the logprobs of tokens 1 to L − 1 at temperature 1."""
        params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0}
        if self._has_generate_route:
            params |= {"detokenize": False}
            body = http.post(GENERATE, {"model": model, "token_ids": list(tokens), "sampling_params": params}, seconds)
            scores = self._field(body, "prompt_logprobs")
        else:
            body = http.post(COMPLETIONS, {"model": model, "prompt": list(tokens), **params}, seconds)
            scores = self._field(body, "choices", 0, "prompt_logprobs")
        return finite_logprobs(
            [self._field(scores, index, str(token), "logprob") for index, token in enumerate(tokens) if index], http.url
        )

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        """Return the server's token ids of a text; None if it has no tokenizer."""
        try:
            body = http.post("/tokenize", {"model": self.facts.model, "prompt": text, "add_special_tokens": False}, 60)
        except RefusedError:
            return None
        return list(self._field(body, "tokens"))

    def pause(self, http: Http, *, abort: bool) -> None:
        """Stop sampling; `abort` ends unfinished answers."""
        http.command(f"/pause?mode={'abort' if abort else 'keep'}", seconds=60)

    def resume(self, http: Http) -> None:
        """Continue sampling."""
        http.command("/resume")

    def sleep(self, http: Http, seconds: float) -> None:
        """Sleep at level 1: the KV cache is dropped, and the weights move to host memory."""
        http.command("/sleep?level=1&mode=abort", seconds=seconds)

    def wake(self, http: Http, tag: SleepTag, seconds: float) -> None:
        """Take back the weights or the KV cache."""
        http.command(f"/wake_up?tags={tag}", seconds=seconds)

    def abort(self, http: Http, rid: str) -> None:
        """End a request."""
        name = f"generate-tokens-{rid}" if self._has_generate_route else f"cmpl-{rid}-0"
        http.command("/abort_requests", {"request_ids": [name]})

    def load(
        self, http: Http, transport: Transport, folder: str, version: int, seconds: float, since: int | None
    ) -> str:
        """Load a checkpoint, a delta or a LoRA from a folder."""
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
        """Broadcast buckets to the server's workers."""
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
        """Return the version of the server's weights."""
        return str(self._field(http.get("/weight_info", CONNECT_SECONDS), "weight_version"))

    def _reset_prefix_cache(self, http: Http, seconds: float, model: str) -> str:
        """Clear the prefix cache and return `model`."""
        if not self._field(http.post("/reset_prefix_cache", seconds=seconds), "success"):
            raise ServerError(f"{http.url}: the prefix cache is in use and keeps results of the old weights")
        return model

    def start_for(self, transport: Transport) -> str:
        """Return the options and environment that enable pushes."""
        if transport == "lora":
            return "--enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        extension = "--worker-extension-cls archon.serve.vllm_extension.Extension"
        return f'{extension} --weight-transfer-config \'{{"backend": "{EXTENSION_BACKEND}"}}\''


def _broadcast(sender: Sender, buckets: Iterable[Bucket], loading: Future[None], url: str) -> None:
    """Send buckets while the request `loading` runs. Its error is raised before the error of the broken broadcast."""
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
    """Return whether the server has `GENERATE`. Without `--enable-scale-out` the status is 403 or 404."""
    try:
        http.post(GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}, seconds=60)
    except RefusedError as error:
        return error.status not in (403, 404)
    return True
