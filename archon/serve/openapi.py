"""What the server can be asked, as data: its routes are made of it, and so is `/openapi.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from pydantic.json_schema import models_json_schema

from archon.schema.config import StrictModel
from archon.serve import schemas
from archon.serve.anthropic_api import CountBody, MessagesApi
from archon.serve.body import Api, Integer, RequestModel
from archon.serve.http_errors import speaks_anthropic
from archon.serve.openai_chat import ChatApi, CompletionApi
from archon.serve.responses_api import ResponsesApi
from archon.serve.schemas import Schema, record

REFUSALS = {
    400: "not to be honoured; the message says why",
    401: "the key is neither a session's nor the server's token",
    403: "from another machine or page, without a token",
    404: "there is no such thing",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body is no application/json",
    429: "as many as may be",
    503: "the answer was aborted; ask again",
}
ASKS, READS_BODY = (401, 403), (400, 408, 413, 415)
GENERATES = (*ASKS, *READS_BODY, 429, 503)


class RewardBody(RequestModel):
    """`POST /v1/sessions/{id}/reward`: of the last answer, or of that of a call."""

    reward: float
    completion_id: str | None = Field(None, description="id of a response; null: the last answer")
    choice: Integer = Field(0, ge=0, description="which of its n answers")


class ExportQuery(StrictModel):
    """Query of `GET /v1/sessions/{id}/export`."""

    style: Literal["individual", "concat"] = "individual"
    turn_discount: float = Field(1.0, gt=0, le=1)


@dataclass(frozen=True)
class Operation:
    """One thing to ask.

    `answer` is the schema of what comes with `status`; `refusals` are the other statuses. With `api`, the request is
    answered by the model, as a whole or as a stream. `links` name the operations that the answer's `id` leads to.
    """

    name: str
    method: Literal["get", "post", "delete"]
    path: str
    says: str
    answer: Schema
    refusals: tuple[int, ...] = ()
    status: int = 200
    body: type[RequestModel] | None = None
    query: type[StrictModel] | None = None
    api: type[Api] | None = None
    links: tuple[str, ...] = ()


def _generates(name: str, path: str, api: type[Api], answer: Schema) -> Operation:
    says = f"An answer of the model, as `{path.removeprefix('/v1')}` of that API has it"
    return Operation(name, "post", path, says, answer, GENERATES, body=api.body_class, api=api)


_SESSION = "/v1/sessions/{session}"
OPERATIONS = (
    _generates("chat", "/v1/chat/completions", ChatApi, schemas.CHAT),
    _generates("completion", "/v1/completions", CompletionApi, schemas.COMPLETION),
    _generates("response", "/v1/responses", ResponsesApi, schemas.RESPONSE),
    _generates("message", "/v1/messages", MessagesApi, schemas.MESSAGE),
    Operation(
        "count_tokens",
        "post",
        "/v1/messages/count_tokens",
        "How many tokens a message's prompt has",
        record({"input_tokens": schemas.COUNT}),
        (*ASKS, *READS_BODY),
        body=CountBody,
    ),
    Operation("models", "get", "/v1/models", "The one model", schemas.MODELS, ASKS),
    Operation("model", "get", "/v1/models/{model}", "The model, by its name", schemas.MODEL, (*ASKS, 404)),
    Operation(
        "open_session",
        "post",
        "/v1/sessions",
        "Open a session: what its key asks is recorded",
        schemas.SESSION,
        (*ASKS, 429),
        status=201,
        links=("reward", "export", "close_session"),
    ),
    Operation(
        "reward",
        "post",
        f"{_SESSION}/reward",
        "Say what an answer is worth",
        schemas.REWARD,
        (*ASKS, *READS_BODY, 404),
        body=RewardBody,
    ),
    Operation(
        "export",
        "get",
        f"{_SESSION}/export",
        "What can be trained on, in tokens",
        schemas.EXPORT,
        (*ASKS, 400, 404),
        query=ExportQuery,
    ),
    Operation("close_session", "delete", _SESSION, "Forget a session and its key", schemas.CLOSED, (*ASKS, 404)),
    Operation("health", "get", "/health", "Whether the server is there", schemas.HEALTH),
    Operation("openapi", "get", "/openapi.json", "This description", schemas.ANY_OBJECT),
)


def describe(model: str, token: bool) -> dict[str, Any]:
    """The server's OpenAPI description.

    Args:
        model: the name that the model goes by.
        token: whether a key is asked of everyone.
    """
    bodies = [(operation.body, "validation") for operation in OPERATIONS if operation.body is not None]
    _, defined = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, model)
    keys: list[dict[str, Any]] = [{"bearer": []}, {"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "archon", "version": "1"},
        "paths": paths,
        "security": keys if token else [{}, *keys],
        "components": {
            "schemas": defined["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _described(operation: Operation, model: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": operation.answer}}
    if operation.api is not None:
        answer["text/event-stream"] = {"schema": schemas.EVENT}
    right: dict[str, Any] = {"description": operation.says, "content": answer}
    if operation.links:
        leads = {"parameters": {"session": "$response.body#/id"}}
        right["links"] = {name: {"operationId": name, **leads} for name in operation.links}
    error_schema = schemas.ANTHROPIC_ERROR if speaks_anthropic(operation.path) else schemas.ERROR
    error = {"application/json": {"schema": error_schema}}
    responses = {str(status): {"description": REFUSALS[status], "content": error} for status in operation.refusals}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.says,
        "parameters": list(_parameters(operation, model)),
        "responses": {str(operation.status): right, **responses},
    }
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if not operation.refusals:
        described["security"] = []
    return described


def _parameters(operation: Operation, model: str) -> list[dict[str, Any]]:
    known = {"{session}": ("session", schemas.SESSION_ID), "{model}": ("model", {"const": model})}
    found = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for place, (name, schema) in known.items()
        if place in operation.path
    ]
    if operation.query is not None:
        fields = operation.query.model_json_schema()["properties"]
        found += [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
    return found
