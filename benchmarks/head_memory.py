"""The language-model head, side by side: log-probabilities of 8,192 tokens over a vocabulary of 151,936, and backward.

archon's chunked head, as a sum (fused weighted loss) and per token, against the logits and the loss of transformers'
causal language models. Inputs are hidden states [T, 512]; outputs are the gradients of hidden states and weight. Memory
is the growth of the process.

    python -m benchmarks.head_memory                  # transformers needs 15 GB
    python -m benchmarks.head_memory --tokens 2048
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from archon.tools.bench.origin import spread
from benchmarks import harness
from benchmarks.harness import Sides, say

SUM, PER_TOKEN, WITH_ENTROPY = "archon (sum)", "archon (per token)", "archon (per token, with entropy)"
PEER = "transformers"
SPEED_AIMS = {SUM: ">= 1.5", PER_TOKEN: ">= 1.25", WITH_ENTROPY: None}
MEMORY_AIM = "<= 0.1667"
# float32: sums over the vocabulary (1.5e5 terms) and over the tokens (8e3 terms) in another order.
TOLERANCE = 1e-5


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Make inputs and weight from a seed and run one pass; the parent compares its loss and gradients."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens, dim, vocab = options["tokens"], options["dim"], options["vocab"]
    hidden: Any = torch.randn(tokens, dim, generator=generator, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    head: Any = (torch.nn.Linear(dim, vocab, bias=False) if side == PEER else archon_head(dim, vocab)).requires_grad_()
    with torch.no_grad():
        head.weight.normal_(std=0.05, generator=generator)
    loss_of = {SUM: archon_sum, PER_TOKEN: archon_per_token, WITH_ENTROPY: archon_with_entropy, PEER: logits_loss}[side]
    facts: dict[str, Any] = {}

    def run() -> dict[str, Any]:
        loss = loss_of(head, hidden, labels)
        loss.backward()
        if not facts:
            facts.update(loss=loss.item())
            facts.update(hidden_grad_norm=hidden.grad.norm().item(), weight_grad_norm=head.weight.grad.norm().item())
        hidden.grad = head.weight.grad = None
        return {}

    run()
    return facts, run


def archon_head(dim: int, vocab: int) -> Any:
    """archon's head module alone."""
    from archon.models.layers.head import LMHead

    return LMHead(dim, vocab)


def archon_sum(head: Any, hidden: Any, labels: Any) -> Any:
    """Run the fused loss with weights known in advance, so that the forward computes the gradient too."""
    import torch

    return head(hidden, labels, entropy=False, weights=torch.full_like(hidden[:, 0], 1 / len(labels))).loss


def archon_per_token(head: Any, hidden: Any, labels: Any) -> Any:
    """Log-probabilities [T] that a loss may use as it likes."""
    return -head(hidden, labels, entropy=False).logprobs.mean()


def archon_with_entropy(head: Any, hidden: Any, labels: Any) -> Any:
    """Run the same with entropies [T], without gradient."""
    return -head(hidden, labels).logprobs.mean()


def logits_loss(head: Any, hidden: Any, labels: Any) -> Any:
    """Compute transformers' logits [1, T, V] and loss, like Qwen3ForCausalLM after its decoder."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = head(hidden[None])
    return ForCausalLMLoss(logits, None, vocab_size=logits.shape[-1], shift_labels=labels[None])


def main() -> None:
    """Parse and measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens (default 8192)")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    sizes = {"tokens": arguments.tokens, "dim": 512, "vocab": 151936}
    if arguments.quick:
        sizes = {"tokens": 256, "dim": 64, "vocab": 8192}
    say(f"head_memory: {sizes}, float32")
    record = harness.new_record("head_memory", f"{sizes['tokens']}-tokens", arguments.threads)
    record.setup = {**sizes, "dtype": "float32"}
    record.notes.append("memory: what the process grew by during forward and backward; the warm-up is the checked pass")
    with Sides("benchmarks.head_memory", [*SPEED_AIMS, PEER], {"threads": arguments.threads, **sizes}) as sides:
        for what in ("loss", "hidden_grad_norm", "weight_grad_norm"):
            theirs = {name: sides.facts(name)[what] for name in sides.workers if name != SUM}
            record.checks += harness.check_close(what, sides.facts(SUM)[what], theirs, TOLERANCE)
        runs = sides.alternate(arguments.rounds, warmup=0)
    rates = {side: [sizes["tokens"] / run["seconds"] for run in results] for side, results in runs.items()}
    grown = {side: [run["memory"].get("rss_above_start", 0) / 1e9 for run in results] for side, results in runs.items()}
    for side in runs:
        record.sides[side] = spread(rates[side], "tok/s", runs[side])
        if all(grown[side]):
            record.sides[f"{side}, memory"] = spread(grown[side], "GB")
        if side == PEER or PEER not in runs:
            continue
        record.ratios[f"{side} / {PEER}, speed"] = harness.ratio(rates[side], rates[PEER], SPEED_AIMS[side])
        if all(grown[side]) and all(grown[PEER]):
            record.ratios[f"{side} / {PEER}, memory"] = harness.ratio(grown[side], grown[PEER], MEMORY_AIM)
    record.missing = sides.missing
    harness.finish(record, not (arguments.quick or arguments.no_record or arguments.tokens != 8192))
    return None


if __name__ == "__main__":
    main()
