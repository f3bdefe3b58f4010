"""A whole training step, side by side: forward, cross-entropy, backward, clipping and AdamW.

On a CPU: a Qwen3 of 26 million parameters in float32; an even batch (4 × 512 tokens) against transformers,
torchtitan and megatron-core; a ragged one (16 documents, 3,580 tokens) against transformers' three ways of taking
it; and the even one on two ranks against transformers under FSDP2. Where an aim is missed, a step of both sides is
profiled. `benchmarks.gpu` measures training steps on a GPU.

    python -m benchmarks.train_step
    python -m benchmarks.train_step --case even --quick --profile
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from archon.tools.bench.origin import spread
from benchmarks import harness
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.harness import Sides, say
from benchmarks.profiles import step_profile
from benchmarks.record import Record
from benchmarks.step_check import compare

RAGGED_LENGTHS = (241, 24, 512, 94, 307, 160, 47, 448, 186, 73, 352, 117, 213, 391, 139, 276)  # 3,580 in total
EVEN_AIMS = {"transformers": ">= 1.05", "torchtitan": ">= 1.05", "megatron-core": ">= 1.5"}
FSDP2 = "transformers (FSDP2)"
# Two ranks have the same aim against transformers as one process.
TWO_RANKS_AIMS = {FSDP2: EVEN_AIMS["transformers"]}
RAGGED_AIMS = {
    "transformers (padded)": ">= 2.5",
    "transformers (packed)": ">= 2",
    "transformers (one document at a time)": ">= 1.15",
}
CPU_CASES = {"even": EVEN_AIMS, "ragged": RAGGED_AIMS, "even-two-ranks": TWO_RANKS_AIMS}
# Tokens per micro-batch on a CPU: the whole even batch of a rank, or as much of the ragged one as fits the cache.
CPU_TOKENS = {"even": 2048, "ragged": 1024, "even-two-ranks": 1024}
# The optimizer of every side. Without weight decay, since the sides decay different parameters by default.
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}

Step = Callable[[], dict[str, float]]


def documents(options: dict[str, Any]) -> list[Any]:
    """Return the batch, equal for every side: an int64 tensor per document; of several ranks, this one's documents.

    With the option `document` it is that one alone. With `prompt`, each `samples` documents begin with the same tokens.
    """
    import torch

    from benchmarks.peer_models import hf_config

    generator = torch.Generator().manual_seed(1)
    vocab = hf_config(options["checkpoint"])["vocab_size"]
    docs = [torch.randint(vocab, (length,), generator=generator) for length in options["lengths"]]
    if prompt := options.get("prompt"):
        for index, doc in enumerate(docs):
            doc[:prompt] = docs[index - index % options["samples"]][:prompt]
    if "document" in options:
        return [docs[options["document"]]]
    ranks = options.get("ranks", 1)
    return docs if ranks == 1 else docs[int(os.environ["RANK"]) :: ranks]


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Load the checkpoint into a side and take its first two steps; the parent compares their losses."""
    return prepared((archon_step if side.startswith("archon") else peer_step)(side, options))


def prepared(step: Step, device: str = "cpu") -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Prepare a side from the function that takes its steps on `device`."""
    first, second = step(), step()
    facts = {"loss": first["loss"], "grad_norm": first["grad_norm"], "loss_after_one_step": second["loss"]}

    def run(profile: bool = False) -> dict[str, Any]:
        return {"profile": step_profile(step, device)} if profile else dict(step())

    return facts, run


def archon_engine(
    options: dict[str, Any], compiled: bool | str = False, lora: dict[str, Any] | None = None, **fields: Any
) -> Any:
    """Return archon's initialized engine, with further `fields`; it trains LoRAs if the options have one, or `lora`."""
    from archon import ArchonEngine, EngineConfig

    betas = ADAMW["betas"]
    config = EngineConfig(
        path=options["checkpoint"],
        device=options["device"],
        dtype=options["dtype"],
        max_tokens_per_mb=options["max_tokens_per_mb"],
        compile=compiled,
        layout=f"d{options.get('ranks', 1)}",
        lora={"path": options["lora"]} if "lora" in options else lora,
        optimizer={"lr": ADAMW["lr"], "beta1": betas[0], "beta2": betas[1], "eps": ADAMW["eps"], "weight_decay": 0.0},
        **fields,
    )
    engine = ArchonEngine(config)
    engine.initialize()
    return engine


def step_of(engine: Any, docs: list[Any], **fields: Any) -> Step:
    """`ArchonEngine.train_batch`, from the padded batch at its door, with further `fields`."""
    from archon.engine.loss import CrossEntropyLoss, loss_token_count
    from benchmarks.peer_losses import padded

    ids, mask = padded(docs)
    loss_mask = mask.clone()
    loss_mask[:, 0] = 0  # nothing predicts a document's first token
    batch = {"input_ids": ids, "attention_mask": mask.bool(), "loss_mask": loss_mask, **fields}
    loss_fn = CrossEntropyLoss()
    return lambda: engine.train_batch(batch, loss_fn, loss_token_count)


def archon_step(side: str, options: dict[str, Any]) -> Step:
    """archon's step on this side's documents."""
    return step_of(archon_engine(options, "compiled" in side), documents(options))


def peer_step(side: str, options: dict[str, Any]) -> Step:
    """Return a peer's forward in the loop of every side: fused AdamW and clipping to norm 1."""
    import torch

    from archon.engine.optim import gradient_norm
    from benchmarks import peer_models
    from benchmarks.peer_losses import LOSSES

    device = options["device"]
    if side.endswith("+ Liger"):
        peer_models.use_liger(options["checkpoint"])
    # transformers' Trainer does this too: masters in float32, matrix products in bfloat16.
    autocast = torch.autocast(device, torch.bfloat16, enabled=options["dtype"] == "bfloat16")
    if "lora" in options:
        if device == "cpu":
            autocast = torch.autocast("cpu", enabled=False)
        model = peer_models.peft_model(options["checkpoint"], options["lora"], options["dtype"], device).train()
    elif side in peer_models.MODELS:
        model = peer_models.peer_model(side, options["checkpoint"])
        if device != "cpu":
            model.to(device)
    else:
        model = peer_models.transformers_model(options["checkpoint"], device=device).train()
    if options.get("recompute") == "full":
        model.gradient_checkpointing_enable()
        if "lora" in options:
            model.enable_input_require_grads()
    parts = LOSSES[side](model, [doc.to(device) for doc in documents(options)])
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    calls = count()

    def step() -> dict[str, float]:
        total = torch.zeros((), device=device)
        for part in autocast_each(parts(), autocast):
            part.backward()
            total += part.detach()
        # The step that is compared: of large float32 gradients torch's norm on a CPU is right to four digits only.
        exact = gradient_norm(model.parameters()) if next(calls) == 0 else None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {
            "loss": peer_models.mean_of_ranks(total),
            "grad_norm": peer_models.whole_number(norm if exact is None else exact),
        }

    return step


def autocast_each(parts: Iterator[Any], autocast: Any) -> Iterator[Any]:
    """Let the forward of each part run under autocast, and its backward outside."""
    while True:
        with autocast:
            part = next(parts, None)
        if part is None:
            return
        yield part


def measure(
    case: str, options: dict[str, Any], aims: dict[str, str], rounds: int, keep: bool, profile: bool = False
) -> Record:
    """Measure one CPU case: checks that losses and gradient norms agree, then times every side.

    Archon and the peers against which it misses an aim (with `profile`, all) are profiled at the end.
    """
    tokens, dtype, ranks = sum(options["lengths"]), options["dtype"], options.get("ranks", 1)
    say(f"train_step.{case}: {options['model']}, {len(options['lengths'])} documents, {tokens} tokens, {dtype}")
    layout = "one process" if ranks == 1 else f"shared by {ranks} ranks on gloo, the weights sharded"
    record = harness.new_record("train_step", case, options["threads"], layout)
    record.setup = {"model": shape(options["model"]), "lengths": options["lengths"], "dtype": dtype}
    record.setup["max_tokens_per_mb of archon"] = options["max_tokens_per_mb"]
    time_sides(record, "benchmarks.train_step", options, aims, rounds, profile)
    harness.finish(record, keep)
    return record


def time_sides(
    record: Record, module: str, options: dict[str, Any], aims: dict[str, str], rounds: int, profile: bool
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    """Compare the first steps of all sides, time the later ones, and fill the record.

    Args:
        module: the benchmark that defines the sides.

    Returns:
        The runs and the facts of each side.
    """
    tokens = sum(options["lengths"])
    with Sides(module, ["archon", *aims], options) as sides:
        facts = {side: sides.facts(side) for side in sides.workers}
        record.checks = compare(facts, options["dtype"])
        runs = sides.alternate(rounds)
        rates = {side: [tokens / run["seconds"] for run in results] for side, results in runs.items()}
        for side, values in rates.items():
            record.sides[side] = spread(values, "tok/s", runs[side])
            if side != "archon":
                record.ratios[f"archon / {side}"] = harness.ratio(rates["archon"], values, aims[side])
        peers = [side for side in rates if side != "archon"]
        missed = [side for side in peers if profile or record.ratios[f"archon / {side}"].aim_met is False]
        for side in ["archon", *missed] if missed else []:
            record.profiles[side] = sides.workers[side].run(profile=True)["profile"]
    record.missing = sides.missing
    return runs, facts


def main(doc: str | None = __doc__, cases: Sequence[str] = ()) -> None:
    """Parse, make the checkpoint, measure; without `--case`, all of `cases`, or all cases."""
    parser = harness.parser(doc)
    parser.add_argument("--case", choices=CPU_CASES, help="one case only")
    parser.add_argument("--profile", action="store_true", help="profile also where no aim is missed")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    keep = not (arguments.quick or arguments.no_record)
    options: dict[str, Any] = {"threads": arguments.threads}
    for case in [arguments.case] if arguments.case else cases or list(CPU_CASES):
        with tempfile.TemporaryDirectory() as folder:
            model = "tiny" if arguments.quick else "26M"
            made = make_checkpoint(Path(folder), model)
            lengths = list(RAGGED_LENGTHS) if case == "ragged" else [512] * 4
            if arguments.quick:
                lengths = [length // 4 for length in lengths]
            chosen = {"checkpoint": str(made), "model": model, "device": "cpu", "dtype": "float32", "lengths": lengths}
            chosen |= {"max_tokens_per_mb": CPU_TOKENS[case], "ranks": 2 if case == "even-two-ranks" else 1}
            measure(case, {**options, **chosen}, CPU_CASES[case], arguments.rounds, keep, arguments.profile)
    return None


if __name__ == "__main__":
    main()
