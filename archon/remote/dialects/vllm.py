"""Protocol of vLLM 0.32.

With `--enable-scale-out`, requests go to `/inference/v1/generate`, which reports the weight version of each token.
Otherwise they go to `/v1/completions`. Control routes need VLLM_SERVER_DEV_MODE=1, so the server must listen on
loopback or in a private network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from archon.generation.types import GenerationHyperparameters
from archon.remote.answer_checks import Fields, RawAnswer
from archon.remote.dialects.base import Dialect, LogprobsMode, Sampling, ServerFacts, SleepTag, Transport
from archon.remote.http import Http, RefusedError, ServerError
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
MAX_WORKERS = 4096
"""Processes of one server."""


class VLLM(Dialect):
    """A vLLM server."""

    version_route = ("/weight_info", "weight_version")
    # The generate route repeats the text and the bytes of each token, of up to 128 characters, in two lists. A server
    # may report routed experts without being asked: 3 KiB for 60 layers with 8 experts as int32.
    token_bytes = 4096

    def __init__(self, facts: ServerFacts, url: str, *, generates: bool) -> None:
        super().__init__(facts, url)
        self._has_generate_route = generates

    @classmethod
    def connect(cls, http: Http) -> VLLM | None:
        """Return the dialect with the server's facts, or None for another kind of server."""
        try:
            version = Fields(http.url, http.get("/version")).find("version")
            served = Fields(http.url, http.get("/v1/models")).find("data", 0)
        except RefusedError:
            return None
        owner = None if served is None else served.find("owned_by")
        if version is None or served is None or owner is None or owner.value != "vllm":
            return None
        release = version.text()
        if not release.startswith(RELEASES):
            raise ConfigError(
                f"{http.url} runs vLLM {release}, but routes change between releases; install "
                f"{' or '.join(release + 'x' for release in RELEASES)}"
            )
        try:
            config = Fields(http.url, http.get("/server_info?config_format=json", seconds=60)).at("vllm_config")
        except RefusedError:
            raise ConfigError(
                f"{http.url}: vLLM has no control routes; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from None
        http.command("/resume")  # a crashed trainer may have left it paused, which would block the next request
        mode = config.at("model_config", "logprobs_mode").text()
        if mode not in _MODES:
            raise ConfigError(f"{http.url}: --logprobs-mode is {mode}; expected {' or '.join(_MODES)}")
        transports: set[Transport] = set()
        backend = config.find("weight_transfer_config", "backend")
        if backend is not None and backend.value == EXTENSION_BACKEND:
            transports |= {"disk", "delta", "gloo", "nccl"}
        if (lora := config.find("lora_config")) is not None and lora.value:
            transports.add("lora")
        sleep = config.find("model_config", "enable_sleep_mode")
        facts = ServerFacts(
            kind="vllm",
            release=release,
            model=served.at("id").path_text(),
            max_seq_len=config.at("model_config", "max_model_len").integer(2),
            logprobs_mode=_MODES[mode],
            dtype=config.at("model_config", "dtype").text().removeprefix("torch."),
            transports=frozenset(transports),
            can_sleep=sleep is not None and sleep.value is True,
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

    def answer(self, response: Fields) -> RawAnswer:
        """Return the fields of the answer in a response."""
        choice = response.at("choices", 0)
        # An answer without tokens has null in place of lists.
        tokens = choice.find("token_ids") or choice.empty("token_ids")
        reason, experts = choice.at("finish_reason"), choice.find("routed_experts")
        if not self._has_generate_route:
            logprobs = choice.find("logprobs", "token_logprobs") or choice.empty("logprobs", "token_logprobs")
            return RawAnswer(tokens, logprobs, reason, experts=experts)
        items = choice.find("logprobs", "content") or choice.empty("logprobs", "content")
        return RawAnswer(
            tokens,
            items.column("logprob"),
            reason,
            logprob_ids=items.column("token_id"),
            spans=choice.find("weight_versions"),
            experts=experts,
        )

    def score(self, http: Http, model: str, tokens: Sequence[int], seconds: float) -> list[float]:
        """Return the logprobs of tokens 1 to L − 1 at temperature 1."""
        params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0}
        limit = self.answer_bytes(len(tokens))
        if self._has_generate_route:
            params |= {"detokenize": False}
            asked = {"model": model, "token_ids": list(tokens), "sampling_params": params}
            scores = self._fields(http.post(GENERATE, asked, seconds, limit)).at("prompt_logprobs")
        else:
            asked = {"model": model, "prompt": list(tokens), **params}
            scores = self._fields(http.post(COMPLETIONS, asked, seconds, limit)).at("choices", 0, "prompt_logprobs")
        values = [scores.at(index, str(token), "logprob").value for index, token in enumerate(tokens) if index]
        return Fields(http.url, values, f"{scores.path}.*.logprob").logprobs(len(tokens) - 1)

    def token_ids(self, http: Http, text: str) -> list[int] | None:
        """Return the server's token ids of a text; None if it has no tokenizer."""
        try:
            body = http.post("/tokenize", {"model": self.facts.model, "prompt": text, "add_special_tokens": False}, 60)
        except RefusedError:
            return None
        return self._fields(body).at("tokens").token_ids()

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
        workers = self._fields(http.get("/get_world_size")).at("world_size").integer(1, MAX_WORKERS)
        sender = Sender(urlsplit(http.url).hostname or "", workers, transport, seconds)
        info = {"address": sender.address, "port": sender.port, "workers": workers, "backend": transport}
        http.command("/start_weight_update", seconds=seconds)
        with ThreadPoolExecutor(1) as pool:
            update = {"update_info": info | {"seconds": seconds}}
            _broadcast(sender, buckets, pool.submit(http.command, "/update_weights", update, seconds), http.url)
        http.command("/finish_weight_update", {"weight_version": str(version)}, seconds)
        return self._reset_prefix_cache(http, seconds, self.facts.model)

    def _reset_prefix_cache(self, http: Http, seconds: float, model: str) -> str:
        """Clear the prefix cache and return `model`."""
        if self._fields(http.post("/reset_prefix_cache", seconds=seconds)).at("success").value is not True:
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
