"""A dataset as a function: products and sums that are too large to guess."""

import random


def products(split):
    """Yield the rows of a split: a question in `prompt`, and its `answer`."""
    numbers = random.Random(0 if split == "train" else 1)
    for _ in range(1000 if split == "train" else 100):
        a, b, c = (numbers.randrange(10, 1000) for _ in range(3))
        yield {"prompt": f"What is {a} * {b} + {c}? End with the number.", "answer": str(a * b + c)}
