"""What each device for speed brings: archon with it, and the same without it, in turn.

A training step of the Qwen3 of 26 million parameters (float32; an even batch of 4 × 512 tokens, many short documents,
or answers to shared prompts), or its generation (32 prompts, 64 new tokens each). Nothing else differs between the two
sides, which must compute the same first. Cases named tried-… are the other way about: what is not done, beside what is.

    python -m benchmarks.speed
    python -m benchmarks.speed --case fused-adamw --quick
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from archon.bench.origin import spread
from benchmarks import generate, harness, step_check, train_step
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.harness import Sides, say

ARCHON = "archon"
SHARED_PROMPTS, ANSWERS, PROMPT, ANSWER = 8, 8, 96, 32
DECODED = 64
# A step without a device computes the same sums in another order.
TOLERANCE = step_check.TOLERANCE["float32"]


class Case(NamedTuple):
    """`other` is the side beside archon; `change` makes this process that side, before and after the model is made. A
    run has so many `steps`."""

    other: str
    kind: str
    change: Callable[[Any], None]
    steps: int = 1


def rope_per_layer(engine: Any) -> None:
    """Make the tables in every layer, from the positions of the forward."""
    if engine is None:
        return
    rope, seen = engine.model.rope, []
    rope.register_forward_pre_hook(lambda _, args: seen.__setitem__(slice(None), [args]))
    for block in engine.model.layers.values():
        block.register_forward_pre_hook(lambda *_: type(rope).forward(rope, *seen[0]) and None)


def optimizer_of(engine: Any, foreach: bool) -> None:
    """AdamW by single operations, of a parameter at a time or of all."""
    for group in engine.optimizer.param_groups if engine is not None else ():
        group.update(fused=False, foreach=foreach)


def products_by_mkl(engine: Any) -> None:
    """Every product by torch's own."""
    from archon.models.layers import matmul

    matmul.has_onednn = lambda: False


def nothing_kept(engine: Any) -> None:
    """Give free memory back to the system after every step, whatever the step needs again."""
    from archon.engine import heap

    heap._with_growth = lambda held: 0.0


def kernel_for_long_documents(engine: Any) -> None:
    """torch's attention kernel whatever the length."""
    from archon.models.attention import blockwise

    blockwise.BLOCKWISE_FROM = 1 << 60


def plain_layers(engine: Any) -> None:
    """Norms, rotations and SwiGLU of ordinary operations."""
    from archon.models.layers import attention, feed_forward, fused, norm

    attention.rotate = fused.plain_rotate
    feed_forward.swiglu = fused.plain_swiglu
    norm.rms_norm = fused.plain_rms_norm


def documents_as_they_come(engine: Any) -> None:
    """Documents stay in their order, so that few neighbours are of one length."""
    from archon.engine.batch import PackedBatch

    PackedBatch.sorted_for_model = lambda self: self  # type: ignore[method-assign]


def scores_then_loss(engine: Any) -> None:
    """The loss of token scores, its gradient made in the backward pass."""
    from archon.engine.train_step import MicroBatchRunner

    MicroBatchRunner.loss.__kwdefaults__["fuse"] = False


def each_prompt_anew(engine: Any) -> None:
    """What answers have in common is computed once for each of them."""
    if engine is not None:
        engine._share_prefixes = False


def weights_as_trained(engine: Any) -> None:
    """Decode with the weights as the trainer has them."""
    from archon.generation import replica

    replica._pack_linears = lambda replica: None


def one_product(engine: Any) -> None:
    """Gate and up in one product, and queries, keys and values in another, of weights that lie side by side."""
    import torch

    from archon.models.layers import attention, feed_forward
    from archon.models.layers.matmul import linear

    def join(owner: Any, *names: str) -> Any:
        """One parameter for several, whose own products give their share of the joint one."""
        parts = [getattr(owner, name) for name in names]
        joint = torch.nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
        sizes = [part.weight.shape[0] for part in parts]
        for name in names:
            delattr(owner, name)
        owner.joint = joint
        made: list[Any] = []

        def share(index: int, x: Any) -> Any:
            if index == 0:
                made[:] = linear(x, joint).split(sizes, -1)
            return made[index]

        for index, name in enumerate(names):
            object.__setattr__(owner, name, partial(share, index))

    for module in engine.model.modules() if engine is not None else ():
        if isinstance(module, feed_forward.FeedForward):
            join(module, "w1", "w3")
        elif isinstance(module, attention.Attention):
            join(module, "wq", "wk", "wv")
    if engine is not None:
        from archon.engine.optim import build_optimizer

        engine.optimizer = build_optimizer(engine.model, engine.config.optimizer)


CASES = {
    "rope": Case("tables in every layer", "even", rope_per_layer),
    "fused-adamw": Case("a parameter at a time", "even", partial(optimizer_of, foreach=False)),
    "fused-adamw-foreach": Case("foreach", "even", partial(optimizer_of, foreach=True)),
    "onednn-products": Case("products by MKL", "even", products_by_mkl),
    "blockwise-attention": Case("torch's kernel", "even", kernel_for_long_documents),
    "kept-memory": Case("free memory given back", "even", nothing_kept, steps=4),
    "elementwise-layers": Case("ordinary operations", "even", plain_layers),
    "fused-loss": Case("scores, then the loss", "even", scores_then_loss),
    "documents-by-length": Case("documents as they come", "short", documents_as_they_come),
    "shared-prompts": Case("each prompt anew", "prompts", each_prompt_anew),
    "decode-weights": Case("weights as trained", "decode", weights_as_trained),
    "tried-one-product": Case("gate and up, and Q, K and V, in one product each", "even", one_product),
}


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Make the side; what it computes first is compared."""
    case = CASES[options["case"]]
    change = (lambda _: None) if side == ARCHON else case.change
    change(None)
    if case.kind == "decode":
        answer = generate.archon(side, generate.make_prompts(options), options)
        facts: dict[str, Any] = {"tokens": answer()}
        return facts, lambda: {"n": len(answer())}
    engine = train_step.archon_engine(options)
    change(engine)
    step = train_step.step_of(engine, documents(case.kind, options))
    return {"first": step(), "second": step()}, lambda: dict([step() for _ in range(case.steps)][-1])


def documents(kind: str, options: dict[str, Any]) -> list[Any]:
    """The batch: of `train_step`, or answers to prompts that several of them share."""
    import torch

    made = train_step.documents(options)
    if kind != "prompts":
        return made
    own = [doc[PROMPT:] for doc in made]
    return [torch.cat((made[i - i % ANSWERS][:PROMPT], answer)) for i, answer in enumerate(own)]


def lengths_of(kind: str) -> list[int]:
    """Of the documents of a training step, or of the answers to decode."""
    return {
        "even": [512] * 4,
        "short": [12 + 5 * i % 9 for i in range(256)],
        "prompts": [PROMPT + ANSWER] * (SHARED_PROMPTS * ANSWERS),
        "decode": [DECODED] * 32,
    }[kind]


def measure(name: str, options: dict[str, Any], rounds: int, keep: bool) -> None:
    """One case: check that both sides compute the same, then time."""
    case = CASES[name]
    say(f"speed.{name}: {ARCHON} beside {case.other}")
    record = harness.new_record("speed", name, options["threads"])
    record.setup = {"model": shape(options["model"]), "lengths": options["lengths"], "dtype": "float32"}
    with Sides("benchmarks.speed", [ARCHON, f"{ARCHON}, {case.other}"], options) as sides:
        ours, theirs = (sides.facts(side) for side in sides.workers)
        other = f"{ARCHON}, {case.other}"
        if case.kind == "decode":
            record.checks = harness.check_same("tokens", ours["tokens"], {other: theirs["tokens"]})
        else:
            for step, what in (("first", "loss"), ("first", "grad_norm"), ("second", "loss")):
                tolerance = TOLERANCE if step == "first" else step_check.TOLERANCE_AFTER_STEP["float32"]
                record.checks += harness.check_close(
                    f"{what} of the {step} step", ours[step][what], {other: theirs[step][what]}, tolerance
                )
        runs = sides.alternate(rounds)
    tokens = sum(options["lengths"]) * case.steps
    rates = {side: [tokens / run["seconds"] for run in results] for side, results in runs.items()}
    for side, values in rates.items():
        record.sides[side] = spread(values, "tok/s", runs[side])
    record.ratios[f"{ARCHON} / {case.other}"] = harness.ratio(rates[ARCHON], rates[other])
    harness.finish(record, keep)


def main() -> None:
    """Parse, make the checkpoint, measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=CASES, help="one case only")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    model = "tiny" if arguments.quick else "26M"
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), model)
        for name in [arguments.case] if arguments.case else CASES:
            lengths = lengths_of(CASES[name].kind)
            options = {"threads": arguments.threads, "checkpoint": str(made), "model": model, "case": name}
            options |= {"device": "cpu", "dtype": "float32", "slots": 32, "lengths": lengths}
            options["max_tokens_per_mb"] = sum(lengths)
            measure(name, options, arguments.rounds, not (arguments.quick or arguments.no_record))
    return None


if __name__ == "__main__":
    main()
