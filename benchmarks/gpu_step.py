"""Training steps on one GPU: shapes of released models in bfloat16 with float32 masters, next to peers and the planner.

`benchmarks.gpu` runs the cases. A case has one or more sides of archon, which differ by fields of `EngineConfig`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from archon.tools.bench.origin import spread
from benchmarks import harness, train_step
from benchmarks.checkpoints import make_checkpoint, make_lora, shape
from benchmarks.harness import Sides
from benchmarks.record import Record
from benchmarks.step_check import compare

ARCHON, PLANNED = "archon", "archon's planner"
TRANSFORMERS, LIGER, PEFT = "transformers", "transformers + Liger", "peft + Liger"
TENSORWISE, ROWWISE = "archon (FP8 tensorwise)", "archon (FP8 rowwise)"
UNSHARED = "archon (no prefix sharing)"
PLANNER_AIM = "0.85 to 1.15"
DEFAULT_HARDWARE = "h100-80gb"
PENDING = "the stage ended before this side was measured"
LORA_RANK = 16
SAMPLES = 8


class Aim(NamedTuple):
    """The project's aim for a side of archon.

    Attributes:
        figure: `tok/s`; `full MFU`, in percent; or another side, for the ratio of speeds to it.
        bound: minimum value.
        side: side of archon.
    """

    figure: str
    bound: float
    side: str = ARCHON


class GpuCase(NamedTuple):
    """A training step.

    Attributes:
        model: a shape of `benchmarks.checkpoints`.
        documents: documents of the step, all in one micro-batch.
        seq: tokens of a document.
        prompt: length of the prefix that `SAMPLES` consecutive documents share; it has no loss.
        aim: aim of the project, or None.
        sides: fields of `EngineConfig` by archon's sides; `ARCHON` is the reference of checks and ratios.
        peers: other sides.
        lora: every side trains the same LoRA.
        recompute: peers recompute all blocks; fields of archon's sides set their own policy.
    """

    model: str
    documents: int
    seq: int = 4096
    prompt: int = 0
    aim: Aim | None = None
    sides: Mapping[str, dict[str, Any]] = {ARCHON: {}}
    peers: tuple[str, ...] = (LIGER,)
    lora: bool = False
    recompute: bool = False


RECOMPUTED: dict[str, Any] = {"activation_checkpoint": {"mode": "full"}}
CASES = {
    "0.6B": GpuCase("0.6B", 8, aim=Aim("tok/s", 90_000)),
    "experts": GpuCase("30B-A3B-4L", 4, aim=Aim("full MFU", 35)),
    "prefixes": GpuCase(
        "0.6B", 32, 1024, 768, Aim(UNSHARED, 2), {ARCHON: {}, UNSHARED: {"share_prefixes": False}}, peers=()
    ),
    "8B-lora": GpuCase(
        "8B",
        4,
        aim=Aim("tok/s", 13_000),
        sides={ARCHON: {"activation_checkpoint": {"mode": "auto"}}},
        peers=(PEFT,),
        lora=True,
        recompute=True,
    ),
    "fp8": GpuCase(
        "8B-8L",
        4,
        aim=Aim(ARCHON, 1.2, TENSORWISE),
        sides={ARCHON: {}, TENSORWISE: {"fp8": "tensorwise"}, ROWWISE: {"fp8": "rowwise"}},
        peers=(),
    ),
    # These peers keep all logits, and fit only half the documents of 0.6B.
    "1.7B": GpuCase("1.7B", 4, aim=Aim("tok/s", 45_000), peers=(LIGER, TRANSFORMERS, "torchtitan")),
    "0.6B-32k": GpuCase("0.6B", 1, 32768, sides={ARCHON: RECOMPUTED}, recompute=True),
}
MINIATURE_MODELS = {"30B-A3B-4L": "tiny-moe"}
"""Models of miniature cases; the default is `tiny`."""
MINIATURE_SEQ = 48


class PredictedStep(NamedTuple):
    """The planner's prediction of a step: seconds and peak bytes."""

    seconds: float
    bytes: int


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Load a side and take its first two steps; `options["engines"]` has the fields of archon's sides."""
    if side not in options["engines"]:
        return train_step.prepared(train_step.peer_step(side, options), options["device"])
    import torch
    from torch.nn.utils.rnn import pad_sequence

    docs = train_step.documents(options)
    scored = [torch.arange(len(doc)) >= max(1, options["prompt"]) for doc in docs]
    engine = train_step.archon_engine(options, compiled="auto", **options["engines"][side])
    step = train_step.step_of(engine, docs, loss_mask=pad_sequence(scored, batch_first=True).long())
    return train_step.prepared(step, options["device"])


def planned_options(case: GpuCase, checkpoint: Path | str) -> dict[str, Any]:
    """Return the options of a case's sides that do not depend on the machine."""
    return {
        "checkpoint": str(checkpoint),
        "model": case.model,
        "dtype": "bfloat16",
        "lengths": [case.seq] * case.documents,
        "max_tokens_per_mb": case.seq * case.documents,
        "prompt": case.prompt,
        "samples": SAMPLES,
        "recompute": "full" if case.recompute else "none",
        "engines": dict(case.sides),
        **({"lora": ""} if case.lora else {}),
    }


def case_options(case: GpuCase, folder: Path, threads: int, *, miniature: bool) -> dict[str, Any]:
    """Make the checkpoint of a case in `folder`, unless an earlier case did, and return the options of its sides."""
    device = "cpu" if miniature else "cuda"
    made = {"dtype": "bfloat16", "device": device}
    if miniature:
        model, prompt = MINIATURE_MODELS.get(case.model, "tiny"), case.prompt * MINIATURE_SEQ // case.seq
        case = case._replace(model=model, documents=SAMPLES, seq=MINIATURE_SEQ, prompt=prompt)
    checkpoint = make_once(folder / case.model, partial(make_checkpoint, name=case.model, **made))
    options = planned_options(case, checkpoint) | {"threads": threads, "device": device}
    if case.lora:
        make = partial(make_lora, checkpoint=checkpoint, rank=LORA_RANK, **made)
        options["lora"] = str(make_once(folder / f"{case.model}-lora", make))
    return options


def make_once(path: Path, make: Callable[[Path], Path]) -> Path:
    """Make a folder unless an earlier stage did, and free the GPU for the sides, which are other processes."""
    import torch

    if not path.exists():
        unfinished = path.with_name(f"{path.name}-unfinished")
        make(unfinished).rename(path)
    gc.collect()
    torch.cuda.empty_cache()
    return path


def hardware_name(gpu: str) -> str:
    """Return the planner's hardware file for a GPU's name, such as `NVIDIA H200`; by default an H100's."""
    from archon.tools.planner.hardware import known_hardware

    return next((file for file in known_hardware() if file.partition("-")[0].upper() in gpu), DEFAULT_HARDWARE)


def case_work(options: dict[str, Any]) -> Any:
    """Return the `MatmulShape` of a case, from the config of its checkpoint."""
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.models import get_model_spec
    from archon.models.flops import MatmulShape
    from archon.models.lora.targets import active_parameters, resolve_lora_sizes
    from archon.schema.config import LoRASpec

    hf_config = read_hf_config(options["checkpoint"])
    spec = get_model_spec(hf_config["model_type"])
    work = MatmulShape.from_args(spec.model_args_class.from_hf_config(hf_config))
    if "lora" not in options:
        return work
    adapter = spec.state_dict_adapter_class(hf_config)
    return replace(work, lora=active_parameters(adapter, resolve_lora_sizes(adapter, LoRASpec(rank=LORA_RANK))))


def predict_step(options: dict[str, Any], side: str = ARCHON, hardware: str = DEFAULT_HARDWARE) -> PredictedStep:
    """Return the planner's prediction of a side's step on one GPU."""
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.schema.config import EngineConfig
    from archon.tools.planner.hardware import read_hardware
    from archon.tools.planner.prediction import Batch, predict

    fields = {name: options[name] for name in ("dtype", "max_tokens_per_mb")} | options["engines"][side]
    fields |= {"lora": {"rank": LORA_RANK}} if "lora" in options else {}
    config = EngineConfig.parse({"path": options["checkpoint"], **fields})
    batch = Batch(documents=len(options["lengths"]), seq=max(options["lengths"]))
    prediction = predict(config, read_hf_config(options["checkpoint"]), read_hardware(hardware), batch)
    return PredictedStep(prediction.seconds.total, prediction.memory.total)


def record_prediction(record: Record, side: str, predicted: PredictedStep, seconds: list[float], tokens: int) -> None:
    """Record the planner's prediction of a side, and its ratios to the measured `seconds` and memory."""
    memory = [{"memory": {"allocated": predicted.bytes}}]
    record.sides[f"{PLANNED}, {side}"] = spread([tokens / predicted.seconds], "tok/s", memory)
    planned = [predicted.seconds] * len(seconds)
    record.ratios[f"{PLANNED} / {side}, step time"] = harness.ratio(planned, seconds, PLANNER_AIM)
    if "allocated" in record.sides[side].memory_bytes:  # by a GPU alone
        peak = float(record.sides[side].memory_bytes["allocated"])
        record.ratios[f"{PLANNED} / {side}, memory"] = harness.ratio([float(predicted.bytes)], [peak], PLANNER_AIM)


def record_aim(record: Record, aim: Aim, rates: Mapping[str, list[float]]) -> None:
    """Record the ratio of a case's figure and its aim, once both are measured."""
    side, bound = aim.side, aim.bound
    if side not in rates:
        return
    if aim.figure == "tok/s":
        name = f"{side} / {bound:,.0f} tok/s"
        record.ratios[name] = harness.ratio(rates[side], [bound] * len(rates[side]), ">= 1")
    elif aim.figure == "full MFU":
        shares = record.sides[f"{side}, full MFU"].values
        record.ratios[f"{side}, full MFU / {bound:.0f} %"] = harness.ratio(shares, [bound] * len(shares), ">= 1")
    elif aim.figure in rates:
        record.ratios[f"{side} / {aim.figure}"] = harness.ratio(rates[side], rates[aim.figure], f">= {bound:g}")


def measure_gpu(
    name: str, case: GpuCase, options: dict[str, Any], rounds: int, write: Callable[[Record], None]
) -> None:
    """Measure one case, one side after the other, because the optimizer states of two do not fit at once.

    `write` receives the record after every side: a stage that is stopped loses one side.
    """
    import torch

    from archon.models.flops import PEAK_BF16_FLOPS

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    peak = PEAK_BF16_FLOPS[max((name for name in PEAK_BF16_FLOPS if name in gpu), key=len, default="H100")]
    tokens, config = sum(options["lengths"]), shape(options["model"])
    record = harness.new_record("gpu", f"train-{name}", options["threads"])
    masters = "float32 LoRA" if case.lora else "float32 masters"
    record.setup = {"model": config, "lengths": options["lengths"], "dtype": f"{options['dtype']}, {masters}"}
    record.setup |= {"prompt": options["prompt"], "engine fields": options["engines"]}
    record.notes.append(
        f"one side after the other, alone on the GPU; MFU against {peak / 1e12:.0f} TFLOP/s, dense bfloat16"
    )
    if "num_experts" in config:
        record.setup["routing"] = "natural"
        record.notes.append("routing is natural: every side's own router chooses the experts")
    work = case_work(options).packed(options["lengths"])
    record.missing = dict.fromkeys([*case.sides, *case.peers], PENDING)
    facts: dict[str, dict[str, Any]] = {}
    rates: dict[str, list[float]] = {}
    for side in [*case.sides, *case.peers]:
        engine = case.sides.get(side)
        try:
            with Sides("benchmarks.gpu_step", [side], options) as sides:
                if side in sides.workers:
                    facts[side] = sides.facts(side)
                    rounding = "float8" if engine is not None and "fp8" in engine else "bfloat16"
                    record.checks += compare({ARCHON: facts[ARCHON], side: facts[side]}, rounding)
                runs = sides.alternate(rounds, warmup=2)
                if engine is not None:
                    record.profiles[side] = sides.workers[side].run(profile=True)["profile"]
            reason = sides.missing.get(side)
        except harness.BenchmarkError as error:
            if side == ARCHON:
                raise
            runs, reason = {}, str(error)
        del record.missing[side]
        if reason is not None:
            record.missing[side] = reason
        else:
            seconds = [run["seconds"] for run in runs[side]]
            rates[side] = [tokens / s for s in seconds]
            record.sides[side] = spread(rates[side], "tok/s", runs[side])
            for convention in ("full", "causal"):
                shares = [getattr(work.mfu(s, peak), convention) for s in seconds]
                record.sides[f"{side}, {convention} MFU"] = spread([100 * share for share in shares], "%")
            if engine is not None:
                record_prediction(record, side, predict_step(options, side, hardware_name(gpu)), seconds, tokens)
            else:
                record.ratios[f"{ARCHON} / {side}"] = harness.ratio(rates[ARCHON], rates[side])
            if case.aim is not None:
                record_aim(record, case.aim, rates)
        write(record)


if __name__ == "__main__":
    arguments = harness.parser(__doc__).parse_args()
    harness.serve(prepare, arguments.worker)
