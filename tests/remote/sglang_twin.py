"""A server with SGLang's routes over archon's own generator, written from SGLang's documentation and source (0.5): real
weights and real answers. It refuses fields that SGLang does not have. SGLang itself was never asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from archon.checkpoint.hf_io import load_model
from archon.generation.types import GenerationHyperparameters, ModelRequest
from tests.remote.twin import VLLMTwin

SAMPLING_FIELDS = {"n", "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop"}
SAMPLING_FIELDS |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "sampling_seed", "stop_token_ids"}
SAMPLING_FIELDS |= {"ignore_eos", "no_stop_trim", "skip_special_tokens"}
GENERATE_FIELDS = {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"}
DISK_FIELDS = {"model_path", "weight_version", "abort_all_requests", "keep_pause", "flush_cache"}


class SGLangTwin(VLLMTwin):
    """Serves the model of `folder`; see `VLLMTwin`, whose own routes it does not have."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.info = settings.pop("info", {})
        super().__init__(folder, **{"release": "0.5.23"} | settings)

    def generated(self) -> list[dict[str, Any]]:
        return [body for path, body in self.requests if path == "/generate"]

    async def _on_version(self, body: Any, query: Any) -> Any:
        return web.json_response({"detail": "Not Found"}, status=404)

    _on_server_info = _on_pause = _on_resume = _on_inference_v1_generate = _on_version

    async def _on_v1_models(self, body: Any, query: Any) -> Any:
        return {"data": [{"id": "tiny", "owned_by": "sglang"}]}

    async def _on_get_server_info(self, body: Any, query: Any) -> Any:
        info = {"version": self.release, "model_path": "tiny", "dtype": self.dtype, "context_length": 64, "dp_size": 1}
        return info | {"weight_version": self.weight_version} | self.info

    async def _on_tokenize(self, body: Any, query: Any) -> Any:
        return await super()._on_tokenize(body, query)

    async def _on_pause_generation(self, body: Any, query: Any) -> Any:
        assert body["mode"] in ("abort", "in_place")
        self.engine.pause()
        if body["mode"] == "abort":
            self.engine.abort()
        return {"message": "paused"}

    async def _on_continue_generation(self, body: Any, query: Any) -> Any:
        self.engine.resume()
        return {"message": "continued"}

    async def _on_abort_request(self, body: Any, query: Any) -> Any:
        assert set(body) == {"rid", "abort_all"}
        for sequence in self.engine._generator.unfinished:
            if body["abort_all"] or sequence.request.rid.startswith(body["rid"]):
                self.engine.abort(sequence.request.rid)
        return web.Response(status=200)

    async def _on_flush_cache(self, body: Any, query: Any) -> Any:
        return web.Response(status=400 if self.engine.unfinished or "cache_in_use" in self.faults else 200)

    async def _on_update_weights_from_disk(self, body: Any, query: Any) -> Any:
        assert set(body) == DISK_FIELDS and body["flush_cache"] and body["abort_all_requests"]
        if "update" in self.faults:
            return web.json_response({"success": False, "message": "no such model"}, status=400)
        if "half" in self.faults:
            return {"success": False, "message": "half of it", "num_paused_requests": 0}
        if "forgetful" not in self.faults:
            self.engine.update_weights(load_model(Path(body["model_path"])), version=int(body["weight_version"]))
        self.weight_version = "7" if "version" in self.faults else body["weight_version"]
        return {"success": True, "message": "Succeeded", "num_paused_requests": 0}

    async def _on_generate(self, body: Any, query: Any) -> Any:
        params = body["sampling_params"]
        assert set(body) <= GENERATE_FIELDS and set(params) <= SAMPLING_FIELDS
        meta: dict[str, Any] = {"id": body.get("rid"), "weight_version": self.weight_version}
        if body["logprob_start_len"] == 0:
            scores = [None, *self.engine.score_prompt(body["input_ids"]).logprobs]
            places = zip(scores, body["input_ids"], strict=True)
            return {"meta_info": meta | {"input_token_logprobs": [[score, token, None] for score, token in places]}}
        if "hang" in self.faults:
            await asyncio.sleep(3600)
        greedy = params["temperature"] == 0
        assert params["n"] == 1 and params["top_k"] != 0
        gconfig = GenerationHyperparameters(
            max_new_tokens=params["max_new_tokens"],
            min_new_tokens=params["min_new_tokens"],
            greedy=greedy,
            temperature=1.0 if greedy else params["temperature"],
            top_p=params["top_p"],
            top_k=None if params["top_k"] == -1 else params["top_k"],
            stop=params["stop"],
            stop_token_ids=[] if params["ignore_eos"] else params["stop_token_ids"],  # as SGLang does
            ignore_eos=True,
            seed=params["sampling_seed"],
        )
        found = await self.engine.agenerate(ModelRequest(body["input_ids"], gconfig, rid=body["rid"]))
        places = zip(found.output_logprobs, found.output_tokens, strict=True)
        meta |= {"finish_reason": {"type": found.stop_reason}, "completion_tokens": len(found.output_tokens)}
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in places]
        if "garbage" in self.faults:
            meta["output_token_logprobs"].pop()
        return {"text": "", "output_ids": found.output_tokens, "meta_info": meta}
