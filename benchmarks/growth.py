"""Measure how the cost of a training step grows, side by side with the peers that support it.

One axis at a time: tokens per step, document length, vocabulary, experts, processes. Each point has its own model and
batch. Before timing, every side must compute the same loss and gradient norm. Speed is in tokens per second; memory is
the peak of the side's processes.

    python -m benchmarks.growth                     # every point missing from the record, about 40 minutes on 2 cores
    python -m benchmarks.growth --axis context
    python -m benchmarks.growth --quick             # the smallest two points of each axis, without a record
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.tools.bench.origin import origin
from benchmarks import harness, train_step
from benchmarks.checkpoints import make_checkpoint
from benchmarks.harness import Sides, say
from benchmarks.record import FOLDER
from benchmarks.step_check import compare

RECORD = FOLDER / "growth.jsonl"
DENSE = ("transformers", "torchtitan", "megatron-core")
# One layer, so that attention dominates: nine tenths of the work at 131,072 tokens.
LONG = {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
LONG |= {"intermediate_size": 352, "vocab_size": 512, "max_position_embeddings": 1 << 17}
EXPERTS = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 352, "norm_topk_prob": True}
EXPERTS |= {"num_hidden_layers": 4}


LONGEST = 1 << 17
"""Document length from which a step takes minutes and is timed only once."""


@dataclass(frozen=True)
class Point:
    """A step.

    Attributes:
        lengths: document lengths, in tokens.
        fields: overrides of the 26M config.
        ranks: number of processes, each with at least one thread.
    """

    lengths: tuple[int, ...]
    fields: dict[str, Any]
    ranks: int = 1


@dataclass(frozen=True)
class Axis:
    """A growth axis.

    Attributes:
        label: label of the values.
        values: values in ascending order.
        point: maps a value to its step.
        peers: sides next to archon.
    """

    label: str
    values: tuple[int, ...]
    point: Callable[[int], Point]
    peers: tuple[str, ...]


# Megatron's attention on a CPU holds a mask of length times length.
AXES = {
    "tokens": Axis("tokens a step", (512, 1024, 2048, 4096, 8192), lambda n: Point((512,) * (n // 512), {}), DENSE),
    "context": Axis(
        "tokens of a document", (1 << 10, 1 << 12, 1 << 14, 1 << 15, 1 << 17), lambda n: Point((n,), LONG), DENSE[:2]
    ),
    "vocabulary": Axis(
        "tokens of the vocabulary",
        (1 << 12, 1 << 14, 1 << 16, 1 << 18),
        lambda n: Point((512,) * 2, {"vocab_size": n}),
        DENSE,
    ),
    "experts": Axis(
        "experts, of which a token has two",
        (2, 8, 32, 128),
        lambda n: Point((512,) * 2, EXPERTS | {"num_experts": n}),
        DENSE[:1],
    ),
    "ranks": Axis("processes", (1, 2), lambda n: Point((512,) * 4, {}, n), (train_step.FSDP2,)),
}


def measure(axis: str, value: int, threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the record line of each side at one point, with the reason if a side cannot run it."""
    point, peers = AXES[axis].point(value), AXES[axis].peers
    say(f"growth.{axis}: {value:,}")
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), "26M", fields=point.fields)
        options = {"threads": threads, "checkpoint": str(made), "device": "cpu", "dtype": "float32"}
        options |= {"lengths": point.lengths, "ranks": point.ranks}
        options |= {"max_tokens_per_mb": max(2048 // point.ranks, *point.lengths)}
        one = train_step.FSDP2 if point.ranks > 1 else "transformers"
        sides = ["archon", *(one if peer == train_step.FSDP2 else peer for peer in peers)]
        with Sides("benchmarks.train_step", sides, options) as workers:
            compare({side: workers.facts(side) for side in workers.workers}, "float32")
            runs = workers.alternate(rounds, warmup=0)  # every side has taken two steps
        tokens = sum(point.lengths)
        for side, found in runs.items():
            rates = sorted(tokens / run["seconds"] for run in found)
            line = {"tokens_per_second": rates[len(rates) // 2], "min": rates[0], "max": rates[-1]}
            yield _line(axis, value, side) | line | {"peak_bytes": max(run["memory"]["rss_peak"] for run in found)}
        for side, reason in workers.missing.items():
            yield _line(axis, value, side) | {"missing": reason}


def _line(axis: str, value: int, side: str) -> dict[str, Any]:
    return {"axis": axis, "value": value, "side": "transformers" if side == train_step.FSDP2 else side}


def read_growth(path: Path = RECORD) -> list[dict[str, Any]]:
    """Return the newest line of each side at each point, in the order of the axes."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    newest = {(line["axis"], line["value"], line["side"]): line for line in lines if line["axis"] in AXES}
    return sorted(newest.values(), key=lambda line: (list(AXES).index(line["axis"]), line["value"]))


def main() -> None:
    """Measure the points that are missing; each is written as soon as it is there."""
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--axis", choices=AXES, help="one axis only")
    parser.add_argument("--again", action="store_true", help="also points that the record has")
    arguments = parser.parse_args()
    keep = not (arguments.quick or arguments.no_record)
    there = set() if arguments.again or not keep else {(line["axis"], line["value"]) for line in read_growth()}
    where = origin("python -m benchmarks.growth")
    stamp = {"threads": arguments.threads, "commit": where["commit"], "date": where["date"][:10]}
    stamp |= {"cpu": where["machine"].cpu}
    for axis in [arguments.axis] if arguments.axis else AXES:
        values = AXES[axis].values[:2] if arguments.quick else AXES[axis].values
        for value in values:
            if (axis, value) in there:
                continue
            rounds = 1 if arguments.quick or (axis == "context" and value >= LONGEST) else arguments.rounds
            for line in measure(axis, value, arguments.threads, rounds):
                speed = line.get("tokens_per_second")
                say(f"  {line['side']}: " + (f"{speed:,.0f} tok/s" if speed else line["missing"]))
                if keep:
                    with RECORD.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line | stamp) + "\n")


if __name__ == "__main__":
    main()
