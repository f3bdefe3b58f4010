"""What the server's answers look like, as JSON schemas."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
ANY_OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items} | ({"minItems": least} if least else {})


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    return either(schema, NULL)


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


TOKENS = array(COUNT)
LOGPROBS = array(NUMBER)
FINISH = one_of("stop", "length", "tool_calls")

ERROR = record({"error": record({"message": TEXT, "type": TEXT, "param": NULL, "code": nullable(TEXT)})})
ANTHROPIC_ERROR = record({"type": one_of("error"), "error": record({"type": TEXT, "message": TEXT})})

_USAGE = record({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})
_TOOL_CALL = record({"id": TEXT, "type": one_of("function"), "function": record({"name": TEXT, "arguments": TEXT})})
_TOKEN = record({"token": TEXT, "logprob": NUMBER, "bytes": array(COUNT), "top_logprobs": array(ANY_OBJECT)})


def _completion(kind: str, choice: Schema, more: Schema | None = None) -> Schema:
    """What both of OpenAI's completions answer, with choices of their own and `more` that may be there."""
    known = {"id": TEXT, "object": one_of(kind), "created": COUNT, "model": TEXT, "usage": _USAGE}
    return record(known | {"choices": array(choice, least=1)}, more)


CHAT = _completion(
    "chat.completion",
    record(
        {
            "index": COUNT,
            "finish_reason": FINISH,
            "logprobs": nullable(record({"content": array(_TOKEN), "refusal": NULL})),
            "message": record(
                {"role": one_of("assistant"), "content": nullable(TEXT), "refusal": NULL},
                {"tool_calls": array(_TOOL_CALL, least=1)},
            ),
        },
        {"token_ids": TOKENS},
    ),
    {"prompt_token_ids": TOKENS},
)

COMPLETION = _completion(
    "text_completion",
    record(
        {
            "index": COUNT,
            "text": TEXT,
            "finish_reason": FINISH,
            "logprobs": nullable(
                record(
                    {
                        "tokens": array(TEXT),
                        "token_logprobs": LOGPROBS,
                        "top_logprobs": NULL,
                        "text_offset": array(COUNT),
                    }
                )
            ),
        },
        {"token_ids": TOKENS, "prompt_token_ids": TOKENS},
    ),
)

_SAID = record({"type": one_of("output_text"), "text": TEXT, "annotations": array(NULL), "logprobs": array(NULL)})
_ITEM = either(
    record(
        {
            "type": one_of("message"),
            "id": TEXT,
            "role": one_of("assistant"),
            "status": one_of("completed"),
            "content": array(_SAID),
        }
    ),
    record(
        {
            "type": one_of("function_call"),
            "id": TEXT,
            "call_id": TEXT,
            "name": TEXT,
            "arguments": TEXT,
            "status": one_of("completed"),
        }
    ),
)
RESPONSE = record(
    {
        "id": TEXT,
        "object": one_of("response"),
        "created_at": COUNT,
        "model": TEXT,
        "status": one_of("completed", "incomplete"),
        "error": NULL,
        "incomplete_details": nullable(record({"reason": one_of("max_output_tokens")})),
        "instructions": nullable(TEXT),
        "max_output_tokens": nullable(COUNT),
        "metadata": ANY_OBJECT,
        "output": array(_ITEM, least=1),
        "parallel_tool_calls": {"const": True},
        "previous_response_id": NULL,
        "temperature": NUMBER,
        "text": record({"format": record({"type": one_of("text")})}),
        "tool_choice": one_of("auto", "none"),
        "tools": array(ANY_OBJECT),
        "top_p": NUMBER,
        "truncation": one_of("disabled"),
        "usage": record(
            {
                "input_tokens": COUNT,
                "input_tokens_details": record({"cached_tokens": COUNT}),
                "output_tokens": COUNT,
                "output_tokens_details": record({"reasoning_tokens": COUNT}),
                "total_tokens": COUNT,
            }
        ),
    }
)

MESSAGE = record(
    {
        "id": TEXT,
        "type": one_of("message"),
        "role": one_of("assistant"),
        "model": TEXT,
        "content": array(
            either(
                record({"type": one_of("text"), "text": TEXT}),
                record({"type": one_of("tool_use"), "id": TEXT, "name": TEXT, "input": ANY_OBJECT}),
            )
        ),
        "stop_reason": one_of("end_turn", "max_tokens", "tool_use", "stop_sequence"),
        "stop_sequence": nullable(TEXT),
        "usage": record({"input_tokens": COUNT, "output_tokens": COUNT}),
    }
)

MODEL = record({"id": TEXT, "object": one_of("model"), "created": COUNT, "owned_by": TEXT})
MODELS = record({"object": one_of("list"), "data": array(MODEL, least=1)})

SESSION_ID: Schema = {"type": "string", "pattern": "^session-[0-9a-f]{24}$"}
SESSION = record({"id": SESSION_ID, "api_key": TEXT})
REWARD = record({"reward": NUMBER})
EXPORT = record(
    {
        "style": one_of("individual", "concat"),
        "trajectories": array(
            record(
                {
                    "input_ids": TOKENS,
                    "loss_mask": array({"enum": [0, 1]}),
                    "logprobs": LOGPROBS,
                    "versions": array({"type": "integer", "minimum": -1}),
                    "turn_ids": array({"type": "integer", "minimum": -1}),
                    "truncated": {"type": "boolean"},
                    "reward": NUMBER,
                    "answers": array(record({"completion_id": TEXT, "choice": COUNT}), least=1),
                }
            ),
            least=1,
        ),
    }
)
CLOSED = record({"id": SESSION_ID, "answers": COUNT})
EVENT = record({"data": TEXT}, {"event": TEXT})
"""A server-sent event."""
HEALTH = record({"status": one_of("ok")})
