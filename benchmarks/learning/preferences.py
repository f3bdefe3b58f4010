"""Pairs of answers to a + b: the right one is preferred to one that is wrong in a digit."""

from __future__ import annotations

import random
from pathlib import Path

from archon.rl.datasets.arithmetic import arithmetic_pairs
from benchmarks.learning.rows import write_rows


def write(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl, test.jsonl (columns prompt, chosen, rejected), and shuffled.jsonl: train.jsonl with every pair
    the other way round by the toss of a coin."""
    rng = random.Random(f"preferences {seed}")
    rows = {split: [_pair(a, b, rng) for a, b in arithmetic_pairs(split)] for split in ("train", "test")}
    for split, pairs in rows.items():
        write_rows(folder / f"{split}.jsonl", pairs)
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows["train"]]
    write_rows(folder / "shuffled.jsonl", [rng.choice(both) for both in zip(rows["train"], turned, strict=True)])


def _pair(a: int, b: int, rng: random.Random) -> dict[str, str]:
    right = str(a + b)
    place = rng.randrange(len(right))
    digits = [d for d in "0123456789" if d != right[place] and (place or len(right) == 1 or d != "0")]
    wrong = right[:place] + rng.choice(digits) + right[place + 1 :]
    return {"prompt": f"{a}+{b}=", "chosen": right, "rejected": wrong}
