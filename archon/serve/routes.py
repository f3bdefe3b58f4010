"""The endpoints: paths, requests, responses, and their description at /openapi.json."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, aclosing, nullcontext
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from archon.schema.config import StrictModel
from archon.schema.errors import UserError
from archon.serve.answer_text import Delta
from archon.serve.anthropic_api import CountBody, Message, MessagesApi, MessagesBody
from archon.serve.call_syntax import load_json
from archon.serve.error_responses import AnthropicError, OpenAIError, error_body, error_response
from archon.serve.openai_chat import ChatApi, ChatBody, ChatCompletion
from archon.serve.openai_completions import Completion, CompletionApi, CompletionBody
from archon.serve.preparation import SMALL_BYTES, no_collection
from archon.serve.protocol import Choice, Count, Integer, ProtocolHandler, RequestModel, ResponseModel
from archon.serve.request_limits import RequestLimitError, check_body, check_request
from archon.serve.responses_api import OpenAIResponse, ResponsesApi, ResponsesBody
from archon.serve.service import Service
from archon.serve.sessions import Caller, ExportStyle, LimitError, Session

T = TypeVar("T")

_bearer, _api_key = HTTPBearer(auto_error=False), APIKeyHeader(name="x-api-key", auto_error=False)


async def prepare(request: Request, work: Callable[..., T], *args: Any) -> T:
    """Return the result of work on a request; large work runs outside the event loop, unless the client disconnects."""
    service: Service = request.state.service
    size: int = request.state.work_bytes
    running = service.preparation.run(work, *args, size=size)
    return await (running if size <= SMALL_BYTES else run_while_connected(request.receive, running))


def _load_body(body: bytearray) -> tuple[dict[str, Any], bool]:
    """Return a JSON object within the limits of a request, and whether it has images."""
    content = bytes(body)
    try:
        check_body(content)
        with no_collection() if len(body) > SMALL_BYTES else nullcontext():
            data = load_json(content)
    except RequestLimitError as error:
        raise HTTPException(400, str(error)) from None
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise HTTPException(400, f"the body is a JSON {type(data).__name__}, expected an object")
    try:
        return data, check_request(data) > 0
    except RequestLimitError as error:
        raise HTTPException(400, str(error)) from None


class StrictRequest(Request):
    """Request with a JSON object as body, within the server's limits."""

    _received: bytearray = bytearray()

    async def body(self) -> bytes:
        """Return the body; raises HTTPException if it is too large or slow."""
        content_type = self.headers.get("content-type", "")
        # Browsers send application/json from other sites only after a CORS preflight.
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, f"content type {content_type!r:.80}: send application/json")
        limits = self.state.service.limits
        body = self._received = bytearray()
        close = {"Connection": "close"}
        try:
            async with asyncio.timeout(limits.request_seconds):
                async for chunk in self.stream():
                    try:
                        self.state.service.reserve(len(chunk))
                    except LimitError as error:
                        raise HTTPException(429, str(error), close) from None
                    body += chunk
                    if len(body) > limits.body_bytes:
                        raise HTTPException(413, f"the body is longer than {limits.body_bytes} bytes", close)
        except TimeoutError:
            message = f"the body did not arrive within {limits.request_seconds:g} s"
            raise HTTPException(408, message, close) from None
        self.state.work_bytes = len(body)
        self._data, has_images = await prepare(self, _load_body, body)
        if has_images:  # a small file may have many pixels
            self.state.work_bytes += SMALL_BYTES
        return bytes(body)

    def release(self) -> None:
        """Tell the service that the request is over."""
        self.state.service.reserve(-len(self._received))
        self._received = bytearray()

    async def json(self) -> Any:
        """Return the parsed body; raises HTTPException if it is not JSON."""
        return self._data


class AuthorizedRoute(APIRoute):
    """Checks access before the body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler with limits and error responses."""
        handle = super().get_route_handler()

        async def authorized(request: Request) -> Response:
            bearer = await _bearer(request)
            key = bearer.credentials if bearer is not None else await _api_key(request)
            host, origin = request.headers.get("host", ""), request.headers.get("origin")
            request.state.caller = request.state.service.authorize(key or "", host, origin)
            strict = StrictRequest(request.scope, request.receive)
            with ExitStack() as reserved:
                reserved.callback(strict.release)
                response = await handle(strict)
                if isinstance(response, EventStream):
                    response.reserved = reserved.pop_all()
            return response

        return authorized


class App(FastAPI):
    """Describes itself without FastAPI's status 422, which is 400 here."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema."""
        description = super().openapi()
        for operations in description["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return description


app = App(
    title="archon",
    version="1",
    docs_url=None,
    redoc_url=None,
    redirect_slashes=False,
    generate_unique_id_function=lambda route: route.name,
)


def _errors(*statuses: int, model: type[ResponseModel] = OpenAIError) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of errors, for `responses` of a route."""
    return {status: {"model": model} for status in statuses}


# Statuses of errors of every route, of routes with a body, and of routes that generate.
ACCESS, BODY, BUSY = (401, 403), (400, 408, 413, 415), (429, 503)

EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
GENERATION = _errors(*BODY, 404, *BUSY) | {200: {"content": {"text/event-stream": {"schema": EVENT}}}}

router = APIRouter(
    prefix="/v1",
    route_class=AuthorizedRoute,
    dependencies=[Security(_bearer), Security(_api_key)],
    responses=_errors(*ACCESS),
)


async def _error_response(request: Request, error: Exception) -> Response:
    failure = error_response(error, request.url.path)
    headers = {"Retry-After": "1"} if failure.status in BUSY else {}
    headers |= getattr(error, "headers", None) or {}
    return JSONResponse(error_body(failure, request.url.path), failure.status, headers)


for _error_class in (StarletteHTTPException, RequestValidationError, UserError, RecursionError, Exception):
    app.add_exception_handler(_error_class, _error_response)


async def _service(request: Request) -> Service:
    service: Service = request.state.service
    return service


async def _exit_stack(request: Request) -> AsyncIterator[AsyncExitStack]:
    """Count the request until its answer, including a stream, is sent; then close the exit stack."""
    caller: Caller | None = request.state.caller
    if caller is None:
        raise HTTPException(401, "this server answers sessions only; use a session's key")
    async with AsyncExitStack() as stack:
        stack.enter_context(request.state.service.count_request(caller))
        yield stack


ServiceOf = Annotated[Service, Depends(_service)]
Stack = Annotated[AsyncExitStack, Depends(_exit_stack)]


async def _answer(
    request: Request,
    api_class: type[ProtocolHandler],
    body: Any,
    stack: AsyncExitStack,
    response_model: type[ResponseModel],
) -> Any:
    service = await _service(request)
    model, caller = service.choose(body.model), request.state.caller
    prompts = await prepare(request, body.prompts, service.prompts)
    api = api_class(body, caller, service.tokenizer, model, service.format, prompts)
    if (grammar := await prepare(request, api.grammar)) is not None:
        api.constraint = await asyncio.to_thread(service.grammars.compile, grammar)
    items = await stack.enter_async_context(aclosing(api.generate()))
    if body.stream:  # a failure before the first token still gets a proper status
        first = await run_while_connected(request.receive, anext(items))
        return EventStream(_events(request, api, first, items), headers={"Cache-Control": "no-store"})
    choices = await run_while_connected(request.receive, _choices(items))
    request.state.token_counts = api.count_tokens(choices)
    choices.sort(key=lambda choice: choice.index)
    request.state.work_bytes = api.response_values(choices)
    return await prepare(request, _respond, api, choices, response_model)


def _respond(api: ProtocolHandler, choices: list[Choice], response_model: type[ResponseModel]) -> Response:
    """Return the response to a request without `stream`, checked as FastAPI does."""
    with no_collection() if api.response_values(choices) > SMALL_BYTES else nullcontext():
        content = response_model.model_validate(api.response(choices)).model_dump_json(by_alias=True)
    return Response(content, media_type="application/json")


async def _choices(items: AsyncIterator[Delta | Choice]) -> list[Choice]:
    return [item async for item in items if isinstance(item, Choice)]


async def run_while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is canceled if the client disconnects."""
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
    """Response that ends when the client disconnects.

    Starlette cancels through anyio, which waits for an idle turn of the event loop; there is none while the generator
    runs on the same loop.
    """

    media_type = "text/event-stream"
    reserved: ExitStack | None = None  # closed at the end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        with self.reserved or nullcontext():
            await run_while_connected(receive, self.stream_response(send))


async def _events(
    request: Request, api: ProtocolHandler, first: Delta | Choice, items: AsyncGenerator[Delta | Choice, None]
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer."""
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
            if events:  # joined, because the cost is per send
                yield b"".join(events)
                events = []
            item = await anext(items, None)
        last = api.on_end(choices)
    except Exception as error:  # noqa: BLE001 (sent to the client)
        last = api.on_error(error_body(error_response(error, request.url.path), request.url.path))
    request.state.token_counts = api.count_tokens(choices)
    yield b"".join(last)


@router.post("/chat/completions", response_model=ChatCompletion, responses=GENERATION)
async def chat(request: Request, body: ChatBody, stack: Stack) -> Any:
    """Answer a conversation, in the format of OpenAI's chat completions."""
    return await _answer(request, ChatApi, body, stack, ChatCompletion)


@router.post("/completions", response_model=Completion, responses=GENERATION)
async def completion(request: Request, body: CompletionBody, stack: Stack) -> Any:
    """Continue text or tokens, in the format of OpenAI's completions."""
    return await _answer(request, CompletionApi, body, stack, Completion)


@router.post("/responses", response_model=OpenAIResponse, responses=GENERATION)
async def response(request: Request, body: ResponsesBody, stack: Stack) -> Any:
    """Answer a conversation, in the format of OpenAI's responses; nothing is stored."""
    return await _answer(request, ResponsesApi, body, stack, OpenAIResponse)


@router.post(
    "/messages",
    response_model=Message,
    responses=GENERATION | _errors(*ACCESS, *BODY, 404, *BUSY, model=AnthropicError),
)
async def message(request: Request, body: MessagesBody, stack: Stack) -> Any:
    """Answer a conversation, in the format of Anthropic's messages."""
    return await _answer(request, MessagesApi, body, stack, Message)


@router.post("/messages/count_tokens", responses=_errors(*ACCESS, *BODY, 404, model=AnthropicError))
async def count_tokens(request: Request, service: ServiceOf, body: CountBody) -> dict[Literal["input_tokens"], Count]:
    """Count the tokens of a conversation's prompt."""
    service.choose(body.model)
    prompts = await prepare(request, body.prompts, service.prompts)
    return {"input_tokens": len(prompts.tokens[0])}


class Model(ResponseModel):
    """A model; a LoRA has the base model as `parent`, as in vLLM."""

    id: str
    object: Literal["model"] = "model"
    created: Count = 0
    owned_by: str = "archon"
    parent: str | None = None


class DeletedModel(ResponseModel):
    """A LoRA that was unloaded."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class LoRAUsage(ResponseModel):
    """Counters of a LoRA; answer tokens count when the answer ends."""

    model_config = ConfigDict(extra="ignore")

    name: str
    version: int
    unfinished: Count
    requests: Count
    prompt_tokens: Count
    answer_tokens: Count


class LoRAList(ResponseModel):
    """LoRAs and their counters."""

    object: Literal["list"] = "list"
    data: list[LoRAUsage]


class ModelList(ResponseModel):
    """The model and its LoRAs."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/models")
async def models(service: ServiceOf) -> ModelList:
    """List the model and its LoRAs."""
    loras = [Model(id=name, parent=service.model) for name in service.loras]
    return ModelList(data=[Model(id=service.model), *loras])


@router.get("/models/{model}", responses=_errors(404))
async def model(service: ServiceOf, model: str) -> Model:
    """Describe the model of this name."""
    listed = (await models(service)).data
    for known in listed:
        if known.id == model:
            return known
    names = ", ".join(repr(known.id) for known in listed)
    raise HTTPException(404, f"no model {model!r:.80}; the models here are {names}")


class LoadBody(RequestModel):
    """Body of `POST /v1/load_lora_adapter`, compatible with vLLM."""

    lora_name: str = Field(min_length=1, max_length=200, description="model name of the LoRA")
    lora_path: str = Field(min_length=1, max_length=4096, description="a directory below the server's LoRA root")
    load_inplace: bool = Field(False, description="replace a loaded LoRA of this name")


class UnloadBody(RequestModel):
    """Body of `POST /v1/unload_lora_adapter`, compatible with vLLM."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: None = None


def _require_token(request: Request) -> None:
    if isinstance(request.state.caller, Session):
        raise HTTPException(403, "loading and unloading LoRAs needs the server token")


@router.post("/load_lora_adapter", responses=_errors(*BODY))
async def load_lora_adapter(request: Request, service: ServiceOf, body: LoadBody) -> Model:
    """Load a LoRA from a directory of the server; needs the server token."""
    _require_token(request)
    await service.load_lora(body.lora_name, body.lora_path, in_place=body.load_inplace)
    return Model(id=body.lora_name, parent=service.model)


@router.post("/unload_lora_adapter", responses=_errors(*BODY, 404))
async def unload_lora_adapter(request: Request, service: ServiceOf, body: UnloadBody) -> DeletedModel:
    """Unload a LoRA; answers in progress finish with it. Needs the server token."""
    _require_token(request)
    await service.unload_lora(body.lora_name)
    return DeletedModel(id=body.lora_name)


@router.get("/adapters")
async def adapters(service: ServiceOf) -> LoRAList:
    """Count the requests and tokens of each LoRA since it was loaded."""
    return LoRAList(data=[LoRAUsage.model_validate(vars(lora)) for lora in service.loras.values()])


SESSION_ID = "^session-[0-9a-f]{24}$"
# The pattern is for readers of the description only: another id is a session that does not exist.
SessionId = Annotated[str, Path(alias="session", json_schema_extra={"pattern": SESSION_ID})]


class OpenedSession(ResponseModel):
    """A new session with its key."""

    id: str = Field(pattern=SESSION_ID)
    api_key: str


class RewardBody(RequestModel):
    """`POST /v1/sessions/{session}/reward`: reward the last answer, or the named one.

    If sessions are trained, a reward without a completion rewards and ends the whole session.
    """

    reward: float
    completion_id: str | None = Field(None, description="id of a response; null: the last answer")
    choice: Integer = Field(0, ge=0, description="index among its n answers")
    finished: bool | None = Field(
        None, description="whether a session that is trained ends; null: unless a completion is named"
    )


class ExportQuery(StrictModel):
    """Query of `GET /v1/sessions/{session}/export`."""

    style: ExportStyle = "individual"
    turn_discount: float = Field(1.0, gt=0, le=1)


class AnswerPlace(ResponseModel):
    """An answer in a trajectory."""

    completion_id: str
    choice: Count


class ExportedTrajectory(ResponseModel):
    """A training row of a session."""

    input_ids: list[Count]
    loss_mask: list[Literal[0, 1]]
    logprobs: list[float]
    versions: list[Annotated[int, Field(ge=-1)]]
    turn_ids: list[Annotated[int, Field(ge=-1)]]
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(description="of the sampling; 0 where nothing was")
    images: list[str] = Field(description="a hash of the pixels of each image in the prompt, in order")
    truncated: bool
    reward: float
    answers: list[AnswerPlace] = Field(min_length=1)
    adapter: str | None = Field(description="that sampled the answers; null: the model itself")


class Export(ResponseModel):
    """Training rows of a session."""

    style: ExportStyle
    trajectories: list[ExportedTrajectory] = Field(min_length=1)


_RECORDED = ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "temperatures", "truncated")
"""Fields copied unchanged from the `TokenRecord`."""


class ClosedSession(ResponseModel):
    """A closed session."""

    id: str
    answers: Count


_ID_LINK = {"parameters": {"session": "$response.body#/id"}}
SESSION_LINKS = {name: {"operationId": name, **_ID_LINK} for name in ("reward", "export", "close_session")}


@router.post("/sessions", status_code=201, responses=_errors(400, 429) | {201: {"links": SESSION_LINKS}})
async def open_session(
    request: Request, service: ServiceOf, group: Annotated[str | None, Query(min_length=1, max_length=200)] = None
) -> OpenedSession:
    """Open a session: requests with its key are recorded. Sessions of one `group` are compared in training."""
    caller: Caller | None = request.state.caller
    if caller is None or isinstance(caller, Session):
        raise HTTPException(403, "only the server's token opens sessions")
    if len(request.query_params.getlist("group")) > 1:
        raise HTTPException(400, "group occurs more than once; a session belongs to one group")
    training = service.training
    if training is not None and training.needs_group and group is None:
        raise HTTPException(400, "the run compares sessions of a group: open this one with ?group=NAME of its task")
    policy = None if training is None else training.policy
    session = service.sessions.open(caller.engine, caller.gconfig, policy=policy)
    session.group = group
    return OpenedSession(id=session.id, api_key=session.key)


def _session(request: Request, session_id: str) -> Session:
    """Return the session of that id, unless the request has another session's key."""
    session: Session | None = request.state.service.sessions.find_by_id(session_id)
    if session is None or (isinstance(request.state.caller, Session) and request.state.caller is not session):
        raise HTTPException(404, f"no open session {session_id!r:.80}")
    return session


@router.post("/sessions/{session}/reward", responses=_errors(*BODY, 404))
async def reward(
    request: Request, service: ServiceOf, session_id: SessionId, body: RewardBody
) -> dict[Literal["reward"], float]:
    """Reward an answer, or the whole session if sessions are trained."""
    session = _session(request, session_id)
    finished = body.completion_id is None if body.finished is None else body.finished
    if service.training is not None and finished and session.active_requests:
        raise HTTPException(
            400,
            f"{session.active_requests} requests of this session are being answered; wait for them, or cancel them, "
            "before it ends",
        )
    if service.training is None or body.completion_id is not None or not finished:
        session.set_reward(body.reward, body.completion_id, body.choice)
    elif session.interactions and not session.unrewarded_leaves:
        raise HTTPException(
            400,
            "the last answer of every branch already has a reward; pass completion_id to change one, and finished=true "
            "to end the session",
        )
    else:
        session.reward_every_branch(body.reward)
    if service.training is not None and finished:
        service.finish(session)
    return {"reward": body.reward}


@router.get("/sessions/{session}/export", response_model=Export, responses=_errors(400, 404))
async def export(request: Request, session_id: SessionId, query: Annotated[ExportQuery, Query()]) -> dict[str, Any]:
    """Export the rows to train on, in tokens."""
    rows = [
        {
            **{name: getattr(row.record, name) for name in _RECORDED},
            "images": [image.digest for image in row.record.images],
            "reward": row.reward,
            "answers": [{"completion_id": completion, "choice": choice} for completion, choice in row.answers],
            "adapter": row.lora,
        }
        for row in _session(request, session_id).export(query.style, query.turn_discount)
    ]
    return {"style": query.style, "trajectories": rows}


@router.delete("/sessions/{session}", responses=_errors(404))
async def close_session(request: Request, service: ServiceOf, session_id: SessionId) -> ClosedSession:
    """Close a session; its key is no longer valid."""
    session = _session(request, session_id)
    service.sessions.close(session)
    return ClosedSession(id=session.id, answers=len(session.interactions))


@app.get("/health")
async def health() -> dict[Literal["status"], Literal["ok"]]:
    """Tell that the server is up."""
    return {"status": "ok"}


app.include_router(router)
