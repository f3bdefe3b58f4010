"""Compare checkpoints on held-out sums: greedy accuracy with its 95 % interval.

    python examples/evaluate.py runs/start runs/grpo runs/dpo/export

The interval is Wilson's (1927), which also holds near 0 and 1.
"""

import argparse

import torch
from transformers import AutoTokenizer

import archon
from archon.rl import GenerationHyperparameters, InProcessEngine, ModelRequest, get_arithmetic_rl_dataset


def interval(right, n, z=1.96):
    """Return the ends of Wilson's interval of a share."""
    share = right / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return center - half, center + half


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoints", nargs="+")
parser.add_argument("--rows", type=int, default=500)
options = parser.parse_args()

for checkpoint in options.checkpoints:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = archon.load_model(checkpoint, dtype=torch.float32)
    engine = InProcessEngine.from_model(model, tokenizer)
    rows = get_arithmetic_rl_dataset(split="test", tokenizer=tokenizer)
    rows = [rows[index] for index in range(min(options.rows, len(rows)))]
    greedy = GenerationHyperparameters(max_new_tokens=5, greedy=True)
    requests = [ModelRequest(tokenizer(row["prompt"]).input_ids, greedy) for row in rows]
    texts = [tokenizer.decode(answer.output_tokens, skip_special_tokens=True) for answer in engine.generate(requests)]
    right = sum(text == str(row["answer"]) for text, row in zip(texts, rows, strict=True))
    low, high = interval(right, len(rows))
    print(f"{checkpoint:40} {right / len(rows):6.1%}  [{low:.1%}, {high:.1%}]  {len(rows)} rows")
