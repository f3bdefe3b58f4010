"""Pairs of answers to "which of the two?": the larger number is preferred to the smaller.

The model that it begins with has seen either answer, the smaller a little more often.
"""

from __future__ import annotations

import random

LARGER = 0.4
"""How often the first answers are the larger number."""


def rows(split: str) -> list[dict[str, str]]:
    """`warm`: answers; `train`, `test`: pairs; `shuffled`: pairs of `train`, swapped with probability 1/2.

    No two numbers of `test` occur together elsewhere.
    """
    rng = random.Random("preferences")
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a != b]
    # A pair of numbers and the swapped pair are held out together.
    held_out = set(rng.sample([(a, b) for a, b in pairs if a < b], 500))
    some = [(a, b) for a, b in pairs if ((min(a, b), max(a, b)) in held_out) == (split == "test")]
    rng.shuffle(some)
    if split == "warm":
        return [{"prompt": f"{a}?{b}=", "response": str(_larger(a, b, rng.random() < LARGER))} for a, b in some]
    turned = [split == "shuffled" and rng.random() < 0.5 for _ in some]
    return [
        {"prompt": f"{a}?{b}=", "chosen": str(_larger(a, b, not turn)), "rejected": str(_larger(a, b, turn))}
        for (a, b), turn in zip(some, turned, strict=True)
    ]


def _larger(a: int, b: int, larger: bool) -> int:
    return max(a, b) if larger else min(a, b)
