r"""The check before step 0: a reward that does not pay for the data set's own answers would train towards nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archon.rl.rewards.async_wrapper import AsyncRewardWrapper
from archon.rl.rewards.extract import gold_answer
from archon.rl.rewards.result import RewardFailure
from archon.schema.errors import RewardError


def verify_gold(
    reward: AsyncRewardWrapper | Callable[..., Any] | str, rows: Sequence[Mapping[str, Any]], n: int | None = 64
) -> int:
    """`averify_gold` for callers outside an event loop."""
    return asyncio.run(averify_gold(reward, rows, n))


async def averify_gold(
    reward: AsyncRewardWrapper | Callable[..., Any] | str, rows: Sequence[Mapping[str, Any]], n: int | None = 64
) -> int:
    r"""Scores the gold answers of `n` rows (None: all), evenly spread, and returns how many were checked.

    A gold answer is handed to the reward as the completion, first in the form the data set writes it, then as
    `\boxed{…}`; one of the two must score at least 1.0.

    Raises:
        RewardError: a row without an `answer`, a gold answer that scores less, or a reward that fails on it; the
            message names the row.
    """
    if not isinstance(reward, AsyncRewardWrapper):
        with AsyncRewardWrapper(reward) as wrapper:
            return await averify_gold(wrapper, rows, n)
    count = len(rows) if n is None else min(n, len(rows))
    chosen = [index * len(rows) // count for index in range(count)]
    await asyncio.gather(*(_check(reward, index, rows[index]) for index in chosen))
    return count


async def _check(reward: AsyncRewardWrapper, index: int, row: Mapping[str, Any]) -> None:
    if "answer" not in row:
        raise RewardError(
            f"row {index} has no gold `answer` to check the reward {reward.name} with; has: {sorted(row)}"
        )
    answer = str(row["answer"])
    scores = []
    for completion in (answer, rf"\boxed{{{gold_answer(answer)[0]}}}"):
        try:
            scores.append(await reward(row.get("prompt", ""), completion, [], [], **row))
        except RewardFailure as failure:
            raise RewardError(
                f"the reward fails on the gold answer of row {index} ({answer[-80:]!r}): {failure}"
            ) from failure
        if scores[-1] >= 1.0:
            return
    raise RewardError(
        f"the gold answer of row {index} ({answer[-80:]!r}) scores {max(scores):g} instead of 1.0 with the reward "
        f"{reward.name}; choose the reward that fits the data set, or fix its `answer` column; for a reward that "
        "returns less than 1.0 to a bare answer, set rollout.gold_checked=0"
    )
