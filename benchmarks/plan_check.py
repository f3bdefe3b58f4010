"""Compare the planner's seconds with published figures, predict the GPU recipes, and write a record and tables.

    python -m benchmarks.plan_check    # predicts, writes records/plan_check.jsonl and the tables in PLANNER.md

A test fails if record or table differ from today's predictions.

If a source gives no layout, recomputation policy or micro-batch size, its recipe was tuned; it is compared with the
planner's best layout for as many GPUs. All are predicted: the rates in the H100's file are measured on archon's steps.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from archon.checkpoint.hf_reader import read_hf_config
from archon.cli.config import load_config
from archon.engine.memory.memory_model import rank_parameters
from archon.models import get_model_spec
from archon.models.args.base import BaseModelArgs
from archon.models.qwen2 import Qwen2ModelArgs
from archon.parallel.layout import parse_layout
from archon.rl.config import RLConfig
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.tools.planner.describe import describe_candidate, speed
from archon.tools.planner.hardware import read_hardware
from archon.tools.planner.prediction import Batch, Prediction, predict
from archon.tools.planner.search import Candidate, Planner, PlanRequest
from archon.tools.planner.time_model import TimeModel
from archon.training.config import SFTConfig

HERE = Path(__file__).resolve().parent
RECORD, TABLE = HERE / "records" / "plan_check.jsonl", HERE / "PLANNER.md"
CONFIGS = HERE.parent / "tests" / "data" / "hf_configs"
FULL, OPS = {"mode": "full"}, {"mode": "selective", "selective": "op"}
WITHIN = 0.25
# Options per GPU and step, if the planner chooses.
DOCUMENTS = 16


UNFUSED = "it runs experts one by one in Python without overlap, which the planner does not model"


@dataclass(frozen=True)
class Figure:
    """A published figure: tokens per second of one H100.

    Without a layout the planner's best is used. `told` describes the run; `missed` explains an error above 25 %.
    """

    system: str
    model: str
    gpus: int
    seq: int
    published: float
    told: str = ""
    layout: str | None = None
    recompute: dict[str, Any] = field(default_factory=dict)
    missed: str = ""


FIGURES = [
    Figure("Megatron-Bridge", "Qwen3-8B", 16, 4096, 10456),
    Figure("torchtitan", "Qwen3-32B", 8, 4096, 1874, "full recompute", "d8", FULL),
    Figure("NeMo Automodel", "Qwen3-30B-A3B", 8, 4096, 12040, "balanced gate"),
    Figure("Megatron-Bridge", "Qwen3-30B-A3B", 16, 4096, 13011, "mock data"),
    Figure(
        *("Megatron-Bridge", "Qwen3-30B-A3B", 16, 4096, 8655, "natural routing"),
        missed="the planner assumes balanced experts; the row above is the same source with mock data",
    ),
    Figure("transformers v5", "Qwen3-30B-A3B", 8, 4096, 3075, missed=UNFUSED),
    Figure(
        *("torchtitan", "Llama-3.1-8B", 8, 8192, 6667, "compiled", "d8", OPS),
        missed="its recomputation repeats every second matmul, archon's none, and its loss stores whole logits",
    ),
    Figure(
        *("torchtitan", "Llama-3.1-8B", 8, 8192, 5762, "eager", "d8", OPS),
        missed="as in (3), and elementwise operators run one by one",
    ),
    Figure(
        *("prime-rl", "Qwen3-4B", 8, 16384, 3250, "26,000 in total, an RL trainer", "d8", FULL),
        missed="a trainer in an RL loop, which packs shorter documents and waits for rollouts",
    ),
]


@dataclass(frozen=True)
class Unpredicted:
    """A published figure about which the planner has nothing to say, and why."""

    system: str
    model: str
    figure: str
    unpredicted: str


READING = "loading is not a training step; benchmarks.load measures it"
UNPREDICTED = [
    Unpredicted(
        *("torchtitan", "Llama-3.1-8B", "8,532 tok/s of a GPU, compiled and in FP8"),
        "this comparison covers bfloat16 only",
    ),
    Unpredicted("its upstream reader", "Qwen3-0.6B", "44.9 s to load a checkpoint", READING),
    Unpredicted("NeMo Automodel", "Qwen3-0.6B", "11.8 s to load a checkpoint", READING),
]


def arguments(model: str) -> BaseModelArgs:
    """Return a model's sizes; a Llama's in the class of the family nearest to it."""
    hf_config = read_hf_config(CONFIGS / model)
    if hf_config["model_type"] != "llama":
        return get_model_spec(hf_config["model_type"]).model_args_class.from_hf_config(hf_config)
    return Qwen2ModelArgs(
        dim=hf_config["hidden_size"],
        n_layers=hf_config["num_hidden_layers"],
        n_heads=hf_config["num_attention_heads"],
        n_kv_heads=hf_config["num_key_value_heads"],
        hidden_dim=hf_config["intermediate_size"],
        vocab_size=hf_config["vocab_size"],
    )


def predicted(figure: Figure) -> tuple[float, str]:
    """Return tokens per second of one GPU and the layout."""
    args, hardware = arguments(figure.model), read_hardware("h100-80gb")
    spec = get_model_spec("qwen3_moe" if args.sizes.experts else "qwen3" if args.qk_norm else "qwen2")
    planner = Planner(spec, args, hardware)
    question = PlanRequest(figure.model, figure.gpus, figure.gpus * figure.seq * DOCUMENTS, figure.seq)
    if figure.layout is None:
        plan = planner.plan(question, best=1)
        candidate = plan.best[0].candidate
        return speed(plan, candidate)[0], describe_candidate(candidate)
    layout = parse_layout(figure.layout)
    options = {"activation_checkpoint": figure.recompute}
    config = EngineConfig.model_validate({"path": figure.model, "dtype": "bfloat16"} | options)
    state = rank_parameters(planner.weights, layout, None, 0)
    seconds = TimeModel(args, hardware, figure.seq).step(config, layout, None, state, figure.seq, 1)
    candidate = Candidate(layout, options, figure.seq, 1, seconds)
    return figure.seq * layout.dp / layout.world_size / seconds.total, describe_candidate(candidate)


def records() -> list[dict[str, Any]]:
    """Return each figure with its prediction, then those without a prediction."""
    found = []
    for figure in FIGURES:
        rate, how = predicted(figure)
        ratio = rate / figure.published
        found.append(asdict(figure) | {"way": how, "predicted": round(rate), "ratio": round(ratio, 2)})
    return found + [asdict(figure) for figure in UNPREDICTED]


@dataclass(frozen=True)
class Recipe:
    """A recipe of `rl/recipes` for one GPU, with the config of its model in `tests/data/hf_configs`."""

    file: str
    model: str
    config: type[SFTConfig | RLConfig]
    told: str

    def predict(self, gpu: str) -> Prediction | None:
        """Return the prediction of its training step on a GPU; None if the GPU is too small."""
        config = load_config(self.config, RECIPES / self.file, [])
        if isinstance(config, RLConfig):
            model, documents = config.resolve().actor, config.rollout.prompts_per_step * config.gconfig.n_samples
            batch = Batch(documents, config.train_data.max_length + config.gconfig.max_new_tokens)
        else:
            model, batch = config.resolve().model, Batch(config.batch_size, config.train_data.max_length)
        try:
            return predict(model, read_hf_config(CONFIGS / self.model), read_hardware(gpu), batch)
        except ConfigError:
            return None


RECIPES = HERE.parent / "rl" / "recipes"
GPU_RECIPES = [
    Recipe("gsm8k_sft_gpu.yaml", "Qwen3-0.6B", SFTConfig, "SFT"),
    Recipe("gsm8k_rl_gpu.yaml", "Qwen3-0.6B", RLConfig, "GRPO, the training step"),
    Recipe("gsm8k_lora_gpu.yaml", "Qwen3-8B", SFTConfig, "SFT with LoRA of rank 16"),
    Recipe("gsm8k_8b_gpu.yaml", "Qwen3-8B", SFTConfig, "SFT of all weights"),
]
RECIPE_GPUS = ("h100-80gb", "a100-80gb", "h200", "b200")


def recipe_table() -> list[str]:
    """Return the predictions of the GPU recipes as Markdown."""
    lines = [
        "## Recipes on one GPU",
        "",
        "All figures are predicted; no GPU has run these recipes. Memory includes libraries and fragmentation, but not",
        "the generator of GRPO. A step has only documents of the maximum length. The first row is predicted by",
        "`archon sft --config rl/recipes/gsm8k_sft_gpu.yaml --dry-run --gpu h100-80gb`.",
        "",
        "| recipe | model | GPU | recompute (`auto`) | memory, GiB | a step | tok/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for recipe in GPU_RECIPES:
        for gpu in RECIPE_GPUS:
            prediction, first = recipe.predict(gpu), f"| `{recipe.file}`, {recipe.told} | {recipe.model} | {gpu} |"
            if prediction is None:
                lines.append(f"{first} does not fit | | | |")
                continue
            assert prediction.choice is not None
            memory = f"{prediction.used / 2**30:.1f} of {prediction.hardware.memory_bytes / 2**30:.1f}"
            step = f"{prediction.batch.documents} × {prediction.batch.seq:,} tokens in {prediction.seconds.total:.2f} s"
            policy = prediction.choice.policy.name.removeprefix("selective ")
            lines.append(f"{first} {policy} | {memory} | {step} | {prediction.tokens_per_second:,.0f} |")
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "# The planner against published figures",
        "",
        "`python -m benchmarks.plan_check` writes this page and `records/plan_check.jsonl`. Figures are tokens per",
        "second of one H100 in bfloat16. All are predictions: the rates of kernels in the H100's file are measured on",
        "archon's own steps on one GPU, and a test holds them to these steps within 15 %.",
        "",
        "| model | system | run | predicted layout | published | predicted | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    misses = []
    for row in rows:
        if "unpredicted" in row:
            continue
        mark = ""
        if abs(row["ratio"] - 1) > WITHIN:
            misses.append(f"{row['model']}, {row['system']}: {row['missed']}.")
            mark = f" missed ({len(misses)})"
        lines.append(
            f"| {row['model']} | {row['system']} | {row['gpus']} GPUs, {row['seq']:,} tokens"
            f"{', ' if row['told'] else ''}{row['told']} | {row['way']} | {row['published']:,.0f} | "
            f"{row['predicted']:,.0f} | {row['ratio']:.2f}{mark} |"
        )
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(misses, start=1))]
    lines += ["", "Not predicted:", "", "| model | system | published | reason |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['model']} | {row['system']} | {row['figure']} | {row['unpredicted']} |"
        for row in rows
        if "unpredicted" in row
    ]
    return "\n".join([*lines, "", *recipe_table()]).rstrip() + "\n"


def lines(rows: list[dict[str, Any]]) -> str:
    """Return the rows as the record."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Write both, and print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = records()
    RECORD.write_text(lines(rows))
    TABLE.write_text(table(rows))
    print(table(rows), end="")


if __name__ == "__main__":
    main()
