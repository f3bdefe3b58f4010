"""Train with a loss of your own: the focal loss, which gives less weight to tokens that the model already predicts.

    python examples/custom_loss.py runs/start runs/focal --steps 50

A loss sees the log-probability and the entropy of each label, and returns a sum. The engine divides it by the sum of
the second function over the whole batch, so that micro-batches, padding and layouts do not change the gradient.
"""

import argparse
import random

import torch
from transformers import AutoTokenizer

from archon import ArchonEngine, EngineConfig
from archon.rl import concat_padded_tensors


def focal_loss(logprobs, entropy, batch, gamma=2.0):
    """Return Σ -(1 - p)^γ log p over the trained tokens (Lin et al. 2017, arXiv:1708.02002)."""
    mask = batch["loss_mask"]
    loss = -((1 - logprobs.exp()) ** gamma * logprobs * mask).sum()
    return loss, {"token_prob": ((logprobs.detach().exp() * mask).sum(), mask.sum())}


def trained_tokens(batch):
    """Return the denominator of the loss."""
    return batch["loss_mask"].sum()


def row(tokenizer, prompt, answer):
    """Return a batch of one row; `loss_mask` is 1 for the tokens that are trained."""
    prompt_ids = tokenizer(prompt).input_ids
    answer_ids = [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
    return {
        "input_ids": torch.tensor([prompt_ids + answer_ids]),
        "attention_mask": torch.ones(1, len(prompt_ids) + len(answer_ids), dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * len(prompt_ids) + [1] * len(answer_ids)]),
    }


def main():
    """Train, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layout", default="d1", help="for example d2t2, under torchrun --nproc-per-node 4")
    options = parser.parse_args()
    random.seed(0)

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    config = {"path": options.checkpoint, "layout": options.layout, "optimizer": {"lr": 1e-3}}
    engine = ArchonEngine(EngineConfig.parse(config))
    engine.initialize(total_steps=options.steps)
    for step in range(1, options.steps + 1):
        sums = [(random.randrange(100), random.randrange(100)) for _ in range(64)]
        batch = concat_padded_tensors([row(tokenizer, f"{a}+{b}=", str(a + b)) for a, b in sums])
        metrics = engine.train_batch(batch, focal_loss, trained_tokens)
        engine.step_lr_scheduler()
        if step % 10 == 0:
            print(f"step {step:4} loss {metrics['loss']:.3f} token_prob {metrics['token_prob']:.3f}", flush=True)
    engine.save(options.output)


if __name__ == "__main__":
    main()
