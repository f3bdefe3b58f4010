"""A training step on documents that share prefixes, with and without prefix sharing.

A Qwen3 of 26 million parameters in float32, or one with experts. The batches are:

- `samples`: 8 samples of 128 tokens for a prompt of 384 tokens, in one process, on two ranks (a prompt for each rank,
  or half of the heads), with experts, with LoRA, and compiled;
- `history`: the history of an agent with 8 turns, each tried twice;
- `nothing`: documents without shared prefixes.

Both sides must compute the same result first. Tokens per second count all documents, whether computed once or
repeatedly.

    python -m benchmarks.trees
    python -m benchmarks.trees --case samples-d2 --quick
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from archon.tools.bench.origin import spread
from benchmarks import harness, step_check, train_step
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.harness import Sides, say

ARCHON, ALONE = "archon", "archon (no prefix sharing)"
SAMPLES, PROMPT, ANSWER = 8, 384, 128
TURNS, TRIES, TURN = 8, 2, 64
EXPERTS = "26M-experts"


class Case(NamedTuple):
    """A batch kind of `documents`, and a layout whose degree is the number of ranks."""

    kind: str
    aim: str
    layout: str = "d1"
    model: str = "26M"
    compiled: bool = False
    lora: bool = False


CASES = {
    "samples": Case("samples", ">= 2"),
    "samples-d2": Case("samples", ">= 2", "d2"),
    "samples-t2": Case("samples", ">= 2", "t2"),
    "samples-experts": Case("samples", ">= 2", model=EXPERTS),
    "samples-lora": Case("samples", ">= 2", lora=True),
    "samples-compiled": Case("samples", ">= 2", compiled=True),
    "history": Case("history", ">= 3"),
    "nothing": Case("nothing", ">= 0.98"),
    "nothing-experts": Case("nothing", ">= 0.98", model=EXPERTS),
    "nothing-compiled": Case("nothing", ">= 0.98", compiled=True),
}


def documents(kind: str, vocab: int, scale: float, rank: int = 0) -> list[Any]:
    """Return a rank's int64 documents: samples of one prompt, turns with their histories, or some that share
    nothing."""
    import torch

    generator = torch.Generator().manual_seed(1 + rank)

    def draw(count: int) -> Any:
        return torch.randint(vocab, (max(2, int(count * scale)),), generator=generator)

    if kind == "samples":
        prompt = draw(PROMPT)
        return [torch.cat((prompt, draw(ANSWER))) for _ in range(SAMPLES)]
    if kind == "history":
        history, docs = draw(TURN), list[Any]()
        for _ in range(TURNS):
            docs += [torch.cat((history, draw(TURN))) for _ in range(TRIES)]
            history = docs[-1]
        return docs
    return [draw(PROMPT + ANSWER) for _ in range(SAMPLES)]


def own_documents(options: dict[str, Any]) -> list[Any]:
    """Return the documents of this rank; tensor-parallel ranks have the same ones."""
    from benchmarks.peer_models import hf_config

    rank = int(os.environ["RANK"]) if options["ranks"] > 1 and options["layout"].startswith("d") else 0
    return documents(options["kind"], hf_config(options["checkpoint"])["vocab_size"], options["scale"], rank)


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Load the checkpoint and take the first two steps; the parent compares their losses."""
    from archon import ArchonEngine, EngineConfig

    engine = ArchonEngine(
        EngineConfig(
            path=options["checkpoint"],
            device="cpu",
            dtype="float32",
            max_tokens_per_mb=options["max_tokens_per_mb"],
            compile=options["compiled"],
            layout=options["layout"],
            lora={"rank": 16} if options["lora"] else None,
            share_prefixes=side == ARCHON,
            optimizer={"lr": train_step.ADAMW["lr"], "weight_decay": 0.0},
        )
    )
    engine.initialize()
    return train_step.prepared(train_step.step_of(engine, own_documents(options)))


def measure(name: str, options: dict[str, Any], rounds: int, keep: bool) -> None:
    """Measure one case: check that both sides compute the same, then time them."""
    case = CASES[name]
    say(f"trees.{name}: {case.kind} on {case.layout}")
    record = harness.new_record("trees", name, options["threads"], f"layout {case.layout}")
    record.setup = {"model": shape(options["model"]), "documents": case.kind, "tokens": options["tokens"]}
    record.setup |= {"compiled": case.compiled, "adapters of rank": 16 if case.lora else 0}
    with Sides("benchmarks.trees", [ARCHON, ALONE], options) as sides:
        record.checks = step_check.compare({side: sides.facts(side) for side in sides.workers}, "float32")
        runs = sides.alternate(rounds)
    rates = {side: [options["tokens"] / run["seconds"] for run in results] for side, results in runs.items()}
    for side, values in rates.items():
        record.sides[side] = spread(values, "tok/s", runs[side])
    record.ratios[f"{ARCHON} / each document by itself"] = harness.ratio(rates[ARCHON], rates[ALONE], case.aim)
    harness.finish(record, keep)


def main() -> None:
    """Parse the arguments, make the checkpoint, and measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="one case only")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    for name in [arguments.case] if arguments.case else CASES:
        case, scale = CASES[name], 0.25 if arguments.quick else 1.0
        model = {"26M": "tiny", EXPERTS: "tiny-moe"}[case.model] if arguments.quick else case.model
        with tempfile.TemporaryDirectory() as folder:
            made = make_checkpoint(Path(folder), model)
            own = sum(map(len, documents(case.kind, 100, scale)))
            tokens = own * (int(case.layout[1:]) if case.layout.startswith("d") else 1)
            options: dict[str, Any] = {"threads": arguments.threads, "checkpoint": str(made), "model": model}
            options |= {"kind": case.kind, "scale": scale, "layout": case.layout, "ranks": int(case.layout[1:])}
            options |= {"compiled": case.compiled, "lora": case.lora, "tokens": tokens, "max_tokens_per_mb": own}
            measure(name, options, arguments.rounds, not (arguments.quick or arguments.no_record))
    return None


if __name__ == "__main__":
    main()
