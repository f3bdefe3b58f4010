"""A generated dataset: a + b with a, b in 0–99, all 10,000 pairs, written "12+34=" → "46".

1,000 pairs are held out for evaluation, always together with their mirror images, so that a model evaluated on 12+34
has not been trained on 34+12.
"""

from __future__ import annotations

import random
from typing import Any

from archon.data.mapping import RowDataset, rl_dataset, sft_dataset
from archon.data.sources import SourceRow
from archon.schema.errors import DatasetError

N_HELD_OUT = 1000
_RANGE = 100
_KEYS: dict[str, Any] = {"prompt_key": "sum", "response_key": "answer", "plain_end": ""}


def arithmetic_pairs(split: str = "train", seed: int = 0) -> list[tuple[int, int]]:
    """Returns the pairs (a, b) of a split, shuffled by `seed`: "train" has 9,000, "test" 1,000."""
    if split not in ("train", "test"):
        raise DatasetError(f"split is {split!r}; expected 'train' or 'test' of the arithmetic dataset")
    generator = random.Random(f"arithmetic {seed}")
    unordered = [(a, b) for a in range(_RANGE) for b in range(a, _RANGE)]
    generator.shuffle(unordered)
    held_out: set[tuple[int, int]] = set()
    for a, b in unordered:
        mirrored = {(a, b), (b, a)}
        if len(held_out) + len(mirrored) <= N_HELD_OUT:
            held_out |= mirrored
    pairs = [(a, b) for a in range(_RANGE) for b in range(_RANGE) if ((a, b) in held_out) == (split == "test")]
    generator.shuffle(pairs)
    return pairs


def get_arithmetic_rl_dataset(split: str = "train", *, seed: int = 0, **options: Any) -> RowDataset:
    """Returns RL rows: `prompt` "12+34=", the same as one user message in `messages`, and `answer` "46".

    Args:
        seed: Determines the split and the order.
        options: Of `rl_dataset`: system_prompt, instruction, tokenizer, max_length.
    """
    return rl_dataset(_source(split, seed), f"arithmetic[{split}]", **_KEYS, **options)


def get_arithmetic_sft_dataset(split: str = "train", *, tokenizer: Any, seed: int = 0, **options: Any) -> RowDataset:
    """Returns SFT rows: "12+34=", then "46" and an end token, which are trained; options as in `sft_dataset`."""
    return sft_dataset(_source(split, seed), f"arithmetic[{split}]", tokenizer=tokenizer, **_KEYS, **options)


def _source(split: str, seed: int) -> list[SourceRow]:
    pairs = arithmetic_pairs(split, seed)
    return [SourceRow(f"arithmetic[{split}]", {"sum": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
