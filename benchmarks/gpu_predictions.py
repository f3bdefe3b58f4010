"""Predict every GPU aim from kernel counts, bytes and measured rates, so that a run on a GPU can confirm or refute it.

    python -m benchmarks.gpu_predictions           # print the predictions
    python -m benchmarks.gpu_predictions --write   # write benchmarks/records/gpu.predictions.json

The rates are of one H100 80GB (torch 2.11.0+cu130, 27 Nov 2026, commit c582f3f). A prediction names the parts of
archon that it assumes: without them it does not hold. `benchmarks.gpu --summary` compares it with a measurement. A
prediction is confirmed if the figure is within `TOLERANCE` of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from archon.schema.config import StrictModel
from benchmarks import gpu_step
from benchmarks.checkpoints import shape
from benchmarks.record import FOLDER, PREDICTIONS, Record

# Measured rates of one H100.
BANDWIDTH = 3.0e12  # bytes/s of a device copy
GEMM = 0.73e15  # FLOP/s of all matmuls of a 0.6B step: 117 TFLOP in 160 ms
FP8_GEMM = 1.7 * GEMM  # the peaks differ by 2; no rate of FP8 matmuls alone was measured
# Forward and backward of causal attention, 32,768 tokens, 16 query and 8 key heads of 128, by FlashAttention-4:
ATTENTION_LONG = 0.486e15  # 8 documents of 4,096
ATTENTION_RAGGED = 0.387e15  # ragged documents, about 1,000 on average; also used for prefixes
HEAD_TILE = (57.2e-3 - 30.6e12 / GEMM) / 32768  # s per token of the head's kernel, beyond its three matmuls
DECODE_GEMM = 0.4e15  # FLOP/s of matmuls with 256 rows: estimated, not measured
DECODE_BANDWIDTH = 0.8 * BANDWIDTH  # pages are gathered: estimated
GAP = 1.5e-6  # s between two kernels while the host runs ahead, or inside a CUDA graph: estimated
LAUNCHES = 65  # launches of a block, forward and backward
CASTS = 12  # bytes per weight: float32 to bfloat16 in the forward, bfloat16 gradient to float32 in the backward
ADAMW = 32  # bytes per float32 weight: read weight, gradient, two moments; write three; and once the gradient's norm

VOCABULARY = 151936
TOLERANCE = 0.15
PEAK = 989e12

HEAD, ATTENTION = "the head as one kernel per tile", "FlashAttention-4"
BLOCKS = "65 launches per block, grouped casts, AdamW with clipping in one pass"
EXPERTS = "experts without host reads: permutation, two grouped matmuls, weighted sum"
PREFIXES = "shared prefixes planned ahead, head on scored tokens only"
DECODE = "a captured decode step with paged attention, fused norm and rotary embedding, sampling on the device"
FP8 = "torchao's float8 recipes inside compiled blocks"


class Prediction(StrictModel):
    """A predicted figure.

    The measured figure is the median of `side` in the record `gpu.CASE.json`, divided by the median of `over` if set.
    """

    name: str
    setup: str
    case: str
    side: str
    unit: str = Field(description="tok/s, % full MFU, or ×")
    aim: float
    value: float
    parts_ms: dict[str, float] = Field(description="milliseconds of the step by kind of work")
    assumes: list[str]
    over: str | None = None

    def measured(self, records: Mapping[str, Record]) -> float | None:
        """Return the measured figure, from records by case; None if it was not measured."""
        record = records.get(self.case)
        if record is None or self.side not in record.sides:
            return None
        if self.over is not None:
            other = record.sides.get(self.over)
            return None if other is None else record.sides[self.side].median / other.median
        name = self.side if self.unit == "tok/s" else f"{self.side}, full MFU"
        return record.sides[name].median

    def is_confirmed(self, figure: float) -> bool:
        """Return whether a measured figure is within `TOLERANCE` of the prediction."""
        return abs(figure / self.value - 1) <= TOLERANCE


class Model:
    """Sizes of one of `SHAPES`: parameters of the head, of all blocks, and of the blocks' matmuls per token."""

    def __init__(self, name: str) -> None:
        config = shape(name)
        self.dim, self.layers = config["hidden_size"], config["num_hidden_layers"]
        self.query = config["num_attention_heads"] * config["head_dim"]
        self.keys = config["num_key_value_heads"] * config["head_dim"]
        self.head = VOCABULARY * self.dim
        attention = 2 * self.dim * (self.query + self.keys)
        self.experts, self.chosen = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)
        self.width = config.get("moe_intermediate_size", config["intermediate_size"])
        network = 3 * self.dim * self.width
        self.blocks = self.layers * (attention + self.chosen * network)
        self.all_blocks = self.layers * (attention + self.experts * network)
        self.weights = self.all_blocks + self.head * (1 if config["tie_word_embeddings"] else 2)

    def attention_flops(self, documents: int, length: int) -> float:
        """Causal attention, forward and backward: 3.5 times two matmuls of half a square each [Dao 2023]."""
        return 3.5 * self.layers * documents * 2 * self.query * length**2

    def elementwise_bytes(self) -> float:
        """Bytes per token of a step's kernels between matmuls.

        Forward of a block in bfloat16, reads and writes: two norms with their residual additions (8 dim); q and k norm
        with rotary embedding (2 q + 2 k); silu(gate) · up (3 width). The backward reads its inputs again and writes
        gradients: twice the forward. Attention's preprocessing reads output and gradient (2 q).
        """
        forward = 8 * self.dim + 2 * self.query + 2 * self.keys + 3 * self.width * self.chosen
        if self.experts > 1:  # gather rows by expert, and sum them weighted
            forward += 4 * self.chosen * self.dim
        return 2 * self.layers * (3 * forward + 2 * self.query)


def parts_of_a_step(model: Model, documents: int, length: int) -> dict[str, float]:
    """Return seconds by kind of work of a full training step on documents of one length."""
    tokens = documents * length
    return {
        "GEMM": 6 * (model.blocks + model.head) * tokens / GEMM,
        "attention": model.attention_flops(documents, length) / ATTENTION_LONG,
        "elementwise": model.elementwise_bytes() * tokens / BANDWIDTH,
        "head": HEAD_TILE * tokens,
        "casts": CASTS * model.weights / BANDWIDTH,
        "optimizer": ADAMW * model.weights / BANDWIDTH,
        "idle": model.layers * LAUNCHES * GAP,
    }


def training(model: str, documents: int, aim: float, assumes: list[str]) -> Prediction:
    """Predict tokens per second of a full training step."""
    parts, setup = parts_of_a_step(Model(model), documents, 4096), f"Qwen3-{model}, {documents} × 4,096 tokens"
    rate = documents * 4096 / sum(parts.values())
    return predicted("training step", setup, f"train-{model}", "tok/s", aim, rate, parts, assumes)


def experts() -> Prediction:
    """Predict MFU of 30B-A3B at 4 layers: AdamW and casts of 3.1 billion weights are a third of the step."""
    model, documents = Model("30B-A3B-4L"), 4
    parts = parts_of_a_step(model, documents, 4096)
    # Matmuls of 128 experts with 1,024 rows each: 22 TFLOP took 43 ms.
    grouped = 6 * model.blocks * documents * 4096
    parts["GEMM"] += grouped / 0.52e15 - grouped / GEMM
    full = grouped + 6 * model.head * documents * 4096 + 12 * model.layers * model.query * documents * 4096**2
    mfu = 100 * full / sum(parts.values()) / PEAK
    assumes = [HEAD, ATTENTION, BLOCKS, EXPERTS]
    setup = "Qwen3-30B-A3B with 4 layers, 4 × 4,096 tokens"
    return predicted("experts", setup, "train-experts", "% full MFU", 35, mfu, parts, assumes)


def lora() -> Prediction:
    """Predict an 8B LoRA step: no weight gradients, two forwards of every second block, a negligible optimizer."""
    model, documents, recomputed = Model("8B"), 4, 0.5
    tokens = documents * 4096
    full = parts_of_a_step(model, documents, 4096)
    forward = 2 * model.blocks * tokens / GEMM + full["attention"] / 3.5 + full["elementwise"] / 3
    # Inputs and outputs of the seven matrices of a block, in bfloat16, read and written.
    features = 2 * 2 * model.layers * (model.query + 2 * model.keys + 3 * model.width + 3 * model.dim)
    parts = {
        "GEMM": 4 * (model.blocks + model.head) * tokens / GEMM,
        "attention": full["attention"],
        "elementwise": full["elementwise"],
        # (x·A)·B with rank 16 is bound by reading x and adding to the output, in the forward and twice in the backward.
        "LoRA": 3 * features * tokens / BANDWIDTH,
        "recompute": recomputed * forward,
        "head": full["head"],
        "idle": 2 * full["idle"],
    }
    rate = tokens / sum(parts.values())
    assumes, setup = [HEAD, ATTENTION, "65 launches per block"], "Qwen3-8B, rank 16, 4 × 4,096 tokens"
    return predicted("LoRA", setup, "train-8B-lora", "tok/s", 13_000, rate, parts, assumes)


def fp8() -> Prediction:
    """Predict FP8 over bfloat16 at 8 layers of 8B; head and AdamW, a third of the step, do not change."""
    model, documents = Model("8B-8L"), 4
    tokens = documents * 4096
    wide = parts_of_a_step(model, documents, 4096)
    narrow = dict(wide)
    narrow["GEMM"] = 6 * (model.blocks / FP8_GEMM + model.head / GEMM) * tokens
    # A rounded tensor: read for its maximum and for rounding (2 + 2), written in both layouts (1 + 1). Inputs of the
    # matmuls in the forward (3 dim + width), gradients of their outputs in the backward (q + 2 k + 2 dim + 2 width).
    rounded = 4 * model.dim + 3 * model.width + model.query + 2 * model.keys + model.dim
    narrow["quantization"] = model.layers * 6 * rounded * tokens / BANDWIDTH + 8 * model.all_blocks / BANDWIDTH
    ratio = sum(wide.values()) / sum(narrow.values())
    setup = "Qwen3-8B with 8 layers, 4 × 4,096 tokens, tensorwise"
    made = predicted("FP8 / bfloat16", setup, "train-fp8", "×", 1.2, ratio, narrow, [HEAD, ATTENTION, BLOCKS, FP8])
    return made.model_copy(update={"side": gpu_step.TENSORWISE, "over": gpu_step.ARCHON})


def prefixes() -> Prediction:
    """Predict 4 prompts of 768 tokens with 8 answers of 256 each, prompts computed once, over each document alone."""
    model, prompts, answers, prompt, answer = Model("0.6B"), 4, 8, 768, 256
    scored = prompts * answers * answer
    alone, shared = prompts * answers * (prompt + answer), prompts * (prompt + answers * answer)
    everything = parts_of_a_step(model, prompts * answers, prompt + answer)

    def step(tokens: int, attention_flops: float, launches: int) -> dict[str, float]:
        return {
            "GEMM": 6 * (model.blocks * tokens + model.head * scored) / GEMM,
            "attention": attention_flops / ATTENTION_RAGGED,
            "elementwise": model.elementwise_bytes() * tokens / BANDWIDTH,
            "head": HEAD_TILE * scored,
            "casts": everything["casts"],
            "optimizer": everything["optimizer"],
            "idle": model.layers * launches * GAP,
        }

    apart = step(alone, model.attention_flops(prompts * answers, prompt + answer), LAUNCHES)
    # An answer attends to itself (a triangle) and to its prompt (a rectangle, which counts as two triangles).
    within, over_prompt = answers * answer**2, 2 * answers * answer * prompt
    pairs = prompt**2 + within + over_prompt
    flops = 3.5 * model.layers * prompts * 2 * model.query * pairs
    # Two attentions and a merge instead of one attention; and the merge's passes over outputs in float32.
    together = step(shared, flops, LAUNCHES + 20)
    together["merge"] = 3 * model.layers * prompts * answers * answer * model.query * 12 / BANDWIDTH
    ratio = sum(apart.values()) / sum(together.values())
    assumes = [HEAD, ATTENTION, BLOCKS, PREFIXES]
    setup = "Qwen3-0.6B, 4 prompts of 768 tokens × 8 answers of 256"
    made = predicted("shared prefixes / none", setup, "train-prefixes", "×", 2, ratio, together, assumes)
    return made.model_copy(update={"over": gpu_step.UNSHARED})


def generation() -> Prediction:
    """Predict 256 answers of 128 tokens to prompts of 128, prefill included."""
    model, slots, prompt, answer = Model("0.6B"), 256, 128, 128
    prefill = {
        "GEMM": 2 * model.blocks * slots * prompt / GEMM,
        "attention": model.attention_flops(slots, prompt) / 3.5 / (ATTENTION_RAGGED / 2),
        "elementwise": model.elementwise_bytes() / 3 * slots * prompt / BANDWIDTH,
    }
    cache = slots * (prompt + answer / 2) * model.layers * 2 * model.keys * 2
    step = {
        # 256 rows: computing the matmuls takes longer than reading their weights.
        "GEMM": 2 * (model.blocks + model.head) * slots / DECODE_GEMM,
        "pages": cache / DECODE_BANDWIDTH,
        # Float32 logits: written, read for the maximum, for the sum, and for the sample.
        "sampling": 4 * 4 * slots * VOCABULARY / BANDWIDTH,
        # Norm, q/k/v, rotary embedding and cache, attention, output, norm, gate/up, activation, down.
        "between kernels": 9 * model.layers * GAP,
    }
    seconds = sum(prefill.values()) + answer * sum(step.values())
    parts = {"prefill": sum(prefill.values())} | {name: answer * part for name, part in step.items()}
    rate, setup = slots * answer / seconds, "Qwen3-0.6B, 256 × (128 + 128) tokens"
    return predicted("generation", setup, "generate-0.6B", "tok/s", 60_000, rate, parts, [DECODE, ATTENTION])


def predicted(
    name: str,
    setup: str,
    case: str,
    unit: str,
    aim: float,
    value: float,
    parts: Mapping[str, float],
    assumes: list[str],
) -> Prediction:
    """Return a prediction of archon's side from seconds by kind of work."""
    return Prediction(
        name=name,
        setup=setup,
        case=case,
        side=gpu_step.ARCHON,
        unit=unit,
        aim=aim,
        value=float(f"{value:.3g}"),
        parts_ms={part: round(1e3 * seconds, 1) for part, seconds in parts.items()},
        assumes=assumes,
    )


def planner_ratios() -> dict[str, float]:
    """Return the planner's speed over the predicted speed of the training cases; it does not know shared prefixes."""
    ratios = {}
    for prediction in predictions():
        name, seconds = prediction.case.removeprefix("train-"), sum(prediction.parts_ms.values()) / 1e3
        if name not in gpu_step.CASES or name == "prefixes":
            continue
        case = gpu_step.CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape(case.model)))
            planned = gpu_step.predict_step(gpu_step.planned_options(case, folder), prediction.side)
        ratios[name] = round(seconds / planned.seconds, 3)
    return ratios


def predictions() -> list[Prediction]:
    """Return the prediction of every aim, in the order of the stages."""
    full = [HEAD, ATTENTION, BLOCKS]
    return [
        training("0.6B", 8, 90_000, full),
        generation(),
        experts(),
        prefixes(),
        lora(),
        fp8(),
        training("1.7B", 4, 45_000, full),
    ]


def read_predictions() -> list[Prediction]:
    """Return the recorded predictions."""
    content = json.loads((FOLDER / PREDICTIONS).read_text())
    return [Prediction.parse(line, source=PREDICTIONS) for line in content["predictions"]]


def main() -> None:
    """Print the predictions, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PREDICTIONS}")
    arguments = parser.parse_args()
    for prediction in predictions():
        aim = "met" if prediction.value >= prediction.aim else "MISSED"
        figures = f"{prediction.value:,g} {prediction.unit}, aim {prediction.aim:,g} {aim}"
        print(f"{prediction.name}, {prediction.setup}: {figures}")
        print(f"  ms: {', '.join(f'{part} {ms:g}' for part, ms in prediction.parts_ms.items())}")
    ratios = planner_ratios()
    print(f"the planner's speed / predicted speed: {ratios}")
    if arguments.write:
        content = {"predictions": [p.model_dump() for p in predictions()], "planner / predicted": ratios}
        (FOLDER / PREDICTIONS).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
