"""The HTTP routes of the training service, with the paths and messages of the SDK."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import logging
from collections.abc import Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from tinker import types
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.join_sampling_session_request import JoinSamplingSessionRequest
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

from archon.schema.config import StrictModel
from archon.schema.errors import UserError
from archon.schema.exhausted import resource_error_message
from archon.serve.server import HTTPServer
from archon.serve.sessions import LimitError
from archon.serve.training.service import TrainingService
from archon.serve.training.store import Checkpoint
from archon.serve.training.wire import TooLargeError, inflate, parse

logger = logging.getLogger(__name__)

JSON_BYTES = 8 << 20
"""Maximum size of a JSON body; a prompt of a million tokens has 7 MB."""
MAX_PAGE = 1000
"""Maximum entries of a listing."""
PREFIX = "/api/v1"

app = FastAPI(title="archon training service", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)


class TrainingServer(HTTPServer, TrainingService):
    """Serves the training service on the caller's event loop."""

    def asgi(self) -> Any:
        """Return the app."""
        return app

    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Start to listen and return the base URL for `tinker.ServiceClient`; see `HTTPServer.listen`."""
        self.start()
        return await self.listen(host, port, self.tokens[0] if self.tokens else None)

    async def end(self) -> None:
        """Stop listening, then wait for the running batch and release everything."""
        await self.stop_listening()
        await self.close()


async def _error_response(request: Request, error: Exception) -> Response:
    """Return an error as JSON. The SDK repeats 408, 409, 429 and 5xx, and raises the others."""
    message = str(error)
    if isinstance(error, StarletteHTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        status = 400
        message = "; ".join(f"{entry['loc'][-1]}: {entry['msg']}" for entry in error.errors())
    elif isinstance(error, LimitError):
        status = 429
    elif isinstance(error, UserError):
        status = 413 if isinstance(error, TooLargeError) else 400
    elif (line := resource_error_message(error)) is not None:
        status, message = 503, line
    else:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        status, message = 500, f"internal error ({type(error).__name__}); the server's log has the details"
    return JSONResponse({"detail": message[:2000]}, status)


for _error_class in (StarletteHTTPException, RequestValidationError, UserError, RecursionError, Exception):
    app.add_exception_handler(_error_class, _error_response)


def _service(request: Request) -> TrainingService:
    service: TrainingService = request.state.service
    return service


def _owner(request: Request) -> str:
    """Return the client of a request; called before its body is read."""
    headers = request.headers
    key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    return _service(request).authorize(key, headers.get("host", ""), headers.get("origin"))


async def _body(request: Request, limit: int) -> bytes:
    """Return the body, decompressed; its size and time are limited while it arrives."""
    service, body = _service(request), bytearray()
    seconds = service.limits.request_seconds
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                service.reserve(len(chunk))
                body += chunk
                if len(body) > limit:
                    raise TooLargeError(f"the body is longer than {limit:,} bytes")
        async with service.parsing:
            return await asyncio.to_thread(inflate, bytes(body), request.headers.get("content-encoding", ""))
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {seconds:g} s", {"Connection": "close"}) from None
    finally:
        service.reserve(-len(body))


class WeightsPath(StrictModel):
    """Body of weights_info, for which the SDK has no message."""

    tinker_path: str


class TimeToLive(StrictModel):
    """Body that sets the time to live of a checkpoint, for which the SDK has no message."""

    ttl_seconds: int | None


Handler = Callable[[TrainingService, str, Any], Any]


def _post(path: str, model: type[Any], handler: Handler) -> None:
    """Add a route with a JSON message as body, whose response is the handler's result."""

    async def route(request: Request) -> Response:
        owner = _owner(request)
        message = parse(model, await _body(request, JSON_BYTES))
        return JSONResponse(handler(_service(request), owner, message))

    app.add_api_route(PREFIX + path, route, methods=["POST"])


def _touch(service: TrainingService, owner: str, message: Any) -> dict[str, str]:
    service.touch(owner, message.session_id)
    return {"type": "session_heartbeat"}


def _join(service: TrainingService, owner: str, message: Any) -> dict[str, int]:
    service.sampler_info(owner, message.sampling_session_id)
    return {"client_counter": service.store.next_clone(message.sampling_session_id)}


_post("/client/config", types.ClientConfigRequest, lambda service, owner, m: service.client_config(m.sdk_version))
_post("/client/dynamic_config", types.ClientConfigRequest, lambda service, owner, m: {"sample_cancel_enabled": True})
_post("/create_session", types.CreateSessionRequest, TrainingService.create_session)
_post("/session_heartbeat", SessionHeartbeatRequest, _touch)
_post("/create_model", types.CreateModelRequest, TrainingService.create_model)
_post("/get_info", types.GetInfoRequest, lambda service, owner, m: service.model_info(owner, m.model_id))
_post("/optim_step", types.OptimStepRequest, TrainingService.optim_step)
_post("/load_weights", types.LoadWeightsRequest, TrainingService.load_weights)
_post("/save_weights", types.SaveWeightsRequest, TrainingService.save)
_post("/save_weights_for_sampler", types.SaveWeightsForSamplerRequest, TrainingService.save)
_post("/save_weights_external", types.SaveWeightsExternalRequest, TrainingService.save)
_post("/create_sampling_session", types.CreateSamplingSessionRequest, TrainingService.create_sampler)
_post("/join_sampling_session", JoinSamplingSessionRequest, _join)
_post("/asample", types.SampleRequest, TrainingService.sample)


@app.get(f"{PREFIX}/healthz")
async def healthz() -> dict[str, str]:
    """Answer that the server runs."""
    return {"status": "ok"}


@app.post(f"{PREFIX}/telemetry")
async def telemetry(request: Request) -> dict[str, str]:
    """Accept telemetry, and drop it."""
    _owner(request)
    await _body(request, JSON_BYTES)
    return {"status": "accepted"}


@app.get(f"{PREFIX}/get_server_capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    """Name the base model."""
    _owner(request)
    service = _service(request)
    model = {
        "model_name": service.model,
        "max_context_length": service.sampler.generator.max_seq_len,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


@app.post(f"{PREFIX}/forward_backward")
async def forward_backward(request: Request) -> dict[str, Any]:
    """Queue a loss; the body is protobuf."""
    owner = _owner(request)
    service = _service(request)
    return await service.loss(owner, await _body(request, service.limits.body_bytes))


@app.post(f"{PREFIX}/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """Wait for a future. Status 408 asks the client to try again."""
    owner = _owner(request)
    future = parse(FutureRetrieveRequest, await _body(request, JSON_BYTES)).request_id
    result = await _service(request).retrieve(owner, future)
    if result is None:
        return JSONResponse({"type": "try_again", "request_id": future, "queue_state": "active"}, 408)
    body, is_proto = result
    return Response(body, media_type="application/x-protobuf" if is_proto else "application/json")


@app.post(f"{PREFIX}/cancel_future")
async def cancel_future(request: Request) -> Response:
    """Stop a sampling request."""
    owner = _owner(request)
    message = parse(FutureRetrieveRequest, await _body(request, JSON_BYTES))
    _service(request).cancel(owner, message.request_id)
    return Response(status_code=204)


@app.get(f"{PREFIX}/samplers/{{sampler}}")
async def sampler(request: Request, sampler: str) -> dict[str, Any]:
    """Describe a sampling session."""
    return _service(request).sampler_info(_owner(request), sampler)


# Sessions, training runs and checkpoints


@app.post(f"{PREFIX}/sessions/{{session}}/finish")
async def finish_session(request: Request, session: str) -> Response:
    """End a session."""
    owner, service = _owner(request), _service(request)
    service.touch(owner, session)
    service.end_session(session, "the session was closed")
    return Response(status_code=204)


@app.get(f"{PREFIX}/sessions")
async def sessions(request: Request) -> dict[str, Any]:
    """List the sessions of the client, the newest first."""
    owner, (offset, limit) = _owner(request), _page(request)
    rows = _service(request).store.query("SELECT id FROM sessions WHERE owner=? ORDER BY seen DESC", owner)
    return {"sessions": [row["id"] for row in rows[offset : offset + limit]]}


@app.get(f"{PREFIX}/sessions/{{session}}")
async def session(request: Request, session: str) -> dict[str, Any]:
    """Describe a session."""
    owner, store = _owner(request), _service(request).store
    rows = store.query("SELECT * FROM sessions WHERE id=? AND owner=?", session, owner)
    if not rows:
        raise HTTPException(404, f"this API key has no session {session!r:.80}")
    models = store.query("SELECT id FROM models WHERE session=?", session)
    samplers = store.query("SELECT id FROM samplers WHERE session=?", session)
    return {
        "training_run_ids": [row["id"] for row in models],
        "sampler_ids": [row["id"] for row in samplers],
        "user_metadata": json.loads(rows[0]["metadata"]),
        "display_name": rows[0]["name"],
    }


@app.get(f"{PREFIX}/training_runs")
async def training_runs(request: Request) -> dict[str, Any]:
    """List the models of the client, in memory or not."""
    owner, service, (offset, limit) = _owner(request), _service(request), _page(request)
    rows = service.store.query("SELECT * FROM models WHERE owner=? ORDER BY seen DESC", owner)
    runs = [_training_run(service, owner, row) for row in rows[offset : offset + limit]]
    return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(rows)}}


@app.get(f"{PREFIX}/training_runs/{{model}}")
async def training_run(request: Request, model: str) -> dict[str, Any]:
    """Describe a model."""
    owner, service = _owner(request), _service(request)
    rows = service.store.query("SELECT * FROM models WHERE id=? AND owner=?", model, owner)
    if not rows:
        raise HTTPException(404, f"this API key has no model {model!r:.120}")
    return _training_run(service, owner, rows[0])


def _training_run(service: TrainingService, owner: str, row: Any) -> dict[str, Any]:
    saved = service.store.checkpoints(owner, row["id"])
    newest = {kind: next((_shown(c) for c in saved if c.kind == kind), None) for kind in ("weights", "sampler_weights")}
    return {
        "training_run_id": row["id"],
        "base_model": service.model,
        "model_owner": owner[:16],
        "is_lora": True,
        "lora_rank": json.loads(row["config"])["rank"],
        "last_request_time": row["seen"],
        "last_checkpoint": newest["weights"],
        "last_sampler_checkpoint": newest["sampler_weights"],
        "user_metadata": json.loads(row["metadata"]),
    }


@app.get(f"{PREFIX}/checkpoints")
async def checkpoints(request: Request) -> dict[str, Any]:
    """List the checkpoints of the client, the newest first."""
    owner, (offset, limit) = _owner(request), _page(request)
    found = _service(request).store.checkpoints(owner)
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {"checkpoints": [_shown(checkpoint) for checkpoint in found[offset : offset + limit]], "cursor": cursor}


@app.get(f"{PREFIX}/training_runs/{{model}}/checkpoints")
async def model_checkpoints(request: Request, model: str) -> dict[str, Any]:
    """List the checkpoints of a model."""
    owner, service = _owner(request), _service(request)
    service.model_info(owner, model)
    return {"checkpoints": [_shown(checkpoint) for checkpoint in service.store.checkpoints(owner, model)]}


@app.post(f"{PREFIX}/weights_info")
async def weights_info(request: Request) -> dict[str, Any]:
    """Describe a checkpoint."""
    owner = _owner(request)
    body = parse(WeightsPath, await _body(request, JSON_BYTES))
    return _service(request).weights_info(owner, body.tinker_path)


_CHECKPOINT = f"{PREFIX}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}"


@app.delete(_CHECKPOINT)
async def delete_checkpoint(request: Request, model: str, kind: str, name: str) -> Response:
    """Delete a checkpoint."""
    _service(request).delete_checkpoint(_owner(request), f"tinker://{model}/{kind}/{name}")
    return Response(status_code=204)


@app.put(f"{_CHECKPOINT}/ttl")
async def set_ttl(request: Request, model: str, kind: str, name: str) -> Response:
    """Set the time to live of a checkpoint."""
    owner = _owner(request)
    body = parse(TimeToLive, await _body(request, JSON_BYTES))
    _service(request).set_ttl(owner, f"tinker://{model}/{kind}/{name}", body.ttl_seconds)
    return Response(status_code=204)


@app.get(f"{_CHECKPOINT}/external_weights_urls")
async def download_urls(request: Request, model: str, kind: str, name: str) -> dict[str, Any]:
    """Return a signed URL of each file of an external checkpoint."""
    base = str(request.base_url).rstrip("/")
    return _service(request).download_urls(_owner(request), f"tinker://{model}/{kind}/{name}", base)


@app.get(f"{PREFIX}/files/{{name:path}}")
async def download(request: Request, name: str, expires: int, signature: str) -> Response:
    """Return the file of a signed URL; the signature replaces the API key."""
    return FileResponse(_service(request).signed_file(name, expires, signature))


# The page


@app.get("/")
async def page(request: Request) -> Response:
    """Return the page, which has no data of its own; its script asks for the status."""
    text, policy = _page_text()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})


@app.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """Return the status of the client. A server without tokens (loopback only) returns the status of all clients."""
    owner, service = _owner(request), _service(request)
    return service.status(owner if service.tokens else None)


@functools.cache
def _page_text() -> tuple[str, str]:
    """Return the page and its content security policy: only its own script runs, and only this server is asked."""
    text = (resources.files("archon.serve.training") / "page.html").read_text(encoding="utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sources = f"connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return text, f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
async def unsupported(request: Request, path: str) -> Response:
    """Answer calls of the SDK that this server does not support."""
    _owner(request)
    raise HTTPException(404, f"{request.method} /{path:.200} is not supported by archon's training service")


def _page(request: Request) -> tuple[int, int]:
    """Return offset and limit of a listing."""
    values = {}
    for name, default in (("offset", 0), ("limit", 100)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal() or len(text) > 9:
            raise HTTPException(400, f"{name} is {text!r:.80}; expected a number from 0")
        values[name] = int(text)
    return values["offset"], min(values["limit"], MAX_PAGE)


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint in the SDK's form."""
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": kinds[checkpoint.kind],
        "time": checkpoint.time,
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "user_metadata": checkpoint.metadata,
        "expires_at": checkpoint.expires,
    }
