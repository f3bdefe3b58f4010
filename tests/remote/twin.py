"""A server with vLLM's routes over archon's own generator: real weights, real answers, and faults on request.

What it accepts and returns was copied from vLLM 0.32's source by name. It refuses fields that vLLM does not have, which
vLLM itself ignores without a word. Real vLLM is asked in `tests/vllm`.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from io import BytesIO
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from archon.checkpoint.hf_io import load_model
from archon.checkpoint.tokenizer import load_tokenizer
from archon.generation.inprocess import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.remote.versions import VERSIONS
from archon.remote.weight_stream import receive_tensors

SAMPLING_FIELDS = {"n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k"}
SAMPLING_FIELDS |= {"min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs"}
SAMPLING_FIELDS |= {"prompt_logprobs", "detokenize", "skip_special_tokens"}
GENERATE_FIELDS = {"request_id", "token_ids", "sampling_params", "model"}
STREAM_FIELDS = {"address", "port", "workers", "backend", "seconds"}
COMPLETION_FIELDS = SAMPLING_FIELDS | {"request_id", "prompt", "model", "return_token_ids"}


class VLLMTwin:
    """Serves the model of `folder` on a free port of loopback, in a thread with an event loop of its own.

    Attributes:
        requests: (path, body) of every request so far.
        calls: path and query of every request so far.
        sleeping: parts of the memory that are freed, with the setting `sleep_mode`.
        patched: of each update through a folder, whether only what changed was pushed.
        streamed: the bytes of each update that was broadcast.
        faults: names of what goes wrong, such as `stale_head`; tests add and remove them.
        answer_seconds: before an answer is begun.
        line_seconds: after an answer is complete, until it is sent.
        score_seconds: before tokens are scored.
    """

    def __init__(self, folder: Path, *, scale_out: bool = True, **settings: Any) -> None:
        self.release = settings.pop("release", "0.32.0")
        self.logprobs_mode = settings.pop("logprobs_mode", "raw_logprobs")
        self.backend = settings.pop("backend", "archon")
        self.lora = settings.pop("lora", False)
        self.dtype = settings.pop("dtype", "float32")
        self.reports_experts = settings.pop("reports_experts", False)
        self.sleep_mode = settings.pop("sleep_mode", False)
        max_slots = settings.pop("max_slots", 32)
        assert not settings
        self.scale_out = scale_out
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self._model = load_model(folder)
        self.engine = InProcessEngine.from_model(
            self._model, self.tokenizer, max_slots=max_slots, page_size=8, weights="snapshot"
        )
        if self.reports_experts:
            self.engine.record_experts()
        self._head = self.engine.model.output
        self.weight_version = "default"
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.calls: list[str] = []
        self.faults: set[str] = set()
        self.answer_seconds = self.line_seconds = self.score_seconds = 0.0
        self.updating = False
        self.sleeping: set[str] = set()
        self.patched: list[bool] = []
        self.streamed: list[int] = []
        self._kept = TemporaryDirectory()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def version(self) -> int:
        """The trainer's version of the pushed weights."""
        return int(self.weight_version) % VERSIONS

    @property
    def is_paused(self) -> bool:
        return not self._may_sample.is_set()

    def generated(self) -> list[dict[str, Any]]:
        """Return the bodies of the requests for answers."""
        return [body for path, body in self.requests if path == "/inference/v1/generate"]

    def stop(self) -> None:
        """End the server at once; unfinished requests lose their connection."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._may_sample = asyncio.Event()
        self._may_sample.set()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        path = f"/{request.match_info['path']}"
        self.requests.append((path, body))
        self.calls.append(str(request.rel_url))
        if "down" in self.faults:
            return web.json_response({"error": "the engine is dead"}, status=503)
        control = getattr(self, "_on" + path.replace("/", "_"), None)
        if control is None:
            return web.json_response({"error": f"no {path}"}, status=404)
        answer = await control(body, request.query)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async def _on_version(self, body: Any, query: Any) -> Any:
        return {"version": self.release}

    async def _on_v1_models(self, body: Any, query: Any) -> Any:
        return {"data": [{"id": "tiny", "owned_by": "vllm"}]}

    async def _on_server_info(self, body: Any, query: Any) -> Any:
        assert query["config_format"] == "json"
        model = {"logprobs_mode": self.logprobs_mode, "max_model_len": 64, "dtype": f"torch.{self.dtype}"}
        model["enable_sleep_mode"] = self.sleep_mode
        transfer = {"backend": self.backend} if self.backend else None
        lora = {"max_lora_rank": 8} if self.lora else None
        return {"vllm_config": {"model_config": model, "weight_transfer_config": transfer, "lora_config": lora}}

    async def _on_tokenize(self, body: Any, query: Any) -> Any:
        assert body["add_special_tokens"] is False
        tokens = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        return {"tokens": tokens[::-1] if "tokenizer" in self.faults else tokens}

    async def _on_pause(self, body: Any, query: Any) -> Any:
        self._may_sample.clear()
        if query["mode"] == "abort":
            self.engine.abort()
        else:
            self.engine.pause()
        return {"status": "paused"}

    async def _on_resume(self, body: Any, query: Any) -> Any:
        self.engine.resume()
        self._may_sample.set()
        return {"status": "resumed"}

    async def _on_sleep(self, body: Any, query: Any) -> Any:
        assert self.sleep_mode and query["level"] == "1"
        if "sleep" in self.faults:
            return web.json_response({"error": "EngineCore encountered an issue"}, status=500)
        await self._on_pause(body, query)
        self.sleeping = {"weights", "kv_cache"}
        return {"status": "sleeping", "level": 1}

    async def _on_wake_up(self, body: Any, query: Any) -> Any:
        self.sleeping -= set(query.getall("tags"))
        if not self.sleeping:
            await self._on_resume(body, query)
        return {"status": "sleeping" if self.sleeping else "awake"}

    async def _on_abort_requests(self, body: Any, query: Any) -> Any:
        names = [name.removeprefix("generate-tokens-") for name in body["request_ids"]]
        return {"aborted": sum(self.engine.abort(name) for name in names)}

    async def _on_reset_prefix_cache(self, body: Any, query: Any) -> Any:
        return {"success": "cache_in_use" not in self.faults}

    async def _on_get_world_size(self, body: Any, query: Any) -> Any:
        return {"world_size": 1}

    async def _on_start_weight_update(self, body: Any, query: Any) -> Any:
        assert "weights" not in self.sleeping, "there is no memory to load them into"
        self.updating = True
        return {}

    async def _on_update_weights(self, body: Any, query: Any) -> Any:
        info = body["update_info"]
        assert self.updating and set(info) in ({"folder"}, {"folder", "version", "since"}, STREAM_FIELDS)
        if "update" in self.faults:
            return web.json_response({"error": "EngineCore encountered an issue"}, status=500)
        if "address" in info:
            return await asyncio.to_thread(self._receive, info)
        folder, since = Path(info["folder"]), info.get("since")
        self.patched.append(since is not None)
        if since is not None:
            assert since == self.weight_version, "the elements that changed since another version"
            changes = load_file(folder / "delta.safetensors")
            whole = load_file(self.folder / "model.safetensors")
            for name, tensor in whole.items():
                tensor.view(-1)[changes[f"{name}.indices"].long()] = changes[f"{name}.values"]
            copytree(self.folder, folder / "whole")
            folder /= "whole"
            save_file(whole, folder / "model.safetensors", {"format": "pt"})
        self.folder = Path(self._kept.name) / f"{len(self.patched)}"
        copytree(folder, self.folder)
        self._model = load_model(folder)
        return {}

    def _receive(self, info: dict[str, Any]) -> Any:
        """Load the weights that the trainer broadcasts, unless it is to fail after the first."""
        stream = receive_tensors(**info, rank=1, device=torch.device("cpu"))
        if "stream" in self.faults:
            next(stream)
            return web.json_response({"error": "connection reset"}, status=500)
        weights = {name: tensor.clone() for name, tensor in stream}
        self.streamed.append(sum(tensor.nbytes for tensor in weights.values()))
        folder = Path(self._kept.name) / f"streamed-{len(self.streamed)}"
        copytree(self.folder, folder)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        self.folder, self._model = folder, load_model(folder)
        return {}

    async def _on_finish_weight_update(self, body: Any, query: Any) -> Any:
        self.updating = False
        self.weight_version = "7" if "version" in self.faults else body["weight_version"]
        model = self.engine.model
        model.output, embedding = self._head, model.tok_embeddings.weight
        old_head = torch.nn.Linear(*embedding.shape[::-1], bias=False)
        old_head.weight = torch.nn.Parameter(embedding.detach().clone())
        if "forgetful" not in self.faults:
            self.engine.update_weights(self._model, version=int(body["weight_version"]))
        if "stale_head" in self.faults:  # as vLLM's CPU build: the embedding is new, the packed copy of the head is not
            model.output = old_head
        return {}

    async def _on_weight_info(self, body: Any, query: Any) -> Any:
        return {"weight_version": self.weight_version}

    async def _on_inference_v1_generate(self, body: Any, query: Any) -> Any:
        if not self.scale_out:
            return web.json_response({"error": "forbidden"}, status=403)
        assert set(body) <= GENERATE_FIELDS and set(body["sampling_params"]) <= SAMPLING_FIELDS
        params = body["sampling_params"]
        if "prompt_logprobs" in params:
            assert not self.sleeping, "scores need the cache"
            await asyncio.sleep(self.score_seconds)
            return {"prompt_logprobs": self._scores(body["token_ids"])}
        await self._may_sample.wait()
        if "seed" not in params:  # of the connection
            return {"choices": [{}]}
        if "hang" in self.faults:
            await asyncio.sleep(3600)
        response = await self._answer(body["token_ids"], params, body["request_id"])
        content = zip(response.output_tokens, response.output_logprobs, strict=True)
        spans = [{"version": self.weight_version, "start": 0, "end": len(response.output_tokens)}]
        choice = {
            "token_ids": response.output_tokens,
            "finish_reason": response.stop_reason,
            "logprobs": {"content": [{"token_id": token, "logprob": logprob} for token, logprob in content]},
            "weight_versions": spans,
        }
        choice |= self._experts(response)
        if "garbage" in self.faults:
            choice["logprobs"]["content"].pop()
        return {"choices": [choice]}

    async def _on_v1_completions(self, body: Any, query: Any) -> Any:
        assert set(body) <= COMPLETION_FIELDS
        if "prompt_logprobs" in body:
            return {"choices": [{"prompt_logprobs": self._scores(body["prompt"])}]}
        response = await self._answer(body["prompt"], body, body["request_id"])
        choice = {
            "token_ids": response.output_tokens,
            "finish_reason": response.stop_reason,
            "logprobs": {"token_logprobs": response.output_logprobs},
        } | self._experts(response)
        return {"choices": [choice]}

    def _experts(self, response: Any) -> dict[str, str]:
        """As vLLM: of every layer, also of those without experts, whose rows are 0."""
        if not self.reports_experts:
            return {}
        args, own = self.engine.model.args, response.routed_experts
        experts = np.zeros((len(own), args.n_layers, own.shape[2]), own.dtype)
        experts[:, list(args.expert_layers)] = own
        if "experts" in self.faults:
            experts = experts[1:]
        with BytesIO() as file:
            np.save(file, experts)
            return {"routed_experts": base64.b64encode(file.getvalue()).decode()}

    def _scores(self, tokens: list[int]) -> list[Any]:
        scores = self.engine.score_prompt(tokens).logprobs
        places = zip(tokens[1:], scores, strict=True)
        return [None, *({str(token): {"logprob": logprob, "rank": 1}} for token, logprob in places)]

    async def _answer(self, prompt: list[int], params: dict[str, Any], rid: str) -> Any:
        assert params["ignore_eos"] and params["n"] == 1 and params["logprobs"] == 0
        gconfig = GenerationHyperparameters(
            max_new_tokens=params["max_tokens"],
            min_new_tokens=params["min_tokens"],
            greedy=params["temperature"] == 0,
            temperature=params["temperature"] or 1.0,
            top_p=params["top_p"],
            top_k=params["top_k"] or None,
            stop=params["stop"],
            stop_token_ids=params["stop_token_ids"],
            ignore_eos=True,
            seed=params["seed"],
        )
        await asyncio.sleep(self.answer_seconds)
        while "until_paused" in self.faults and self._may_sample.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await self._may_sample.wait()
        response = await self.engine.agenerate(ModelRequest(prompt, gconfig, rid=rid))
        await asyncio.sleep(self.line_seconds)
        return response
