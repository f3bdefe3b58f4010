"""Fine-tune a checkpoint with PyTorch alone: archon gives the model, and the loop is yours.

    python examples/plain_loop.py runs/start runs/plain --steps 100

The model takes packed documents: all tokens of a batch in one row, without padding.
"""

import argparse
import itertools
import random

import torch
from transformers import AutoTokenizer

import archon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint")
parser.add_argument("output")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
model = archon.load_model(options.checkpoint, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
random.seed(0)

for step in range(1, options.steps + 1):
    # 1. Sums such as `12+34=46`, and the end of the text. Only the answer is trained.
    tokens, labels, positions, ends = [], [], [], [0]
    for _ in range(64):
        a, b = random.randrange(100), random.randrange(100)
        prompt = tokenizer(f"{a}+{b}=").input_ids
        document = prompt + tokenizer(str(a + b)).input_ids + [tokenizer.eos_token_id]
        tokens += document
        labels += [-100] * (len(prompt) - 1) + document[len(prompt) :] + [-100]  # position t predicts token t + 1
        positions += range(len(document))
        ends.append(len(tokens))
    lengths = [end - start for start, end in itertools.pairwise(ends)]

    # 2. Forward, backward, update.
    scores = model(
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(ends, dtype=torch.int32),
        max(lengths),
        labels=torch.tensor(labels),
    )
    loss = -scores.logprobs.sum() / sum(label != -100 for label in labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:4} loss {loss.item():.3f}", flush=True)

# 3. transformers, vLLM and archon load the result.
archon.save_model(model, options.output, like=options.checkpoint)
