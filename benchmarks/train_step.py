"""A whole training step, side by side: forward, cross-entropy, backward, clipping and AdamW.

On a CPU: a Qwen3 of 26 million parameters in float32; an even batch (4 × 512 tokens) against transformers, torchtitan
and megatron-core, and a ragged one (16 documents, 3,580 tokens) against transformers' three ways of taking it. On a
GPU: the shapes of Qwen3-0.6B, 1.7B and 4B in bfloat16 with float32 masters, packed 4,096-token documents, with both
MFUs.

    python -m benchmarks.train_step                     # both CPU cases, or the GPU cases where there is a GPU
    python -m benchmarks.train_step --case even --quick
    python -m benchmarks.train_step --case 4B --alone   # on a GPU, archon only
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from archon.bench.origin import spread
from benchmarks import harness
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.harness import Sides, say

RAGGED_LENGTHS = (241, 24, 512, 94, 307, 160, 47, 448, 186, 73, 352, 117, 213, 391, 139, 276)  # 3,580 in all
GPU_CASES = {"0.6B": 8, "1.7B": 4, "4B": 2}  # documents of 4,096 tokens a step
EVEN_AIMS = {"transformers": ">= 1.05", "torchtitan": ">= 1.05", "megatron-core": ">= 1.5"}
# Tokens of a micro-batch of archon on a CPU: the whole even batch; the ragged one in parts that stay in the cache.
CPU_TOKENS = {"even": 2048, "ragged": 1024}
RAGGED_AIMS = {
    "transformers (padded)": ">= 2.5",
    "transformers (packed)": ">= 2",
    "transformers (one document at a time)": ">= 1.15",
}
EAGER, COMPILED = "archon (eager)", "archon (compiled)"
MFU_AIM = ">= 0.5"
# The optimiser of every side. Without weight decay, since the sides decay different parameters by default.
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
# float32: the same sums in another order. Sums over 3.6e3 tokens of terms that agree to 1e-6.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
# After one AdamW step, whose sign near a zero gradient is decided by rounding.
TOLERANCE_AFTER_STEP = {"float32": 1e-4, "bfloat16": 5e-2}

Step = Callable[[], dict[str, float]]


def documents(options: dict[str, Any]) -> list[Any]:
    """The batch, the same for every side: one int64 tensor a document."""
    import torch

    generator = torch.Generator().manual_seed(1)
    vocab = shape(options["model"])["vocab_size"]
    return [torch.randint(vocab, (length,), generator=generator) for length in options["lengths"]]


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Load the checkpoint into a side and take its first two steps, whose losses the parent compares."""
    step = (archon_step if side.startswith("archon") else peer_step)(side, options)
    first, second = step(), step()
    facts = {"loss": first["loss"], "grad_norm": first["grad_norm"], "loss_after_one_step": second["loss"]}
    return facts, lambda: dict(step())


def padded(docs: list[Any]) -> tuple[Any, Any]:
    """input_ids and attention_mask [B, S], padded on the right."""
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence(docs, batch_first=True)
    mask = pad_sequence([doc.new_ones(len(doc)) for doc in docs], batch_first=True)
    return ids, mask


def archon_step(side: str, options: dict[str, Any]) -> Step:
    """`ArchonEngine.train_batch`, from the padded batch at its door."""
    from archon import ArchonEngine, EngineConfig
    from archon.loss import CrossEntropyLoss, loss_token_count

    betas = ADAMW["betas"]
    config = EngineConfig(
        path=options["checkpoint"],
        device=options["device"],
        dtype=options["dtype"],
        max_tokens_per_mb=options["max_tokens_per_mb"],
        compile="compiled" in side,
        optimizer={"lr": ADAMW["lr"], "beta1": betas[0], "beta2": betas[1], "eps": ADAMW["eps"], "weight_decay": 0.0},
    )
    engine = ArchonEngine(config)
    engine.initialize()
    ids, mask = padded(documents(options))
    loss_mask = mask.clone()
    loss_mask[:, 0] = 0  # nothing predicts a document's first token
    batch = {"input_ids": ids, "attention_mask": mask.bool(), "loss_mask": loss_mask}
    loss_fn = CrossEntropyLoss()
    return lambda: engine.train_batch(batch, loss_fn, loss_token_count)


def peer_step(side: str, options: dict[str, Any]) -> Step:
    """A peer's forward with what every side shares around it: fused AdamW and clipping to norm 1."""
    import torch

    from benchmarks import peers

    device = options["device"]
    if side.startswith("transformers"):
        model = peers.transformers_model(options["checkpoint"], device=device).train()
        # transformers' Trainer does this too: masters in float32, matrix products in bfloat16.
        autocast = torch.autocast(device, torch.bfloat16, enabled=options["dtype"] == "bfloat16")
    else:
        model = {"torchtitan": peers.torchtitan_model, "megatron-core": peers.megatron_model}[side](
            options["checkpoint"]
        )
        autocast = torch.autocast("cpu", enabled=False)
    parts = LOSSES[side](model, [doc.to(device) for doc in documents(options)])
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def step() -> dict[str, float]:
        total = torch.zeros((), device=device)
        for part in autocast_each(parts(), autocast):
            part.backward()
            total += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": float(total), "grad_norm": float(norm)}

    return step


def autocast_each(parts: Iterator[Any], autocast: Any) -> Iterator[Any]:
    """Let the forward of each part run under autocast, and its backward outside."""
    while True:
        with autocast:
            part = next(parts, None)
        if part is None:
            return
        yield part


def transformers_padded(model: Any, docs: list[Any]) -> Callable[[], Iterator[Any]]:
    """[B, S] with an attention mask where documents differ in length."""
    ids, mask = padded(docs)
    labels = ids.masked_fill(mask == 0, -100)
    given = {} if bool(mask.all()) else {"attention_mask": mask}

    def parts() -> Iterator[Any]:
        yield model(input_ids=ids, labels=labels, use_cache=False, **given).loss

    return parts


def transformers_packed(model: Any, docs: list[Any]) -> Callable[[], Iterator[Any]]:
    """[1, T] with position ids that restart, from which transformers makes its block-diagonal mask."""
    import torch

    ids = torch.cat(docs)[None]
    positions = torch.cat([torch.arange(len(doc), device=doc.device) for doc in docs])[None]
    labels = ids.masked_fill(positions == 0, -100)

    def parts() -> Iterator[Any]:
        yield model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss

    return parts


def transformers_one_by_one(model: Any, docs: list[Any]) -> Callable[[], Iterator[Any]]:
    """One forward and backward a document, gradients accumulated."""
    total = sum(len(doc) - 1 for doc in docs)

    def parts() -> Iterator[Any]:
        for doc in docs:
            yield model(input_ids=doc[None], labels=doc[None], use_cache=False, num_items_in_batch=total).loss

    return parts


def torchtitan_even(model: Any, docs: list[Any]) -> Callable[[], Iterator[Any]]:
    """torchtitan's Decoder, and cross-entropy as its loss has it."""
    import torch
    import torch.nn.functional as F

    ids = torch.stack(docs)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)

    def parts() -> Iterator[Any]:
        logits = model(ids)
        yield F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)

    return parts


def megatron_even(model: Any, docs: list[Any]) -> Callable[[], Iterator[Any]]:
    """GPTModel's own loss of each token, averaged over those that predict."""
    import torch
    import torch.nn.functional as F

    from benchmarks.peers import causal_mask

    ids = torch.stack(docs)
    labels, loss_mask = F.pad(ids[:, 1:], (0, 1)), F.pad(torch.ones_like(ids[:, 1:]), (0, 1)).float()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = causal_mask(ids.shape[1])

    def parts() -> Iterator[Any]:
        losses = model(ids, positions, mask, labels=labels)
        yield (losses * loss_mask).sum() / loss_mask.sum()

    return parts


LOSSES: dict[str, Callable[[Any, list[Any]], Callable[[], Iterator[Any]]]] = {
    "transformers": transformers_padded,
    "transformers (padded)": transformers_padded,
    "transformers (packed)": transformers_packed,
    "transformers (one document at a time)": transformers_one_by_one,
    "torchtitan": torchtitan_even,
    "megatron-core": megatron_even,
}


def measure(case: str, options: dict[str, Any], aims: dict[str, str], rounds: int, keep: bool) -> None:
    """One CPU case: check that losses and gradient norms agree, then time."""
    tokens, dtype = sum(options["lengths"]), options["dtype"]
    say(f"train_step.{case}: {options['model']}, {len(options['lengths'])} documents, {tokens} tokens, {dtype}")
    record = harness.new_record("train_step", case, options["threads"])
    record.setup = {"model": shape(options["model"]), "lengths": options["lengths"], "dtype": dtype}
    record.setup["max_tokens_per_mb of archon"] = options["max_tokens_per_mb"]
    with Sides("benchmarks.train_step", ["archon", *aims], options) as sides:
        for what, tolerance in (
            ("loss", TOLERANCE),
            ("grad_norm", TOLERANCE),
            ("loss_after_one_step", TOLERANCE_AFTER_STEP),
        ):
            theirs = {peer: sides.facts(peer)[what] for peer in sides.workers if peer != "archon"}
            record.checks += harness.check_close(what, sides.facts("archon")[what], theirs, tolerance[dtype])
        runs = sides.alternate(rounds)
    rates = {side: [tokens / run["seconds"] for run in results] for side, results in runs.items()}
    for side, values in rates.items():
        record.sides[side] = spread(values, "tok/s", runs[side])
        if side != "archon":
            record.ratios[f"archon / {side}"] = harness.ratio(rates["archon"], values, aims[side])
    record.missing = sides.missing
    harness.finish(record, keep)


def measure_gpu(case: str, options: dict[str, Any], alone: bool, rounds: int, keep: bool) -> None:
    """One GPU case. The sides run one after the other, since the masters and moments of two do not fit at once."""
    from archon.flops import PEAK_BF16_FLOPS, MatmulShape

    tokens = sum(options["lengths"])
    record = harness.new_record("train_step", f"gpu-{case}", options["threads"])
    record.setup = {"model": shape(case), "lengths": options["lengths"], "dtype": "bfloat16, float32 masters"}
    record.notes.append("sides one after the other, each alone on the GPU; MFU against 989 TFLOP/s, dense bfloat16")
    work = MatmulShape.from_hf_config({"model_type": "qwen3", **shape(case)}).packed(options["lengths"])
    facts: dict[str, dict[str, Any]] = {}
    rates: dict[str, list[float]] = {}
    for side in [EAGER, COMPILED, *([] if alone else ["transformers"])]:
        try:
            with Sides("benchmarks.train_step", [side], options) as sides:
                if side in sides.workers:
                    facts[side] = sides.facts(side)
                runs = sides.alternate(rounds, warmup=2)
        except harness.BenchmarkError as error:
            if side == EAGER:
                raise
            record.missing[side] = str(error)
            continue
        record.missing |= sides.missing
        if side not in runs:
            continue
        rates[side] = [tokens / run["seconds"] for run in runs[side]]
        record.sides[side] = spread(rates[side], "tok/s", runs[side])
        for convention in ("full", "causal"):
            shares = [getattr(work.mfu(tokens / rate, PEAK_BF16_FLOPS["H200"]), convention) for rate in rates[side]]
            record.sides[f"{side}, {convention} MFU"] = spread([100 * share for share in shares], "%")
        if case == "4B" and side != "transformers":
            record.ratios[f"{side}, causal MFU"] = harness.ratio(shares, [1.0] * rounds, MFU_AIM)
    for side in (EAGER, COMPILED):
        if side in rates and "transformers" in rates:
            record.ratios[f"{side} / transformers"] = harness.ratio(rates[side], rates["transformers"])
    ours = facts[EAGER]
    for what, tolerance in (("loss", TOLERANCE), ("loss_after_one_step", TOLERANCE_AFTER_STEP)):
        theirs = {peer: value[what] for peer, value in facts.items() if peer != EAGER}
        record.checks += harness.check_close(what, ours[what], theirs, tolerance["bfloat16"])
    harness.finish(record, keep)


def main() -> None:
    """Parse, make the checkpoint, measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=["even", "ragged", *GPU_CASES], help="one case only")
    parser.add_argument("--alone", action="store_true", help="on a GPU: without transformers")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    import torch

    on_gpu = torch.cuda.is_available()
    keep = not (arguments.quick or arguments.no_record)
    options: dict[str, Any] = {"threads": arguments.threads}
    for case in [arguments.case] if arguments.case else list(GPU_CASES) if on_gpu else ["even", "ragged"]:
        with tempfile.TemporaryDirectory() as folder:
            if case in GPU_CASES:
                made = make_checkpoint(Path(folder), case, dtype="bfloat16", device="cuda")
                torch.cuda.empty_cache()
                lengths = [4096] * (1 if arguments.quick else GPU_CASES[case])
                chosen = {
                    "checkpoint": str(made),
                    "model": case,
                    "device": "cuda",
                    "dtype": "bfloat16",
                    "lengths": lengths,
                }
                # The logits of transformers decide: all documents of a step in one micro-batch, as archon has them.
                measure_gpu(
                    case, {**options, **chosen, "max_tokens_per_mb": 32768}, arguments.alone, arguments.rounds, keep
                )
                continue
            model = "tiny" if arguments.quick else "26M"
            made = make_checkpoint(Path(folder), model)
            lengths = [512] * 4 if case == "even" else list(RAGGED_LENGTHS)
            if arguments.quick:
                lengths = [length // 4 for length in lengths]
            chosen = {"checkpoint": str(made), "model": model, "device": "cpu", "dtype": "float32", "lengths": lengths}
            aims = EVEN_AIMS if case == "even" else RAGGED_AIMS
            chosen["max_tokens_per_mb"] = CPU_TOKENS[case]
            measure(case, {**options, **chosen}, aims, arguments.rounds, keep)
    return None


if __name__ == "__main__":
    main()
