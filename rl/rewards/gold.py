"""Checks before step 0 that the reward gives the dataset's own answers at least 1.0."""

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
    """Run `averify_gold` outside an event loop."""
    return asyncio.run(averify_gold(reward, rows, n))


async def averify_gold(
    reward: AsyncRewardWrapper | Callable[..., Any] | str, rows: Sequence[Mapping[str, Any]], n: int | None = 64
) -> int:
    r"""Score the gold answers of `n` rows (None: all), evenly spaced, and returns how many were checked.

    The completion is the gold answer in the dataset's own form, then as `\boxed{…}`; one of the two must score at least
    1.0.

    Raises:
        RewardError: a row without an `answer`, a gold answer that scores less, or a reward that fails on it; the
            message names the row.
    """
    if not isinstance(reward, AsyncRewardWrapper):
        with AsyncRewardWrapper(reward) as wrapper:
            return await averify_gold(wrapper, rows, n)
    count = len(rows) if n is None else min(n, len(rows))
    indices = [index * len(rows) // count for index in range(count)]
    await asyncio.gather(*(_check(reward, index, rows[index]) for index in indices))
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
            message = f"the reward fails on the gold answer of row {index} ({answer[-80:]!r}): {failure}"
            raise RewardError(message) from failure
        if scores[-1] >= 1.0:
            return
    raise RewardError(
        f"the gold answer of row {index} ({answer[-80:]!r}) scores {max(scores):g} instead of 1.0 with the reward "
        f"{reward.name}; choose the reward that fits the dataset, or fix its `answer` column; for a reward that "
        "returns less than 1.0 to a bare answer, set rollout.n_gold_checks=0"
    )
