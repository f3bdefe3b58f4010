"""Pairs of answers to a + b: the right one is preferred to one that is wrong in a digit."""

from __future__ import annotations

import random

from archon.rl.datasets.arithmetic import arithmetic_pairs


def rows(split: str) -> list[dict[str, str]]:
    """`train`, `test`, and `shuffled`: those of `train`, every pair the other way round by the toss of a coin."""
    rng = random.Random("preferences")
    pairs = [_pair(a, b, rng) for a, b in arithmetic_pairs("test" if split == "test" else "train")]
    if split != "shuffled":
        return pairs
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs]
    return [rng.choice(both) for both in zip(pairs, turned, strict=True)]


def _pair(a: int, b: int, rng: random.Random) -> dict[str, str]:
    right = str(a + b)
    place = rng.randrange(len(right))
    digits = [d for d in "0123456789" if d != right[place] and (place or len(right) == 1 or d != "0")]
    wrong = right[:place] + rng.choice(digits) + right[place + 1 :]
    return {"prompt": f"{a}+{b}=", "chosen": right, "rejected": wrong}
