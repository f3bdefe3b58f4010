"""`/metrics`: counters for Prometheus; needs the server token if there is one."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request, Response

from archon.generation.inprocess import InProcessEngine
from archon.remote.prometheus import CONTENT_TYPE, Metric, counter, gauge, render
from archon.serve.routes import AuthorizedRoute, ServiceOf
from archon.serve.service import Service
from archon.serve.sessions import Session

router = APIRouter(route_class=AuthorizedRoute, include_in_schema=False)


@router.get("/metrics")
async def metrics(request: Request, service: ServiceOf) -> Response:
    """Tell the server's numbers in Prometheus' text format."""
    if isinstance(request.state.caller, Session):
        raise HTTPException(403, "only the server's token reads metrics")
    return Response(render(_metrics(service)), media_type=CONTENT_TYPE)


def _metrics(service: Service) -> list[Metric]:
    metrics = [
        gauge("archon_requests_active", "Requests that are being answered.", service.active_requests),
        gauge("archon_sessions_open", "Open sessions.", len(service.sessions)),
    ]
    engine = service.engine
    if not isinstance(engine, InProcessEngine):
        return metrics
    stats = engine.stats
    metrics += [
        gauge("archon_answers_unfinished", "Answers that are sampled or wait for it.", engine.unfinished),
        gauge("archon_weights_version", "Version of the weights; -1 before the first push.", engine.version),
        counter("archon_steps_total", "Steps of the model.", stats.steps),
        counter("archon_step_seconds_total", "Seconds of these steps.", stats.seconds),
        counter("archon_prompt_tokens_total", "Prompt tokens computed.", stats.prefill_tokens),
        counter("archon_answer_tokens_total", "Tokens decoded.", stats.decode_tokens),
        counter(
            "archon_shared_prompts_total", "Answers that reused the prompt of another answer.", stats.shared_prompts
        ),
        counter("archon_pushed_bytes_total", "Bytes written by pushes of weights.", stats.pushed_bytes),
    ]
    loras = service.loras.values()
    for name, help_text, field in (
        ("archon_adapter_requests_total", "Requests of a LoRA.", "requests"),
        ("archon_adapter_answer_tokens_total", "Tokens sampled with a LoRA.", "answer_tokens"),
    ):
        samples = [({"adapter": lora.name}, float(getattr(lora, field))) for lora in loras]
        metrics.append(Metric(name, help_text, list(samples), "counter"))
    return metrics
