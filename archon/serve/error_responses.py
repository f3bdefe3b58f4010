"""Errors as JSON, in the format of the protocol of the request."""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple, cast

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from archon.generation.record import UnusableAnswerError
from archon.schema.config import describe_validation_error
from archon.schema.errors import (
    ContextOverflowError,
    NotFiniteError,
    ResourceExhaustedError,
    UnknownLoRAError,
    UserError,
)
from archon.serve.protocol import ResponseModel
from archon.serve.sessions import LimitError

logger = logging.getLogger(__name__)

# Error types by status: OpenAI's and Anthropic's.
_TYPES = {
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}

_MAX_MESSAGE = 2000  # characters; a message may quote client input


class OpenAIErrorDetail(ResponseModel):
    """The error in OpenAI's protocols."""

    message: str
    type: str
    param: None = None
    code: str | None = None


class OpenAIError(ResponseModel):
    """An error response of OpenAI's protocols."""

    error: OpenAIErrorDetail


class AnthropicError(ResponseModel):
    """An error response of Anthropic's protocol."""

    type: Literal["error"] = "error"
    error: dict[Literal["type", "message"], str]


class ErrorResponse(NamedTuple):
    """The answer to a failed request; `code` is OpenAI's name of the case, if it has one."""

    status: int
    message: str
    code: str | None = None


def error_response(error: Exception, path: str) -> ErrorResponse:
    """Return the error response to a request to `path`.

    Client mistakes get status 4xx with one line that says what to change. Server failures get status 500 without
    details, and are logged.
    """
    if isinstance(error, HTTPException):
        return ErrorResponse(error.status_code, error.detail)
    if isinstance(error, RequestValidationError):
        message = describe_validation_error(cast(Any, error))  # pydantic's errors, under another class
        return ErrorResponse(400, f"request: {' '.join(message.split())}"[:_MAX_MESSAGE])
    message = " ".join(str(error).split())[:_MAX_MESSAGE]
    if isinstance(error, ContextOverflowError):
        return ErrorResponse(400, message, "context_length_exceeded")
    if isinstance(error, UnknownLoRAError):
        return ErrorResponse(404, message, "model_not_found")
    if isinstance(error, LimitError):
        return ErrorResponse(429, message)
    if isinstance(error, UnusableAnswerError | NotFiniteError):
        return ErrorResponse(503, message, "unusable_answer")
    if isinstance(error, ResourceExhaustedError):
        logger.error("request to %s failed: %s", path, message)
        return ErrorResponse(503, "the server ran out of memory, open files or threads; see its log")
    if isinstance(error, UserError):
        return ErrorResponse(400, message)
    if isinstance(error, RecursionError):
        return ErrorResponse(400, "the request is nested too deeply")
    logger.error("request to %s failed", path, exc_info=error)
    return ErrorResponse(500, "internal server error; see the server log")


def error_body(failure: ErrorResponse, path: str) -> dict[str, Any]:
    """Return the JSON of an error, in the format of the protocol that `path` belongs to."""
    default = "invalid_request_error" if failure.status < 500 else "api_error"
    openai, anthropic = _TYPES.get(failure.status, (default, default))
    if path.startswith("/v1/messages"):
        return AnthropicError(error={"type": anthropic, "message": failure.message}).model_dump()
    return OpenAIError(error=OpenAIErrorDetail(message=failure.message, type=openai, code=failure.code)).model_dump()
