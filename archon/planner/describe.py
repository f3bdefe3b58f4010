"""A plan in words, as JSON, and as the configuration of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from archon.planner.memory import Memory
from archon.planner.search import NOT_TRIED, Candidate, Placed, Plan, Question

GIB = 2**30


def speed(plan: Plan, candidate: Candidate) -> tuple[float, float, float]:
    """Tokens a second of one GPU, and MFU with attention counted causally and fully."""
    question = plan.question
    # Of whole documents, whatever they leave unfilled.
    tokens = question.tokens // question.seq * question.seq
    rate = tokens / candidate.seconds.total / question.gpus
    peak = plan.hardware.flops(question.dtype)
    return rate, rate * plan.flops.causal / peak, rate * plan.flops.full / peak


def describe(plan: Plan) -> list[str]:
    """The plan as lines of text: the best, why the others lost. Without any, `why_none` is to be said as well."""
    question, hw = plan.question, plan.hardware
    asked = f"{question.gpus} × {hw.name}, {question.tokens:,} tokens a step in documents of {question.seq:,}"
    lines = [f"{asked}; {plan.considered:,} ways considered"]
    if plan.question.seq > plan.positions:
        lines.append(f"documents are longer than the {plan.positions:,} positions that the model was made for")
    if not plan.best:
        return [*lines, *left_out(plan)]
    rows: list[tuple[str, ...]] = [
        ("layout", "recompute", "schedule", "tokens", "n", *PARTS, "in all", "tok/s", "MFU c|f, %", "behind")
    ]
    for placed in plan.best:
        c, m = placed.candidate, placed.memory
        rate, causal, full = speed(plan, c)
        sizes = [f"{size / GIB:.1f}" for size in (*parts(m).values(), m.total)]
        mfu = f"{100 * causal:.1f} | {100 * full:.1f}"
        run = (str(c.layout), c.policy, schedule(c), f"{c.tokens:,}", str(c.micro_batches))
        rows.append((*run, *sizes, f"{rate:,.0f}", mfu, behind(plan.best[0].candidate, c)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["", *("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)]
    lines += [
        "",
        "tokens: of a micro-batch, of which each data-parallel rank runs n a step; memory: GiB of the fullest rank;",
        f"of {hw.memory_bytes / GIB:.1f} GiB {hw.reserve_bytes / GIB:.1f} are left to libraries, and to fragments",
        f"{100 * hw.fragmentation:g} % of what a step allocates; tok/s: of one GPU.",
    ]
    if plan.too_large:
        lines += ["", "Faster, and too large:"]
        lines += [f"  {way(p.candidate)}: lacks {-p.spare / GIB:.1f} GiB" for p in plan.too_large]
    return [*lines, "", *left_out(plan)]


def left_out(plan: Plan) -> list[str]:
    """What the search met and passed over, and what it did not try, a line each."""
    out, seq = plan.left_out, plan.question.seq
    lines = [f"refused by the engine, {count:,} ways: {message}" for message, count in out.refused.most_common()]
    if out.overfull:
        lines.append(f"too large, {out.overfull:,} layouts and schedules: masters, gradients and moments alone")
    if out.idle:
        too_few = f"{plan.question.tokens:,} tokens are too few documents of {seq:,}"
        lines.append(f"idle ranks, {out.idle:,} layouts and schedules: {too_few}")
    return [*lines, f"not tried: {NOT_TRIED}"]


PARTS = ("weights", "moments", "gradients", "gathered", "activations", "head")


def parts(memory: Memory) -> dict[str, int]:
    """Bytes by the parts that are shown."""
    return {
        "weights": memory.parameters,
        "moments": memory.moments,
        "gradients": memory.gradients + memory.unreduced,
        "gathered": memory.gathered,
        "activations": memory.activations,
        "head": memory.head,
    }


def schedule(candidate: Candidate) -> str:
    """The pipeline's schedule, or a dash."""
    return str(candidate.options.get("pipeline", {}).get("schedule", "-"))


def way(candidate: Candidate) -> str:
    """A candidate in a line."""
    pipeline = "" if candidate.layout.pp == 1 else f", {schedule(candidate)}"
    return f"{candidate.layout}{pipeline}, recompute {candidate.policy}, micro-batches of {candidate.tokens:,} tokens"


def behind(best: Candidate, other: Candidate) -> str:
    """By how much another is slower, and in which part of the step it loses most."""
    if other is best:
        return "-"
    slower = other.seconds.total / best.seconds.total - 1
    return f"{100 * slower:.1f} %: {other.seconds.longest_beyond(best.seconds).replace('_', ' ')}"


def why_none(plan: Plan) -> str:
    """One line for a question without an answer."""
    question = plan.question
    if plan.closest is not None:
        return f"No layout fits; the closest, {way(plan.closest.candidate)}, lacks {-plan.closest.spare / GIB:.1f} GiB."
    if plan.considered:
        (message, count), *_ = plan.left_out.refused.most_common(1)
        return f"No layout fits that the engine accepts; of {count:,} it says: {message}"
    why = []
    if plan.left_out.overfull:
        why.append(f"masters, gradients and moments alone exceed the memory of {question.gpus} GPUs")
    if plan.left_out.idle:
        few = f"{question.tokens:,} tokens a step are too few documents of {question.seq:,} for every rank"
        why.append(f"where they fit, {few}" if why else few)
    return f"No layout fits: {'; '.join(why)}."


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as data: bytes, seconds, tokens."""
    return {
        "question": plan.question._asdict(),
        "hardware": plan.hardware.model_dump(),
        "considered": plan.considered,
        "left_out": vars(plan.left_out) | {"refused": dict(plan.left_out.refused), "not_tried": NOT_TRIED},
        "best": [_as_json(plan, placed) for placed in plan.best],
        "too_large": [_as_json(plan, placed) for placed in plan.too_large],
    }


def _as_json(plan: Plan, placed: Placed) -> dict[str, Any]:
    c = placed.candidate
    rate, causal, full = speed(plan, c)
    return {
        "layout": str(c.layout),
        **c.options,
        "max_tokens_per_mb": c.tokens,
        "micro_batches": c.micro_batches,
        "memory": asdict(placed.memory) | {"total": placed.memory.total, "spare": placed.spare},
        "seconds": asdict(c.seconds) | {"total": c.seconds.total},
        "tokens_per_second_per_gpu": rate,
        "mfu": {"causal": causal, "full": full},
    }


def run_config(question: Question, candidate: Candidate) -> dict[str, Any]:
    """What `archon sft --config` reads; the data are the reader's to name."""
    model = {"path": question.path, "dtype": question.dtype, "layout": str(candidate.layout)}
    return {
        "run_dir": "runs/planned",
        "batch_size": question.tokens // question.seq,
        "model": model | {"max_tokens_per_mb": candidate.tokens} | candidate.options,
        "train_data": {"path": "train.jsonl", "max_length": question.seq},
    }
