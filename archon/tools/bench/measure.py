"""Measurement of one point on its ranks: build, check losses, time steps, record collectives, profile."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import torch

from archon.engine.build import resolve_device
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.flops import PEAK_BF16_FLOPS, MatmulShape
from archon.models.layers.matmul import mm
from archon.models.lora.targets import active_parameters
from archon.parallel.collectives import CollectiveRecorder, group_names
from archon.parallel.control_plane import ControlPlane
from archon.tools.bench.bench_record import (
    CollectiveTraffic,
    Losses,
    Measurement,
    PointRequest,
    PointResult,
    RankResult,
    schedule_span,
    sum_by_name,
)
from archon.tools.bench.memory_meter import MemoryMeter
from archon.tools.bench.origin import NumericCheck, relative_difference, spread
from archon.tools.bench.partition import merge_short_segments
from archon.tools.bench.profiling import profile_step
from archon.tools.bench.shapes import shard_documents

# Maximum relative differences between two layouts on the same batch. They are larger after AdamW's first step, because
# the sign of a nearly zero gradient depends on rounding.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2}
TOLERANCE_AFTER_STEP = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 5e-2}
# A matmul that exceeds a core's caches and takes a fraction of a second.
GEMM_SIZE, GEMM_ROUNDS = 1024, 8


class DeviationError(ArithmeticError):
    """The losses of a layout differ from the first layout."""


def measure(request: PointRequest) -> PointResult:
    """Measure a point; return the measurement of all ranks and the loss checks. A collective.

    Raises:
        DeviationError: the losses differ from the reference; raised before anything is timed.
    """
    sweep, point = request.config, request.point
    config = sweep.engine_config(point)
    device = resolve_device(config.device)
    start = MemoryMeter(device.type == "cuda")
    engine = ArchonEngine(config)
    engine.initialize()
    world = ControlPlane.world()
    batch = shard_documents(point.shape, engine.args.vocab_size, engine.ranks.dp.rank, engine.ranks.dp.size)

    def step() -> dict[str, float]:
        metrics = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return metrics

    first, second = step(), step()
    losses = Losses(loss=first["loss"], grad_norm=first["grad_norm"], loss_after_one_step=second["loss"])
    checks = [] if request.reference is None else compare_losses(losses, *request.reference, point.dtype)
    for _ in range(sweep.warmup - 2):
        step()
    meter = MemoryMeter(device.type == "cuda")
    seconds = []
    for _ in range(sweep.steps):
        world.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    peaks = meter.read()
    memory = {kind: size for kind, size in peaks.items() if not kind.startswith("rss")}
    if "rss_peak" in peaks and start.rss:
        memory["rss_growth"] = peaks["rss_peak"] - start.rss  # since before the model was built
    with CollectiveRecorder(group_names(engine.parallel_dims)) as recorder:
        step()
    world.barrier()
    profile, profiled_s = profile_step(step, engine.model, device)
    result = RankResult(
        step_s=seconds,
        memory_bytes=memory,
        profiled_s=profiled_s,
        start_us=profile.start,
        phases_s=sum_by_name((name, length / 1e6) for name, _, length in profile.segments),
        schedule_us=schedule_span(profile.segments),
        segments=merge_short_segments(profile.segments),
        collective_busy_s=profile.collective_busy_s,
        gemm_flops=gemm_flops(getattr(torch, point.dtype), world) if device.type == "cpu" else 0.0,
    )
    by_rank = [
        RankResult.model_validate(json.loads(data)) for data in world.all_gather(result.model_dump_json().encode())
    ]
    slowest = [max(times) for times in zip(*(rank.step_s for rank in by_rank), strict=True)]
    products = replace(MatmulShape.from_args(engine.args), lora=active_parameters(engine.adapter, engine.lora))
    flops = products.packed(point.shape.lengths)
    peak, source = _peak_flops(device, point.dtype, sweep.peak_tflops, by_rank)
    measurement = Measurement(
        ranks=world.size,
        threads=torch.get_num_threads(),
        losses=losses,
        routing="natural" if engine.args.sizes.experts else None,
        traffic=[
            CollectiveTraffic(kind=key.kind, group=key.group, size=key.size, count=total.count, bytes=total.bytes)
            for key, total in sorted(recorder.sums.items())
        ],
        by_rank=by_rank,
        peak_flops=peak,
        peak_source=source,
        flops_full=flops.full,
        flops_causal=flops.causal,
        step_s=spread(slowest, "s"),
        tokens_per_s=spread([point.shape.tokens / s for s in slowest], "tok/s"),
    )
    return PointResult(measurement=measurement, checks=checks)


def compare_losses(losses: Losses, layout: str, reference: Losses, dtype: str) -> list[NumericCheck]:
    """Check `losses` against `reference`, the losses in `layout`; raise DeviationError if they differ."""
    checks = []
    for name, value in losses:
        other = getattr(reference, name)
        tolerance = (TOLERANCE_AFTER_STEP if name == "loss_after_one_step" else TOLERANCE)[dtype]
        difference = relative_difference(value, other)
        if not difference <= tolerance:
            raise DeviationError(
                f"{name.replace('_', ' ')} is {value:.9g}, but {other:.9g} in {layout}: they differ by "
                f"{difference:.1e}, allowed {tolerance:.0e}; the point is not timed"
            )
        checks.append(NumericCheck(what=name, peer=layout, difference=difference, tolerance=tolerance))
    return checks


def gemm_flops(dtype: torch.dtype, world: ControlPlane) -> float:
    """Return FLOP/s of this process's fastest matmul with the models' kernel, while all ranks run one."""
    a, b = (torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype) for _ in range(2))
    best = float("inf")
    world.barrier()
    for _ in range(GEMM_ROUNDS):
        start = time.perf_counter()
        mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * GEMM_SIZE**3 / best


def _peak_flops(
    device: torch.device, dtype: str, peak_flops: float | None, by_rank: list[RankResult]
) -> tuple[float | None, str]:
    """Return the peak FLOP/s of all ranks together (None if unknown) and the source of the number."""
    if peak_flops is not None:
        return peak_flops * 1e12 * len(by_rank), f"--peak-flops, {peak_flops:g} TFLOP/s a rank"
    if device.type == "cpu":
        return sum(rank.gemm_flops for rank in by_rank), f"measured matmul of {GEMM_SIZE}² matrices, {dtype}"
    name = torch.cuda.get_device_name(device)
    part = max((part for part in PEAK_BF16_FLOPS if part in name), key=len, default=None)
    if part is None or dtype != "bfloat16":
        return None, f"the peak of {name} in {dtype} is unknown; set --peak-flops"
    return PEAK_BF16_FLOPS[part] * len(by_rank), f"dense bfloat16 peak of {part}"
