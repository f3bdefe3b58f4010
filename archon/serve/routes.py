"""The endpoints: their paths, what they take and return, and how they are described at /openapi.json."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from archon.schema.config import StrictModel
from archon.schema.errors import UserError
from archon.serve.answer_text import Delta, load_json
from archon.serve.answering import Choice, answer
from archon.serve.anthropic_api import CountBody, Message, MessagesApi, MessagesBody
from archon.serve.api import Api, Count, Integer, RequestModel, ResponseModel, event_bytes
from archon.serve.errors import error_body, error_model, failure_of
from archon.serve.openai_chat import ChatApi, ChatBody, ChatCompletion, Completion, CompletionApi, CompletionBody
from archon.serve.responses_api import OpenAIResponse, ResponsesApi, ResponsesBody
from archon.serve.service import Service
from archon.serve.sessions import Caller, ExportStyle, Session

T = TypeVar("T")

ACCESS, BODY = (401, 403), (400, 408, 413, 415)

_bearer, _api_key = HTTPBearer(auto_error=False), APIKeyHeader(name="x-api-key", auto_error=False)


def _service(request: Request) -> Service:
    service: Service = request.state.service
    return service


class StrictRequest(Request):
    """Reads its body as a JSON object, within the server's limits."""

    async def body(self) -> bytes:
        content_type = self.headers.get("content-type", "")
        # application/json is what no page elsewhere can send without being asked first
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, f"content type {content_type!r:.80}: send application/json")
        limits = _service(self).limits
        body = bytearray()
        try:
            async with asyncio.timeout(limits.request_seconds):
                async for chunk in self.stream():
                    body += chunk
                    if len(body) > limits.body_bytes:
                        message = f"the body is longer than {limits.body_bytes} bytes"
                        raise HTTPException(413, message, {"Connection": "close"})
        except TimeoutError:
            message = f"the body did not come within {limits.request_seconds:g} s"
            raise HTTPException(408, message, {"Connection": "close"}) from None
        try:
            self._data = load_json(bytes(body))
        except ValueError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None
        if not isinstance(self._data, dict):
            raise HTTPException(400, f"the body is a JSON {type(self._data).__name__}, expected an object")
        return bytes(body)

    async def json(self) -> Any:
        return self._data


class AuthorizedRoute(APIRoute):
    """Finds out who asks before the body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def authorized(request: Request) -> Response:
            bearer = await _bearer(request)
            key = bearer.credentials if bearer is not None else await _api_key(request)
            host, origin = request.headers.get("host", ""), request.headers.get("origin")
            request.state.caller = _service(request).caller(key or "", host, origin)
            return await handle(StrictRequest(request.scope, request.receive))

        return authorized


class App(FastAPI):
    """Describes itself without the status 422, which here is 400."""

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        for operations in described["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return described


app = App(
    title="archon",
    version="1",
    docs_url=None,
    redoc_url=None,
    redirect_slashes=False,
    generate_unique_id_function=lambda route: route.name,
)
router = APIRouter(prefix="/v1", route_class=AuthorizedRoute, dependencies=[Security(_bearer), Security(_api_key)])


async def _refuse(request: Request, error: Exception) -> Response:
    failure = failure_of(error, request.url.path)
    return JSONResponse(error_body(failure, request.url.path), failure.status, getattr(error, "headers", None))


for _kind in (StarletteHTTPException, RequestValidationError, UserError, RecursionError, Exception):
    app.add_exception_handler(_kind, _refuse)


def _described(path: str, *refusals: int) -> dict[str, Any]:
    """Returns a route's path and its documented errors, each in the form of that path's API."""
    return {"path": path, "responses": {status: {"model": error_model(f"/v1{path}")} for status in refusals}}


def _generates(path: str) -> dict[str, Any]:
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    described = _described(path, *ACCESS, *BODY, 429, 503)
    described["responses"][200] = {"content": {"text/event-stream": {"schema": event | {"required": ["data"]}}}}
    return described


async def _answering(request: Request) -> AsyncIterator[AsyncExitStack]:
    """Counts the request until it is answered, streams included; what the stack holds is closed then."""
    caller: Caller | None = request.state.caller
    if caller is None:
        raise HTTPException(401, "this server answers sessions alone; use a session's key")
    async with AsyncExitStack() as stack:
        stack.enter_context(_service(request).answering(caller))
        yield stack


Answering = Annotated[AsyncExitStack, Depends(_answering)]


async def _answer(request: Request, api_class: type[Api], body: Any, stack: AsyncExitStack) -> Any:
    service, caller = _service(request), request.state.caller
    api = api_class(body, caller, service.tokenizer, service.model)
    items = await stack.enter_async_context(aclosing(answer(caller, api.call, service.tokenizer, api.stream)))
    if api.stream:  # what fails before the first token still has a status of its own
        first = await _while_connected(request.receive, anext(items))
        return EventStream(_events(request, api, first, items), headers={"Cache-Control": "no-store"})
    choices = await _while_connected(request.receive, _choices(items))
    return api.response(sorted(choices, key=lambda choice: choice.index))


async def _choices(items: AsyncIterator[Delta | Choice]) -> list[Choice]:
    return [item async for item in items if isinstance(item, Choice)]


async def _while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Returns what `work` does; it is cancelled when the client goes."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await task
    finally:
        watcher.cancel()


class EventStream(StreamingResponse):
    """Ends when the client goes. Starlette's own cancels through anyio, which waits for a turn of the loop in which no
    token comes, and while the generator runs on the same loop there is none."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self.stream_response(send))


async def _events(
    request: Request, api: Api, first: Delta | Choice, items: AsyncGenerator[Delta | Choice, None]
) -> AsyncIterator[bytes]:
    """Server-sent events of an answer."""
    choices: list[Choice] = []
    events = list(api.on_start())
    item: Delta | Choice | None = first
    try:
        while item is not None:
            if isinstance(item, Choice):
                choices.append(item)
                events += api.on_choice(item)
            else:
                events += api.on_delta(item)
            if events:  # together: what sending costs does not depend on how much is sent
                yield b"".join(map(event_bytes, events))
                events = []
            item = await anext(items, None)
        last = api.on_end(choices)
    except Exception as error:  # noqa: BLE001 (told to the client)
        last = api.on_error(error_body(failure_of(error, request.url.path), request.url.path))
    yield b"".join(map(event_bytes, last))


@router.post(**_generates("/chat/completions"), response_model=ChatCompletion)
async def chat(request: Request, body: ChatBody, stack: Answering) -> Any:
    """An answer of the model, as OpenAI's chat completions have it."""
    return await _answer(request, ChatApi, body, stack)


@router.post(**_generates("/completions"), response_model=Completion)
async def completion(request: Request, body: CompletionBody, stack: Answering) -> Any:
    """A continuation of text or tokens, as OpenAI's completions have it."""
    return await _answer(request, CompletionApi, body, stack)


@router.post(**_generates("/responses"), response_model=OpenAIResponse)
async def response(request: Request, body: ResponsesBody, stack: Answering) -> Any:
    """An answer of the model, as OpenAI's responses have it; nothing is kept."""
    return await _answer(request, ResponsesApi, body, stack)


@router.post(**_generates("/messages"), response_model=Message)
async def message(request: Request, body: MessagesBody, stack: Answering) -> Any:
    """An answer of the model, as Anthropic's messages have it."""
    return await _answer(request, MessagesApi, body, stack)


@router.post(**_described("/messages/count_tokens", *ACCESS, *BODY))
async def count_tokens(request: Request, body: CountBody) -> dict[Literal["input_tokens"], Count]:
    """How many tokens a message's prompt has."""
    return {"input_tokens": len(body.prompt(_service(request).tokenizer))}


class Model(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: Count = 0
    owned_by: str = "archon"


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get(**_described("/models", *ACCESS))
async def models(request: Request) -> ModelList:
    """The one model."""
    return ModelList(data=[Model(id=_service(request).model)])


@router.get(**_described("/models/{model}", *ACCESS, 404))
async def model(request: Request, model: str) -> Model:
    """The model, by its name."""
    served = _service(request).model
    if model != served:
        raise HTTPException(404, f"no model {model!r:.80}; the model here is {served!r}")
    return Model(id=served)


class OpenedSession(ResponseModel):
    id: str = Field(pattern="^session-[0-9a-f]{24}$")
    api_key: str


class RewardBody(RequestModel):
    """`POST /v1/sessions/{session}/reward`: of the last answer, or of that of a call."""

    reward: float
    completion_id: str | None = Field(None, description="id of a response; null: the last answer")
    choice: Integer = Field(0, ge=0, description="which of its n answers")


class ExportQuery(StrictModel):
    """Query of `GET /v1/sessions/{session}/export`."""

    style: ExportStyle = "individual"
    turn_discount: float = Field(1.0, gt=0, le=1)


class AnswerPlace(ResponseModel):
    completion_id: str
    choice: Count


class ExportedTrajectory(ResponseModel):
    input_ids: list[Count]
    loss_mask: list[Literal[0, 1]]
    logprobs: list[float]
    versions: list[Annotated[int, Field(ge=-1)]]
    turn_ids: list[Annotated[int, Field(ge=-1)]]
    truncated: bool
    reward: float
    answers: list[AnswerPlace] = Field(min_length=1)


class Export(ResponseModel):
    style: ExportStyle
    trajectories: list[ExportedTrajectory] = Field(min_length=1)


class ClosedSession(ResponseModel):
    id: str
    answers: Count


# A pattern for readers of the description only: another id is a session that is not there.
SessionId = Annotated[str, Path(alias="session", json_schema_extra={"pattern": "^session-[0-9a-f]{24}$"})]


def _opens_session() -> dict[str, Any]:
    described = _described("/sessions", *ACCESS, 429)
    leads = {"parameters": {"session": "$response.body#/id"}}
    links = {name: {"operationId": name, **leads} for name in ("reward", "export", "close_session")}
    described["responses"][201] = {"links": links}
    return described


@router.post(**_opens_session(), status_code=201)
async def open_session(request: Request) -> OpenedSession:
    """Open a session: what its key asks is recorded."""
    caller: Caller | None = request.state.caller
    if caller is None or isinstance(caller, Session):
        raise HTTPException(403, "only the server's token opens sessions")
    session = _service(request).sessions.open(caller.engine, caller.gconfig)
    return OpenedSession(id=session.id, api_key=session.key)


def _session(request: Request, session_id: str) -> Session:
    return _service(request).session(request.state.caller, session_id)


@router.post(**_described("/sessions/{session}/reward", *ACCESS, *BODY, 404))
async def reward(request: Request, session_id: SessionId, body: RewardBody) -> dict[Literal["reward"], float]:
    """Reward an answer."""
    _session(request, session_id).set_reward(body.reward, body.completion_id, body.choice)
    return {"reward": body.reward}


@router.get(**_described("/sessions/{session}/export", *ACCESS, 400, 404), response_model=Export)
async def export(request: Request, session_id: SessionId, query: Annotated[ExportQuery, Query()]) -> dict[str, Any]:
    """What can be trained on, in tokens."""
    rows = [
        {
            **{name: value for name, value in vars(row.record).items() if name != "turns"},
            "reward": row.reward,
            "answers": [{"completion_id": completion, "choice": choice} for completion, choice in row.answers],
        }
        for row in _session(request, session_id).export(query.style, query.turn_discount)
    ]
    return {"style": query.style, "trajectories": rows}


@router.delete(**_described("/sessions/{session}", *ACCESS, 404))
async def close_session(request: Request, session_id: SessionId) -> ClosedSession:
    """Forget a session and its key."""
    session = _session(request, session_id)
    _service(request).sessions.close(session)
    return ClosedSession(id=session.id, answers=len(session.interactions))


@app.get("/health")
async def health() -> dict[Literal["status"], Literal["ok"]]:
    """Whether the server is there."""
    return {"status": "ok"}


app.include_router(router)
