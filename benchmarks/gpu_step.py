"""The GPU cases of `benchmarks.train_step`: shapes of released models in bfloat16, eager and compiled, compared
with transformers and with the prediction of archon's planner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from archon.tools.bench.origin import spread
from benchmarks import harness
from benchmarks.checkpoints import shape
from benchmarks.harness import Sides
from benchmarks.record import Record
from benchmarks.step_check import compare

EAGER, COMPILED, PLANNED = "archon (eager)", "archon (compiled)", "archon's planner"
MFU_AIM = ">= 0.5"
GPU, HARDWARE = "H200", "h200"


class GpuCase(NamedTuple):
    """A shape of `benchmarks.checkpoints`, its documents in one micro-batch, and the recompute policy of every side."""

    model: str
    documents: int
    seq: int = 4096
    recompute: str = "none"


# The logits of transformers limit the documents; archon's master weights and moments limit the layers of 30B-A3B.
CASES = {
    "0.6B": GpuCase("0.6B", 8),
    "1.7B": GpuCase("1.7B", 4),
    "4B": GpuCase("4B", 2),
    "30B-A3B": GpuCase("30B-A3B-8L", 2),
    "0.6B-32k": GpuCase("0.6B", 1, 32768, "full"),
    "4B-32k": GpuCase("4B", 1, 32768, "full"),
}


class PredictedStep(NamedTuple):
    """The planner's prediction of a step: seconds and peak bytes."""

    seconds: float
    bytes: int


def predict_step(options: dict[str, Any]) -> PredictedStep:
    """Return the prediction of archon's eager step on one GPU, from the checkpoint's config alone."""
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.engine.memory.memory_model import rank_parameters
    from archon.models import get_model_spec
    from archon.parallel.layout import ParallelLayout
    from archon.schema.config import EngineConfig
    from archon.tools.planner.hardware import read_hardware
    from archon.tools.planner.search import Planner
    from archon.tools.planner.time_model import TimeModel

    hf_config = read_hf_config(options["checkpoint"])
    spec = get_model_spec(hf_config["model_type"])
    args, hardware, layout = spec.model_args_class.from_hf_config(hf_config), read_hardware(HARDWARE), ParallelLayout()
    planner = Planner(spec, args, hardware)
    config = EngineConfig(
        path=options["checkpoint"],
        dtype=options["dtype"],
        max_tokens_per_mb=options["max_tokens_per_mb"],
        activation_checkpoint={"mode": options["recompute"]},
    )
    tokens, seq = sum(options["lengths"]), max(options["lengths"])
    state = rank_parameters(planner.weights, layout, None, 0)
    seconds = TimeModel(args, hardware, seq).step(config, layout, None, state, tokens, 1)
    return PredictedStep(seconds.total, planner.memory_model.estimate_rank(config, layout, 0, tokens, 1).total)


def record_prediction(record: Record, found: PredictedStep, seconds: dict[str, list[float]], tokens: int) -> None:
    """Record the prediction and its ratios to the measured `seconds` and memory of each of archon's sides."""
    memory = [{"memory": {"allocated": found.bytes}}]
    record.sides[PLANNED] = spread([tokens / found.seconds], "tok/s", memory)
    for side, measured in seconds.items():
        record.ratios[f"{PLANNED} / {side}, step time"] = harness.ratio([found.seconds] * len(measured), measured)
        if "allocated" in record.sides[side].memory_bytes:  # by a GPU alone
            peak = float(record.sides[side].memory_bytes["allocated"])
            record.ratios[f"{PLANNED} / {side}, memory"] = harness.ratio([float(found.bytes)], [peak])


def measure_gpu(case: str, options: dict[str, Any], alone: bool, rounds: int, keep: bool) -> Record:
    """Measure one GPU case, one side after the other, because the optimizer states of two do not fit at once."""
    from archon.models.flops import PEAK_BF16_FLOPS, MatmulShape

    tokens, config = sum(options["lengths"]), shape(options["model"])
    record = harness.new_record("train_step", f"gpu-{case}", options["threads"])
    record.setup = {"model": config, "lengths": options["lengths"], "dtype": "bfloat16, float32 masters"}
    record.setup["recompute"] = options["recompute"]
    record.notes.append("sides one after the other, each alone on the GPU; MFU against 989 TFLOP/s, dense bfloat16")
    record.notes.append(f"{PLANNED} predicts the eager step on an {GPU}")
    if "num_experts" in config:
        record.setup["routing"] = "natural"
        record.notes.append("routing is natural: every side's own router chooses the experts")
    work = MatmulShape.from_hf_config(config).packed(options["lengths"])
    facts: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    for side in [EAGER, COMPILED, *([] if alone else ["transformers"])]:
        try:
            with Sides("benchmarks.train_step", [side], options) as sides:
                if side in sides.workers:
                    facts[side] = sides.facts(side)
                    record.checks += compare({EAGER: facts[EAGER], side: facts[side]}, "bfloat16", EAGER)
                runs = sides.alternate(rounds, warmup=2)
        except harness.BenchmarkError as error:
            if side == EAGER or isinstance(error, harness.DisagreementError):
                raise
            record.missing[side] = str(error)
            continue
        record.missing |= sides.missing
        if side not in runs:
            continue
        seconds[side] = [run["seconds"] for run in runs[side]]
        rates[side] = [tokens / s for s in seconds[side]]
        record.sides[side] = spread(rates[side], "tok/s", runs[side])
        for convention in ("full", "causal"):
            shares = [getattr(work.mfu(s, PEAK_BF16_FLOPS[GPU]), convention) for s in seconds[side]]
            record.sides[f"{side}, {convention} MFU"] = spread([100 * share for share in shares], "%")
        if case == "4B" and side != "transformers":
            record.ratios[f"{side}, causal MFU"] = harness.ratio(shares, [1.0] * rounds, MFU_AIM)
    for side in (EAGER, COMPILED):
        if side in rates and "transformers" in rates:
            record.ratios[f"{side} / transformers"] = harness.ratio(rates[side], rates["transformers"])
    seconds.pop("transformers", None)
    record_prediction(record, predict_step(options), seconds, tokens)
    harness.finish(record, keep)
    return record
