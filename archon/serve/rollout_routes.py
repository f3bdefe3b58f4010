"""Routes for a trainer: tokens in; tokens, logprobs and versions out; weight pushes.

They exist if the server was started with `--push-root`, and need the server token.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import Field

import archon
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.serve.protocol import Integer, RequestModel, TokenIds
from archon.serve.pushed_weights import POLICY, PushedWeights
from archon.serve.routes import AuthorizedRoute, ServiceOf, prepare, run_while_connected
from archon.serve.sessions import Session

# Not described at /openapi.json, which is for agents.
router = APIRouter(prefix="/v1/rollout", route_class=AuthorizedRoute, include_in_schema=False)


async def _pushed(request: Request, service: ServiceOf) -> PushedWeights:
    if isinstance(request.state.caller, Session):
        raise HTTPException(403, "only the server's token answers trainers")
    if service.pushed is None:
        raise HTTPException(403, "this server takes no weights; start it with --push-root and --token")
    return service.pushed


Pushed = Annotated[PushedWeights, Depends(_pushed)]


class GenerateBody(RequestModel):
    """One answer; `sampling` has every field of `GenerationHyperparameters` that matters."""

    rid: str = Field(min_length=1, max_length=400)
    input_ids: TokenIds
    policy: bool = Field(False, description="use the pushed LoRA instead of the base model")
    sampling: dict[str, Any]


class ScoreBody(RequestModel):
    """The logprobs of tokens at temperature 1."""

    input_ids: TokenIds = Field(min_length=2)
    policy: bool = False


class TextBody(RequestModel):
    """A text to tokenize."""

    text: str


class PauseBody(RequestModel):
    """`abort` ends unfinished answers with their tokens so far, `keep` continues them at `resume`."""

    mode: Literal["abort", "keep"]


class AbortBody(RequestModel):
    """Requests to end."""

    rid: str


class WeightsBody(RequestModel):
    """A checkpoint, or a LoRA in PEFT's format, in a directory below the server's push root."""

    transport: Literal["disk", "lora"]
    folder: str = Field(min_length=1, max_length=4096)
    version: Integer = Field(ge=0, lt=2**63)


@router.get("")
async def describe(service: ServiceOf, pushed: Pushed) -> dict[str, Any]:
    """Return the server facts that a trainer needs."""
    engine = pushed.engine
    return {
        "release": archon.__version__,
        "model": service.model,
        "max_seq_len": engine.max_seq_len,
        "dtype": str(next(engine.model.parameters()).dtype).removeprefix("torch."),
        "vocab_size": engine.model.args.vocab_size,
        "version": pushed.version,
        "unfinished": engine.unfinished,
    }


@router.post("/generate")
async def generate(request: Request, pushed: Pushed, body: GenerateBody) -> dict[str, Any]:
    """Answer a prompt; an abort or a push ends the answer with its tokens so far."""
    if body.policy and POLICY not in pushed.engine.loras:
        raise HTTPException(503, "no LoRA was pushed to this server since its start")
    asked = ModelRequest(
        body.input_ids,
        GenerationHyperparameters.parse(body.sampling, source="sampling"),
        rid=body.rid,
        lora=POLICY if body.policy else None,
    )
    answer = await run_while_connected(request.receive, pushed.engine.agenerate(asked))
    return {
        "output_ids": answer.output_tokens,
        "logprobs": answer.output_logprobs,
        "versions": answer.output_versions,
        "stop_reason": answer.stop_reason,
    }


@router.post("/score")
async def score(pushed: Pushed, body: ScoreBody) -> dict[str, list[float]]:
    """Score tokens, from the second on."""
    scores = await pushed.engine.ascore_prompt(body.input_ids, lora=POLICY if body.policy else None)
    return {"logprobs": scores.logprobs}


@router.post("/tokenize")
async def tokenize(request: Request, service: ServiceOf, pushed: Pushed, body: TextBody) -> dict[str, list[int]]:
    """Return a text's tokens, without special ones."""
    del pushed
    return {"tokens": await prepare(request, service.prompts.tokenize, body.text, "text")}


@router.post("/pause")
async def pause(pushed: Pushed, body: PauseBody) -> dict[str, int]:
    """Stop sampling until `resume`; new requests wait."""
    pushed.engine.pause()
    return {"aborted": pushed.engine.abort() if body.mode == "abort" else 0}


@router.post("/resume")
async def resume(pushed: Pushed) -> dict[str, int]:
    """Go on sampling."""
    pushed.engine.resume()
    return {"unfinished": pushed.engine.unfinished}


@router.post("/abort")
async def abort(pushed: Pushed, body: AbortBody) -> dict[str, int]:
    """End the unfinished requests with this id, with their tokens so far."""
    return {"aborted": pushed.engine.abort(body.rid)}


@router.post("/weights")
async def load_weights(pushed: Pushed, body: WeightsBody) -> dict[str, int]:
    """Replace the weights; unfinished answers go on with the new ones."""
    await pushed.load(body.transport, body.folder, body.version)
    return {"version": pushed.version}
