"""Pairs of answers to a + b: the right one is preferred to one that is off by one in a digit or in two."""

from __future__ import annotations

import random

from archon.rl.datasets.arithmetic import arithmetic_pairs

MISTAKES = (-11, -10, -9, -1, 1, 9, 10, 11)
"""What nearly all wrong answers of a small model are off by, of which a forgotten carry is the most frequent."""


def rows(split: str) -> list[dict[str, str]]:
    """`train`, `test`, and `shuffled`: those of `train`, every pair the other way round by the toss of a coin."""
    rng = random.Random("preferences")
    pairs = [_pair(a, b, rng) for a, b in arithmetic_pairs("test" if split == "test" else "train")]
    if split != "shuffled":
        return pairs
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs]
    return [rng.choice(both) for both in zip(pairs, turned, strict=True)]


def _pair(a: int, b: int, rng: random.Random) -> dict[str, str]:
    wrong = rng.choice([a + b + off for off in MISTAKES if a + b + off >= 0])
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}
