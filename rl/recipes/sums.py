"""Two-digit sums as conversations: dataset of the SmolLM2-135M-Instruct recipes.

The first turns show one sum in the expected form, "31 + 47 = 78". With this example the model solves about a fifth of
the sums; without it, it explains addition at length.
"""

from __future__ import annotations

import random
from typing import Any

from archon.data.named_datasets import arithmetic_pairs

SHOWN = ((31, 47),)
HELD_OUT = 200


def rows(split: str) -> list[dict[str, Any]]:
    """Return the rows of a split.

    Args:
        split: `train` and `test` for RL (prompt and answer), `sft` and `sft_test` (conversations), `pairs` and
            `pairs_test` (a right and a wrong answer). A sum of a test split, also mirrored, is in no training split.
    """
    held_out = split.endswith("test")
    pairs = [pair for pair in arithmetic_pairs("test" if held_out else "train") if min(pair) >= 10]
    if held_out:
        pairs = pairs[:HELD_OUT]
    kind = split.removesuffix("_test")
    if kind == "sft":
        return [{"prompt": [*question(a, b), _assistant_message(answer(a, b))]} for a, b in pairs]
    if kind == "pairs":
        rng = random.Random("lora_learning")
        return [
            {"prompt": question(a, b), "chosen": answer(a, b), "rejected": answer(a, b, _error(rng))} for a, b in pairs
        ]
    return [{"prompt": question(a, b), "answer": answer(a, b)} for a, b in pairs]


def question(a: int, b: int) -> list[dict[str, str]]:
    """Return the conversation for the question a + b."""
    messages = [{"role": "system", "content": "Add."}]
    for x, y in SHOWN:
        messages += [_user_message(x, y), _assistant_message(answer(x, y))]
    return [*messages, _user_message(a, b)]


def answer(a: int, b: int, error: int = 0) -> str:
    """Return the answer in the expected form, off by `error`."""
    return f"{a} + {b} = {a + b + error}"


def _error(rng: random.Random) -> int:
    """Return an error of one or two units or tens, like the model's typical mistakes."""
    return rng.choice((1, -1)) * rng.choice((1, 2, 10, 20))


def _user_message(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}?"}


def _assistant_message(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
