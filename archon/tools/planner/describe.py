"""Plans as text, as JSON, and as the configuration of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from archon.engine.memory.memory_model import MemoryEstimate
from archon.tools.planner.search import UNSEARCHED_NOTE, Candidate, CandidateFit, Plan, PlanRequest

GIB = 2**30


def speed(plan: Plan, candidate: Candidate) -> tuple[float, float, float]:
    """Return tokens per second of one GPU, and MFU with attention counted causally and in full."""
    request = plan.request
    # A step trains complete documents only.
    tokens = request.tokens // request.seq * request.seq
    rate = tokens / candidate.seconds.total / request.gpus
    peak = plan.hardware.flops(request.dtype)
    return rate, rate * plan.flops.causal / peak, rate * plan.flops.full / peak


def describe(plan: Plan) -> list[str]:
    """Return the plan as lines of text: the best layouts, their relative slowdown, and the rejected ones."""
    request, hw = plan.request, plan.hardware
    title = f"{request.gpus} × {hw.name}, {request.tokens:,} tokens a step in documents of {request.seq:,}"
    lines = [f"{title}; {plan.considered:,} candidates considered"]
    if request.lora is not None:
        lines.append("LoRA: weights are frozen and have no masters, gradients or moments")
    if request.fp8 != "none":
        lines.append(
            f"FP8 matmuls in blocks ({request.fp8}), with data-sheet rates; MFU is relative to the bfloat16 peak"
        )
        if request.fp8.endswith("_inner"):
            lines.append(f"the first and last blocks run in {request.dtype}; their extra time is spread over all")
    if backend := hw.attention_backend("auto"):
        lines.append(f"attention is timed for {backend}, the fastest backend in the hardware file")
    if request.seq > plan.max_positions:
        lines.append(f"documents are longer than the model's maximum of {plan.max_positions:,} positions")
    if not plan.best:
        return [*lines, *_rejections(plan)]
    parts = _parts(plan, plan.best[0].memory)
    rows: list[tuple[str, ...]] = [
        ("layout", "recompute", "schedule", "tokens", "n", *parts, "total", "tok/s", "MFU c|f, %", "behind")
    ]
    for fit in plan.best:
        c, m = fit.candidate, fit.memory
        rate, causal, full = speed(plan, c)
        sizes = [_gib(size) for size in (*_parts(plan, m).values(), m.total)]
        mfu = f"{100 * causal:.1f} | {100 * full:.1f}"
        run = (str(c.layout), c.policy, c.schedule, f"{c.tokens:,}", str(c.micro_batches))
        rows.append((*run, *sizes, f"{rate:,.0f}", mfu, _slowdown(plan.best[0].candidate, c)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["", *("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)]
    lines += [
        "",
        "tokens: per micro-batch; n: micro-batches per step of a data-parallel rank; memory: GiB of the largest rank;",
        f"of {hw.memory_bytes / GIB:.1f} GiB, {hw.reserve_bytes / GIB:.1f} are reserved for libraries, and, for",
        f"fragmentation, {100 * hw.fragmentation:g} % of a step's allocations; tok/s: of one GPU.",
    ]
    if plan.too_large:
        lines += ["", "Faster, but too large:"]
        lines += [f"  {describe_candidate(p.candidate)}: {-p.headroom / GIB:.1f} GiB too large" for p in plan.too_large]
    return [*lines, "", *_rejections(plan)]


def _parts(plan: Plan, memory: MemoryEstimate) -> dict[str, int]:
    """Return the memory columns of the table, in bytes."""
    parts = {"weights": memory.parameters}
    if plan.request.lora is not None:
        parts["lora"] = memory.lora
    return parts | {
        "moments": memory.moments,
        "gradients": memory.gradients + memory.unreduced,
        "gathered": memory.gathered,
        "activations": memory.activations,
        "head": memory.head,
    }


def _gib(size: int) -> str:
    """Return GiB with one decimal, or with three if one decimal would show 0.0."""
    return f"{size / GIB:.3f}" if 0 < size < GIB / 20 else f"{size / GIB:.1f}"


def _rejections(plan: Plan) -> list[str]:
    """Return lines about rejected and untried candidates."""
    rejected = plan.rejections
    lines = [
        f"rejected by the engine, {count:,} candidates: {message}" for message, count in rejected.refused.most_common()
    ]
    if rejected.exceeds_memory:
        lines.append(f"too large, {rejected.exceeds_memory:,} layouts and schedules: {_state(plan)} exceed the memory")
    if rejected.idle:
        too_few = f"{plan.request.tokens:,} tokens are too few documents of {plan.request.seq:,}"
        lines.append(f"idle ranks, {rejected.idle:,} layouts and schedules: {too_few}")
    if rejected.unknown:
        lines.append(f"unknown memory, {rejected.unknown:,} layouts with t, c or e: a kind of layer has no formula")
    return [*lines, f"not tried: {UNSEARCHED_NOTE}"]


def _state(plan: Plan) -> str:
    return "masters, gradients and moments" if plan.request.lora is None else "frozen weights and their LoRA"


def describe_candidate(candidate: Candidate) -> str:
    """Return a candidate in one line."""
    pipeline = "" if candidate.layout.pp == 1 else f", {candidate.schedule}"
    return f"{candidate.layout}{pipeline}, recompute {candidate.policy}, micro-batches of {candidate.tokens:,} tokens"


def _slowdown(best: Candidate, other: Candidate) -> str:
    """Return the relative slowdown of `other`, and the part of the step that costs most of it."""
    if other is best:
        return "-"
    slower = other.seconds.total / best.seconds.total - 1
    return f"{100 * slower:.1f} %: {other.seconds.largest_excess(best.seconds).replace('_', ' ')}"


def explain_no_plan(plan: Plan) -> str:
    """Return one line: the reason that no layout fits."""
    request = plan.request
    if plan.closest is not None:
        closest, lacking = describe_candidate(plan.closest.candidate), -plan.closest.headroom / GIB
        return f"No layout fits; the closest, {closest}, needs {lacking:.1f} GiB more."
    if plan.considered:
        (message, count), *_ = plan.rejections.refused.most_common(1)
        return f"The engine rejects every layout that fits; {count:,} of them with: {message}"
    why = []
    if plan.rejections.exceeds_memory:
        why.append(f"{_state(plan)} exceed the memory of {request.gpus} GPUs")
    if plan.rejections.idle:
        few = f"{request.tokens:,} tokens a step are too few documents of {request.seq:,} for every rank"
        why.append(f"in the other layouts, {few}" if why else few)
    return f"No layout fits: {'; '.join(why)}."


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON-compatible data, in bytes, seconds and tokens."""
    return {
        "question": plan.request._asdict(),
        "hardware": plan.hardware.model_dump(),
        "considered": plan.considered,
        "left_out": vars(plan.rejections) | {"refused": dict(plan.rejections.refused), "not_tried": UNSEARCHED_NOTE},
        "best": [_as_json(plan, fit) for fit in plan.best],
        "too_large": [_as_json(plan, fit) for fit in plan.too_large],
    }


def _as_json(plan: Plan, fit: CandidateFit) -> dict[str, Any]:
    c = fit.candidate
    rate, causal, full = speed(plan, c)
    return {
        "layout": str(c.layout),
        **c.options,
        "max_tokens_per_mb": c.tokens,
        "micro_batches": c.micro_batches,
        "memory": asdict(fit.memory) | {"total": fit.memory.total, "headroom": fit.headroom},
        "seconds": asdict(c.seconds) | {"total": c.seconds.total},
        "tokens_per_second_per_gpu": rate,
        "mfu": {"causal": causal, "full": full},
    }


def run_config(request: PlanRequest, candidate: Candidate) -> dict[str, Any]:
    """Return a configuration for `archon sft --config`; its data path is a placeholder."""
    model: dict[str, Any] = {"path": request.path, "dtype": request.dtype, "layout": str(candidate.layout)}
    if request.lora is not None:
        model |= {"lora": request.lora}
    if request.fp8 != "none":
        model |= {"fp8": request.fp8}
    return {
        "run_dir": "runs/planned",
        "batch_size": request.tokens // request.seq,
        "model": model | {"max_tokens_per_mb": candidate.tokens} | candidate.options,
        "train_data": {"path": "train.jsonl", "max_length": request.seq},
    }
