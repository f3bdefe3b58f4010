"""Training of low-rank adapters, side by side with PEFT on transformers: the same checkpoint, adapter and documents.

Adapters of rank 16 on all linear layers, in float32: of a Qwen3 of 26 million parameters on 16 ragged documents
(3,580 tokens), and of SmolLM2-135M-Instruct on 8 of them at half their length. A step is forward, cross-entropy,
backward, clipping and AdamW of the adapter. Memory is the peak of a process, libraries and weights included. A push is
what a generator is sent after a step: the adapter, in place of all weights.

    python -m benchmarks.lora
    python -m benchmarks.lora --case ragged --quick --profile
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness, train_step
from benchmarks.checkpoints import make_adapter, make_checkpoint, shape
from benchmarks.harness import say
from benchmarks.record import Record

RANK = 16
PADDED, PACKED, ONE_BY_ONE = "peft (padded)", "peft (packed)", "peft (one document at a time)"
AIMS = {PADDED: ">= 2", PACKED: ">= 2", ONE_BY_ONE: ">= 1.15"}
MEMORY_AIMS = {PADDED: "<= 0.6", PACKED: "<= 0.6", ONE_BY_ONE: None}
PUSH_AIM = "<= 0.05"
# By case: the model, the documents, and the tokens of archon's micro-batches.
CASES: dict[str, tuple[str, list[int], int]] = {
    "ragged": ("26M", list(train_step.RAGGED_LENGTHS), 1024),
    "smollm2": ("SmolLM2-135M-Instruct", [length // 2 for length in train_step.RAGGED_LENGTHS[:8]], 1024),
}


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Take the first two steps of a side; archon's facts have the bytes of a push as well."""
    if side != "archon":
        return train_step.prepare(side, options)
    engine = train_step.archon_engine(options)
    facts, run = train_step.prepared(train_step.step_of(engine, train_step.documents(options)))
    sizes = (sum(x.nbytes for _, x in tensors) for tensors in (engine.adapter_weights(), engine.weights()))
    return facts | dict(zip(("adapter_bytes", "all_bytes"), sizes, strict=True)), run


def measure(case: str, options: dict[str, Any], rounds: int, keep: bool, profile: bool) -> Record:
    """Measure one case: check that losses and gradient norms agree, then time every side."""
    tokens = sum(options["lengths"])
    say(f"lora.{case}: {options['model']}, rank {RANK}, {len(options['lengths'])} documents, {tokens} tokens")
    record = harness.new_record("lora", case, options["threads"])
    model = shape(options["model"]) if options["model"] == "26M" else options["model"]
    record.setup = {"model": model, "rank": RANK, "lengths": options["lengths"], "dtype": options["dtype"]}
    record.setup["max_tokens_per_mb of archon"] = options["max_tokens_per_mb"]
    runs, facts = train_step.time_sides(record, "benchmarks.lora", options, AIMS, rounds, profile)
    ours = runs.pop("archon")
    for side, theirs in runs.items():
        for kind, name in (("rss_peak", "peak memory"), ("rss_above_start", "what a step adds to it")):
            peaks = ([float(run["memory"][kind]) for run in each] for each in (ours, theirs))
            aim = MEMORY_AIMS[side] if kind == "rss_peak" else None
            record.ratios[f"archon / {side}, {name}"] = harness.ratio(*peaks, aim)
    pushed, everything = (float(facts["archon"][name]) for name in ("adapter_bytes", "all_bytes"))
    record.ratios["bytes of a push, the adapter / all weights"] = harness.ratio([pushed], [everything], PUSH_AIM)
    harness.finish(record, keep)
    return record


def checkpoint_of(model: str, folder: Path) -> Path:
    """Returns a checkpoint of one of `SHAPES`, made in `folder`, or that of the real model."""
    if model != CASES["smollm2"][0]:
        return make_checkpoint(folder / "base", model)
    from tests.real_model import SMOLLM2

    return SMOLLM2.make(SMOLLM2.folder)


def main() -> None:
    """Parse the arguments, make checkpoint and adapter, measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="one case only")
    parser.add_argument("--profile", action="store_true", help="profile also where no aim is missed")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    keep = not (arguments.quick or arguments.no_record)
    for case in [arguments.case] if arguments.case else CASES:
        model, lengths, tokens = CASES[case]
        if arguments.quick:
            model, lengths = "tiny", [length // 4 for length in lengths]
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = checkpoint_of(model, Path(folder))
            adapter = make_adapter(Path(folder) / "adapter", checkpoint, rank=RANK)
            options = {"threads": arguments.threads, "checkpoint": str(checkpoint), "adapter": str(adapter)}
            options |= {"model": model, "device": "cpu", "dtype": "float32"}
            options |= {"lengths": lengths, "max_tokens_per_mb": tokens}
            measure(case, options, arguments.rounds, keep, arguments.profile)
    return None


if __name__ == "__main__":
    main()
