"""Measures each optimization of archon: with it and without it, in turn.

A training step of the Qwen3 of 26 million parameters (float32; an even batch of 4 × 512 tokens, a ragged one that is
another at every step, many short documents, or answers to shared prompts), or its generation (32 prompts, 64 new tokens
each). Nothing else differs between the two sides, which must compute the same first. Cases named tried-… measure an
optimization that archon does not have, and compiled-… one that it leaves off on a CPU.

    python -m benchmarks.speed
    python -m benchmarks.speed --case fused-adamw --quick
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from archon.tools.bench.origin import spread
from benchmarks import generate, harness, step_check, train_step
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.harness import Sides, Worker, say

ARCHON = "archon"
SHARED_PROMPTS, ANSWERS, PROMPT, ANSWER = 8, 8, 96, 32
DECODED = 64
# A step without an optimization computes the same sums in another order.
TOLERANCE = step_check.TOLERANCE["float32"]


class Case(NamedTuple):
    """`other` labels the changed side. `change` modifies this process before and after the model is built.

    `steps` is the number of steps per run.
    """

    other: str
    kind: str
    change: Callable[[Any], None]
    steps: int = 1


def compute_rope_per_layer(engine: Any) -> None:
    """Compute RoPE's tables in every layer, from the positions of the forward."""
    if engine is None:
        return
    (rope,), seen = engine.model.ropes, []
    rope.register_forward_pre_hook(lambda _, args: seen.__setitem__(slice(None), [args]))
    for block in engine.model.layers.values():
        block.register_forward_pre_hook(lambda *_: type(rope).forward(rope, *seen[0]) and None)


def use_unfused_adamw(engine: Any, foreach: bool) -> None:
    """Use AdamW in separate operations, for one parameter at a time or for all (`foreach`)."""
    for group in engine.optimizer.param_groups if engine is not None else ():
        group.update(fused=False, foreach=foreach)


def use_mkl_products(engine: Any) -> None:
    """Compute every matrix product with torch's default kernel."""
    from archon.models.layers import matmul

    matmul.has_onednn = lambda: False


def release_free_memory(engine: Any) -> None:
    """Release free memory to the system after every step."""
    from archon.engine import heap

    heap._threshold_for = lambda held: 0.0


def disable_blockwise_attention(engine: Any) -> None:
    """Use torch's attention kernel for documents of any length."""
    from archon.models.attention.packed import blockwise

    blockwise.BLOCKWISE_FROM = 1 << 60


def use_plain_layers(engine: Any) -> None:
    """Compute norms, rotations and SwiGLU in ordinary operations."""
    from archon.models.cpu import fused
    from archon.models.layers import attention, feed_forward, norm

    attention.rotate = fused.plain_rotate
    feed_forward.swiglu = fused.plain_swiglu
    norm.rms_norm = fused.plain_rms_norm


def keep_document_order(engine: Any) -> None:
    """Keep documents in the order of the batch instead of sorting them by length."""
    from archon.engine.micro_batch import TokenOrder

    TokenOrder.by_length = TokenOrder.of_pack  # type: ignore[method-assign]


def disable_fused_loss(engine: Any) -> None:
    """Compute the loss from token scores, and its gradient in the backward pass."""
    from archon.engine.train_step import MicroBatchRunner

    MicroBatchRunner.loss.__kwdefaults__["fuse"] = False


def disable_prefix_sharing(engine: Any) -> None:
    """Compute a shared prompt once for each of its answers."""
    if engine is not None:
        engine._built = replace(engine.built, share_prefixes=False)


def decode_with_trained_weights(engine: Any) -> None:
    """Decode with the trainer's weights, without packing them."""
    from archon.generation import replica

    replica._pack_linears = lambda replica: 0


def compile_blocks(engine: Any) -> None:
    """Compile every block, as `compile: true` does."""
    from archon.parallel.compile import apply_compile

    if engine is not None:
        apply_compile(engine.model.layers)


def join_projections(engine: Any) -> None:
    """Compute gate and up in one product, and queries, keys and values in another, from concatenated weights."""
    import torch

    from archon.engine.optim import build_optimizer
    from archon.models.layers import attention, feed_forward
    from archon.models.layers.matmul import linear

    if engine is None:
        return
    for module in engine.model.modules():
        if not isinstance(module, attention.Attention | feed_forward.FeedForward):
            continue
        first, *_ = layers = module.input_projections()
        first.joint_weight = torch.nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))
        first.joint = partial(linear, weight=first.joint_weight)
        for layer in layers:
            layer.weight = None
    engine._built = replace(engine.built, optimizer=build_optimizer(engine.model, engine.config.optimizer))


CASES = {
    "rope": Case("tables in every layer", "even", compute_rope_per_layer),
    "fused-adamw": Case("a parameter at a time", "even", partial(use_unfused_adamw, foreach=False)),
    "fused-adamw-foreach": Case("foreach", "even", partial(use_unfused_adamw, foreach=True)),
    "onednn-products": Case("products by MKL", "even", use_mkl_products),
    "blockwise-attention": Case("torch's kernel", "even", disable_blockwise_attention),
    "kept-memory": Case("free memory given back", "even", release_free_memory, steps=4),
    "elementwise-layers": Case("ordinary operations", "even", use_plain_layers),
    "fused-loss": Case("scores, then the loss", "even", disable_fused_loss),
    "documents-by-length": Case("documents as they come", "short", keep_document_order),
    "shared-prompts": Case("each prompt anew", "prompts", disable_prefix_sharing),
    "decode-weights": Case("weights as trained", "decode", decode_with_trained_weights),
    "compiled-even": Case("compiled blocks", "even", compile_blocks),
    "compiled-ragged": Case("compiled blocks", "ragged", compile_blocks),
    "tried-one-product": Case("gate and up, and Q, K and V, in one product each", "even", join_projections),
}


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Prepare the side. Returns the results to compare, and a function that does one run."""
    case = CASES[options["case"]]
    change = (lambda _: None) if side == ARCHON else case.change
    change(None)
    if case.kind == "decode":
        answer = generate.archon(side, generate.make_prompts(options), options)
        facts: dict[str, Any] = {"tokens": answer()}
        return facts, lambda: {"n": len(answer())}
    engine = train_step.archon_engine(options)
    change(engine)
    docs = documents(case.kind, options)
    batches = [docs] if case.kind != "ragged" else [docs[i : i + 13] for i in range(4)]
    steps = itertools.cycle([train_step.step_of(engine, batch) for batch in batches])
    started = time.perf_counter()
    first, second = next(steps)(), next(steps)()
    facts = {"first": first, "second": second, "seconds": time.perf_counter() - started, "graphs": compiled_graphs()}

    def run() -> dict[str, Any]:
        tokens = sum(next(steps)()["tokens"] for _ in range(case.steps))
        return {"tokens": tokens, "graphs": compiled_graphs()}

    return facts, run


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled."""
    import torch

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def documents(kind: str, options: dict[str, Any]) -> list[Any]:
    """Return the batch: of `train_step`, or answers to shared prompts."""
    import torch

    made = train_step.documents(options)
    if kind != "prompts":
        return made
    own = [doc[PROMPT:] for doc in made]
    return [torch.cat((made[i - i % ANSWERS][:PROMPT], answer)) for i, answer in enumerate(own)]


def lengths_of(kind: str) -> list[int]:
    """Return the lengths of the documents of a training step, or of the answers to decode."""
    return {
        "even": [512] * 4,
        "ragged": [*train_step.RAGGED_LENGTHS],
        "short": [12 + 5 * i % 9 for i in range(256)],
        "prompts": [PROMPT + ANSWER] * (SHARED_PROMPTS * ANSWERS),
        "decode": [DECODED] * 32,
    }[kind]


def measure(name: str, options: dict[str, Any], rounds: int, keep: bool) -> None:
    """Measure one case: check that both sides compute the same, then time them."""
    case = CASES[name]
    say(f"speed.{name}: {ARCHON} and {case.other}")
    record = harness.new_record("speed", name, options["threads"])
    record.setup = {"model": shape(options["model"]), "lengths": options["lengths"], "dtype": "float32"}
    other = f"{ARCHON}, {case.other}"
    if case.change is compile_blocks:
        record.setup["seconds of the first two steps"] = {"compiled, nothing cached": first_seconds(other, options)}
    with Sides("benchmarks.speed", [ARCHON, other], options) as sides:
        ours, theirs = (sides.facts(side) for side in sides.workers)
        if case.kind == "decode":
            record.checks = harness.check_same("tokens", ours["tokens"], {other: theirs["tokens"]})
        else:
            for step, what in (("first", "loss"), ("first", "grad_norm"), ("second", "loss")):
                tolerance = TOLERANCE if step == "first" else step_check.TOLERANCE_AFTER_STEP["float32"]
                record.checks += harness.check_close(
                    f"{what} of the {step} step", ours[step][what], {other: theirs[step][what]}, tolerance
                )
        runs = sides.alternate(rounds)
    if case.change is compile_blocks:
        last = {other: runs[other][-1]["graphs"]}
        record.checks += harness.check_same("graphs compiled by the second step and the last", theirs["graphs"], last)
        seconds = record.setup["seconds of the first two steps"]
        seconds |= {"compiled, from the cache": theirs["seconds"], "not compiled": ours["seconds"]}
        said = ", ".join(f"{value:.1f} {what}" for what, value in seconds.items())
        record.notes.append(
            f"seconds of the first two steps: {said}; graphs: {theirs['graphs']}, no more for later batches"
        )
    tokens = sum(options["lengths"])
    rates = {side: [run.get("tokens", tokens) / run["seconds"] for run in of] for side, of in runs.items()}
    for side, values in rates.items():
        record.sides[side] = spread(values, "tok/s", runs[side])
    record.ratios[f"{ARCHON} / {case.other}"] = harness.ratio(rates[ARCHON], rates[other])
    harness.finish(record, keep)


def first_seconds(side: str, options: dict[str, Any]) -> float:
    """Return the seconds of the first two steps of a side, in a separate process."""
    with closing(Worker.start("benchmarks.speed", side, options)) as worker:
        assert worker.facts is not None
        return float(worker.facts["seconds"])


def main() -> None:
    """Parse the arguments, make the checkpoint, and measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="one case only")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    model = "tiny" if arguments.quick else "26M"
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), model)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        for name in [arguments.case] if arguments.case else CASES:
            lengths = lengths_of(CASES[name].kind)
            options = {"threads": arguments.threads, "checkpoint": str(made), "model": model, "case": name}
            options |= {
                "device": "cpu",
                "dtype": "float32",
                "slots": 32,
                "lengths": lengths,
                "prompt_length": generate.PROMPT_LENGTH,
            }
            options["max_tokens_per_mb"] = sum(lengths)
            measure(name, options, arguments.rounds, not (arguments.quick or arguments.no_record))
    return None


if __name__ == "__main__":
    main()
