"""LoRA training, side by side with PEFT on transformers: the same checkpoint, LoRAs and documents.

LoRAs have rank 16 on all linear layers. The cases are:

- one LoRA of a Qwen3 of 26 million parameters, 16 ragged documents (3,580 tokens), base in float32 and in bfloat16;
- one LoRA of SmolLM2-135M-Instruct, 8 of these documents at half length;
- eight LoRAs of the small Qwen3, one document of 20 or 10 tokens on average for each, in one batch and one LoRA at a
  time.

A step is forward, cross-entropy, backward, clipping and AdamW of each LoRA. Memory is the peak of a process, including
libraries and weights. Pushed bytes are the weights that a generator receives after a step, in its dtype: the LoRA
instead of all weights.

    python -m benchmarks.lora
    python -m benchmarks.lora --case ragged --quick --profile
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness, train_step
from benchmarks.checkpoints import make_checkpoint, make_lora, shape
from benchmarks.harness import say
from benchmarks.record import Record

RANK = 16
PUSH_AIM = "<= 0.05"
ONE_AFTER_THE_OTHER = "(one LoRA at a time)"


class Case(NamedTuple):
    """`tokens` are of archon's micro-batches; the aims are of speed, and of the peak of memory, by side."""

    model: str
    lengths: tuple[int, ...]
    tokens: int
    aims: dict[str, str]
    memory_aims: dict[str, str]
    loras: int = 1
    dtype: str = "float32"


PADDED, PACKED, ONE_BY_ONE = "peft (padded)", "peft (packed)", "peft (one document at a time)"
OF_ONE = {PADDED: ">= 2", PACKED: ">= 2", ONE_BY_ONE: ">= 1.15"}
MEMORY_OF_ONE = {PADDED: "<= 0.6", PACKED: "<= 0.6"}
OF_EIGHT = {f"archon {ONE_AFTER_THE_OTHER}": ">= 3", f"peft {ONE_AFTER_THE_OTHER}": ">= 3"}
REAL = "SmolLM2-135M-Instruct"
HALVES = tuple(length // 2 for length in train_step.RAGGED_LENGTHS[:8])
SHORT = (17, 24, 9, 31, 12, 28, 20, 15)
CASES = {
    "ragged": Case("26M", train_step.RAGGED_LENGTHS, 1024, OF_ONE, MEMORY_OF_ONE),
    "ragged-bfloat16": Case("26M", train_step.RAGGED_LENGTHS, 1024, OF_ONE, MEMORY_OF_ONE, dtype="bfloat16"),
    "smollm2": Case(REAL, HALVES, 512, OF_ONE, MEMORY_OF_ONE),
    "eight": Case("26M", SHORT, 1024, OF_EIGHT, {}, loras=8),
    "eight-shorter": Case("26M", tuple(length // 2 for length in SHORT), 1024, OF_EIGHT, {}, loras=8),
}


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Take the first two steps of a side; archon's facts have the bytes of a push as well."""
    if ONE_AFTER_THE_OTHER in side:
        return train_step.prepared(in_turn(side, options))
    if side != "archon":
        return train_step.prepare(side, options | {"lora": options["loras"][0]})
    import torch

    many = len(options["loras"]) > 1
    lora: dict[str, Any] = {f"a{index}": {"path": path} for index, path in enumerate(options["loras"])}
    engine = train_step.archon_engine(options, lora={"loras": lora} if many else lora["a0"])
    facts, run = train_step.prepared(all_at_once(engine, options) if many else one(engine, options))
    width = getattr(torch, options["dtype"]).itemsize  # of the generator, which receives weights in its dtype
    weights = engine.lora_weights(), engine.base_weights()
    sizes = (width * sum(x.numel() for _, x in tensors) for tensors in weights)
    return facts | dict(zip(("lora_bytes", "base_bytes"), sizes, strict=True)), run


def one(engine: Any, options: dict[str, Any]) -> train_step.Step:
    """Train the LoRA on all documents for one step."""
    return train_step.step_of(engine, train_step.documents(options))


def all_at_once(engine: Any, options: dict[str, Any]) -> train_step.Step:
    """Train every LoRA on the document of its index for one step, in one batch."""
    import torch

    names = [f"a{index}" for index in range(len(options["loras"]))]
    step = train_step.step_of(engine, train_step.documents(options), lora=torch.arange(len(names)))

    def run() -> dict[str, float]:
        metrics = step()
        return of_all([{what: metrics[f"{name}/{what}"] for what in ("loss", "grad_norm")} for name in names])

    return run


def in_turn(side: str, options: dict[str, Any]) -> train_step.Step:
    """Train every LoRA on the document of its index for one step, each with a separate model."""
    make = train_step.archon_step if side.startswith("archon") else train_step.peer_step
    steps = [make(side, options | {"lora": path, "document": index}) for index, path in enumerate(options["loras"])]
    return lambda: of_all([step() for step in steps])


def of_all(results: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean loss of several LoRAs and the norm of all their gradients."""
    loss = sum(result["loss"] for result in results) / len(results)
    return {"loss": loss, "grad_norm": math.hypot(*(result["grad_norm"] for result in results))}


def measure(name: str, options: dict[str, Any], rounds: int, keep: bool, profile: bool) -> Record:
    """Measure one case: check that losses and gradient norms agree, then time every side."""
    case, lengths = CASES[name], options["lengths"]
    loras = len(options["loras"])
    say(f"lora.{name}: {options['model']}, {loras} of rank {RANK}, {len(lengths)} documents, {sum(lengths)} tokens")
    record = harness.new_record("lora", name, options["threads"])
    model = shape(options["model"]) if options["model"] == "26M" else options["model"]
    record.setup = {"model": model, "rank": RANK, "adapters": loras, "lengths": lengths, "dtype": options["dtype"]}
    record.setup["max_tokens_per_mb of archon"] = options["max_tokens_per_mb"]
    runs, facts = train_step.time_sides(record, "benchmarks.lora", options, case.aims, rounds, profile)
    ours = runs.pop("archon")
    for side, theirs in runs.items():
        peaks = [[float(run["memory"]["rss_peak"]) for run in each] for each in (ours, theirs)]
        record.ratios[f"archon / {side}, peak memory"] = harness.ratio(*peaks, aim=case.memory_aims.get(side))
    if loras == 1:
        pushed, base = (float(facts["archon"][what]) for what in ("lora_bytes", "base_bytes"))
        record.ratios["pushed bytes, LoRA / all weights"] = harness.ratio([pushed], [base], PUSH_AIM)
    harness.finish(record, keep)
    return record


def checkpoint_of(model: str, folder: Path) -> Path:
    """Return a checkpoint of one of `SHAPES`, made in `folder`, or the path of the pretrained model."""
    if model != REAL:
        return make_checkpoint(folder / "base", model)
    from tests.real_model import SMOLLM2

    return SMOLLM2.make(SMOLLM2.folder)


def main() -> None:
    """Parse the arguments, make checkpoint and LoRAs, measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="one case only")
    parser.add_argument("--profile", action="store_true", help="profile also where no aim is missed")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    keep = not (arguments.quick or arguments.no_record)
    for name in [arguments.case] if arguments.case else CASES:
        case = CASES[name]
        model, lengths = case.model, list(case.lengths)
        if arguments.quick:
            model, lengths = "tiny", [max(2, length // 4) for length in lengths]
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = checkpoint_of(model, Path(folder))
            made = (make_lora(Path(folder) / str(i), checkpoint, rank=RANK, seed=i) for i in range(case.loras))
            options = {"threads": arguments.threads, "checkpoint": str(checkpoint), "loras": [*map(str, made)]}
            options |= {"model": model, "device": "cpu", "dtype": case.dtype}
            options |= {"lengths": lengths, "max_tokens_per_mb": case.tokens}
            measure(name, options, arguments.rounds, keep, arguments.profile)
    return None


if __name__ == "__main__":
    main()
